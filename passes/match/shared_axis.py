"""Follow an axis that ranks share, from the products that make it to the products that sum over it.

    x ─ linear(W [heads * width, d_model]) ─ view ─ transpose ─ attention ─ … ─ linear(W [d_model, heads * width]) ─ y
        a start: rows of W are shared            [batch, heads, tokens, width]       an end: columns of W are shared

Heads of attention or neurons of a feed-forward block are the units of the axis. Each rank has as many, one after
the other: rank r of R has the places r / R to (r + 1) / R of the axis, at the start, wherever it goes and at the end.
What an end computes is a part of a sum; the sum over the ranks is y.

The operations between may do anything along other axes: views that keep units together, transpositions, what works
element by element, normalisations, attention. What they read besides and has the axis whole, such as a bias for each
head, is cut. Refused, with a reason, is what mixes units, such as a norm over all heads, or an axis that goes elsewhere
than into a product with a constant weight.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.linear import (
    CASTS,
    PERMUTATIONS,
    Linear,
    LinearReader,
    permutation,
    same_sizes,
    source_with_sizes,
)

aten = torch.ops.aten

_VIEWS = frozenset((aten.view, aten.reshape, aten._unsafe_view, aten.flatten))
# Views whose sizes are an argument.
SIZED = frozenset((aten.view, aten.reshape, aten._unsafe_view, aten.expand))
_SAME = CASTS | {aten.clone, aten.contiguous, aten.alias, aten.detach, aten.dropout}
_PARTS = frozenset((aten.slice, aten.split, aten.split_with_sizes, aten.chunk))
_ALONG_ONE = frozenset((aten.softmax, aten._softmax, aten.log_softmax))
_OVER_SEVERAL = frozenset((aten.mean, aten.sum, aten.amax, aten.amin, aten.var))
_OVER_LAST = frozenset((aten.rms_norm, aten.layer_norm))
_PRODUCTS = frozenset((aten.matmul, aten.bmm))


class NotSharedError(Exception):
    """The reason why an axis cannot be shared."""


@dataclass(frozen=True)
class Part:
    """Which of several ranks a program is for."""

    rank: int = 0
    ranks: int = 1

    def of(self, size: int) -> tuple[int, int]:
        """Return where its part of an axis begins and ends."""
        return size * self.rank // self.ranks, size * (self.rank + 1) // self.ranks


WHOLE = Part()


@dataclass(frozen=True)
class SharedAxis:
    """An axis of a tensor that consists of so many units, or of so many times as many elements."""

    axis: int
    units: int


@dataclass(frozen=True)
class Cut:
    """An operand of a node that has the shared axis whole: of which axis of it a rank needs a part."""

    user: Node
    operand: Node
    axis: int


@dataclass
class Region:
    """What lies between the starts and the ends of a shared axis.

    Attributes:
        starts: The products that make it.
        axes: Where it is, in the result of each start and of each node behind it.
        cuts: What has it whole, besides.
        ends: The products that sum over it.
    """

    starts: list[Linear]
    axes: dict[Node, SharedAxis] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    ends: list[Linear] = field(default_factory=list)


def follow(graph: Graph, reader: LinearReader, starts: Mapping[Node, int]) -> Region:
    """Follow the axis of features of some products.

    Args:
        graph: The graph.
        reader: Reads its products.
        starts: How many units each of them makes, by node.

    Raises:
        NotSharedError: It cannot be shared.
    """
    region = Region([_start(reader, node) for node in starts])
    for node in graph.nodes:
        if node in starts:
            region.axes[node] = SharedAxis(_rank(node) - 1, starts[node])
        elif any(operand in region.axes for operand in node.all_input_nodes):
            end = _end(reader, node, region)
            if end is not None:
                region.ends.append(end)
                continue
            axis = _Step(node, region).result()
            if axis is not None:
                region.axes[node] = axis
    if not region.ends:
        raise NotSharedError("no product with a constant weight sums over it")
    return region


def _start(reader: LinearReader, node: Node) -> Linear:
    linear = reader.linear(node)
    assert linear is not None
    x = source_with_sizes(linear.x, (*node.meta["val"].shape[:-1], linear.x.meta["val"].shape[-1]))
    if x is None:
        raise NotSharedError(f"the product {node.name} changes the leading dimensions")
    return replace(linear, x=x)


def _end(reader: LinearReader, node: Node, region: Region) -> Linear | None:
    """Read a node as a product that sums over the axis."""
    linear = reader.linear(node)
    shared = None if linear is None else region.axes.get(linear.x)
    if linear is None or shared is None or shared.axis != _rank(linear.x) - 1:
        return None
    if linear.weight.rows is not None:
        raise NotSharedError(f"the product {node.name} is a part of a larger one")
    whole = reader.larger(node) or linear
    if not same_sizes(linear.x.meta["val"].shape[:-1], whole.node.meta["val"].shape[:-1]):
        raise NotSharedError(f"the product {node.name} changes the leading dimensions")
    return whole


def _rank(node: Node) -> int:
    return int(node.meta["val"].dim())


class _Step:
    """One operation that reads a shared axis."""

    def __init__(self, node: Node, region: Region) -> None:
        self._node, self._region, self._op = node, region, packet(node)

    def result(self) -> SharedAxis | None:
        """Return where the axis is in the result; None where that has not got it.

        Raises:
            NotSharedError: The operation is not one that keeps its units apart.
        """
        node, op = self._node, self._op
        if node.op == "output":
            raise NotSharedError("the model returns it")
        first = next(each for each in node.all_input_nodes if each in self._region.axes)
        shared = self._region.axes[first]
        if node.target is operator.getitem or op in _SAME:
            return shared
        if op is aten.sym_size:
            self._keep_away(shared, [arguments(node)[1]], _rank(first))
            return None
        if op in _VIEWS:
            return self._viewed(first, shared)
        if op is aten.unsqueeze:
            return SharedAxis(shared.axis + (arguments(node)[1] % _rank(node) <= shared.axis), shared.units)
        if op in PERMUTATIONS:
            return SharedAxis(permutation(node).index(shared.axis), shared.units)
        if op is aten.expand:
            return self._expanded(first, shared)
        if op is aten.cat:
            return self._joined(shared)
        if op in _PARTS or op in (aten.select, aten.unbind):
            return self._part(first, shared)
        if op in _ALONG_ONE or op in _OVER_SEVERAL or op in _OVER_LAST:
            return self._reduced(first, shared)
        if op in _PRODUCTS:
            return self._product(shared)
        if op is aten.scaled_dot_product_attention:
            return self._attention()
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags:
            return self._element_by_element()
        raise NotSharedError(f"{op} stands between its projections")

    def _keep_away(self, shared: SharedAxis, dims: Sequence[int], rank: int) -> None:
        """Fail if the operation works along the shared axis."""
        if shared.axis in {dim % rank for dim in dims}:
            raise NotSharedError(f"{self._op} works across what ranks would share")

    def _check_size(self, axis: int, units: int) -> SharedAxis:
        """Return an axis of the result, if it consists of whole units, and its size is not computed."""
        size = self._node.meta["val"].shape[axis]
        if not isinstance(size, int) or size % units:
            raise NotSharedError(f"{self._op} takes its units apart")
        if self._op in SIZED and isinstance(_sizes(self._node)[axis], Node):
            raise NotSharedError(f"{self._op} computes its size")
        return SharedAxis(axis, units)

    def _viewed(self, source: Node, shared: SharedAxis) -> SharedAxis:
        before, after = source.meta["val"].shape, self._node.meta["val"].shape
        # Behind the same dimensions there are the same elements: a part of the first dimension is one of them.
        axis, units = shared.axis, shared.units
        same = len(after) > axis and same_sizes(before[:axis], after[:axis])
        if same and isinstance(after[axis], int) and after[axis] % units == 0:
            return self._check_size(axis, units)
        inner = _product_of(before[axis:])
        for place in range(len(after) if inner is not None else 0):
            if _product_of(after[place:]) == inner and after[place] % units == 0:
                return self._check_size(place, units)
        raise NotSharedError(f"{self._op} takes its units apart")

    def _expanded(self, source: Node, shared: SharedAxis) -> SharedAxis:
        return self._check_size(shared.axis + _rank(self._node) - _rank(source), shared.units)

    def _joined(self, shared: SharedAxis) -> SharedAxis:
        tensors, *given = arguments(self._node)
        dim: Any = given[0] if given else self._node.kwargs.get("dim", 0)
        self._keep_away(shared, [dim], _rank(self._node))
        for operand in tensors:
            if operand in self._region.axes:
                self._same_axis(operand, shared.axis, shared.units)
            self._cut(operand, shared.axis)
        return shared

    def _part(self, source: Node, shared: SharedAxis) -> SharedAxis:
        given: tuple[Any, ...] = arguments(self._node)
        place = 2 if self._op not in (aten.slice, aten.select, aten.unbind) else 1
        dim: Any = given[place] if len(given) > place else self._node.kwargs.get("dim", 0)
        self._keep_away(shared, [dim], _rank(source))
        drops = self._op in (aten.select, aten.unbind) and dim % _rank(source) < shared.axis
        return SharedAxis(shared.axis - drops, shared.units)

    def _reduced(self, source: Node, shared: SharedAxis) -> SharedAxis:
        given: tuple[Any, ...] = arguments(self._node)
        rank = _rank(source)
        if len(given) < 2 or given[1] is None:
            raise NotSharedError(f"{self._op} works across what ranks would share")
        if self._op in _OVER_LAST:
            dims = list(range(rank - len(given[1]), rank))
        else:
            dims = [given[1]] if isinstance(given[1], int) else [*given[1]]
        self._keep_away(shared, dims, rank)
        gone = 0 if _rank(self._node) == rank else sum(dim % rank < shared.axis for dim in dims)
        return SharedAxis(shared.axis - gone, shared.units)

    def _product(self, shared: SharedAxis) -> SharedAxis:
        """Return the axis of a product of two tensors, which is one of its leading dimensions."""
        for operand in self._node.all_input_nodes:
            if _rank(operand) != _rank(self._node):
                raise NotSharedError(f"{self._op} reads tensors of different numbers of dimensions")
        self._keep_away(shared, [-1, -2], _rank(self._node))
        for operand in self._node.all_input_nodes:
            self._same_axis(operand, shared.axis, None)
        return self._check_size(shared.axis, shared.units)

    def _attention(self) -> SharedAxis:
        query, key, value, *rest = arguments(self._node)
        axes = [self._region.axes.get(each) for each in (query, key, value)]
        if any(axis is None or axis.axis != 1 for axis in axes):
            raise NotSharedError("not all of its queries, keys and values have the heads that ranks would share")
        mask = rest[0] if rest else self._node.kwargs.get("attn_mask")
        assert axes[0] is not None
        if isinstance(mask, Node):
            self._cut(mask, 1)
        return axes[0]

    def _element_by_element(self) -> SharedAxis:
        rank = _rank(self._node)
        operands = [each for each in self._node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
        found = {
            (shared.axis + rank - _rank(each), shared.units)
            for each in operands
            if (shared := self._region.axes.get(each)) is not None
        }
        if len(found) > 1:
            raise NotSharedError(f"{self._op} joins what is shared in different ways")
        ((axis, units),) = found
        for operand in operands:
            self._cut(operand, axis)
        return self._check_size(axis, units)

    def _cut(self, operand: Node, axis: int) -> None:
        """Note that a rank needs a part of an operand that has the axis whole; `axis` counts in the result."""
        if operand in self._region.axes:
            return
        place = axis - (_rank(self._node) - _rank(operand))
        if place < 0 or same_sizes(operand.meta["val"].shape[place : place + 1], [1]):
            return  # one for all units
        if not same_sizes(operand.meta["val"].shape[place : place + 1], self._node.meta["val"].shape[axis : axis + 1]):
            raise NotSharedError(f"{self._op} reads a tensor whose size is not known")
        self._region.cuts.append(Cut(self._node, operand, place))

    def _same_axis(self, operand: Node, axis: int, units: int | None) -> None:
        shared = self._region.axes.get(operand)
        if shared is None or shared.axis != axis or units not in (None, shared.units):
            raise NotSharedError(f"{self._op} joins what is shared with what is not")


def _sizes(node: Node) -> Sequence[Any]:
    """Return the sizes that a view is given."""
    sizes: Sequence[Any] = arguments(node)[1]
    return sizes


def _product_of(sizes: Sequence[Any]) -> int | None:
    """Return how many elements there are; None where that varies."""
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
