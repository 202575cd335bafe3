"""How the next tokens are chosen, by processors of transformers: each prompt by those that it would have alone.

transformers makes processors and criteria for each prompt by itself, without padding, so that lengths and totals which
they hold are its own. They are called with the rows of that prompt alone. Those of transformers that hold nothing of a
prompt but its length are shared by all prompts of one length; those that look at the scores and at which tokens there
are by all prompts. Those of the scores alone can be in a CUDA graph, which reads their values from the device, so that
it holds for all values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from twellc.base.errors import UserError

# These look at the scores alone, and wait for nothing; each with the name of its value.
_OF_SCORES: dict[type, str] = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
# These hold nothing of a prompt but its length, and run none of the user's code.
_OF_A_LENGTH = (
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TopHLogitsWarper", "TypicalLogitsWarper",
)  # fmt: skip
# How many processors a graph holds at most: as many values there are on the device.
MOST_VALUES = 8
# A graph takes the k-th largest score from this many of the largest, or from all: few graphs hold for every k.
_LARGEST = (64, 1024)


@dataclass(eq=False)
class Prompt:
    """A prompt, and what transformers makes of the arguments of `generate` for it alone.

    Attributes:
        tokens: Its rows, one for each answer: int64 [answers, tokens], on the CPU.
        processors: What changes the scores.
        criteria: What ends a row besides.
        ends: The tokens that end a row.
        most: How many new tokens a row gets at most.
    """

    tokens: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    ends: frozenset[int]
    most: int


def are_of_scores(processors: LogitsProcessorList) -> bool:
    """Whether processors look at the scores alone, and can be in a CUDA graph."""
    return len(processors) <= MOST_VALUES and all(type(each) in _OF_SCORES for each in processors)


def are_of_a_set(processors: LogitsProcessorList) -> bool:
    """Whether processors look at the scores and at which tokens there are, but not at how many, or where."""
    return all(type(each) in _OF_SCORES or _is_penalty(each) for each in processors)


def _is_penalty(processor: Any) -> bool:
    ignored = getattr(processor, "prompt_ignore_length", None)
    return type(processor) is RepetitionPenaltyLogitsProcessor and ignored is None


def are_of_a_length(processors: LogitsProcessorList) -> bool:
    """Whether processors hold nothing of a prompt but its length."""
    known = {*_OF_SCORES, OutputPenalties}
    return all(type(each) in known or _is_one_of(each, _OF_A_LENGTH) for each in processors)


def _is_one_of(processor: Any, names: Sequence[str]) -> bool:
    name = type(processor).__name__
    return name in names and getattr(transformers, name, None) is type(processor)


class OutputPenalties(LogitsProcessor):
    """OpenAI's penalties: of each token, by whether and how often it stands in the answer so far.

    Attributes:
        presence: Is subtracted from the logits of tokens that stand there.
        frequency: Likewise, as often as they do.
        length: How many tokens a prompt has.
    """

    def __init__(self, presence: float, frequency: float, length: int = 0) -> None:
        self.presence, self.frequency, self.length = presence, frequency, length

    def behind(self, length: int) -> OutputPenalties:
        """Return the same for a prompt of a length."""
        return OutputPenalties(self.presence, self.frequency, length)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [rows, vocabulary] behind tokens [rows, tokens]."""
        answer = input_ids[:, self.length :]
        counts = torch.zeros_like(scores).scatter_add_(-1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class _Processor(Protocol):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor: ...


@dataclass(eq=False)
class _Rows:
    """Rows of the same processors, of one length or with copies of their first tokens before them.

    Attributes:
        numbers: Which rows of the batch.
        index: Likewise, on the device.
        known: Their tokens so far, [rows, tokens], on the device.
        processors: What changes their scores.
    """

    numbers: list[int]
    index: Tensor
    known: Tensor
    processors: _Processor


class Choice:
    """How the next tokens of a call are chosen.

    Attributes:
        key: What makes the choice differ from others in a graph; None where it cannot be in one.
        values: Values of the processors in a graph.
        may_run_ahead: Whether a step may run before it is known which rows the last one has ended: no code of the user
            sees what it computes for these.
    """

    def __init__(
        self, prompts: Sequence[Prompt], draws: bool, pad: int, ended: list[bool], device: torch.device, seeded: bool
    ) -> None:
        """Take the prompts of a call.

        Args:
            prompts: The prompts.
            draws: Whether tokens are drawn.
            pad: What stands behind the end of a row.
            ended: Which rows have ended; read in each step.
            device: Where the logits are.
            seeded: Whether each prompt draws as if it were alone.
        """
        answers = len(prompts[0].tokens)
        self._draws, self._pad, self._ended = draws, pad, ended
        self._noises = answers if seeded else answers * len(prompts)
        self.may_run_ahead = all(are_of_a_length(prompt.processors) for prompt in prompts)
        self.key: tuple[Any, ...] | None = None
        self.values: list[float] = []
        self._chain: list[tuple[Any, str]] = []
        self._rows: list[_Rows] = []
        if all(are_of_scores(prompt.processors) for prompt in prompts):
            self._chain = [(each, _OF_SCORES[type(each)]) for each in prompts[0].processors]
            self.values = [float(getattr(each, name)) for each, name in self._chain]
            self.key = (draws, self._noises, *(_kind(each, name) for each, name in self._chain))
            return
        alike: dict[int, list[int]] = {}
        for number, prompt in enumerate(prompts):
            alike.setdefault(id(prompt.processors), []).append(number)
        for several in alike.values():
            numbers = [number * answers + row for number in several for row in range(answers)]
            width = max(prompts[number].tokens.shape[1] for number in several)
            known = torch.cat([_widened(prompts[number].tokens, width) for number in several]).to(device)
            processors: Any = prompts[several[0]].processors
            self._rows.append(_Rows(numbers, torch.tensor(numbers, device=device), known, processors))

    def observe(self, tokens: Tensor) -> None:
        """Take the last tokens of all rows, int64 [batch]; what has ended goes on with padding."""
        if self._rows and any(self._ended):
            over = torch.tensor(self._ended, device=tokens.device)
            tokens = torch.where(over, self._pad, tokens)
        for rows in self._rows:
            rows.known = torch.cat([rows.known, tokens[rows.index, None]], dim=-1)

    def tokens(self, scores: Tensor, generator: torch.Generator) -> Tensor:
        """Choose the next tokens.

        Args:
            scores: float32 [batch, vocabulary].
            generator: What draws.

        Returns:
            int64 [batch].

        Raises:
            UserError: Processors leave nothing to draw from.
        """
        if not self._draws:
            return scores.argmax(-1)
        # torch.multinomial in its own words, with the same noise for every prompt.
        noise = scores.new_empty(self._noises, scores.shape[-1]).exponential_(generator=generator)
        likely: Tensor = scores.softmax(-1).unflatten(0, (-1, self._noises)) / noise
        if not self.may_run_ahead or scores.device.type == "cpu":  # elsewhere nothing waits for the device
            self._refuse_nothing(likely.flatten(0, 1))
        return likely.argmax(-1).flatten()

    def _refuse_nothing(self, likely: Tensor) -> None:
        """Fail where processors leave a row no token."""
        for row, (has_none, over) in enumerate(zip(likely.isnan().any(-1).tolist(), self._ended, strict=True)):
            if has_none and not over:
                what = "leave no token that could be drawn"
                fix = "Let them leave the score of at least one token finite."
                raise UserError("logits processors", what, got=f"no finite score in row {row}", fix=fix)

    def scores(self, logits: Tensor, values: Tensor) -> Tensor:
        """Return what tokens are chosen from, float32 [batch, vocabulary].

        Args:
            logits: Likewise.
            values: `self.values`, float64, on the device.
        """
        if self.key is not None:
            scores = logits
            for (each, name), value in zip(self._chain, values, strict=False):
                scores = _with_value(each, name, value)(scores[:, :0], scores)
            return scores
        scores = logits.clone()
        for rows in self._rows:
            if not all(self._ended[number] for number in rows.numbers):
                scores[rows.index] = rows.processors(rows.known, logits[rows.index])
        return scores


def _widened(tokens: Tensor, width: int) -> Tensor:
    """Put copies of the first token before a prompt: where lengths differ, processors look at a set of tokens."""
    return torch.cat([tokens[:, :1].expand(-1, width - tokens.shape[1]), tokens], dim=-1)


def _kind(processor: Any, name: str) -> tuple[Any, ...]:
    """Return what a graph with a processor holds of it: all but its value."""
    others = {key: value for key, value in vars(processor).items() if key != name}
    width = _width(processor.top_k) if isinstance(processor, TopKLogitsWarper) else None
    return type(processor), width, repr(sorted(others.items()))


def _with_value(processor: Any, name: str, value: Tensor) -> _Processor:
    """Return a processor that reads its value, float64 [], from the device."""
    if isinstance(processor, TopKLogitsWarper):
        return _TopK(_width(processor.top_k), value, processor.filter_value)
    same: _Processor = copy.copy(processor)
    setattr(same, name, value)
    return same


def _width(k: int) -> int | None:
    return next((width for width in _LARGEST if k <= width), None)


@dataclass(frozen=True)
class _TopK:
    """`TopKLogitsWarper` with its k on the device; `width` is at least k, None is the whole vocabulary."""

    width: int | None
    k: Tensor
    filter_value: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        vocabulary = scores.shape[-1]
        largest = scores.topk(min(self.width or vocabulary, vocabulary)).values
        place = self.k.long().clamp(max=largest.shape[-1]) - 1
        return scores.masked_fill(scores < largest.index_select(-1, place.view(1)), self.filter_value)
