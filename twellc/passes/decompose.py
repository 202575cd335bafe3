"""Functionalise the graph as traced, and drop what computes nothing.

Before: aten ops as traced, in-place ones included, with assertions on dtypes after every cast and on dimensions.
After:  the same ops without aliasing; `aten.linear` and the rest stay whole. Of the assertions, those on sizes stay
        that may fail for inputs that the program was exported for.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few, first_line
from twellc.base.torch_private import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    enable_python_dispatcher,
    guards_of,
    is_composite,
    is_preserved,
    pytree,
    schema_of,
    set_guards,
    without_notes,
)
from twellc.passes.graph.program import (
    add_call,
    call_key,
    drop_unused_constants,
    editable,
    finish,
    quiet_torch,
    replace_node,
    user_inputs,
)
from twellc.passes.sizes.conditions import ASSERTION, Verdict, condition_of, size_assertions, size_ranges, verdict

aten = torch.ops.aten


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Return the program functionalised, with no decomposition, and without assertions but those that may fail.

    Raises:
        UserError: torch cannot trace the program again, as where its parts contradict each other, or where it only
            pretends to be quantised; or a product mixes dtypes.
    """
    ranges = size_ranges(program)
    # Tracing the program again, torch adds other assertions, about strides.
    stay = {each for each in size_assertions(program) if verdict(each, ranges) != Verdict.HOLDS}
    program = _node_by_node(program) or _traced_again(program)
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


def _traced_again(program: ExportedProgram) -> ExportedProgram:
    """Let torch trace the whole program again: see `decompose`."""
    try:
        with quiet_torch(), without_notes():
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
    set_guards(decomposed, guards_of(program))  # torch forgets those of an archive
    return editable(decomposed)


# ---- node by node ----


def _node_by_node(traced: ExportedProgram) -> ExportedProgram | None:
    """Return what `_traced_again` does, in a tenth of the time: only operations that it would change are traced.

    These are the ones that may return a view of an operand, such as `reshape` and `to`. None is returned for a program
    whose operations write to inputs, constants or tensors with views, run graphs or are functions of torch.func; for
    one from an archive, as tracing it again shows whether its shapes fit together; and for one whose dtypes are not
    those that it computes, as torch.export leaves it in autocast.
    """
    from_archive = "inline_constraints" not in traced.graph_module.meta  # which torch.export notes
    if from_archive or any(_nests(node) or len(set(_product_dtypes(node))) > 1 for node in traced.graph.nodes):
        return None
    writes = any(map(_writes, traced.graph.nodes))
    program = editable(traced, functional=not writes)
    inliner = _Inliner(program)
    for node in list(program.graph.nodes):
        if isinstance(node.meta.get("val"), torch.SymInt):
            replace_node(program, node, inliner.first_of_size(node))
        elif _may_be_a_view(node) and not inliner.inline(node):
            return None
    if not writes:
        return program
    _return_what_is_written(program)
    return None if any(map(_writes, program.graph.nodes)) else editable(program, functional=True)


def _may_be_a_view(node: Node) -> bool:
    """Whether an operation is made of others, and not one that `run_decompositions` keeps."""
    return isinstance(node.target, OpOverload) and is_composite(node.target) and not is_preserved(node.target)


def _nests(node: Node) -> bool:
    """Whether a node has an inner graph, or is what `torch.func.vmap` leaves: a function that is no operator."""
    if node.op == "get_attr" or isinstance(node.target, HigherOrderOperator):
        return True
    if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.target is not operator.getitem:
        return isinstance(node.meta.get("val"), torch.Tensor)
    return False


def _writes(node: Node) -> bool:
    """Whether a node writes to a tensor, or makes one of a constant that others may write to."""
    lifts = node.target in (aten.lift_fresh.default, aten.lift_fresh_copy.default)
    return lifts or (isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable)


def _return_what_is_written(program: ExportedProgram) -> None:
    """Make `mul(x, y)` of `x.mul_(y)`, in place, which all that follows reads; likewise of other operations.

    A write stays where x is an input or a constant, where it has another name, such as a view, or where the result has
    another dtype.
    """
    before: set[Node] = set()
    for node in list(program.graph.nodes):
        before.add(node)
        functional, x = _functional(node), next(iter(node.all_input_nodes), node)
        if node.target is aten.lift_fresh_copy.default:
            node.target = aten.clone.default
        elif node.target is aten.detach_.default:  # it writes nothing: the result is its operand
            replace_node(program, node, x)
            program.graph.erase_node(node)
            continue
        if functional is None or any(map(_may_alias, [x, *(before & set(x.users) - {node})])):
            continue
        with program.graph.inserting_before(node):
            new = add_call(program.graph, functional, *node.args, like=node, **node.kwargs)
        if new.meta["val"].dtype == x.meta["val"].dtype:
            before.add(new)
            replace_node(program, node, new)
            replace_node(program, x, new, lambda user: user not in before)
        program.graph.erase_node(node if new in before else new)


