"""Write rotary positions in a form that TensorRT computes right in front of a sum.

    x * cos + Concat(-b, a) * sin   ->   Concat(a * cos_a + (-b) * sin_a, b * cos_b + a * sin_b)     a, b: halves of x

TensorRT 10.6 computes the left form wrong where all shapes are known, cos and sin are computed in the graph, and a sum
over the same axis follows, as in a norm of rotated queries (NanoChat, HunYuan) or a product with keys
(GPT-NeoX-Japanese): results were off by 10 to 60 % on an H100. In the right form they are right, and each element is
made of the same products and the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir
import onnx_ir.passes.common

# Between a rotation and a sum: operators that compute each element of itself, and those that only move elements.
_HARMLESS = frozenset({
    "Abs", "Add", "Cast", "Concat", "Div", "Expand", "Gather", "Identity", "Mul", "Neg", "Pow", "Reciprocal", "Reshape",
    "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where",
})  # fmt: skip
_SUMS = frozenset({
    "Einsum", "Gemm", "LayerNormalization", "MatMul", "RMSNormalization", "ReduceL1", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceSum", "ReduceSumSquare", "Softmax",
})  # fmt: skip


class RotaryHalves(onnx_ir.passes.InPlacePass):
    """The pass, over a graph whose tensors have shapes; others stay as they are."""

    def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
        """Rewrite the rotations that a sum follows."""
        rotations = filter(None, map(_rotation, model.graph))
        found = [each for each in rotations if _reaches_a_sum(each.result)]
        for rotation in found:
            _rewrite(model.graph, rotation)
        if found:
            onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
        return onnx_ir.passes.PassResult(model, modified=bool(found))


@dataclass(frozen=True)
class _Rotation:
    """A sum x * cos + turned * sin.

    Attributes:
        result: The sum.
        halves: Those of x.
        turned: The halves of `turned`: the second one of x and the first, one of which is negated.
        cos: A tensor as wide as x.
        sin: Likewise.
        width: That of a half.
        dtype: What x and `turned` are cast to before they are multiplied, as an ONNX number; None if they are not.
    """

    result: onnx_ir.Value
    halves: list[onnx_ir.Value]
    turned: list[onnx_ir.Value]
    cos: onnx_ir.Value
    sin: onnx_ir.Value
    width: int
    dtype: int | None


@dataclass(frozen=True)
class _Half:
    """A tensor that is the half `which`, 0 or 1, of x."""

    x: onnx_ir.Value
    which: int
    value: onnx_ir.Value


def _rotation(node: onnx_ir.Node) -> _Rotation | None:
    """Return the rotation whose result a node computes; None if it computes none."""
    if node.op_type != "Add" or node.outputs[0].is_graph_output():
        return None
    for straight, crossed in (node.inputs, node.inputs[::-1]):
        for wide_turned, sin in _factors(crossed):
            turned, dtype = _before_cast(wide_turned)
            concat = turned.producer()
            if concat is None or concat.op_type != "Concat" or len(concat.inputs) != 2:
                continue
            second, first = map(_half, concat.inputs)
            for wide_x, cos in _factors(straight):
                x, same_dtype = (wide_x, None) if dtype is None else _before_cast(wide_x)
                width = _width(x)
                if not width or dtype != same_dtype or any(_width(each) != width for each in (turned, cos, sin)):
                    continue
                if first and second and first.x is second.x is x and (first.which, second.which) == (0, 1):
                    others = [each for each in concat.inputs if each]
                    return _Rotation(node.outputs[0], [first.value, second.value], others, cos, sin, width // 2, dtype)
    return None


def _before_cast(value: onnx_ir.Value) -> tuple[onnx_ir.Value, int | None]:
    """Return what a tensor is cast from, and what to; the tensor itself and None if it is not cast."""
    node = value.producer()
    if node is None or node.op_type != "Cast" or node.inputs[0] is None:
        return value, None
    return node.inputs[0], node.attributes["to"].as_int()


def _factors(value: onnx_ir.Value | None) -> list[tuple[onnx_ir.Value, onnx_ir.Value]]:
    """Return the two factors of a product, in both orders."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Mul" or None in node.inputs:
        return []
    a, b = node.inputs
    assert a is not None
    assert b is not None
    return [(a, b), (b, a)]


def _width(value: onnx_ir.Value) -> int:
    """Return the size of the last axis; 0 where it is not known."""
    size = value.shape[-1] if value.shape is not None and len(value.shape) else 0
    return size if isinstance(size, int) else 0


def _half(value: onnx_ir.Value | None) -> _Half | None:
    """Return what a tensor, or what it is the negative of, is a half of."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type == "Neg":
        value = node.inputs[0]
        node = None if value is None else value.producer()
    x = None if node is None or not node.inputs else node.inputs[0]
    if node is None or value is None or x is None or _width(x) % 2 or 2 * _width(value) != _width(x):
        return None
    if node.op_type == "Split" and len(node.outputs) == 2:
        return _Half(x, node.outputs.index(value), value)
    if node.op_type != "Slice" or not 4 <= len(node.inputs) <= 5:
        return None
    numbers = [_number(each) for each in node.inputs[1:]]
    start, _, axis, step = numbers if len(numbers) == 4 else [*numbers, 1]
    if start is None or axis not in (-1, len(x.shape or ()) - 1) or step != 1:
        return None
    which = {0: 0, _width(value): 1}.get(start % _width(x))
    return None if which is None else _Half(x, which, value)


def _number(value: onnx_ir.Value | None) -> int | None:
    """Return the only element of a constant of integers; None for anything else."""
    constant = None if value is None else onnx_ir.convenience.get_const_tensor(value)
    return int(np.asarray(constant).item()) if constant is not None and constant.size == 1 else None


def _reaches_a_sum(value: onnx_ir.Value) -> bool:
    """Say whether a tensor, or what is computed of its elements one by one, is summed up."""
    waiting, seen = [value], set[onnx_ir.Node]()
    while waiting:
        for node in waiting.pop().consumers():
            if node.op_type in _SUMS:
                return True
            if node.op_type in _HARMLESS and node not in seen:
                seen.add(node)
                waiting.extend(node.outputs)
    return False


def _rewrite(graph: onnx_ir.Graph, rotation: _Rotation) -> None:
    tape = onnx_ir.tape.Tape()

    def half(value: onnx_ir.Value, which: int) -> onnx_ir.Value:
        numbers = [which * rotation.width, (which + 1) * rotation.width, -1, 1]  # from, to, axis, step
        bounds = [tape.op("Constant", [], {"value": onnx_ir.tensor(np.array([each]))}) for each in numbers]
        return tape.op("Slice", [value, *bounds])

    def cast(value: onnx_ir.Value) -> onnx_ir.Value:
        return value if rotation.dtype is None else tape.op("Cast", [value], {"to": rotation.dtype})

    sums = []
    for which in range(2):
        straight = tape.op("Mul", [cast(rotation.halves[which]), half(rotation.cos, which)])
        crossed = tape.op("Mul", [cast(rotation.turned[which]), half(rotation.sin, which)])
        sums.append(tape.op("Add", [straight, crossed]))
    old, new = rotation.result, tape.op("Concat", sums, {"axis": -1})
    new.shape, new.type, new.name = old.shape, old.type, old.name
    node = old.producer()
    assert node is not None
    onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, [old], [new])
