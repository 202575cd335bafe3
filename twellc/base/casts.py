"""Tensors of modules that keep their type where the module is cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def moves_only(fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor | None]) -> Callable[[Tensor], Tensor]:
    """Return a function for `Module._apply` that does what `fn` does, but never converts the tensors in `kept`.

    It is given these as integers, which `.half()` and the like leave alone, and `.to(device)` moves.
    """
    own = {id(tensor) for tensor in kept}

    def moved(tensor: Tensor) -> Tensor:
        if id(tensor) not in own:
            return fn(tensor)
        integers = tensor.detach().view(_INTEGERS[tensor.element_size()])
        found = fn(integers)
        return (found if found.dtype == integers.dtype else integers.to(found.device)).view(tensor.dtype)

    return moved
