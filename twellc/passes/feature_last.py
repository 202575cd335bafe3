"""Bring feed-forward blocks whose neurons are not the last dimension into the common form.

    before   x [B, C, T] ─ conv1d(W [F, C, 1]) ─ relu [B, F, T] ─ conv1d ─ y [B, C, T]
    after    x ─ permute [B, T, C] ─ linear ─ relu [B, T, F] ─ linear ─ permute ─ y [B, C, T]

Products over another dimension than the last are convolutions with a kernel of size 1, matmul(W, x), and einsum and
tensordot of such a kind. They change only where one feeds another through elementwise operations; a 1 x 1 convolution
elsewhere in the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from twellc.passes.graph.program import add_call, constants_of, editable, finish, replace_node
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.linear import (
    CONVOLUTIONS,
    PERMUTATIONS,
    LinearReader,
    Weight,
    matrix_sizes,
    permutation,
    same_sizes,
)

aten = torch.ops.aten

# Elementwise, though not tagged so.
_ELEMENTWISE = frozenset((aten.clone, aten.contiguous, aten.alias, aten.detach, aten.dropout, aten._to_copy, aten.to))


@dataclass(frozen=True)
class Product:
    """linear(x, W, bias), with its inputs along dimension `x_axis` of x and its outputs along dimension `axis`."""

    x: Node
    x_axis: int
    axis: int
    weight: Weight
    bias: Node | None


def feature_last(program: ExportedProgram) -> ExportedProgram:
    """Return the program with chains of products over an inner dimension changed; itself where it has none."""
    reader = LinearReader(constants_of(program))
    axes: dict[Node, int] = {}
    products: dict[Node, Product] = {}
    for node in program.graph.nodes:
        product = _read(node, reader) if node.op == "call_function" else None
        if product is not None:
            products[node], axes[node] = product, product.axis
        elif (axis := _elementwise_axis(node, axes)) is not None:
            axes[node] = axis
    needed = _chained(products, axes)
    if not needed:
        return program
    return _Rewriter(program, products, axes).run(needed)


def _chained(products: dict[Node, Product], axes: dict[Node, int]) -> set[str]:
    """Return the names of the products that feed another, those others, and the nodes between them."""
    ends = [node for node, product in products.items() if axes.get(product.x) == product.x_axis]
    needed: set[str] = set()
    pending = [*ends, *(products[end].x for end in ends)]
    while pending:
        node = pending.pop()
        if node in axes and node.name not in needed:
            needed.add(node.name)
            if node not in products:
                pending.extend(node.all_input_nodes)
    return needed


class _Rewriter:
    def __init__(self, program: ExportedProgram, products: dict[Node, Product], axes: dict[Node, int]) -> None:
        self._program = editable(program)
        self._copies = {node.name: node for node in self._program.graph.nodes}
        self._products = {node.name: product for node, product in products.items()}
        self._axes = {node.name: axis for node, axis in axes.items()}
        self._twins: dict[str, Node] = {}  # nodes by name: the same values with features last
        self._inputs: dict[tuple[str, int], Node] = {}

    def run(self, needed: set[str]) -> ExportedProgram:
        for node in list(self._program.graph.nodes):
            if node.name in needed:
                self._twins[node.name] = self._make_twin(node)
        for name, twin in self._twins.items():
            node = self._copies[name]
            if all(user.name in self._twins for user in node.users):
                continue
            last = twin.meta["val"].dim() - 1
            if (axis := self._axes[name]) != last:
                order = list(range(last))
                order.insert(axis, last)
                with self._program.graph.inserting_after(twin):
                    twin = self._call(aten.permute.default, twin, order, like=node)
            replace_node(self._program, node, twin, where=lambda user: user.name not in self._twins)
        # Permuted tensors lie in memory in another order, which a view may have to copy.
        for view in self._program.graph.find_nodes(op="call_function", target=aten.view.default):
            view.target = aten.reshape.default
        return finish(self._program)

    def _make_twin(self, node: Node) -> Node:
        product = self._products.get(node.name)
        with self._program.graph.inserting_before(node):
            if product is None:
                args, kwargs = map_arg((arguments(node), node.kwargs), lambda arg: self._twins.get(arg.name, arg))
                return self._call(node.target, *args, like=node, **kwargs)
            weight = self._copies[product.weight.node.name]
            if weight.meta["val"].dim() > 2:
                sizes = [size for size in weight.meta["val"].shape if size != 1]
                weight = self._call(aten.reshape.default, weight, sizes, like=node)
            if product.weight.in_out:
                weight = self._call(aten.t.default, weight, like=node)
            bias = () if product.bias is None else (self._copies[product.bias.name],)
            return self._call(aten.linear.default, self._input(product), weight, *bias, like=node)

    def _input(self, product: Product) -> Node:
        """Return what a product reads, with features last."""
        x = self._copies[product.x.name]
        if self._axes.get(x.name) == product.x_axis and x.name in self._twins:
            return self._twins[x.name]
        key = (x.name, product.x_axis)
        if key not in self._inputs:
            order = [dim for dim in range(x.meta["val"].dim()) if dim != product.x_axis] + [product.x_axis]
            before = permutation(x) if packet(x) in PERMUTATIONS else []
            if before and [before[dim] for dim in order] == sorted(order):
                self._inputs[key] = arguments(x)[0]  # two permutations that cancel
            else:
                self._inputs[key] = self._call(aten.permute.default, x, order, like=x)
        return self._inputs[key]

    def _call(self, target: Any, *args: Any, like: Node, **kwargs: Any) -> Node:
        return add_call(self._program.graph, target, *args, like=like, **kwargs)


def _elementwise_axis(node: Node, axes: dict[Node, int]) -> int | None:
    """Return the axis of features of an elementwise result, if all its tensors of its shape have the same one."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    if not pointwise and packet(node) not in _ELEMENTWISE:
        return None
    shape = node.meta["val"].shape
    tensors = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
    found = {axes.get(arg) for arg in tensors if arg.meta["val"].dim() > 0}
    same = all(same_sizes(arg.meta["val"].shape, shape) for arg in tensors if arg.meta["val"].dim() > 0)
    return found.pop() if len(found) == 1 and same else None


