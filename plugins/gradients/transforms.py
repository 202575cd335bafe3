"""Derivatives that the ops do not have: those of forward mode, and of `torch.func`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

_FIX = "run the model without the blocks: twellc.restore(model)"
NO_SECOND = (
    "twell: the blocks have no second derivative. For one (create_graph=True, gradient penalties, "
    f"torch.func.hessian) {_FIX}"
)
_NO_FORWARD_MODE = (
    f"twell: the blocks have no derivative in forward mode. For one (torch.func.jvp, dual tensors) {_FIX}"
)
_NO_TORCH_FUNC = f"twell: the blocks are not differentiable by torch.func. For that {_FIX}"


def is_forward_mode() -> bool:
    """Whether tensors may have tangents."""
    return forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether tensors may be those of `torch.func` or of forward mode."""
    return is_forward_mode() or torch._C._are_functorch_transforms_active()


def refuse_forward_mode(tensors: Iterable[object]) -> None:
    """Fail if one of these has a tangent, of which a result would know nothing.

    Raises:
        NotImplementedError: One has.
    """
    if is_forward_mode() and any(
        isinstance(each, Tensor) and forward_ad.unpack_dual(each).tangent is not None for each in tensors
    ):
        raise NotImplementedError(_NO_FORWARD_MODE)


def refuse_torch_func() -> None:
    """Fail if what autograd records is for `torch.func`.

    Raises:
        NotImplementedError: It is.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(_NO_TORCH_FUNC)
