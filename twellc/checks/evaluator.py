"""Run an ONNX file with `twell` nodes without TensorRT.

The `twell` nodes run the torch ops, with the CUDA kernels where there is a GPU and else with the CPU implementation,
everything else onnx's reference evaluator. Operators on bfloat16 and float16 compute in float32 and round once, as they
do on a GPU; the reference evaluator alone would round inside of them, at every step of a softmax's sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
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
from twellc.checks.fp8 import Fp8Block
from twellc.checks.operators import own_operator
from twellc.passes.onnx.ffn import DENSE_FP8
from twellc.plugins import experts_op
from twellc.plugins.attention_op import ATTENTION
from twellc.plugins.block import BY_NODE, FLOAT32, BlockOptions, Operands, WeightOperands
from twellc.plugins.cache_op import APPEND, CACHED_ATTENTION
from twellc.plugins.fp8 import Fp8
from twellc.plugins.library import (
    APPEND_NAME,
    ATTENTION_NAME,
    ATTENTION_NAMES,
    CACHED_ATTENTION_NAME,
    EXPERTS_NAME,
    LINEAR_NAME,
    PLUGIN_NAMESPACE,
)
from twellc.plugins.linear_op import run_linear
from twellc.plugins.meaning import activate, cast, normalised
from twellc.plugins.onnx_node import read_caches, read_experts, read_linear, read_node
from twellc.plugins.ops import run_block


class OnnxEvaluator:
    """An ONNX model that can be run.

    Attributes:
        inputs, outputs: Names of its inputs and outputs, in order.
    """

    def __init__(self, path: Path, model: onnx.ModelProto | None = None) -> None:
        """Prepare a model.

        Args:
            path: The file that it is from; it is read, with its external data, where no `model` is given.
            model: The model, with its external data.

        Raises:
            UserError: The file is not an ONNX model, or holds operators that cannot be evaluated.
        """
        self._path = path
        try:
            model = onnx.load(path) if model is None else model
            self.inputs = [value.name for value in model.graph.input]
            self.outputs = [value.name for value in model.graph.output]
            known = [node for node in model.graph.node if node.domain == PLUGIN_NAMESPACE]
            unknown = sorted({node.op_type for node in known} - {*BY_NODE, LINEAR_NAME, EXPERTS_NAME, *ATTENTION_NAMES})
            if not model.graph.node or unknown:
                raise ValueError(f"unknown twell nodes {unknown}" if unknown else "it has no nodes")
            self._evaluator = ReferenceEvaluator(model, new_ops=[*_OPERATORS, *_standard_operators(model)])
        except Exception as error:  # protobuf, onnx and numpy each have their own errors for a damaged model
            raise UserError(str(path), f"is not an ONNX model that can be evaluated ({error})") from error

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
        except Exception as error:  # operators raise errors of any kind
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


def _plugin_operator(
    name: str,
    compute: Callable[[list[torch.Tensor], dict[str, Any]], list[torch.Tensor]],
    domain: str = PLUGIN_NAMESPACE,
) -> Any:
    """Return the operator of a `twell` node: a torch op. The evaluator finds the class by its name."""

    def run(_: OpRun, *operands: Array, **fields: Any) -> tuple[Array, ...]:
        return tuple(map(to_numpy, compute(list(map(to_torch, operands)), fields)))

    return type(name, (OpRun,), {"op_domain": domain, "_run": run})


def _block_of(name: str) -> Any:
    return _plugin_operator(name, lambda operands, fields: [_run_block(*_read(name, operands, fields))])


def _dense_fp8_of(name: str) -> Any:
    """Return the operator of a node that stands for a block as dense FP8 computes it."""

    def compute(inputs: list[torch.Tensor], fields: dict[str, Any]) -> list[torch.Tensor]:
        operands, options = _read(name, inputs, fields)
        return [Fp8Block(operands.weights, None, options).by_dense_fp8(operands.x, operands.residual)]

    return _plugin_operator(name, compute, DENSE_FP8)


def _read(name: str, inputs: list[torch.Tensor], fields: dict[str, Any]) -> tuple[Operands[torch.Tensor], BlockOptions]:
    """Return what a node is given; scales and thresholds are in float32 also where the rest of a graph was widened."""
    operands, options = read_node(name, inputs, fields)
    given = operands.named()
    return replace(operands, **{name: given[name].float() for name in FLOAT32 if name in given}), options


def _linear(inputs: list[torch.Tensor], fields: dict[str, Any]) -> list[torch.Tensor]:
    operands, options = read_linear(_on_fast_device(inputs), fields)
    if operands.weight_scale is not None:
        operands = replace(operands, weight_scale=operands.weight_scale.float())
    return run_linear(operands, options)


def _experts(inputs: list[torch.Tensor], fields: dict[str, Any]) -> list[torch.Tensor]:
    tensors, activation, threshold = read_experts(_on_fast_device(inputs), fields)
    # In float32 also where the rest of a graph was widened.
    tensors |= {name: tensors[name].float() for name in experts_op.FLOAT32 if name in tensors}
    return [experts_op.EXPERTS(**{"gate": None, **tensors}, activation=activation, threshold=threshold)]


def _attend(operands: list[torch.Tensor], fields: dict[str, Any]) -> list[torch.Tensor]:
    q, k, v, *lengths = _on_fast_device(operands)
    counts = lengths[0] if lengths else None
    return [ATTENTION(q, k, v, counts, float(fields["scale"]), bool(fields["causal"]))]


def _attend_to_caches(operands: list[torch.Tensor], fields: dict[str, Any]) -> list[torch.Tensor]:
    tensors, options = read_caches(_on_fast_device(operands), fields, 5)
    return [CACHED_ATTENTION(*tensors, float(fields["scale"]), **options)]


def _append(operands: list[torch.Tensor], fields: dict[str, Any]) -> list[torch.Tensor]:
    tensors, options = read_caches(operands, fields, 6)
    return list(APPEND(*tensors, **options))


def runs_kernels() -> bool:
    """Whether `twell` nodes in bfloat16 and float16 run the CUDA kernels here."""
    return torch.cuda.is_available()


def _run_block(operands: Operands[torch.Tensor], options: BlockOptions) -> torch.Tensor:
    device = _fast_device(operands.x)
    return run_block(operands.map(lambda tensor: tensor.to(device)), options).to(operands.x.device)


def _on_fast_device(operands: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.to(_fast_device(operands[0])) for each in operands]


def _fast_device(x: torch.Tensor) -> str:
    """Return where to run an op that reads x: on the GPU, if there is one and its kernels take the type of x."""
    return "cuda" if runs_kernels() and x.dtype in kernel_dtypes() else "cpu"


@dataclass(frozen=True)
class PluginNode:
    """A `twell` node on its own, with its weights.

    Attributes:
        weights: Its weights and biases; they are loaded at each use, since a large model has too many to keep twice.
        residual: Whether it has a residual as its last input.
        options: Its fields.
    """

    weights: WeightOperands[onnx.TensorProto]
    residual: bool
    options: BlockOptions

    @property
    def widths(self) -> tuple[int, int, int]:
        """d_model, d_ff and the width of the output."""
        first, last = self.weights.first[0], self.weights.w_down
        return first.dims[1], first.dims[0], last.dims[1]

    def run(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return y, in the dtype of x and of the residual: both are in float64, or in that of the block."""
        return _run_block(cast(self.weights.map(_load), x.dtype).of(x, residual), self.options)

    def active(self, x: torch.Tensor, *_: torch.Tensor) -> int:
        """Return how many activations of the gate (of a plain block: of the hidden tensor) are not zero for x."""
        weight, bias = (None if each is None else _load(each).to(x.device) for each in self.weights.first)
        assert weight is not None
        scale = self.weights.scales().get("w_up_scale" if self.weights.w_gate is None else "w_gate_scale")
        if scale is not None:
            weight = Fp8(weight, _load(scale).to(x.device)).dequantize(torch.float32)
        bias = None if bias is None else bias.float()
        factor, shift = (None if each is None else _load(each).float().to(x.device) for each in self.weights.norm)
        x = normalised(x.float(), self.options.norm, factor, shift, self.options.eps).to(x.dtype)
        z = torch.nn.functional.linear(x.float(), weight.float(), bias).to(x.dtype)
        thresholds = self.weights.thresholds
        threshold = self.options.threshold if thresholds is None else _load(thresholds).to(x.device)
        return int(activate(z, self.options.activation, threshold).count_nonzero())


