"""Dense models of transformers that answer: what `generate.py` compares with, eager or as torch.compile compiles them.

Keys and values stand in static caches [batch, kv_heads, places, head_dim], which are written in place. First tokens
attend to one another by torch's scaled_dot_product_attention; later ones by `twell.cached_attention`, which goes by
lengths, as the programs do that they are compared with. All layers are causal. Caches may be in FP8, with scales of 1,
by the ops that those programs have, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, StaticLayer

from twellc.base.transformers_private import own_attention, query_count
from twellc.generation.program import compiled_call
from twellc.plugins.cache_op import APPEND_IN_PLACE, CACHED_ATTENTION
from twellc.plugins.fp8 import E4M3


class Counts(NamedTuple):
    """What stands for a mask where attention goes by lengths: int32 [batch] each, of queries and of keys."""

    queries: Tensor
    keys: Tensor


@dataclass(eq=False)
class NextCall:
    """Where the next call writes in each row, int64 [batch], and whether its queries see no older keys."""

    index: Tensor
    is_prefill: bool


class _Layer(StaticLayer):  # type: ignore[no-untyped-call]
    """The keys and values of a layer."""

    keys: Tensor
    values: Tensor

    def __init__(self, call: NextCall, length: int, fp8: bool) -> None:
        super().__init__(length)
        self._call, self._fp8 = call, fp8

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [batch, kv_heads, tokens, head_dim]; return those that queries may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            if self._fp8:
                self.keys, self.values = self.keys.to(E4M3), self.values.to(E4M3)
        tokens = key_states.shape[2]
        if self._fp8:
            starts = self._call.index.to(torch.int32)
            new = (key_states.transpose(1, 2), value_states.transpose(1, 2))
            APPEND_IN_PLACE(self.keys, self.values, *new, starts, torch.full_like(starts, tokens))
            return (key_states, value_states) if self._call.is_prefill else (self.keys, self.values)
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
        """Return 0: models are given the positions of tokens."""
        return 0


class DenseBackend:
    """A causal model of transformers as a `Backend` of twellc, with caches of `longest` places."""

    def __init__(
        self, model: Any, name: str, longest: int, compiled: bool, compiled_fill: bool, *, fp8_cache: bool = False
    ) -> None:
        """Take a model where it is to run.

        Args:
            model: The model.
            name: What to call it.
            longest: Places of its caches.
            compiled: Whether torch.compile compiles steps.
            compiled_fill: Whether it compiles first tokens, for each size.
            fp8_cache: Whether caches are in FP8.
        """
        self.name, self.longest = name, longest
        self.largest_batch: int | None = None
        self.chunk, self.scores_prompts, self.chooses = 1 << 20, False, False
        self.vocabulary, self.device = model.config.vocab_size, model.device
        self._model = model
        self._decode = compiled_call(self._logits, dynamic=False) if compiled else self._logits
        self._fill = compiled_call(self._logits, dynamic=False) if compiled_fill else self._logits
        self._call = NextCall(torch.zeros(1, dtype=torch.int64, device=self.device), True)
        self._attention = own_attention(model, _attention, self._mask)
        self._cache: Any = None
        self._fp8_cache = fp8_cache

    @torch.no_grad()
    def begin(self, batch: int, places: int) -> bool:
        """Make room; see `Backend`."""
        self._cache = None  # and its memory, before there is another
        count = self._model.config.num_hidden_layers
        self._cache = Cache(layers=[_Layer(self._call, self.longest, self._fp8_cache) for _ in range(count)])
        ids = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._call.index, self._call.is_prefill = ids[:, 0], True
        with self._attention:  # the first tokens make the tensors of the cache
            self._logits(ids, ids)
        return True

    @torch.no_grad()
    def fill(self, input_ids: Tensor, start: int, every: bool = False) -> Tensor:
        """Compute the first tokens of rows; see `Backend`."""
        self._call.index, self._call.is_prefill = torch.full_like(self._call.index, start), start == 0
        places = torch.arange(start, start + input_ids.shape[1], device=self.device).expand(len(input_ids), -1)
        with self._attention:
            return self._fill(input_ids, places)

    @torch.no_grad()
    def decode(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Compute a token of each row; see `Backend`."""
        self._call.index, self._call.is_prefill = places, False
        with self._attention:
            return self._decode(tokens[:, None], places[:, None])

    def _logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        """Return the logits behind the last token of each row, [batch, vocabulary]."""
        given = {"past_key_values": self._cache, "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = self._model(input_ids=input_ids, position_ids=places, **given).logits
        return logits[:, -1]

    def _mask(self, causal_is_optional: bool, request: dict[str, Any]) -> Counts | None:
        if self._call.is_prefill:
            return None
        count = torch.full_like(self._call.index, query_count(request), dtype=torch.int32)
        return Counts(count, self._call.index.to(torch.int32) + count)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Counts | None, **others: Any
) -> tuple[Tensor, None]:
    """Compute attention of query [batch, heads, tokens, width]; return [batch, tokens, heads, width]."""
    scale = others["scaling"]
    if attention_mask is not None:
        return CACHED_ATTENTION(query.transpose(1, 2), key, value, *attention_mask, scale), None
    attend = torch.nn.functional.scaled_dot_product_attention
    result = attend(query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return result.transpose(1, 2).contiguous(), None
