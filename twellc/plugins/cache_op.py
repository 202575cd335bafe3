"""The torch ops of a key-value cache.

    torch.ops.twell.append_caches      the caches with new keys and values in them
    torch.ops.twell.append_caches_     the same in place, as a plan does it
    torch.ops.twell.cached_attention   attention of new queries over caches that hold their keys and values already
    torch.ops.twell.cache_mask         a mask of the places of a cache that each new query sees

Caches are [batch, kv_heads, length, width]. A call brings `tokens` tokens to each sequence b. The first counts[b] of
them are real, 0 to `tokens`; before the call starts[b] places of the caches were full. Both are int32 [batch], and all
tensors of floats share one dtype, but for caches in FP8.

- Append: keys and values are [batch, tokens, kv_heads, width]; token i < counts[b] goes to place starts[b] + i. Tokens
  behind the last place are left out: a host must not ask for that.
- Attention: q and the result are [batch, tokens, heads, width], heads is a multiple of kv_heads, and head h uses cache
  h // (heads / kv_heads). Sequence b has query_counts[b] queries, 1 to `tokens`, and key_counts[b] keys, up to `length`
  and no fewer than queries, both int32. Its last query sees all keys, the one before it all but the last, and so on.
  Results behind the last query are 0.
- With cosines and sines, [batch, tokens, width], append rotates the new keys first, and attention the queries: each row
  x becomes x * cosines + (-x2, x1) * sines, rounded once, where x1 and x2 are its halves.
- Caches in FP8 are float8_e4m3fn, and stand for their numbers times key_scale and value_scale, one each for a layer.
  Append divides new keys, once they are rotated, and values by these in float32, and rounds; beyond 448 it keeps 448,
  and NaN stays NaN. Other caches have the scales 1.
- The mask, bool [batch, 1, tokens, length], follows the same rule, from starts and counts; rows behind the last real
  query repeat its row.

The CPU implementations are the meaning; attention is computed in float32 (float64 for float64), and rounded once. On a
GPU appending is a kernel of libtwell_attention.so, and attention is cuDNN's, where these are at hand, else torch's own.
Over caches in FP8 it is another kernel of that library, which reads the bytes. Where that is not there, and on a CPU,
bytes of one head of a layer become float32 at a time.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError
from twellc.base.torch_private import OpOverload
from twellc.plugins import library
from twellc.plugins.attention_op import attend, attend_by_torch, check_counts, check_operands
from twellc.plugins.fp8 import E4M3, LARGEST
from twellc.plugins.registration import load_cudnn
from twellc.plugins.torch_library import define

_MESSAGE_BYTES = 512


# ---- append ----


def _check_append(caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], starts: Tensor, counts: Tensor) -> None:
    for name, cache, update in zip(("keys", "values"), caches, new, strict=True):
        shape, got = tuple(cache.shape), tuple(update.shape)
        if len(shape) != 4 or len(got) != 4:
            raise ValueError(f"twell: {name} must have four dimensions, got {shape} and {got}")
        expected = (shape[0], new[0].shape[1], shape[1], shape[3])
        if got != expected:
            raise ValueError(f"twell: the new {name} must have shape {expected}, got {got}")
        kinds = {caches[0].dtype, new[0].dtype}
        if {cache.dtype, update.dtype} != kinds or not update.dtype.is_floating_point or len(kinds - {E4M3}) > 1:
            raise TypeError(f"twell: {name} must be of one floating point type, got {cache.dtype} and {update.dtype}")
    shapes = [tuple(each.shape) for each in caches]
    if shapes[0][:3] != shapes[1][:3]:
        raise ValueError(f"twell: the caches differ: {shapes[0]} and {shapes[1]}")
    check_counts(shapes[0][0], starts=starts, counts=counts)


def _check_scales(cache: Tensor, **scales: float) -> None:
    """Fail if these are no scales of caches of this type."""
    for name, scale in scales.items():
        if not 0 < scale < math.inf or (cache.dtype != E4M3 and scale != 1):
            expected = "positive and finite" if cache.dtype == E4M3 else f"1 for caches of {cache.dtype}"
            raise ValueError(f"twell: {name} must be {expected}, got {scale}")


def _kept(new: Tensor, cache: Tensor, scale: float) -> Tensor:
    """Return new keys or values in the type in which a cache keeps them."""
    return (new.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3) if cache.dtype == E4M3 else new


def _check_angles(x: Tensor, cosines: Tensor | None, sines: Tensor | None) -> None:
    """Fail if these cannot rotate x, [batch, tokens, heads, width]."""
    expected = (*x.shape[:2], x.shape[3])
    if (cosines is None) != (sines is None):
        raise ValueError("twell: there are cosines without sines, or sines without cosines")
    for name, angles in (("cosines", cosines), ("sines", sines)):
        if angles is not None and (tuple(angles.shape) != expected or angles.dtype != x.dtype or x.shape[3] % 2):
            got = f"{angles.dtype} {tuple(angles.shape)}"
            raise ValueError(f"twell: {name} must be {x.dtype} of shape {expected}, of an even width, got {got}")


def _rotated(x: Tensor, cosines: Tensor | None, sines: Tensor | None) -> Tensor:
    """Rotate x, [batch, tokens, heads, width], with plain torch operations."""
    _check_angles(x, cosines, sines)
    if cosines is None or sines is None:
        return x
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    first, second = x.to(wide).chunk(2, -1)
    cosines, sines = (each.to(wide)[:, :, None] for each in (cosines, sines))
    return (x.to(wide) * cosines + torch.cat([-second, first], -1) * sines).to(x.dtype)


def _write(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, counts: Tensor,
    cosines: Tensor | None = None, sines: Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> None:  # fmt: skip
    """Append in place with plain torch operations: the meaning of the op, and its CPU implementation."""
    _check_append((keys, values), (new_keys, new_values), starts, counts)
    _check_scales(keys, key_scale=key_scale, value_scale=value_scale)
    new_keys = _kept(_rotated(new_keys, cosines, sines), keys, key_scale)
    new_values = _kept(new_values, values, value_scale)
    tokens, length = new_keys.shape[1], keys.shape[2]
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        first, last = max(start, 0), min(start + min(count, tokens), length)
        if first < last:
            for cache, update in ((keys, new_keys), (values, new_values)):
                cache[row, :, first:last] = update[row, first - start : last - start].transpose(0, 1)


def _launch_write(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, counts: Tensor,
    cosines: Tensor | None = None, sines: Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> None:  # fmt: skip
    """Append in place on the GPU, by the kernel of the library."""
    _check_append((keys, values), (new_keys, new_values), starts, counts)
    _check_scales(keys, key_scale=key_scale, value_scale=value_scale)
    dtype, fp8 = dtype_name(new_keys.dtype), keys.dtype == E4M3
    if keys.shape[3] % 16 or values.shape[3] % 8 or dtype not in library.DTYPES:
        new_keys, cosines, sines = _rotated(new_keys, cosines, sines), None, None
    _check_angles(new_keys, cosines, sines)
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("twell: caches must be contiguous")
    lib = library.load_attention()
    rounds = fp8 and dtype in library.DTYPES and keys.shape[3] % 8 == 0 == values.shape[3] % 8
    if lib is None or fp8 != rounds:  # in a build without cuDNN's headers, or of a type or width that it does not round
        new_keys = _kept(_rotated(new_keys, cosines, sines), keys, key_scale)
        write_by_torch((keys, values), (new_keys, _kept(new_values, values, value_scale)), starts, counts)
        return
    read = [each.contiguous() for each in (new_keys, new_values, starts, counts)]
    batch, heads, length, _ = keys.shape
    key_bytes, value_bytes = (each.shape[3] * each.element_size() for each in (new_keys, new_values))
    rotated = int(cosines is not None)
    read += [each.contiguous() for each in (cosines, sines) if each is not None]
    problem = library.AppendProblem(
        batch, new_keys.shape[1], length, heads, key_bytes, value_bytes, rotated, library.DTYPES.get(dtype, 0),
        int(fp8), key_scale, value_scale,
    )  # fmt: skip
    tensors = library.AppendTensors(keys.data_ptr(), values.data_ptr(), *(each.data_ptr() for each in read))
    with torch.cuda.device(keys.device):
        status = lib.twell_append_caches(problem, tensors, torch.cuda.current_stream().cuda_stream)
    if status:
        raise RuntimeError(f"twell: appending to caches failed with CUDA error {status}")


def write_by_torch(caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], starts: Tensor, counts: Tensor) -> None:
    """Append in place by torch, without waiting for the GPU; new keys are rotated already.

    New keys and values are of the caches' type. Tokens of padding, or behind the last place, write the last other token
    again; without one they write the value that is there already.
    """
    length, tokens = caches[0].shape[2], new[0].shape[1]
    starts, counts = starts[:, None].long(), counts[:, None].long()
    last = torch.minimum(counts.clamp(max=tokens), length - starts) - 1
    token = torch.minimum(torch.arange(tokens, device=starts.device), last).clamp(min=0)
    place = (starts + token).clamp(max=length - 1)
    row = torch.arange(len(starts), device=starts.device)[:, None]
    for cache, update in zip(caches, new, strict=True):
        if cache.dtype == E4M3:  # torch chooses among few types
            cache, update = cache.view(torch.uint8), update.view(torch.uint8)
        # Advanced indices on both sides of a slice: the result's axes are [batch, tokens, kv_heads, width].
        cache[row, :, place] = torch.where((last >= 0)[:, :, None, None], update[row, token], cache[row, :, place])


def _copied(write: Any) -> Any:
    """Return a function that returns new caches, from one that writes in place."""

    def append(keys: Tensor, values: Tensor, *new: Any) -> tuple[Tensor, Tensor]:
        keys, values = (each.clone(memory_format=torch.contiguous_format) for each in (keys, values))
        write(keys, values, *new)
        return keys, values

    return append


def _infer_write(
    keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, starts: Tensor, counts: Tensor,
    cosines: Tensor | None = None, sines: Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> None:  # fmt: skip
    _check_append((keys, values), (new_keys, new_values), starts, counts)
    _check_scales(keys, key_scale=key_scale, value_scale=value_scale)
    _check_angles(new_keys, cosines, sines)


def _infer_append(keys: Tensor, values: Tensor, *new: Any) -> tuple[Tensor, Tensor]:
    _infer_write(keys, values, *new)
    return keys.new_empty(keys.shape), values.new_empty(values.shape)


# ---- attention ----


def _check_attention(
    q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor, scales: tuple[float, float]
) -> None:
    check_operands(1, E4M3 if keys.dtype == E4M3 else None, q=q, keys=keys, values=values)
    _check_scales(keys, key_scale=scales[0], value_scale=scales[1])
    check_counts(q.shape[0], query_counts=query_counts, key_counts=key_counts)


def _compute(
    q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor, scale: float,
    cosines: Tensor | None = None, sines: Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Compute attention with plain torch operations: the meaning of the op, and its CPU implementation."""
    _check_attention(q, keys, values, query_counts, key_counts, (key_scale, value_scale))
    q = _rotated(q, cosines, sines)
    seen, real = _visible(q, keys, query_counts, key_counts)
    if keys.dtype == E4M3:
        y = _attend_by_heads(q, keys, values, seen, scale * key_scale) * value_scale
    else:
        y = attend(q, keys.transpose(1, 2), values.transpose(1, 2), seen[:, None], scale)
    return y.masked_fill(~real[:, :, None, None], 0).to(q.dtype).contiguous()


