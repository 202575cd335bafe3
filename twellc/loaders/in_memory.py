"""Models in memory: modules with example inputs, and programs of torch.export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from twellc.base.dtypes import torch_dtype
from twellc.base.errors import UserError, first_line
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.loaders.precision import choose_dtype
from twellc.loaders.tracing import paths_of
from twellc.optimization import optimized_blocks
from twellc.options.source import TracingOptions
from twellc.passes.graph.program import editable, quiet_torch
from twellc.passes.pipeline import PassOptions, Rewritten, run_passes

IN_MEMORY = "ExportedProgram in memory"


class Example(Protocol):
    """Example inputs of a module, as torch.export takes them."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional ones."""

    @property
    def kwargs(self) -> Mapping[str, Any] | None:
        """Those by name."""

    @property
    def dynamic_shapes(self) -> Any:
        """Their dynamic dimensions."""


def rewrite_model(options: TracingOptions, model: LoadedModel, layers: str, compression: int | None) -> Rewritten:
    """Run the passes over a model; see `twellc.rewrite`."""
    chosen, _ = choose_dtype(model, options.dtype)
    return run_passes(model.program, PassOptions(torch_dtype(chosen), layers, compression))


def load_for_rewriting(options: TracingOptions) -> LoadedModel:
    """Load a model that has a program of torch.

    Raises:
        UserError: It has none, or see `load_model`.
    """
    if looks_like_onnx(options.model):
        raise UserError(str(options.model), "is an ONNX file, which has no program of torch", fix="Use twellc.compile.")
    return load_model(options)


def loaded(model: ExportedProgram | torch.nn.Module, example: Example) -> LoadedModel:
    """Return a model in memory as if it had been loaded; see `exported`."""
    return LoadedModel(Path(type(model).__name__), IN_MEMORY, exported(model, example), [])


def save(model: ExportedProgram | torch.nn.Module, example: Example, folder: Path) -> Path:
    """Write a model into a torch.export archive in `folder`, named after its class, and return the path.

    Raises:
        UserError: It cannot be traced or saved.
    """
    program = exported(model, example)
    path = folder / f"{type(model).__name__}.pt2"
    try:
        with quiet_torch():
            torch.export.save(_in_plain_containers(program), path)
    except Exception as error:  # torch raises what it likes for what it cannot write down
        raise UserError(type(model).__name__, f"torch.export.save cannot save it ({first_line(error)})") from error
    return path


def _in_plain_containers(program: ExportedProgram) -> ExportedProgram:
    """Return a program of the same tensors that takes and returns dictionaries: classes cannot be saved."""
    program = editable(program)
    call, *others = program.module_call_graph
    if call.signature is None or call.signature.out_spec is None:
        return program
    returned: dict[str | int, Any] = {}
    for path in paths_of(call.signature.out_spec):
        where = returned
        for part in path[:-1]:
            where = where.setdefault(part, {})
        where.update(dict.fromkeys(path[-1:], 0))
    specs = program.graph_signature.input_specs
    names = [spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT]
    signature = dataclasses.replace(
        call.signature,
        in_spec=pytree.tree_structure(((), dict.fromkeys(names, 0))),
        out_spec=pytree.tree_structure(returned or 0),
        forward_arg_names=None,
    )
    program._module_call_graph = [dataclasses.replace(call, signature=signature), *others]
    if program.example_inputs is not None:
        program.example_inputs = (), dict(zip(names, pytree.tree_leaves(program.example_inputs), strict=True))
    return program


def exported(model: ExportedProgram | torch.nn.Module, example: Example) -> ExportedProgram:
    """Return a module traced with its example inputs; of a program itself.

    Raises:
        UserError: It is neither, lacks example inputs or has too many, is in training mode, or cannot be traced.
    """
    name = type(model).__name__
    given = bool(example.args or example.kwargs)
    if isinstance(model, ExportedProgram):
        if given or example.dynamic_shapes is not None:
            raise UserError("args, kwargs, dynamic_shapes", "only a module needs example inputs", got=name)
        return model
    if not isinstance(model, torch.nn.Module):
        raise UserError("model", "is no model", got=name, expected="a path, an ExportedProgram or a torch.nn.Module")
    if not given:
        raise UserError(
            name, "a module needs example inputs", fix="Pass args=(…,) or kwargs={…}, as for torch.export.export."
        )
    if any(each.training for each in model.modules()):
        raise UserError(name, "is in training mode", fix="Call its eval() first.")
    if optimized_blocks(model):
        raise UserError(name, "calls twell ops already", fix="Call twellc.restore on it, or on the original, first.")
    try:
        with quiet_torch(), torch.no_grad():
            return torch.export.export(
                model, example.args, dict(example.kwargs or {}), dynamic_shapes=example.dynamic_shapes, strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )  # fmt: skip
    except Exception as error:  # torch.export raises what the module's code raises
        raise UserError(
            name, f"torch.export cannot trace the model ({first_line(error)})",
            fix="Check the example inputs; export it by hand and pass the ExportedProgram.",
        ) from error  # fmt: skip
