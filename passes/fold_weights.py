"""Compute the weights that the graph computes from constants alone.

    before   linear(x, div(W, 2))     linear(x, mul(V, div(g, norm(V))))     linear(x, view(Q [o, g, n], [o, g * n]))
    after    linear(x, W')            linear(x, W')                          linear(x, W')

Such weights come from weight normalisation, from scales that a model applies to its own weights, and from weights that
are stored as integers, also in groups of 4 bits. They are computed as the model computes them, so no value changes.
Only what a matrix product reads as its weight is folded; a transposition, a cast or a view that keeps the matrix stays
in the graph. What no parameter takes part in becomes a buffer, since it may be no weight of the model: rotary
frequencies that are scaled, say.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.node import map_arg

from twellc.passes.graph.program import add_parameter, constants_of, editable, finish, replace_node, tensor_of
from twellc.passes.match.activations import packet
from twellc.passes.match.linear import PRODUCTS, VALUE_PRESERVING, VIEWS, matrix_sizes, same_sizes

aten = torch.ops.aten


def fold_weights(program: ExportedProgram) -> ExportedProgram:
    """Return the program with computed weights as constants; itself where it has none."""
    constants = constants_of(program)
    computed: list[Node] = []  # from constants alone, in graph order
    known = set(constants)
    for node in program.graph.nodes:
        if is_pure(node) and node.all_input_nodes and known.issuperset(node.all_input_nodes):
            known.add(node)
            computed.append(node)
    weights = [node.name for node in computed if not _keeps_matrix(node) and _is_weight(node)]
    if not weights:
        return program
    program = editable(program)
    copies = {node.name: node for node in program.graph.nodes}
    names, parameters = constants_of(program), set(program.graph_signature.parameters)
    evaluator = Evaluator(lambda constant: tensor_of(program, names[constant]))
    first = next(iter(names))
    folds: list[tuple[Node, list[str], torch.Tensor]] = []  # complete before the first: one may be made of another
    for name in weights:
        node = copies[name]
        sources = [names[source] for source in _sources(node) if source in names]
        folds.append((node, sources, evaluator.value(node).detach().clone()))
    for node, sources, tensor in folds:
        kind = InputKind.BUFFER if parameters.isdisjoint(sources) else InputKind.PARAMETER
        folded = add_parameter(program, f"{sources[0]}_folded", tensor, like=first, kind=kind)
        folded.meta = {**node.meta, "val": folded.meta["val"]}
        replace_node(program, node, folded)
    return finish(program)


class Evaluator:
    """Computes what a graph computes from constants alone, as the graph does.

    Args:
        lookup: Gives the tensor of a constant's placeholder.
    """

    def __init__(self, lookup: Callable[[Node], torch.Tensor]) -> None:
        self._lookup = lookup

    @torch.no_grad()
    def value(self, node: Node) -> torch.Tensor:
        """Return the value of a constant, or of what is computed from constants."""
        known: dict[Node, torch.Tensor] = {}  # for this call only: such tensors may be large

        def compute(node: Node) -> torch.Tensor:
            if node.op == "placeholder":
                return self._lookup(node)
            if node not in known:
                assert callable(node.target)
                args, kwargs = map_arg((node.args, node.kwargs), compute)
                known[node] = node.target(*args, **kwargs)
            return known[node]

        return compute(node)


def is_pure(node: Node) -> bool:
    """Whether a node computes the same from the same operands, and nothing else."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
        return False
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded not in node.target.tags and not node.target._schema.is_mutable
    )


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


def _sources(node: Node) -> list[Node]:
    """Return the nodes that a node is computed from, the nearest first."""
    found = [node]
    for source in found:
        found.extend(operand for operand in source.all_input_nodes if operand not in found)
    return found
