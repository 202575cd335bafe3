"""Standard operators that onnx's reference evaluator lacks, or does not compute as the standard says.

Each is for the versions of the standard before a number; later ones are the reference evaluator's. What was found by
comparing with torch, operator by operator, is what tests/twellc/checks/test_operators.py does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from onnx.defs import get_schema
from onnx.reference.op_run import OpRun
from onnx.reference.ops import load_op

from twellc.base.arrays import Array, to_numpy, to_torch


def own_operator(op_type: str, version: int) -> type[OpRun] | None:
    """Return our implementation of an operator in a version of the standard; None where onnx's is right."""
    operator, before = _OPERATORS.get(op_type, (None, 0))
    if operator is None or version >= before:
        return None
    # Defaults of attributes are those of this version; the evaluator finds the class by its name.
    return type(op_type, (operator,), {"op_domain": "", "op_schema": get_schema(op_type, version)})


class _Gelu(OpRun):
    """In one step; the reference evaluator has it only as a function of other operators."""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        return (to_numpy(torch.nn.functional.gelu(to_torch(x), approximate=approximate)),)


class _CumSum(load_op("", "CumSum", 14)):  # type: ignore[misc]
    """With an axis of one dimension, as torch.onnx writes it for repeat_interleave."""

    def _run(self, x: Array, axis: Array, **options: Any) -> Any:
        return super()._run(x, np.asarray(axis).reshape(()), **options)


class _GatherElements(OpRun):
    """The reference evaluator's fails for data of more than 32 elements with fewer indices."""

    def _run(self, data: Array, indices: Array, axis: int = 0) -> tuple[Array]:
        size = data.shape[axis]
        wrapped = to_torch(np.where(indices < 0, indices + size, indices).astype(np.int64))
        return (to_numpy(torch.gather(to_torch(data), axis, wrapped)),)


class _Pad(OpRun):
    """With negative pads, which cut off; the reference evaluator gives them to numpy."""

    def _run(
        self,
        data: Array,
        given_pads: Array | None = None,
        given_value: Array | None = None,
        axes: Array | None = None,
        mode: str = "constant",
        pads: Any = None,
        value: float = 0.0,
    ) -> tuple[Array]:
        number = np.asarray(value if given_value is None else given_value).reshape(())
        ends = np.asarray(pads if given_pads is None else given_pads).reshape(2, -1)
        sizes = np.zeros((data.ndim, 2), np.int64)
        sizes[slice(None) if axes is None else axes] = ends.T
        options = {"constant_values": number} if mode == "constant" else {}
        padded = np.pad(data, np.maximum(sizes, 0), mode=mode, **options)  # type: ignore[call-overload]
        kept = [slice(-min(low, 0), size + min(high, 0)) for (low, high), size in zip(sizes, padded.shape, strict=True)]
        return (np.asarray(padded[tuple(kept)], data.dtype),)


def _over_rows(compute: Callable[[torch.Tensor], torch.Tensor]) -> type[OpRun]:
    """Over all dimensions from `axis` on as one, as up to opset 12; the reference evaluator has one dimension alone."""

    def run(_: OpRun, x: Array, axis: int = 1) -> tuple[Array]:
        rows = math.prod(x.shape[: axis if axis >= 0 else axis + x.ndim])
        matrix = to_torch(x.reshape(rows, x.size // max(rows, 1)))
        return (to_numpy(compute(matrix).to(matrix.dtype)).reshape(x.shape),)

    return type("OverRows", (OpRun,), {"_run": run})


def _hardmax(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(rows.argmax(-1), rows.shape[-1])


class _BatchNormalization(OpRun):
    """As in inference up to opset 13; the reference evaluator takes the batch's own mean."""

    def _run(
        self, x: Array, scale: Array, bias: Array, mean: Array, variance: Array, epsilon: float = 1e-5, **_: Any
    ) -> tuple[Array]:
        mean_, variance_, scale_, bias_ = map(to_torch, (mean, variance, scale, bias))
        return (to_numpy(torch.nn.functional.batch_norm(to_torch(x), mean_, variance_, scale_, bias_, eps=epsilon)),)


class _LRN(OpRun):
    """The reference evaluator's takes the number of samples for that of channels."""

    def _run(self, x: Array, alpha: float, beta: float, bias: float, size: int) -> tuple[Array]:
        squares = to_torch(x).square().movedim(1, -1)
        padded = torch.nn.functional.pad(squares, ((size - 1) // 2, size // 2))
        sums = padded.unfold(-1, size, 1).sum(-1).movedim(-1, 1)
        return (to_numpy(to_torch(x) / (bias + alpha / size * sums) ** beta),)


class _OneHot(load_op("", "OneHot", 11)):  # type: ignore[misc]
    """With a depth of one dimension."""

    def _run(self, indices: Array, depth: Array, values: Array, **options: Any) -> Any:
        return super()._run(indices, np.asarray(depth).reshape(()), values, **options)


class _ConvTranspose(load_op("", "ConvTranspose", 11)):  # type: ignore[misc]
    """With groups."""

    def _run(self, x: Array, w: Array, b: Array | None = None, group: int = 1, **options: Any) -> tuple[Array]:
        parts = zip(np.split(x, group, 1), np.split(w, group), strict=True)
        y = np.concatenate([super(_ConvTranspose, self)._run(*each, None, group=1, **options)[0] for each in parts], 1)
        return (y if b is None else y + b.reshape(-1, *[1] * (y.ndim - 2)),)


class _GridSample(load_op("", "GridSample", 20)):  # type: ignore[misc]
    """With the modes' names up to opset 19."""

    def _run(self, x: Array, grid: Array, mode: str, **options: Any) -> Any:
        return super()._run(x, grid, mode=mode.removeprefix("bi"), **options)


_NEVER = 1 << 30
# The class for an operator, and the version of the standard from which on onnx's is right.
_OPERATORS: dict[str, tuple[Any, int]] = {
    "BatchNormalization": (_BatchNormalization, 14),
    "ConvTranspose": (_ConvTranspose, _NEVER),
    "CumSum": (_CumSum, _NEVER),
    "DequantizeLinear": (load_op("", "DequantizeLinear", 19), 19),  # the same before; there was no need of it
    "GatherElements": (_GatherElements, _NEVER),
    "Gelu": (_Gelu, _NEVER),
    "GridSample": (_GridSample, 20),
    "Hardmax": (_over_rows(_hardmax), 13),
    "LRN": (_LRN, _NEVER),
    "LogSoftmax": (_over_rows(lambda rows: rows.log_softmax(-1)), 13),
    "OneHot": (_OneHot, _NEVER),
    "Pad": (_Pad, _NEVER),
    "Softmax": (_over_rows(lambda rows: rows.softmax(-1)), 13),
}
