"""Compute the weights that the graph computes from constants alone.

    before   linear(x, div(W, 2))     linear(x, mul(V, div(g, norm(V))))     linear(x, view(Q [o, g, n], [o, g * n]))
    after    linear(x, W')            linear(x, W')                          linear(x, W')

Such weights come from weight normalisation, from scales that a model applies to its own weights, and from weights that
are stored as integers, also in groups of 4 bits. They are computed as the model computes them, so no value changes.
Only what a matrix product reads as its weight is folded; a transposition, a cast or a view that keeps the matrix stays
in the graph. The weights of experts, as the op reads them, are folded in any case: nodes take them as they are. A
result in which no parameter takes part becomes a buffer, since it may be no weight of the model: scaled rotary
frequencies, say.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.constants import Constants, ProgramConstants, grows_too_far, is_pure
from twellc.passes.graph.program import editable, finish
from twellc.passes.match.activations import packet
from twellc.passes.match.linear import PRODUCTS, VALUE_PRESERVING, VIEWS, matrix_sizes, same_sizes
from twellc.plugins.experts_op import EXPERTS

aten = torch.ops.aten


def fold_weights(program: ExportedProgram) -> ExportedProgram:
    """Return the program with computed weights as constants; itself where it has none."""
    if not computed_weights(ProgramConstants(program)):
        return program
    program = editable(program)
    fold_weights_in(ProgramConstants(program))
    return finish(program)


def fold_weights_in(constants: Constants) -> None:
    """Make constants of the computed weights of a graph whose nodes have their values in `meta`."""
    folds: list[tuple[Node, list[Node], torch.Tensor]] = []  # complete before the first: one may be made of another
    for node in computed_weights(constants):
        if grows_too_far(sources_of(node), constants.names):
            continue
        sources = [source for source in sources_of(node) if source in constants.names]
        folds.append((node, sources, constants.value(node).clone()))
    for node, sources, tensor in folds:
        folded = constants.add(f"{constants.names[sources[0]]}_folded", tensor, like=sources)
        folded.meta = {**node.meta, "val": folded.meta["val"]}
        constants.replace(node, folded, computes=folded)


def computed_weights(constants: Constants) -> list[Node]:
    """Return the weights that are computed from constants alone, in graph order."""
    known, found = set(constants.names), []
    for node in constants.graph.nodes:
        if is_pure(node) and node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
            of_experts = any(user.target is EXPERTS for user in node.users)
            if of_experts or (not _keeps_matrix(node) and _is_weight(node)):
                found.append(node)
    return found


def is_view(node: Node) -> bool:
    """Whether a node only shows its operand in another shape or floating-point type."""
    return packet(node) in VIEWS | {aten.expand} and node.all_input_nodes[0].meta["val"].is_floating_point()


def _is_weight(node: Node) -> bool:
    """Whether a product reads the node, directly or through views."""
    if not isinstance(node.meta["val"], torch.Tensor) or not node.meta["val"].is_floating_point():
        return False
    return any(packet(user) in PRODUCTS or (_keeps_matrix(user) and _is_weight(user)) for user in node.users)


def _keeps_matrix(node: Node) -> bool:
    """Whether a node is a view of a matrix as one of the same rows and columns, or a transposition or cast of it."""
    if packet(node) not in VALUE_PRESERVING:
        return is_view(node)
    return is_view(node) and same_sizes(*(matrix_sizes(each) for each in (node, node.all_input_nodes[0])))


def sources_of(node: Node) -> list[Node]:
    """Return the nodes that a node is computed from, the nearest first."""
    found = {node: None}
    pending = [node]
    for source in pending:
        new = [operand for operand in source.all_input_nodes if operand not in found]
        found |= dict.fromkeys(new)
        pending += new
    return pending
