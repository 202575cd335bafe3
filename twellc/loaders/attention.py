"""Attention and masks of transformers' models in the form that compiles well: traced, also with a cache.

One model computes them by functions of ours while it is called (`own_attention`). What transformers registers itself,
`sdpa` and `eager`, is right for every use, with caches and packed sequences, and costs much in a graph: masks by
gathers over tokens x tokens, keys and values of a group copied.

    mask is causal only     none; scaled_dot_product_attention(..., is_causal=True)
    mask of padding         attention_mask[:, None, None, :], bool [batch, 1, 1, keys]
    both                    (keys <= queries) & attention_mask[:, None, None, :], bool [batch, 1, queries, keys]
    windows, chunks         the mask's own comparisons of positions, in place of keys <= queries
    all else                as transformers has it

Keys and values of a group stay [batch, groups, keys, width].

With a key-value cache, whose keys stand at their positions, queries have those that the call says, and a causal mask is
twell.cache_mask(starts, counts, tokens, length): see `cached.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twellc.base.changes import Changed
from twellc.base.transformers_private import own_attention, plain_attention, plain_masks, query_count
from twellc.plugins.cache_op import CACHE_MASK

Request = dict[str, Any]  # what transformers passes to `sdpa_mask`, which documents it


@dataclass
class CacheStep:
    """A call of a traced model with a cache, as its masks see it.

    Attributes:
        starts: How many keys of each sequence were there before, int32 [batch].
        counts: How many of the new tokens are real, likewise.
        positions: The position of each new token, int64 [batch, tokens].
        length: How many keys a cache holds.
        longest: How many it may hold in any call.
    """

    starts: Tensor
    counts: Tensor
    positions: Tensor
    length: int
    longest: int


def traced_attention(model: torch.nn.Module, padded: bool, longest: int) -> Changed:
    """Let a model compute attention and masks in the form that compiles well, in this context.

    Args:
        model: A model of transformers.
        padded: Whether rows may be padded; else the attention mask that a model is given says nothing.
        longest: The longest sequence; a window that holds it is left out.
    """
    return own_attention(model, _attention, partial(_traced_mask, padded, longest))


def cached_attention(model: torch.nn.Module, step: CacheStep) -> Changed:
    """Let a model that is traced attend to a key-value cache, in this context."""
    return own_attention(model, _attention, partial(_cached_mask, step))


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' `sdpa` does.

    Args:
        module: The layer, whose `is_causal` counts where the argument is None.
        query: [batch, heads, queries, width].
        key: [batch, groups, keys, width].
        value: [batch, groups, keys, value width].
        attention_mask: Broadcastable to [batch, heads, queries, keys], bool or added to the logits.
        dropout: Without meaning: models are in eval mode.
        scaling: Scale of the logits.
        is_causal: Whether to mask later keys; a mask given besides holds that already.
        others: What the layer passes to any implementation.

    Returns:
        [batch, queries, heads, value width], and no weights.
    """
    if others.get("position_bias") is not None or others.get("softcap") is not None:
        own = plain_attention()
        return own(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)  # type: ignore[no-any-return]
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    result = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=is_causal and attention_mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result.transpose(1, 2).contiguous(), None


def _compared(seen: Any, batch: Any, positions: Tensor, keys: Any) -> Tensor:
    """Return the mask of a function of positions, True where a query sees a key: bool [batch or 1, 1, queries, keys].

    Args:
        seen: The function, of the numbers of a row and a head, and of the positions of a query and a key.
        batch: How many rows there are.
        positions: Of the queries, int64 [batch or 1, queries].
        keys: How many keys there are, at the positions from 0 on.
    """
    rows = torch.arange(batch, device=positions.device)[:, None, None, None]
    places = torch.arange(keys, device=positions.device)[None, None, None, :]
    mask: Tensor = seen(rows, torch.zeros_like(rows[:1]), positions[:, None, :, None], places)
    return mask


def _traced_mask(padded: bool, longest: int, causal_is_optional: bool, request: Request) -> Tensor | None:
    """Make a boolean mask, True where a query sees a key; None where it would be causal and is optional, or all True.

    Returns:
        The mask, broadcastable to [batch, 1, queries, keys].
    """
    causal, full, make = plain_masks()
    seen, window = request["mask_function"], request.get("local_size")
    padding = request["attention_mask"] if padded else None
    # Both are False where anything was added to the usual function.
    usual_causal = request.get("allow_is_causal_skip", True)
    usual_full = request.get("allow_is_bidirectional_skip", False)
    if window is not None and longest <= window and (usual_causal or usual_full):
        seen = causal if usual_causal else full
    offsets = (request.get("q_offset", 0), request.get("kv_offset", 0))
    if request.get("use_vmap") or any(not isinstance(offset, int) or offset for offset in offsets):
        request = {**request, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        made: Tensor | None = make(**request)
        return made
    if padding is None and ((causal_is_optional and seen is causal) or (usual_full and seen is full)):
        return None
    visible = None if padding is None else padding[:, None, None, :].to(torch.bool)
    if seen is full and usual_full:
        return visible
    batch, queries, keys = request["batch_size"], query_count(request), request["kv_length"]
    mask = _compared(seen, batch, torch.arange(queries, device=request.get("device", "cpu"))[None], keys)
    mask = mask if visible is None else mask & visible
    # A model that insists on a mask may do more with it than attention does.
    return mask if usual_causal or usual_full else mask.expand(batch, -1, queries, keys)


def _cached_mask(step: CacheStep, causal_is_optional: bool, request: Request) -> Tensor:
    """Make a boolean mask, True where a query sees a key of a cache: [batch, 1, tokens, length]."""
    if request.get("use_vmap"):
        raise NotImplementedError("the model's own masks are not known to be comparisons of positions")
    causal, seen, window = plain_masks().causal, request["mask_function"], request.get("local_size")
    fits = window is not None and step.longest <= window and request.get("allow_is_causal_skip", True)
    if fits or seen is causal:
        mask: Tensor = CACHE_MASK(step.starts, step.counts, step.positions.shape[1], step.length)
        return mask
    return _compared(seen, step.positions.shape[0], step.positions, step.length)
