"""Quantise weights to E4M3: the one place that makes FP8 of other types. docs/weights.md says what they mean."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from twellc.base.errors import UserError
from twellc.plugins.meaning import E4M3

LARGEST = torch.finfo(E4M3).max
_SHARED_AXIS = {"tensor": None, "neuron": 1, "output": 0}  # the axis that a scale is shared along; None: both
# What is in float32 at a time: at most this part of a tensor, and this many elements.
_PARTS, _MOST_ELEMENTS = 16, 1 << 24


def quantise(weight: Tensor, kind: str, where: str = "a weight") -> tuple[Tensor, Tensor]:
    """Return a matrix in E4M3, and its scales: it is about one times the other.

    Beside the matrix it takes its elements in bytes, and at most as much again for parts of it in float32.

    Args:
        weight: Of any floating type, [rows, columns]. As blocks store them, w_down included, a row is a neuron; of the
            weight of a down projection's torch.nn.Linear a row is an output.
        kind: `neuron`: a scale for each row, [rows, 1]; `output`: for each column, [1, columns]; `tensor`: one, [].
        where: What the message of an error calls the matrix.

    Returns:
        float8_e4m3fn in the shape of the weight, and float32: the largest magnitude of what shares a scale becomes 448,
        E4M3's largest number. What is all zeros has the scale 1.

    Raises:
        UserError: A weight is NaN or infinite.
    """
    largest = _largest(weight, _SHARED_AXIS[kind])
    _refuse_not_finite(largest, weight, where)
    return _rounded(weight, largest)


def finite(weight: Tensor, where: str) -> None:
    """Fail if a matrix cannot be quantised; see `quantise`."""
    _refuse_not_finite(_largest(weight, None), weight, where)


def refuse_nan(where: str, weight: Tensor) -> None:
    """Raise a UserError if a matrix in E4M3 holds a NaN; `where` names it."""
    bits = weight.detach().view(torch.int8)  # NaN is all ones, but for the sign
    if bits.numel() and (int(bits.max()) == 0x7F or bool((bits == -1).any())):
        bad = int(weight.float().isnan().sum())
        raise UserError(where, f"{bad} of {bits.numel()} weights in E4M3 are NaN", fix="Get the checkpoint again.")


def refuse_infinite(where: str, worth: Tensor) -> None:
    """Raise a UserError if a matrix, once E4M3 with finite scales, does not fit into its type; `where` names it."""
    if bool(worth.isinf().any()):
        what = "its weights in E4M3 times their scales overflow float16"
        raise UserError(where, what, expected="at most 65504", fix="Use --dtype bf16.")


def rounded(wide: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Return a tensor in E4M3 and its float32 scales, which `axis` shares; None: one for all. NaN stays NaN."""
    return _rounded(wide, _largest(wide, axis))


def _parts(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the parts of a tensor that are worked on at once: the axis that is cut, a begin, a length."""
    axis = max(range(tensor.dim()), key=tensor.shape.__getitem__)
    length = tensor.shape[axis]
    most = min(tensor.numel() // _PARTS, _MOST_ELEMENTS)
    step = max(most * length // max(tensor.numel(), 1), 1)
    for begin in range(0, length, step):
        yield axis, begin, min(step, length - begin)


def _shared(scales: Tensor, part: tuple[int, int, int]) -> Tensor:
    """Return the scales of a part: all of them where they are shared along the axis that is cut."""
    return scales.narrow(*part) if scales.dim() and scales.shape[part[0]] > 1 else scales


def _largest(tensor: Tensor, axis: int | None) -> Tensor:
    """Return the largest magnitudes in float32, [] or 1 long along the axis that shares one; NaN where one is."""
    shape = [1 if i == axis % tensor.dim() else size for i, size in enumerate(tensor.shape)] if axis is not None else []
    largest = tensor.new_zeros(shape, dtype=torch.float32)
    for part in _parts(tensor):
        wide = tensor.detach().narrow(*part).to(torch.float32, copy=True).abs_()
        own = _shared(largest, part)
        torch.maximum(own, wide.amax() if axis is None else wide.amax(axis, keepdim=True), out=own)
    return largest


def _rounded(tensor: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    # Not below float32's least normal number: GPUs may take what is below for 0.
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    q = torch.empty_like(tensor, dtype=E4M3, requires_grad=False)
    for part in _parts(tensor):
        wide = tensor.detach().narrow(*part).to(torch.float32, copy=True)
        q.narrow(*part).copy_(wide.div_(_shared(scale, part)).clamp_(-LARGEST, LARGEST))
    return q, scale


def _refuse_not_finite(largest: Tensor, weight: Tensor, where: str) -> None:
    if largest.isfinite().all():
        return
    bad = sum(int((~weight.detach().narrow(*part).float().isfinite()).sum()) for part in _parts(weight))
    what = f"cannot be quantised: {bad} of {weight.numel()} weights are NaN, or infinite in float32"
    fix = "Mend the model, or leave the block in its own type."
    raise UserError(where, what, expected="finite weights", fix=fix)
