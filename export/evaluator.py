"""Run an ONNX file with `twell` nodes on a CPU, without TensorRT.

The `twell` nodes run the CPU implementation of the torch ops, everything else onnx's reference evaluator. Operators on
bfloat16 and float16 compute in float32 and round once, as they do on a GPU; the reference evaluator alone would round
inside of them, at every step of a softmax's sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun, RuntimeContextError
from onnx.reference.ops import load_op

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
            self._evaluator = ReferenceEvaluator(model, new_ops=[*_OPERATORS, *_widened_operators(model)])
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


def _widen(operand: Any) -> Any:
    low = isinstance(operand, np.ndarray) and operand.dtype in (BFLOAT16, np.float16)
    return operand.astype(np.float32) if low else operand


def _widened_operators(model: onnx.ModelProto) -> list[type[OpRun]]:
    """Return the standard operators of a model, computing in float32 what comes in bfloat16 or float16."""
    version = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    standard = {node.op_type for node in model.graph.node if node.domain in ("", "ai.onnx")}
    found = {op_type: _implementation(op_type, version) for op_type in sorted(standard - _AS_THEY_ARE)}
    return [_widened(op_type, operator) for op_type, operator in found.items() if operator is not None]


def _implementation(op_type: str, version: int) -> Any:
    """Return the reference evaluator's class for an operator; None where it composes it of others."""
    if op_type == "Gelu":
        return Gelu
    try:
        return load_op("", op_type, version)
    except (RuntimeContextError, AssertionError):
        return None


def _widened(op_type: str, operator: Any) -> type[OpRun]:
    """Return an operator that computes in float32; outputs in float32 are rounded to the low precision that came in."""

    class Widened(operator):  # type: ignore[misc]
        op_domain = ""

        def run(self, *operands: Any, **options: Any) -> tuple[Any, ...]:
            low = [x.dtype for x in operands if isinstance(x, np.ndarray) and x.dtype in (BFLOAT16, np.float16)]
            results = tuple(super().run(*map(_widen, operands), **options))
            if not low:
                return results
            return tuple(x.astype(low[0]) if x.dtype == np.float32 else x for x in map(np.asarray, results))

    # The evaluator finds it by this name.
    Widened.__name__ = op_type
    return Widened


class Gelu(OpRun):
    """Gelu in one step; the reference evaluator has it only as a function of other operators."""

    op_domain = ""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        return (to_numpy(torch.nn.functional.gelu(to_torch(x), approximate=approximate)),)


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


# Casts and what only moves or makes values; and what holds graphs, whose operators are not replaced.
_AS_THEY_ARE = frozenset(
    ("Cast", "CastLike", "Constant", "ConstantOfShape", "QuantizeLinear", "DequantizeLinear", "If", "Loop", "Scan")
)
_OPERATORS: list[Any] = [TwellGatedMlp, TwellMlp]
