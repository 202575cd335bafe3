"""Find the linear layers of a program outside of its feed-forward blocks, and what they can compute besides.

    x ─ norm ─┬─ linear(Wq, bq) ─ q          x [..., in], q, k and v [..., out]
              ├─ linear(Wk, bk) ─ k
              └─ linear(Wv, bv) ─ v

    x ─ linear(Wo, bo) ─ add ─ sum           x [..., in], other and sum [..., out]
               other ─────┘

`linear` is any product with a constant weight (see `linear.py`). Those that read the same x are one layer with
several outputs; so are the parts of one that is sliced, if these are all of it, one beside the other. `norm.py` says
what a norm is: it belongs to a layer if nothing but such layers reads it, directly, through views, or where rows are
selected: selecting comes first then, as for the logits behind the last token. `residual.py` finds what the result of a
layer with one output is added to. An argmax over the last dimension belongs to a layer whose output nothing else reads.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from twellc.passes.graph.constants import fixed_nodes
from twellc.passes.graph.program import constants_of
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.linear import (
    CASTS,
    PRODUCTS,
    SPLITS,
    VALUE_PRESERVING,
    WIDENING,
    Linear,
    LinearReader,
    call_name,
    operand,
    same_sizes,
    source_with_sizes,
    step,
    strip,
    width,
)
from twellc.passes.match.norm import Norm, read_norm
from twellc.passes.match.residual import Residual, find_residual
from twellc.plugins.library import MAX_SPLITS

aten = torch.ops.aten


@dataclass(frozen=True)
class FoundLinear:
    """Linear layers that read one tensor.

    Attributes:
        linears: The products, in graph order.
        outputs: What they compute, in the order of their weights' rows: their results, parts of these, or the sum with
            a residual.
        x: The node to read x from, with the same leading dimensions as the outputs.
        modules: The paths of the modules that hold the weights, one for each product; see `call_name`.
        norm: The norm before them; None where there is none that belongs to them.
        way: Nodes between that norm and x, the last one first: views, and what selects rows.
        residual: What the result is added to, if the sum belongs to them.
        choice: The argmax of their one output, if it belongs to them: all that they compute then.
    """

    linears: tuple[Linear, ...]
    outputs: tuple[Node, ...]
    x: Node
    modules: tuple[str, ...] = ()
    norm: Norm | None = None
    way: tuple[Node, ...] = ()
    residual: Residual | None = None
    choice: Node | None = None

    @property
    def results(self) -> tuple[Node, ...]:
        """What they give to the rest of the program."""
        return self.outputs if self.choice is None else (self.choice,)

    @property
    def site(self) -> str:
        """What they are called where something is decided about them: the first of their modules."""
        return self.modules[0]

    @property
    def widths(self) -> list[int]:
        """The widths of the outputs."""
        return [width(each) for each in self.outputs]


def find_linear(program: ExportedProgram, without: Collection[str] = ()) -> list[FoundLinear]:
    """Return the linear layers of a canonical program in graph order.

    Args:
        program: The program.
        without: Names of the products and sums that belong to feed-forward blocks.
    """
    return _Finder(program.graph, constants_of(program), without).find()


@dataclass
class _Group:
    """Products of one x, and their outputs."""

    x: Node
    linears: list[Linear] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)


class _Finder:
    def __init__(self, graph: Graph, constants: dict[Node, str], without: Collection[str]) -> None:
        self._graph, self._constants, self._without = graph, constants, without
        self._reader = LinearReader(constants)
        self._sums: set[Node] = set()  # of two layers that are added one gets the sum
        self._fixed = fixed_nodes(graph, constants)

    def find(self) -> list[FoundLinear]:
        groups: dict[object, list[_Group]] = {}
        for linear in self._linears():
            parts = self._parts(linear)
            outputs = parts if _are_taken(parts) and _read_for(linear, parts) is not None else [linear.node]
            x = _read_for(linear, outputs)
            if x is None:
                continue
            same_x = groups.setdefault((_origin(x), _are_taken(outputs), *map(str, x.meta["val"].shape)), [])
            if not same_x or len(same_x[-1].outputs) + len(outputs) > MAX_SPLITS:
                same_x.append(_Group(x))
            same_x[-1].linears.append(linear)
            same_x[-1].outputs.extend(outputs)
        found = [self._with_ends(each) for same_x in groups.values() for each in same_x]
        with_norm = (linear for each in found if each.norm is not None for linear in each.linears)
        readers = {node for linear in with_norm for node in linear.nodes}
        found = [
            each if each.norm is None or is_read_by(each.norm.node, readers) else replace(each, norm=None, way=())
            for each in found
        ]
        order = {node: index for index, node in enumerate(self._graph.nodes)}
        calls: Counter[str] = Counter()
        return [
            replace(each, modules=tuple(call_name(_module(linear), calls) for linear in each.linears))
            for each in sorted(found, key=lambda each: min(order[node] for node in each.outputs))
        ]

    def _linears(self) -> Iterator[Linear]:
        for node in self._graph.nodes:
            linear = self._reader.linear(node) if packet(node) in PRODUCTS else None
            if linear is None:
                continue
            linear = self._reader.larger(node) or linear
            is_whole = linear.bias is None or width(linear.bias.node) == width(linear.node)
            names = {each.name for each in linear.nodes}
            if is_whole and linear.x not in self._fixed and names.isdisjoint(self._without):
                yield linear

    def _parts(self, linear: Linear) -> list[Node]:
        """Return the parts of a product in the order of its features, if nothing else reads it; else none."""
        found: dict[int, tuple[int, Node]] = {}
        pending = [linear.node]
        for node in pending:
            for user in node.users:
                part = self._reader.linear(user) if _cuts(user) else None
                rows = None if part is None else part.weight.rows
                if rows is not None and rows[2] == 1 and rows[0] not in found:
                    found[rows[0]] = rows[1], user
                elif step(user) is node or packet(user) in SPLITS | VALUE_PRESERVING | {aten.unbind}:
                    pending.append(user)
                else:
                    return []
        starts = sorted(found)
        is_whole = [0, *(found[start][0] for start in starts)] == [*starts, width(linear.node)]
        return [found[start][1] for start in starts] if is_whole and len(starts) <= MAX_SPLITS else []

    def _with_ends(self, group: _Group) -> FoundLinear:
        """Return layers with the norm before them and the residual behind them."""
        first, found = group.linears[0], FoundLinear(tuple(group.linears), tuple(group.outputs), group.x)
        if group.outputs == [first.node]:
            residual = find_residual(group.x, first, self._constants)
            if residual is not None and residual.sum.name not in self._without and residual.sum not in self._sums:
                self._sums.add(residual.sum)
                found = replace(found, outputs=(residual.sum,), x=residual.x, residual=residual)
        if len(found.outputs) == 1:
            found = replace(found, choice=_choice(found.outputs[0]))
        norm, way = self._norm(found.x)
        is_of_dtype = norm is not None and norm.x.meta["val"].dtype == first.weight.node.meta["val"].dtype
        return replace(found, norm=norm, way=way) if is_of_dtype else found

    def _norm(self, x: Node) -> tuple[Norm | None, tuple[Node, ...]]:
        """Return the norm that x comes from, through views, casts and what selects rows, and these."""
        way: list[Node] = []
        while True:
            norm = read_norm(x, self._fixed)
            if norm is not None:
                return norm, tuple(way)
            if packet(x) not in CASTS:
                if step(x) is None and not _selects_rows(x):
                    return None, ()
                way.append(x)
            x = operand(x)


def _module(linear: Linear) -> str:
    """Return the path of the module that holds the weight; the weight's name if that is at the root."""
    return linear.weight.name.rpartition(".")[0] or linear.weight.name


