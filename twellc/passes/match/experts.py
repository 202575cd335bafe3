"""Read mixtures of experts as transformers computes them: products of rows, each with the matrix of its expert.

There is a row for each token and each of its `top` experts. Rows are in the order of tokens (`batched_mm`), or sorted
by expert (`grouped_mm`), so that those of an expert follow each other:

    batched   rows = repeat_interleave(x, top)        product = bmm(W[ids], rows)
    grouped   numbers, order = sort(ids)              product = grouped_mm(rows, W, ends)
              rows = x[order // top]                  ends = cumsum(histc(numbers, experts))

    y = sum over a token's experts of (product * weights), for which sorted rows are put back into the order of tokens

Some releases set sorted rows of numbers that are no expert's to 0, before and behind the products.

x is [tokens, d_model], ids and weights are [tokens, top], W is [experts, out, in] or [experts, in, out], y is
[tokens, d_out]. Nodes between two products are read as in any feed-forward block, see `find_ffn.py`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.linear import (
    CASTS,
    PERMUTATIONS,
    VALUE_PRESERVING,
    Linear,
    LinearReader,
    Weight,
    is_grouped,
    operand,
    permutation,
    same_sizes,
    width,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Routing:
    """How the tokens of a mixture reach its experts.

    Attributes:
        experts: How many experts there are.
        top: To how many of them a token is sent.
        ids: The numbers of these experts, of tokens * top elements, token by token.
        weights: The factors of what these give, likewise.
        y: The sum, [tokens, d_out].
        wraps: Whether numbers below 0 may come, which count from the last expert.
    """

    experts: int
    top: int
    ids: Node
    weights: Node
    y: Node
    wraps: bool


@dataclass(frozen=True)
class _Rows:
    """Which experts rows are for: `ids`, token by token; and what sorts these, or None."""

    ids: Node
    sort: Node | None


class ExpertsReader(LinearReader):
    """Reads nodes of one program as products of rows, each with the matrix of its expert; none has a bias.

    A weight of three dimensions is [experts, out, in], or [experts, in, out] if it is `in_out`; its `rows` are of
    `out`. The input of a product is given as it is before a cast.
    """

    def __init__(self, constants: dict[Node, str]) -> None:
        super().__init__(constants)
        self._rows: dict[Node, _Rows] = {}  # by products

    def linear(self, node: Node) -> Linear | None:
        """Read `node` as such a product."""
        if is_grouped(node):
            return self._grouped(node)
        return self._batched(node) if packet(node) is aten.bmm else self._part(node)

    def experts(self, node: Node) -> tuple[Linear, Routing] | None:
        """Read `node` as the sum over each token's experts; return their down projections, too."""
        if packet(node) is not aten.sum or arguments(node)[1:] not in (([1],), ([-2],)):
            return None
        shape = operand(node).meta["val"].shape
        product, inverse = _picked(_before_cast(operand(node)))
        product, left_out = _unmasked(_flat(product))
        if packet(product) is not aten.mul or len(shape) != 3 or not isinstance(shape[1], int):
            return None
        for given, factor in (arguments(product), arguments(product)[::-1]):
            down = self.linear(_before_cast(given)) if isinstance(given, Node) else None
            if down is not None and isinstance(factor, Node):
                break
        else:
            return None
        rows, (tokens, top, d_out) = self._rows_of(down), shape
        weights, order = (_flat(factor), None) if rows.sort is None else _picked(_flat(factor))
        if rows.sort is not None and not (_is_order(order, rows.sort) and _is_inverse(inverse, rows.sort)):
            return None
        count = product.meta["val"].shape[0]
        each_row = same_sizes(factor.meta["val"].shape, [count, 1])
        if not each_row or not same_sizes(product.meta["val"].shape, [count, d_out]) or not _is(count, tokens * top):
            return None
        if not all(_is(each.meta["val"].numel(), count) for each in (rows.ids, weights)):
            return None
        experts = int(down.weight.node.meta["val"].shape[0])
        if left_out not in (None, (rows.sort, experts)):
            return None
        wraps = rows.sort is None and not _is_choice(rows.ids, experts)
        return down, Routing(experts, top, rows.ids, _flat(weights), _cast_of(node, down.node), wraps)

    def tokens(self, up: Linear, down: Linear, routing: Routing) -> Node | None:
        """Return x [tokens, d_model], whose rows the experts of `down` read by `up`; None where they read others."""
        rows, top = self._rows_of(up), routing.top
        if rows != self._rows_of(down):
            return None
        if rows.sort is None:
            is_repeated = packet(up.x) is aten.repeat_interleave and arguments(up.x)[1:] == (top, 0)
            x = operand(up.x) if is_repeated else None
        else:
            source, left_out = _unmasked(up.x)
            picked, places = _picked(source)
            is_row = _is_token(places, rows.sort, top) and left_out in (None, (rows.sort, routing.experts))
            x = picked if is_row else None
        if x is None:
            return None
        sizes = [*routing.y.meta["val"].shape[:1], width(up.x)]
        return x if same_sizes(x.meta["val"].shape, sizes) else None

    def _rows_of(self, linear: Linear) -> _Rows:
        return next(self._rows[node] for node in linear.nodes if node in self._rows)

    def _grouped(self, node: Node) -> Linear | None:
        x, w, ends = (*arguments(node), node.kwargs.get("offs"))[:3]
        weight = self._stack(w)
        rows = None if weight is None else _sorted_rows(ends, weight.node.meta["val"].shape[0])
        if weight is None or rows is None:
            return None
        self._rows[node] = rows
        return Linear(node, _before_cast(x), weight.transposed(), None, (node,))

    def _batched(self, node: Node) -> Linear | None:
        """Read bmm(W[ids], rows) or bmm(rows, W[ids]); what drops the dimension of size 1 behind it is the product."""
        result = next(iter(node.users), None)
        if result is None or len(node.users) > 1 or packet(result) not in VALUE_PRESERVING:
            return None
        for w, x, axis in ((*arguments(node), 2), (*arguments(node)[::-1], 1)):
            stack, ids = _picked(w)
            weight = None if ids is None else self._stack(stack)
            rows = _before_cast(x)
            shapes = [each.meta["val"].shape for each in (rows, result)]
            if weight is None or ids is None or [len(shape) for shape in shapes] != [2, 2]:
                continue
            if not _is(x.meta["val"].shape[axis], 1) or not same_sizes(shapes[0][:1], shapes[1][:1]):
                continue
            self._rows[result] = _Rows(_flat(ids), None)
            weight = weight if axis == 2 else weight.transposed()
            return Linear(result, rows, weight, None, (result, node, w))
        return None

    def _stack(self, argument: object) -> Weight | None:
        """Resolve a constant that holds a matrix for each expert, through transpositions of these."""
        node, transposed = argument, False
        while isinstance(node, Node) and node not in self.constants:
            if packet(node) in PERMUTATIONS and permutation(node) == [0, 2, 1]:
                transposed = not transposed
            elif packet(node) not in VALUE_PRESERVING or not same_sizes(*_shapes(operand(node), node)):
                return None
            node = operand(node)
        if not isinstance(node, Node) or node.meta["val"].dim() != 3:
            return None
        return Weight(node, self.constants[node], transposed)


