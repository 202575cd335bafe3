"""Run an ExportedProgram in torch on flat, named inputs."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from twellc.passes.program import user_inputs


def example_inputs(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensors that the program was traced with, by input name."""
    tensors = [leaf for leaf in pytree.tree_leaves(program.example_inputs) if isinstance(leaf, torch.Tensor)]
    return dict(zip((node.name for node in user_inputs(program)), tensors, strict=True))


def run_program(program: ExportedProgram, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensor outputs of a program, in order, for inputs by name."""
    leaves, spec = pytree.tree_flatten(program.example_inputs)
    tensors = iter(inputs[node.name] for node in user_inputs(program))
    args, kwargs = pytree.tree_unflatten(
        [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
    )
    with torch.no_grad():
        result = program.module(check_guards=False)(*args, **kwargs)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
