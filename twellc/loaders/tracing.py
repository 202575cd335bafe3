"""Trace modules with torch.export, and what every traced program needs."""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)

from twellc.base.errors import UserError
from twellc.base.threads import uncollected
from twellc.base.torch_private import fx_config, pytree, without_notes
from twellc.export.names import distinct_outputs
from twellc.loaders.tracing_errors import untraceable
from twellc.passes.graph.program import quiet_torch, user_inputs
from twellc.passes.sizes.conditions import failing_assertions

_NUMBERS = (SymIntArgument, SymFloatArgument, SymBoolArgument)


def trace(
    name: str,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any,
    fix: str = "",
    fix_sizes: str = "Export the model at one size, and compile that archive.",
) -> ExportedProgram:
    """Trace a module.

    Args:
        name: What to call it in the message.
        module: The module, in eval mode.
        args: Example inputs.
        kwargs: Those by parameter of `forward`.
        shapes: The dynamic dimensions of each input, as torch.export takes them.
        fix: What to do where it cannot be traced, whatever the cause is; empty where there is no such advice.
        fix_sizes: What to do where it cannot since a dimension must not vary, or not so much.

    Raises:
        UserError: It cannot be traced.
    """
    try:
        with quiet_torch(), torch.no_grad(), uncollected(), without_notes():
            program = _export(module, args, kwargs, shapes)
            if failing_assertions(program):
                program = _without_strides(program, module, args, kwargs, shapes)
    except Exception as error:  # torch.export raises what the module's code raises
        raise untraceable(name, error, _named(module, args, kwargs), fix, fix_sizes) from error
    return program


def _export(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> ExportedProgram:
    # Comparisons of sizes (masks in T5) become assertions, which may be true of all of them; guards would raise.
    return torch.export.export(
        module, args, kwargs, dynamic_shapes=shapes, strict=False, prefer_deferred_runtime_asserts_over_guards=True
    )


def _without_strides(
    program: ExportedProgram, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> ExportedProgram:
    """Return a program traced again if fewer of its assertions fail.

    torch also asserts what it finds out for strides only, such as that a slice is not the whole. Traced so, it asks for
    less of them; but of many models that are right for all sizes it then asserts more.
    """
    try:
        with fx_config.patch(backed_size_oblivious=True):
            other = _export(module, args, kwargs, shapes)
    except Exception:  # as not every model can be traced so
        return program
    return min(program, other, key=lambda each: len(failing_assertions(each)))


def _named(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return example inputs by parameter of `forward`, as far as they fit it."""
    try:
        return dict(inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments)
    except TypeError:
        return kwargs


def keep_tensor_outputs(path: Path, program: ExportedProgram) -> tuple[list[str], list[str]]:
    """Remove from a program, in place, what it returns besides tensors: None, sizes and other numbers.

    Args:
        path: Where it came from, for the message.
        program: The program as it was traced.

    Returns:
        The names of its tensor outputs, each its own, and notes on what was removed and renamed.

    Raises:
        UserError: It returns no tensor, or takes a number that varies.
    """
    for spec in program.graph_signature.input_specs:
        if spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, _NUMBERS):
            what = f"input {spec.arg.name} is a number that varies from call to call"
            fix = "Let the model take it as a tensor of no dimensions, or trace it with the number fixed."
            raise UserError(str(path), what, expected="tensors", fix=fix)
    specs, output, names = program.graph_signature.output_specs, program.graph.output_node(), output_names(program)
    results = [spec for spec in specs if spec.kind == OutputKind.USER_OUTPUT]
    is_tensor = [isinstance(spec.arg, TensorArgument) for spec in results]
    kept = list(itertools.compress(names, is_tensor))
    removed = [name for name, tensor in zip(names, is_tensor, strict=True) if not tensor]
    if not kept:
        raise UserError(str(path), "the model returns no tensor", expected="one at least")
    distinct, notes = distinct_outputs([node.name for node in user_inputs(program)], kept)
    if not removed:
        return distinct, notes
    stays = [spec.kind != OutputKind.USER_OUTPUT or isinstance(spec.arg, TensorArgument) for spec in specs]
    program.graph_signature.output_specs = list(itertools.compress(specs, stays))
    output.args = (tuple(itertools.compress(output.args[0], stays)),)
    program.graph_module.recompile()
    call = program.module_call_graph[0].signature
    assert call is not None
    call.out_spec = pytree.tree_structure(tuple(kept))
    note = f"results of the model that are not tensors are left out of the plan: {', '.join(removed)}"
    return distinct, [note, *notes]


def output_names(program: ExportedProgram) -> list[str]:
    """Return a name for each result of a program: keys and fields of what it returns, else `output` or numbered ones.

    An inner result has the name of the outer one before its key, field or number:
    `text_model_output.pooler_output`, `hidden.0`.
    """
    spec = program.call_spec.out_spec
    count = len(program.graph_signature.user_outputs)
    paths: list[tuple[str | int, ...]] = [()] * count
    if spec is not None and spec.num_leaves == count:
        paths = paths_of(spec)
    numbered = ["output"] if count == 1 else [f"output_{i}" for i in range(count)]
    return [_name_of(path) or number for path, number in zip(paths, numbered, strict=True)]


def paths_of(spec: pytree.TreeSpec) -> list[tuple[str | int, ...]]:
    """Return the place of each leaf in a structure: keys, names of fields, and numbers."""
    leaves = pytree.tree_flatten_with_path(_plain(pytree.tree_unflatten(range(spec.num_leaves), spec)))[0]
    return [tuple(map(_part, path)) for path, _ in leaves]


def _plain(structure: Any) -> Any:
    """Return a structure with plain dicts for other ones: outputs of transformers before 5.13 tell torch no keys."""

    def plain(each: Any) -> Any:
        return {key: _plain(value) for key, value in each.items()} if isinstance(each, OrderedDict) else each

    return pytree.tree_map(plain, structure, is_leaf=lambda each: isinstance(each, OrderedDict))


def _part(key: Any) -> str | int:
    for attribute in ("key", "name", "idx"):  # of a mapping, of a class with fields, of a sequence
        if hasattr(key, attribute):
            part = getattr(key, attribute)
            return part if isinstance(part, int) else str(part)
    return ""


def _name_of(path: tuple[str | int, ...]) -> str:
    """Return the name of a result by its place; empty if that begins with a number, or a part says nothing."""
    named = bool(path) and not isinstance(path[0], int) and "" not in path
    return ".".join(map(str, path)) if named else ""