def _shapes(*nodes: Node) -> list[torch.Size]:
    return [node.meta["val"].shape for node in nodes]


def _is(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    return statically_known_true(size == other)


def _flat(node: Node) -> Node:
    """Look through what only changes the shape: elements stay in their order."""
    while packet(node) in VALUE_PRESERVING:
        node = operand(node)
    return node


def _before_cast(node: Node) -> Node:
    """Look through one cast, and what only changes the shape."""
    node = _flat(node)
    return _flat(operand(node)) if packet(node) in CASTS else node


def _cast_of(node: Node, like: Node) -> Node:
    """Return the cast of `node` to the dtype of another, if nothing else reads it; else `node`."""
    (user, *others) = node.users or (node,)
    is_cast = packet(user) in CASTS and user.meta["val"].dtype == like.meta["val"].dtype
    return user if is_cast and not others else node


def _picked(node: Node) -> tuple[Node, Node | None]:
    """Read `node` as rows of a tensor, picked by their numbers; return that and these, else the node and None."""
    if packet(node) is not aten.index or len(arguments(node)[1]) != 1:
        return node, None
    index = arguments(node)[1][0]
    value = index.meta["val"]
    return (operand(node), index) if value.dim() == 1 and value.dtype != torch.bool else (node, None)


def _unmasked(node: Node) -> tuple[Node, tuple[Node, int] | None]:
    """Read `node` as sorted rows with 0 in those of no expert, as some releases write; also return what says which."""
    mask = _flat(operand(node, 1)) if packet(node) is aten.masked_fill and arguments(node)[2] == 0 else None
    if mask is None or packet(mask) is not aten.ge or operand(mask).target is not operator.getitem:
        return node, None
    sort, place = arguments(operand(mask))
    return (_flat(operand(node)), (sort, arguments(mask)[1])) if place == 0 else (node, None)


def _sorted_rows(ends: object, experts: int) -> _Rows | None:
    """Read where the rows of each expert end: cumsum(histc(numbers, experts, 0, experts - 1), 0)."""
    if not isinstance(ends, Node) or packet(ends) is not aten.cumsum or arguments(ends)[1] != 0:
        return None
    counts = _before_cast(operand(ends))
    if packet(counts) is not aten.histc or arguments(counts)[1:] != (experts, 0, experts - 1):
        return None
    numbers = _before_cast(operand(counts))
    sort = operand(numbers) if numbers.target is operator.getitem and arguments(numbers)[1] == 0 else None
    if sort is None or packet(sort) is not aten.sort:
        return None
    descending = sort.kwargs.get("descending", (*arguments(sort), -1, False)[2])
    dim = sort.kwargs.get("dim", (*arguments(sort), -1)[1])
    is_list = dim in (0, -1) and operand(sort).meta["val"].dim() == 1
    return _Rows(_flat(operand(sort)), sort) if is_list and not descending else None


def _is_order(node: Node | None, sort: Node) -> bool:
    """Whether `node` is the order that a sort has found."""
    return node is not None and node.target is operator.getitem and arguments(node) == (sort, 1)


def _is_token(node: Node | None, sort: Node, top: int) -> bool:
    """Whether `node` says of sorted rows which token each is of: order // top."""
    if node is None or packet(node) not in (aten.floor_divide, aten.div) or arguments(node)[1] != top:
        return False
    rounds = packet(node) is aten.floor_divide or node.kwargs.get("rounding_mode") in ("floor", "trunc")
    return rounds and _is_order(operand(node), sort)


def _is_inverse(node: Node | None, sort: Node) -> bool:
    """Whether `node` puts sorted rows back: it holds at each place of the order that place's number."""
    if node is None or packet(node) is not aten.index_put or any(arguments(node)[3:]):
        return False
    places, numbers = arguments(node)[1], _flat(arguments(node)[2])
    counts = len(places) == 1 and packet(numbers) is aten.arange and len(arguments(numbers)) == 1
    return counts and _is_order(places[0], sort) and same_sizes(*_shapes(numbers, node))


def _is_choice(node: Node, experts: int) -> bool:
    """Whether `node` holds places of no more than so many numbers, as of the largest, or is clamped to such."""
    if packet(node) is aten.clamp:
        return arguments(node)[1:] == (0, experts - 1)
    if node.target is not operator.getitem or packet(operand(node)) is not aten.topk:
        return False
    scores = operand(operand(node)).meta["val"].shape
    axis = (*arguments(operand(node)), -1)[2]
    return bool(arguments(node)[1] == 1 and _is(scores[axis], experts))
