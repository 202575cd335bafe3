"""Models in memory: modules with example inputs, and programs of torch.export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

from twellc.base.dtypes import torch_dtype
from twellc.base.errors import UserError, first_line
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.loaders.precision import choose_dtype
from twellc.optimization import optimized_blocks
from twellc.options.declared_inputs import InputDeclaration
from twellc.passes.graph.program import quiet_torch
from twellc.passes.pipeline import Rewritten, run_passes

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


def rewrite_model(
    model: str | os.PathLike[str] | ExportedProgram | torch.nn.Module,
    example: Example,
    dtype: str | None,
    layers: str,
    compression: int,
    trust_model: bool,
    inputs: tuple[InputDeclaration, ...],
) -> Rewritten:
    """Run the passes over a model; see `twellc.rewrite`."""
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        if looks_like_onnx(path):
            raise UserError(str(path), "is an ONNX file, which has no program of torch", fix="Use twellc.compile.")
        loaded = load_model(path, trust_model, inputs)
    else:
        loaded = LoadedModel(Path(type(model).__name__), IN_MEMORY, exported(model, example), [])
    chosen, _ = choose_dtype(loaded, dtype)
    return run_passes(loaded.program, torch_dtype(chosen), layers, compression)


def save(model: ExportedProgram | torch.nn.Module, example: Example, folder: Path) -> Path:
    """Write a model into a torch.export archive in `folder`, named after its class, and return the path.

    Raises:
        UserError: It cannot be traced or saved.
    """
    program = exported(model, example)
    path = folder / f"{type(model).__name__}.pt2"
    try:
        with quiet_torch():
            torch.export.save(program, path)
    except Exception as error:  # torch raises what it likes for what it cannot write down
        raise UserError(type(model).__name__, f"torch.export.save cannot save it ({first_line(error)})") from error
    return path


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
