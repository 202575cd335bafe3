"""A deferred hidden tensor: a placeholder between the two projections of a block that is written out.

    x ─ up ─ Hidden(x) ─ relu ─ Hidden(x) ─ down ─ y        down calls the op with x and the weights of both

So the layer's code between them need not be known beforehand: any other code that reads the hidden tensor gets it,
computed as without the op, and then `down` does not call the op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from twellc.base.torch_private import pytree

# Each activation as a sequence of functions.
STEPS = {"relu": ("relu",), "relu2": ("relu", "square")}
_FUNCTIONS: dict[Any, str] = dict.fromkeys((functional.relu, torch.relu, torch.relu_), "relu")
_FUNCTIONS[torch.square] = "square"
_OWN = {"_deferred", "_done", "_blended", "_value"}

# An activation on its way to ReLU.
Blended = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Deferred:
    """An up projection that is not computed yet.

    Attributes:
        dense: Computes the up projection.
        compute: Computes the block, with an activation on its way to ReLU, or None; returns None where the projections
            would compute another result now.
        down: The down projection of the block.
        activation: The activation of the block.
        blends: Whether `compute` takes an activation on its way to ReLU.
    """

    dense: Callable[[], Tensor]
    compute: Callable[[Blended | None], Tensor | None]
    down: nn.Module
    activation: str
    blends: bool


class Hidden:
    """A placeholder for the result of an up projection, and for its activation."""

    def __init__(self, deferred: Deferred, done: tuple[str, ...] = (), blended: Blended | None = None) -> None:
        """Make one.

        Args:
            deferred: The up projection.
            done: The functions that were applied to it.
            blended: The activation that was applied in place of ReLU.
        """
        self._deferred, self._done, self._blended = deferred, done, blended
        self._value: Tensor | None = None

    def result(self, down: nn.Module) -> Tensor | None:
        """Return the result of the block, if `down` is its down projection and this the right input of it."""
        return self._deferred.compute(self._blended) if self.is_whole(down) else None

    def is_whole(self, down: nn.Module) -> bool:
        """Whether `down` is the down projection of the block, and this the right input of it, not computed yet."""
        whole = self._done == STEPS[self._deferred.activation]
        return whole and down is self._deferred.down and self._value is None

    def value(self) -> Tensor:
        """Return the tensor itself: [..., d_ff]."""
        if self._value is None:
            value = self._deferred.dense()
            for step in self._done:
                value = (self._blended or torch.relu)(value) if step == "relu" else torch.square(value)
            self._value = value
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if args and isinstance(args[0], Hidden):
            after = args[0]._after(func, args[1:], named)
            if after is not None:
                return after
        return func(*real(tuple(args)), **real(named))

    def _after(self, func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Hidden | None:
        """Return the placeholder for the result of a function; None where it has to be computed."""
        if self._value is not None:
            return None
        if func is functional.dropout:
            p, training, _ = _dropout(*args, **named)
            return None if training and p > 0 else self
        done = (*self._done, _FUNCTIONS.get(func, ""))
        if done != STEPS[self._deferred.activation][: len(done)]:
            return None
        if func is torch.relu_ or (args[0] if args else named.get("inplace", False)):
            self._done = done
            return self
        return Hidden(self._deferred, done, self._blended)

    def blended(self, activation: Blended) -> Any:
        """Apply an activation on its way to ReLU."""
        block = self._deferred
        if self._value is None and not self._done and block.blends and STEPS[block.activation] == ("relu",):
            return Hidden(block, ("relu",), activation)
        return activation(self.value())

    def relu(self) -> Any:
        """Apply ReLU, as the method of a tensor does."""
        return torch.relu(self)  # type: ignore[arg-type]

    def relu_(self) -> Any:
        """Apply ReLU in place."""
        return torch.relu_(self)  # type: ignore[arg-type]

    def square(self) -> Any:
        """Square it."""
        return torch.square(self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.value(), name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the tensor itself."""
        return self.value().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[float, bool, bool]:
    """Take the arguments of `torch.nn.functional.dropout`."""
    return p, training, inplace


def real(values: Any) -> Any:
    """Return arguments or results with tensors in place of their placeholders."""
    return pytree.tree_map(lambda each: each.value() if isinstance(each, Hidden) else each, values)


def holds_hidden(result: Any) -> bool:
    """Whether the result of a forward is or contains a placeholder."""
    if isinstance(result, (tuple, list)):
        return any(map(holds_hidden, result))
    return any(map(holds_hidden, result.values())) if isinstance(result, dict) else isinstance(result, Hidden)


def _operator(name: str) -> Callable[..., Any]:
    def call(self: Hidden, *others: Any) -> Any:
        return getattr(self.value(), name)(*real(others))

    return call


# Python looks these up in the class.
_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg abs "
    "iadd isub imul itruediv lt le gt ge eq ne getitem setitem len iter bool"
)
for _name in _OPERATORS.split():
    setattr(Hidden, f"__{_name}__", _operator(f"__{_name}__"))
