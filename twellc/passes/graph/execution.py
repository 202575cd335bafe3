"""Run an ExportedProgram in torch on flat, named inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter, Node

from twellc.base.torch_private import pytree
from twellc.passes.graph.program import tensor_of, user_inputs, written_tensors


def example_inputs(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensors that the program was traced with, by input name."""
    tensors = [leaf for leaf in pytree.tree_leaves(program.example_inputs) if isinstance(leaf, torch.Tensor)]
    return dict(zip((node.name for node in user_inputs(program)), tensors, strict=True))


def call_arguments(program: ExportedProgram, inputs: dict[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and named arguments of a program's module for tensor inputs by name."""
    leaves, spec = pytree.tree_flatten(program.example_inputs)
    args, kwargs = pytree.tree_unflatten(_flat_arguments(program, leaves, inputs), spec)
    return args, kwargs


def _flat_arguments(program: ExportedProgram, leaves: list[Any], inputs: dict[str, torch.Tensor]) -> list[Any]:
    tensors = iter(inputs[node.name] for node in user_inputs(program))
    return [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


Visit = Callable[[str, Any], Any]


class Runner:
    """Runs a program, which must not be changed meanwhile, any number of times.

    What the program writes to its inputs and buffers is undone: each run computes from the same values. Inputs are
    moved to where those are that it was traced with.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._devices = {name: tensor.device for name, tensor in example_inputs(program).items()}

    def __call__(self, inputs: dict[str, torch.Tensor], visit: Visit = lambda name, value: value) -> list[torch.Tensor]:
        """Return the tensor outputs, in order, for inputs by name.

        Args:
            inputs: The tensor inputs.
            visit: Receives the name and the value of each node, and returns the value to go on with.
        """
        program = self._program
        own = {name: inputs[name].to(device, copy=True) for name, device in self._devices.items()}
        given = iter(_flat_arguments(program, pytree.tree_leaves(program.example_inputs), own))
        stored = {**program.constants, **program.state_dict}
        specs = program.graph_signature.input_specs
        values = [next(given) if spec.kind == InputKind.USER_INPUT else stored[str(spec.target)] for spec in specs]
        state = {tensor: tensor.clone() for tensor in (tensor_of(program, name) for name in written_tensors(program))}
        with torch.no_grad():
            try:
                results = _Visited(program.graph_module, visit).run(*values, enable_io_processing=False)
            finally:
                for tensor, value in state.items():
                    tensor.copy_(value)
        outputs = zip(program.graph_signature.output_specs, results, strict=True)
        returned = [value for spec, value in outputs if spec.kind == OutputKind.USER_OUTPUT]
        return [value for value in returned if isinstance(value, torch.Tensor)]


class _Visited(Interpreter):
    """Runs a graph node by node and shows each value, by the name of its node, to a visitor."""

    def __init__(self, module: GraphModule, visit: Visit) -> None:
        super().__init__(module)
        self._visit = visit

    def run_node(self, node: Node) -> Any:
        return self._visit(node.name, super().run_node(node))
