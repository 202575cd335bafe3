"""The constants of a graph, of a program or in the place of an ONNX graph: their values, and new ones."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from twellc.base.bounds import unfolds_too_far
from twellc.base.torch_private import OpOverload, schema_of
from twellc.passes.graph.program import add_parameter, constants_of, replace_node, tensor_of

# Of weights that are made of others: the steps of a dequantisation in groups, say.
_MOST = 16


class Constants(Protocol):
    """A graph and its constants, which can be added to.

    Attributes:
        graph: The graph.
        names: The names of its constants.
    """

    graph: Graph
    names: dict[Node, str]

    def value(self, node: Node) -> Tensor:
        """Return the value of a constant, or of a node computed from constants alone."""

    def add(self, name: str, tensor: Tensor, like: list[Node]) -> Node:
        """Add a constant called `name` (made unique) that is made of others."""

    def replace(self, node: Node, new: Node, computes: Node) -> None:
        """Let what reads `node` read `new`, which computes what the node `computes` has computed."""


class ProgramConstants:
    """Those of a program, which can be changed; see `Constants`."""

    def __init__(self, program: ExportedProgram) -> None:
        self.graph, self.names = program.graph, constants_of(program)
        self._program = program
        self._parameters = set(program.graph_signature.parameters)

    def value(self, node: Node) -> Tensor:
        """See `Constants`."""
        return evaluate(node, lambda constant: tensor_of(self._program, self.names[constant])).detach()

    def add(self, name: str, tensor: Tensor, like: list[Node]) -> Node:
        """Add a parameter, or a buffer if no parameter takes part; see `Constants`."""
        is_parameter = any(self.names[node] in self._parameters for node in like)
        kind = InputKind.PARAMETER if is_parameter else InputKind.BUFFER
        made = add_parameter(self._program, name, tensor, like=next(iter(self.names)), kind=kind)
        self.names = constants_of(self._program)
        if is_parameter:
            self._parameters.add(self.names[made])
        return made

    def replace(self, node: Node, new: Node, computes: Node) -> None:
        """See `Constants`."""
        replace_node(self._program, node, new)


@torch.no_grad()
def evaluate(node: Node, lookup: Callable[[Node], Tensor]) -> Tensor:
    """Return what a graph computes from constants alone, as the graph does; `lookup` gives those of placeholders."""
    known: dict[Node, Tensor] = {}
    pending = [node]  # not by recursion: a chain may be long
    while pending:
        each = pending[-1]
        missing = [] if each.op == "placeholder" else [one for one in each.all_input_nodes if one not in known]
        if missing:
            pending += missing
            continue
        if pending.pop() not in known:
            if each.op == "placeholder":
                known[each] = lookup(each)
            else:
                assert callable(each.target)
                args, kwargs = map_arg((each.args, each.kwargs), known.__getitem__)
                known[each] = each.target(*args, **kwargs)
    return known[node]


def grows_too_far(nodes: Iterable[Node], constants: Iterable[Node]) -> bool:
    """Whether computing nodes takes far more memory than the constants of the graph have."""
    return unfolds_too_far(sum(map(_bytes_of, nodes)), sum(map(_bytes_of, constants)), most=_MOST)


def _bytes_of(node: Node) -> int:
    value = node.meta.get("val")
    parts = value if isinstance(value, list | tuple) else [value]
    return sum(int(each.numel()) * each.element_size() for each in parts if isinstance(each, Tensor))


def fixed_nodes(graph: Graph, constants: Iterable[Node]) -> set[Node]:
    """Return the constants of a graph, and the nodes computed from these alone."""
    fixed = set(constants)
    for node in graph.nodes:
        if is_pure(node) and node.all_input_nodes and fixed.issuperset(node.all_input_nodes):
            fixed.add(node)
    return fixed


def is_pure(node: Node) -> bool:
    """Whether a node computes the same from the same operands, and nothing else."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor | list | tuple):
        return False
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and (
        torch.Tag.nondeterministic_seeded not in node.target.tags and not schema_of(node.target).is_mutable
    )
