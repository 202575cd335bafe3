"""The encoder act(x W^T + b) and the decoder: their arguments, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from twellc.plugins.block import PLAIN, BlockOptions
from twellc.plugins.fp8 import E4M3
from twellc.plugins.kernel_calls import Given
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

    @classmethod
    def of(cls, given: Given) -> Encoder:
        """Return those of a call of `encode`, by its names."""
        options = BlockOptions(activation=given["activation"], threshold=given["threshold"])
        return cls(given["w_enc"], given["b_enc"], given["w_enc_scale"], options, given["thresholds"])

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


def check_decoder(given: Given) -> None:
    """Raise ValueError or TypeError for arguments of `decode`, and `d_ff`, that do not fit."""
    w_dec, b_dec, values = given["w_dec"], given["b_dec"], given["values"]
    check_matrix("w_dec", w_dec)
    check_tensor("w_dec", w_dec, (given["d_ff"], w_dec.shape[1]), w_dec.dtype)
    check_floating(w_dec.dtype)
    check_tensor("values", values, tuple(values.shape), w_dec.dtype, "the weights")
    if b_dec is not None:
        check_tensor("b_dec", b_dec, (w_dec.shape[1],), w_dec.dtype, "the weights")
