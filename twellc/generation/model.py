"""A backend as a model of transformers: `generate` with all that transformers makes of its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedConfig, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, StopStringCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from twellc.base.errors import UserError
from twellc.generation.backend import Backend
from twellc.generation.sampling import SEEDS, is_seed
from twellc.generation.steps import Choice, Decoder, Step


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
    _is_stateful = False  # transformers asks for it

    def __init__(self, backend: Backend, config: PreTrainedConfig, generation_config: GenerationConfig) -> None:
        self.decoder, self.config, self.generation_config = Decoder(backend), config, generation_config
        self.device, self.dtype = backend.device, torch.float32

    def can_generate(self) -> bool:
        """Say that it does."""
        return True

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> CausalLMOutputWithPast:
        """Return the logits behind prompts [batch, tokens] that are padded on the left: [batch, 1, vocabulary]."""
        with torch.no_grad():
            return CausalLMOutputWithPast(
                logits=self.decoder.logits(input_ids, _lengths(input_ids, attention_mask))[:, None]
            )

    __call__ = forward

    def steps(self, input_ids: Tensor, **options: Any) -> Iterator[Step]:
        """Return the steps of `generate`, one after another, for those who want each token as it comes.

        Args:
            input_ids: Prompts [batch, tokens], padded on the left.
            options: What `generate` takes, `seed`, and `ignore_eos`, after which end tokens do not end a row.
        """
        for name in ("assistant_model", "inputs_embeds", "position_ids", "past_key_values"):
            if options.pop(name, None) is not None:
                raise _not_there(name)
        tokenizer = options.pop("tokenizer", None)
        if tokenizer is not None and options.get("stop_strings"):
            # transformers passes no tokenizer on to a `custom_generate`.
            stop = StopStringCriteria(tokenizer, options.pop("stop_strings"))
            options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), stop])
        options |= {"custom_generate": _decode, "use_cache": False}
        steps: Iterator[Step] = super().generate(input_ids.to(self.device), **options)
        return steps

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
            raise UserError(
                "generate", "has nothing to go on from", got=f"a tensor of {list(given.shape)}",
                expected="at least one prompt of at least one token, [batch, tokens]",
            )  # fmt: skip
        config = generation_config if generation_config is not None else self.generation_config
        answers = options.get("num_return_sequences") or config.num_return_sequences or 1
        sequences = given.cpu().repeat_interleave(answers, dim=0)
        vocabulary = self.decoder.backend.vocabulary
        least, most = int(sequences.min()), int(sequences.max())
        if least < 0 or most >= vocabulary:
            raise UserError(
                "generate", "a token is none of the vocabulary", got=str(least if least < 0 else most),
                expected=f"0 to {vocabulary - 1}",
            )  # fmt: skip
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


def _lengths(input_ids: Tensor, attention_mask: Tensor | None) -> list[int]:
    if attention_mask is None:
        return [input_ids.shape[1]] * len(input_ids)
    lengths = attention_mask.sum(-1).tolist()
    width = input_ids.shape[1]
    expected = torch.arange(width, device=attention_mask.device) >= width - attention_mask.sum(-1, keepdim=True)
    if not torch.equal(attention_mask.bool(), expected) or min(lengths) < 1:
        raise UserError(
            "attention_mask",
            "does not say that prompts are padded on the left",
            expected="zeros, then ones, in each row",
        )
    return [int(length) for length in lengths]


def _decode(
    model: CausalModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    seed: int | None = None,
    ignore_eos: bool = False,
    **given: Any,
) -> Iterator[Step]:
    """Decode with what transformers has made of the arguments of `generate`, and `seed` and `ignore_eos` besides."""
    if not is_seed(seed):
        raise UserError("seed", "is out of its range", got=repr(seed), expected=SEEDS)
    if ignore_eos:
        kept = (each for each in stopping_criteria if not isinstance(each, EosTokenCriteria))
        stopping_criteria = StoppingCriteriaList(kept)
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise _not_there(mode.value)
    if generation_config.return_dict_in_generate:
        raise _not_there("return_dict_in_generate")
    if any(isinstance(each, UnbatchedClassifierFreeGuidanceLogitsProcessor) for each in logits_processor):
        raise _not_there("guidance_scale")
    pad = generation_config._pad_token_tensor
    return model.decoder.steps(
        input_ids, _lengths(input_ids, given.get("attention_mask")),
        generation_config.max_length - input_ids.shape[1],
        Choice(logits_processor, bool(generation_config.do_sample)),
        stopping_criteria, 0 if pad is None else int(pad), seed,
    )  # fmt: skip


def _not_there(got: str) -> UserError:
    return UserError(
        "generate",
        "neither searches over beams, nor takes embeddings, positions, caches or other models, nor returns scores",
        got=got, expected="greedy tokens, or tokens that are drawn", fix="Leave it out.",
    )  # fmt: skip
