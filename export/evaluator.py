"""Run an ONNX file with `twell` nodes on a CPU, without TensorRT.

The `twell` nodes run the CPU implementation of the torch ops. Products in bfloat16 and float16 accumulate in float32
and are rounded once, as they are on a GPU; everything else is onnx's reference evaluator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from twellc.errors import UserError
from twellc.passes.arrays import BFLOAT16, Array, to_numpy, to_torch
from twellc.plugins.library import PLUGIN_NAMES, PLUGIN_NAMESPACE
from twellc.plugins.ops import GATED_MLP, MLP


class OnnxEvaluator:
    """An ONNX model that can be run.

    Attributes:
        inputs, outputs: Names of its inputs and outputs, in order.
        metadata: Its metadata properties.
    """

    def __init__(self, path: Path, model: onnx.ModelProto | None = None) -> None:
        """Prepare a model.

        Args:
            path: The file that it is from; it is read, with its external data, where no `model` is given.
            model: The model, with its external data.

        Raises:
            UserError: The file is no ONNX model, or holds operators that cannot be evaluated.
        """
        self._path = path
        try:
            model = onnx.load(path) if model is None else model
            self.inputs = [value.name for value in model.graph.input]
            self.outputs = [value.name for value in model.graph.output]
            self.metadata = {entry.key: entry.value for entry in model.metadata_props}
            known = [node for node in model.graph.node if node.domain == PLUGIN_NAMESPACE]
            unknown = sorted({node.op_type for node in known} - set(PLUGIN_NAMES))
            if not model.graph.node or unknown:
                raise ValueError(f"unknown twell nodes {unknown}" if unknown else "it has no nodes")
            self._evaluator = ReferenceEvaluator(model, new_ops=_OPERATORS)
        except Exception as error:  # protobuf, onnx and numpy each have their own errors for a damaged model
            raise UserError(str(path), f"is no ONNX model that can be evaluated ({error})") from error

    def run(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for inputs by name.

        Raises:
            UserError: The graph does not take these shapes, or an operator is not implemented.
        """
        arrays = {name: to_numpy(tensor) for name, tensor in inputs.items()}
        try:
            return [to_torch(np.asarray(output)) for output in self._evaluator.run(None, arrays)]
        except Exception as error:  # each operator's own, for a graph that somebody else made
            shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(str(self._path), f"cannot be evaluated with {shapes} ({reason})") from error


def _multiply(left: Array, right: Array) -> Array:
    if left.dtype not in (BFLOAT16, np.float16):
        return np.asarray(np.matmul(left, right))
    product: Array = np.matmul(left.astype(np.float32), right.astype(np.float32))
    return product.astype(left.dtype)


class MatMul(OpRun):
    """MatMul with float32 accumulation."""

    op_domain = ""

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        return (_multiply(a, b),)


class Gemm(OpRun):
    """Gemm with float32 accumulation."""

    op_domain = ""

    def _run(
        self, a: Array, b: Array, c: Array | None = None,
        alpha: float = 1.0, beta: float = 1.0, transA: int = 0, transB: int = 0,  # noqa: N803
    ) -> tuple[Array]:  # fmt: skip
        wide = np.dtype(np.float64 if a.dtype == np.float64 else np.float32)
        left, right = (a.T if transA else a).astype(wide), (b.T if transB else b).astype(wide)
        result: Array = np.matmul(left, right) * alpha
        if c is not None:
            result = result + c.astype(wide) * beta
        return (result.astype(a.dtype),)


class TwellGatedMlp(OpRun):
    """The gated block through the torch op."""

    op_domain = PLUGIN_NAMESPACE

    def _run(
        self, *operands: Array, activation: str, threshold: float, compression: int,
        gate_bias: int, up_bias: int, down_bias: int, plugin_version: str, plugin_namespace: str,
    ) -> tuple[Array]:  # fmt: skip
        arguments = _with_absent_biases(operands, (gate_bias, up_bias, down_bias))
        return (to_numpy(GATED_MLP(*arguments, activation, float(threshold), int(compression))),)


class TwellMlp(OpRun):
    """The block without a gate through the torch op."""

    op_domain = PLUGIN_NAMESPACE

    def _run(
        self, *operands: Array, activation: str, threshold: float, compression: int,
        up_bias: int, down_bias: int, plugin_version: str, plugin_namespace: str,
    ) -> tuple[Array]:  # fmt: skip
        arguments = _with_absent_biases(operands, (up_bias, down_bias))
        return (to_numpy(MLP(*arguments, activation, float(threshold), int(compression))),)


def _with_absent_biases(operands: tuple[Array, ...], biases: tuple[int, ...]) -> list[torch.Tensor | None]:
    """Return x, then each weight followed by its bias or None."""
    remaining = iter(map(to_torch, operands))
    arguments: list[torch.Tensor | None] = [next(remaining)]
    for bias in biases:
        arguments += [next(remaining), next(remaining) if bias else None]
    return arguments


_OPERATORS = [MatMul, Gemm, TwellGatedMlp, TwellMlp]
