"""What a user asks of generation, and what comes back, as vLLM has them. Importing this imports nothing large."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from twellc.base.errors import UserError
from twellc.base.records import Record
from twellc.options.samples import LARGEST_SEED

DEFAULT_TOKENS = 128
_LEAST_TEMPERATURE = 1e-5
_LARGEST = sys.float_info.max
SEEDS = "an integer from 0 to 2^63 - 1"


class PromptError(UserError):
    """A mistake in one prompt of a call.

    Attributes:
        index: Which of the prompts, from 0 on.
    """

    def __init__(self, where: str, what: str, *, index: int = 0, **details: str) -> None:
        super().__init__(where, what, **details)
        self.index = index
        self._where, self._details = where, (what, details)

    def at(self, index: int, where: str = "") -> PromptError:
        """Return the same mistake, of a prompt whose number is known, and perhaps another name."""
        what, details = self._details
        return PromptError(where or self._where, what, index=index, **details)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when that ends. Greedy unless `temperature` is 1e-5 or more.

    Attributes:
        max_tokens: New tokens of a prompt at most. The cache may end an answer earlier.
        temperature: 0, or less than 1e-5, takes the likeliest token; else logits are divided by it, and a token is
            drawn.
        top_k: Draw among the so many likeliest tokens; 0 or -1: among all.
        top_p: Draw among the likeliest tokens whose probabilities add up to so much.
        min_p: Draw among tokens that are at least so many times as likely as the likeliest.
        repetition_penalty: Above 1 makes tokens less likely that stand in the prompt or the answer.
        seed: Seed of what is drawn; None draws anew in each call.
        stop: Texts that end an answer; they are not part of it.
        stop_token_ids: Tokens that end an answer, besides those of the model.
        ignore_eos: Whether the model's own end tokens do not end an answer.
        skip_special_tokens: Whether special tokens are left out of texts.
    """

    max_tokens: int = DEFAULT_TOKENS
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UserError: One is out of its range.
        """
        for name, holds, expected in (
            ("max_tokens", _whole(self.max_tokens) and self.max_tokens >= 1, "an integer from 1 on"),
            ("temperature", _number(self.temperature) and 0 <= self.temperature <= _LARGEST, "a number from 0 on"),
            ("top_k", _whole(self.top_k) and self.top_k >= -1, "an integer from 1 on; 0 or -1 for all tokens"),
            ("top_p", _number(self.top_p) and 0 < self.top_p <= 1, "a number above 0, and 1 at most"),
            ("min_p", _number(self.min_p) and 0 <= self.min_p <= 1, "a number from 0 to 1"),
            (
                "repetition_penalty",
                _number(self.repetition_penalty) and 0 < self.repetition_penalty <= _LARGEST,
                "a number above 0",
            ),
            ("seed", is_seed(self.seed), SEEDS),
            ("stop", _several(self.stop, str) and all(self.stops), "texts that are not empty"),
            (
                "stop_token_ids",
                _several(self.stop_token_ids, int) and min(self.stop_tokens, default=0) >= 0,
                "token ids",
            ),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            ("skip_special_tokens", isinstance(self.skip_special_tokens, bool), "True or False"),
        ):
            if not holds:
                raise UserError(name, "is out of its range", got=repr(getattr(self, name)), expected=expected)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end an answer, besides those of the model."""
        return frozenset(self.stop_token_ids or ())

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn. Logits are not divided by so little that they would be infinite."""
        return self.temperature >= _LEAST_TEMPERATURE


def is_seed(value: object) -> bool:
    """Whether it is a seed of what is drawn, or None."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return value is None
    return 0 <= int(value) <= LARGEST_SEED


def _whole(value: object) -> bool:
    return type(value) is int


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _several(values: object, kind: type) -> bool:
    """Whether these are several of a kind; a text is one of itself, and None is none."""
    if values is None or (kind is str and isinstance(values, str)):
        return True
    return isinstance(values, Collection) and all(type(each) is kind for each in values)


@dataclass
class CompletionOutput(Record):
    """An answer.

    Attributes:
        index: Its number among those of its prompt: 0.
        text: Its text; in a stream the piece since the last output.
        token_ids: Its tokens, the one that ended it included; in a stream those since the last output.
        finish_reason: `stop` where an end token or a stop text ended it, `length` where `max_tokens` or the cache did;
            None in a stream that goes on.
        stop_reason: The stop text or the token of `stop_token_ids` that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput(Record):
    """A prompt and its answer.

    Attributes:
        request_id: The number of the prompt in its call.
        prompt: The prompt; None where it was given as tokens.
        prompt_token_ids: Its tokens.
        outputs: The answer.
        finished: Whether nothing more comes.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


@dataclass
class GenerationStats(Record):
    """How long a call took.

    Attributes:
        backend: What computed.
        sequences: How many prompts there were.
        prompt_tokens: Their tokens.
        new_tokens: Tokens of the answers.
        first_token_seconds: From the beginning to the first token of each answer.
        decode_seconds: From there to the end.
        steps: How many steps were computed: one more than were needed, where a GPU works ahead of the host.
        gap_us: Between two steps, microseconds on average that the device had nothing to do; None for one step.
        gap_share: The share of these in the time of steps and gaps together.
        graph: Whether the whole step, sampling included, was one CUDA graph.
    """

    backend: str = ""
    sequences: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    gap_us: float | None = None
    gap_share: float | None = None
    graph: bool = False

    computed: ClassVar[tuple[str, ...]] = ("prefill_tokens_per_second", "decode_tokens_per_second")

    @property
    def prefill_tokens_per_second(self) -> float:
        """Tokens of prompts a second, up to the first new tokens."""
        return self.prompt_tokens / self.first_token_seconds if self.first_token_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens a second behind the first of each answer."""
        later = self.new_tokens - self.sequences
        return later / self.decode_seconds if self.decode_seconds else 0.0
