"""Features on a CPU, computed in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.fp8 import Fp8
from twellc.plugins.meaning import activate, math_dtype

# Neurons, tokens and entries of a piece.
_NEURONS, _TOKENS, _ENTRIES = 4096, 256, 4096


def encode(
    operands: Operands[Tensor], x: Tensor, options: BlockOptions, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, values and offsets of all tokens."""
    wide, found = math_dtype(x.dtype), []
    for first in range(0, len(operands.w_up), _NEURONS):
        own = slice(first, first + _NEURONS)
        weight, scale = operands.w_up[own], operands.w_up_scale
        if scale is not None:
            weight = Fp8(weight, scale[own] if scale.dim() else scale).dequantize(wide)
        bias = None if operands.b_up is None else operands.b_up[own].to(wide)
        threshold = options.threshold if operands.thresholds is None else operands.thresholds[own]
        for begin in range(0, len(x), _TOKENS):
            z = torch.nn.functional.linear(x[begin : begin + _TOKENS].to(wide), weight.to(wide), bias).to(x.dtype)
            g = activate(z, options.activation, threshold)
            token, neuron = g.nonzero(as_tuple=True)
            found.append((token + begin, (neuron + first).int(), g[token, neuron]))
    tokens, indices, values = map(torch.cat, zip(*found, strict=True)) if found else _nothing(x)
    order = tokens.argsort(stable=True)
    counts = tokens.bincount(minlength=len(x))
    lists = [indices[order], values[order]]
    if capacity is not None:
        lists = [torch.nn.functional.pad(each, (0, capacity - len(each))) for each in lists]
    return lists[0], lists[1], torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _nothing(x: Tensor) -> Iterator[Tensor]:
    return iter((x.new_empty(0, dtype=torch.int64), x.new_empty(0, dtype=torch.int32), x.new_empty(0)))


def decode(operands: Operands[Tensor], entries: tuple[Tensor, Tensor], offsets: Tensor | None, tokens: int) -> Tensor:
    """Return y [tokens, d_out]."""
    w_dec, (indices, values) = operands.w_down, entries
    wide, capacity = math_dtype(values.dtype), len(indices)
    y = torch.zeros(tokens, w_dec.shape[1], dtype=wide)
    counts = capacity // max(1, tokens) if offsets is None else offsets.diff()
    rows = torch.arange(tokens).repeat_interleave(counts)[:capacity]
    indices, values = indices[: len(rows)].long(), values[: len(rows)]  # uint8 would take d_ff modulo 256
    known = (indices >= 0) & (indices < len(w_dec))
    factors = values.to(wide).where(known, math.nan)
    for place in torch.split((values != 0).nonzero()[:, 0], _ENTRIES):
        read = w_dec[indices[place].where(known[place], 0)].to(wide)
        y.index_add_(0, rows[place], read * factors[place, None])
    if offsets is not None:
        y[offsets[1:] > capacity] = math.nan
    return (y if operands.b_down is None else y + operands.b_down.to(wide)).to(values.dtype)
