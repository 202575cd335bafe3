"""Quantise weights to E4M3: the one place that makes eight bits of more. docs/weights.md says what they mean."""

from __future__ import annotations

import torch
from torch import Tensor

from twellc.base.errors import UserError
from twellc.plugins.meaning import EIGHT_BITS

LARGEST = torch.finfo(EIGHT_BITS).max
_SHARED_AXIS = {"tensor": None, "neuron": 1, "output": 0}  # the axis that a scale is shared along; None: both


def quantise(weight: Tensor, kind: str, where: str = "a weight") -> tuple[Tensor, Tensor]:
    """Return a matrix in E4M3, and its scales: it is about one times the other.

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
    return rounded(finite(weight, where), _SHARED_AXIS[kind])


def finite(weight: Tensor, where: str) -> Tensor:
    """Return a matrix in float32, or fail if it cannot be quantised; see `quantise`."""
    wide = weight.detach().float()
    bad = int((~wide.isfinite()).sum())
    if bad:
        what = f"cannot be quantised: {bad} of {wide.numel()} weights are NaN, or infinite in float32"
        expected = "finite weights"
        raise UserError(where, what, expected=expected, fix="Mend the model, or leave the block in its own type.")
    return wide


def rounded(wide: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Return a float32 tensor in E4M3 and its float32 scales, which `axis` shares; None: one for all. NaN stays NaN."""
    largest = wide.abs().amax() if axis is None else wide.abs().amax(axis, keepdim=True)
    # Not below float32's least normal number: GPUs may take what is below for 0.
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(largest == 0, torch.ones_like(scale), scale)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(EIGHT_BITS), scale
