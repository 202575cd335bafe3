"""A key-value cache of transformers whose rows have lengths of their own, with the attention and the masks that fit.

Row i of a batch holds its tokens at the places 0, 1, … of its cache, [batch, kv_heads, length, head_dim], whatever the
other rows hold. A call writes `tokens` new keys and values of each row from its `index` on, and its query at place p
sees the places 0 to p of its row. So prompts of unequal lengths are padded on the right, nothing is masked for it, and
what padding wrote is overwritten before a query sees it.

Masks and attention are given as `OwnAttention` says, and positions too. On a GPU attention by lengths,
`twell.cached_attention`, takes the place of one with a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import causal_mask_function

from twellc.base.errors import UserError
from twellc.loaders.attention import OwnAttention, query_count
from twellc.loaders.cache_trial import MadeUpKeys
from twellc.plugins.cache_op import CACHE_MASK, CACHED_ATTENTION

# What attention of some models has besides; theirs would be another one.
_OTHER_ATTENTION = ("softcap", "s_aux", "position_bias")


class _Counts(NamedTuple):
    """What stands for a mask where attention goes by lengths: int32 [batch] each.

    Attributes:
        queries: How many queries each row has.
        keys: How many keys its last query sees.
    """

    queries: Tensor
    keys: Tensor


@dataclass(eq=False)
class NextCall:
    """The next call of a model, as the layers of a cache and the masks see it.

    Attributes:
        index: Where it writes in each row: int64 [batch].
        fresh: Whether it writes from place 0 on in each row: its queries see no older keys.
        by_lengths: Whether causal attention to older keys goes by lengths, without a mask.
    """

    index: Tensor
    fresh: bool
    by_lengths: bool


class RowCache(Cache):
    """Keys and values of rows of at most `length` tokens.

    Nothing that it holds refers to it, so that its memory is free as soon as nobody else does.

    Attributes:
        length: The places of a row.
        call: The next call.
    """

    def __init__(self, layers: int, length: int, call: NextCall, made_up: MadeUpKeys | None = None) -> None:
        """Make a cache; one that holds keys and values that are made up keeps no others, and is for one call."""
        layer = _RowLayer if made_up is None else partial(_MadeUpLayer, made_up)
        super().__init__(layers=[layer(call, length) for _ in range(layers)])
        self.length, self.call = length, call


class _RowLayer(StaticLayer):
    """One layer of a `RowCache`; a sliding window has its whole length here, too."""

    keys: Tensor
    values: Tensor

    def __init__(self, call: NextCall, length: int) -> None:
        super().__init__(length)
        self._call = call

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [batch, kv_heads, tokens, head_dim]; return those that queries may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        if self._call.fresh:
            self.keys[:, :, :tokens] = key_states
            self.values[:, :, :tokens] = value_states
            return key_states, value_states
        places = self._call.index[:, None] + torch.arange(tokens, device=key_states.device)
        rows = torch.arange(len(places), device=places.device)[:, None]
        # Advanced indices on both sides of a slice: the result's axes are [batch, tokens, kv_heads, head_dim].
        self.keys[rows, :, places] = key_states.transpose(1, 2)
        self.values[rows, :, places] = value_states.transpose(1, 2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many keys queries may see, and the place of the first. Older releases give places of queries."""
        tokens: int = len(query_length) if isinstance(query_length, Tensor) else query_length
        return (tokens if self._call.fresh else self.max_cache_len), 0

    def get_seq_length(self) -> int:
        """Return 0, which is true of the first tokens of rows, and else of none.

        Rows have lengths of their own, which no number tells: models are given the positions of tokens. Those that do
        more with this number compute other logits, see `CacheTrial`.
        """
        return 0


class _MadeUpLayer(_RowLayer):
    """A layer for one call, so that a cache of many places takes the memory of a layer."""

    def __init__(self, made_up: MadeUpKeys, call: NextCall, length: int) -> None:
        super().__init__(call, length)
        self._made_up = made_up

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized, rows = True, len(key_states)
        self.keys, self.values = (
            self._made_up.of(number, new).repeat(rows, 1, 1, 1) for number, new in enumerate((key_states, value_states))
        )
        held = super().update(key_states, value_states)
        del self.keys, self.values
        return held

    def get_seq_length(self) -> int:
        return self._made_up.said


def row_attention(model: torch.nn.Module, call: NextCall) -> OwnAttention:
    """Let a model attend to caches of the same `call`, in this context."""
    return OwnAttention(model, partial(_mask, call), "twellc_rows", _attention)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _Counts | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention; without a mask it is causal among as many queries as keys.

    Args:
        module: The layer.
        query: [batch, heads, tokens, width].
        key: [batch, kv_heads, keys, width].
        value: [batch, kv_heads, keys, value width].
        attention_mask: bool [batch or 1, 1, tokens, keys], counts in its place, or None.
        dropout: Without meaning: models are in eval mode.
        scaling: Scale of the logits.
        others: What the layer passes to any implementation.

    Returns:
        [batch, tokens, heads, value width], and no weights.
    """
    for name in _OTHER_ATTENTION:
        if others.get(name) is not None:
            raise UserError(type(module).__name__, f"has attention with {name}, which is not computed with this cache")
    batch, heads, tokens, width = query.shape
    if isinstance(attention_mask, _Counts):
        queries, keys = attention_mask
        if value.shape[-1] == width:
            scale = width**-0.5 if scaling is None else scaling
            return CACHED_ATTENTION(query.transpose(1, 2), key, value, queries, keys, scale), None
        mask: Tensor = CACHE_MASK(keys - queries, queries, tokens, key.shape[2])
        attention_mask = mask
    grouped = heads != key.shape[1]
    if grouped and tokens == 1 and attention_mask is not None and attention_mask.shape[1] == 1:
        # The queries of a group as queries of one head: with a mask, groups would take the slowest kernel on a GPU.
        query = query.view(batch, key.shape[1], heads // key.shape[1], width)
        grouped = False
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling,
        enable_gqa=grouped,
    )  # fmt: skip
    return result.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


def _mask(call: NextCall, causal_is_optional: bool, request: dict[str, Any]) -> Tensor | _Counts | None:
    """Make a mask, True where a query sees a key; None where it is causal among the keys of one call, and optional.

    Where attention goes by lengths, counts stand for a mask that is causal. `request` is what transformers passes to
    `sdpa_mask`, which documents it.
    """
    seen, window, device = request["mask_function"], request.get("local_size"), call.index.device
    tokens = query_count(request)
    if call.fresh:
        usual = causal_is_optional and request.get("allow_is_causal_skip", True)
        if usual and (seen is causal_mask_function or (window is not None and tokens <= window)):
            return None
        starts = torch.zeros_like(call.index)
    else:
        starts = call.index
        if call.by_lengths and seen is causal_mask_function:
            count = torch.full_like(starts, tokens, dtype=torch.int32)
            return _Counts(count, starts.to(torch.int32) + count)
    rows = torch.arange(len(starts), device=device)[:, None, None, None]
    queries = starts[:, None, None, None] + torch.arange(tokens, device=device)[:, None]
    mask: Tensor = seen(rows, torch.zeros_like(rows), queries, torch.arange(request["kv_length"], device=device))
    return mask
