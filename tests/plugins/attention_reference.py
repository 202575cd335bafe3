"""What attention must compute: a float64 reference, the plain low-precision computation, and cases for both."""

import itertools
import math

import torch
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16


def operands(
    batch: int, tokens: int, keys: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (batch, tokens, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width)
    q, k, v = (torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def truth(q: Tensor, k: Tensor, v: Tensor, lengths: list[int] | None, scale: float, causal: bool) -> Tensor:
    """Compute attention in float64, query by query, from the keys that it sees and no others."""
    q, k, v = q.double(), k.double(), v.double()
    y = torch.empty_like(q)
    group = q.shape[2] // k.shape[2]
    for b, i, h in itertools.product(*map(range, q.shape[:3])):
        count = k.shape[1] if lengths is None else min(max(lengths[b], 1), k.shape[1])
        seen = slice(0, min(count, i + 1) if causal else count)
        weights = torch.softmax(scale * (k[b, seen, h // group] @ q[b, i, h]), 0)
        y[b, i, h] = weights @ v[b, seen, h // group]
    return y


def plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int] | None, scale: float, causal: bool) -> Tensor:
    """Compute attention with every step rounded to the low precision: the yardstick of errors."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), *(t.transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    places = torch.arange(k.shape[2], device=q.device)
    if lengths is not None:
        counts = torch.tensor(lengths, device=q.device).clamp(1, k.shape[2])
        scores = scores.masked_fill(places >= counts[:, None, None, None], -math.inf)
    if causal:
        scores = scores.masked_fill(places > places[:, None], -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


# batch, tokens, keys, heads, kv_heads, width; lengths; causal
CASES: dict[str, tuple[tuple[int, ...], list[int] | None, bool]] = {
    "mha": ((2, 5, 5, 3, 3, 16), None, False),
    "mha-causal": ((2, 7, 7, 2, 2, 8), None, True),
    "gqa": ((1, 9, 9, 6, 2, 24), None, False),
    "gqa-causal": ((2, 9, 9, 6, 2, 24), None, True),
    "mqa-causal": ((1, 13, 13, 5, 1, 40), None, True),
    "other-keys": ((2, 3, 11, 4, 2, 16), None, False),
    "lengths": ((4, 6, 6, 4, 2, 16), [6, 1, 4, 2], False),
    "lengths-causal": ((4, 6, 6, 4, 2, 16), [6, 1, 4, 2], True),
    "lengths-out-of-range": ((4, 5, 5, 2, 1, 16), [0, -3, 5, 9], True),
    "lengths-other-keys": ((2, 3, 11, 4, 4, 16), [11, 7], False),
    "one-token": ((2, 1, 1, 4, 2, 64), None, True),
    "one-query": ((2, 1, 17, 4, 2, 64), [17, 3], False),
    "width-256": ((1, 3, 3, 2, 1, 256), None, True),
}
