"""Features on a CPU, computed in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from twellc.features.encoder import Encoder, check_decoder
from twellc.plugins.fp8 import Fp8
from twellc.plugins.kernel_calls import Given
from twellc.plugins.meaning import combined, math_dtype, project

# Neurons, tokens and entries of a piece.
_NEURONS, _TOKENS, _ENTRIES = 4096, 256, 4096


@torch.no_grad()
def encode(given: Given, capacity: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, values and offsets of all tokens, of the arguments of `features.encode`."""
    encoder = Encoder.of(given)
    encoder.check(given["x"])
    x = given["x"].reshape(-1, given["x"].shape[-1])
    wide, found = math_dtype(x.dtype), []
    for first in range(0, len(encoder.weight), _NEURONS):
        own = slice(first, first + _NEURONS)
        weight, scale = encoder.weight[own], encoder.scale
        weight = (
            weight.to(wide) if scale is None else Fp8(weight, scale[own] if scale.dim() else scale).dequantize(wide)
        )
        bias = None if encoder.bias is None else encoder.bias[own]
        thresholds = None if encoder.thresholds is None else encoder.thresholds[own]
        for begin in range(0, len(x), _TOKENS):
            z = project(x[begin : begin + _TOKENS], weight, bias).to(x.dtype)
            g = combined(z, None, encoder.options, thresholds)[0].to(x.dtype)
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


@torch.no_grad()
def decode(given: Given, offsets: Tensor | None, leading: torch.Size) -> Tensor:
    """Return y [..., d_out], of the arguments of `features.decode` and `d_ff`."""
    check_decoder(given)
    indices, values, w_dec, b_dec = (given[name] for name in ("indices", "values", "w_dec", "b_dec"))
    indices, values, tokens = indices.reshape(-1), values.reshape(-1), math.prod(leading)
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
    y = (y if b_dec is None else y + b_dec.to(wide)).to(values.dtype)
    return y.reshape(*leading, w_dec.shape[1])
