"""The encoder act(x W^T + b): its arguments, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twellc.plugins.block import PLAIN, BlockOptions
from twellc.plugins.fp8 import E4M3
from twellc.plugins.meaning import (
    check_floating,
    check_matrix,
    check_scale,
    check_tensor,
    check_thresholds,
)


@dataclass(frozen=True)
class Encoder:
    """The arguments of `encode` but x, with the same meaning."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    options: BlockOptions
    thresholds: Tensor | None

    def check(self, x: Tensor) -> None:
        """Raise ValueError for a shape that does not fit or an option out of range, TypeError for another dtype."""
        check_matrix("w_enc", self.weight)
        (d_ff, d_model), dtype, like = self.weight.shape, self.weight.dtype, "the weights"
        if (dtype == E4M3) != (self.scale is not None):
            raise ValueError(f"twell: w_enc of {E4M3} has a scale, and no other: w_enc_scale does not fit")
        if self.scale is not None:
            check_scale("w_enc_scale", self.scale, [(), (d_ff, 1)])
            dtype, like = x.dtype, "x"
        check_floating(dtype)
        check_tensor("x", x, (*x.shape[:-1], d_model), dtype, like)
        if self.bias is not None:
            check_tensor("b_enc", self.bias, (d_ff,), dtype, like)
        self.options.check(PLAIN, d_ff)
        if self.thresholds is not None:
            check_thresholds(self.thresholds, self.options, d_ff)
