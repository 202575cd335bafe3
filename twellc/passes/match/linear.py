"""Recognise products with constant weights, in all forms that mean x W^T + b, and look through what changes nothing.

linear(x, W, b)      mm, matmul(x, W^T)      addmm(b, x, W^T)      bmm(x, expand(W^T))      baddbmm(b, x, expand(W^T))
inner(x, W)          tensordot(x, W^T)       einsum("btd,fd->btf")
any of them + b      slices, chunks and splits of the last dimension of any of them, or parts of a view that cuts it in
                     two: the rows of a packed weight
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from twellc.base.transformers_private import GROUPED_PRODUCT
from twellc.passes.match.activations import arguments, packet

aten = torch.ops.aten

VALUE_PRESERVING = frozenset(
    (aten.clone, aten.contiguous, aten.alias, aten.detach, aten.lift_fresh_copy, aten.view, aten.reshape,
     aten._unsafe_view, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze)
)  # fmt: skip
CASTS = frozenset((aten._to_copy, aten.to))
PERMUTATIONS = frozenset((aten.t, aten.numpy_T, aten.mT, aten.transpose, aten.permute))
VIEWS = VALUE_PRESERVING | PERMUTATIONS | CASTS
CONVOLUTIONS = frozenset((aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution))
PRODUCTS = CONVOLUTIONS | {
    aten.linear, aten.mm, aten.matmul, aten.bmm, aten.addmm, aten.baddbmm, aten._grouped_mm, aten.inner, aten.tensordot,
    aten.einsum,
}  # fmt: skip
SPLITS = frozenset((aten.chunk, aten.split, aten.split_with_sizes, aten.tensor_split))
# Dtypes by the values that they can hold: a cast to a later one and back changes nothing.
WIDENING = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


@dataclass(frozen=True)
class Weight:
    """A constant that the graph reads.

    Attributes:
        node: Its placeholder.
        name: Its name.
        in_out: Whether it is stored [in, out] rather than [out, in].
        rows: Which of its outputs are meant, as (start, stop, step); None for all.
    """

    node: Node
    name: str
    in_out: bool = False
    rows: tuple[int, int, int] | None = None

    def transposed(self) -> Weight:
        """Return it read the other way round: what `mm` reads as [in, out], `linear` reads as [out, in]."""
        return replace(self, in_out=not self.in_out)


@dataclass(frozen=True)
class Linear:
    """x W^T + b, and the nodes that compute it."""

    node: Node
    x: Node
    weight: Weight
    bias: Weight | None
    nodes: tuple[Node, ...]


class LinearReader:
    """Reads nodes of one program as products with constant weights."""

    def __init__(self, constants: dict[Node, str]) -> None:
        self.constants = constants

    def linear(self, node: Node) -> Linear | None:
        """Read `node` as a product with a constant weight, with or without a bias."""
        op, operands = packet(node), arguments(node)
        if op is aten.linear:
            return self._product(node, operands[0], self.weight(operands[1]), *operands[2:3])
        if op in (aten.mm, aten.matmul):
            return self._product(node, operands[0], _flip(self.weight(operands[1])))
        if op is aten.bmm:
            return self._product(node, operands[0], _flip(self._broadcast_weight(operands[1])))
        if op is aten.addmm and not node.kwargs:
            return self._product(node, operands[1], _flip(self.weight(operands[2])), operands[0])
        if op is aten.baddbmm and not node.kwargs:
            return self._product(node, operands[1], _flip(self._broadcast_weight(operands[2])), operands[0])
        if op is aten.inner:
            return self._product(node, operands[0], self.weight(operands[1]))
        if op is aten.tensordot:
            return self._tensordot(node)
        if op is aten.einsum and len(operands[1]) == 2:
            return self._einsum(node)
        if op is aten.add and len(operands) == 2 and not node.kwargs:
            return self._plus_bias(node)
        return self._part(node)

    def larger(self, node: Node) -> Linear | None:
        """Return this product with the bias that its only reader adds: the sum is then what counts; else None."""
        readers = list(node.users)
        while len(readers) == 1 and step(readers[0]) is not None:
            readers = list(readers[0].users)
        if len(readers) != 1 or packet(readers[0]) is not aten.add:
            return None
        larger = self.linear(readers[0])
        return larger if larger is not None and node in larger.nodes else None

    def _product(self, node: Node, x: Node, weight: Weight | None, bias_argument: object = None) -> Linear | None:
        bias = None if bias_argument is None else self.vector(bias_argument)
        if weight is None or (bias is None and bias_argument is not None):
            return None
        sizes = matrix_sizes(weight.node)
        if (sizes if weight.in_out else sizes[::-1]) != [width(x), width(node)]:
            return None  # a view that gives each batch another weight
        return Linear(node, x, weight, bias, (node,))

    def _plus_bias(self, node: Node) -> Linear | None:
        for product, constant in (arguments(node), reversed(arguments(node))):
            bias = self.vector(constant)
            if bias is None or not isinstance(product, Node):
                continue
            inner_node = strip(product)
            inner = None if packet(inner_node) is aten.add else self.linear(inner_node)
            if inner is not None and inner.bias is None and width(inner.node) == bias.node.meta["val"].shape[0]:
                return Linear(node, inner.x, inner.weight, bias, (node, *inner.nodes))
        return None

    def _einsum(self, node: Node) -> Linear | None:
        """Read einsum(x, W) with W's two letters: the last of x, which is summed, and a new one, the last of y."""
        equation, (left, right) = arguments(node)[0].replace(" ", ""), arguments(node)[1]
        inputs, arrow, result = equation.partition("->")
        first, _, second = inputs.partition(",")
        for x_letters, w_letters, x, w in ((first, second, left, right), (second, first, right, left)):
            weight = self.weight(w)
            if weight is None or len(w_letters) != 2 or not arrow or not x_letters:
                continue
            named = x_letters.replace("...", "")
            if len(set(named)) < len(named):
                continue  # a diagonal of x
            summed = x_letters[-1]
            new = w_letters.replace(summed, "", 1)
            if len(new) == 1 and new not in x_letters and result == x_letters[:-1] + new:
                return self._product(node, x, weight if w_letters == new + summed else _flip(weight))
        return None

    def _tensordot(self, node: Node) -> Linear | None:
        """Read tensordot(x, W) over the last dimension of x and one of W's two."""
        x, w, of_x, of_w = arguments(node)
        weight = self.weight(w)
        last = x.meta["val"].dim() - 1
        if weight is None or len(of_x) != 1 or of_x[0] % (last + 1) != last or w.meta["val"].dim() != 2:
            return None
        return self._product(node, x, weight if of_w[0] % 2 == 1 else _flip(weight))

    def _part(self, node: Node) -> Linear | None:
        """Read a slice of the last dimension of a product: some rows of a packed weight."""
        found = _last_dimension_slice(node) or _slice_by_view(node)
        if found is None:
            return None
        source, rows, between = found
        whole = self.linear(strip(source))
        if whole is None or whole.weight.rows is not None or width(whole.node) != width(source):
            return None
        if whole.bias is not None and width(whole.bias.node) != width(whole.node):
            return None
        bias = None if whole.bias is None else replace(whole.bias, rows=rows)
        return Linear(node, whole.x, replace(whole.weight, rows=rows), bias, (*between, *whole.nodes))

    def weight(self, argument: object) -> Weight | None:
        """Resolve a constant matrix, through transpositions; `in_out` tells how it is stored."""
        if not isinstance(argument, Node):
            return None
        node, transposed = argument, False
        while node not in self.constants:
            if packet(node) in PERMUTATIONS:
                order = _order(node)
                node, transposed = operand(node), transposed != (order != sorted(order))
            elif packet(node) in VALUE_PRESERVING | CASTS:
                source = step(node) if packet(node) in CASTS else operand(node)
                if source is None or not same_sizes(matrix_sizes(source), matrix_sizes(node)):
                    return None
                node = source
            else:
                return None
        return Weight(node, self.constants[node], in_out=transposed) if len(matrix_sizes(node)) == 2 else None

    def _broadcast_weight(self, argument: object) -> Weight | None:
        """Resolve a two-dimensional constant that is repeated over a leading batch dimension."""
        if not isinstance(argument, Node):
            return None
        while packet(argument) is aten.expand or (packet(argument) in VALUE_PRESERVING and _is_batched(argument)):
            argument = operand(argument)
        return self.weight(argument)

    def vector(self, argument: object) -> Weight | None:
        """Resolve a constant vector that is the same for each row."""
        if not isinstance(argument, Node):
            return None
        node = strip(argument)
        if node not in self.constants or node.meta["val"].dim() != 1:
            return None
        if width(node) != width(argument):
            return None  # a column: a number for each row
        return Weight(node, self.constants[node])


