"""The torch ops of a key-value cache.

    torch.ops.twell.append_caches      the caches with new keys and values in them
    torch.ops.twell.cached_attention   attention of new queries over caches that hold their keys and values already
    torch.ops.twell.cache_mask         which places of a cache each new query sees, as a mask

Caches are [batch, kv_heads, length, width]. A call brings `tokens` tokens to each sequence b, of which the first
counts[b] are real, 0 to `tokens`; before it starts[b] places of the caches were full. Both are int32 [batch], and all
tensors of floats share one dtype.

- Append: keys and values are [batch, tokens, kv_heads, width]; token i < counts[b] goes to place starts[b] + i. What
  would stand behind the last place is left out: a host must not ask for it.
- Attention: q and the result are [batch, tokens, heads, width], heads is a multiple of kv_heads, and head h uses cache
  h // (heads / kv_heads). Sequence b has query_counts[b] queries, 1 to `tokens`, and key_counts[b] keys, up to `length`
  and no fewer than queries, both int32. Its last query sees all of the keys, the one before it all but the last, and so
  on. Results behind the last query are 0.
- The mask, bool [batch, 1, tokens, length], is of the same kind, from starts and counts; behind the last real query it
  is that one's.

The CPU implementations are the meaning; attention is computed in float32 (float64 for float64), and rounded once. On a
GPU appending is a kernel of libtwell_attention.so, and attention is cuDNN's where that is at hand, else torch's own.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError
from twellc.plugins import library
from twellc.plugins.registration import load_cudnn

_MESSAGE_BYTES = 512


def _check_counts(batch: int, **counts: Tensor) -> None:
    for name, tensor in counts.items():
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != (batch,):
            raise ValueError(f"twell: {name} must be int32 of shape {(batch,)}, got {tensor.dtype} {_shape(tensor)}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


# ---- append ----


def _check_append(caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], starts: Tensor, counts: Tensor) -> None:
    for name, cache, update in zip(("keys", "values"), caches, new, strict=True):
        if cache.dim() != 4 or update.dim() != 4:
            raise ValueError(f"twell: {name} must have four dimensions, got {_shape(cache)} and {_shape(update)}")
        batch, heads, _, width = cache.shape
        if (update.shape[0], *update.shape[2:]) != (batch, heads, width) or update.shape[1] != new[0].shape[1]:
            expected = (batch, new[0].shape[1], heads, width)
            raise ValueError(f"twell: the new {name} must have shape {expected}, got {_shape(update)}")
        if {cache.dtype, update.dtype} != {caches[0].dtype} or not cache.dtype.is_floating_point:
            raise TypeError(f"twell: {name} must be of one floating point type, got {cache.dtype} and {update.dtype}")
    if caches[0].shape[:3] != caches[1].shape[:3]:
        raise ValueError(f"twell: the caches differ: {_shape(caches[0])} and {_shape(caches[1])}")
    _check_counts(caches[0].shape[0], starts=starts, counts=counts)


def _write(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, counts: Tensor) -> None:
    """Append in place with plain torch operations: the meaning of the op, and its CPU implementation."""
    _check_append((keys, values), (new_keys, new_values), starts, counts)
    tokens, length = new_keys.shape[1], keys.shape[2]
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        first, last = max(start, 0), min(start + min(count, tokens), length)
        if first < last:
            for cache, update in ((keys, new_keys), (values, new_values)):
                cache[row, :, first:last] = update[row, first - start : last - start].transpose(0, 1)


def _launch_write(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, counts: Tensor
) -> None:
    """Append in place on the GPU, by the kernel of the library."""
    _check_append((keys, values), (new_keys, new_values), starts, counts)
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("twell: caches must be contiguous")
    lib = library.load_attention()
    if lib is None:
        raise RuntimeError("twell: libtwell_attention.so is not there, which appends to caches on a GPU")
    read = [each.contiguous() for each in (new_keys, new_values, starts, counts)]
    batch, heads, length, _ = keys.shape
    key_bytes, value_bytes = (each.shape[3] * each.element_size() for each in (keys, values))
    problem = library.AppendProblem(
        batch=batch, tokens=new_keys.shape[1], length=length, kv_heads=heads, key_bytes=key_bytes,
        value_bytes=value_bytes,
    )  # fmt: skip
    tensors = library.AppendTensors(keys.data_ptr(), values.data_ptr(), *(each.data_ptr() for each in read))
    with torch.cuda.device(keys.device):
        stream = torch.cuda.current_stream().cuda_stream
        status = lib.twell_append_caches(ctypes.byref(problem), ctypes.byref(tensors), stream)
    if status:
        raise RuntimeError(f"twell: appending to caches failed with CUDA error {status}")


def _copied(write: Any) -> Any:
    """Return the op that returns new caches, of the one that writes in place."""

    def append(keys: Tensor, values: Tensor, *new: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (each.clone(memory_format=torch.contiguous_format) for each in (keys, values))
        write(keys, values, *new)
        return keys, values

    return append


def _infer_append(keys: Tensor, values: Tensor, *new: Tensor) -> tuple[Tensor, Tensor]:
    _check_append((keys, values), (new[0], new[1]), new[2], new[3])
    return keys.new_empty(keys.shape), values.new_empty(values.shape)


# ---- attention ----


def _check_attention(q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor) -> None:
    for name, tensor in (("q", q), ("keys", keys), ("values", values)):
        if tensor.dim() != 4:
            raise ValueError(f"twell: {name} must have four dimensions, got {_shape(tensor)}")
        if tensor.dtype != q.dtype or not q.dtype.is_floating_point:
            raise TypeError(f"twell: {name} must be of one floating point type with q, got {tensor.dtype}")
    (batch, _, heads, width), (kv_heads, length) = q.shape, keys.shape[1:3]
    for name, tensor in (("keys", keys), ("values", values)):
        if tuple(tensor.shape) != (batch, kv_heads, length, width):
            expected = (batch, kv_heads, length, width)
            raise ValueError(f"twell: {name} must have shape {expected}, got {_shape(tensor)}")
    if length < 1 or kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"twell: heads must be a positive multiple of kv_heads, got {heads} and {kv_heads}")
    _check_counts(batch, query_counts=query_counts, key_counts=key_counts)


def _compute(q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor, scale: float) -> Tensor:
    """Compute attention with plain torch operations: the meaning of the op, and its CPU implementation."""
    _check_attention(q, keys, values, query_counts, key_counts)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(wide).unflatten(2, (keys.shape[1], q.shape[2] // keys.shape[1]))
    scores = torch.einsum("bigrw,bgjw->bgrij", grouped, keys.to(wide)) * scale
    seen, real = _visible(q, keys, query_counts, key_counts)
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    y = torch.einsum("bgrij,bgjw->bigrw", weights, values.to(wide)).flatten(2, 3)
    return y.masked_fill(~real[:, :, None, None], 0).to(q.dtype).contiguous()


def _visible(q: Tensor, keys: Tensor, query_counts: Tensor, key_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return which keys each query sees, bool [batch, tokens, keys], and which queries there are, [batch, tokens]."""
    tokens, length = q.shape[1], keys.shape[2]
    queries, step = query_counts[:, None], torch.arange(tokens, device=q.device)
    last = key_counts[:, None] - queries + torch.minimum(step, queries - 1)  # the last key of each query
    return torch.arange(length, device=q.device) <= last[:, :, None], step < queries


