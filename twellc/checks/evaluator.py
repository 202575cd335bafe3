"""Run an ONNX file with `twell` nodes without TensorRT.

The `twell` nodes run the torch ops, with the CUDA kernels where there is a GPU and else with the CPU implementation,
everything else onnx's reference evaluator. Operators on bfloat16 and float16 compute in float32 and round once, as they
do on a GPU; the reference evaluator alone would round inside of them, at every step of a softmax's sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.defs import get_schema
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun, RuntimeContextError
from onnx.reference.ops import load_op

from twellc.base.arrays import BFLOAT16, Array, to_numpy, to_torch
from twellc.base.dtypes import kernel_dtypes
from twellc.base.errors import UserError, first_line
from twellc.checks.operators import own_operator
from twellc.plugins.attention_op import ATTENTION
from twellc.plugins.library import ATTENTION_NAME, PLUGIN_NAMES, PLUGIN_NAMESPACE
from twellc.plugins.onnx_node import BIASES, GATED, HOT, RESIDUAL
from twellc.plugins.ops import GATED_MLP, MLP, activate


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
            unknown = sorted({node.op_type for node in known} - {*PLUGIN_NAMES, ATTENTION_NAME})
            if not model.graph.node or unknown:
                raise ValueError(f"unknown twell nodes {unknown}" if unknown else "it has no nodes")
            self._evaluator = ReferenceEvaluator(model, new_ops=[*_OPERATORS, *_standard_operators(model)])
        except Exception as error:  # protobuf, onnx and numpy each have their own errors for a damaged model
            raise UserError(str(path), f"is no ONNX model that can be evaluated ({error})") from error

    def run(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs for inputs by name.

        Raises:
            UserError: The graph does not take these shapes, or an operator is not implemented.
        """
        results = self.run_to(inputs, self.outputs)
        return [results[name] for name in self.outputs]

    def run_to(self, inputs: dict[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return any tensors of the graph, outputs or intermediate ones, by name.

        Raises:
            UserError: See `run`.
        """
        arrays = {name: to_numpy(tensor) for name, tensor in inputs.items()}
        try:
            with np.errstate(all="ignore"):  # what is NaN or infinite is in the results
                results = self._evaluator.run(None, arrays, intermediate=True)
            assert isinstance(results, dict)
            return {name: to_torch(np.asarray(results[name])) for name in names}
        except Exception as error:  # each operator's own, for a graph that somebody else made
            shapes = ", ".join(f"{name} {tuple(array.shape)}" for name, array in arrays.items())
            raise UserError(str(self._path), f"cannot be evaluated with {shapes} ({first_line(error)})") from error


def _widen(operand: Any) -> Any:
    low = isinstance(operand, np.ndarray) and operand.dtype in (BFLOAT16, np.float16)
    return operand.astype(np.float32) if low else operand


def _standard_operators(model: onnx.ModelProto) -> list[type[OpRun]]:
    """Return the standard operators of a model that the reference evaluator must not take from itself.

    They compute in float32 what comes in bfloat16 or float16.
    """
    version = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    found = []
    for op_type in sorted({node.op_type for node in _nodes(model.graph) if node.domain in ("", "ai.onnx")}):
        own = own_operator(op_type, version)
        if op_type in _AS_THEY_ARE:
            found += [] if own is None else [own]
        elif (operator := own or _implementation(op_type, version)) is not None:
            found.append(_widened(op_type, operator))
    return found


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes of a graph, and those of the graphs that they hold."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _implementation(op_type: str, version: int) -> Any:
    """Return the reference evaluator's class for an operator; None where it composes it of others."""
    try:
        return load_op("", op_type, version)
    except (RuntimeContextError, AssertionError):
        return None


def _widened(op_type: str, operator: Any) -> type[OpRun]:
    """Return an operator that computes in float32; outputs in float32 are rounded to the low precision that came in."""

    class Widened(operator):  # type: ignore[misc]
        op_domain = ""
        # Attributes and defaults of the version that it is for, which its own name says, and the new one does not.
        op_schema = getattr(operator, "op_schema", None) or get_schema(*operator.infer_name())

        def run(self, *operands: Any, **options: Any) -> tuple[Any, ...]:
            low = [x.dtype for x in operands if isinstance(x, np.ndarray) and x.dtype in (BFLOAT16, np.float16)]
            results = tuple(super().run(*map(_widen, operands), **options))
            if not low:
                return results
            return tuple(x.astype(low[0]) if x.dtype == np.float32 else x for x in map(np.asarray, results))

    # The evaluator finds it by this name.
    Widened.__name__ = op_type
    return Widened


class TwellGatedMlp(OpRun):
    """The gated block through the torch op."""

    op_domain = PLUGIN_NAMESPACE

    def _run(
        self, *operands: Array, activation: str, threshold: float, compression: int, hot: int,
        gate_bias: int, up_bias: int, down_bias: int, residual: int, plugin_version: str, plugin_namespace: str,
    ) -> tuple[Array]:  # fmt: skip
        tensors = _with_absent([to_torch(array) for array in operands], (gate_bias, up_bias, down_bias), residual)
        return (to_numpy(_run_op(GATED_MLP, tensors, activation, threshold, compression, hot)),)


class TwellMlp(OpRun):
    """The block without a gate through the torch op."""

    op_domain = PLUGIN_NAMESPACE

    def _run(
        self, *operands: Array, activation: str, threshold: float, compression: int, hot: int,
        up_bias: int, down_bias: int, residual: int, plugin_version: str, plugin_namespace: str,
    ) -> tuple[Array]:  # fmt: skip
        tensors = _with_absent([to_torch(array) for array in operands], (up_bias, down_bias), residual)
        return (to_numpy(_run_op(MLP, tensors, activation, threshold, compression, hot)),)


class TwellAttention(OpRun):
    """Attention through the torch op."""

    op_domain = PLUGIN_NAMESPACE

    def _run(
        self, *operands: Array, scale: float, causal: int, lengths: int, plugin_version: str, plugin_namespace: str
    ) -> tuple[Array]:
        q, k, v, *rest = [to_torch(array) for array in operands]
        (counts,) = rest if lengths else (None,)
        return (to_numpy(_run_where_it_is_fast(ATTENTION, [q, k, v, counts], float(scale), bool(causal))),)


def _with_absent(operands: list[torch.Tensor], biases: tuple[int, ...], residual: int) -> list[torch.Tensor | None]:
    """Return x, then each weight followed by its bias or None, then the residual or None."""
    remaining = iter(operands)
    arguments: list[torch.Tensor | None] = [next(remaining)]
    for bias in biases:
        arguments += [next(remaining), next(remaining) if bias else None]
    return [*arguments, next(remaining) if residual else None]


def runs_kernels() -> bool:
    """Whether `twell` nodes in bfloat16 and float16 run the CUDA kernels here."""
    return torch.cuda.is_available()


def _run_op(
    op: torch._ops.OpOverload,
    tensors: list[torch.Tensor | None],
    activation: str,
    threshold: float,
    compression: int,
    hot: int,
) -> torch.Tensor:
    return _run_where_it_is_fast(op, tensors, activation, float(threshold), int(compression), int(hot))


def _run_where_it_is_fast(op: torch._ops.OpOverload, tensors: list[torch.Tensor | None], *options: Any) -> torch.Tensor:
    """Run an op on the GPU, if there is one and the first tensor is of a type that its kernels take.

    The result is where the first tensor is.
    """
    first = tensors[0]
    assert first is not None
    device = "cuda" if runs_kernels() and first.dtype in kernel_dtypes() else "cpu"
    moved = [None if tensor is None else tensor.to(device) for tensor in tensors]
    y: torch.Tensor = op(*moved, *options)
    return y.to(first.device)


@dataclass(frozen=True)
class PluginNode:
    """A `twell` node on its own, with its weights.

    Attributes:
        op_type: TwellGatedMlp or TwellMlp.
        weights: Each weight, followed by its bias or None, in the order of the node's inputs.
        residual: Whether it has a residual as its last input.
        activation, threshold, compression, hot: Its fields.
    """

    op_type: str
    weights: list[onnx.TensorProto | None]
    residual: bool
    activation: str
    threshold: float
    compression: int
    hot: int

    @property
    def dtype(self) -> torch.dtype:
        """The element type of its weights."""
        (weight,) = self._load(1)
        assert weight is not None
        return weight.dtype

    @property
    def widths(self) -> tuple[int, int, int]:
        """d_model, d_ff and the width of the output."""
        first, last = self.weights[0], self.weights[-2]
        assert first is not None and last is not None
        return first.dims[1], first.dims[0], last.dims[1]

    def run(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return y, in the dtype of x and residual: both are in float64, or in the dtype of the weights."""
        weights = (None if weight is None else weight.to(x.dtype) for weight in self._load(len(self.weights)))
        op = GATED_MLP if self.op_type == GATED else MLP
        options = self.activation, self.threshold, self.compression, self.hot
        return _run_op(op, [x, *weights, residual], *options)

    def active(self, x: torch.Tensor) -> int:
        """Return how many activations of the gate (of a plain block: of the hidden tensor) are not zero for x."""
        weight, bias = (None if each is None else each.float().to(x.device) for each in self._load(2))
        assert weight is not None
        z = torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)
        return int(activate(z, self.activation, self.threshold).count_nonzero())

    def _load(self, count: int) -> list[torch.Tensor | None]:
        """Return the first weights; they are loaded at each use, since a large model has too many to keep twice."""
        found = self.weights[:count]
        return [None if each is None else to_torch(onnx.numpy_helper.to_array(each)) for each in found]


def plugin_nodes(model: onnx.ModelProto) -> list[PluginNode]:
    """Return the feed-forward blocks among the `twell` nodes of a graph, in order.

    Raises:
        ValueError: One of them has weights that are no constants, or not the fields that twellc gives it.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.domain != PLUGIN_NAMESPACE or node.op_type == ATTENTION_NAME:
            continue
        fields = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        stored = node.input[1:-1] if fields.get(RESIDUAL) else node.input[1:]
        computed = [name for name in stored if name not in constants]
        if computed:
            raise ValueError(f"{computed[0]}, a weight of the plugin node {node.name}, is no constant")
        remaining = iter(constants[name] for name in stored)
        weights: list[onnx.TensorProto | None] = []
        try:
            for bias in BIASES[node.op_type]:
                weights += [next(remaining), next(remaining) if fields[bias] else None]
            options = fields["activation"].decode(), float(fields["threshold"]), int(fields["compression"])
            hot = int(fields[HOT])
            residual = bool(fields[RESIDUAL])
        except (KeyError, StopIteration) as error:
            raise ValueError(f"the plugin node {node.name} has not the fields and inputs of one") from error
        nodes.append(PluginNode(node.op_type, weights, residual, *options, hot))
    return nodes


# Casts and what only moves or makes values; and what holds graphs, and computes nothing by itself.
_AS_THEY_ARE = frozenset(
    ("Cast", "CastLike", "Constant", "ConstantOfShape", "QuantizeLinear", "DequantizeLinear", "If", "Loop", "Scan")
)
_OPERATORS: list[Any] = [TwellGatedMlp, TwellMlp, TwellAttention]
