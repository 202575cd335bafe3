"""Show an ONNX graph to the matcher of feed-forward blocks, as the ATen graph that means the same.

    MatMul(x, W) ─ Relu ─ Mul(·, MatMul(x, V))   ->   aten.matmul(x, W) ─ aten.relu ─ aten.mul(·, aten.matmul(x, V))

One matcher thus serves both kinds of graph. Only operators that occur in blocks are translated; any other becomes a
node that computes something unknown from its inputs. Nothing runs: the ATen graph has shapes and dtypes, and each of
its nodes knows its ONNX tensor. Named and unknown dimensions become large prime numbers, one for
each, so that equal sizes mean equal dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
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

_FIRST_PRIME = 100_003
_MOST_NUMBERS = 1 << 17
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


def dtype_of(onnx_type: Any) -> torch.dtype | None:
    """Return the torch dtype of an ONNX element type, or of what graphsurgeon makes of one; None for others."""
    if onnx_type is None:
        return None
    if not isinstance(onnx_type, int):
        onnx_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(onnx_type))
    known = BY_ONNX.get(onnx_type)
    return None if known is None else known.torch


def constant_values(tensor: gs.Tensor) -> NDArray[Any] | None:
    """Return the values of an initializer, of a Constant node's output, or of dequantised ones; None for others."""
    if isinstance(tensor, gs.Constant):
        values: NDArray[Any] = tensor.values
        return values
    source = _dequantised_source(tensor)
    if source is not tensor:
        found, dtype = constant_values(source), dtype_of(tensor.inputs[0].attrs.get("to"))
        return None if found is None or dtype is None else to_numpy(to_torch(found).to(dtype))
    if len(tensor.inputs) != 1 or tensor.inputs[0].op not in ("Constant", "DequantizeLinear"):
        return None
    attributes = tensor.inputs[0].attrs
    if tensor.inputs[0].op == "DequantizeLinear":
        operands = [constant_values(each) for each in tensor.inputs[0].inputs if each.name]
        known = [each for each in operands if each is not None]
        return (
            None
            if len(known) < max(len(operands), 2) or not _fits(attributes, *known)
            else _dequantised(attributes, *known)
        )
    for name, kind in (("value_float", np.float32), ("value_floats", np.float32),
                       ("value_int", np.int64), ("value_ints", np.int64)):  # fmt: skip
        if name in attributes:
            return np.asarray(attributes[name], kind)
    value = attributes.get("value")
    return value.values if isinstance(value, gs.Constant) else None


def _dequantised_source(tensor: gs.Tensor) -> gs.Tensor:
    """Return what a Cast reads of a DequantizeLinear; any other tensor itself."""
    if isinstance(tensor, gs.Constant) or len(tensor.inputs) != 1 or tensor.inputs[0].op != "Cast":
        return tensor
    source = tensor.inputs[0].inputs[0]
    dequantised = not isinstance(source, gs.Constant) and [node.op for node in source.inputs] == ["DequantizeLinear"]
    return source if dequantised else tensor


def in_fp8(tensor: gs.Tensor) -> Fp8 | None:
    """Return the matrix in E4M3 and its scales that a DequantizeLinear makes a constant of; None for anything else."""
    tensor = _dequantised_source(tensor)
    if isinstance(tensor, gs.Constant) or len(tensor.inputs) != 1 or tensor.inputs[0].op != "DequantizeLinear":
        return None
    node = tensor.inputs[0]
    values = [constant_values(each) for each in node.inputs if each.name]
    known = [each for each in values if each is not None]
    kinds = [dtype_of(each.dtype) for each in known]
    if len(known) < max(len(values), 2) or kinds[0] != E4M3 or None in kinds or node.attrs.get("block_size"):
        return None
    found, scale, *zero = map(to_torch, known)
    if any(bool(each.float().any()) for each in zero):
        return None
    if scale.dim() == 1 and int(node.attrs.get("axis", 1)) % 2 == 0:
        scale = scale[:, None]
    return scaled(found, scale)


