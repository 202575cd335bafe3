"""Write constants of one number as numbers, which a graph holds for `torch.tensor(0.0)` in the code.

before   maximum(x, c),  c a stored tensor of no dimension
after    maximum(x, full([], 0.0))
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from twellc.passes.graph.program import constants_of, editable, finish, replace_node, tensor_of
from twellc.passes.match.activations import packet

aten = torch.ops.aten


def write_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return the program with floating-point constants of no dimension as `aten.full`; itself where it has none."""
    if not _numbers(program):
        return program
    program = editable(program)
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    for node, name in _numbers(program).items():
        value = node.meta["val"]
        with program.graph.inserting_before(first):
            number = program.graph.call_function(
                aten.full.default,
                ([], tensor_of(program, name).item()),
                {"dtype": value.dtype, "device": value.device},
            )
        number.meta = dict(node.meta)
        for reader in (node, *(user for user in node.users if packet(user) is aten.clone)):
            replace_node(program, reader, number)
    return finish(program)


def _numbers(program: ExportedProgram) -> dict[Node, str]:
    """Return the constants of one number, with their names."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    values = {node: node.meta["val"] for node in constants_of(program)}
    return {
        node: name
        for node, name in constants_of(program).items()
        if kinds[node.name] == InputKind.CONSTANT_TENSOR
        and values[node].dim() == 0
        and values[node].is_floating_point()
    }
