"""Functionalise the graph as traced, and drop what computes nothing.

Before: aten ops as traced, in-place ones included, with assertions on dtypes after every cast and on dimensions.
After:  the same ops without aliasing; `aten.linear` and the rest stay whole. Of the assertions, those on sizes stay
        that may fail for inputs that the program was exported for.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few, first_line
from twellc.passes.graph.program import drop_unused_constants, editable, finish, quiet_torch
from twellc.passes.graph.size_assertions import ASSERTION, Verdict, condition_of, size_assertions, size_ranges, verdict

aten = torch.ops.aten


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program functionalised, with no decomposition, and without assertions but those that may fail.

    Raises:
        UserError: torch cannot trace the program again, as where its parts contradict each other, or where it only
            pretends to be quantised; or a product mixes dtypes.
    """
    ranges = size_ranges(program)
    # Tracing the program again, torch adds assertions of its own, about strides.
    stay = {each for each in size_assertions(program) if verdict(each, ranges) != Verdict.HOLDS}
    try:
        with quiet_torch():
            program = editable(program)
            _register_written_constants(program)
            drop_unused_constants(program)  # torch stumbles over a second name of a tensor that is written to
            decomposed = program.run_decompositions({})
    except Exception as error:  # torch runs every operator on shapes, and each raises what it likes
        fakes = {node.name for node in program.graph.nodes if "fake_quant" in str(node.target)}
        if fakes:
            what = f"its numbers are fake-quantised, as for training ({first_few(sorted(fakes))})"
            raise UserError("the model's graph", what, fix="Convert the model first, and export it then.") from error
        what = f"torch {torch.__version__} cannot run it on shapes ({first_line(error)})"
        raise UserError("the model's graph", what, fix="Export the model again.") from error
    decomposed._guards_code = program._guards_code  # torch forgets those of an archive
    program = editable(decomposed)
    for node in program.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        program.graph.erase_node(node)
    for node in program.graph.find_nodes(op="call_function", target=ASSERTION):
        condition = condition_of(node)
        if condition in stay:
            stay.remove(condition)  # torch writes some twice
        else:
            program.graph.erase_node(node)
    _refuse_mixed_products(program)
    return finish(program)


_PRODUCTS = (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default)


def _refuse_mixed_products(program: ExportedProgram) -> None:
    """Fail for products of tensors of several dtypes, which torch exports, and refuses to compute.

    Raises:
        UserError: There is one.
    """
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        values = [each.meta.get("val") for each in node.all_input_nodes]
        dtypes = [dtype_name(value.dtype) for value in values if isinstance(value, torch.Tensor)]
        if len(set(dtypes)) > 1:
            raise UserError(
                "the model's graph", f"the product {node.name} has operands of several dtypes",
                got=" and ".join(dtypes), expected="one dtype",
                fix="Export the model with inputs in the dtype of its weights, or cast them in it.",
            )  # fmt: skip


def _register_written_constants(program: ExportedProgram) -> None:
    """Make buffers of constants that are written to: as such torch.export may take the caches of transformers."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        written = any(isinstance(user.target, OpOverload) and user.target._schema.is_mutable for user in node.users)
        if written and spec.kind == InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False
