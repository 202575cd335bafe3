"""Arguments of vLLM that are not there: which of their values are taken, and what the message for all others says.

Of each name in vLLM 0.26 to 0.32, and a few of older releases. Importing this imports nothing large.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from twellc.base.errors import UserError

# By name: values that ask for nothing, and what to say of others. Without values every one is taken: results do not
# depend on it.
Names = Mapping[str, tuple[tuple[Any, ...] | None, str]]

_OTHER_LOGPROBS = "log probabilities are returned of the chosen token and the likeliest alone"
_ALL_ANSWERS = "all answers are returned: use n"
_NO_BEAMS = "there is no search over beams"
_UNCONSTRAINED = "answers of a given form are not there: give LLM.generate a logits_processor"
_TEXT_ALONE = "prompts are text or tokens alone"
_ONE_GPU = "a model runs on one GPU"
_BY_ITS_FILES = (
    "the files say how a model is quantised, and E4M3 is read; weights='fp8:blocks' quantises one of 16 bits"
)
_LOCAL = "models are read from a local folder as they are"
_NO_LORA = "there are no adapters: merge it into the model first"

SAMPLING: Names = {
    "best_of": ((None, 1), _ALL_ANSWERS),
    "prompt_logprob_token_ids": ((None,), _OTHER_LOGPROBS),
    "prompt_logprob_start": ((None, 0), _OTHER_LOGPROBS),
    "logprob_token_ids": ((None,), _OTHER_LOGPROBS),
    "flat_logprobs": ((False, None), _OTHER_LOGPROBS),
    "use_beam_search": ((False, None), _NO_BEAMS),
    "length_penalty": ((1, 1.0, None), _NO_BEAMS),
    "early_stopping": ((False, None), _NO_BEAMS),
    "structured_outputs": ((None,), _UNCONSTRAINED),
    "guided_decoding": ((None,), _UNCONSTRAINED),
    "logits_processors": ((None, []), "give them to LLM.generate as logits_processor"),
    "spaces_between_special_tokens": ((True, None), "texts are what the tokenizer makes of the tokens"),
    "output_kind": ((None, 0, 2, "CUMULATIVE", "FINAL_ONLY"), "generate returns whole answers, generate_stream pieces"),
    "thinking_token_budget": ((None, -1), "tokens of thoughts are not counted apart: use max_tokens"),
    "repetition_detection": ((None,), "is not there: use repetition_penalty, or stopping_criteria of LLM.generate"),
    "trace_decode_token_ids": ((None,), "tokens of an answer cannot be given"),
    "routed_experts_prompt_start": ((0, None), "which experts were used is not returned"),
    "extra_args": ((None, {}), "there is nothing else that takes arguments"),
    "stream_interval": ((None, 1), "a stream gives each token as it comes"),
    "output_text_buffer_length": ((0, None), "is not an input"),
    "skip_clone": (None, ""),
    "skip_reading_prefix_cache": (None, ""),
}

# Arguments of the engine that change no result.
_WITHOUT_EFFECT = (
    "trust_remote_code", "gpu_memory_utilization", "kv_cache_memory_bytes", "swap_space", "enforce_eager",
    "max_num_seqs", "max_num_partial_prefills", "max_seq_len_to_capture", "max_logprobs",
    "max_loras", "max_lora_rank", "block_size", "enable_prefix_caching", "enable_chunked_prefill",
    "disable_sliding_window", "disable_custom_all_reduce", "disable_async_output_proc", "disable_log_stats",
    "disable_log_requests", "compilation_config", "cuda_graph_sizes", "num_gpu_blocks_override", "preemption_mode",
    "scheduling_policy", "async_scheduling", "use_v2_block_manager", "attention_backend", "attention_config",
    "model_impl", "optimization_level",
    "linear",  # ours, of older releases: linear layers are taken by the number of tokens of a call
)  # fmt: skip

ENGINE: Names = {
    "runner": (("auto", "generate", None), "a model answers, and does nothing else"),
    "task": (("auto", "generate", None), "a model answers, and does nothing else"),
    "convert": (("auto", "none", None), "a model answers, and does nothing else"),
    "tokenizer_mode": (("auto", "hf", None), "the tokenizer is the one that its files describe"),
    "allowed_local_media_path": (("", None), _TEXT_ALONE),
    "allowed_media_domains": ((None, []), _TEXT_ALONE),
    "limit_mm_per_prompt": ((None, {}), _TEXT_ALONE),
    "mm_processor_kwargs": ((None, {}), _TEXT_ALONE),
    "enable_prompt_embeds": ((False, None), _TEXT_ALONE),
    "tensor_parallel_size": ((1, None), _ONE_GPU),
    "pipeline_parallel_size": ((1, None), _ONE_GPU),
    "data_parallel_size": ((1, None), _ONE_GPU),
    "enable_expert_parallel": ((False, None), _ONE_GPU),
    "distributed_executor_backend": ((None, "uni"), _ONE_GPU),
    "quantization": ((None,), _BY_ITS_FILES),
    "load_format": (("auto", "safetensors", "hf", None), "weights are read from safetensors"),
    "revision": ((None,), _LOCAL),
    "code_revision": ((None,), _LOCAL),
    "tokenizer_revision": ((None,), _LOCAL),
    "download_dir": ((None,), _LOCAL),
    "hf_token": ((None, False), _LOCAL),
    "hf_config_path": ((None,), _LOCAL),
    "hf_overrides": ((None, {}), _LOCAL),
    "rope_scaling": ((None, {}), _LOCAL),
    "rope_theta": ((None,), _LOCAL),
    "generation_config": (("auto", "vllm", None), "end tokens are those of the model's generation_config.json"),
    "override_generation_config": ((None, {}), "give values to SamplingParams"),
    "logits_processors": ((None, []), "give them to LLM.generate as logits_processor"),
    "seed": ((None, 0), "give SamplingParams(seed=…)"),
    "cpu_offload_gb": ((0, 0.0, None), "the whole model is on one device"),
    "enable_lora": ((False, None), _NO_LORA),
    "speculative_config": ((None,), "there is no second model that drafts"),
    "structured_outputs_config": ((None,), _UNCONSTRAINED),
    "guided_decoding_backend": (("auto", None), _UNCONSTRAINED),
    "reasoning_parser": (("", None), "an answer is one text"),
    "enable_sleep_mode": ((False, None), "the model stays on its device"),
    **dict.fromkeys(_WITHOUT_EFFECT, (None, "")),
}

CALL: Names = {
    "use_tqdm": (None, ""),
    "priority": (None, ""),
    "lora_request": ((None, []), _NO_LORA),
    "prompt_adapter_request": ((None,), _NO_LORA),
    "guided_options_request": ((None,), _UNCONSTRAINED),
    "tokenization_kwargs": ((None, {}), "the tokenizer takes no options: give tokens"),
    "mm_processor_kwargs": ((None, {}), _TEXT_ALONE),
    "chat_template_content_format": (("auto", "string", "openai"), "the template gets messages as they are"),
}

PROMPT: Names = {
    "multi_modal_data": ((None, {}), _TEXT_ALONE),
    "multi_modal_uuids": ((None, {}), _TEXT_ALONE),
    "mm_processor_kwargs": ((None, {}), _TEXT_ALONE),
    "prompt_embeds": ((None,), _TEXT_ALONE),
    "token_type_ids": ((None,), "a model has one kind of token"),
    "type": (("text", "token"), _TEXT_ALONE),
    "cache_salt": (None, ""),
}


def refuse_others(where: str, names: Names, known: Iterable[str], given: Mapping[str, Any]) -> list[str]:
    """Take arguments that ask for nothing.

    Args:
        where: What takes the arguments, for messages.
        names: Names of vLLM.
        known: Other names, to say what may have been meant.
        given: The arguments.

    Returns:
        The names of those that change no result, and nothing else.

    Raises:
        UserError: One asks for what is not there, or vLLM has no such name.
    """
    without_effect = []
    for name, value in given.items():
        if name not in names:
            near = difflib.get_close_matches(name, [*known, *names], n=3)
            raise UserError(where, "has no such argument", got=repr(name), expected=" or ".join(near))
        values, what = names[name]
        plain = getattr(value, "name", value)  # of an enumeration of vLLM
        if values is None:
            without_effect.append(name)
        elif not any(type(plain) is type(each) and plain == each for each in values):
            raise UserError(name, what, got=repr(value)[:80], expected=" or ".join(map(repr, values)))
    return without_effect