def call_name(module: str, calls: Counter[str]) -> str:
    """Return the name of a module's next call in the graph: `mlp`, then `mlp#2`; `calls` counts them."""
    calls[module] += 1
    return module if calls[module] == 1 else f"{module}#{calls[module]}"


def is_grouped(node: Node) -> bool:
    """Whether `node` multiplies each of several groups of rows with a separate matrix."""
    return packet(node) is aten._grouped_mm or str(node.target) == GROUPED_PRODUCT


def operand(node: Node, index: int = 0) -> Node:
    """Return an argument of `node` that is a node."""
    value = arguments(node)[index]
    assert isinstance(value, Node)
    return value


def width(node: Node) -> int:
    """Return the size of the last dimension."""
    return int(node.meta["val"].shape[-1])


def step(node: Node) -> Node | None:
    """Return the node that `node` takes its values from unchanged, row by row; None if it computes something."""
    op = packet(node)
    if op is aten.dropout and (arguments(node)[1] == 0 or arguments(node)[2] is False):
        return operand(node)
    if op in CASTS:
        return _cast_source(node)
    if op not in VALUE_PRESERVING | PERMUTATIONS:
        return None
    source = operand(node)
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return None
    if not before.shape or not after.shape:
        return None
    if op in PERMUTATIONS and (order := _order(node)) != sorted(order):
        return None
    # A view keeps rows apart if it keeps their size; behind it may stand dimensions of size 1.
    sizes = [[size for size in value.shape if not _is_one(size)][-1:] for value in (before, after)]
    whole = len(sizes[0]) == 1 and isinstance(sizes[0][0], int) and same_sizes(*sizes)
    return source if whole or same_sizes(before.shape[-1:], after.shape[-1:]) else None


