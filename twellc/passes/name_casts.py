"""Write every cast as the one operator that the other passes know.

before   type_as(x, y)      prims.convert_element_type(x, float32)
after    _to_copy(x, dtype)   the dtype of y, or float32; x itself where it has that dtype

Refused: a cast to the dtype of a tensor whose dtype is not known stays.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.program import add_call, editable, finish, replace_node
from twellc.passes.match.activations import arguments, packet

aten = torch.ops.aten

_SPELLINGS = (aten.type_as, torch.ops.prims.convert_element_type)


def name_casts(program: ExportedProgram) -> ExportedProgram:
    """Return the program with `aten._to_copy` for every cast; itself where no cast is spelt otherwise."""
    if not any(map(_is_spelt_otherwise, program.graph.nodes)):
        return program
    program = editable(program)
    for node in program.graph.nodes:
        if not _is_spelt_otherwise(node):
            continue
        source, dtype = arguments(node)[0], node.meta["val"].dtype
        if source.meta["val"].dtype == dtype:
            replace_node(program, node, source)
            continue
        with program.graph.inserting_before(node):
            cast = add_call(program.graph, aten._to_copy.default, source, dtype=dtype, like=node)
        replace_node(program, node, cast)
    return finish(program)


def _is_spelt_otherwise(node: Node) -> bool:
    values = (value.meta.get("val") for value in (node, *node.all_input_nodes[:1]))
    return packet(node) in _SPELLINGS and all(isinstance(value, torch.Tensor) for value in values)
