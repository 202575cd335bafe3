"""Other modes of torch in a call of an op: autocast, derivatives in forward mode, and `torch.func`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from twellc.base.torch_private import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    OpOverload,
    are_functorch_transforms_active,
    forward_mode_level,
    schema_of,
)
from twellc.plugins.block import FLOAT32

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
    return forward_mode_level() >= 0


def is_transformed() -> bool:
    """Whether tensors may be those of `torch.func` or of forward mode."""
    return is_forward_mode() or bool(are_functorch_transforms_active())


def refuse_forward_mode(tensors: Iterable[object]) -> None:
    """Raise NotImplementedError if one of these has a tangent, as results would have none."""
    if is_forward_mode() and any(
        isinstance(each, Tensor) and forward_ad.unpack_dual(each).tangent is not None for each in tensors
    ):
        raise NotImplementedError(_NO_FORWARD_MODE)


def refuse_torch_func() -> None:
    """Raise NotImplementedError if autograd records for `torch.func`."""
    if are_functorch_transforms_active():
        raise NotImplementedError(_NO_TORCH_FUNC)


# ---- autocast ----

_DEVICES = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def register_autocast(library: torch.library.Library, op: OpOverload) -> None:
    """Let an op take float32, bfloat16 and float16 together: autocast casts them, as for `functional.linear`."""
    for device, key in _DEVICES.items():
        library.impl(schema_of(op).name.partition("::")[2], _casting(op, device, key), key.name)


def _casting(op: OpOverload, device: str, key: DispatchKey) -> Callable[..., Any]:
    names = [each.name for each in schema_of(op).arguments]

    def call(*arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **named}
        dtype = torch.get_autocast_dtype(device)
        residual = given.get("residual")
        # A residual keeps its type, as a dense block adds it to the result of the last projection.
        is_wider = residual is not None and residual.dtype == torch.float32
        cast = {
            name: value.to(dtype)
            if isinstance(value, Tensor) and value.dtype in _CASTABLE and name not in FLOAT32
            else value
            for name, value in {**given, "residual": None if is_wider else residual}.items()
        }
        with ExcludeDispatchKeyGuard(DispatchKeySet(key)):
            found = op(**cast)
        if residual is None or not is_wider:
            return found
        return residual + found if isinstance(found, Tensor) else (residual + found[0], *found[1:])

    return call
