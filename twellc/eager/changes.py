"""Changes of a model by `optimize` and `restore`: each can be undone until the last one is done.

The caller opens an `ExitStack`. Each function here pushes the callback that undoes its change, and then makes the
change. Once nothing can fail any more, the caller drops the callbacks by `pop_all`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from twellc.eager.fp8_linear import Fp8Linear
from twellc.eager.mixed import (
    BlockModule,
    ContainerModule,
    Mixed,
    Projection,
    TakenBlock,
    TrainedModule,
    class_with,
    forms_of,
    inner_modules,
    original_class,
    taken_by,
)
from twellc.eager.module_blocks import FoundBlock, functions_of
from twellc.eager.sharded import local_of
from twellc.eager.training_block import BlockInTraining
from twellc.passes.report import Layer
from twellc.plugins.block import BlockOptions
from twellc.plugins.fp8 import Fp8


def taken_in(module: nn.Module) -> list[tuple[str, nn.Module, TakenBlock]]:
    """Return the blocks of a module that the ops compute, each with its submodule and the submodule's path."""
    return [
        (path, submodule, block)
        for path, submodule in module.named_modules()
        if isinstance(submodule, Mixed)
        for block in taken_by(submodule)
    ]


def take(found: FoundBlock, layer: Layer, options: BlockOptions, training: bool, undo: ExitStack) -> None:
    """Let a submodule compute a block by the op."""
    submodule, weights = found.module, found.weights
    assert weights is not None
    for operand in weights.named().values():
        parameter = operand.parameter(submodule)
        if operand.transposed and parameter is not None and not training:
            store(local_of(parameter), by_neuron=True, undo=undo)
    argument = next(iter(inspect.signature(submodule.forward).parameters.values()))
    parts: tuple[str, ...] = ()
    mixed_in: type[Mixed] = TrainedModule if training else BlockModule
    if found.is_written_out:
        parts, mixed_in = (weights.w_up.layer, weights.w_down.layer, *functions_of(submodule)), ContainerModule
        for part in parts[:2]:
            _mix(submodule._modules[part], Projection, undo)
    block = TakenBlock(
        layer=layer,
        weights=weights,
        options=options,
        argument=argument.name if argument.kind is argument.POSITIONAL_OR_KEYWORD else "",
        ranks=found.ranks,
        forms=forms_of(inner_modules(submodule, parts)),
        training=BlockInTraining(options, layer.d_ff) if training else None,
        parts=parts,
        inner=found.block.module.removeprefix(found.path).lstrip("."),
    )
    _mix(submodule, mixed_in, undo, (*taken_by(submodule), block))


def take_off(module: nn.Module, undo: ExitStack) -> list[tuple[nn.Module, TakenBlock]]:
    """Give every submodule its own class again, and return the blocks that the ops computed; leave weights alone."""
    taken = [(submodule, block) for _, submodule, block in taken_in(module)]
    for submodule in module.modules():
        if isinstance(submodule, Mixed):
            _become(submodule, original_class(submodule) or type(submodule), (), undo)
    return taken


def store_as_usual(taken: list[tuple[nn.Module, TakenBlock]], undo: ExitStack) -> None:
    """Give the weights of blocks that ran for inference their usual strides again."""
    for submodule, block in taken:
        for operand in block.weights.named().values():
            parameter = operand.parameter(submodule)
            if operand.transposed and parameter is not None and block.training is None:
                store(local_of(parameter), by_neuron=False, undo=undo)


def compress(submodule: nn.Module, block: TakenBlock, compression: int, undo: ExitStack) -> None:
    """Give a block that the op runs another compression factor."""
    options = replace(block.options, compression=compression)
    if block.training is not None:
        undo.callback(setattr, block.training, "options", block.training.options)
        block.training.options = options
    blocks = tuple(replace(each, options=options) if each is block else each for each in taken_by(submodule))
    _become(submodule, type(submodule), blocks, undo)


def put_in_fp8(found: FoundBlock, made: Mapping[str, Fp8], undo: ExitStack) -> None:
    """Let the linear layers of a block hold FP8 weights and scales made from theirs; see `quantised`."""
    for path, matrix in made.items():
        layer: Any = found.module.get_submodule(path)
        undo.callback(Fp8Linear.give_back, layer, layer.weight)
        Fp8Linear.take_over(layer, matrix)


def _mix(module: Any, mixed_in: type[Mixed], undo: ExitStack, blocks: tuple[TakenBlock, ...] | None = None) -> None:
    """Mix a class into that of a module, unless it is there, and set the blocks to compute; None keeps them."""
    kind = type(module)
    if not isinstance(module, mixed_in):
        kind = class_with(mixed_in, kind)  # type: ignore[arg-type]
    _become(module, kind, taken_by(module) if blocks is None else blocks, undo)


def _become(module: nn.Module, kind: type[nn.Module], blocks: tuple[TakenBlock, ...], undo: ExitStack) -> None:
    undo.callback(_set, module, type(module), taken_by(module))
    _set(module, kind, blocks)


def _set(module: nn.Module, kind: type[nn.Module], blocks: tuple[TakenBlock, ...]) -> None:
    if blocks:
        vars(module)["_twellc"] = blocks
    else:
        vars(module).pop("_twellc", None)
    module.__class__ = kind


# ---- strides ----


def store(matrix: Tensor, *, by_neuron: bool, undo: ExitStack) -> None:
    """Store a weight [..., d_out, d_ff] of a down projection so that its transpose is contiguous, or itself is.

    It stays in shared memory if it is there. The undo needs no second copy of the weight.
    """
    before = matrix.data
    data = before.mT.contiguous().mT if by_neuron else before.contiguous()
    if data.stride() == before.stride():
        return
    if type(data) is Tensor and data.device.type == "cpu" and before.is_shared():  # type: ignore[no-untyped-call]
        data.share_memory_()  # type: ignore[no-untyped-call]
    if before.is_contiguous() or before.mT.is_contiguous():
        undo.callback(_store_back, matrix, before.stride())
    else:  # a part of another tensor
        undo.callback(setattr, matrix, "data", before)
    matrix.data = data


@torch.no_grad()
def _store_back(matrix: Tensor, stride: tuple[int, ...]) -> None:
    """Give a matrix its old strides, in the memory that it has, as the device may have no other left."""
    data = matrix.data
    if data.stride() != stride:
        values = data.to("cpu", copy=True)
        matrix.data = data.as_strided(data.shape, stride).copy_(values)
