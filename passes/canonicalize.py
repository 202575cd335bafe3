"""Functionalise the graph, drop what computes nothing, and put the neurons of feed-forward blocks last.

Before: aten ops as traced, in-place ones included, with assertions on dtypes after every cast and on dimensions.
After:  the same ops without aliasing and without assertions, each view and cast of a tensor there once, constants
        of one number as `aten.full`, x * (x > 0) as `aten.relu` and x * (x > t) as `aten.threshold`; `aten.linear` and
        the rest stay whole, except for what `fold_weights` and `feature_last` change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from twellc.base.errors import UserError, first_line
from twellc.passes.feature_last import feature_last
from twellc.passes.fold_weights import fold_weights
from twellc.passes.graph.program import (
    constants_of,
    drop_unused_constants,
    editable,
    finish,
    quiet_torch,
    replace_node,
    tensor_of,
)
from twellc.passes.match.activations import masked_relu, packet
from twellc.passes.match.linear import VIEWS

aten = torch.ops.aten


def canonicalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program functionalised, with no decomposition and without assertions, and rearranged."""
    return rearrange(functionalize(program))


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program functionalised, with no decomposition; nothing else changes but what the module's text says.

    Raises:
        UserError: torch cannot trace the program again, as where its parts contradict each other.
    """
    try:
        with quiet_torch():
            program = editable(program)
            _register_written_constants(program)
            drop_unused_constants(program)  # torch stumbles over a second name of a tensor that is written to
            decomposed = program.run_decompositions({})
    except Exception as error:  # torch runs every operator on shapes, and each raises what it likes
        what = f"torch {torch.__version__} cannot run it on shapes ({first_line(error)})"
        raise UserError("the model's graph", what, fix="Export the model again.") from error
    program = editable(decomposed)
    for target in (aten._assert_tensor_metadata.default, aten._assert_scalar.default):
        for node in program.graph.find_nodes(op="call_function", target=target):
            program.graph.erase_node(node)
    _write_numbers(program)
    _merge_views(program)
    _name_relus(program)
    return finish(program)


def _register_written_constants(program: ExportedProgram) -> None:
    """Make buffers of constants that are written to: as such torch.export may take the caches of transformers."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        written = any(isinstance(user.target, OpOverload) and user.target._schema.is_mutable for user in node.users)
        if written and spec.kind == InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False


def _write_numbers(program: ExportedProgram) -> None:
    """Replace floating-point constants of no dimension, which a graph holds for `torch.tensor(0.0)` in the code."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    for node, name in constants_of(program).items():
        value = node.meta["val"]
        if kinds[node.name] != InputKind.CONSTANT_TENSOR or value.dim() != 0 or not value.is_floating_point():
            continue
        with program.graph.inserting_before(first):
            number = program.graph.call_function(
                aten.full.default, ([], tensor_of(program, name).item()), {"dtype": value.dtype}
            )
        number.meta = dict(node.meta)
        for reader in (node, *(user for user in node.users if packet(user) is aten.clone)):
            replace_node(program, reader, number)


def _merge_views(program: ExportedProgram) -> None:
    """Let equal views and casts of a tensor be one: exporters make one for each projection that reads it."""
    known: dict[tuple[object, ...], Node] = {}
    for node in program.graph.nodes:
        if packet(node) not in VIEWS:
            continue
        key = (node.target, _key(node.args), _key(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            replace_node(program, node, first, where=lambda user: user.op != "output")


def _name_relus(program: ExportedProgram) -> None:
    """Replace x * (x > t) by relu(x) or threshold(x, t, 0): a mask, cast or not, would keep its own precision."""
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


def _key(argument: Any) -> object:
    """Return something hashable that differs where arguments do, also where 1, 1.0 and True are compared."""
    if isinstance(argument, Node):
        return argument
    if isinstance(argument, list | tuple):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in sorted(argument.items()))
    return type(argument), repr(argument)


def rearrange(program: ExportedProgram) -> ExportedProgram:
    """Return a functionalised program with its weights folded and features last; itself where that changes nothing."""
    return feature_last(fold_weights(program))
