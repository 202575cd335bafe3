"""Tensors of modules that keep their type where the module is cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor


def moves_only(fn: Callable[[Tensor], Tensor], kept: Iterable[Tensor | None]) -> Callable[[Tensor], Tensor]:
    """Return a function for `Module._apply` that does what `fn` does, but never converts the tensors in `kept`."""
    own = {id(tensor) for tensor in kept}

    def moved(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        return tensor.to(found.device) if id(tensor) in own and found.dtype != tensor.dtype else found

    return moved
