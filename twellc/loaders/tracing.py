"""Trace modules with torch.export, and what every traced program needs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from twellc.base.errors import UserError
from twellc.loaders.tracing_errors import refuse_assumptions, untraceable
from twellc.passes.graph.program import quiet_torch


def trace(
    path: Path,
    module: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    shapes: dict[str, dict[int, Any]],
    fix: str,
    fix_sizes: str,
) -> ExportedProgram:
    """Trace a module.

    Args:
        path: Where it came from, for the message.
        module: The module, in eval mode.
        inputs: Example inputs by parameter of `forward`.
        shapes: The dynamic dimensions (torch.export.Dim) of each input, by axis.
        fix: What to do where it cannot be traced.
        fix_sizes: What to do where it cannot since a dimension must not vary, or not so much.

    Raises:
        UserError: It cannot be traced.
    """
    try:
        with quiet_torch(), torch.no_grad():
            # Comparisons of two lengths (masks in T5) become assertions instead of constraints on the lengths.
            program = torch.export.export(
                module,
                (),
                inputs,
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except Exception as error:  # torch.export raises what the module's code raises
        raise untraceable(path, error, inputs, fix, fix_sizes) from error
    refuse_assumptions(path, program, fix_sizes)
    return program


def keep_tensor_outputs(path: Path, program: ExportedProgram) -> tuple[list[str], list[str]]:
    """Remove from a program, in place, what it returns besides tensors: None, sizes and other numbers.

    Args:
        path: Where it came from, for the message.
        program: The program as it was traced.

    Returns:
        The names of its tensor outputs, and a note on what was removed.

    Raises:
        UserError: It returns no tensor.
    """
    specs, output, names = program.graph_signature.output_specs, program.graph.output_node(), _output_names(program)
    results = [spec for spec in specs if spec.kind == OutputKind.USER_OUTPUT]
    kept = [name for name, spec in zip(names, results, strict=True) if isinstance(spec.arg, TensorArgument)]
    removed = [name for name in names if name not in kept]
    if not kept:
        raise UserError(str(path), "the model returns no tensor", expected="one at least")
    if not removed:
        return names, []
    stays = [spec.kind != OutputKind.USER_OUTPUT or isinstance(spec.arg, TensorArgument) for spec in specs]
    program.graph_signature.output_specs = list(itertools.compress(specs, stays))
    output.args = (tuple(itertools.compress(output.args[0], stays)),)
    program.graph_module.recompile()
    call = program.module_call_graph[0].signature
    assert call is not None
    call.out_spec = pytree.tree_structure(tuple(kept))
    return kept, [f"results of the model that are no tensors are left out of the plan: {', '.join(removed)}"]


def _output_names(program: ExportedProgram) -> list[str]:
    """Return the keys of a program that returns a dictionary or a model output, else `output` or numbered ones.

    Keys of a dictionary within another stand behind that one's: `text_model_output.pooler_output`.
    """
    spec = program.call_spec.out_spec
    count = len(program.graph_signature.user_outputs)
    if spec is not None and spec.num_leaves == count:
        paths = [path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(range(count), spec))[0]]
        names = [".".join(str(getattr(key, "key", "")) for key in path) for path in paths]
        in_dictionaries = all(
            isinstance(key, pytree.MappingKey) and isinstance(key.key, str) for path in paths for key in path
        )
        if all(names) and in_dictionaries and len(set(names)) == count:
            return names
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]
