"""Experts as serving engines compute them: a product for each block of an expert's tokens, in Triton.

Written after what vLLM's kernel does: blocks of an expert's tokens, sorted beforehand and padded, read
all of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Neurons and columns of a block, of the sum; blocks of tokens that go together; warps and stages.
Config = tuple[int, int, int, int, int]
FEW: tuple[Config, ...] = ((32, 64, 1, 4, 4), (64, 128, 1, 8, 4), (128, 128, 1, 8, 5), (32, 256, 1, 4, 5))
MANY: tuple[Config, ...] = ((128, 64, 1, 4, 4), (128, 64, 8, 8, 4), (256, 64, 8, 8, 3))


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    a, w, y, pairs, experts, weights, scales, n, k, blocks, num_pairs, by: tl.constexpr, is_up: tl.constexpr,
    scaled: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    columns = tl.cdiv(n, block_n)
    first = tl.program_id(0) // (group * columns) * group
    size = min(blocks - first, group)
    inside = tl.program_id(0) % (group * columns)
    block, column = first + inside % size, inside // size
    pair = tl.load(pairs + block * block_m + tl.arange(0, block_m)).to(tl.int64)
    expert = tl.load(experts + block).to(tl.int64)
    exists = pair < num_pairs
    out = column * block_n + tl.arange(0, block_n).to(tl.int64)
    steps = tl.arange(0, block_k)
    rows = a + (pair[:, None] // by) * k + steps[None, :]
    values = w + (expert * n + out % n)[None, :] * k + steps[:, None]
    total = tl.zeros((block_m, block_n), tl.float32)
    for at in range(0, k, block_k):
        inner = steps < k - at
        x = tl.load(rows, mask=exists[:, None] & inner[None, :], other=0.0)
        total += tl.dot(x, tl.load(values, mask=inner[:, None], other=0.0).to(x.dtype))
        rows += block_k
        values += block_k
    if scaled:
        total *= tl.load(scales + expert * n + out % n)[None, :]
    if is_up:
        total = tl.maximum(total, 0.0)
        total *= total
    else:
        total *= tl.load(weights + pair, mask=exists, other=0.0)[:, None]
    kept = exists[:, None] & (out < n)[None, :]
    tl.store(y + pair[:, None] * n + out[None, :], total.to(y.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _total(parts, y, d, top: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(1) * width + tl.arange(0, width)
    total = tl.zeros((width,), tl.float32)
    for i in range(top):
        total += tl.load(parts + (tl.program_id(0) * top + i) * d + at, mask=at < d, other=0.0).to(tl.float32)
    tl.store(y + tl.program_id(0) * d + at, total.to(y.dtype.element_ty), mask=at < d)


@dataclass(frozen=True)
class Routing:
    """Pairs by expert, pairs [blocks * rows], in blocks of rows, with the number of pairs where there is none."""

    pairs: Tensor
    experts: Tensor
    rows: int

    @classmethod
    def of(cls, ids: Tensor, experts: int, rows: int) -> Routing:
        """Sort ids [tokens, top]."""
        pairs: list[int] = []
        of_blocks: list[int] = []
        flat = ids.flatten().cpu()
        for expert in range(experts):
            own: Sequence[int] = (flat == expert).nonzero()[:, 0].tolist()
            blocks = -(-len(own) // rows)
            pairs += [*own, *[flat.numel()] * (blocks * rows - len(own))]
            of_blocks += [expert] * blocks
        sizes: dict[str, Any] = {"dtype": torch.int32, "device": ids.device}
        return cls(torch.tensor(pairs, **sizes), torch.tensor(of_blocks, **sizes), rows)


def run(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    routing: Routing,
    config: Config,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute experts with squared ReLU.

    Args:
        x: [tokens, d_model], bf16.
        up: [experts, d_ff, d_model], of the type of x, or of E4M3.
        down: [experts, d_model, d_ff], likewise.
        weights: [tokens, top], float32.
        routing: Which pair is where.
        config: Sizes of blocks.
        scales: Of E4M3: [experts, d_ff] and [experts, d_model].

    Returns:
        y [tokens, d_model], bf16.
    """
    (tokens, top), (_, d_ff, d_model), blocks = weights.shape, up.shape, len(routing.experts)
    h, parts, y = x.new_empty(tokens * top, d_ff), x.new_empty(tokens * top, d_model), torch.empty_like(x)
    neurons, columns, group, warps, stages = config
    for source, matrix, out, by, is_up in ((x, up, h, top, True), (h, down, parts, 1, False)):
        n, k = matrix.shape[1:]
        scale = weights if scales is None else scales[0 if is_up else 1]
        _product[(blocks * triton.cdiv(n, neurons),)](
            source, matrix, out, routing.pairs, routing.experts, weights, scale, n, k, blocks, tokens * top, by, is_up,
            scales is not None, routing.rows, neurons, columns, group, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    width = 1024
    _total[(tokens, triton.cdiv(d_model, width))](parts, y, d_model, top, width)
    return y
