"""A key-value cache of transformers in which each row has its own length.

Row i of a batch holds its tokens at the places 0, 1, … of its cache, [batch, kv_heads, length, head_dim], whatever the
other rows hold. A call writes `tokens` new keys and values of each row from its `index` on, and its query at place p
sees the places 0 to p of its row. So prompts of unequal lengths are padded on the right, nothing is masked for it, and
what padding wrote is overwritten before a query sees it.

Masks and attention are those of `row_attention` in `loaders/attention.py`; positions are given.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StaticLayer

from twellc.loaders.attention import NextCall
from twellc.loaders.cache_trial import MadeUpKeys


class RowCache(Cache):
    """Keys and values of rows of at most `length` tokens.

    Nothing that it holds refers to it, so that its memory is free as soon as nothing else does.

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
        if self._call.is_prefill:
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
        return (tokens if self._call.is_prefill else self.max_cache_len), 0

    def get_seq_length(self) -> int:
        """Return 0, which is true of the first tokens of rows, and else of none.

        Each row has its own length, which one number cannot express: models are given the positions of tokens. Those
        that use this number for more compute other logits, see `CacheTrial`.
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
        return self._made_up.reported
