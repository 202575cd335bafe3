"""The tensors and options of a linear layer with its norm and residual. Importing this imports no torch.

    y = residual + norm(x) W^T + b, norm one of none, rms and layer

Several weights that read the same x, such as those of queries, keys and values, are stacked in W, and `splits` holds
their numbers of rows: each has an output. With `choose` the output is int64 [...] instead: the index of the largest
element of y after rounding.

`TENSORS` and `LinearOptions` are two tables, as those of `block.py`: the torch op, the node in ONNX files, its
evaluator and the calls of the C API take names, types, defaults and order from here.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from twellc.plugins import library
from twellc.plugins.block import SCALES_FLAG, TensorField

T = TypeVar("T")
U = TypeVar("U")

TENSORS = (
    TensorField("x", ("...", "in"), "the input"),
    TensorField("weight", ("out", "in"), "the weight: torch.nn.Linear's"),
    TensorField("bias", ("out",), "its bias", "bias"),
    TensorField("norm_weight", ("in",), "multiplies normalised inputs; ones without it", "norm_weight"),
    TensorField("norm_bias", ("in",), "added to normalised inputs, in a layer norm", "norm_bias"),
    TensorField("residual", ("...", "out"), "added to the result", "residual"),
    # See docs/weights.md; [] means one for all outputs, [out / 128, in / 128], rounded up, one for each block.
    TensorField("weight_scale", ("out", "1"), "multiplies a weight in FP8", SCALES_FLAG),
)
# Attributes of a node, and their types.
ATTRIBUTES: dict[str, type] = {"norm": str, "eps": float, "splits": list, "choose": int} | {
    each.flag: int for each in TENSORS[2:]
}


@dataclass(frozen=True, kw_only=True)
class LinearOperands(Generic[T]):
    """The tensors of a layer, as tensors of torch, nodes of a graph, or other handles. See `TENSORS`."""

    x: T
    weight: T
    bias: T | None = None
    norm_weight: T | None = None
    norm_bias: T | None = None
    residual: T | None = None
    weight_scale: T | None = None

    def named(self) -> dict[str, T]:
        """Return those that are there, by name, in the order of `TENSORS`."""
        return {each.name: value for each in TENSORS if (value := getattr(self, each.name)) is not None}

    def arguments(self) -> list[T | None]:
        """Return those that the op takes by position, None for absent ones."""
        return [getattr(self, each.name) for each in TENSORS[:-1]]

    def map(self, function: Callable[[T], U]) -> LinearOperands[U]:
        """Return the same with each replaced by the function's result."""
        return LinearOperands(**{name: function(value) for name, value in self.named().items()})


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """The options of a layer, in the order in which the op takes them.

    Attributes:
        norm: The norm of x.
        eps: The number that the norm adds to the mean of squares, or to the variance.
        splits: The widths of the outputs, with the sum `out`; empty for one output.
        choose: Whether the output is the index of the largest element of each row of y, as `torch.argmax` finds it.
    """

    norm: str = "none"
    eps: float = 0.0
    splits: tuple[int, ...] = ()
    choose: bool = False

    def check(self, operands: LinearOperands[Any], out: int) -> None:
        """Raise ValueError if an option has an impossible value for these operands."""
        widths, most = self.widths(out), library.MAX_SPLITS
        expected = {
            "norm": "" if self.norm in library.NORMS else f"one of {', '.join(library.NORMS)}",
            "eps": "" if math.isfinite(self.eps) and self.eps >= 0 else "finite and at least 0",
            "splits": ""
            if len(widths) <= most and min(widths) > 0 and sum(widths) == out
            else f"at most {most} positive widths whose sum is {out}",
            "choose": "False with several outputs" if self.choose and len(self.splits) > 1 else "",
        }
        for name, fault in expected.items():
            if fault:
                raise ValueError(f"twell: {name} must be {fault}, got {getattr(self, name)!r}")
        if len(widths) > 1 and operands.residual is not None:
            raise ValueError("twell: residual has no meaning with several outputs")

    def problem(self, dtype: str, *, tokens: int, inner: int, out: int, scale: str | None) -> library.LinearProblem:
        """Return the problem for the C API.

        Args:
            dtype: bfloat16 or float16.
            tokens: Rows of x.
            inner: Columns of x.
            out: Rows of the weight.
            scale: The form of the weight's scales, of `library.SCALE_FORMS`; None: the weight is of `dtype`.
        """
        code = library.DTYPES[dtype]
        return library.LinearProblem(
            **{"in": inner},
            tokens=tokens,
            out=out,
            dtype=code,
            weight_dtype=code if scale is None else library.E4M3,
            weight_scale=library.SCALE_FORMS[scale or "tensor"],
            norm=library.NORMS[self.norm],
            eps=self.eps,
            splits=(ctypes.c_int32 * library.MAX_SPLITS)(*self.splits),
            choose=self.choose,
        )

    def widths(self, out: int) -> tuple[int, ...]:
        """Return the width of each output."""
        return self.splits or (out,)


_OPTIONS = ("norm", "eps", "splits", "choose")
ARGUMENTS = (*(each.name for each in TENSORS[:-1]), *_OPTIONS)  # of the op, by position
_TENSORS = ", ".join(f"Tensor{'?' if each.flag else ''} {each.name}" for each in TENSORS[:-1])
_SETTINGS = 'str norm="none", float eps=0.0, int[] splits=[], bool choose=False, *, Tensor? weight_scale=None'
SCHEMA = f"linear({_TENSORS}, {_SETTINGS}) -> Tensor[]"


def call_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[LinearOperands[Any], LinearOptions]:
    """Return the operands and options of a call of the op, from its arguments by position and by name."""
    given = {**dict(zip(ARGUMENTS, arguments, strict=False)), **named}
    options = {name: given.pop(name) for name in _OPTIONS if name in given}
    if "splits" in options:
        options["splits"] = tuple(options["splits"])
    return LinearOperands(**given), LinearOptions(**options)
