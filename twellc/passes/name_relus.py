"""Name the ReLUs that are spelt out: a mask, cast or not, would keep its own precision.

before   x * (x > 0)      (x + abs(x)) / 2      x[x < 0] = 0      x * (x > t)            prelu(x, w) with w = 0
after    relu(x)          relu(x)               relu(x)           threshold(x, t, 0)     relu(x)

before   x * (x > vector)             relu(x) * (x > vector)
after    where(x <= vector, 0, x)     where(x <= vector, 0, relu(x))

Left as they are: forms that torch has an operator for, such as clamp and where, which the matcher reads; and what is
no ReLU for every x.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.program import add_call, constants_of, editable, finish, replace_node, tensor_of
from twellc.passes.match.activations import Activation, arguments, packet, spelt_out_relu

aten = torch.ops.aten


def name_relus(program: ExportedProgram) -> ExportedProgram:
    """Return the program with `aten.relu` and `aten.threshold` for what computes them; itself where nothing does."""
    if next(_spelt_out(program), None) is None:
        return program
    program = editable(program)
    for node, found in _spelt_out(program):
        with program.graph.inserting_before(node):
            if found.bound is not None:
                dropped = add_call(program.graph, aten.le.Tensor, found.pre, found.bound, like=node)
                kept = (
                    add_call(program.graph, aten.relu.default, found.pre, like=node) if found.rectifies else found.pre
                )
                relu = add_call(program.graph, aten.where.ScalarSelf, dropped, 0.0, kept, like=node)
            elif found.threshold:
                relu = add_call(program.graph, aten.threshold.default, found.pre, found.threshold, 0.0, like=node)
            else:
                relu = add_call(program.graph, aten.relu.default, found.pre, like=node)
        replace_node(program, node, relu)
        program.graph.erase_node(node)  # torch keeps rrelu, which may be random
    return finish(program)


def _spelt_out(program: ExportedProgram) -> Iterator[tuple[Node, Activation]]:
    """Yield the nodes that compute a ReLU, also while they are replaced."""
    constants = constants_of(program)
    for node in list(program.graph.nodes):
        found = spelt_out_relu(node)
        if packet(node) is aten.prelu:
            x, slope = arguments(node)
            if slope in constants and not tensor_of(program, constants[slope]).any():
                found = Activation("relu", 0.0, x, (node,))
        if found is not None and (found.sparse or _is_number(program, found.bound, constants)) and node.users:
            yield node, found


def _is_number(program: ExportedProgram, bound: Node | None, constants: dict[Node, str]) -> bool:
    """Whether thresholds are stored and none is NaN, which no x is above, and none below."""
    if bound is None or bound not in constants:
        return False
    stored = tensor_of(program, constants[bound])
    return stored.is_meta or not stored.isnan().any()
