"""What a user asks of generation, and what comes back, as vLLM has them. Importing this imports nothing large."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from twellc.base.errors import UserError
from twellc.base.records import OPTIONAL, Record
from twellc.generation.vllm_names import SAMPLING, refuse_others
from twellc.options.option import COUNT, LARGEST_SEED, NOT_NEGATIVE, POSITIVE, SHARE, Number, option, option_of

_T = TypeVar("_T")
DEFAULT_TOKENS = 128
_LEAST_TEMPERATURE = 1e-5
_NUMBER = Number(-math.inf)
_OR_ALL = Number(-1)
SEEDS = "an integer from 0 to 2^63 - 1"


class PromptError(UserError):
    """A mistake in one prompt of a call.

    Attributes:
        index: Which of the prompts, from 0 on.
    """

    def __init__(self, where: str, what: str, *, index: int = 0, **details: str) -> None:
        super().__init__(where, what, **details)
        self.index = index

    def of(self, index: int, where: str = "") -> PromptError:
        """Return the same mistake, of a prompt whose number is known, and perhaps another name."""
        other = self.at(where or self.where)
        other.index = index
        return other


def _answers_vllm(params: type[_T]) -> type[_T]:
    """Let the constructor take each name of vLLM, or say what is not there."""
    plain: Any = params.__init__
    known = [each.name for each in fields(params)]  # type: ignore[arg-type]

    @functools.wraps(plain)
    def init(self: _T, *given: Any, **named: Any) -> None:
        others = {name: named.pop(name) for name in list(named) if name not in known}
        refuse_others("SamplingParams", SAMPLING, known, others)
        plain(self, *given, **named)

    setattr(params, "__init__", init)  # noqa: B010, mypy forbids the assignment
    return params


@_answers_vllm
@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, and when that ends. Greedy unless `temperature` is 1e-5 or more.

    Names and their order are vLLM's. Other names of vLLM are taken, too, with values that ask for nothing.

    Attributes:
        n: Answers of a prompt. Those that are drawn differ, also with a seed.
        presence_penalty: Is subtracted from the logits of tokens that stand in the answer so far.
        frequency_penalty: Likewise, as often as a token stands there.
        repetition_penalty: Above 1 makes tokens less likely that stand in the prompt or the answer.
        temperature: 0, or less than 1e-5, takes the likeliest token; else logits are divided by it, and a token is
            drawn.
        top_p: Draw among the likeliest tokens, as many as it takes for their probabilities to add up to this.
        top_k: Number of likeliest tokens to draw among; 0 or -1: all.
        min_p: Draw among tokens whose probability is at least min_p times the largest.
        seed: Seed of what is drawn; None or -1 draws anew in each call.
        stop: Texts that end an answer; they are not part of it.
        stop_token_ids: Tokens that end an answer, besides those of the model.
        ignore_eos: Whether the model's own end tokens do not end an answer.
        max_tokens: New tokens of a prompt at most; None for as many as fit. The cache may end an answer earlier.
        min_tokens: New tokens of a prompt before a token or a text may end its answer.
        logprobs: How many of the likeliest tokens have their log probabilities beside the chosen one's, in each step:
            0 for the chosen one alone, -1 for all tokens, None for none.
        prompt_logprobs: Likewise, of each token of the prompt but the first.
        detokenize: Whether answers have texts.
        skip_special_tokens: Whether special tokens are left out of texts.
        include_stop_str_in_output: Whether what ends an answer is part of its text.
        truncate_prompt_tokens: Number of last tokens of a prompt to take; -1 for as many as fit, None for all.
        logit_bias: What is added to the logits of tokens, by token.
        allowed_token_ids: The tokens that are chosen among; None for all.
        bad_words: Texts that an answer does not have. What stands at the end of the prompt may begin one.
    """

    n: int = option(1, "N", COUNT)
    presence_penalty: float = option(0.0, "X", _NUMBER)
    frequency_penalty: float = option(0.0, "X", _NUMBER)
    repetition_penalty: float = option(1.0, "X", POSITIVE)
    temperature: float = option(0.0, "X", NOT_NEGATIVE)
    top_p: float = option(1.0, "X", Number(0.0, 1.0, above=True))
    top_k: int = option(0, "N", _OR_ALL)
    min_p: float = option(0.0, "X", SHARE)
    seed: int | None = option(None, "N", Number(-1, LARGEST_SEED))
    stop: str | Sequence[str] | None = option(None, "TEXT")
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = option(DEFAULT_TOKENS, "N", COUNT)
    min_tokens: int = option(0, "N", Number(0))
    logprobs: int | None = option(None, "N", _OR_ALL)
    prompt_logprobs: int | None = option(None, "N", _OR_ALL)
    _: KW_ONLY
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = option(None, "N", _OR_ALL)
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            UserError: One is out of its range, or of another kind.
        """
        for each in fields(self):
            value, how = getattr(self, each.name), option_of(each)
            if how is not None and isinstance(how.kind, Number) and (value is not None or "None" not in str(each.type)):
                if how.kind.fault(value):
                    raise misfit(each.name, value, str(how.kind))
            elif isinstance(each.default, bool) and not isinstance(value, bool):
                raise misfit(each.name, value, "True or False")
        allowed, bias, words = self.allowed_token_ids, self.logit_bias, self.bad_words
        tokens = _several(self.stop_token_ids, int) and min(self.stop_tokens, default=0) >= 0
        chosen = allowed is None or (_several(allowed, int) and min(allowed, default=-1) >= 0)
        spelt = not isinstance(words, str) and _several(words, str) and all(words or ())
        for name, holds, expected in (
            ("stop", _several(self.stop, str) and all(self.stops), "texts that are not empty"),
            ("stop_token_ids", tokens, "token ids"),
            ("stop", self.detokenize or not self.stops, "none with detokenize=False: answers have no texts"),
            (
                "truncate_prompt_tokens",
                self.truncate_prompt_tokens != 0,
                "an integer from 1 on, or -1 for all that fit",
            ),
            ("logit_bias", bias is None or _is_bias(bias), "a mapping from token ids to numbers"),
            ("allowed_token_ids", chosen, "token ids, at least one"),
            ("bad_words", spelt, "a list of texts that are not empty"),
        ):
            if not holds:
                raise misfit(name, getattr(self, name), expected)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            expected = f"max_tokens, {self.max_tokens}, at most"
            raise UserError("min_tokens", "is out of its range", got=shown(self.min_tokens), expected=expected)

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


def misfit(name: str, value: object, expected: str) -> UserError:
    """Return the mistake of a value that is out of its range, or of another kind than is expected."""
    kinds = [int] if expected.startswith("an integer") else [int, float] if expected.startswith("a number") else []
    ranged = type(value) in kinds
    what = "is out of its range" if ranged else "does not take this value"
    return UserError(name, what, got=shown(value), expected=expected)


def shown(value: object) -> str:
    """Return how a message shows a value; Python writes no integers of more than some thousand digits."""
    try:
        return repr(value)[:80]
    except ValueError:
        return f"{type(value).__name__} of too many digits"


def is_seed(value: object) -> bool:
    """Whether it is a seed of what is drawn, or None."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return value is None
    return 0 <= int(value) <= LARGEST_SEED


