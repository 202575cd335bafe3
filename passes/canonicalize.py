"""Functionalise the graph, drop what computes nothing, and put the neurons of feed-forward blocks last.

Before: aten ops as traced, in-place ones included, with assertions on dtypes after every cast and on dimensions.
After:  the same ops without aliasing and without assertions; `aten.linear` and the rest stay whole, except for what
        `fold_weights` and `feature_last` change.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram

from twellc.errors import UserError, first_line
from twellc.passes.feature_last import feature_last
from twellc.passes.fold_weights import fold_weights
from twellc.passes.program import editable, finish, quiet_torch

aten = torch.ops.aten


def canonicalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program functionalised, with no decomposition and without assertions, and rearranged."""
    return rearrange(functionalize(program))


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program functionalised, with no decomposition and without assertions; nothing else changes.

    Raises:
        UserError: torch cannot trace the program again, as where its parts contradict each other.
    """
    try:
        with quiet_torch():
            decomposed = program.run_decompositions({})
    except Exception as error:  # torch runs every operator on shapes, and each raises what it likes
        what = f"torch {torch.__version__} cannot run it on shapes ({first_line(error)})"
        raise UserError("the model's graph", what, fix="Export the model again.") from error
    program = editable(decomposed)
    for target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default):
        for node in program.graph.find_nodes(op="call_function", target=target):
            program.graph.erase_node(node)
    return finish(program)


def rearrange(program: ExportedProgram) -> ExportedProgram:
    """Return a functionalised program with its weights folded and features last; itself where that changes nothing."""
    return feature_last(fold_weights(program))
