"""Name the ReLUs that are spelt out: a mask, cast or not, would keep its own precision.

before   x * (x > 0)      x * (x > t)
after    relu(x)          threshold(x, t, 0)
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from twellc.passes.graph.program import editable, finish, replace_node
from twellc.passes.match.activations import masked_relu

aten = torch.ops.aten


def name_relus(program: ExportedProgram) -> ExportedProgram:
    """Return the program with `aten.relu` and `aten.threshold` for what computes them; itself where nothing does."""
    products = program.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    if not any(map(masked_relu, products)):
        return program
    program = editable(program)
    for node in program.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        found = masked_relu(node)
        if found is None:
            continue
        with program.graph.inserting_before(node):
            if found.threshold:
                relu = program.graph.call_function(aten.threshold.default, (found.pre, found.threshold, 0.0))
            else:
                relu = program.graph.call_function(aten.relu.default, (found.pre,))
        relu.meta = dict(node.meta)
        replace_node(program, node, relu)
    return finish(program)