def _read(node: Node, reader: LinearReader) -> Product | None:
    op = packet(node)
    readers: dict[object, Callable[[Node, LinearReader], Product | None]] = {
        aten.matmul: _left_matmul, aten.mm: _left_matmul, aten.bmm: _left_matmul,
        aten.einsum: _einsum, aten.tensordot: _tensordot,
    }  # fmt: skip
    read = readers.get(op, read_convolution)
    product = read(node, reader)
    if product is None:
        return None
    common = product.axis == node.meta["val"].dim() - 1 and product.x_axis == product.x.meta["val"].dim() - 1
    return None if common else product


def read_convolution(node: Node, reader: LinearReader) -> Product | None:
    """Read a convolution with a kernel of size 1, whose features are the dimension before its images'."""
    if packet(node) not in CONVOLUTIONS:
        return None
    x, w, bias, *options = arguments(node)[:3] + (None,) * (3 - len(arguments(node))) + arguments(node)[3:]
    weight = reader.weight(w)
    plain = packet(node) is aten.convolution
    # convolution also has: transposed, output_padding.
    defaults = (1, 0, 1, False, 0, 1) if plain else (1, 0, 1, 1)
    kernel = w.meta["val"].shape[2:]
    if weight is None or weight.in_out or any(size != 1 for size in kernel) or node.kwargs:
        return None
    for option, default in zip(options, defaults, strict=False):
        values = option if isinstance(option, list | tuple) else [option]
        if option not in ("same", "valid") and any(value != default for value in values):
            return None
    axis = x.meta["val"].dim() - len(kernel) - 1
    return Product(x, axis, axis, weight, bias)


def _left_matmul(node: Node, reader: LinearReader) -> Product | None:
    """W x: features are the last dimension but one."""
    w, x = arguments(node)
    weight = reader.weight(w)
    dims = x.meta["val"].dim()
    if weight is None or dims < 2 or node.meta["val"].dim() != dims or x in reader.constants:
        return None
    if not same_sizes(matrix_sizes(w), [node.meta["val"].shape[-2], x.meta["val"].shape[-2]]):
        return None  # another weight for each batch
    return Product(x, dims - 2, dims - 2, weight, None)


def _einsum(node: Node, reader: LinearReader) -> Product | None:
    equation, operands = arguments(node)[0].replace(" ", ""), arguments(node)[1]
    inputs, arrow, result = equation.partition("->")
    letters = inputs.split(",")
    if not arrow or "." in equation or len(operands) != 2:
        return None
    for x, w, x_letters, w_letters in ((*operands, *letters), (*reversed(operands), *reversed(letters))):
        weight = reader.weight(w)
        if weight is None or len(w_letters) != 2:
            continue
        summed = set(x_letters) & set(w_letters)
        new = set(w_letters) - set(x_letters)
        if len(summed) != 1 or len(new) != 1 or len(set(x_letters)) != len(x_letters):
            continue
        rest = [letter for letter in x_letters if letter not in summed]
        if [letter for letter in result if letter not in new] != rest or len(result) != len(x_letters):
            continue
        if w_letters[0] in summed:
            weight = weight.transposed()
        return Product(x, x_letters.index(*summed), result.index(*new), weight, None)
    return None


def _tensordot(node: Node, reader: LinearReader) -> Product | None:
    """tensordot(W, x): the new dimension comes first."""
    w, x, of_w, of_x = arguments(node)
    weight = reader.weight(w)
    if weight is None or len(of_x) != 1 or w.meta["val"].dim() != 2:
        return None
    if of_w[0] % 2 == 0:
        weight = weight.transposed()
    return Product(x, of_x[0] % x.meta["val"].dim(), 0, weight, None)