def _is_bias(value: object) -> bool:
    """Whether these are numbers by token."""
    return isinstance(value, Mapping) and all(
        not Number(0).fault(token) and not _NUMBER.fault(each) for token, each in value.items()
    )


def _several(values: object, kind: type) -> bool:
    """Whether these are several of a kind; a text counts as several texts, and so does None."""
    if values is None or (kind is str and isinstance(values, str)):
        return True
    return isinstance(values, Collection) and all(type(each) is kind for each in values)


@dataclass
class Logprob(Record):
    """How likely a token was.

    Attributes:
        logprob: Its log probability; its logit with a `logprobs_mode` of logits.
        rank: 1 for the likeliest token, 2 for the next, and so on.
        decoded_token: Its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]


@dataclass
class CompletionOutput(Record):
    """An answer.

    Attributes:
        index: Its number among those of its prompt.
        text: Its text; in a stream the piece since the last output.
        token_ids: Its tokens, the one that ended it included; in a stream those since the last output.
        finish_reason: `stop` where an end token or a stop text ended it, `length` where `max_tokens` or the cache did;
            None in a stream that goes on.
        stop_reason: The stop text or the token of `stop_token_ids` that ended it.
        logprobs: Of each of these tokens the chosen one and the likeliest, by token; None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Logprobs] | None = field(default=None, metadata=OPTIONAL)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log probabilities of these tokens; None unless asked for."""
        if self.logprobs is None:
            return None
        return sum(each[token].logprob for token, each in zip(self.token_ids, self.logprobs, strict=True))


@dataclass
class RequestOutput(Record):
    """A prompt and its answer.

    Attributes:
        request_id: The number of the prompt in its call.
        prompt: The prompt; None where it was given as tokens.
        prompt_token_ids: Its tokens.
        outputs: The answers; in a stream the one that has news.
        finished: Whether nothing more comes.
        prompt_logprobs: Of each token of the prompt itself and the likeliest in its place, by token; None for the first
            token, and unless asked for. A stream has them in the first output of a prompt.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None = field(default=None, metadata=OPTIONAL)


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
