"""Find what seems to be a feed-forward block in a form that the matcher of `find_ffn.py` does not read: to be reported.

    … ─ product(W1) ─ a … b ─ ReLU ─ c … d ─ product(W2) ─ …

A product is any of the matrix products with a constant, whichever dimension it sums over; of convolutions those with a
kernel of size 1. The ReLU reads only nodes computed from one such product and constants. Behind it there may
be what moves, cuts, scales, shifts or normalises its numbers, or changes them one by one; but no sum with what the
model computes, as of a residual, no reduction, as in pooling, and no other product, as in attention.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from twellc.passes.match.activations import Activation, packet, parse_activation
from twellc.passes.match.linear import CONVOLUTIONS, PRODUCTS, Linear, Weight, strip

aten = torch.ops.aten

_MIXERS = PRODUCTS | {aten.softmax, aten._softmax, aten.scaled_dot_product_attention}
_SUMS = frozenset((aten.add, aten.sub, aten.rsub))
_PARTS = frozenset((aten.slice, aten.select, aten.chunk, aten.split, aten.split_with_sizes, aten.unbind))
_MOST_NODES = 32

# Nodes from one back to one of its sources.
_Way = list[Node]


@dataclass(frozen=True)
class UnreadForm:
    """What seems to be a block.

    Attributes:
        activation: Its ReLU.
        up, down: The products before and behind it. How they read their weights is not known.
        gated: Whether another projection is multiplied with the ReLU's result.
        widths: d_model, d_ff and d_out.
        operations: The names of all operations from `up` to `down`.
    """

    activation: Activation
    up: Linear
    down: Linear
    gated: bool
    widths: tuple[int, int, int]
    operations: list[str]


class UnreadForms:
    """Finds such forms in one graph, whose nodes have their values in `meta`."""

    def __init__(self, graph: Graph, constants: dict[Node, str]) -> None:
        self._names = constants
        self._fixed = set(constants)  # and nodes computed from constants alone
        for node in graph.nodes:
            if node.op == "call_function" and self._fixed.issuperset(node.all_input_nodes):
                self._fixed.add(node)

    def ending_at(self, node: Node) -> UnreadForm | None:
        """Read `node` as the down projection of a block."""
        down = self._product(node)
        if down is None:
            return None
        for way in _ways(down.x, self._carries):
            activation = parse_activation(way[-1], strip)
            if activation is None or not activation.name.lower().startswith(("relu", "fatrelu")):
                continue
            before = self._projected(activation.pre)
            if before is None:
                continue
            up = self._product(before[-1])
            assert up is not None
            factors = [arg for each in way if packet(each) is aten.mul for arg in _sources(each)]
            gated = any(self._projected(factor) for factor in factors if factor not in way)
            between = [*map(_name, before[-2::-1]), activation.name, *map(_name, way[-2::-1])]
            operations = [_product_name(up), *between, _product_name(down)]
            return UnreadForm(activation, up, down, gated, (_widths(up)[0], *_widths(down)), operations)
        return None

    def _product(self, node: Node) -> Linear | None:
        """Read a product of a tensor with a constant that has two dimensions or more."""
        if packet(node) not in PRODUCTS:
            return None
        factors = [arg for arg in _sources(node) if arg.meta["val"].is_floating_point()]
        fixed = [arg for arg in factors if arg in self._fixed]
        others = [arg for arg in factors if arg not in self._fixed]
        if not fixed or not others:
            return None
        weight = max(fixed, key=lambda arg: arg.meta["val"].dim())  # the rest are biases
        sizes = weight.meta["val"].shape
        if len(sizes) < 2 or (packet(node) in CONVOLUTIONS and any(size != 1 for size in sizes[2:])):
            return None
        sources = (way[-1] for way in _ways(weight, lambda node, source: True))
        name = next((self._names[source] for source in sources if source in self._names), weight.name)
        return Linear(node, others[-1], Weight(weight, name), None, (node,))

    def _carries(self, node: Node, source: Node) -> bool:
        """Whether a result holds the numbers of an operand: all or some of them, moved or changed one by one."""
        op = packet(node)
        if op in _MIXERS or (op in _SUMS and not self._fixed.issuperset(set(_sources(node)) - {source})):
            return False
        if op in _PARTS or node.target is operator.getitem or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return True
        sizes = [value.numel() for value in map(_value, (source, node)) if isinstance(value, torch.Tensor)]
        return len(sizes) == 2 and statically_known_true(sizes[0] == sizes[1])

    def _projected(self, node: Node) -> _Way | None:
        """Return the way to the one product that, besides constants, `node` is computed from."""
        ways = _ways(node, lambda node, source: node not in self._fixed and self._product(node) is None)
        products = [way for way in ways if self._product(way[-1])]
        ends = {way[-1] for way in ways if way not in products} - self._fixed
        unknown = any(end.op != "call_function" or packet(end) in _MIXERS for end in ends)
        return products[0] if len(products) == 1 and not unknown and len(ways) < _MOST_NODES else None


def _sources(node: Node) -> list[Node]:
    """Return the operands of a node that are tensors or lists of them, no sizes and other numbers."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return [source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), numbers)]


def _ways(node: Node, passes: Callable[[Node, Node], bool]) -> list[_Way]:
    """Return the shortest way to each source of `node` that can be reached by steps from a node to its source."""
    ways, seen = [[node]], {node}
    for way in ways:
        for source in _sources(way[-1]):
            if source not in seen and len(ways) < _MOST_NODES and passes(way[-1], source):
                seen.add(source)
                ways.append([*way, source])
    return ways


def _value(node: Node) -> object:
    """Return the value of a node, or the first of several: that of a normalisation is what it normalises."""
    value = node.meta.get("val")
    return value[0] if isinstance(value, tuple | list) and value else value


def _widths(product: Linear) -> tuple[int, int]:
    """Return over how many numbers a product sums and how many results that gives, whichever dimensions these are."""
    x, y, weight = (
        Counter(size for size in node.meta["val"].shape if isinstance(size, int))
        for node in (product.x, product.node, product.weight.node)
    )
    summed, new = x - y, y - x
    # What occurs twice else, in the sum and in the result, is in both x and y.
    common = math.prod(size ** (count // 2) for size, count in (weight - summed - new).items())
    return common * math.prod(summed.elements()), common * math.prod(new.elements())


def _product_name(product: Linear) -> str:
    weight = product.weight.node
    return _name(product.node) + (f" (its weight: {_name(weight)})" if weight.op == "call_function" else "")


def _name(node: Node) -> str:
    op = node.target if node.target is operator.getitem else packet(node)
    return getattr(op, "__name__", node.name)
