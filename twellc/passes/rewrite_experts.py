"""Replace the experts of a layer by one `twell` op.

    before   x ─ rows ─ product(Wu [experts, d_ff, d_model]) ─ relu ─ product(Wd [experts, d_out, d_ff]) ─ sum ─ y
    after    x ─ twell.experts(Wu [experts, d_ff, d_model], None, Wd' [experts, d_ff, d_out], ids, weights) ─ y

Wd' is Wd transposed, a new parameter, as of other blocks; of packed weights gate and up are new parameters, too. The op
takes weights in float32, and adds up a token's experts in that: y is rounded once. Numbers of experts below 0, which
count from the last one where the model looks up a matrix, are brought to what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.program import add_call, add_parameter, editable, finish, replace_node, tensor_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Linear, Weight
from twellc.plugins.experts_op import EXPERTS

aten = torch.ops.aten


def rewrite_experts(program: ExportedProgram, blocks: Sequence[FfnBlock]) -> ExportedProgram:
    """Return the program with experts rewritten; itself where there are none.

    Args:
        program: A canonical program.
        blocks: Some of the blocks found in it that have a `routing`, without a refusal.
    """
    if not blocks:
        return program
    rewritten = editable(program)
    nodes = {node.name: node for node in rewritten.graph.nodes}
    weights = _Weights(rewritten, nodes)
    for block in blocks:
        routing = block.routing
        assert routing is not None and block.up is not None and not block.refusal
        up, down = weights.rows(block.up), weights.columns(block.down)
        gate = None if block.gate is None else weights.rows(block.gate)
        y = nodes[routing.y.name]
        with rewritten.graph.inserting_before(y):
            like = nodes[block.down.node.name]  # a node of the experts' module
            x = _cast(nodes[block.x.name], block.dtype, like)
            ids, factors = (_by_token(nodes[each.name], routing.top, like) for each in (routing.ids, routing.weights))
            if routing.wraps:
                ids = add_call(rewritten.graph, aten.remainder.Scalar, ids, routing.experts, like=like)
            factors = _cast(factors, torch.float32, like)
            arguments = (x, up, gate, down, ids, factors, block.activation, block.threshold)
            op = add_call(rewritten.graph, EXPERTS, *arguments, like=like)
            op = _cast(op, y.meta["val"].dtype, like)
        replace_node(rewritten, y, op)
        nodes[y.name] = op  # what a later block may read as its x
    return finish(rewritten)


def _by_token(node: Node, top: int, like: Node) -> Node:
    """Return a list for each token and its experts as [tokens, top]."""
    shape = node.meta["val"].shape
    if len(shape) == 2 and shape[1] == top:
        return node
    return add_call(node.graph, aten.reshape.default, node, [-1, top], like=like)


def _cast(node: Node, dtype: torch.dtype, like: Node) -> Node:
    """Return a tensor in a dtype."""
    if node.meta["val"].dtype == dtype:
        return node
    return add_call(node.graph, aten._to_copy.default, node, dtype=dtype, like=like)


class _Weights:
    """The placeholders that hold weights as the op reads them. Weights that experts share have one."""

    def __init__(self, program: ExportedProgram, nodes: dict[str, Node]) -> None:
        self._program, self._nodes = program, nodes
        self._made: dict[tuple[Weight, bool], Node] = {}

    def rows(self, part: Linear) -> Node:
        """Return the weight of a product as [experts, out, in]."""
        return self._arranged(part.weight, in_out=False)

    def columns(self, part: Linear) -> Node:
        """Return the weight of a product as [experts, in, out]."""
        return self._arranged(part.weight, in_out=True)

    def _arranged(self, weight: Weight, *, in_out: bool) -> Node:
        placeholder = self._nodes[weight.node.name]
        if weight.in_out == in_out and weight.rows is None:
            return placeholder
        if (weight, in_out) not in self._made:
            tensor, suffix = tensor_of(self._program, weight.name).detach(), ""
            tensor = tensor.mT if weight.in_out else tensor
            if weight.rows is not None:
                tensor, suffix = tensor[:, slice(*weight.rows)], "_{}_{}_{}".format(*weight.rows)
            tensor = tensor.mT if in_out else tensor
            name = f"{weight.name}{suffix}{'_transposed' if in_out != weight.in_out else ''}"
            made = tensor.clone(memory_format=torch.contiguous_format)
            self._made[weight, in_out] = add_parameter(self._program, name, made, like=placeholder)
        return self._made[weight, in_out]