def _functional(node: Node) -> OpOverload | None:
    """Return the operation that returns what this one writes to its first operand; None if there is none."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).name.endswith("_"):
        return None
    namespace, name = schema_of(node.target).name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, schema_of(node.target).overload_name or "default", None)


def _may_alias(node: Any) -> bool:
    """Whether a node may return an operand, or a view of one."""
    if node.target is operator.getitem:  # torch.export writes one for each item
        return _may_alias(node.args[0])
    if not isinstance(node.target, OpOverload):
        return True
    return any(each.alias_info is not None for each in schema_of(node.target).returns)


class _Inliner:
    """Writes operations of a program as those that they are made of."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._traced: dict[str, Graph] = {}  # by operation, and facts about its operands
        self._sizes: dict[object, Node] = {}
        first = next(node for node in program.graph.nodes if node.op != "placeholder")
        with program.graph.inserting_before(first):
            for node in user_inputs(program):
                for axis, size in enumerate(node.meta["val"].shape):
                    if isinstance(size, torch.SymInt):
                        self.first_of_size(add_call(program.graph, aten.sym_size.int, node, axis, like=node))

    def first_of_size(self, node: Node) -> Node:
        """Return the first node that computes the size which this one computes."""
        return self._sizes.setdefault(node.meta["val"].node.expr, node)

    def inline(self, node: Node) -> bool:
        """Write an operation as others; return False where these write to tensors, or it returns none."""
        if not any(isinstance(value, FakeTensor) for value in pytree.tree_leaves(node.meta.get("val"))):
            return False
        made = self._trace(node)
        if any(_writes(each) or _nests(each) for each in made.nodes):
            return False
        now: dict[Any, Node] = dict(zip(made.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
        with self._program.graph.inserting_before(node):
            for each in [each for each in made.nodes if each.op == "call_function"]:
                copied = self._program.graph.node_copy(each, now.__getitem__)
                copied.meta = {**node.meta, "val": each.meta["val"]}
                is_size = isinstance(each.meta["val"], torch.SymInt)
                now[each] = self.first_of_size(copied) if is_size else copied
        result: Any = made.output_node().args[0]
        if isinstance(result, Node):
            replace_node(self._program, node, now[result])
            self._program.graph.erase_node(node)  # torch keeps dropout, which may be random
        else:
            for item in list(node.users):
                replace_node(self._program, item, now[result[item.args[1]]])
        return True

    def _trace(self, node: Node) -> Graph:
        operands = node.all_input_nodes

        def call(*values: Any) -> Any:
            given = dict(zip(operands, values, strict=True))
            args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
            assert callable(node.target)
            return node.target(*args, **kwargs)

        key = call_key(node)
        if key not in self._traced:
            values = [operand.meta["val"] for operand in operands]
            shown = pytree.tree_leaves((values, node.meta["val"]))  # an operation may make a tensor of sizes alone
            mode: Any = next(value.fake_mode for value in shown if isinstance(value, FakeTensor))
            with torch.no_grad(), mode, enable_python_dispatcher():
                self._traced[key] = make_fx(call)(*values).graph
        return self._traced[key]


# ---- refusals ----


_PRODUCTS = (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default)


def _refuse_mixed_products(program: ExportedProgram) -> None:
    """Fail for products of tensors of several dtypes, which torch exports, and refuses to compute.

    Raises:
        UserError: There is one.
    """
    for node in program.graph.nodes:
        dtypes = _product_dtypes(node)[1:]
        if len(set(dtypes)) > 1:
            raise UserError(
                "the model's graph", f"the product {node.name} has operands of several dtypes",
                got=" and ".join(map(dtype_name, dtypes)), expected="one dtype",
                fix="Export the model with inputs in the dtype of its weights, or cast them in it.",
            )  # fmt: skip


def _product_dtypes(node: Node) -> list[torch.dtype]:
    """Return the dtypes of a matrix product and of its operands; empty for other nodes."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)] if node.target in _PRODUCTS else []
    return [value.dtype for value in values if isinstance(value, torch.Tensor)]


def _register_written_constants(program: ExportedProgram) -> None:
    """Make buffers of constants that are written to: as such torch.export may take the caches of transformers."""
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        written = any(isinstance(user.target, OpOverload) and schema_of(user.target).is_mutable for user in node.users)
        if written and spec.kind == InputKind.CONSTANT_TENSOR:
            spec.kind, spec.persistent = InputKind.BUFFER, False
