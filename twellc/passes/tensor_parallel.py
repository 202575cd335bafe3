"""Make of a program that of one rank: its heads of attention, its neurons, and all-reduces between.

    before   x ─┬─ norm ─ q, k, v ─ attention ─ o ──────────────── + ─┬─ norm ─ twell.gated_mlp ───────────── y
                └───────────────────────────────────────────────── ┘  └─ residual ─ ┘
    after    x ─┬─ norm ─ q', k', v' ─ attention ─ o' ─ all_reduce ─ + ─┬─ norm ─ twell.gated_mlp' ─ all_reduce ─ y
                └──────────────────────────────────────────────────── ┘ └─ on rank 0 ─ ┘

Rank r of R has the heads, and the rows and columns of weights, from r / R to (r + 1) / R (see `match/shared_axis.py`).
Which neurons of a block of TwELL it has was decided before (see `neurons.py`); those of dense blocks are shared as
heads are. A bias of o or of the down projection, and what a block adds its result to, are there on rank 0 alone. All
ranks compute the rest, embedding and logits too.

Operands that rank 0 alone would read are added behind the all-reduce: ranks must not differ in what they reduce. Where
attention runs beside the block, the two share one all-reduce:

    before   x ─┬─ attention ─ o ─ + ─ residual of gated_mlp ─ y
                └───────────────── ┘
    after    x ─┬─ attention ─ o' ─ + ─ residual of gated_mlp' ─ all_reduce ─ y
                └─ on rank 0 ────── ┘

Left whole on every rank, with a reason: attention and dense blocks of other forms than those that are read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.base.errors import UserError
from twellc.base.torch_private import OpOverload
from twellc.passes.attention import find_attention
from twellc.passes.graph.program import (
    add_call,
    add_parameter,
    constants_of,
    editable,
    finish,
    infer,
    replace_node,
    tensor_of,
)
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Linear, LinearReader, Weight, same_sizes, step, width
from twellc.passes.match.shared_axis import SIZED, NotSharedError, Part, Region, follow
from twellc.passes.rewrite_ffn import arranged_view
from twellc.plugins.all_reduce_op import ALL_REDUCE
from twellc.plugins.block import BlockOptions, Operands, call_of
from twellc.plugins.ops import VARIANT_OF

aten = torch.ops.aten


def rank_program(
    program: ExportedProgram, ops: Collection[str], dense: Sequence[FfnBlock], part: Part
) -> tuple[ExportedProgram, list[str]]:
    """Return the program of a rank, and notes on what stays whole.

    Args:
        program: A program whose blocks are rewritten, each `twell` op with the neurons of this rank.
        ops: The names of these ops.
        dense: The other blocks, as they were found, and experts, which stay whole.
        part: Which rank.

    Raises:
        UserError: Heads of attention cannot be shared among these ranks, or nothing can.
    """
    program = editable(program)
    writer = _Writer(program, part)
    notes = [*_share_attention(writer), *_share_dense(writer, dense)]
    for node in list(program.graph.nodes):
        if node.name in ops:
            writer.reduce_op(node)
    reduced = _all_reduces(finish(program))
    if not reduced:
        raise UserError(
            f"--tensor-parallel {part.ranks}", "nothing in the model can be shared", got="; ".join(notes[:2]),
            fix="Leave it out.",
        )  # fmt: skip
    if part.rank > 0:
        writer.drop_what_is_on_the_first()
        assert len(_all_reduces(finish(program))) == len(reduced), "ranks would wait for each other"
    return program, notes


def is_in_order(program: ExportedProgram) -> bool:
    """Whether each all-reduce of a program depends on the one before it, so that no host can run them otherwise."""
    depth: dict[Node, int] = {}
    count = 0
    for node in program.graph.nodes:
        depth[node] = max((depth[operand] for operand in node.all_input_nodes), default=0)
        if node.target is ALL_REDUCE:
            count += 1
            depth[node] += 1
            if depth[node] < count:
                return False
    return True


def _all_reduces(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if node.target is ALL_REDUCE]


# ---- shared parts ----


def _share_attention(writer: _Writer) -> list[str]:
    found = find_attention(writer.program.graph)
    ranks = writer.part.ranks
    heads = {each.module: (_heads(each.block.q), _heads(each.block.k)) for each in found if each.block is not None}
    common = math.gcd(*itertools.chain.from_iterable(heads.values()))
    for module, (queries, keys) in heads.items():
        if queries % ranks or keys % ranks:
            divisors = [str(number) for number in range(2, common + 1) if common % number == 0]
            raise UserError(
                f"--tensor-parallel {ranks}",
                f"{module} has {queries} heads of queries and {keys} of keys and values",
                expected=f"a number that divides both, in all layers: {' or '.join(divisors) or 'only 1 does'}",
            )  # fmt: skip
    notes = []
    for each in found:
        try:
            if each.block is None:
                raise NotSharedError(each.reason)
            heads_of = (each.block.q, each.block.k, each.block.v)
            starts = {start for node in heads_of for start in writer.products_behind(node)}
            region = follow(writer.program.graph, writer.reader, starts, ranks)
            if any(region.axes.get(node) != 1 for node in heads_of):
                raise NotSharedError("its projections do not make its heads one after the other")
            writer.share(region)
        except NotSharedError as reason:
            notes.append(f"attention {each.module} stays whole on every rank: {reason}")
    return notes


def _heads(node: Node) -> int:
    return int(node.meta["val"].shape[1])


def _share_dense(writer: _Writer, blocks: Sequence[FfnBlock]) -> list[str]:
    nodes = {node.name: node for node in writer.program.graph.nodes}
    notes = []
    for block in blocks:
        try:
            if block.routing is not None:
                raise NotSharedError("it is a mixture of experts")
            if block.d_ff % writer.part.ranks:
                raise NotSharedError(f"its {block.d_ff} neurons are not a multiple of {writer.part.ranks}")
            parts = [nodes.get(each.node.name) for each in (block.gate, block.up) if each is not None]
            starts = {node for node in parts if node is not None and writer.reader.linear(node) is not None}
            writer.share(follow(writer.program.graph, writer.reader, starts, writer.part.ranks))
        except NotSharedError as reason:
            notes.append(f"block {block.module} stays whole on every rank: {reason}")
    return notes


# ---- writing ----


class _Writer:
    """Writes the program of a rank."""

    def __init__(self, program: ExportedProgram, part: Part) -> None:
        self.program, self.part = program, part
        self.reader = LinearReader(constants_of(program))
        self._ops: list[Node] = []
        # What ops add to that every rank has a part of; and sums of it with what rank 0 alone adds.
        self._own: set[Node] = set()
        self._sums: dict[Node, Node] = {}

    def products_behind(self, node: Node) -> list[Node]:
        """Return the products with constant weights that a node is computed from, the first ones on each way."""
        found, pending = [], [node]
        for place in pending:
            if self.reader.linear(place) is not None:
                found.append(place)
            else:
                pending.extend(source for source in place.all_input_nodes if source not in pending)
        return found

    def share(self, region: Region) -> None:
        """Let this rank compute its part of a region."""
        starts = {linear.node: linear for linear in region.starts}
        for node, axis in region.axes.items():
            if node in starts:
                self._begin(starts[node])
                continue
            for cut in region.cuts:
                if cut.user is node:
                    self._cut(node, cut.operand, cut.axis)
            if packet(node) in SIZED:
                sizes = list(arguments(node)[1])
                if sizes[axis] != -1:
                    sizes[axis] //= self.part.ranks
                node.args = (node.args[0], sizes, *node.args[2:])
            infer(node)
        for linear in region.ends:
            self._end(linear)
        self.reader = LinearReader(constants_of(self.program))

    def reduce_op(self, node: Node) -> None:
        """Reduce what a block of TwELL computes, and decide what it adds to, the same on every rank."""
        operands, options = _call_of(node)
        residual = operands.residual
        behind = None
        if residual is not None and not self._is_read(residual):
            joined = self._joined(node, residual)
            operands = dataclasses.replace(operands, residual=joined)
            behind = residual if joined is None else None
        node.args, node.kwargs = (*operands.arguments(), *options.arguments()), {**operands.by_name()}
        with self.program.graph.inserting_after(node):
            result = self._call(ALL_REDUCE, node, self.part.ranks, like=node)
        total = result
        if behind is not None:
            with self.program.graph.inserting_after(result):
                total = self._call(aten.add.Tensor, behind, result, like=node)
        replace_node(self.program, node, total, where=lambda user: user is not result)
        self._ops.append(node)

    def drop_what_is_on_the_first(self) -> None:
        """Leave out what only rank 0 adds: biases behind the sum, and what blocks add to."""
        for node in self._ops:
            operands, options = _call_of(node)
            residual = operands.residual
            own = residual if residual is None or residual in self._own else self._sums.get(residual)
            operands = dataclasses.replace(operands, residual=own, b_down=None)
            node.args = (*operands.arguments(), *options.arguments())

    def _joined(self, node: Node, residual: Node) -> Node | None:
        """Return what to add to where attention beside the block is reduced for what the block adds to alone."""
        own = _reduced_for(residual)
        if own is not None:
            self._own.add(own)
            return own
        if residual.target is not aten.add.Tensor or residual.kwargs or len(residual.users) > 1:
            return None
        for reduced, other in (arguments(residual), arguments(residual)[::-1]):
            own = _reduced_for(reduced) if isinstance(reduced, Node) else None
            if own is None or not same_sizes(own.meta["val"].shape, residual.meta["val"].shape):
                continue
            if isinstance(other, Node) and self._is_read(other, besides=residual):
                with self.program.graph.inserting_before(node):
                    total = self._call(aten.add.Tensor, other, own, like=residual)
                self._sums[total] = own
                return total
        return None

    def _is_read(self, value: Node, besides: Node | None = None) -> bool:
        """Whether something reads a value on every rank: not only as what a block adds to."""
        users = [user for user in value.users if user is not besides and user not in self._sums]
        return any(not _reads_as_residual(user, value) for user in users)

    def _begin(self, linear: Linear) -> None:
        """Compute this rank's features of a product."""
        start, stop = self.part.of(width(linear.node))
        weight = self._parameter(linear.weight, lambda matrix: matrix[start:stop])
        bias = None if linear.bias is None else self._parameter(linear.bias, lambda vector: vector[start:stop])
        with self.program.graph.inserting_before(linear.node):
            new = self._call(aten.linear.default, linear.x, weight, bias, like=linear.node)
        replace_node(self.program, linear.node, new)

    def _end(self, linear: Linear) -> None:
        """Compute this rank's part of a sum, and reduce it."""
        whole = arranged_view(tensor_of(self.program, linear.weight.name), linear.weight, in_out=False)[1]
        start, stop = self.part.of(whole.shape[1])
        weight = self._parameter(linear.weight, lambda matrix: matrix[:, start:stop])
        bias = None if linear.bias is None or self.part.rank > 0 else linear.bias.node
        with self.program.graph.inserting_before(linear.node):
            own = self._call(aten.linear.default, linear.x, weight, bias, like=linear.node)
            total = self._call(ALL_REDUCE, own, self.part.ranks, like=linear.node)
        replace_node(self.program, linear.node, total)

    def _parameter(self, weight: Weight, part: Any) -> Node:
        """Add a part of a weight [out, in], or of a bias, as a new parameter."""
        stored = tensor_of(self.program, weight.name).detach()
        if stored.dim() == 1:
            whole = stored if weight.rows is None else stored[slice(*weight.rows)]
        else:
            whole = arranged_view(stored, weight, in_out=False)[1]
        own = part(whole).clone(memory_format=torch.contiguous_format)
        return add_parameter(self.program, f"{weight.name}_of_rank", own, like=weight.node)

    def _cut(self, node: Node, operand: Node, axis: int) -> None:
        start, stop = self.part.of(int(operand.meta["val"].shape[axis]))
        with self.program.graph.inserting_before(node):
            own = self._call(aten.slice.Tensor, operand, axis, start, stop, like=operand)
        node.replace_input_with(operand, own)

    def _call(self, op: Any, *args: Any, like: Node) -> Node:
        return add_call(self.program.graph, op, *args, like=like)


def _reduced_for(value: Node) -> Node | None:
    """Return what is reduced for a value of which there is one reader, and for nothing else; None if it is not that."""
    place: Node | None = value
    while place is not None and len(place.users) == 1:
        if place.target is ALL_REDUCE:
            own: Node = arguments(place)[0]
            before, after = own.meta["val"], value.meta["val"]
            return own if before.dtype == after.dtype and same_sizes(before.shape, after.shape) else None
        place = step(place)
    return None


def _call_of(node: Node) -> tuple[Operands[Node], BlockOptions]:
    """Return the operands and options of a `twell` op."""
    assert isinstance(node.target, OpOverload)
    return call_of(VARIANT_OF[node.target], arguments(node), node.kwargs)


def _reads_as_residual(user: Node, value: Node) -> bool:
    """Whether a user is a block that only adds its result to a value."""
    if user.target not in VARIANT_OF:
        return False
    operands, _ = _call_of(user)
    return operands.residual is value and value not in dataclasses.replace(operands, residual=None).named().values()