def strip(node: Node) -> Node:
    """Look through value-preserving operations, as far as a constant or a computation."""
    while (source := step(node)) is not None:
        node = source
    return node


def source_with_sizes(node: Node, sizes: Sequence[int | torch.SymInt]) -> Node | None:
    """Return the node with these sizes that `node` takes its values from unchanged, or itself; None without one."""
    found: Node | None = node
    while found is not None and not same_sizes(found.meta["val"].shape, sizes):
        found = step(found)
    return found


def _cast_source(node: Node) -> Node | None:
    """Look through a cast that changes no value: to the same dtype, or back from a wider one."""
    source, dtype = operand(node), node.meta["val"].dtype
    if source.meta["val"].dtype == dtype:
        return source
    while packet(source) not in CASTS and (earlier := step(source)) is not None:
        source = earlier
    if packet(source) not in CASTS or source.meta["val"].dtype not in WIDENING.get(dtype, ()):
        return None
    original = operand(source)
    return original if original.meta["val"].dtype == dtype else None


# A tensor, which part of its last dimension is meant, as (start, stop, step), and the nodes that take it.
_Slice = tuple[Node, tuple[int, int, int], tuple[Node, ...]]


def _last_dimension_slice(node: Node) -> _Slice | None:
    """Read `node` as a static slice along the last dimension, or as an item of a split."""
    if packet(node) is aten.slice:
        source = operand(node)
        given = arguments(node)[1:]
        dim, start, stop, by = given + (0, None, None, 1)[len(given) :]
        last = source.meta["val"].dim() - 1
        if dim % (last + 1) != last or not all(isinstance(bound, int | None) for bound in (start, stop)):
            return None
        if not isinstance(source.meta["val"].shape[last], int):
            return None
        return source, slice(start, stop, by).indices(width(source)), (node,)
    if node.target is not operator.getitem or not isinstance(arguments(node)[0], Node):
        return None
    split, index = arguments(node)
    if packet(split) not in SPLITS:
        return None
    source = operand(split)
    dim = split.kwargs.get("dim", arguments(split)[2] if len(arguments(split)) > 2 else 0)
    last = source.meta["val"].dim() - 1
    parts = split.meta.get("val")
    if dim % (last + 1) != last or not isinstance(parts, list | tuple):
        return None
    sizes = [part.shape[-1] for part in parts]
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:index])
    return source, (start, start + sizes[index], 1), (node, split)


