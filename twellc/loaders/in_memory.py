"""Models in memory: modules with example inputs, and programs of torch.export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from twellc.base.changes import Changed
from twellc.base.dtypes import torch_dtype
from twellc.base.errors import UserError, first_line
from twellc.base.torch_private import OptimizedModule, guards_of, pytree, set_guards
from twellc.eager.optimization import optimized_blocks
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.loaders.precision import choose_dtype
from twellc.loaders.switch import with_stacked_experts
from twellc.loaders.tracing import paths_of, trace
from twellc.options.source import Example, TracingOptions
from twellc.passes.graph.device import Moved, devices_of, on_device
from twellc.passes.graph.program import editable, quiet_torch
from twellc.passes.match.shared_axis import Part
from twellc.passes.pipeline import PassOptions, Rewritten, run_passes
from twellc.passes.sizes.conditions import guarded_inputs

_CPU = torch.device("cpu")
IN_MEMORY = "ExportedProgram in memory"


def rewrite_model(
    options: TracingOptions, model: LoadedModel, layers: str, compression: int | None, linear: str, part: Part
) -> Rewritten:
    """Run the passes over a model; see `twellc.rewrite`."""
    chosen, _ = choose_dtype(model, options.dtype)
    wanted = PassOptions(torch_dtype(chosen), layers, compression, linear=linear, part=part)
    (device,) = devices_of(model.program) or {_CPU}
    if device == _CPU:
        return run_passes(model.program, wanted)
    rewritten = run_passes(on_device(model.program, _CPU, {}), wanted)
    moved: Moved = {}
    dense, program = (on_device(each, device, moved) for each in (rewritten.dense, rewritten.program))
    return dataclasses.replace(rewritten, dense=dense, program=program)


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
    for called, node in guarded_inputs(program).items():
        set_guards(program, [text.replace(called, f"L['{node.name}']") for text in guards_of(program)])
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
        UserError: It is neither, lacks example inputs or has others than torch.export takes, is in training mode, lies
            on several devices, or cannot be traced.
    """
    name = type(model).__name__
    _check_example(example)
    given = bool(example.args or example.kwargs)
    if isinstance(model, ExportedProgram):
        if given or example.dynamic_shapes is not None:
            raise UserError("args, kwargs, dynamic_shapes", "only a module needs example inputs", got=name)
        _refuse_devices(name, devices_of(model))
        return model
    if not isinstance(model, torch.nn.Module):
        raise UserError("model", "is not a model", got=name, expected="a path, an ExportedProgram or a torch.nn.Module")
    if isinstance(model, _WRAPPERS):
        raise UserError(name, "is a wrapper around a module", fix=f"Pass the module itself: {_inner(model)}.")
    if type(model).__module__.startswith("peft."):
        raise UserError(name, "holds adapters beside the weights", fix="Pass what its merge_and_unload() returns.")
    if not given:
        raise UserError(
            name, "a module needs example inputs", fix="Pass args=(…,) or kwargs={…}, as for torch.export.export."
        )
    if any(each.training for each in model.modules()):
        raise UserError(name, "is in training mode", fix="Call its eval() first.")
    if optimized_blocks(model):
        raise UserError(name, "calls twell ops already", fix="Call twellc.restore on it, or on the original, first.")
    stored = (*model.parameters(), *model.buffers())
    inputs = [leaf for leaf in pytree.tree_leaves((example.args, example.kwargs)) if isinstance(leaf, torch.Tensor)]
    _refuse_devices(name, {tensor.device for tensor in (*stored, *inputs)})
    with cache_switched_off(model):
        stacked = with_stacked_experts(name, model)
        return trace(name, stacked, example.args, dict(example.kwargs or {}), example.dynamic_shapes)


_WRAPPERS = (OptimizedModule, torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def _inner(wrapper: torch.nn.Module) -> str:
    return "its _orig_mod" if isinstance(wrapper, OptimizedModule) else "its module"


def _check_example(example: Example) -> None:
    """Fail if example inputs are not of the kinds that torch.export takes."""
    if not isinstance(example.args, tuple):
        raise UserError(
            "args",
            "are not a tuple",
            got=type(example.args).__name__,
            expected="a tuple of the positional inputs",
            fix="Write args=(x,) for one input." if isinstance(example.args, torch.Tensor) else "",
        )
    if example.kwargs is not None and not isinstance(example.kwargs, Mapping):
        raise UserError(
            "kwargs", "is not a dictionary", got=type(example.kwargs).__name__, expected="the inputs by name"
        )


def _refuse_devices(name: str, devices: set[torch.device]) -> None:
    """Fail if tensors lie on several devices, or hold no values."""
    if torch.device("meta") in devices:
        raise UserError(name, "has tensors on the meta device, which hold no values", fix="Load its weights first.")
    if len(devices) > 1:
        what = "lies on several devices, or its example inputs on another one"
        fix = 'Call its to("cpu") first.'
        raise UserError(name, what, got=", ".join(sorted(map(str, devices))), expected="one device", fix=fix)


def cache_switched_off(model: torch.nn.Module) -> Changed:
    """Let a model of transformers return no key-value cache, as long as it is traced."""
    configs = {id(config): config for each in model.modules() if (config := getattr(each, "config", None)) is not None}
    return Changed(*((config, "use_cache", False) for config in configs.values() if hasattr(config, "use_cache")))
