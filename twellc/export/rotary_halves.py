"""Write rotary positions in a form that TensorRT computes right.

    x * cos + Concat(-b, a) * sin   ->   Concat(a * cos_a + (-b) * sin_a, b * cos_b + a * sin_b)     a, b: halves of x

TensorRT 10.6 computes the left form wrong where all shapes are known, cos and sin are computed in the graph, and a sum
over the same axis follows, as in a norm of rotated queries (NanoChat, HunYuan) or a product with keys
(GPT-NeoX-Japanese): results were off by 10 to 60 % on an H100. In the right form they are right, and each element is
made of the same products and the same sum.

The operations in between are unknown. So every sum of two products is rewritten that has a Concat as a factor, however
its parts came about, in either order and with either sign, and also where they alternate as in GPT-J; except where
nothing reads it but plugins of twellc, through operators that only move elements: there it was always right, and the
form on the left is what the plans were measured with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir
import onnx_ir.passes.common

from twellc.plugins.library import PLUGIN_NAMESPACE

_MOVES = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
# What stands in a term; each computes every element of elements at the same place.
_FACTORS = frozenset({"Cast", "Div", "Identity", "Mul", "Neg"})
_END = np.iinfo(np.int64).max


class RotaryHalves(onnx_ir.passes.InPlacePass):
    """The pass, over a graph whose tensors have shapes; others stay as they are."""

    def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
        """Rewrite rotations."""
        modified = False
        for graph in model.graphs():
            for node in list(graph):
                layout = _layout(node)
                if layout is not None and not _only_plugins_read(node.outputs[0]):
                    _rewrite(graph, node, layout)
                    modified = True
        if modified:
            onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
        return onnx_ir.passes.PassResult(model, modified=modified)


@dataclass(frozen=True)
class _Layout:
    """How an axis is divided into parts that are joined again.

    Attributes:
        axis: The axis, counted from the last one, which is -1.
        bounds: Where parts start, and where the last one ends; of parts that alternate, as in GPT-J, the whole.
        step: 1, or of parts that alternate their number: part i has every `step`-th element from i on.
        joined: The Concat; of parts that alternate the Reshape behind it, [..., n, parts] -> [..., n * parts].
        parts: The parts.
        wide: Of parts that alternate what makes them [..., n, 1].
    """

    axis: int
    bounds: tuple[int, ...]
    step: int
    joined: onnx_ir.Node = field(compare=False)
    parts: list[onnx_ir.Value] = field(compare=False)
    wide: list[onnx_ir.Node] = field(default_factory=list, compare=False)

    @property
    def width(self) -> int:
        """The size of the axis."""
        return self.bounds[-1]


def _layout(node: onnx_ir.Node) -> _Layout | None:
    """Return the layout of the rotation that a node computes; None if it computes none."""
    if node.op_type not in ("Add", "Sub", "Sum") or node.domain or len(node.inputs) != 2:
        return None
    result = node.outputs[0]
    for straight, crossed in (node.inputs, node.inputs[::-1]):
        layout = _divided(crossed) if _is_product(straight) and _is_product(crossed) else None
        if layout is None or _size(result, layout.axis) != layout.width:
            continue
        if layout.step > 1 and result.shape != layout.joined.outputs[0].shape:
            continue
        if all(_size(leaf, layout.axis) in (1, layout.width) for term in (straight, crossed) for leaf in _leaves(term)):
            return layout
    return None


def _is_product(value: onnx_ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Cast", "Identity", "Neg") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type in ("Mul", "Div")


def _divided(value: onnx_ir.Value | None) -> _Layout | None:
    """Return the layout of the first Concat among the factors of a term."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type in _FACTORS:
        return next(filter(None, map(_divided, node.inputs)), None)
    return _joined(node)


def _joined(node: onnx_ir.Node | None) -> _Layout | None:
    """Return the layout of what a node joins."""
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        return _alternating(node, _joined(node.inputs[0].producer()))
    if node is None or node.op_type != "Concat" or node.outputs[0].shape is None:
        return None
    rank = len(node.outputs[0].shape)
    axis = node.attributes["axis"].as_int() % rank - rank
    widths = [_size(each, axis) for each in node.inputs]
    if len(widths) < 2 or 0 in widths:
        return None
    bounds = tuple(int(bound) for bound in np.cumsum([0, *widths]))
    return _Layout(axis, bounds, 1, node, [each for each in node.inputs if each is not None])


