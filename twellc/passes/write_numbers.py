"""Write constants of one number as numbers, which a graph holds for `torch.tensor(0.0)` in the code.

before   maximum(x, c),  c a stored tensor of no dimension          x > t,  t a stored vector of equal numbers
after    maximum(x, full([], 0.0))                                  x > full([], 0.25)

Refused: a parameter or buffer keeps its place but where it is compared with or chosen; a vector also does if it gives
the result its shape or dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from twellc.passes.graph.program import constants_of, editable, finish, replace_node, tensor_of
from twellc.passes.match.activations import packet
from twellc.passes.match.linear import same_sizes

aten = torch.ops.aten

# What a ReLU may be made of.
_CHOOSING = frozenset(
    (aten.gt, aten.ge, aten.lt, aten.le, aten.maximum, aten.minimum, aten.fmax, aten.fmin, aten.max, aten.min,
     aten.clamp, aten.clamp_min, aten.clamp_max, aten.where, aten.masked_fill, aten.index_put, aten.heaviside)
)  # fmt: skip
_MOST_NUMBERS = 1 << 17


def write_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return the program with constants of one number as `aten.full`; itself where it has none."""
    if next(_numbers(program), None) is None:
        return program
    program = editable(program)
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    for node, number, readers in list(_numbers(program)):
        value = node.meta["val"]
        with program.graph.inserting_before(first):
            full = program.graph.call_function(
                aten.full.default, ([], number), {"dtype": value.dtype, "device": value.device}
            )
        full.meta = {**node.meta, "val": value if value.dim() == 0 else value.flatten()[0]}
        for reader in readers:
            if packet(reader) is aten.clone:
                replace_node(program, reader, full)
        replace_node(program, node, full, where=readers.__contains__)
    return finish(program)


def _numbers(program: ExportedProgram) -> Iterator[tuple[Node, float, set[Node]]]:
    """Yield the constants of one number, the number, and the nodes to read that instead."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    for node, name in constants_of(program).items():
        value = node.meta["val"]
        if kinds[node.name] == InputKind.CONSTANT_TENSOR and value.dim() == 0 and value.is_floating_point():
            readers = set(node.users)
        else:
            readers = {user for user in node.users if _is_chosen(node, user)}
        if not readers or not 0 < value.numel() <= _MOST_NUMBERS:
            continue
        numbers = tensor_of(program, name).detach().flatten()
        if bool((numbers == numbers[0]).all()):
            yield node, numbers[0].item(), readers


def _is_chosen(constant: Node, user: Node) -> bool:
    """Whether an operation compares with a constant, or chooses it, and has its shape and dtype from another tensor."""
    value, result = constant.meta["val"], user.meta.get("val")
    if value.dtype == torch.bool or not isinstance(result, torch.Tensor):
        return False
    if packet(user) is aten.clone:
        return value.dim() == 0 and any(_is_chosen(user, reader) for reader in user.users)
    if packet(user) not in _CHOOSING or constant not in user.args:
        return False
    if value.dim() == 0:
        return packet(user) is not aten.index_put or user.args[0] is not constant
    others = [other.meta.get("val") for other in user.all_input_nodes if other is not constant]
    return any(
        isinstance(other, torch.Tensor) and other.dtype == value.dtype and same_sizes(other.shape, result.shape)
        for other in others
    )
