"""Let equal views and casts of a tensor be one: exporters make one for each projection that reads it.

before   x ─┬─ view [B * T, D] ─ mm(Wg)          after   x ─ view [B * T, D] ─┬─ mm(Wg)
           └─ view [B * T, D] ─ mm(Wu)                                       └─ mm(Wu)
"""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.program import editable, finish, replace_node
from twellc.passes.match.activations import packet
from twellc.passes.match.linear import VIEWS


def merge_views(program: ExportedProgram) -> ExportedProgram:
    """Return the program with each view and cast of a tensor there once; itself where they are."""
    views = [_what(node) for node in program.graph.nodes if packet(node) in VIEWS]
    if len(set(views)) == len(views):
        return program
    program = editable(program)
    known: dict[tuple[object, ...], Node] = {}
    for node in program.graph.nodes:
        if packet(node) in VIEWS:
            first = known.setdefault(_what(node), node)
            if first is not node:
                replace_node(program, node, first, where=lambda user: user.op != "output")
    return finish(program)


def _what(view: Node) -> tuple[object, ...]:
    """Return what a view or cast is of what, hashable."""
    return view.target, _key(view.args), _key(view.kwargs)


def _key(argument: Any) -> object:
    """Return something hashable that differs where arguments do, also where 1, 1.0 and True are compared."""
    if isinstance(argument, Node):
        return argument
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in sorted(argument.items()))
    return type(argument), repr(argument)
