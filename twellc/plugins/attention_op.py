"""The torch op of attention.

    torch.ops.twell.attention   y[b, i, h] = sum over j of p[j] v[b, j, g],  p = softmax(scale * k[b, :, g] q[b, i, h])

Shapes: q and y [batch, tokens, heads, width], k and v [batch, keys, kv_heads, width]; heads is a multiple of kv_heads,
and head h uses g = h // (heads / kv_heads). All share one dtype. lengths, int32 [batch] or None, is the number of
leading keys of each sequence that count; without it all do. A length below 1 counts as 1 and one above `keys` as
`keys`, so every query has a result, also one in the padding. If causal, query i sees keys 0 to i only, and tokens must
equal keys.

The CPU implementation is the meaning: float32 (float64 for float64 input), rounded once. The CUDA implementation is
torch's own `scaled_dot_product_attention`, which also rounds the weights before the product with v. A NaN or an
infinity in a query, or in a key or value that it sees, reaches its result; from a key that it does not see it may or
may not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twellc.base.torch_private import OpOverload
from twellc.plugins.torch_library import define

# ---- shared with attention over a cache ----


def check_operands(heads_at: int, stored: torch.dtype | None = None, **operands: Tensor) -> None:
    """Fail if queries, keys and values, in this order, do not fit each other.

    Args:
        heads_at: The dimension of the heads of keys and values, 1 or 2; the other one is that of their places.
        stored: The dtype of keys and values; None: that of the queries.
        operands: The queries [batch, tokens, heads, width], the keys and the values.
    """
    q, keys, _ = operands.values()
    for name, tensor in operands.items():
        if tensor.dim() != 4:
            raise ValueError(f"twell: {name} must have four dimensions, got {tuple(tensor.shape)}")
        if tensor is not q and tensor.dtype != (stored or q.dtype):
            raise TypeError(f"twell: {name} must be {stored or f'{q.dtype} like q'}, got {tensor.dtype}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"twell: {', '.join(operands)} must be of a floating point type, got {q.dtype}")
    (batch, _, heads, width), kv_heads, length = q.shape, keys.shape[heads_at], keys.shape[3 - heads_at]
    expected = (batch, *keys.shape[1:3], width)
    for name, tensor in list(operands.items())[1:]:
        if tuple(tensor.shape) != expected:
            raise ValueError(f"twell: {name} must have shape {expected}, got {tuple(tensor.shape)}")
    if length < 1 or kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"twell: there must be keys, and heads must be a positive multiple of kv_heads, "
            f"got {length}, {heads} and {kv_heads}"
        )


def check_counts(batch: int, **counts: Tensor) -> None:
    """Fail if one of these is not int32 [batch]."""
    for name, tensor in counts.items():
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != (batch,):
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"twell: {name} must be int32 of shape {(batch,)}, got {got}")


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Compute attention with plain torch operations, in float32 (float64 for float64).

    Args:
        q: The queries [batch, tokens, heads, width].
        k: The keys [batch, keys, kv_heads, width].
        v: The values, as the keys.
        seen: Which keys each query sees: bool, [batch or 1, 1, tokens or 1, keys]; None where it sees all.
        scale: See the op.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(wide).unflatten(2, (k.shape[2], q.shape[2] // k.shape[2]))
    scores = torch.einsum("bigrw,bjgw->bgrij", grouped, k.to(wide)) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    return torch.einsum("bgrij,bjgw->bigrw", scores.softmax(-1), v.to(wide)).flatten(2, 3)


def attend_by_torch(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, *, causal: bool = False
) -> Tensor:
    """Compute the same by torch's own attention; a causal call uses its flag, as masks exclude its fastest kernels."""
    y = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=seen,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


# ---- the op ----


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, causal: bool) -> None:
    check_operands(2, q=q, k=k, v=v)
    if causal and q.shape[1] != k.shape[1]:
        raise ValueError(f"twell: causal attention needs as many keys as tokens, got {k.shape[1]} and {q.shape[1]}")
    if lengths is not None:
        check_counts(q.shape[0], lengths=lengths)


def _visible(q: Tensor, k: Tensor, lengths: Tensor | None, causal: bool) -> Tensor | None:
    """Return which keys each query sees, see `attend`."""
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
    return attend(q, k, v, _visible(q, k, lengths, causal), scale).to(q.dtype).contiguous()


def _launch(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Run torch's attention on the GPU."""
    _check(q, k, v, lengths, causal)
    mask = None if lengths is None else _visible(q, k, lengths, causal)
    return attend_by_torch(q, k, v, mask, scale, causal=causal and mask is None).contiguous()


def _infer(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    _check(q, k, v, lengths, causal)
    return q.new_empty(q.shape)


ATTENTION: OpOverload = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? lengths, float scale, bool causal) -> Tensor",
    _compute,
    _launch,
    _infer,
)