def is_read_by(norm: Node, readers: Collection[Node]) -> bool:
    """Whether nothing but the readers reads a norm, directly or on a way to them."""
    pending = [norm]
    for node in pending:
        for user in node.users:
            if user in readers:
                continue
            passes = packet(user) in CASTS or step(user) is node or _selects_rows(user)
            if not passes or operand(user) is not node:
                return False
            pending.append(user)
    return True


def _choice(output: Node) -> Node | None:
    """Return the argmax over the last dimension, if that alone reads an output, as it is or in a wider dtype."""
    dtype, node = output.meta["val"].dtype, output
    while len(node.users) == 1:
        source, (node,) = node, node.users
        if packet(node) is aten.argmax:
            _, dim, keeps_dim = (*arguments(node), None, False)[:3]
            last = source.meta["val"].dim() - 1
            return node if dim in (-1, last) and not keeps_dim else None
        if packet(node) not in CASTS or node.meta["val"].dtype not in (dtype, *WIDENING.get(dtype, ())):
            return None
    return None


def _read_for(linear: Linear, outputs: Sequence[Node]) -> Node | None:
    """Return the node to read x from for these outputs: with their leading dimensions; None without one."""
    leading = [each.meta["val"].shape[:-1] for each in outputs]
    if not all(same_sizes(each, leading[0]) for each in leading):
        return None
    return source_with_sizes(linear.x, (*leading[0], width(linear.x)))


def _are_taken(outputs: Sequence[Node]) -> bool:
    """Whether the kernels take outputs of these widths: one that they do not take keeps back none beside it."""
    return len(outputs) > 0 and not any(width(each) % 8 for each in outputs)


def _origin(x: Node) -> object:
    """Return a key that is equal for nodes with equal values."""
    node = strip(x)
    if packet(node) in CASTS:  # each reader may have a separate cast
        return strip(operand(node)), node.meta["val"].dtype
    return node


def _cuts(node: Node) -> bool:
    """Whether a node takes a part of another."""
    return node.target is operator.getitem or packet(node) in (aten.slice, aten.select)


def _selects_rows(node: Node) -> bool:
    """Whether a node takes some rows of another, whole and as they are."""
    op, given = packet(node), arguments(node)
    if op not in (aten.slice, aten.select, aten.index_select, aten.index, aten.gather):
        return False
    rank = operand(node).meta["val"].dim()
    if op is aten.index:
        return len(given[1]) < rank or given[1][-1] is None
    dim = given[1] if len(given) > 1 else 0
    if not isinstance(dim, int) or dim % rank == rank - 1:
        return False
    if op is not aten.gather:
        return True
    index = given[2]
    same = same_sizes(index.meta["val"].shape[-1:], operand(node).meta["val"].shape[-1:])
    return same and packet(index) is aten.expand and same_sizes(operand(index).meta["val"].shape[-1:], [1])
