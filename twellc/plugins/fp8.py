"""Matrices in FP8, that is E4M3 with scales, and their quantisation. docs/weights.md gives the meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from twellc.base.errors import UserError
from twellc.plugins.library import SCALE_BLOCK_SIZE

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
BLOCK = SCALE_BLOCK_SIZE
_SHARED_AXIS = {"tensor": None, "row": 1, "column": 0}  # the axis that a scale is shared along; None: both
# Elements in float32 at a time: at most this part of a tensor, and this many.
_PARTS, _MOST_ELEMENTS = 16, 1 << 24


class Fp8(NamedTuple):
    """A matrix in FP8.

    Attributes:
        values: float8_e4m3fn [rows, columns].
        scale: The factors of the values, float32: [], [rows, 1], [1, columns], or one for each block of 128 x 128,
            [rows / 128, columns / 128], rounded up.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def quantize(cls, weight: Tensor, form: str, where: str = "a weight") -> Fp8:
        """Round a matrix to E4M3. It takes a byte an element besides the matrix, and as much again for float32 parts.

        Args:
            weight: Of any floating type, [rows, columns].
            form: The part that shares a scale: `row`, `column` or `tensor`. Its largest magnitude becomes 448, E4M3's
                largest number; all zeros have the scale 1.
            where: The name of the matrix in messages.

        Raises:
            UserError: A weight is NaN or infinite.
        """
        largest = _largest(weight, _SHARED_AXIS[form])
        _refuse_not_finite(largest, weight, where)
        return cls(*_rounded(weight, largest))

    @classmethod
    def round_rows(cls, x: Tensor) -> Fp8:
        """Round x [..., width] to E4M3, with a scale for each row, [..., 1]. NaN stays NaN."""
        return cls(*_rounded(x, _largest(x, -1)))

    @property
    def form(self) -> str | None:
        """The part that shares a scale: `tensor`, `row`, `column` or `block`; None for other shapes of scales."""
        if self.values.dim() != 2:
            return None
        rows, columns = self.values.shape
        forms = {scale_blocks(rows, columns): "block", (1, columns): "column", (rows, 1): "row", (): "tensor"}
        return forms.get(tuple(self.scale.shape))

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        return self.values.shape

    @property
    def kind(self) -> str:
        """The name of this form in notes for the user."""
        return "E4M3" + f" with scales for blocks of {BLOCK} x {BLOCK}" * (self.form == "block")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return values times scale: in float64 exactly, else computed in float32 and rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = scale_of_each(self.scale, self.values.shape) if self.form == "block" else self.scale
        return self.values.to(wide).mul_(scale).to(dtype)

    def t(self) -> Fp8:
        """Return the transpose, a view."""
        return Fp8(self.values.t(), self.scale.t())


def scale_blocks(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a matrix that has one for each block of 128 x 128."""
    return math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)


def rows_of_blocks(rows: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """Return which rows of the scales of blocks belong to some rows of a matrix, (start, stop, step) of either.

    None if the rows do not begin with a block, or are not neighbours.
    """
    start, stop, step = rows
    return (start // BLOCK, math.ceil(stop / BLOCK), 1) if step == 1 and start % BLOCK == 0 else None


def scale_of_each(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the scales of blocks for each element of a matrix of a shape [rows, columns]."""
    rows, columns = shape
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def stacked_scales(matrices: Sequence[Fp8]) -> Tensor | None:
    """Return the scales of the rows of several matrices as one: [rows, 1], or of blocks if one matrix has such.

    Args:
        matrices: Of equally many columns, each with a scale for the tensor, for each row, or for each block.

    Returns:
        None if none of these forms has all scales: beside blocks one has a scale for each row, or a block of the whole
        would have rows of two matrices.
    """
    forms = {each.form for each in matrices}
    if "block" not in forms:
        return torch.cat([each.scale.expand(len(each.values), 1) for each in matrices]).contiguous()
    if "row" in forms or any(len(each.values) % BLOCK for each in matrices[:-1]):
        return None
    return torch.cat([each.scale.expand(scale_blocks(*each.values.shape)) for each in matrices])


def finite(weight: Tensor, where: str) -> None:
    """Fail if a matrix cannot be quantised; see `Fp8.quantize`."""
    _refuse_not_finite(_largest(weight, None), weight, where)


def refuse_nan(where: str, values: Tensor) -> None:
    """Raise a UserError if a matrix in E4M3 holds a NaN; `where` names it."""
    bits = values.detach().view(torch.int8)  # NaN is all ones, but for the sign
    if bits.numel() and (int(bits.max()) == 0x7F or bool((bits == -1).any())):
        bad = int(values.float().isnan().sum())
        raise UserError(where, f"{bad} of {bits.numel()} weights in E4M3 are NaN", fix="Get the checkpoint again.")


def refuse_infinite(where: str, dequantized: Tensor) -> None:
    """Raise a UserError if a matrix, once E4M3 with finite scales, does not fit into its type; `where` names it."""
    if bool(dequantized.isinf().any()):
        what = "its weights in E4M3 times their scales overflow float16"
        raise UserError(where, what, expected="at most 65504", fix="Use --dtype bf16.")


def _parts(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a tensor to process one at a time: the axis to cut, the beginning, the length."""
    axis = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    length = tensor.shape[axis]
    most = min(tensor.numel() // _PARTS, _MOST_ELEMENTS)
    step = max(most * length // max(tensor.numel(), 1), 1)
    for begin in range(0, length, step):
        yield axis, begin, min(step, length - begin)


def _shared(scales: Tensor, part: tuple[int, int, int]) -> Tensor:
    """Return the scales of a part: all of them where they are shared along the cut axis."""
    return scales.narrow(*part) if scales.dim() and scales.shape[part[0]] > 1 else scales


def _largest(tensor: Tensor, axis: int | None) -> Tensor:
    """Return the largest magnitudes in float32, [] or 1 long along the axis that shares one; NaN where there is one."""
    shape = [1 if i == axis % tensor.dim() else size for i, size in enumerate(tensor.shape)] if axis is not None else []
    largest = tensor.new_zeros(shape, dtype=torch.float32)
    for part in _parts(tensor):
        wide = tensor.detach().narrow(*part).to(torch.float32, copy=True).abs_()
        own = _shared(largest, part)
        torch.maximum(own, wide.amax() if axis is None else wide.amax(axis, keepdim=True), out=own)
    return largest


def _rounded(tensor: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    # Not below float32's least normal number: GPUs may flush smaller ones to 0.
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    values = torch.empty_like(tensor, dtype=E4M3, requires_grad=False)
    for part in _parts(tensor):
        wide = tensor.detach().narrow(*part).to(torch.float32, copy=True)
        values.narrow(*part).copy_(wide.div_(_shared(scale, part)).clamp_(-LARGEST, LARGEST))
    return values, scale


def _refuse_not_finite(largest: Tensor, weight: Tensor, where: str) -> None:
    if largest.isfinite().all():
        return
    bad = sum(int((~weight.detach().narrow(*part).float().isfinite()).sum()) for part in _parts(weight))
    what = f"cannot be quantised: {bad} of {weight.numel()} weights are NaN, or infinite in float32"
    fix = "Mend the model, or leave the block in its own type."
    raise UserError(where, what, expected="finite weights", fix=fix)