@dataclass(frozen=True)
class ExpertsNode:
    """A node of experts on its own, with its weights in 16 bits; see `PluginNode`.

    Attributes:
        matrices: `up` and `down`, and `gate` if there is one.
        activation, threshold: Those of the op.
    """

    matrices: Mapping[str, onnx.TensorProto]
    activation: str
    threshold: float
    residual = False

    @property
    def widths(self) -> tuple[int, int, int]:
        """d_model, d_ff and the width of the output."""
        _, d_ff, d_model = self.matrices["up"].dims
        return d_model, d_ff, self.matrices["down"].dims[2]

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return y [tokens, d_out], in float64 if x is, else in the dtype of the matrices.

        Args:
            x: [tokens, d_model].
            ids: The experts of each token, token by token. Numbers below 0 count from the last expert; others that are
                no expert's add nothing.
            weights: Their factors, likewise.
        """
        matrices = {name: _load(each) for name, each in self.matrices.items()}
        dtype = torch.float64 if x.dtype == torch.float64 else matrices["up"].dtype
        matrices = {name: each.to(dtype) for name, each in matrices.items()}
        ids = self._by_token(x, ids)
        weights = weights.reshape(ids.shape).to(torch.float64 if dtype == torch.float64 else torch.float32)
        given = {**matrices, "x": x.to(dtype), "ids": ids, "weights": weights}
        given = {name: each.to(_fast_device(given["x"])) for name, each in given.items()}
        y = experts_op.EXPERTS(**{"gate": None, **given}, activation=self.activation, threshold=self.threshold)
        return y.to(x.device)  # type: ignore[no-any-return]

    def active(self, x: torch.Tensor, ids: torch.Tensor, *_: torch.Tensor) -> int:
        """Return how many activations of the gate (without one: of the hidden tensor) are not zero; see `run`."""
        first, ids = _load(self.matrices.get("gate", self.matrices["up"])), self._by_token(x, ids)
        active = 0
        for expert, matrix in enumerate(first):
            rows = x[(ids == expert).nonzero()[:, 0]].to(first.dtype)
            z = rows.float() @ matrix.to(x.device).float().T
            active += int(activate(z.to(first.dtype), self.activation, self.threshold).count_nonzero())
        return active

    def _by_token(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the experts of each token of x, [tokens, top], with numbers below 0 brought to what they mean."""
        ids = torch.where(ids < 0, ids + self.matrices["up"].dims[0], ids)
        return ids.reshape(len(x), ids.numel() // max(len(x), 1))


def _load(stored: onnx.TensorProto) -> torch.Tensor:
    return to_torch(onnx.numpy_helper.to_array(stored))


def plugin_nodes(model: onnx.ModelProto) -> list[PluginNode | ExpertsNode]:
    """Return the feed-forward blocks and the experts among the `twell` nodes of a graph, in order.

    Raises:
        ValueError: One of them has weights that are not constants, or other fields than twellc gives it.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    read: dict[str, Callable[..., PluginNode | ExpertsNode]] = {EXPERTS_NAME: _experts_node}
    read |= dict.fromkeys(BY_NODE, _block_node)
    nodes = []
    for node in model.graph.node:
        if node.domain != PLUGIN_NAMESPACE or node.op_type not in read:
            continue
        fields = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        try:
            nodes.append(read[node.op_type](node, fields, constants))
        except KeyError as error:
            raise ValueError(f"{error.args[0]}, a weight of the plugin node {node.name}, is not a constant") from error
        except ValueError as error:
            raise ValueError(f"the plugin node {node.name} has not the fields and inputs of one") from error
    return nodes


_Constants = dict[str, onnx.TensorProto]


def _block_node(node: onnx.NodeProto, fields: dict[str, Any], constants: _Constants) -> PluginNode:
    names, options = read_node(node.op_type, list(node.input), fields)
    return PluginNode(names.weights.map(constants.__getitem__), names.residual is not None, options)


def _experts_node(node: onnx.NodeProto, fields: dict[str, Any], constants: _Constants) -> ExpertsNode:
    names, activation, threshold = read_experts(list(node.input), fields)
    matrices = [(name, constants[names[name]]) for name in ("gate", "up", "down") if name in names]
    return ExpertsNode(dict(matrices), activation, threshold)


# Casts and what only moves or makes values; and what holds graphs, and computes nothing by itself.
_AS_THEY_ARE = frozenset(
    ("Cast", "CastLike", "Constant", "ConstantOfShape", "QuantizeLinear", "DequantizeLinear", "If", "Loop", "Scan")
)
_OPERATORS: list[Any] = [
    *map(_block_of, BY_NODE),
    *map(_dense_fp8_of, BY_NODE),
    _plugin_operator(LINEAR_NAME, _linear),
    _plugin_operator(EXPERTS_NAME, _experts),
    _plugin_operator(ATTENTION_NAME, _attend),
    _plugin_operator(CACHED_ATTENTION_NAME, _attend_to_caches),
    _plugin_operator(APPEND_NAME, _append),
]
