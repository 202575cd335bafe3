"""`twellc.LLM`: text from a plan or a Hugging Face directory, in the shape of vLLM's class of that name."""

from __future__ import annotations

import functools
import numbers
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedConfig, StoppingCriteriaList

from twellc.base.errors import UserError
from twellc.generation.choice import OutputPenalties
from twellc.generation.directory import load_directory
from twellc.generation.logprobs import MODES, RAW, Wanted
from twellc.generation.model import CausalModel
from twellc.generation.plan import load_plan
from twellc.generation.sampling import (
    CompletionOutput,
    GenerationStats,
    Logprobs,
    PromptError,
    RequestOutput,
    SamplingParams,
)
from twellc.generation.steps import Step
from twellc.generation.text import Answer, Messages, load_codec
from twellc.generation.vllm_names import CALL, ENGINE, PROMPT, refuse_others
from twellc.loaders.checkpoint import pad_token
from twellc.options.commands import LLMOptions
from twellc.options.source import refuse_missing
from twellc.options.weights import KEEP

Stream = Generator[RequestOutput, None, None]
_T = TypeVar("_T")
_U = TypeVar("_U")
# Arrays and tensors of integers, too.
Prompt = str | Sequence[int] | Mapping[str, Any] | Any
Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams] | None
# Names of precisions in vLLM and torch.
_DTYPES: dict[str, str | None] = {
    "auto": None,
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
_CACHE_DTYPES: Mapping[Any, str] = {None: "auto", "fp8_e4m3": "fp8"}


class LLM:
    """A causal language model that answers.

    Args:
        model: A Hugging Face directory, or a plan of `twellc compile --kv-cache`.
        tokenizer: A directory with its tokenizer; None is the model's own.
        device: Where it runs: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` and None are the GPU where torch sees one.
            A plan runs on a GPU.
        dtype: In which precision: `bf16`, `fp16` or `fp32`, or a name of vLLM; None and `auto` are that of the
            weights, on a GPU bf16 for float32.
        max_model_len: Tokens of a prompt and its answer together, but for the answer's last, which takes no place
            in the cache; None makes the cache as it is needed.
        compiled: Whether torch.compile compiles a directory: faster, after minutes.
        layers: Which feed-forward blocks of a directory the `twell` ops compute, see `twellc.optimize`.
        weights: `keep`: as a directory has them; `fp8:blocks`: these blocks are quantised to FP8; `fp8`:
            and the linear layers outside of them.
        fp8_error: With these: leave a block as it is where, on `text`, FP8 changes its output by more than
            this: the norm of the difference over the norm of the output. Linear layers are left, too.
        kv_cache_dtype: The type of the cache of keys and values: `auto`, that of the model or the plan; `fp8`, which
            vLLM also calls `fp8_e4m3`, of a directory in 16 bits: E4M3, with a scale for the keys and one for the
            values of each layer, which are the checkpoint's `k_scale` and `v_scale`, else measured on `text`, else 1.
        text: With `fp8_error`, or an `fp8` cache: a file with text, in UTF-8, which the tokenizer of the directory
            reads.
        skip_tokenizer_init: Whether no tokenizer is read: prompts and answers are token ids. So they are of a model
            without one, too.
        logprobs_mode: What `SamplingParams(logprobs=…)` returns: `raw_logprobs`, log probabilities of what the
            model computes; `processed_logprobs`, of what tokens are chosen from, behind penalties, temperature and
            all else; `raw_logits` and `processed_logits` the logits in their place.
        max_num_batched_tokens: Prompts are computed in chunks of this many tokens, all rows together; None computes
            them at once, a plan in its own chunks.
        others: Other arguments of vLLM, with values that ask for nothing that is not there.

    Raises:
        UserError: There is no causal language model, or no such device; or an argument is of another kind, or asks
            for what is not there.

    Attributes:
        model: The model as one of transformers: `llm.model.generate(…)` takes what transformers' `generate` does.
        notes: What the user should know.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = "auto",
        dtype: str | torch.dtype | None = None,
        max_model_len: int | None = None,
        compiled: bool = False,
        layers: str = "auto",
        weights: str = KEEP,
        fp8_error: float | None = None,
        kv_cache_dtype: str = "auto",
        text: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        logprobs_mode: str = RAW,
        max_num_batched_tokens: int | None = None,
        **others: Any,
    ) -> None:
        idle = refuse_others("twellc.LLM", ENGINE, tuple(type(self).__init__.__kwdefaults__ or ()), others)
        precision: Any = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
        if isinstance(precision, str):
            precision = _DTYPES.get(precision, precision)
        _refuse_other_kinds(model, tokenizer, max_model_len, compiled, skip_tokenizer_init, max_num_batched_tokens)
        if logprobs_mode not in MODES:
            what = "no such choice"
            raise UserError("logprobs_mode", what, got=repr(logprobs_mode), expected=" or ".join(MODES))
        if skip_tokenizer_init and tokenizer is not None:
            raise UserError("tokenizer", "is not read with skip_tokenizer_init=True", fix="Leave one of them out.")
        path = Path(model)
        refuse_missing(path, "a Hugging Face directory, or a plan")
        settings: Any = GenerationConfig
        plain_config: Any = PreTrainedConfig
        options = LLMOptions(
            device="auto" if device is None else str(device),
            dtype=precision,
            max_model_len=max_model_len,
            compiled=compiled,
            layers=layers,
            weights=weights,
            fp8_error=fp8_error,
            kv_cache_dtype=_CACHE_DTYPES.get(kv_cache_dtype, kv_cache_dtype),
            text=None if text is None else Path(text),
        )
        if path.is_dir():
            backend, cache, notes = load_directory(path, options)
            folder = path
        else:
            _refuse_of_a_plan(options)
            backend, cache = load_plan(path, options.device)
            notes = []
            folder = path.with_name(cache.text or path.name)
            if max_model_len is not None and max_model_len != backend.longest:
                what = "is not that of the plan"
                fix = "Leave it out, or compile the model with another --kv-cache."
                raise UserError("max_model_len", what, got=str(max_model_len), expected=str(backend.longest), fix=fix)
        config, ends = plain_config(vocab_size=backend.vocabulary), cache.end_tokens
        pad = pad_token(folder)
        pad = pad if pad is not None else ends[0] if ends else 0
        self.model = CausalModel(backend, config, settings(eos_token_id=ends or None, pad_token_id=pad))
        self._ends = set(ends)
        if tokenizer is not None and not Path(tokenizer).is_dir():
            raise UserError(f"tokenizer {tokenizer}", "there is no such folder", expected="a folder with a tokenizer")
        texts = Path(tokenizer) if tokenizer is not None else folder
        self._codec = load_codec(texts, backend.vocabulary, skip_tokenizer_init)
        self._mode, self.model.decoder.most_tokens = logprobs_mode, max_num_batched_tokens
        self.notes = [*notes, *([self._codec.note] if self._codec.note else [])]
        self.notes += [f"these arguments have no effect here: {', '.join(idle)}"] if idle else []

    @property
    def stats(self) -> GenerationStats:
        """How long the last call took."""
        return self.model.decoder.stats

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer knows how to write a conversation."""
        return self._codec.has_template

    def get_tokenizer(self) -> Any:
        """Return transformers' tokenizer; None where text is bytes, or there is none."""
        return self._codec.tokenizer

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once.

        Args:
            prompts: A text, its tokens, also as an array or tensor of integers, or a mapping with `prompt` or
                `prompt_token_ids`; or several of these.
            sampling_params: How tokens are chosen; None is greedy.
            logits_processor: Processors of transformers, besides those of `sampling_params`.
            stopping_criteria: Criteria of transformers, likewise.
            others: Other arguments of vLLM, with values that ask for nothing that is not there.

        Raises:
            UserError: A prompt is empty or longer than the cache, or there are more than the model takes at once.
        """
        given = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria, **others}
        with self.model.decoder.lock:
            return joined(self.generate_stream(prompts, sampling_params, **given))

    def generate_stream(
        self,
        prompts: Prompts,
        sampling_params: Params = None,
        *,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        stopped: Callable[[], bool] | None = None,
        **others: Any,
    ) -> Stream:
        """Answer prompts as `generate` does, and give each piece of an answer as it comes.

        `stopped` is asked before each chunk of the prompts and before each step whether to give the answers up: the
        stream ends there.
        """
        refuse_others("LLM.generate", CALL, ("logits_processor", "stopping_criteria"), others)
        prompts = _as_lists(prompts)
        several: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        given = _each("prompts", several, self._tokens_of)
        texts, tokens = [text for text, _ in given], [tokens for _, tokens in given]
        asked = (logits_processor, stopping_criteria, stopped)
        return self._stream("prompts", texts, tokens, sampling_params, *asked)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, written down by the tokenizer's chat template.

        Args:
            messages: Mappings with `role` and `content`; or several such conversations.
            sampling_params: How tokens are chosen; None is greedy.
            chat_template: A template in place of the tokenizer's.
            chat_template_kwargs: What the template takes besides.
            others: Other arguments of vLLM: `tools`, `add_generation_prompt` and `continue_final_message` go to the
                template, others are taken with values that ask for nothing that is not there.

        Raises:
            UserError: There is no chat template, or see `generate`.
        """
        given = {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs, **others}
        with self.model.decoder.lock:
            return joined(self.chat_stream(messages, sampling_params, **given))

    def chat_stream(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Stream:
        """Answer conversations as `chat` does, and give each piece of an answer as it comes."""
        tokens = _each("messages", _conversations(messages), self._writer(chat_template, chat_template_kwargs, others))
        return self._stream("messages", [None] * len(tokens), tokens, sampling_params, None, None, None)

    def write(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[int]:
        """Return the tokens of a conversation as `chat` writes it down; it touches neither model nor cache."""
        return self._writer(chat_template, chat_template_kwargs, others)(messages)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a prompt as `generate` takes it, likewise."""
        return self._codec.encode(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included; empty without a tokenizer.

        Raises:
            UserError: The model does not have one of them.
        """
        if tokens:
            _refuse_other_tokens(self.model.decoder.backend.vocabulary, list(tokens))
        return self._codec.decode(tokens)

    def _writer(
        self, chat_template: str | None, chat_template_kwargs: Mapping[str, Any] | None, others: dict[str, Any]
    ) -> Callable[[Messages], list[int]]:
        """Return what writes conversations down, see `chat`."""
        names = ("tools", "add_generation_prompt", "continue_final_message")
        options = {name: others[name] for name in names if name in others} | dict(chat_template_kwargs or {})
        rest = {name: value for name, value in others.items() if name not in names}
        refuse_others("LLM.chat", CALL, ("chat_template", "chat_template_kwargs", *names), rest)

        def tokens_of(conversation: Messages) -> list[int]:
            _refuse_other_messages(conversation)
            return self._codec.conversation(conversation, chat_template, options)

        return tokens_of

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            names = ("prompt", "prompt_token_ids")
            refuse_others("a prompt", PROMPT, names, {name: prompt[name] for name in prompt if name not in names})
            text, tokens = map(prompt.get, names)
            given = text if tokens is None else tokens
        given = _as_lists(given)
        if isinstance(given, str):
            return given, self._codec.encode(given)
        if isinstance(given, bytes | bytearray) or not _holds_integers(given):
            got = repr(given)[:40] if isinstance(given, list | bytes) else type(given).__name__
            raise PromptError("a prompt", "is neither a text nor tokens", got=got, expected="a text, or integers")
        return None, list(map(int, given))

    def _stream(
        self,
        argument: str,
        texts: Sequence[str | None],
        prompts: Sequence[list[int]],
        sampling_params: Params,
        processors: LogitsProcessorList | None,
        criteria: StoppingCriteriaList | None,
        stopped: Callable[[], bool] | None,
    ) -> Stream:
        """Answer prompts of given tokens; yield of each that has news an output with these alone.

        Args:
            argument: What the user knows the prompts by, for messages.
            texts: Their texts.
            prompts: Their tokens.
            sampling_params: See `generate`.
            processors: Likewise.
            criteria: Likewise.
            stopped: See `generate_stream`.
        """
        params = _one_params(sampling_params)
        if not prompts:
            raise UserError("prompts", "there is none")
        vocabulary, longest = self.model.decoder.backend.vocabulary, self.model.decoder.backend.longest
        if params.truncate_prompt_tokens is not None:
            kept = longest if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            prompts = [prompt[-kept:] for prompt in prompts]
        _each(argument, prompts, functools.partial(_refuse_other_tokens, vocabulary))
        if params.stops:
            self._codec.refuse_without_texts()
        ends = params.stop_tokens | (set() if params.ignore_eos else self._ends)
        rows = [prompt for prompt in prompts for _ in range(params.n)]
        answers = [Answer(self._codec.stream(prompt, params.skip_special_tokens), params) for prompt in rows]
        # transformers copies prompts for answers that are drawn, and refuses to for others.
        steps = self._steps(prompts if params.draws else rows, params, sorted(ends), processors, criteria, stopped)
        of_prompts: list[list[Logprobs]] | None = None
        going, unread = set(range(len(rows))), set(range(len(prompts)))
        with _saying_which(argument, len(prompts), copies=params.n):
            for step in steps:
                of_prompts = step.prompt_logprobs or of_prompts
                for row in sorted(going):
                    index, output = row // params.n, self._output(step, row, answers[row], params, ends)
                    if step.ended[row]:
                        going.remove(row)
                    finished = going.isdisjoint(range(index * params.n, (index + 1) * params.n))
                    found = RequestOutput(str(index), texts[index], prompts[index], [output], finished)
                    if of_prompts is not None and index in unread:
                        unread.remove(index)
                        found.prompt_logprobs = [None, *map(self._named, of_prompts[index])]
                    yield found

    def _steps(
        self,
        rows: Sequence[list[int]],
        params: SamplingParams,
        ends: list[int],
        processors: LogitsProcessorList | None,
        criteria: StoppingCriteriaList | None,
        stopped: Callable[[], bool] | None,
    ) -> Iterator[Step]:
        """Decode behind rows of tokens until `ends`; for the others see `generate_stream`."""
        width = max(map(len, rows))
        input_ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        if params.presence_penalty or params.frequency_penalty:
            penalties = OutputPenalties(float(params.presence_penalty), float(params.frequency_penalty))
            processors = LogitsProcessorList([penalties, *(processors or ())])
        return self.model.steps(
            input_ids,
            attention_mask=seen,
            logits_processor=processors,
            stopping_criteria=criteria,
            seed=None if params.seed == -1 else params.seed,
            ignore_eos=True,
            wanted=Wanted(params.logprobs, params.prompt_logprobs, self._mode, params.n),
            stopped=stopped,
            **self._options(params, ends),
        )

    def _output(
        self, step: Step, row: int, answer: Answer, params: SamplingParams, ends: frozenset[int]
    ) -> CompletionOutput:
        """Return what a step adds to the answer of a row, and note in the step whether that ends the row.

        Args:
            step: The step.
            row: The row.
            answer: Its answer so far.
            params: How it is answered.
            ends: Tokens that end answers.
        """
        token = step.tokens[row]
        text = answer.put(token) if token not in ends or params.include_stop_str_in_output else ""
        step.ended[row] |= token in ends or bool(answer.stopped)
        output = CompletionOutput(row % params.n, text, [token])
        if step.logprobs is not None:
            output.logprobs = [self._named(step.logprobs[row])]
        if step.ended[row]:
            output.text += answer.end()
            output.stop_reason = answer.stopped or (token if token in params.stop_tokens else None)
            limited = step.limited[row] and token not in ends and not answer.stopped
            output.finish_reason = "length" if limited else "stop"
        return output

    def _named(self, found: Logprobs) -> Logprobs:
        """Return log probabilities with the texts of their tokens."""
        for token, each in found.items():
            each.decoded_token = self._codec.name(token)
        return found

    def _options(self, params: SamplingParams, ends: list[int]) -> dict[str, Any]:
        """Return what transformers calls the same; `ends` are the tokens that end an answer.

        Raises:
            UserError: The model does not have one of the tokens.
        """
        vocabulary, longest = self.model.decoder.backend.vocabulary, self.model.decoder.backend.longest
        for name in ("logit_bias", "allowed_token_ids"):
            others = [token for token in getattr(params, name) or () if token >= vocabulary]
            if others:
                what = "has a token that the model does not have"
                raise UserError(name, what, got=str(others[0]), expected=f"0 to {vocabulary - 1}")
        options: dict[str, Any] = {"max_new_tokens": params.max_tokens or longest, "do_sample": params.draws}
        if params.repetition_penalty != 1:
            options["repetition_penalty"] = float(params.repetition_penalty)
        if params.min_tokens and ends:
            options |= {"min_new_tokens": params.min_tokens, "eos_token_id": ends}
        if params.logit_bias:
            options["sequence_bias"] = {(token,): float(bias) for token, bias in params.logit_bias.items()}
        if params.allowed_token_ids is not None:
            options["suppress_tokens"] = sorted(set(range(vocabulary)).difference(params.allowed_token_ids)) or None
        if params.bad_words:
            # Where a word stands behind a space, it may be other tokens.
            words = [f"{space}{word.lstrip()}" for word in params.bad_words for space in ("", " ")]
            options["bad_words_ids"] = [self._codec.encode(word, special=False) for word in words]
        if params.draws:
            options |= {"num_return_sequences": params.n} if params.n > 1 else {}
            options |= {
                "temperature": float(params.temperature),
                "top_k": max(params.top_k, 0),
                "top_p": float(params.top_p),
            }
            options |= {"min_p": params.min_p} if params.min_p > 0 else {}
        return options


def _one_params(given: Params) -> SamplingParams:
    """Return the one `SamplingParams` of a call.

    Raises:
        UserError: There are several that differ, or it is something else.
    """
    several = list(given) if isinstance(given, Sequence) else [SamplingParams() if given is None else given]
    if not several or not all(isinstance(each, SamplingParams) for each in several):
        raise UserError("sampling_params", "is not a SamplingParams", got=repr(given)[:80])
    if any(each != several[0] for each in several):
        what = "prompts of one call have the same SamplingParams"
        raise UserError("sampling_params", what, got=f"{len(several)} that differ", fix="Make a call for each.")
    return several[0]


def _refuse_other_kinds(
    model: object, tokenizer: object, max_model_len: object, compiled: object, skips: object, most_tokens: object
) -> None:
    """Fail for arguments that are of another kind than `LLM` takes."""
    is_whole = isinstance(max_model_len, numbers.Integral) and not isinstance(max_model_len, bool)
    is_count = most_tokens is None or (type(most_tokens) is int and most_tokens >= 1)
    for name, value, holds, expected in (
        ("model", model, isinstance(model, str | os.PathLike), "a path"),
        ("tokenizer", tokenizer, tokenizer is None or isinstance(tokenizer, str | os.PathLike), "a path"),
        ("max_model_len", max_model_len, max_model_len is None or is_whole, "an integer"),
        ("compiled", compiled, isinstance(compiled, bool), "True or False"),
        ("skip_tokenizer_init", skips, isinstance(skips, bool), "True or False"),
        ("max_num_batched_tokens", most_tokens, is_count, "an integer from 1 on"),
    ):
        if not holds:
            raise UserError(name, "is not what twellc.LLM takes", got=repr(value)[:80], expected=expected)


def _refuse_of_a_plan(options: LLMOptions) -> None:
    """Fail if options are given that a plan has no choice of."""
    for name in ("dtype", "compiled", "layers", "weights", "fp8_error", "kv_cache_dtype", "text"):
        if getattr(options, name) != getattr(LLMOptions(), name):
            raise UserError(name, "is of directories alone: a plan is what it was compiled to be", fix="Leave it out.")


def _each(argument: str, given: Sequence[_T], taken: Callable[[_T], _U]) -> list[_U]:
    """Take one prompt after the other.

    Raises:
        PromptError: There is a mistake in one: it says in which.
    """
    results = []
    for index, each in enumerate(given):
        with _saying_which(argument, len(given), index):
            results.append(taken(each))
    return results


@contextmanager
def _saying_which(argument: str, count: int, index: int | None = None, copies: int = 1) -> Iterator[None]:
    """Let a mistake in one of several prompts say in which.

    `index` says it where the mistake does not know; it may know the row of a prompt that has several, `copies`.
    """
    try:
        yield
    except PromptError as error:
        index = error.index // copies if index is None else index
        raise error.of(index, f"{argument}[{index}]" if count > 1 else "") from error


def _refuse_other_tokens(vocabulary: int, prompt: list[int]) -> None:
    """Fail if a prompt is empty, or has a token outside of the vocabulary."""
    if not prompt:
        raise PromptError("a prompt", "is empty", fix="Give at least one token.")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        what = "has a token that the model does not have"
        raise PromptError("a prompt", what, got=str(max(prompt, key=abs)), expected=f"0 to {vocabulary - 1}")


def _conversations(given: Any) -> list[Messages]:
    """Return conversations, of which one may be given by itself."""
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if several and isinstance(several[0], Mapping) and given is not several[0]:
        several = [several]
    return several


def _refuse_other_messages(given: Any) -> None:
    """Fail for anything but a conversation."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not given or not all(map(_is_message, given)):
        expected = '[{"role": "user", "content": "…"}]'
        raise PromptError("a conversation", "is not a list of messages", got=repr(given)[:80], expected=expected)


def _is_message(given: Any) -> bool:
    """Whether it is one, also of several parts, or of calls of tools alone."""
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        return False
    return isinstance(given.get("content"), str | list) or "tool_calls" in given


def _as_lists(given: Any) -> Any:
    """Return an array or a tensor of integers or texts as lists; everything else as it is.

    Raises:
        PromptError: It is of another type, or a number by itself.
    """
    if not hasattr(given, "tolist") or not hasattr(given, "dtype") or isinstance(given, numbers.Integral):
        return given
    values = given.tolist()
    kind = str(given.dtype).removeprefix("torch.")
    is_text = isinstance(values, list) and all(isinstance(each, str) for each in values)
    if not isinstance(values, list) or not ("int" in kind.lower() or is_text):
        what = "is an array, but not one of token ids"
        expected = "integers, [tokens], or [prompts, tokens] for several"
        raise PromptError("a prompt", what, got=f"{kind} {list(given.shape)}", expected=expected)
    return values


def _holds_integers(given: Any) -> bool:
    return isinstance(given, Sequence) and all(
        isinstance(token, numbers.Integral) and not isinstance(token, bool) for token in given
    )


def _is_one(prompts: Any) -> bool:
    """Whether it is one prompt, and not several."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], numbers.Integral)


def joined(pieces: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Return the whole answers of a stream."""
    whole: dict[str, RequestOutput] = {}
    for piece in pieces:
        known = whole.setdefault(piece.request_id, piece)
        if known is piece:
            continue
        known.finished, (more,) = piece.finished, piece.outputs
        answer = next((each for each in known.outputs if each.index == more.index), None)
        if answer is None:
            known.outputs.append(more)
            continue
        answer.text += more.text
        answer.token_ids += more.token_ids
        answer.finish_reason, answer.stop_reason = more.finish_reason, more.stop_reason
        if answer.logprobs is not None:
            answer.logprobs += more.logprobs or []
    return [whole[key] for key in sorted(whole, key=int)]
