"""Causal language models of the families with a key-value cache, tiny, and how tests feed them step by step."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from tests.models import family
from twellc.base.caches import INPUT_IDS, TOKEN_COUNT, WRITE_INDEX, KeyValueCache

# What `generate` of transformers wants to know.
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDE: dict[str, Any] = {**models.WIDE, **_TOKENS}
_SINGLE: dict[str, Any] = {**models.SMALL, **_TOKENS, "max_position_embeddings": 64}
FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": functools.partial(models.llama, **_TOKENS),
    "qwen3": family("Qwen3", **_WIDE, head_dim=8),
    "granite": family(
        "Granite",
        **_WIDE,
        attention_multiplier=0.3,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        embedding_multiplier=3.0,
    ),
    "olmo2": family("Olmo2", **_WIDE),
    "smollm3": family("SmolLM3", **{**_WIDE, "num_hidden_layers": 4}),
    "phi3": family("Phi3", **_WIDE),
    "phi3-window": family("Phi3", **_WIDE, sliding_window=5),
    "nemotron": functools.partial(models.nemotron, **_TOKENS),
    "opt": functools.partial(models.opt, **_TOKENS),
    "gpt-neox": family("GPTNeoX", **_SINGLE, intermediate_size=96, hidden_act="relu"),
    "falcon": family("Falcon", **models.SMALL, **_TOKENS, alibi=False, multi_query=True),
    "gemma2": family("Gemma2", **_WIDE, head_dim=8, sliding_window=5, query_pre_attn_scalar=8),
    "gpt2": models.gpt2,
    # Rotary positions in front of a norm, or of a product with keys, which TensorRT computes wrong in their usual form.
    "nanochat": family("NanoChat", **_WIDE),
    "hunyuan": family("HunYuanDenseV1", **_WIDE, head_dim=64),
    "gpt-neox-japanese": family("GPTNeoXJapanese", **_SINGLE, intermediate_multiple_size=2, hidden_act="relu"),
}
# Squared ReLU without a gate, like Nemotron and NanoChat: no plan of these is run on a GPU in tests.
SQUARED: dict[str, Callable[..., Any]] = {
    "jais2": functools.partial(models.jais2, **_TOKENS),
    "arcee": functools.partial(models.arcee, **_TOKENS),
    "persimmon": functools.partial(models.persimmon, **_TOKENS),
    "nemotron-h": functools.partial(models.nemotron_h, layers_block_type=["mlp", "attention"] * 2),
}


def _routed_by_groups(**changes: Any) -> Any:
    """Make a Nemotron-H of experts and attention: the best experts of the best groups, by scores with a bias."""
    routing = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    layers = ["moe", "attention", "mlp"]
    model = models.nemotron_h(layers_block_type=layers, moe_latent_size=16, **routing, **changes)
    model.model.layers[0].mixer.gate.e_score_correction_bias.copy_(torch.linspace(-0.4, 0.4, 8))
    return model


# Those that torch alone decodes in tests, and a few of the others.
IN_TORCH: dict[str, Callable[..., Any]] = {
    **{name: make for name, make in FAMILIES.items() if name not in ("gpt2", "phi3", "hunyuan", "gpt-neox-japanese")},
    **SQUARED,
    "qwen3-window": family(
        "Qwen3", **_WIDE, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "falcon-alibi": functools.partial(FAMILIES["falcon"], alibi=True),
    "mixtral": family("Mixtral", **_WIDE, num_local_experts=4),
    "nemotron-h-experts": _routed_by_groups,
    # Values are narrower than keys.
    "deepseek-v2": family(
        "DeepseekV2",
        **{**_WIDE, "num_key_value_heads": 4},
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
}


def mostly_slow(names: Iterable[Any], *quick: Any) -> list[Any]:
    """Return names as parameters, of which the quick ones run by default: the others are like these to twellc."""
    return [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]


@dataclass(frozen=True)
class Step:
    """A call: how many tokens of each row are in the caches before, and how many new ones it has."""

    starts: list[int]
    counts: list[int]

    @property
    def ends(self) -> list[int]:
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]


def steps(prompts: list[int], length: int, chunk: int) -> list[Step]:
    """Return calls for prompts in chunks, and then token by token until each row has `length`; rows end apart."""
    found: list[Step] = []
    starts, last = [0] * len(prompts), prompts
    while starts != last or last != [length] * len(prompts):
        if starts == last:
            last = [min(end + 1, length) for end in last]
        counts = [min(chunk, end - start) for start, end in zip(starts, last, strict=True)]
        found.append(Step(starts, counts))
        starts = found[-1].ends
    return found


Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def feed(call: Call, ids: Tensor, taken: list[Step]) -> Tensor:
    """Return the logits behind the last token of each row that a step feeds, [rows of all steps, vocabulary]."""
    found = []
    for step in taken:
        tokens = torch.zeros(len(ids), max(step.counts), dtype=torch.int64)
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            tokens[row, :count] = ids[row, start : start + count]
        logits = call(tokens, torch.tensor(step.starts), torch.tensor(step.counts))
        found += [logits[row] for row, count in enumerate(step.counts) if count]
    return torch.stack(found)


def transformers_own(model: Any, ids: Tensor, taken: list[Step]) -> Tensor:
    """Return what `feed` does, by a model of transformers and its own cache, row by row."""
    from transformers import DynamicCache

    caches = [DynamicCache(config=model.config) for _ in ids]
    found = []
    for step in taken:
        for row, (start, count) in enumerate(zip(step.starts, step.counts, strict=True)):
            if count:
                with torch.no_grad():
                    result = model(ids[row : row + 1, start : start + count], past_key_values=caches[row])
                found.append(result.logits[0, -1])
    return torch.stack(found)


Run = Callable[[dict[str, Tensor]], list[Tensor]]


def calling(run: Run, cache: KeyValueCache, batch: int, dtype: torch.dtype, names: list[str] | None = None) -> Call:
    """Return a call of a program or graph that gives back its caches, which start empty.

    Args:
        run: Runs it on inputs by name.
        cache: What is known of its cache.
        batch: How many rows there are.
        dtype: The element type of the caches.
        names: The names of its inputs; None takes those that the cache has.
    """
    named = names or [INPUT_IDS, WRITE_INDEX, TOKEN_COUNT, *(pair.input for pair in cache.pairs)]
    caches = [torch.zeros(batch, *pair.shape[1:], dtype=dtype) for pair in cache.pairs]

    def call(ids: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        logits, *after = run(dict(zip(named, [ids, starts, counts, *caches], strict=True)))
        for own, new in zip(caches, after, strict=True):
            own.copy_(new)
        return logits

    return call
