"""Replace feed-forward blocks by `twell` ops.

    before   x ─┬─ linear(Wg, bg) ─ relu ─┬─ mul ─ linear(Wd [d_out, d_ff], bd) ─ y
                └─ linear(Wu, bu) ────────┘
    after    x ─ twell.gated_mlp(Wg [d_ff, d_model], bg, Wu [d_ff, d_model], bu, Wd' [d_ff, d_out], bd, residual) ─ y

A block with a residual takes in the Add behind y, and takes its place; one with a norm reads what that reads.
Wd' is Wd transposed, a new parameter: the kernels read the weights of one neuron as one row. A parameter that nothing
reads any more is dropped from the program. Where neurons are moved or removed (see `neurons.py`), all weights and the
biases of gate and up are new parameters. So are matrices and scales of blocks that are read in FP8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.norm_vectors import NormVectors
from twellc.passes.graph.program import add_call, add_parameter, editable, finish, replace_node, tensor_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Weight
from twellc.passes.report import reads_fp8
from twellc.plugins.block import FLOAT32, SCALES, TENSORS, THRESHOLDS, BlockOptions, TensorField, WeightOperands
from twellc.plugins.ops import OPS

T = TypeVar("T")


def arranged_view(tensor: torch.Tensor, weight: Weight, in_out: bool) -> tuple[str, torch.Tensor]:
    """Return the part of `tensor` that `weight` means as [in, out] or [out, in], a view, and a suffix for its name."""
    suffix = ""
    if tensor.ndim > 2:  # such as a convolution's, with a kernel of size 1
        tensor, suffix = tensor.squeeze(), "_matrix"
    if weight.in_out:
        tensor = tensor.t()
    if weight.rows is not None:
        tensor, suffix = tensor[slice(*weight.rows)], suffix + "_{}_{}_{}".format(*weight.rows)
    if in_out:
        tensor, suffix = tensor.t(), f"{suffix}_transposed"
    return suffix or "_transposed", tensor


def arranged_copy(
    tensor: torch.Tensor, weight: Weight, in_out: bool, device: torch.device | None = None
) -> tuple[str, torch.Tensor]:
    """Return what `arranged_view` does as a copy in any case: a slice would keep the packed weight alive."""
    suffix, view = arranged_view(tensor, weight, in_out)
    return suffix, view.to(device or view.device).clone(memory_format=torch.contiguous_format)


def weights_of(block: FfnBlock, place: Callable[[Weight, TensorField], T]) -> WeightOperands[T]:
    """Return the weights and biases of a block, each as `place` gives it: the weight, and which tensor it is to be."""
    parts = {"gate": block.gate, "up": block.up, "down": block.down}
    stored = {f"w_{name}": part.weight for name, part in parts.items() if part is not None}
    stored |= {f"b_{name}": part.bias for name, part in parts.items() if part is not None and part.bias is not None}
    if block.thresholds is not None:
        stored[THRESHOLDS.name] = block.thresholds
    fields = (*TENSORS, THRESHOLDS)
    return WeightOperands(**{each.name: place(stored[each.name], each) for each in fields if each.name in stored})


_InFp8 = Callable[[FfnBlock, torch.Tensor | None], dict[str, torch.Tensor]]


def rewrite_ffn(
    program: ExportedProgram,
    rewrites: Sequence[tuple[FfnBlock, BlockOptions]],
    neurons: Mapping[str, torch.Tensor] = MappingProxyType({}),
    in_fp8: _InFp8 | None = None,
    device: torch.device | None = None,
) -> ExportedProgram:
    """Return the program with blocks rewritten.

    Args:
        program: A canonical program.
        rewrites: Some of the blocks found in it, without a refusal, and how each is to be computed.
        neurons: Of a block, by its module, the neurons to keep in their new order, int64 [kept]; without an entry all
            stay where they are.
        in_fp8: Returns the matrices and scales of a block whose weights are to be read in FP8, by name,
            their neurons in the order that is given; None where there are none.
        device: Where copies of weights are put, see `PassOptions`.
    """
    rewritten = editable(program)
    nodes: dict[str, Node] = {node.name: node for node in rewritten.graph.nodes}
    vectors, weights = NormVectors(rewritten), _Placeholders(rewritten, nodes, in_fp8, device)
    for block, options in rewrites:
        assert not block.refusal
        anchor = nodes[block.y.name]
        residual = nodes[block.residual.other.name] if block.residual else None
        order = neurons.get(block.module)
        matrices = weights.in_fp8(block, order)
        place = functools.partial(weights.arranged, order=order, matrices=matrices)
        operands = weights_of(block, place).of(nodes[(block.norm or block).x.name], residual)
        if block.norm is not None:
            weight, bias = (vectors.placeholder(each, block.dtype) for each in (block.norm.weight, block.norm.bias))
            operands = dataclasses.replace(operands, norm_weight=weight, norm_bias=bias)
        arguments = (*operands.arguments(), *options.arguments())
        by_name = {name: matrices[name] for name in SCALES if name in matrices} | operands.by_name()
        with rewritten.graph.inserting_before(anchor):
            # It is of the block's module also where it takes the place of a sum behind it.
            like = nodes[block.down.node.name]
            op = add_call(rewritten.graph, OPS[operands.variant], *arguments, like=like, **by_name)
        replace_node(rewritten, anchor, op)
        nodes[anchor.name] = op  # what a later block may read as its x
    return finish(rewritten)


class _Placeholders:
    """The placeholders that hold weights as the ops read them. Weights that blocks share have one."""

    def __init__(
        self,
        program: ExportedProgram,
        nodes: Mapping[str, Node],
        in_fp8: _InFp8 | None,
        device: torch.device | None,
    ) -> None:
        self._program, self._nodes, self._values_in_fp8, self._device = program, nodes, in_fp8, device
        self._arranged: dict[tuple[Weight, bool, torch.dtype], Node] = {}
        self._fp8: dict[tuple[Weight, ...], dict[str, Node]] = {}

    def in_fp8(self, block: FfnBlock, order: torch.Tensor | None) -> dict[str, Node]:
        """Return those of the matrices and scales of a block that is read in FP8, by name."""
        if not reads_fp8(block.weights):
            return {}
        assert self._values_in_fp8 is not None
        weights = weights_of(block, lambda weight, _: weight).named()
        key = tuple(weights.values())
        if order is None and key in self._fp8:
            return self._fp8[key]
        made: dict[str, Node] = {}
        for name, tensor in self._values_in_fp8(block, order).items():
            weight = weights[name.removesuffix("_scale")]
            suffix = "scale" if name in SCALES else "e4m3"
            like = self._nodes[weight.node.name]
            made[name] = add_parameter(self._program, f"{weight.name}_{suffix}", tensor, like=like)
        if order is None:
            self._fp8[key] = made
        return made

    def arranged(
        self, weight: Weight, role: TensorField, order: torch.Tensor | None, matrices: Mapping[str, Node]
    ) -> Node:
        """Return that of a weight as the op reads it, its neurons in `order`."""
        if role.name in matrices:
            return matrices[role.name]
        in_out, order = role.in_out, order if role.by_neuron else None
        placeholder = self._nodes[weight.node.name]
        value = placeholder.meta["val"]
        dtype = torch.float32 if role.name in FLOAT32 else value.dtype
        as_it_is = weight.in_out == in_out and weight.rows is None and value.dim() <= 2
        if as_it_is and order is None and value.dtype == dtype:
            return placeholder
        if order is None and (weight, in_out, dtype) in self._arranged:
            return self._arranged[weight, in_out, dtype]
        stored = tensor_of(self._program, weight.name).detach().to(dtype)
        if order is None:
            suffix, copied = arranged_copy(stored, weight, in_out, self._device)
        else:
            suffix, view = arranged_view(stored, weight, in_out)
            there = view.to(self._device or view.device)
            suffix, copied = f"{'' if as_it_is else suffix}_arranged", there.index_select(0, order.to(there.device))
        made = add_parameter(self._program, f"{weight.name}{suffix}", copied, like=placeholder)
        if order is None:
            self._arranged[weight, in_out, dtype] = made
        return made
