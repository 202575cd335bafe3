"""Load a pickled torch.nn.Module, and trace it with the inputs that the user declares."""

from __future__ import annotations

import contextlib
import inspect
import pickletools
import zipfile
from dataclasses import replace
from pathlib import Path

import torch

from twellc.base.errors import UserError, first_few, first_line
from twellc.base.torch_private import OptimizedModule
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.tracing import keep_tensor_outputs, trace
from twellc.options.declared_inputs import InputDeclaration

# Sizes to trace dynamic dimensions with: all different, since torch.export gives equal sizes one symbol; not 1, which
# it would take for a constant.
_TRACED_SIZES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


def load_pickle(path: Path, trust_model: bool, inputs: tuple[InputDeclaration, ...]) -> LoadedModel:
    """Unpickle a module, which executes code of the file's author, and trace it.

    Raises:
        UserError: The file is not said to be trusted, it does not hold a module, or the inputs do not fit it.
    """
    _refuse_other_pickles(path)
    if not trust_model:
        fix = "If you trust its author, add --trust-model; or save the model with torch.export.save."
        raise UserError(str(path), "is a pickle, and loading a pickle executes code that is in the file", fix=fix)
    try:
        module = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # unpickling raises whatever the file's classes raise
        raise UserError(
            str(path),
            f"cannot be unpickled ({first_line(error)})",
            fix="The module's classes must be importable here: name the folder of their source in PYTHONPATH.",
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise _no_module(path, module)
    module, notes = _unwrapped(module)
    parameters = list(inspect.signature(module.forward).parameters)
    names = [declared.name for declared in inputs]
    if not inputs or not set(names) <= set(parameters) or len(set(names)) < len(names):
        raise UserError(
            "--input-spec",
            "a pickled module needs each of its inputs declared once",
            got=", ".join(names) or "none",
            expected=f"parameters of its forward: {', '.join(parameters)}",
            fix="For example --input-spec x:float32[batch,sequence,512].",
        )
    model = _trace(path, module.eval().requires_grad_(False), inputs)
    return replace(model, notes=notes + model.notes)


def _refuse_other_pickles(path: Path) -> None:
    """Fail for a file without a module, as far as that can be found out without executing its code.

    Raises:
        UserError: It holds an ExportedProgram, or tensors and plain values only.
    """
    if _first_class(path) == "torch.export.exported_program.ExportedProgram":
        fix = "Write it with torch.export.save(program, FILE), where it was made."
        raise UserError(str(path), "holds a program of torch.export that torch.save wrote", fix=fix)
    try:
        # Mapped, no weights are read, which a file of before torch 1.6 cannot be.
        content = torch.load(path, map_location="meta", mmap=zipfile.is_zipfile(path), weights_only=True)
    except Exception:  # anything that the restricted unpickler does not take
        return
    raise _no_module(path, content)


def _first_class(path: Path) -> str:
    """Return the class that the pickle of a zip archive names first, which is that of the pickled object."""
    # Of a damaged file zipfile and pickletools raise what they like; torch says of it what it is.
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        record = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        for operation, argument, _ in pickletools.genops(archive.read(record)):
            if operation.name == "GLOBAL":
                return str(argument).replace(" ", ".")
    return ""


def _no_module(path: Path, content: object) -> UserError:
    tensors = isinstance(content, dict) and any(isinstance(value, torch.Tensor) for value in content.values())
    got = "weights by their names" if tensors else type(content).__name__
    if isinstance(content, dict) and not tensors:
        got = f"a dict of {first_few(list(content))}"
    fix = "Weights do not say what to compute: load them into the module, and save that with torch.export.save."
    return UserError(str(path), "holds no module", got=got, expected="a pickled torch.nn.Module", fix=fix)


def _unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
    """Return a module without what torch.compile and DataParallel put around it and its parts, and a note on that."""
    found = set()

    def inner(module: torch.nn.Module) -> torch.nn.Module:
        while isinstance(module, OptimizedModule | torch.nn.DataParallel):
            compiled = isinstance(module, OptimizedModule)
            found.add("torch.compile" if compiled else "DataParallel")
            module = module.get_submodule("_orig_mod" if compiled else "module")
        for name, child in module.named_children():
            part = inner(child)
            if part is not child:
                setattr(module, name, part)
        return module

    bare = inner(module)
    return bare, [f"the module is taken without {' and '.join(sorted(found))}"] if found else []


def _trace(path: Path, module: torch.nn.Module, inputs: tuple[InputDeclaration, ...]) -> LoadedModel:
    dynamic = list(dict.fromkeys(dim for declared in inputs for dim in declared.shape if isinstance(dim, str)))
    if len(dynamic) > len(_TRACED_SIZES):
        raise UserError("--input-spec", "too many dynamic dimensions", got=str(len(dynamic)), expected="at most 10")
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
                "--input-spec",
                f"{declared.name} is too large to trace the model with",
                got="x".join(map(str, shape)),
                expected="a shape that fits into memory",
                fix="Declare large dimensions as dynamic, by a name.",
            ) from error
        shapes[declared.name] = {axis: dims[dim] for axis, dim in enumerate(declared.shape) if isinstance(dim, str)}
    fix = "Check the inputs' shapes and dtypes; declare a dimension with its size if it cannot vary."
    fix_sizes = "Declare each such dimension with its size, such as --input-spec x:float32[batch,128]."
    program = trace(str(path), module, (), examples, shapes, fix, fix_sizes)
    symbols = {}
    for node in program.graph.find_nodes(op="placeholder"):
        for axis, dim in shapes.get(node.name, {}).items():
            symbols[str(node.meta["val"].shape[axis])] = dim.__name__
    names, notes = keep_tensor_outputs(path, program)
    return LoadedModel(path, "pickled module", program, names, dimension_names=symbols, notes=notes)
