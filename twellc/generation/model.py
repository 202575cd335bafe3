"""A backend as a model of transformers: `generate` with all that transformers makes of its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from twellc.base.errors import UserError
from twellc.base.transformers_private import allowed_by_prefix, padding_token, without_state
from twellc.generation.backend import Backend
from twellc.generation.choice import OutputPenalties, Prompt, are_of_a_length, are_of_a_set
from twellc.generation.logprobs import Wanted
from twellc.generation.sampling import SEEDS, is_seed, shown
from twellc.generation.steps import Decoder, Step


class _Made(NamedTuple):
    """What transformers makes of the arguments of `generate`.

    Attributes:
        answers: How many rows there are.
        mask: Which tokens are not padding; None for all.
        processors: What changes the scores.
        criteria: What ends a row.
        config: Everything else.
    """

    answers: int
    mask: Tensor | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


@without_state
class CausalModel(GenerationMixin):
    """A causal language model over a `Backend`, as far as generation is concerned.

    Logits processors, stopping criteria and streamers are transformers' own, or yours; decoding is `Decoder`'s.
    Searches over beams and assistants are not there.

    Attributes:
        decoder: What decodes.
        config: A configuration of transformers.
        generation_config: What `generate` does unless told otherwise.
    """

    main_input_name = "input_ids"

    def __init__(self, backend: Backend, config: PreTrainedConfig, generation_config: GenerationConfig) -> None:
        self.decoder, self.config, self.generation_config = Decoder(backend), config, generation_config
        self.device, self.dtype = backend.device, torch.float32

    def can_generate(self) -> bool:
        """Say that it does."""
        return True

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutputWithPast:
        """Return the logits behind prompts [batch, tokens] that are padded on the left: [batch, 1, vocabulary]."""
        with torch.no_grad():
            rows = _without_padding(input_ids.cpu(), attention_mask)
            return CausalLMOutputWithPast(logits=self.decoder.logits(rows)[:, None])

    __call__ = forward

    def steps(
        self,
        input_ids: Tensor,
        *,
        wanted: Wanted | None = None,
        stopped: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Iterator[Step]:
        """Return the steps of `generate`, one after another, for callers that want each token as it comes.

        Args:
            input_ids: Prompts [batch, tokens], padded on the left.
            wanted: Which log probabilities are wanted; None for none.
            stopped: Asked before each chunk of the prompts and each step whether to end here.
            options: What `generate` takes, `seed`, and `ignore_eos`, after which end tokens do not end a row.
        """
        for name in ("assistant_model", "inputs_embeds", "position_ids", "past_key_values"):
            if options.pop(name, None) is not None:
                raise _not_there(name)
        seed, ignore_eos = options.pop("seed", None), options.pop("ignore_eos", False)
        if not is_seed(seed):
            raise UserError("seed", "is out of its range", got=shown(seed), expected=SEEDS)
        tokenizer = options.pop("tokenizer", None)
        if tokenizer is not None and options.get("stop_strings"):
            # transformers passes no tokenizer on to a `custom_generate`.
            stop = StopStringCriteria(tokenizer, options.pop("stop_strings"))
            options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), stop])
        mask = options.pop("attention_mask", None)
        if mask is None:
            mask = self._make(input_ids, options).mask
            mask = None if mask is None else mask[:: len(mask) // len(input_ids)]  # one row for each of its answers
        prompts: list[Prompt] = []
        # What holds for every prompt (None), or for those of a length.
        known: dict[int | None, tuple[Prompt, GenerationConfig]] = {}
        for index, tokens in enumerate(_without_padding(input_ids.cpu(), mask)):
            made = known.get(None) or known.get(len(tokens)) or self._prompt(index, tokens, ignore_eos, options)
            prompt, config = made
            prompts.append(replace(prompt, tokens=tokens.expand(len(prompt.tokens), -1)))
            if are_of_a_length(prompt.processors):
                new_tokens_alone = config.max_new_tokens is not None and not options.get("stopping_criteria")
                known[None if new_tokens_alone and are_of_a_set(prompt.processors) else len(tokens)] = made
        pad = padding_token(config) or 0
        return self.decoder.steps(prompts, bool(config.do_sample), pad, seed, wanted, stopped)

    def _prompt(
        self, index: int, tokens: Tensor, ignore_eos: bool, options: dict[str, Any]
    ) -> tuple[Prompt, GenerationConfig]:
        """Return what transformers makes of the arguments for one prompt without padding.

        Raises:
            UserError: They ask for what is not there.
        """
        ids = tokens[None].to(self.device)
        made = self._make(ids, {**options, "attention_mask": torch.ones_like(ids)})
        mode = made.config.get_generation_mode()
        if mode.value not in ("greedy_search", "sample"):
            raise _not_there(mode.value)
        if made.config.return_dict_in_generate:
            raise _not_there("return_dict_in_generate")
        if any(isinstance(each, UnbatchedClassifierFreeGuidanceLogitsProcessor) for each in made.processors):
            raise _not_there("guidance_scale")
        # Ends and lengths are looked at without a call of criteria in each step.
        ends, longest, others = set[int](), list[int](), StoppingCriteriaList()
        for each in made.criteria:
            if type(each) is MaxLengthCriteria:
                longest.append(each.max_length)
            elif type(each) is not EosTokenCriteria:
                others.append(each)
            elif not ignore_eos or each in (options.get("stopping_criteria") or ()):
                ends.update(each.eos_token_id.tolist())
        most = max(min(longest) - len(tokens), 1)
        rows = tokens.expand(made.answers, -1)
        processors = LogitsProcessorList(_of_prompt(each, index, len(tokens)) for each in made.processors)
        return Prompt(rows, processors, others, frozenset(ends), most), made.config

    def _make(self, input_ids: Tensor, options: dict[str, Any]) -> _Made:
        """Let transformers do what it does before it decodes."""
        options = {**options, "custom_generate": _take, "use_cache": False}
        made: _Made = super().generate(input_ids, **options)
        return made

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> Tensor:
        """Return prompts with the answers behind them, int64 [batch, tokens], as transformers' `generate` does.

        Args:
            inputs: Prompts [batch, tokens], padded on the left.
            generation_config: What to do, as far as `options` do not say so.
            input_ids: Another name of `inputs`, which tokenizers give them.
            streamer: One of transformers; gets the prompt and each new token.
            options: What transformers' `generate` takes, and `seed`.

        Raises:
            UserError: The cache does not hold a prompt, there are more prompts than the backend takes, or `options` ask
                for what is not there.
        """
        if (inputs is None) == (input_ids is None):
            raise UserError("generate", "takes either inputs or input_ids", fix="Give prompts, [batch, tokens].")
        given = inputs if inputs is not None else input_ids
        assert given is not None
        if given.dim() != 2 or not given.numel():
            got = f"a tensor of {list(given.shape)}"
            expected = "at least one prompt of at least one token, [batch, tokens]"
            raise UserError("generate", "has nothing to go on from", got=got, expected=expected)
        config = generation_config if generation_config is not None else self.generation_config
        answers = options.get("num_return_sequences") or config.num_return_sequences or 1
        sequences = given.cpu().repeat_interleave(answers, dim=0)
        vocabulary = self.decoder.backend.vocabulary
        least, most = int(sequences.min()), int(sequences.max())
        if least < 0 or most >= vocabulary:
            what = "a token is outside of the vocabulary"
            raise UserError("generate", what, got=str(least if least < 0 else most), expected=f"0 to {vocabulary - 1}")
        if streamer is not None:
            streamer.put(sequences)
        with self.decoder.lock:
            for step in self.steps(given, generation_config=generation_config, **options):
                tokens = torch.tensor(step.tokens)
                sequences = torch.cat([sequences, tokens[:, None]], dim=-1)
                if streamer is not None:
                    streamer.put(tokens)
        if streamer is not None:
            streamer.end()
        return sequences


def _take(
    model: CausalModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **given: Any,
) -> _Made:
    """Take what transformers has made of the arguments of `generate`, in place of decoding."""
    made = logits_processor, stopping_criteria, generation_config
    return _Made(len(input_ids), given.get("attention_mask"), *made)


def _of_prompt(processor: Any, index: int, length: int) -> Any:
    """Return a processor as a prompt of a number and a length needs it: its state is its own, where it keeps one."""
    if type(processor) is OutputPenalties:
        return processor.behind(length)
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed = allowed_by_prefix(processor)  # alone, the prompt would be the first
        return PrefixConstrainedLogitsProcessor(lambda _, known: allowed(index, known), 1)
    return copy.copy(processor) if type(processor) is SynthIDTextWatermarkLogitsProcessor else processor


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Return the tokens of each row.

    Raises:
        UserError: They are not padded on the left.
    """
    if attention_mask is None:
        return list(input_ids)
    mask, width = attention_mask.cpu(), input_ids.shape[1]
    lengths = mask.sum(-1)
    expected = torch.arange(width) >= width - lengths[:, None]
    if mask.shape != input_ids.shape or not torch.equal(mask.bool(), expected) or int(lengths.min()) < 1:
        what = "does not say that prompts are padded on the left"
        raise UserError("attention_mask", what, expected="zeros, then ones, in each row")
    return [row[width - int(length) :] for row, length in zip(input_ids, lengths, strict=True)]


def _not_there(got: str) -> UserError:
    what = "neither searches over beams, nor takes embeddings, positions, caches or other models, nor returns scores"
    return UserError("generate", what, got=got, expected="greedy tokens, or tokens that are drawn", fix="Leave it out.")
