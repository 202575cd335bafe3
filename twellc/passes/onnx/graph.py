"""Show an ONNX graph to the matcher of feed-forward blocks, as the ATen graph that means the same.

    MatMul(x, W) ─ Relu ─ Mul(·, MatMul(x, V))   ->   aten.matmul(x, W) ─ aten.relu ─ aten.mul(·, aten.matmul(x, V))

One matcher thus serves both kinds of graph. Only operators that occur in blocks are translated; any other becomes a
node that computes something unknown from its inputs. Nothing runs: the ATen graph has shapes and dtypes, and each of
its nodes knows its ONNX tensor. Named and unknown dimensions become large prime numbers, one for
each, so that equal sizes mean equal dimensions.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import onnx_ir
import torch
from numpy.typing import NDArray
from torch.fx import Graph, Node

from twellc.base.arrays import to_numpy, to_torch
from twellc.base.dtypes import BY_ONNX
from twellc.passes.fp8 import scaled
from twellc.passes.graph.constants import evaluate
from twellc.passes.graph.program import free_name
from twellc.plugins.fp8 import E4M3, Fp8

aten = torch.ops.aten

_SCOPES = "pkg.torch.onnx.name_scopes"
_FIRST_PRIME = 100_003
_MOST_NUMBERS = 1 << 17
# Attributes of a Constant with numbers; onnx_ir's `get_const_tensor` would rename what it finds.
_NUMBERS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
# Operators of one tensor that have one meaning in all versions and no attributes that matter here.
_UNARY = {
    "Relu": aten.relu.default,
    "Identity": aten.alias.default,
    "Sigmoid": aten.sigmoid.default,
    "Selu": aten.selu.default,
    "Celu": aten.celu.default,
    "Gelu": aten.gelu.default,
    "HardSwish": aten.hardswish.default,
    "Mish": aten.mish.default,
    "Softplus": aten.softplus.default,
    "Swish": aten.silu.default,
    "Sqrt": aten.sqrt.default,
    "Abs": aten.abs.default,
    "Neg": aten.neg.default,
    "Not": aten.logical_not.default,
    "Reciprocal": aten.reciprocal.default,
    "Sign": aten.sign.default,
}
# With a number at the right, with one at the left, which swaps the sides, and with a tensor at the right.
_COMPARISONS = {
    "Greater": (aten.gt.Scalar, aten.lt.Scalar, aten.gt.Tensor),
    "GreaterOrEqual": (aten.ge.Scalar, aten.le.Scalar, aten.ge.Tensor),
    "Less": (aten.lt.Scalar, aten.gt.Scalar, aten.lt.Tensor),
    "LessOrEqual": (aten.le.Scalar, aten.ge.Scalar, aten.le.Tensor),
}
_ARITHMETIC = {
    "Mul": (aten.mul.Tensor, aten.mul.Scalar),
    "Add": (aten.add.Tensor, aten.add.Scalar),
    "Sub": (aten.sub.Tensor, aten.sub.Scalar),
    "Div": (aten.div.Tensor, aten.div.Scalar),
}


class _UnknownError(Exception):
    """A node is not one of the translated forms."""


def dtype_of(onnx_type: int | None) -> torch.dtype | None:
    """Return the torch dtype of an ONNX element type; None for others."""
    known = None if onnx_type is None else BY_ONNX.get(onnx_type)
    return None if known is None else known.torch


def _dtype_of(held: Any) -> torch.dtype | None:
    """Return the torch dtype of an array, or of a constant as onnx_ir has it; None for others."""
    known = held.dtype
    return dtype_of(known if isinstance(known, onnx_ir.DataType) else onnx_ir.DataType.from_numpy(known))


def constant(name: str, values: torch.Tensor) -> onnx_ir.Value:
    """Return a constant, which no graph has yet."""
    tensor = onnx_ir.Tensor(to_numpy(values), name=name)
    return onnx_ir.val(name, const_value=tensor)


def constant_values(tensor: onnx_ir.Value | None) -> NDArray[Any] | None:
    """Return the values of an initializer, of a Constant node's output, or of dequantised ones; None for others."""
    if tensor is None:
        return None
    if tensor.const_value is not None:
        return np.asarray(tensor.const_value)
    node, source = tensor.producer(), _dequantised_source(tensor)
    if node is None:
        return None
    if node.op_type == "Constant":
        ((name, held),) = _fields(node).items()
        return np.asarray(held, _NUMBERS.get(name)) if name == "value" or name in _NUMBERS else None
    if source is not tensor:
        found, dtype = constant_values(source), dtype_of(_fields(node)["to"])
        return None if found is None or dtype is None else to_numpy(to_torch(found).to(dtype))
    known = _dequantised_operands(tensor)
    return None if known is None or not _fits(_fields(node), *known) else _dequantised(_fields(node), *known)