def names_in_fp8(tensor: gs.Tensor) -> list[str]:
    """Return the names of the constants in E4M3 that a constant is made of."""
    if isinstance(tensor, gs.Constant):
        return [tensor.name] if dtype_of(tensor.dtype) == E4M3 else []
    found = []
    for node in tensor.inputs:
        # A DequantizeLinear has its zero points in E4M3, too.
        operands = node.inputs[:1] if node.op == "DequantizeLinear" else node.inputs
        found += [name for each in operands for name in names_in_fp8(each)]
    return found


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
    tensors: dict[Node, gs.Tensor] = field(default_factory=dict)
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
        unique = free_name(name, {each.name for each in self.tensors.values()})
        made = self.placeholder()
        made.name, made.meta["val"] = unique, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self.names[made], self.tensors[made] = unique, gs.Constant(unique, to_numpy(tensor))
        self.computed.add(made)
        return made

    def replace(self, node: Node, new: Node, computes: Node) -> None:
        """See `Constants`."""
        node.replace_all_uses_with(new)
        tensor = self.tensors.get(computes)
        if tensor is not None and computes.meta["val"].shape == new.meta["val"].shape:
            self.tensors[new] = tensor


def shadow_of(graph: gs.Graph, modules: dict[str, str]) -> Shadow:
    """Translate an ONNX graph, whose tensors have the shapes and dtypes of onnx's shape inference.

    Args:
        graph: A graph in topological order.
        modules: Module paths, where they are known, by the first output of the nodes that stem from them.
    """
    return _Builder(graph, modules).shadow


