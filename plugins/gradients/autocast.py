"""The ops under autocast: their tensors are cast to its type, as those of `torch.nn.functional.linear` are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_DEVICES = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def register_autocast(library: torch.library.Library, op: torch._ops.OpOverload) -> None:
    """Let an op take what autocast is for: tensors of float32, bfloat16 and float16 together."""
    names = [each.name for each in op._schema.arguments]
    for device, key in _DEVICES.items():
        library.impl(op._schema.name.partition("::")[2], _casting(op, names, device, key), key.name)


def _casting(
    op: torch._ops.OpOverload, names: Sequence[str], device: str, key: torch._C.DispatchKey
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(names, arguments, strict=False)), **named}
        dtype = torch.get_autocast_dtype(device)
        residual = given.get("residual")
        # Added in its own type: what a dense block adds to the result of its last projection.
        is_wider = residual is not None and residual.dtype == torch.float32
        cast = {
            name: value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CASTABLE else value
            for name, value in {**given, "residual": None if is_wider else residual}.items()
        }
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            found = op(**cast)
        if residual is None or not is_wider:
            return found
        return residual + found if isinstance(found, Tensor) else (residual + found[0], *found[1:])

    return call