def _slice_by_view(node: Node) -> _Slice | None:
    """Read `node` as one of the parts of a last dimension that a view has cut in two: [..., 2, F] or [..., F, 2]."""
    if packet(node) is aten.select:
        view, dim, index = operand(node), *arguments(node)[1:]
        between: tuple[Node, ...] = (node, view)
    elif node.target is operator.getitem and packet(operand(node)) is aten.unbind:
        unbind, index = arguments(node)
        view, dim = operand(unbind), (*arguments(unbind)[1:], 0)[0]
        between = (node, unbind, view)
    elif packet(node) is aten.slice and len(arguments(node)) > 2:
        # What decompositions make of unbind; behind it the dimension of size 1 is dropped.
        view, dim, index = operand(node), *arguments(node)[1:3]
        if dim % view.meta["val"].dim() == view.meta["val"].dim() - 1 or not _is_one(node.meta["val"].shape[dim]):
            return None
        between = (node, view)
    else:
        return None
    if packet(view) not in VALUE_PRESERVING or not isinstance(index, int):
        return None
    sizes = view.meta["val"].shape
    if len(sizes) < 2 or not all(isinstance(size, int) for size in sizes[-2:]):
        return None
    parts, size = sizes[-2:]
    source = operand(view)
    if not same_sizes(source.meta["val"].shape[-1:], [parts * size]):
        return None
    if dim % len(sizes) == len(sizes) - 2:
        first = index % parts * size
        return source, (first, first + size, 1), between
    if dim % len(sizes) == len(sizes) - 1:
        return source, (index % size, parts * size, size), between
    return None


def _is_batched(node: Node) -> bool:
    """Whether a view keeps the last two dimensions."""
    before, after = operand(node).meta["val"].shape, node.meta["val"].shape
    return len(before) >= 2 and len(after) >= 2 and same_sizes(before[-2:], after[-2:])


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1


def same_sizes(first: Sequence[int | torch.SymInt], second: Sequence[int | torch.SymInt]) -> bool:
    """Whether sizes are known to be equal. Comparing them with == would give dynamic ones the value that they have."""
    return len(first) == len(second) and all(statically_known_true(a == b) for a, b in zip(first, second, strict=True))


def matrix_sizes(node: Node) -> list[int | torch.SymInt]:
    """Return the sizes of a tensor without those that are 1, except where it has two dimensions anyway."""
    sizes = list(node.meta["val"].shape)
    return sizes if len(sizes) == 2 else [size for size in sizes if not _is_one(size)]


def permutation(node: Node) -> list[int]:
    """Return in which order a transposition puts the dimensions of its operand."""
    rank = operand(node).meta["val"].dim()
    told_apart = torch.empty(tuple(range(rank)), device="meta")  # by their sizes
    assert callable(node.target)
    return list(node.target(told_apart, *arguments(node)[1:]).shape)


def _order(node: Node) -> list[int]:
    """Return the permutation of the dimensions that are not 1, or of both where there are two."""
    shape = operand(node).meta["val"].shape
    return [dim for dim in permutation(node) if len(shape) == 2 or not _is_one(shape[dim])]


def _flip(weight: Weight | None) -> Weight | None:
    return None if weight is None else weight.transposed()