def _made_by(tensor: onnx_ir.Value, op_type: str) -> bool:
    node = tensor.producer()
    return node is not None and node.op_type == op_type


def _dequantised_source(tensor: onnx_ir.Value) -> onnx_ir.Value:
    """Return what a Cast reads of a DequantizeLinear; any other tensor itself."""
    node = tensor.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    return source if source is not None and _made_by(source, "DequantizeLinear") else tensor


def _dequantised_operands(tensor: onnx_ir.Value) -> list[NDArray[Any]] | None:
    """Return x, scale and perhaps zero points of a DequantizeLinear of constants; None of anything else."""
    node = tensor.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return None
    operands = [constant_values(each) for each in node.inputs if each is not None]
    known = [each for each in operands if each is not None]
    return None if len(known) < max(len(operands), 2) else known


def in_fp8(tensor: onnx_ir.Value) -> Fp8 | None:
    """Return the matrix in E4M3 and its scales that a DequantizeLinear makes a constant of; None for anything else."""
    tensor = _dequantised_source(tensor)
    known, node = _dequantised_operands(tensor), tensor.producer()
    kinds = [_dtype_of(each) for each in known or ()]
    if known is None or node is None or kinds[0] != E4M3 or None in kinds or _fields(node).get("block_size"):
        return None
    found, scale, *zero = map(to_torch, known)
    if any(bool(each.float().any()) for each in zero):
        return None
    if scale.dim() == 1 and int(_fields(node).get("axis", 1)) % 2 == 0:
        scale = scale[:, None]
    return scaled(found, scale)


def names_in_fp8(tensor: onnx_ir.Value) -> list[str]:
    """Return the names of the constants in E4M3 that a constant is made of."""
    node = tensor.producer()
    if node is None:
        return [str(tensor.name)] if tensor.const_value is not None and dtype_of(tensor.dtype) == E4M3 else []
    # A DequantizeLinear has its zero points in E4M3, too.
    operands = node.inputs[:1] if node.op_type == "DequantizeLinear" else node.inputs
    return [name for each in operands if each is not None for name in names_in_fp8(each)]


def _fields(node: onnx_ir.Node) -> dict[str, Any]:
    """Return the attributes of a node by name."""
    return {name: each.value for name, each in node.attributes.items()}