class _Plans:
    """The cuDNN plans of a process: each is to be used by one at a time, and must outlive CUDA graphs made with it.

    Attributes:
        known: Each with its workspace in bytes; None where cuDNN has none.
        lock: Held while a plan is looked for or used.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[Any, tuple[int, int] | None] = {}

    def of(self, lib: ctypes.CDLL, device: torch.device, problem: library.AttentionProblem) -> tuple[int, int] | None:
        """Return the plan of a problem and its workspace in bytes; None where cuDNN has none."""
        key = (device.index, bytes(problem))
        if key not in self.known:
            message = ctypes.create_string_buffer(_MESSAGE_BYTES)
            plan = lib.twell_attention_create(ctypes.byref(problem), message, len(message))
            self.known[key] = (plan, lib.twell_attention_workspace_bytes(plan)) if plan else None
        return self.known[key]


_PLANS = _Plans()


@functools.cache
def _library_with_cudnn() -> ctypes.CDLL | None:
    try:
        load_cudnn()
        return library.load_attention()
    except UserError:  # the kernels of a wrong version are no reason to fail: torch has its own
        return None


def attends_by_cudnn() -> bool:
    """Whether cuDNN is at hand for attention on a GPU; elsewhere the op makes a mask in each call."""
    return _library_with_cudnn() is not None


def _launch(q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor, scale: float) -> Tensor:
    """Run attention on the GPU: cuDNN's, else torch's with a mask."""
    _check_attention(q, keys, values, query_counts, key_counts)
    lib, dtype = _library_with_cudnn(), dtype_name(q.dtype)
    with torch.cuda.device(q.device):
        if lib is not None and dtype in library.DTYPES:
            (batch, tokens, heads, width), (kv_heads, length) = q.shape, keys.shape[1:3]
            problem = library.AttentionProblem(
                batch=batch, tokens=tokens, keys=length, heads=heads, kv_heads=kv_heads, width=width,
                dtype=library.DTYPES[dtype], cached=1, scale=scale,
            )  # fmt: skip
            with _PLANS.lock:
                plan = _PLANS.of(lib, q.device, problem)
                if plan is not None:
                    return _run_plan(lib, plan, q, keys, values, query_counts, key_counts)
    seen, real = _visible(q, keys, query_counts, key_counts)
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=seen[:, None], scale=scale, enable_gqa=q.shape[2] != keys.shape[1]
    )
    return y.transpose(1, 2).masked_fill(~real[:, :, None, None], 0).contiguous()


def _run_plan(lib: ctypes.CDLL, plan: tuple[int, int], *operands: Tensor) -> Tensor:
    q, keys, values, query_counts, key_counts = (each.contiguous() for each in operands)
    y = torch.empty_like(q)
    workspace = torch.empty(plan[1], dtype=torch.uint8, device=q.device)
    tensors = library.AttentionTensors(
        q=q.data_ptr(), k=keys.data_ptr(), v=values.data_ptr(), lengths=key_counts.data_ptr(), y=y.data_ptr(),
        query_lengths=query_counts.data_ptr(),
    )  # fmt: skip
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    stream = torch.cuda.current_stream().cuda_stream
    if lib.twell_attention_run(plan[0], ctypes.byref(tensors), workspace.data_ptr(), stream, message, len(message)):
        raise RuntimeError(f"twell: {message.value.decode(errors='replace')}")
    return y


def _infer(q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor, scale: float) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    _check_attention(q, keys, values, query_counts, key_counts)
    return q.new_empty(q.shape)


# ---- mask ----


def _mask(starts: Tensor, counts: Tensor, tokens: int, length: int) -> Tensor:
    _check_counts(starts.shape[0], starts=starts, counts=counts)
    step = torch.arange(tokens, device=starts.device)
    last = starts[:, None] + torch.minimum(step, counts.clamp(min=1)[:, None] - 1)
    return (torch.arange(length, device=starts.device) <= last[:, :, None])[:, None]


def _infer_mask(starts: Tensor, counts: Tensor, tokens: int, length: int) -> Tensor:
    _check_counts(starts.shape[0], starts=starts, counts=counts)
    return starts.new_empty((starts.shape[0], 1, tokens, length), dtype=torch.bool)


_OPERANDS = "Tensor new_keys, Tensor new_values, Tensor starts, Tensor counts"
_LIBRARY = torch.library.Library("twell", "FRAGMENT")
for _schema in (
    f"append_caches(Tensor keys, Tensor values, {_OPERANDS}) -> (Tensor, Tensor)",
    "cached_attention(Tensor q, Tensor keys, Tensor values, Tensor query_counts, Tensor key_counts, float scale)"
    " -> Tensor",
    "cache_mask(Tensor starts, Tensor counts, SymInt tokens, SymInt length) -> Tensor",
):
    _LIBRARY.define(_schema, tags=torch.Tag.pt2_compliant_tag)
for _name, _implementations in {
    "append_caches": (_copied(_write), _copied(_launch_write), _infer_append),
    "cached_attention": (_compute, _launch, _infer),
    "cache_mask": (_mask, _mask, _infer_mask),
}.items():
    for _key, _run in zip(("CPU", "CUDA", "Meta"), _implementations, strict=True):
        _LIBRARY.impl(_name, _run, _key)

APPEND: torch._ops.OpOverload = torch.ops.twell.append_caches.default
CACHED_ATTENTION: torch._ops.OpOverload = torch.ops.twell.cached_attention.default
CACHE_MASK: torch._ops.OpOverload = torch.ops.twell.cache_mask.default
