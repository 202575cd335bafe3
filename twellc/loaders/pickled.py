"""Load a pickled torch.nn.Module, and trace it with the inputs that the user declares."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch

from twellc.base.errors import UserError, first_line
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.tracing import keep_tensor_outputs, trace
from twellc.options.declared_inputs import InputDeclaration

# Sizes to trace dynamic dimensions with: all different, since torch.export gives equal sizes one symbol; not 1, which
# it would take for a constant.
_TRACED_SIZES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


def load_pickle(path: Path, trust_model: bool, inputs: tuple[InputDeclaration, ...]) -> LoadedModel:
    """Unpickle a module, which executes code of the file's author, and trace it.

    Raises:
        UserError: The user has not said that the file is trusted, it holds no module, or the inputs do not fit it.
    """
    if not trust_model:
        raise UserError(
            str(path), "is a pickle, and loading a pickle executes code that is in the file",
            fix="If you trust whoever made it, add --trust-model; or save the model with torch.export.save.",
        )  # fmt: skip
    try:
        module = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling raises whatever the file's classes raise
        raise UserError(
            str(path), f"cannot be unpickled ({first_line(error)})",
            fix="The module's classes must be importable here: name the folder of their source in PYTHONPATH.",
        ) from error  # fmt: skip
    if not isinstance(module, torch.nn.Module):
        raise UserError(
            str(path), "holds no module", got=type(module).__name__, expected="a pickled torch.nn.Module",
            fix="Weights alone do not say what to compute: save the module with torch.export.save.",
        )  # fmt: skip
    parameters = list(inspect.signature(module.forward).parameters)
    names = [declared.name for declared in inputs]
    if not inputs or not set(names) <= set(parameters) or len(set(names)) < len(names):
        raise UserError(
            "--input", "a pickled module needs each of its inputs declared once",
            got=", ".join(names) or "none", expected=f"parameters of its forward: {', '.join(parameters)}",
            fix="For example --input x:float32[batch,sequence,512].",
        )  # fmt: skip
    return _trace(path, module.eval().requires_grad_(False), inputs)


def _trace(path: Path, module: torch.nn.Module, inputs: tuple[InputDeclaration, ...]) -> LoadedModel:
    dynamic = list(dict.fromkeys(dim for declared in inputs for dim in declared.shape if isinstance(dim, str)))
    if len(dynamic) > len(_TRACED_SIZES):
        raise UserError("--input", "too many dynamic dimensions", got=str(len(dynamic)), expected="at most 10")
    sizes = dict(zip(dynamic, _TRACED_SIZES, strict=False))
    dims = {name: torch.export.Dim(name, min=1) for name in dynamic}
    generator = torch.Generator().manual_seed(0)
    examples, shapes = {}, {}
    for declared in inputs:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in declared.shape]
        try:
            # Zeros and ones are valid token ids and masks in every model.
            values = torch.randint(0, 2, shape, generator=generator)
            if declared.dtype.startswith(("float", "bfloat")):
                values = torch.randn(shape, generator=generator)
            examples[declared.name] = values.to(getattr(torch, declared.dtype))
        except RuntimeError as error:
            raise UserError(
                "--input", f"{declared.name} is too large to trace the model with", got="x".join(map(str, shape)),
                expected="a shape that fits into memory", fix="Declare large dimensions as dynamic, by a name.",
            ) from error  # fmt: skip
        shapes[declared.name] = {axis: dims[dim] for axis, dim in enumerate(declared.shape) if isinstance(dim, str)}
    fix = "Check the inputs' shapes and dtypes; declare a dimension with its size if it cannot vary."
    program = trace(path, module, examples, shapes, fix)
    symbols = {}
    for node in program.graph.find_nodes(op="placeholder"):
        for axis, dim in shapes.get(node.name, {}).items():
            symbols[str(node.meta["val"].shape[axis])] = dim.__name__
    names, notes = keep_tensor_outputs(path, program)
    return LoadedModel(path, "pickled module", program, names, dimension_names=symbols, notes=notes)