def _fits(attributes: dict[str, Any], x: NDArray[Any], *numbers: NDArray[Any]) -> bool:
    """Whether scales and zero points have the sizes that ONNX has for them: nothing is larger than x."""
    axis, block = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))
    if any(each.ndim == 0 for each in numbers) and all(each.ndim == 0 for each in numbers):
        return True
    if not -x.ndim <= axis < x.ndim or not 0 <= block <= x.shape[axis]:
        return False
    if block:
        wanted = [-(-size // block) if index == axis % x.ndim else size for index, size in enumerate(x.shape)]
        return all(list(each.shape) == wanted for each in numbers)
    return all(each.ndim == 0 or each.shape in ((x.shape[axis],), (1,)) for each in numbers)


def _dequantised(
    attributes: dict[str, Any], x: NDArray[Any], scale: NDArray[Any], zero: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Return (x - zero) * scale with one scale in all, one for each index of an axis, or one for each block there."""
    axis, block = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))

    def spread(numbers: NDArray[Any]) -> NDArray[Any]:
        numbers = numbers.astype(np.float64)
        if block:
            return np.repeat(numbers, block, axis)[tuple(map(slice, x.shape))]
        return (
            numbers if numbers.ndim == 0 else numbers.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)])
        )

    levels = x.astype(np.float64) - (0 if zero is None else spread(zero))
    result, dtype = levels * spread(scale), dtype_of(attributes.get("output_dtype") or None)
    return result.astype(scale.dtype) if dtype is None else to_numpy(to_torch(result).to(dtype))


@dataclass
class Shadow:
    """The ATen graph of an ONNX graph; its constants are those of `Constants`.

    Attributes:
        graph: Its nodes, with shapes and dtypes in `meta["val"]` where they are known.
        names: Names for reports of the placeholders that hold constants.
        tensors: The ONNX tensor of each node; a node that the passes have made may have none.
        computed: The constants that the graph computes, or that are folded from some: rounded where it does not round.
    """

    graph: Graph = field(default_factory=Graph)
    names: dict[Node, str] = field(default_factory=dict)
    tensors: dict[Node, onnx_ir.Value] = field(default_factory=dict)
    computed: set[Node] = field(default_factory=set)

    def placeholder(self) -> Node:
        """Add a placeholder before all other nodes."""
        first = next(iter(self.graph.nodes), None)
        if first is None:
            return self.graph.placeholder("tensor")
        with self.graph.inserting_before(first):
            return self.graph.placeholder("tensor")

    def value(self, node: Node) -> torch.Tensor:
        """See `Constants`."""
        return evaluate(node, self._stored)

    def _stored(self, constant: Node) -> torch.Tensor:
        values = constant_values(self.tensors[constant])
        assert values is not None
        return to_torch(values).reshape(constant.meta["val"].shape)

    def add(self, name: str, tensor: torch.Tensor, like: list[Node]) -> Node:
        """See `Constants`."""
        unique = free_name(name, {str(each.name) for each in self.tensors.values()})
        made = self.placeholder()
        made.name, made.meta["val"] = unique, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.names[made], self.tensors[made] = unique, constant(unique, tensor)
        self.computed.add(made)
        return made

    def replace(self, node: Node, new: Node, computes: Node) -> None:
        """See `Constants`."""
        node.replace_all_uses_with(new)
        tensor = self.tensors.get(computes)
        if tensor is not None and computes.meta["val"].shape == new.meta["val"].shape:
            self.tensors[new] = tensor


def shadow_of(graph: onnx_ir.Graph) -> Shadow:
    """Translate an ONNX graph in topological order, whose tensors have what onnx's shape inference finds of them."""
    return _Builder(graph).shadow


class _Builder:
    def __init__(self, graph: onnx_ir.Graph) -> None:
        self.shadow = Shadow()
        self._opset = graph.opset_imports.get("", 1)
        self._nodes: dict[onnx_ir.Value, Node] = {}
        self._vectors: dict[onnx_ir.Value, Node] = {}
        self._sizes: dict[str, int] = {}
        self._numbers = count(_FIRST_PRIME, 2)
        self._handlers: dict[str, Callable[[onnx_ir.Node], object]] = {
            "BatchNormalization": self._on_batch_norm,
            "Cast": self._on_cast,
            "CastLike": self._on_cast_like,
            "Clip": self._on_clip,
            "DequantizeLinear": self._on_dequantize,
            "Dropout": self._on_dropout,
            "Elu": self._on_slope,
            "Gemm": self._on_gemm,
            "MatMul": self._on_matmul,
            "LeakyRelu": self._on_slope,
            "Max": self._on_extreme,
            "Min": self._on_extreme,
            "PRelu": self._on_prelu,
            "Pow": self._on_pow,
            "Slice": self._on_slice,
            "Split": self._on_split,
            "ThresholdedRelu": self._on_thresholdedrelu,
            "Transpose": self._on_transpose,
            "Where": self._on_where,
            **dict.fromkeys(_UNARY, self._on_unary),
            **dict.fromkeys(_ARITHMETIC, self._on_arithmetic),
            **dict.fromkeys(_COMPARISONS, self._on_comparison),
            **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), self._on_reshape),
        }
        for tensor in (*graph.inputs, *_captured(graph)):
            self._placeholder(tensor)
        for node in graph:
            self._translate(node)
        outputs = [self._nodes[tensor] for tensor in graph.outputs if tensor in self._nodes]
        self.shadow.graph.output(tuple(outputs))

    # ---- nodes ----

    def _translate(self, node: onnx_ir.Node) -> None:
        try:
            if node.op_type not in self._handlers or node.domain:
                raise _UnknownError
            self._handlers[node.op_type](node)
        except _UnknownError:
            self._opaque(node)

    def _opaque(self, node: onnx_ir.Node) -> None:
        operands = [self._node(tensor) for tensor in _read_by(node) if tensor in self._nodes]
        for tensor in node.outputs:
            if tensor.name and node.op_type != "Constant":
                self._add(tensor, _something, tuple(operands), self._inferred(tensor))

    def _emit(self, node: onnx_ir.Node, op: Any, *arguments: Any, **options: Any) -> Node:
        """Add a node for the first output, with the shape that the op gives."""
        try:
            plain = torch.fx.node.map_arg((arguments, options), _value)
            value = op(*plain[0], **plain[1])
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise _UnknownError from error
        inferred = self._inferred(node.outputs[0])
        if inferred is not None and inferred.dim() != value.dim():
            raise _UnknownError  # a number that was written as [1, 1, 1] adds dimensions
        return self._add(node.outputs[0], op, arguments, value, options)

    def _add(self, tensor: onnx_ir.Value, op: Any, arguments: tuple[Any, ...], value: Any, options: Any = None) -> Node:
        made = self.shadow.graph.call_function(op, arguments, options or {})
        return self._register(tensor, made, value)

    def _register(self, tensor: onnx_ir.Value, made: Node, value: Any) -> Node:
        made.name = str(tensor.name)
        made.meta["val"] = value
        self._nodes[tensor] = made
        self.shadow.tensors[made] = tensor
        return made

    # ---- operands ----

    def _placeholder(self, tensor: onnx_ir.Value) -> Node:
        return self._register(tensor, self.shadow.placeholder(), self._inferred(tensor))

    def _node(self, tensor: onnx_ir.Value) -> Node:
        return self._nodes[tensor]

    def _operand(self, node: onnx_ir.Node, index: int) -> Node:
        """Return a tensor operand: computed, an input, or a constant of any size."""
        tensor = _given(node, index)
        if tensor is None:
            raise _UnknownError
        if tensor not in self._nodes:
            self._constant(tensor, node)
        return self._nodes[tensor]

    def _constant(self, tensor: onnx_ir.Value, reader: onnx_ir.Node) -> None:
        held: Any = constant_values(tensor) if tensor.const_value is None else tensor.const_value
        dtype = None if held is None else _dtype_of(held)
        if dtype is None:
            raise _UnknownError
        empty = torch.empty(tuple(held.shape), dtype=dtype, device="meta")
        made = self._register(tensor, self.shadow.placeholder(), empty)
        self.shadow.names[made] = self._readable(str(tensor.name), reader)

    def _readable(self, name: str, reader: onnx_ir.Node) -> str:
        """Return a dotted name for a constant: its own, or from its reader where exporters only number constants."""
        if "." in name and "::" not in name:
            return name
        # The last scope but one that torch.onnx notes; the last is the operator.
        scopes = re.findall(r"'([^']*)'", reader.metadata_props.get(_SCOPES, ""))
        path = scopes[-2:-1] or [part for part in (reader.name or "").split("/") if part][:-1]
        return ".".join([*path, name])

    def _vector(self, node: onnx_ir.Node, index: int) -> Node:
        """Return an operand; a constant [1, …, 1, n] as the vector that it is, for biases."""
        operand = self._operand(node, index)
        value = operand.meta["val"]
        if operand not in self.shadow.names or value.dim() < 2 or value.numel() != value.shape[-1]:
            return operand
        tensor = self.shadow.tensors[operand]
        if tensor not in self._vectors:
            made = self.shadow.placeholder()
            made.name, made.meta["val"] = f"{tensor.name}.vector", value.reshape(-1)
            self.shadow.tensors[made], self.shadow.names[made] = tensor, self.shadow.names[operand]
            self._vectors[tensor] = made
        return self._vectors[tensor]

    def _optional_number(self, node: onnx_ir.Node, index: int) -> float | None:
        return None if _given(node, index) is None else self._number(node, index)

    def _number(self, node: onnx_ir.Node, index: int) -> float:
        """Return the value of a constant that is one number."""
        tensor = _given(node, index)
        number = None if tensor is None else self._as_number(tensor)
        if number is None:
            raise _UnknownError
        return number

    def _as_number(self, tensor: onnx_ir.Value | None) -> float | None:
        """Return the value of a constant that is one number, else None."""
        values = self._few(tensor, 1)
        return None if values is None else float(values.reshape(-1)[0])

    def _filling(self, tensor: onnx_ir.Value | None) -> float | None:
        """Return the number that a constant is, or that fills a vector, else None."""
        values = self._few(tensor, _MOST_NUMBERS)
        if values is None or (values.size > 1 and values.size != values.shape[-1]):
            return None
        first = values.reshape(-1)[0]
        return float(first) if (values == first).all() else None

    def _few(self, tensor: onnx_ir.Value | None, most: int) -> NDArray[Any] | None:
        """Return the numbers of a constant that has no more than `most`."""
        if tensor is not None and tensor.const_value is not None and tensor.const_value.size > most:
            return None
        values = constant_values(tensor)
        return None if values is None or not 0 < values.size <= most or values.dtype.kind in "OSU" else values

    def _integers(self, node: onnx_ir.Node, index: int, attribute: str) -> list[int] | None:
        """Return constant integers that are an input or, in older versions, an attribute."""
        if attribute in node.attributes:
            return [int(number) for number in node.attributes[attribute].value]
        tensor = _given(node, index)
        if tensor is None:
            return None
        values = constant_values(tensor)
        if values is None:
            raise _UnknownError
        return [int(number) for number in values.reshape(-1)]

    def _inferred(self, tensor: onnx_ir.Value) -> torch.Tensor | None:
        """Return what shape inference found; None where it did not find the rank or the dtype."""
        dtype = dtype_of(tensor.dtype) if isinstance(tensor.type, onnx_ir.TensorType) else None
        if dtype is None or tensor.shape is None:
            return None
        shape = [dim if isinstance(dim, int) and dim > 0 else self._size(dim) for dim in tensor.shape]
        return _empty(shape, dtype)

    def _size(self, dim: Any) -> int:
        name = getattr(dim, "value", None) or f"?{len(self._sizes)}"
        if name not in self._sizes:
            self._sizes[name] = next(number for number in self._numbers if _is_prime(number))
        return self._sizes[name]

    # ---- operators ----

    def _on_matmul(self, node: onnx_ir.Node) -> None:
        x, weight = self._operand(node, 0), self._operand(node, 1)
        if x.meta.get("val") is None and weight.meta.get("val") is not None and weight.meta["val"].dim() == 2:
            # Whatever computed x, its last dimension is the weight's first; the rest is not known to equal anything.
            rows, value = self._size(None), weight.meta["val"]
            x.meta["val"] = torch.empty((rows, value.shape[0]), dtype=value.dtype, device="meta")
        self._emit(node, aten.matmul.default, x, weight)

    def _on_gemm(self, node: onnx_ir.Node) -> None:
        options = _fields(node)
        if options.get("transA", 0) or options.get("alpha", 1.0) != 1 or options.get("beta", 1.0) != 1:
            raise _UnknownError
        x, weight = self._operand(node, 0), self._operand(node, 1)
        bias = [] if _given(node, 2) is None else [self._vector(node, 2)]
        if options.get("transB", 0):
            self._emit(node, aten.linear.default, x, weight, *bias)
        elif bias:
            self._emit(node, aten.addmm.default, *bias, x, weight)
        else:
            self._emit(node, aten.mm.default, x, weight)

    def _on_unary(self, node: onnx_ir.Node) -> None:
        self._emit(node, _UNARY[node.op_type], self._operand(node, 0))

    def _on_comparison(self, node: onnx_ir.Node) -> None:
        at_right, at_left, with_tensor = _COMPARISONS[node.op_type]
        numbers = [self._filling(tensor) for tensor in node.inputs]
        if numbers[1] is not None:
            self._emit(node, at_right, self._operand(node, 0), numbers[1])
        elif numbers[0] is not None:
            self._emit(node, at_left, self._operand(node, 1), numbers[0])
        else:
            self._emit(node, with_tensor, self._operand(node, 0), self._operand(node, 1))

    def _on_arithmetic(self, node: onnx_ir.Node) -> None:
        by_tensor, by_number = _ARITHMETIC[node.op_type]
        numbers = [self._as_number(tensor) for tensor in node.inputs]
        if numbers[0] is None and numbers[1] is None:
            both = [self._vector(node, i) if node.op_type == "Add" else self._operand(node, i) for i in (0, 1)]
            for x, sigmoid in (both, both[::-1]):
                if node.op_type == "Mul" and sigmoid.target is aten.sigmoid.default and sigmoid.args[0] is x:
                    self._emit(node, aten.silu.default, x)
                    return
            self._emit(node, by_tensor, *both)
        elif numbers[0] is None or node.op_type in ("Add", "Mul"):
            index = 0 if numbers[0] is None else 1
            self._emit(node, by_number, self._operand(node, index), numbers[1 - index])
        elif node.op_type == "Sub":
            self._emit(node, aten.rsub.Scalar, self._operand(node, 1), numbers[0])
        else:
            raise _UnknownError

    def _on_slope(self, node: onnx_ir.Node) -> None:
        op, default = (aten.elu, 1.0) if node.op_type == "Elu" else (aten.leaky_relu, 0.01)
        self._emit(node, op.default, self._operand(node, 0), float(_fields(node).get("alpha", default)))

    def _on_prelu(self, node: onnx_ir.Node) -> None:
        if self._filling(node.inputs[1]) == 0:
            self._emit(node, aten.relu.default, self._operand(node, 0))
        else:
            slope = self._vector(node, 1)
            self._add(
                node.outputs[0], aten.prelu.default, (self._operand(node, 0), slope), self._inferred(node.outputs[0])
            )

    def _on_batch_norm(self, node: onnx_ir.Node) -> None:
        if _fields(node).get("training_mode", 0) or not _fields(node).get("spatial", 1) or self._opset < 9:
            raise _UnknownError
        x, scale, bias, mean, variance = (self._operand(node, index) for index in range(5))
        epsilon = float(_fields(node).get("epsilon", 1e-5))
        statistics = (scale, bias, mean, variance, False, 0.1, epsilon, False)
        self._add(node.outputs[0], aten.batch_norm.default, (x, *statistics), x.meta.get("val"))

    def _on_dequantize(self, node: onnx_ir.Node) -> None:
        self._constant(node.outputs[0], node)
        self.shadow.computed.add(self._nodes[node.outputs[0]])

    def _on_pow(self, node: onnx_ir.Node) -> None:
        self._emit(node, aten.pow.Tensor_Scalar, self._operand(node, 0), self._number(node, 1))

    def _on_extreme(self, node: onnx_ir.Node) -> None:
        numbers = [self._filling(tensor) for tensor in node.inputs]
        if len(numbers) != 2 or (numbers[0] is None) == (numbers[1] is None):
            raise _UnknownError
        index = 0 if numbers[0] is None else 1
        op = aten.clamp_min if node.op_type == "Max" else aten.clamp_max
        self._emit(node, op.default, self._operand(node, index), numbers[1 - index])

    def _on_clip(self, node: onnx_ir.Node) -> None:
        if self._opset < 11:
            low, high = _fields(node).get("min"), _fields(node).get("max")
        else:
            low, high = self._optional_number(node, 1), self._optional_number(node, 2)
        self._emit(node, aten.clamp.default, self._operand(node, 0), low, high)

    def _on_thresholdedrelu(self, node: onnx_ir.Node) -> None:
        self._emit(node, aten.threshold.default, self._operand(node, 0), float(_fields(node).get("alpha", 1.0)), 0.0)

    def _on_where(self, node: onnx_ir.Node) -> None:
        condition = self._operand(node, 0)
        chosen, other = (self._filling(node.inputs[index]) for index in (1, 2))
        if chosen is None and other is not None:
            self._emit(node, aten.where.ScalarOther, condition, self._operand(node, 1), other)
        elif chosen is not None and other is None:
            self._emit(node, aten.where.ScalarSelf, condition, chosen, self._operand(node, 2))
        elif chosen is not None and other is not None:
            self._add(node.outputs[0], aten.where.Scalar, (condition, chosen, other), self._inferred(node.outputs[0]))
        else:
            raise _UnknownError

    def _on_dropout(self, node: onnx_ir.Node) -> None:
        trains = self._optional_number(node, 2) if self._opset >= 12 else float(not _fields(node).get("is_test", 1))
        if trains or any(mask.uses() for mask in node.outputs[1:]):
            raise _UnknownError
        self._emit(node, aten.alias.default, self._operand(node, 0))

    def _on_cast(self, node: onnx_ir.Node) -> None:
        dtype = dtype_of(_fields(node).get("to"))
        if dtype is None:
            raise _UnknownError
        if _dequantised_source(node.outputs[0]) is not node.outputs[0]:
            self._on_dequantize(node)  # a constant, as what it reads
            return
        self._emit(node, aten._to_copy.default, self._operand(node, 0), dtype=dtype)

    def _on_cast_like(self, node: onnx_ir.Node) -> None:
        like = _value(self._operand(node, 1))
        self._emit(node, aten._to_copy.default, self._operand(node, 0), dtype=like.dtype)

    def _on_transpose(self, node: onnx_ir.Node) -> None:
        source = self._operand(node, 0)
        order = _fields(node).get("perm", list(range(_value(source).dim()))[::-1])
        self._emit(node, aten.permute.default, source, list(order))

    def _on_reshape(self, node: onnx_ir.Node) -> None:
        source, inferred = self._operand(node, 0), self._inferred(node.outputs[0])
        if inferred is None and node.op_type == "Reshape":
            # The rank and the last dimension alone may be written in the graph.
            sizes = [size if size > 0 else self._size(None) for size in self._integers(node, 1, "shape") or ()]
            inferred = _empty(sizes, _value(source).dtype) if sizes else None
        if inferred is None:
            raise _UnknownError
        self._add(node.outputs[0], aten.view.default, (source, list(inferred.shape)), inferred)

    def _on_split(self, node: onnx_ir.Node) -> None:
        source = self._operand(node, 0)
        value, axis = _value(source), int(_fields(node).get("axis", 0))
        sizes = self._integers(node, 1, "split")
        if sizes is None:
            # The last part is smaller where the dimension does not divide evenly.
            parts, size = len(node.outputs), int(value.shape[axis])
            largest = -(-size // parts)
            sizes = [largest] * (parts - 1) + [size - largest * (parts - 1)]
        try:
            pieces = aten.split_with_sizes.default(value, sizes, axis)
        except (RuntimeError, IndexError) as error:
            raise _UnknownError from error
        made = self.shadow.graph.call_function(aten.split_with_sizes.default, (source, sizes, axis))
        made.meta["val"] = list(pieces)
        for index, tensor in enumerate(node.outputs):
            if tensor.name:
                self._add(tensor, operator.getitem, (made, index), pieces[index])

    def _on_slice(self, node: onnx_ir.Node) -> None:
        source = self._operand(node, 0)
        starts, ends = self._integers(node, 1, "starts"), self._integers(node, 2, "ends")
        axes, steps = self._integers(node, 3, "axes"), self._integers(node, 4, "steps")
        if starts is None or ends is None or len(starts) != 1 or (steps or [1])[0] < 1:
            raise _UnknownError
        axis, step = (axes or [0])[0], (steps or [1])[0]
        self._emit(node, aten.slice.Tensor, source, axis, starts[0], min(ends[0], 2**62), step)


def _given(node: onnx_ir.Node, index: int) -> onnx_ir.Value | None:
    """Return an input of a node; None where it is left out."""
    return node.inputs[index] if len(node.inputs) > index else None


def _value(operand: Node) -> torch.Tensor:
    """Return the shape and dtype of an operand, which must be known."""
    value: torch.Tensor | None = operand.meta.get("val")
    if value is None:
        raise _UnknownError
    return value


def _empty(shape: list[int], dtype: torch.dtype) -> torch.Tensor | None:
    """Return a tensor without data; None where it would have more elements than can be counted."""
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except RuntimeError:
        return None


def _something(*_: Any) -> None:
    """Stand for an operator that is not translated."""


def _read_by(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    """Yield the tensors that a node reads, also from inside of its subgraphs."""
    yield from (each for each in node.inputs if each is not None)
    for _, inner in graphs_in(node):
        for each in inner:
            yield from _read_by(each)
        yield from inner.outputs


def graphs_in(node: onnx_ir.Node) -> Iterator[tuple[str, onnx_ir.Graph]]:
    """Yield the graphs that a node holds, such as branches, with what they are called."""
    for each in node.attributes.values():
        if each.type == onnx_ir.AttributeType.GRAPH:
            yield f"the {node.op_type} {node.name or node.outputs[0].name}", each.as_graph()


def _captured(graph: onnx_ir.Graph) -> list[onnx_ir.Value]:
    """Return the tensors, not constants, that a graph in a node reads from around it."""
    own = {*graph.inputs, *(tensor for node in graph for tensor in node.outputs)}
    read = dict.fromkeys(tensor for node in graph for tensor in node.inputs if tensor is not None)
    return [tensor for tensor in read if tensor not in own and constant_values(tensor) is None]


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))
