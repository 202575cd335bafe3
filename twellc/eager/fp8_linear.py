"""Linear layers with FP8 weights, from checkpoints or quantised by `optimize`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from twellc.base.casts import moves_only
from twellc.plugins.fp8 import Fp8


class Fp8Linear(nn.Module):
    """x W^T + b in the type of x, where W is an FP8 matrix, dequantized.

    Attributes:
        weight: The values, float8_e4m3fn [out_features, in_features].
        scale: The scales, float32: [], [out_features, 1], [1, in_features] or of blocks; see `Fp8`.
        bias: [out_features], or None.
    """

    weight: nn.Parameter
    scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, matrix: Fp8, bias: nn.Parameter | None = None) -> None:
        """Take the tensors as they are. Weight and scale have no gradients."""
        super().__init__()
        self.out_features, self.in_features = matrix.values.shape
        self._parameters.update(_parameters_of(matrix))
        self.register_parameter("bias", bias)

    @staticmethod
    def take_over(linear: nn.Module, matrix: Fp8) -> None:
        """Turn a `torch.nn.Linear` into a layer in FP8, in place: bias, hooks and places in a model stay."""
        linear._parameters.update(_parameters_of(matrix))
        linear.__class__ = Fp8Linear

    @staticmethod
    def give_back(layer: nn.Module, weight: nn.Parameter) -> None:
        """Turn a layer in FP8 into a `torch.nn.Linear` with this weight, in place."""
        layer.__class__ = nn.Linear
        layer._parameters["weight"] = weight
        layer._parameters.pop("scale", None)

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., out_features] of x [..., in_features]."""
        return functional.linear(x, self.matrix.dequantize(x.dtype), self.bias)

    @property
    def matrix(self) -> Fp8:
        """The weight."""
        return Fp8(self.weight, self.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        """Let `.to()` and the like move bytes and scales, but never convert them."""
        super()._apply(moves_only(fn, self.matrix), recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Say the widths, as torch.nn.Linear does."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _parameters_of(matrix: Fp8) -> dict[str, nn.Parameter]:
    names = ("weight", "scale")
    return {name: nn.Parameter(each, requires_grad=False) for name, each in zip(names, matrix, strict=True)}


def holds_fp8(module: nn.Module) -> bool:
    """Whether a module has layers with FP8 weights."""
    return any(isinstance(each, Fp8Linear) for each in module.modules())


def traceable_twin(module: nn.Module) -> nn.Module:
    """Return a module for tracing that computes the same, with `torch.nn.Linear` in place of layers in FP8.

    Their weights are placeholders: zeros without memory. All else is shared. A module without such layers is returned
    itself.
    """
    if not holds_fp8(module):
        return module
    own = {id(parameter) for each in module.modules() if isinstance(each, Fp8Linear) for parameter in each.matrix}
    dtypes = [each.dtype for each in module.parameters() if each.is_floating_point() and id(each) not in own]
    # The narrowest of several dtypes, as thresholds, for one, are always float32.
    return _twin(module, min(dtypes, key=lambda each: each.itemsize, default=torch.bfloat16))


def _twin(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    twin: Any = copy.copy(module)
    state = vars(twin)
    state["_modules"] = {
        name: None if child is None else _twin(child, dtype) for name, child in module._modules.items()
    }
    if isinstance(module, Fp8Linear):
        weight = module.weight
        zeros = torch.zeros((), dtype=dtype, device=weight.device).expand(weight.shape)
        state["_parameters"] = {"weight": nn.Parameter(zeros, requires_grad=False), "bias": module.bias}
        twin.__class__ = nn.Linear
    return twin  # type: ignore[no-any-return]
