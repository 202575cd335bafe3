"""Run an ExportedProgram in torch on flat, named inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
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
        self._module = program.module(check_guards=False)
        self._devices = {name: tensor.device for name, tensor in example_inputs(program).items()}

    def __call__(self, inputs: dict[str, torch.Tensor], visit: Visit | None = None) -> list[torch.Tensor]:
        """Return the tensor outputs, in order, for inputs by name.

        Args:
            inputs: The tensor inputs.
            visit: Receives the name and the value of each node, and returns the value to go on with.
        """
        program = self._program
        leaves, spec = pytree.tree_flatten(program.example_inputs)
        own = {name: inputs[name].to(device, copy=True) for name, device in self._devices.items()}
        values = _flat_arguments(program, leaves, own)
        state = {tensor: tensor.clone() for tensor in (tensor_of(program, name) for name in written_tensors(program))}
        with torch.no_grad():
            try:
                if visit is None:
                    args, kwargs = pytree.tree_unflatten(values, spec)
                    result = self._module(*args, **kwargs)
                else:
                    assert isinstance(self._module, GraphModule)
                    names = _own_names(program, self._module)
                    result = _Visited(self._module, names, visit).run(*values, enable_io_processing=False)
            finally:
                for tensor, value in state.items():
                    tensor.copy_(value)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _own_names(program: ExportedProgram, module: GraphModule) -> dict[Node, str]:
    """Return the names that nodes of a program's module have in the program.

    The module has another for an input that is called as a function of Python is, such as `input`.
    """
    graphs = (module.graph, program.graph)
    mine, own = ([node for node in graph.nodes if node.op == "call_function"] for graph in graphs)
    # Behind them the module writes what it has changed to buffers and inputs.
    names = {node: known.name for node, known in zip(mine, own, strict=False)}
    return names | {node: str(node.target) for node in module.graph.find_nodes(op="placeholder")}


class _Visited(Interpreter):
    """Runs a graph node by node and shows each value, by the name in `names`, to a visitor."""

    def __init__(self, module: GraphModule, names: dict[Node, str], visit: Visit) -> None:
        super().__init__(module)
        self._names, self._visit = names, visit

    def run_node(self, node: Node) -> Any:
        return self._visit(self._names.get(node, node.name), super().run_node(node))
