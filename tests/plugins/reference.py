"""What the kernels must compute: a float64 reference, the plain low-precision block, and the comparison of both.

This is the only home of tolerances for kernel tests. They come from the data: a kernel may be as far from float64 as
twice the plain low-precision block is, plus a floor for roundings and for sums in fp32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

TILE = 256

# How much worse than the plain block a kernel may be, in each row's RMS and maximum error.
_PLAIN_FACTOR = 2.0
# The floor, in roundings: where the plain block's own errors cancel by luck, a kernel still rounds z and y. (relu2
# doubles the error of z and rounds once more.)
_FLOOR_ROUNDINGS = {"relu": 1.0, "fatrelu": 1.0, "drelu": 1.0, "relu2": 3.0}


@dataclasses.dataclass(frozen=True)
class Block:
    """One feed-forward block and its input, all tensors in bfloat16 or float16.

    x [rows, d_model], w_gate and w_up [d_ff, d_model], w_down [d_ff, d_out], residual [rows, d_out]; a block without
    w_up is plain. fatrelu has one threshold, or float32 [d_ff].
    """

    x: Tensor
    w_gate: Tensor
    w_up: Tensor | None
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None
    residual: Tensor | None = None
    activation: str = "relu"
    threshold: float | Tensor = 0.0

    def to(self, device: str) -> Block:
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = rows @ weight.to(rows.dtype).t()
    return product if bias is None else product + bias.to(rows.dtype)


def _activate(z: Tensor, block: Block) -> Tensor:
    """Apply the gate activation; comparisons keep NaN."""
    cut = block.threshold if block.activation == "fatrelu" else 0.0
    # NOTE: a bfloat16 tensor rounds the number that it is compared with.
    g = torch.where(z.double() <= cut, torch.zeros_like(z), z)
    return g * g if block.activation == "relu2" else g


def _down(h: Tensor, active: Tensor, block: Block) -> Tensor:
    """residual + h Wd + bd over active neurons only: an inactive one adds 0 even where its weights are not finite."""
    w_down = block.w_down.to(h.dtype)
    h = torch.where(active, h, torch.zeros_like(h))
    if torch.isfinite(w_down).all():
        y = h @ w_down
    else:
        y = torch.stack([row[used] @ w_down[used] for row, used in zip(h, active, strict=True)])
    for added in (block.b_down, block.residual):
        if added is not None:
            y = y + added.to(h.dtype)
    return y


def gate_values(block: Block) -> Tensor:
    """The gate activations [rows, d_ff] as the kernels store them: z rounded to the element type, then activated.

    Summed in float64, so a value on a rounding boundary may come out differently than from a sum in fp32.
    """
    dtype = block.x.dtype
    z = _linear(block.x.double(), block.w_gate, block.b_gate).to(dtype)
    return _activate(z, block)


def _hidden(block: Block, g: Tensor) -> Tensor:
    if block.w_up is None:
        return g
    u = _linear(block.x.to(g.dtype), block.w_up, block.b_up)
    if block.activation == "drelu":
        u = torch.where(u <= 0, torch.zeros_like(u), u)
    return torch.where(g == 0, torch.zeros_like(g), g * u)


def reference(block: Block) -> Tensor:
    """The block in float64, from the low-precision inputs: no rounding anywhere. [rows, d_out]."""
    g = _activate(_linear(block.x.double(), block.w_gate, block.b_gate), block)
    return _down(_hidden(block, g), g != 0, block)


def emulate(block: Block, *, rounds_h: bool = False) -> Tensor:
    """The contract of twell.h in float64: gate activations are rounded, then nothing until y.

    Args:
        block: What to compute.
        rounds_h: Also round h, where the element type has room for it.
    """
    g = gate_values(block).double()
    h = _hidden(block, g)
    if rounds_h:
        rounded = h.to(block.x.dtype).double()
        h = torch.where(rounded.isinf(), h, rounded)
    return _down(h, g != 0, block).to(block.x.dtype)


def plain(block: Block) -> Tensor:
    """The best a dense low-precision block does: fp32 sums, one rounding for every tensor that it stores.

    The sum with the residual is stored, and y alone is not.
    """
    dtype = block.x.dtype
    z = _linear(block.x.float(), block.w_gate, block.b_gate).to(dtype)
    h = g = _activate(z, block)
    if block.w_up is not None:
        u = _linear(block.x.float(), block.w_up, block.b_up).to(dtype)
        h = g * (torch.where(u <= 0, torch.zeros_like(u), u) if block.activation == "drelu" else u)
    return _down(h.float(), g != 0, block).to(dtype)


def _sum_error(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """How far sums in fp32 are from rows weight^T + bias, all float64.

    Tensor cores add 16 products at a time or fewer and cut what a partial sum has beyond 24 bits: half of its last bit
    on average. In whatever order, partial sums are about as large as the root of the sum of squares of all terms.
    """
    squares = (rows * rows) @ (weight * weight).t()
    if bias is not None:
        squares += bias * bias
    steps = -(-rows.shape[1] // 16) + 1
    return squares.sqrt() * steps * 2.0**-24


def _hidden_error(block: Block) -> Tensor:
    """How far h [rows, d_ff] may be from float64 because z and u are summed in fp32.

    Where z comes close to the cut, a neuron may be active on one side and not on the other: for FATReLU that is a jump.
    """
    x, w_gate = block.x.double(), block.w_gate.double()
    b_gate = None if block.b_gate is None else block.b_gate.double()
    z = _linear(x, w_gate, b_gate)
    g = _activate(z, block)
    cut = block.threshold if block.activation == "fatrelu" else 0.0
    z_error = _sum_error(x, w_gate, b_gate)
    slope = 2 * z.abs() if block.activation == "relu2" else torch.ones_like(z)
    undecided = (z - cut).abs() <= z_error + torch.finfo(block.x.dtype).eps / 2 * z.abs()
    g_error = torch.where(undecided | (z > cut), slope * z_error, torch.zeros_like(z)) + undecided * cut
    if block.w_up is None:
        return g_error
    w_up = block.w_up.double()
    b_up = None if block.b_up is None else block.b_up.double()
    return g_error * _linear(x, w_up, b_up).abs() + g * _sum_error(x, w_up, b_up)


def _spread(h: Tensor, block: Block) -> Tensor:
    """How independent errors of h [rows, d_ff] show up in y [rows, d_out]: as the root of the sum of their squares."""
    h = torch.nan_to_num(h, posinf=0.0, neginf=0.0)
    w_down = torch.nan_to_num(block.w_down.double(), posinf=0.0, neginf=0.0)
    return ((h * h) @ (w_down * w_down)).sqrt()


def assert_close(actual: Tensor, block: Block, *, split: int = 0) -> None:
    """Check y [rows, d_out] of a kernel against float64.

    Args:
        actual: y.
        block: What was computed.
        split: So many neurons, the first ones, are summed with the bias and the residual and rounded, before the others
            are added.

    Raises:
        AssertionError: A wrong shape or dtype; a NaN or infinity where there should be none, or none where there should
            be; or a row whose error is out of proportion to the plain block's.
    """
    expected, base = reference(block), plain(block)
    dtype = block.x.dtype
    assert actual.shape == expected.shape, f"y has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == dtype, f"y is {actual.dtype}, expected {dtype}"

    zero = torch.zeros_like(expected)
    info = torch.finfo(dtype)
    h = _hidden(block, _activate(_linear(block.x.double(), block.w_gate, block.b_gate), block))
    rounded_h = info.eps / 2 * _spread(h, block)

    stored = expected.to(dtype)  # a value out of the element type's range becomes an infinity
    finite = torch.isfinite(stored)
    same = torch.isnan(stored) == torch.isnan(actual)
    same &= torch.where(torch.isinf(stored), actual == stored, True)
    same &= torch.isfinite(actual) | ~finite | ~torch.isfinite(base)  # where plain overflows, overflow is not a fault
    at_the_end = (expected.abs() - info.max).abs() <= _PLAIN_FACTOR * rounded_h + info.eps * info.max
    same |= at_the_end & ~torch.isnan(actual)  # of the element type's range: either is right
    finite |= at_the_end & torch.isfinite(actual)
    assert same.all(), (
        f"{int((~same).sum())} of {same.numel()} values differ in being finite, first at {_first(~same)}: "
        f"got {actual[~same][0].item()}, expected {expected[~same][0].item()}"
    )

    error = torch.where(finite & torch.isfinite(actual), (actual.double() - expected).abs(), zero)
    # Where the plain block overflows, it would at least have rounded h.
    base_error = torch.where(torch.isfinite(base), (base.double() - expected).abs(), rounded_h)
    base_error = torch.where(finite, base_error, zero)
    floor = _FLOOR_ROUNDINGS[block.activation] * (rounded_h + info.eps / 2 * torch.where(finite, expected.abs(), zero))
    floor += _spread(_hidden_error(block), block) + info.smallest_normal * info.eps
    if split:
        first = torch.nan_to_num(reference(_first_neurons(block, split)), posinf=0.0, neginf=0.0)
        floor += info.eps / 2 * first.abs()
    for name, norm in (("RMS", _row_rms), ("maximum", _row_max)):
        bound = _PLAIN_FACTOR * norm(base_error) + norm(floor)
        bad = ~(norm(error) <= bound)
        worst = int((norm(error) / bound).argmax())
        assert not bad.any(), (
            f"{int(bad.sum())} of {len(bad)} rows have too large a {name} error; worst in row {worst}: "
            f"{norm(error)[worst].item():.3e}, allowed {bound[worst].item():.3e} (plain low-precision block: "
            f"{norm(base_error)[worst].item():.3e}, y up to {expected[worst].abs().max().item():.3e})"
        )


def _first_neurons(block: Block, count: int) -> Block:
    names = ("w_gate", "b_gate", "w_up", "b_up", "w_down", "threshold")
    tensors = {name: getattr(block, name) for name in names}
    return dataclasses.replace(
        block, **{name: value[:count] for name, value in tensors.items() if isinstance(value, Tensor)}
    )


def _row_rms(values: Tensor) -> Tensor:
    return values.square().mean(dim=1).sqrt()


def _row_max(values: Tensor) -> Tensor:
    return values.amax(dim=1)


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def is_exact(block: Block) -> bool:
    """Say whether every sum of a block of integers is exact in fp32, whatever its order, so that y has one right value.

    Holds when the absolute terms of each sum add up to less than 2^24.
    """

    def magnitude(rows: Tensor, weight: Tensor, bias: Tensor | None) -> float:
        total = _linear(rows.double().abs(), weight.abs(), None if bias is None else bias.abs())
        return float(total.max())

    hidden = _hidden(block, gate_values(block).double())
    sums = [magnitude(block.x, block.w_gate, block.b_gate), magnitude(hidden, block.w_down.t(), block.b_down)]
    if block.residual is not None:
        sums[-1] += float(block.residual.abs().max())
    if block.w_up is not None:
        sums.append(magnitude(block.x, block.w_up, block.b_up))
    return max(sums) < 2**24 and all(
        bool((value == value.round()).all()) for value in vars(block).values() if isinstance(value, Tensor)
    )


@dataclasses.dataclass(frozen=True)
class Packed:
    """A decoded TwELL matrix.

    Attributes:
        bits: uint16 [rows, d_ff], the values' bit patterns; 0 where there is no entry and in tiles that overflowed.
        counts: int64 [rows, tiles], the stored numbers of non-zeros.
        overflowed: bool [rows, tiles], tiles whose count exceeds their slots.
        written: bool [rows, words], words that carry meaning: the counts and the entries of tiles that fit.
    """

    bits: np.ndarray
    counts: np.ndarray
    overflowed: np.ndarray
    written: np.ndarray


def decode(packed: np.ndarray, d_ff: int, compression: int) -> Packed:
    """Decode a TwELL matrix, uint32 [rows, tiles * (256 / compression)], and check that it is well-formed.

    Raises:
        AssertionError: A count larger than the tile, or an entry that is zero, out of its tile, or not in ascending
            column order.
    """
    rows, tiles, size = packed.shape[0], -(-d_ff // TILE), TILE // compression
    assert packed.shape == (rows, tiles * size), f"packed has shape {packed.shape}, expected {(rows, tiles * size)}"
    words = packed.reshape(rows, tiles, size)
    counts = words[:, :, 0].astype(np.int64)
    width = np.minimum(TILE, d_ff - TILE * np.arange(tiles))
    assert (counts <= width).all(), "a tile counts more non-zeros than it has columns"
    overflowed = counts > size - 1

    slot = np.arange(size - 1)
    used = (slot < counts[:, :, None]) & ~overflowed[:, :, None]
    columns = (words[:, :, 1:] & 0xFFFF).astype(np.int64)
    values = (words[:, :, 1:] >> 16).astype(np.uint16)
    first = TILE * np.arange(tiles)[None, :, None]
    inside = (columns >= first) & (columns < first + width[None, :, None])
    assert inside[used].all(), "an entry lies outside its tile"
    assert (values[used] & 0x7FFF != 0).all(), "an entry is zero"
    ascending = columns[:, :, 1:] > columns[:, :, :-1]
    assert ascending[used[:, :, 1:]].all(), "columns are not ascending"

    bits = np.zeros((rows, d_ff), np.uint16)
    row_of = np.broadcast_to(np.arange(rows)[:, None, None], used.shape)
    bits[row_of[used], columns[used]] = values[used]
    written = np.concatenate([np.ones((rows, tiles, 1), bool), used], axis=2).reshape(packed.shape)
    return Packed(bits, counts, overflowed, written)
