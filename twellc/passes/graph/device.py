"""Move a program to another device: the passes work on the CPU."""

from __future__ import annotations

import copy

import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import GraphModule

from twellc.passes.graph.program import editable

Moved = dict[int, tuple[torch.Tensor, torch.Tensor]]


def devices_of(program: ExportedProgram) -> set[torch.device]:
    """Return where the parameters and buffers of a program lie; where it has none, its inputs."""
    stored = [tensor for tensor in program.state_dict.values() if isinstance(tensor, torch.Tensor)]
    if stored:
        return {tensor.device for tensor in stored}
    values = (node.meta.get("val") for node in program.graph.find_nodes(op="placeholder"))
    return {value.device for value in values if isinstance(value, torch.Tensor)}


def on_device(program: ExportedProgram, device: torch.device, moved: Moved) -> ExportedProgram:
    """Return a copy of a program on another device: its tensors, and the devices that its graph names.

    Args:
        program: The program, which is not changed.
        device: Where to.
        moved: Tensors by their identity, with what they became; programs that share tensors share them afterwards.
    """
    program = editable(program)
    for name, inner in list(program.graph_module.named_children()):
        if isinstance(inner, GraphModule):
            setattr(program.graph_module, name, copy.deepcopy(inner))
    for tensors in (program.state_dict, program.constants):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor):
                there = tensor.detach().to(device)
                if isinstance(tensor, torch.nn.Parameter):
                    there = torch.nn.Parameter(there, tensor.requires_grad)
                tensors[name] = moved.setdefault(id(tensor), (tensor, there))[1]
    program = move_to_device_pass(program, device)
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:  # the pass writes names, which torch.export.save does not take
                node.args = tuple(device if argument == str(device) else argument for argument in node.args)
                node.kwargs = {
                    name: device if name == "device" and value is not None else value
                    for name, value in node.kwargs.items()
                }
            module.recompile()
    return program
