"""Follow an axis that ranks share, from the products that make it to the products that sum over it.

    x ─ linear(W [heads * width, d_model]) ─ view ─ transpose ─ attention ─ … ─ linear(W [d_model, heads * width]) ─ y
        a start: rows of W are shared            [batch, heads, tokens, width]       an end: columns of W are shared

The axis is of heads of attention, or of neurons of a feed-forward block. Rank r of R has the places r / R to
(r + 1) / R of it, at the start, wherever it goes and at the end. An end computes a part of a sum; the sum over the
ranks is y.

The operations between may do anything along other axes: views that keep a rank's part together, transpositions, what
works element by element, normalisations, attention. Their other operands that have the whole axis, such as a
bias for each head, are cut. An operation that mixes the parts, such as a norm over all heads, is refused with a
reason, and so is an axis that goes elsewhere than into a product with a constant weight.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from twellc.base.torch_private import OpOverload
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.linear import (
    CASTS,
    PERMUTATIONS,
    Linear,
    LinearReader,
    permutation,
    same_sizes,
    source_with_sizes,
    width,
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
class Cut:
    """An operand of a node that has the shared axis whole, and the axis that a rank needs a part of."""

    user: Node
    operand: Node
    axis: int


@dataclass
class Region:
    """What lies between the starts and the ends of a shared axis.

    Attributes:
        ranks: How many share it.
        starts: The products that make it.
        axes: Which axis it is, of the result of each start and of each node behind it.
        cuts: What has it whole, besides.
        ends: The products that sum over it.
    """

    ranks: int
    starts: list[Linear] = field(default_factory=list)
    axes: dict[Node, int] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)
    ends: list[Linear] = field(default_factory=list)


def follow(graph: Graph, reader: LinearReader, starts: Collection[Node], ranks: int) -> Region:
    """Follow the axis of features of some products.

    Args:
        graph: The graph.
        reader: Reads its products.
        starts: The products.
        ranks: How many share it.

    Raises:
        NotSharedError: It cannot be shared.
    """
    region = Region(ranks)
    for node in graph.nodes:
        if node in starts:
            region.starts.append(_start(reader, node, ranks))
            region.axes[node] = _rank(node) - 1
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


def _start(reader: LinearReader, node: Node, ranks: int) -> Linear:
    linear = reader.linear(node)
    assert linear is not None
    if width(node) % ranks:
        raise NotSharedError(f"the {width(node)} features of the product {node.name} are not a multiple of {ranks}")
    x = source_with_sizes(linear.x, (*node.meta["val"].shape[:-1], linear.x.meta["val"].shape[-1]))
    if x is None:
        raise NotSharedError(f"the product {node.name} changes the leading dimensions")
    return replace(linear, x=x)


def _end(reader: LinearReader, node: Node, region: Region) -> Linear | None:
    """Read a node as a product that sums over the axis."""
    linear = reader.linear(node)
    shared = None if linear is None else region.axes.get(linear.x)
    if linear is None or shared != _rank(linear.x) - 1:
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

    def result(self) -> int | None:
        """Return which axis of the result it is; None where that has not got it.

        Raises:
            NotSharedError: The operation is not one that keeps the parts of ranks apart.
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
            return shared + int(arguments(node)[1] % _rank(node) <= shared)
        if op in PERMUTATIONS:
            return permutation(node).index(shared)
        if op is aten.expand:
            return self._check_size(shared + _rank(node) - _rank(first))
        if op in (aten.cat, aten.stack):
            return self._joined(shared)
        if op in _PARTS or op in (aten.select, aten.unbind):
            return self._part(first, shared)
        if op is aten.index:
            return self._indexed(first, shared)
        if op in _ALONG_ONE or op in _OVER_SEVERAL or op in _OVER_LAST:
            return self._reduced(first, shared)
        if op in _PRODUCTS:
            return self._product(shared)
        if op is aten.scaled_dot_product_attention:
            return self._attention()
        if isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
            return self._element_by_element()
        raise NotSharedError(f"{op} stands between its projections")

    def _keep_away(self, shared: int, dims: Sequence[int], rank: int) -> None:
        """Fail if the operation works along the shared axis."""
        if shared in {dim % rank for dim in dims}:
            raise NotSharedError(f"{self._op} works across what ranks would share")

    def _check_size(self, axis: int) -> int:
        """Return an axis of the result, if ranks can have equal parts of it, and its size is not computed."""
        if not self._divides(self._node.meta["val"].shape[axis]):
            raise NotSharedError(f"{self._op} mixes the parts of ranks")
        if self._op in SIZED:
            sizes: Any = arguments(self._node)[1]
            if not isinstance(sizes, list | tuple) or isinstance(sizes[axis], Node):  # of another type, or computed
                raise NotSharedError(f"{self._op} mixes the parts of ranks, or computes their size")
        return axis

    def _divides(self, size: int | torch.SymInt) -> bool:
        return isinstance(size, int) and size % self._region.ranks == 0

    def _viewed(self, source: Node, shared: int) -> int:
        before, after = source.meta["val"].shape, self._node.meta["val"].shape
        # Behind the same dimensions there are the same elements: a part of the first dimension is one of them.
        same = len(after) > shared and same_sizes(before[:shared], after[:shared])
        if same and self._divides(after[shared]):
            return self._check_size(shared)
        inner = _product_of(before[shared:])
        for place in range(len(after) if inner is not None else 0):
            if _product_of(after[place:]) == inner and self._divides(after[place]):
                return self._check_size(place)
        raise NotSharedError(f"{self._op} mixes the parts of ranks")

    def _joined(self, shared: int) -> int:
        tensors, *given = arguments(self._node)
        dim: Any = given[0] if given else self._node.kwargs.get("dim", 0)
        axis = shared
        if self._op is aten.stack:
            axis += dim % _rank(self._node) <= shared
        else:
            self._keep_away(shared, [dim], _rank(self._node))
        for operand in tensors:
            if operand in self._region.axes:
                self._same_axis(operand, shared)
            self._cut(operand, shared, axis)
        return axis

    def _part(self, source: Node, shared: int) -> int:
        given: tuple[Any, ...] = arguments(self._node)
        place = 2 if self._op not in (aten.slice, aten.select, aten.unbind) else 1
        dim: Any = given[place] if len(given) > place else self._node.kwargs.get("dim", 0)
        self._keep_away(shared, [dim], _rank(source))
        drops = self._op in (aten.select, aten.unbind) and dim % _rank(source) < shared
        return shared - drops

    def _indexed(self, source: Node, shared: int) -> int:
        """Return the axis of some places along one other axis."""
        dims = [dim for dim, index in enumerate(arguments(self._node)[1]) if index is not None]
        if source is not arguments(self._node)[0] or len(dims) > 1 or _rank(self._node) != _rank(source):
            raise NotSharedError(f"{self._op} takes more than places along one axis")
        self._keep_away(shared, dims, _rank(source))
        return shared

    def _reduced(self, source: Node, shared: int) -> int:
        given: tuple[Any, ...] = arguments(self._node)
        rank = _rank(source)
        if len(given) < 2 or given[1] is None or given[1] == [] or isinstance(given[1], bool):  # over all dimensions
            raise NotSharedError(f"{self._op} works across what ranks would share")
        if self._op in _OVER_LAST:
            dims = list(range(rank - len(given[1]), rank))
        else:
            dims = [given[1]] if isinstance(given[1], int) else [*given[1]]
        self._keep_away(shared, dims, rank)
        gone = 0 if _rank(self._node) == rank else sum(dim % rank < shared for dim in dims)
        return shared - gone

    def _product(self, shared: int) -> int:
        """Return the axis of a product of two tensors, which is one of its leading dimensions."""
        for operand in self._node.all_input_nodes:
            if _rank(operand) != _rank(self._node):
                raise NotSharedError(f"{self._op} reads tensors of different numbers of dimensions")
        self._keep_away(shared, [-1, -2], _rank(self._node))
        for operand in self._node.all_input_nodes:
            self._same_axis(operand, shared)
        return self._check_size(shared)

    def _attention(self) -> int:
        query, key, value, *rest = arguments(self._node)
        if any(self._region.axes.get(each) != 1 for each in (query, key, value)):
            raise NotSharedError("not all of its queries, keys and values have the heads that ranks would share")
        mask = rest[0] if rest else self._node.kwargs.get("attn_mask")
        if isinstance(mask, Node) and mask in self._region.axes:
            raise NotSharedError("its mask is computed from its heads")
        if isinstance(mask, Node):
            self._cut(mask, 1 - _rank(self._node) + _rank(mask), 1)
        return 1

    def _element_by_element(self) -> int:
        operands = [each for each in self._node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
        missing = {each: _rank(self._node) - _rank(each) for each in operands}
        found = {self._region.axes[each] + missing[each] for each in operands if each in self._region.axes}
        if len(found) > 1:
            raise NotSharedError(f"{self._op} joins what is shared in different ways")
        (axis,) = found
        for operand in operands:
            self._cut(operand, axis - missing[operand], axis)
        return self._check_size(axis)

    def _cut(self, operand: Node, place: int, axis: int) -> None:
        """Note that a rank needs a part of an operand that has the axis whole, as its dimension `place`.

        Args:
            operand: The operand; nothing is noted of one that ranks share.
            place: The dimension; it may be below 0, or of size 1: then all ranks read the same.
            axis: Which dimension of the result it is.
        """
        if operand in self._region.axes or place < 0:
            return
        size = operand.meta["val"].shape[place : place + 1]
        if same_sizes(size, [1]):
            return
        if not same_sizes(size, self._node.meta["val"].shape[axis : axis + 1]):
            raise NotSharedError(f"{self._op} reads a tensor whose size is not known")
        self._region.cuts.append(Cut(self._node, operand, place))

    def _same_axis(self, operand: Node, axis: int) -> None:
        if self._region.axes.get(operand) != axis:
            raise NotSharedError(f"{self._op} joins what is shared with what is not")


def _product_of(sizes: Sequence[Any]) -> int | None:
    """Return how many elements there are; None where that varies."""
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None