def _attend_by_heads(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Compute `attend` over one head of the caches after the other, so that only its keys and values are widened."""
    kv_heads = keys.shape[1]
    groups = q.unflatten(2, (kv_heads, q.shape[2] // kv_heads)).unbind(2)
    of_heads = zip(groups, keys.split(1, 1), values.split(1, 1), strict=True)
    return torch.cat([attend(g, k.transpose(1, 2), v.transpose(1, 2), seen[:, None], scale) for g, k, v in of_heads], 2)


def _visible(q: Tensor, keys: Tensor, query_counts: Tensor, key_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys that each query sees, bool [batch, tokens, keys], and the real queries, [batch, tokens]."""
    tokens, length = q.shape[1], keys.shape[2]
    queries, step = query_counts[:, None], torch.arange(tokens, device=q.device)
    last = key_counts[:, None] - queries + torch.minimum(step, queries - 1)  # the last key of each query
    return torch.arange(length, device=q.device) <= last[:, :, None], step < queries


class _Plans:
    """The cuDNN plans of a process: only one thread may use each at a time, and it must outlive CUDA graphs with it.

    Attributes:
        known: The plans by problem, each with its workspace in bytes; None where cuDNN has no plan.
        lock: Held while a plan is made or used.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[Any, tuple[int, int] | None] = {}

    def of(self, lib: ctypes.CDLL, device: torch.device, problem: library.AttentionProblem) -> tuple[int, int] | None:
        """Return the plan of a problem and its workspace in bytes; None where cuDNN has none."""
        key = (device.index, bytes(problem))
        if key not in self.known:
            message = ctypes.create_string_buffer(_MESSAGE_BYTES)
            plan = lib.twell_attention_create(problem, message, len(message))
            self.known[key] = (plan, lib.twell_attention_workspace_bytes(plan)) if plan else None
        return self.known[key]


_PLANS = _Plans()


@functools.cache
def _library_with_cudnn() -> ctypes.CDLL | None:
    try:
        load_cudnn()
        return library.load_attention()
    except UserError:  # a library of another version is not an error here, as torch has its own attention
        return None


def attends_by_cudnn() -> bool:
    """Whether cuDNN is at hand for attention on a GPU; elsewhere the op makes a mask in each call."""
    return _library_with_cudnn() is not None


def _launch(
    q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor, scale: float,
    cosines: Tensor | None = None, sines: Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Run attention on the GPU: the library's, by its own kernel or cuDNN's, else torch's with a mask."""
    _check_attention(q, keys, values, query_counts, key_counts, (key_scale, value_scale))
    if q.shape[3] % 16:
        q, cosines, sines = _rotated(q, cosines, sines), None, None
    _check_angles(q, cosines, sines)
    lib, dtype = _library_with_cudnn(), dtype_name(q.dtype)
    with torch.cuda.device(q.device):
        if lib is not None and dtype in library.DTYPES:
            (batch, tokens, heads, width), (kv_heads, length) = q.shape, keys.shape[1:3]
            rotated = int(cosines is not None)
            problem = library.AttentionProblem(
                batch, tokens, length, heads, kv_heads, width, library.DTYPES[dtype], scale=scale, cached=1,
                rotated=rotated, fp8=int(keys.dtype == E4M3), key_scale=key_scale, value_scale=value_scale,
            )  # fmt: skip
            with _PLANS.lock:
                plan = _PLANS.of(lib, q.device, problem)
                if plan is not None:
                    angles = [each for each in (cosines, sines) if each is not None]
                    return _run_plan(lib, plan, q, keys, values, query_counts, key_counts, *angles)
    if keys.dtype == E4M3:
        return _compute(q, keys, values, query_counts, key_counts, scale, cosines, sines, key_scale, value_scale)
    q = _rotated(q, cosines, sines)
    seen, real = _visible(q, keys, query_counts, key_counts)
    y = attend_by_torch(q, keys.transpose(1, 2), values.transpose(1, 2), seen[:, None], scale)
    return y.masked_fill(~real[:, :, None, None], 0).contiguous()


def _run_plan(lib: ctypes.CDLL, plan: tuple[int, int], *operands: Tensor) -> Tensor:
    q, keys, values, query_counts, key_counts, *angles = (each.contiguous() for each in operands)
    y = torch.empty_like(q)
    workspace = torch.empty(plan[1], dtype=torch.uint8, device=q.device)
    pointers = (each.data_ptr() for each in (q, keys, values, key_counts, y, query_counts, *angles))
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    stream = torch.cuda.current_stream().cuda_stream
    tensors = library.AttentionTensors(*pointers)
    if lib.twell_attention_run(plan[0], tensors, workspace.data_ptr(), stream, message, len(message)):
        raise RuntimeError(f"twell: {message.value.decode(errors='replace')}")
    return y


def _infer(
    q: Tensor, keys: Tensor, values: Tensor, query_counts: Tensor, key_counts: Tensor, scale: float,
    cosines: Tensor | None = None, sines: Tensor | None = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Give the shape and dtype of the result, for tracing."""
    _check_attention(q, keys, values, query_counts, key_counts, (key_scale, value_scale))
    _check_angles(q, cosines, sines)
    return q.new_empty(q.shape)


# ---- mask ----


def _mask(starts: Tensor, counts: Tensor, tokens: int, length: int) -> Tensor:
    check_counts(starts.shape[0], starts=starts, counts=counts)
    step = torch.arange(tokens, device=starts.device)
    last = starts[:, None] + torch.minimum(step, counts.clamp(min=1)[:, None] - 1)
    return (torch.arange(length, device=starts.device) <= last[:, :, None])[:, None]


def _infer_mask(starts: Tensor, counts: Tensor, tokens: int, length: int) -> Tensor:
    check_counts(starts.shape[0], starts=starts, counts=counts)
    return starts.new_empty((starts.shape[0], 1, tokens, length), dtype=torch.bool)


_OPTIONS = "Tensor? cosines=None, Tensor? sines=None, float key_scale=1.0, float value_scale=1.0"
_OPERANDS = f"Tensor new_keys, Tensor new_values, Tensor starts, Tensor counts, {_OPTIONS}"
APPEND: OpOverload = define(
    f"append_caches(Tensor keys, Tensor values, {_OPERANDS}) -> (Tensor, Tensor)",
    _copied(_write),
    _copied(_launch_write),
    _infer_append,
)
APPEND_IN_PLACE: OpOverload = define(
    f"append_caches_(Tensor(a!) keys, Tensor(b!) values, {_OPERANDS}) -> ()",
    _write,
    _launch_write,
    _infer_write,
)
# For each op that returns caches behind its other results: the op that writes them in place, and returns the others.
IN_PLACE: dict[OpOverload, OpOverload] = {APPEND: APPEND_IN_PLACE}
_ATTENTION = f"Tensor q, Tensor keys, Tensor values, Tensor query_counts, Tensor key_counts, float scale, {_OPTIONS}"
CACHED_ATTENTION: OpOverload = define(f"cached_attention({_ATTENTION}) -> Tensor", _compute, _launch, _infer)
CACHE_MASK: OpOverload = define(
    "cache_mask(Tensor starts, Tensor counts, SymInt tokens, SymInt length) -> Tensor", _mask, _mask, _infer_mask
)
