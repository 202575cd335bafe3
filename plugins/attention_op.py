"""The torch op of attention.

    torch.ops.twell.attention   y[b, i, h] = sum over j of p[j] v[b, j, g],  p = softmax(scale * k[b, :, g] q[b, i, h])

Shapes: q and y [batch, tokens, heads, width], k and v [batch, keys, kv_heads, width]; heads is a multiple of kv_heads,
and head h uses g = h // (heads / kv_heads). All share one dtype. lengths, int32 [batch] or None, says how many leading
keys of each sequence count; without it all do. A length below 1 counts as 1 and one above `keys` as `keys`, so every
query has a result, also one in the padding. If causal, query i sees keys 0 to i only, and tokens must equal keys.

The CPU implementation is the meaning: float32 (float64 for float64 input), rounded once. The CUDA implementation is
torch's own `scaled_dot_product_attention`, which rounds the weights, too, before they meet v. A NaN or an infinity in a
query, or in a key or value that it sees, reaches its result; from a key that it does not see it may or may not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"twell: {name} must have four dimensions, got {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"twell: {name} must be {q.dtype} like q, got {tensor.dtype}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"twell: q, k and v must be of a floating point type, got {q.dtype}")
    (batch, tokens, heads, width), (keys, kv_heads) = q.shape, k.shape[1:3]
    expected = (batch, keys, kv_heads, width)
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"twell: {name} must have shape {expected}, got {tuple(tensor.shape)}")
    if keys < 1 or kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"twell: there must be keys, and heads must be a positive multiple of kv_heads, "
            f"got {keys}, {heads} and {kv_heads}"
        )
    if causal and tokens != keys:
        raise ValueError(f"twell: causal attention needs as many keys as tokens, got {keys} and {tokens}")
    if lengths is not None and (lengths.dtype != torch.int32 or tuple(lengths.shape) != (batch,)):
        raise ValueError(
            f"twell: lengths must be int32 of shape {(batch,)}, got {lengths.dtype} {tuple(lengths.shape)}"
        )


def _visible(q: Tensor, k: Tensor, lengths: Tensor | None, causal: bool) -> Tensor | None:
    """Return which keys each query sees: bool, as [batch or 1, 1, tokens or 1, keys]; None where it sees all."""
    tokens, keys = q.shape[1], k.shape[1]
    seen = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril()[None, None] if causal else None
    if lengths is not None:
        counted = torch.arange(keys, device=q.device) < lengths.clamp(1, keys)[:, None]
        padding = counted[:, None, None, :]
        seen = padding if seen is None else seen & padding
    return seen


def _compute(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute attention with plain torch operations: the meaning of the op, and its CPU implementation."""
    _check(q, k, v, lengths, causal)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    kv_heads = k.shape[2]
    grouped = q.to(wide).unflatten(2, (kv_heads, q.shape[2] // kv_heads))
    scores = torch.einsum("bigrw,bjgw->bgrij", grouped, k.to(wide)) * scale
    seen = _visible(q, k, lengths, causal)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    y = torch.einsum("bgrij,bjgw->bigrw", scores.softmax(-1), v.to(wide))
    return y.flatten(2, 3).to(q.dtype).contiguous()


def _launch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Run torch's attention on the GPU."""
    _check(q, k, v, lengths, causal)
    # Without lengths by its flag: an explicit mask would keep torch from its fastest kernels.
    mask = None if lengths is None else _visible(q, k, lengths, causal)
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return y.transpose(1, 2).contiguous()


def _infer(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    _check(q, k, v, lengths, causal)
    return q.new_empty(q.shape)


_LIBRARY = torch.library.Library("twell", "FRAGMENT")
_LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? lengths, float scale, bool causal) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
for _key, _run in (("CPU", _compute), ("CUDA", _launch), ("Meta", _infer)):
    _LIBRARY.impl("attention", _run, _key)

ATTENTION: torch._ops.OpOverload = torch.ops.twell.attention.default