class _Builder:
    def __init__(self, graph: gs.Graph, modules: dict[str, str]) -> None:
        self.shadow = Shadow()
        self._opset = graph.opset
        self._modules = modules
        self._nodes: dict[str, Node] = {}
        self._vectors: dict[str, Node] = {}
        self._sizes: dict[str, int] = {}
        self._numbers = count(_FIRST_PRIME, 2)
        self._handlers: dict[str, Callable[[gs.Node], object]] = {
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
        for node in graph.nodes:
            self._translate(node)
        outputs = [self._nodes[tensor.name] for tensor in graph.outputs if tensor.name in self._nodes]
        self.shadow.graph.output(tuple(outputs))

    # ---- nodes ----

    def _translate(self, node: gs.Node) -> None:
        try:
            if node.op not in self._handlers or (node.domain and node.domain != "ai.onnx"):
                raise _UnknownError
            self._handlers[node.op](node)
        except _UnknownError:
            self._opaque(node)

    def _opaque(self, node: gs.Node) -> None:
        operands = [self._node(tensor) for tensor in _read_by(node) if tensor.name in self._nodes]
        for tensor in node.outputs:
            if tensor.name and node.op != "Constant":
                self._add(tensor, _something, tuple(operands), self._inferred(tensor))

    def _emit(self, node: gs.Node, op: Any, *arguments: Any, **options: Any) -> Node:
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

    def _add(
        self, tensor: gs.Tensor, op: Any, arguments: tuple[Any, ...], value: Any, options: dict[str, Any] | None = None
    ) -> Node:
        made = self.shadow.graph.call_function(op, arguments, options or {})
        return self._register(tensor, made, value)

    def _register(self, tensor: gs.Tensor, made: Node, value: Any) -> Node:
        made.name = tensor.name
        made.meta["val"] = value
        self._nodes[tensor.name] = made
        self.shadow.tensors[made] = tensor
        return made

    # ---- operands ----

    def _placeholder(self, tensor: gs.Tensor) -> Node:
        return self._register(tensor, self.shadow.placeholder(), self._inferred(tensor))

    def _node(self, tensor: gs.Tensor) -> Node:
        return self._nodes[tensor.name]

    def _operand(self, node: gs.Node, index: int) -> Node:
        """Return a tensor operand: computed, an input, or a constant of any size."""
        tensor = _given(node, index)
        if tensor is None:
            raise _UnknownError
        if tensor.name not in self._nodes:
            self._constant(tensor, node)
        return self._nodes[tensor.name]

    def _constant(self, tensor: gs.Tensor, reader: gs.Node) -> None:
        if not isinstance(tensor, gs.Constant):
            values = constant_values(tensor)
            if values is None:
                raise _UnknownError
            dtype, shape = dtype_of(values.dtype), values.shape
        else:
            dtype, shape = dtype_of(tensor.dtype), tensor.shape
        if dtype is None:
            raise _UnknownError
        made = self._register(tensor, self.shadow.placeholder(), torch.empty(tuple(shape), dtype=dtype, device="meta"))
        self.shadow.names[made] = self._readable(tensor.name, reader)

    def _readable(self, name: str, reader: gs.Node) -> str:
        """Return a dotted name for a constant: its own, or from its reader where exporters only number constants."""
        if "." in name and "::" not in name:
            return name
        module = self._modules.get(reader.outputs[0].name) if reader.outputs else None
        path = [module] if module else [part for part in reader.name.split("/") if part][:-1]
        return ".".join([*path, name])

    def _vector(self, node: gs.Node, index: int) -> Node:
        """Return an operand; a constant [1, …, 1, n] as the vector that it is, for biases."""
        operand = self._operand(node, index)
        value = operand.meta["val"]
        if operand not in self.shadow.names or value.dim() < 2 or value.numel() != value.shape[-1]:
            return operand
        tensor = node.inputs[index]
        if tensor.name not in self._vectors:
            made = self.shadow.placeholder()
            made.name, made.meta["val"] = f"{tensor.name}.vector", value.reshape(-1)
            self.shadow.tensors[made], self.shadow.names[made] = tensor, self.shadow.names[operand]
            self._vectors[tensor.name] = made
        return self._vectors[tensor.name]

    def _optional_number(self, node: gs.Node, index: int) -> float | None:
        return None if _given(node, index) is None else self._number(node, index)

    def _number(self, node: gs.Node, index: int) -> float:
        """Return the value of a constant that is one number."""
        tensor = _given(node, index)
        number = None if tensor is None else self._as_number(tensor)
        if number is None:
            raise _UnknownError
        return number

    def _as_number(self, tensor: gs.Tensor) -> float | None:
        """Return the value of a constant that is one number, else None."""
        values = self._few(tensor, 1)
        return None if values is None else float(values.reshape(-1)[0])

    def _filling(self, tensor: gs.Tensor) -> float | None:
        """Return the number that a constant is, or that fills a vector, else None."""
        values = self._few(tensor, _MOST_NUMBERS)
        if values is None or (values.size > 1 and values.size != values.shape[-1]):
            return None
        first = values.reshape(-1)[0]
        return float(first) if (values == first).all() else None

    def _few(self, tensor: gs.Tensor, most: int) -> NDArray[Any] | None:
        """Return the numbers of a constant that has no more than `most`."""
        if isinstance(tensor, gs.Constant) and int(np.prod(tensor.shape)) > most:
            return None
        values = constant_values(tensor)
        return None if values is None or not 0 < values.size <= most or values.dtype.kind in "OSU" else values

    def _integers(self, node: gs.Node, index: int, attribute: str) -> list[int] | None:
        """Return constant integers that are an input or, in older versions, an attribute."""
        if attribute in node.attrs:
            return [int(number) for number in node.attrs[attribute]]
        tensor = _given(node, index)
        if tensor is None:
            return None
        values = constant_values(tensor)
        if values is None:
            raise _UnknownError
        return [int(number) for number in values.reshape(-1)]

    def _inferred(self, tensor: gs.Tensor) -> torch.Tensor | None:
        """Return what shape inference found; None where it did not find the rank or the dtype."""
        dtype = dtype_of(tensor.dtype)
        if dtype is None or tensor.shape is None:
            return None
        shape = [dim if isinstance(dim, int) and dim > 0 else self._size(dim) for dim in tensor.shape]
        return _empty(shape, dtype)

    def _size(self, dim: Any) -> int:
        name = dim if isinstance(dim, str) and dim else f"?{len(self._sizes)}"
        if name not in self._sizes:
            self._sizes[name] = next(number for number in self._numbers if _is_prime(number))
        return self._sizes[name]

    # ---- operators ----

    def _on_matmul(self, node: gs.Node) -> None:
        x, weight = self._operand(node, 0), self._operand(node, 1)
        if x.meta.get("val") is None and weight.meta.get("val") is not None and weight.meta["val"].dim() == 2:
            # Whatever computed x, its last dimension is the weight's first; the rest is not known to equal anything.
            rows, value = self._size(None), weight.meta["val"]
            x.meta["val"] = torch.empty((rows, value.shape[0]), dtype=value.dtype, device="meta")
        self._emit(node, aten.matmul.default, x, weight)

    def _on_gemm(self, node: gs.Node) -> None:
        options = node.attrs
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

    def _on_unary(self, node: gs.Node) -> None:
        self._emit(node, _UNARY[node.op], self._operand(node, 0))

    def _on_comparison(self, node: gs.Node) -> None:
        at_right, at_left, with_tensor = _COMPARISONS[node.op]
        numbers = [self._filling(tensor) for tensor in node.inputs]
        if numbers[1] is not None:
            self._emit(node, at_right, self._operand(node, 0), numbers[1])
        elif numbers[0] is not None:
            self._emit(node, at_left, self._operand(node, 1), numbers[0])
        else:
            self._emit(node, with_tensor, self._operand(node, 0), self._operand(node, 1))

    def _on_arithmetic(self, node: gs.Node) -> None:
        by_tensor, by_number = _ARITHMETIC[node.op]
        numbers = [self._as_number(tensor) for tensor in node.inputs]
        if numbers[0] is None and numbers[1] is None:
            both = [self._vector(node, i) if node.op == "Add" else self._operand(node, i) for i in (0, 1)]
            for x, sigmoid in (both, both[::-1]):
                if node.op == "Mul" and sigmoid.target is aten.sigmoid.default and sigmoid.args[0] is x:
                    self._emit(node, aten.silu.default, x)
                    return
            self._emit(node, by_tensor, *both)
        elif numbers[0] is None or node.op in ("Add", "Mul"):
            index = 0 if numbers[0] is None else 1
            self._emit(node, by_number, self._operand(node, index), numbers[1 - index])
        elif node.op == "Sub":
            self._emit(node, aten.rsub.Scalar, self._operand(node, 1), numbers[0])
        else:
            raise _UnknownError

    def _on_slope(self, node: gs.Node) -> None:
        op, default = (aten.elu, 1.0) if node.op == "Elu" else (aten.leaky_relu, 0.01)
        self._emit(node, op.default, self._operand(node, 0), float(node.attrs.get("alpha", default)))

    def _on_prelu(self, node: gs.Node) -> None:
        if self._filling(node.inputs[1]) == 0:
            self._emit(node, aten.relu.default, self._operand(node, 0))
        else:
            slope = self._vector(node, 1)
            self._add(
                node.outputs[0], aten.prelu.default, (self._operand(node, 0), slope), self._inferred(node.outputs[0])
            )

    def _on_batch_norm(self, node: gs.Node) -> None:
        if node.attrs.get("training_mode", 0) or not node.attrs.get("spatial", 1) or self._opset < 9:
            raise _UnknownError
        x, scale, bias, mean, variance = (self._operand(node, index) for index in range(5))
        epsilon = float(node.attrs.get("epsilon", 1e-5))
        statistics = (scale, bias, mean, variance, False, 0.1, epsilon, False)
        self._add(node.outputs[0], aten.batch_norm.default, (x, *statistics), x.meta.get("val"))

    def _on_dequantize(self, node: gs.Node) -> None:
        self._constant(node.outputs[0], node)
        self.shadow.computed.add(self._nodes[node.outputs[0].name])

    def _on_pow(self, node: gs.Node) -> None:
        self._emit(node, aten.pow.Tensor_Scalar, self._operand(node, 0), self._number(node, 1))

    def _on_extreme(self, node: gs.Node) -> None:
        numbers = [self._filling(tensor) for tensor in node.inputs]
        if len(numbers) != 2 or (numbers[0] is None) == (numbers[1] is None):
            raise _UnknownError
        index = 0 if numbers[0] is None else 1
        op = aten.clamp_min if node.op == "Max" else aten.clamp_max
        self._emit(node, op.default, self._operand(node, index), numbers[1 - index])

    def _on_clip(self, node: gs.Node) -> None:
        if self._opset < 11:
            low, high = node.attrs.get("min"), node.attrs.get("max")
        else:
            low, high = self._optional_number(node, 1), self._optional_number(node, 2)
        self._emit(node, aten.clamp.default, self._operand(node, 0), low, high)

    def _on_thresholdedrelu(self, node: gs.Node) -> None:
        self._emit(node, aten.threshold.default, self._operand(node, 0), float(node.attrs.get("alpha", 1.0)), 0.0)

    def _on_where(self, node: gs.Node) -> None:
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

    def _on_dropout(self, node: gs.Node) -> None:
        trains = self._optional_number(node, 2) if self._opset >= 12 else float(not node.attrs.get("is_test", 1))
        if trains or any(mask.outputs for mask in node.outputs[1:]):
            raise _UnknownError
        self._emit(node, aten.alias.default, self._operand(node, 0))

    def _on_cast(self, node: gs.Node) -> None:
        dtype = dtype_of(node.attrs.get("to"))
        if dtype is None:
            raise _UnknownError
        if _dequantised_source(node.outputs[0]) is not node.outputs[0]:
            self._on_dequantize(node)  # a constant, as what it reads
            return
        self._emit(node, aten._to_copy.default, self._operand(node, 0), dtype=dtype)

    def _on_cast_like(self, node: gs.Node) -> None:
        like = _value(self._operand(node, 1))
        self._emit(node, aten._to_copy.default, self._operand(node, 0), dtype=like.dtype)

    def _on_transpose(self, node: gs.Node) -> None:
        source = self._operand(node, 0)
        order = node.attrs.get("perm", list(range(_value(source).dim()))[::-1])
        self._emit(node, aten.permute.default, source, list(order))

    def _on_reshape(self, node: gs.Node) -> None:
        source, inferred = self._operand(node, 0), self._inferred(node.outputs[0])
        if inferred is None and node.op == "Reshape":
            # The rank and the last dimension alone may be written in the graph.
            sizes = [size if size > 0 else self._size(None) for size in self._integers(node, 1, "shape") or ()]
            inferred = _empty(sizes, _value(source).dtype) if sizes else None
        if inferred is None:
            raise _UnknownError
        self._add(node.outputs[0], aten.view.default, (source, list(inferred.shape)), inferred)

    def _on_split(self, node: gs.Node) -> None:
        source = self._operand(node, 0)
        value, axis = _value(source), int(node.attrs.get("axis", 0))
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

    def _on_slice(self, node: gs.Node) -> None:
        source = self._operand(node, 0)
        starts, ends = self._integers(node, 1, "starts"), self._integers(node, 2, "ends")
        axes, steps = self._integers(node, 3, "axes"), self._integers(node, 4, "steps")
        if starts is None or ends is None or len(starts) != 1 or (steps or [1])[0] < 1:
            raise _UnknownError
        axis, step = (axes or [0])[0], (steps or [1])[0]
        self._emit(node, aten.slice.Tensor, source, axis, starts[0], min(ends[0], 2**62), step)


def _given(node: gs.Node, index: int) -> gs.Tensor | None:
    """Return an input of a node; None where it is left out."""
    return node.inputs[index] if len(node.inputs) > index and node.inputs[index].name else None


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


def _read_by(node: gs.Node) -> Iterator[gs.Tensor]:
    """Yield the tensors that a node reads, also from inside of its subgraphs."""
    yield from node.inputs
    for attribute in node.attrs.values():
        if isinstance(attribute, gs.Graph):
            for inner in attribute.nodes:
                yield from _read_by(inner)
            yield from attribute.outputs


def _captured(graph: gs.Graph) -> list[gs.Tensor]:
    """Return the tensors, not constants, that a graph in a node reads from around it."""
    own = {tensor.name for node in graph.nodes for tensor in node.outputs} | {tensor.name for tensor in graph.inputs}
    read = {tensor.name: tensor for node in graph.nodes for tensor in node.inputs if isinstance(tensor, gs.Variable)}
    return [tensor for name, tensor in read.items() if name and name not in own and constant_values(tensor) is None]


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(3, int(number**0.5) + 1, 2))