def _alternating(node: onnx_ir.Node, pairs: _Layout | None) -> _Layout | None:
    if pairs is None or pairs.joined.op_type != "Concat" or pairs.axis != -1 or pairs.width != len(pairs.parts):
        return None
    wide = [each for each in (part.producer() for part in pairs.parts) if each and each.op_type == "Unsqueeze"]
    parts = [each.inputs[0] for each in wide if each.inputs[0] is not None]
    size, count = _size(node.outputs[0], -1), pairs.width
    ranks = {_rank(pairs.joined.outputs[0]), _rank(node.outputs[0]) + 1, *(_rank(each) + 1 for each in parts)}
    if len(parts) < count or len(ranks) > 1 or _size(parts[0], -1) * count != size:
        return None
    return _Layout(-1, (0, size), count, node, parts, wide)


def _rank(value: onnx_ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _size(value: onnx_ir.Value | None, axis: int) -> int:
    """Return the size of an axis, counted from the last one: 1 in front of the first one, 0 where it is not known."""
    if value is None or value.shape is None:
        return 0
    size = value.shape[axis] if len(value.shape) >= -axis else 1
    return size if isinstance(size, int) else 0


def _factors(value: onnx_ir.Value) -> list[onnx_ir.Value] | None:
    """Return what a term, or a factor of one, is made of; None for what is taken as a whole, such as x."""
    node = value.producer()
    if node is None or node.op_type not in _FACTORS or None in node.inputs:
        return None
    is_shared = len(value.uses()) > 1 or value.is_graph_output()
    return None if is_shared and _divided(value) is None else [each for each in node.inputs if each is not None]


def _leaves(value: onnx_ir.Value | None) -> list[onnx_ir.Value]:
    if value is None:
        return []
    factors = _factors(value)
    return [value] if factors is None else [leaf for each in factors for leaf in _leaves(each)]


def _only_plugins_read(value: onnx_ir.Value) -> bool:
    """Whether a tensor goes into nothing but plugins of twellc, where nothing computes in between."""
    waiting, seen = [value], set[onnx_ir.Node]()
    while waiting:
        each = waiting.pop()
        if each.is_graph_output():
            return False
        for node in each.consumers():
            if node.domain == PLUGIN_NAMESPACE or node.op_type == "Shape":
                continue
            if node.op_type not in _MOVES:
                return False
            if node not in seen:
                seen.add(node)
                waiting.extend(node.outputs)
    return True


def _rewrite(graph: onnx_ir.Graph, node: onnx_ir.Node, layout: _Layout) -> None:
    tape = onnx_ir.tape.Tape()

    def part(value: onnx_ir.Value, which: int) -> onnx_ir.Value:
        producer, factors = value.producer(), _factors(value)
        if factors is not None:
            assert producer is not None
            return tape.op(producer.op_type, [part(each, which) for each in factors], producer.attributes)
        joined = _joined(producer)
        if joined is not None and joined == layout:
            return joined.parts[which]
        if _size(value, layout.axis) == 1:
            return value
        assert value.shape is not None
        start, end = (layout.bounds[which : which + 2]) if layout.step == 1 else (which, layout.width)
        numbers = [start, _END if end == layout.width else end, len(value.shape) + layout.axis, layout.step]
        bounds = [tape.op("Constant", [], {"value": onnx_ir.tensor(np.array([each]))}) for each in numbers]
        return tape.op("Slice", [value, *bounds])

    sums = []
    for which in range(len(layout.parts)):
        terms = [part(each, which) for each in node.inputs if each is not None]
        sums.append(tape.op(node.op_type, terms))
    if layout.wide:
        sums = [
            tape.op("Unsqueeze", [each, *wide.inputs[1:]], wide.attributes)
            for each, wide in zip(sums, layout.wide, strict=True)
        ]
    new = tape.op("Concat", sums, {"axis": layout.axis})
    if layout.wide:
        new = tape.op("Reshape", [new, *layout.joined.inputs[1:]], layout.joined.attributes)
    onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, [node.outputs[0]], [new])
