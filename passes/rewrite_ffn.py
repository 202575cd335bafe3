"""Replace feed-forward blocks by `twell` ops.

    before   x ─┬─ linear(Wg, bg) ─ relu ─┬─ mul ─ linear(Wd [d_out, d_ff], bd) ─ y
                └─ linear(Wu, bu) ────────┘
    after    x ─ twell.gated_mlp(Wg [d_ff, d_model], bg, Wu [d_ff, d_model], bu, Wd' [d_ff, d_out], bd, residual) ─ y

A block with a residual takes in the Add behind y, and stands in its place.
Wd' is Wd transposed, a new parameter: the kernels read the weights of one neuron as one row. A parameter that nothing
reads any more is dropped from the program. Where neurons are moved or removed (see `neurons.py`), all weights and the
biases of gate and up are new parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.program import add_parameter, editable, finish, replace_node, tensor_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Linear, Weight
from twellc.plugins.ops import GATED_MLP, MLP


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


def arranged_copy(tensor: torch.Tensor, weight: Weight, in_out: bool) -> tuple[str, torch.Tensor]:
    """Return what `arranged_view` does as a copy in any case: a slice would keep the packed weight alive."""
    suffix, view = arranged_view(tensor, weight, in_out)
    return suffix, view.clone(memory_format=torch.contiguous_format)


def rewrite_ffn(
    program: ExportedProgram,
    blocks: list[FfnBlock],
    compression: int | Sequence[int],
    hot: Sequence[int] = (),
    neurons: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> ExportedProgram:
    """Return the program with blocks rewritten.

    Args:
        program: A canonical program.
        blocks: Some of those found in it, without a refusal.
        compression: The TwELL compression factor, 1, 2, 4 or 8, or that of each block.
        hot: Of each block how many neurons, the first ones, calls with many tokens compute densely; if empty, none.
        neurons: Of a block, by its module, the neurons to keep in their new order, int64 [kept]; without an entry all
            stay where they are.
    """
    rewritten = editable(program)
    nodes: dict[str, Node] = {node.name: node for node in rewritten.graph.nodes}
    arranged: dict[tuple[Weight, bool], Node] = {}

    def arrange(weight: Weight, in_out: bool, order: torch.Tensor | None) -> Node:
        """Return the placeholder that holds the weight stored [in, out] or [out, in], as asked, neurons in `order`."""
        placeholder = nodes[weight.node.name]
        as_it_is = weight.in_out == in_out and weight.rows is None and placeholder.meta["val"].dim() <= 2
        if as_it_is and order is None:
            return placeholder
        if order is None and (weight, in_out) in arranged:
            return arranged[weight, in_out]
        stored = tensor_of(rewritten, weight.name).detach()
        if order is None:
            suffix, copied = arranged_copy(stored, weight, in_out)
        else:
            suffix, view = arranged_view(stored, weight, in_out)
            suffix, copied = f"{'' if as_it_is else suffix}_arranged", view.index_select(0, order)
        made = add_parameter(rewritten, f"{weight.name}{suffix}", copied, like=placeholder)
        if order is None:
            arranged[weight, in_out] = made
        return made

    def bias(linear: Linear, order: torch.Tensor | None) -> Node | None:
        # A vector is stored neither way round.
        return None if linear.bias is None else arrange(linear.bias, in_out=False, order=order)

    compressions = [compression] * len(blocks) if isinstance(compression, int) else compression
    for block, block_compression, block_hot in zip(blocks, compressions, hot or [0] * len(blocks), strict=True):
        assert not block.refusal and block.up is not None
        down, up, gate = block.down, block.up, block.gate
        anchor, order = nodes[block.y.name], neurons.get(block.module)
        operands: list[Node | None] = [nodes[block.x.name]]
        for linear in (gate, up) if gate else (up,):
            operands += [arrange(linear.weight, False, order), bias(linear, order)]
        operands += [arrange(down.weight, True, order), bias(down, None)]
        operands.append(nodes[block.residual.other.name] if block.residual else None)
        options = (block.activation, block.threshold, block_compression, block_hot)
        with rewritten.graph.inserting_before(anchor):
            op = rewritten.graph.call_function(GATED_MLP if gate else MLP, (*operands, *options))
        # It is named after the block also where it takes the place of a sum behind it.
        op.meta = {**nodes[down.node.name].meta, "val": anchor.meta["val"]}
        replace_node(rewritten, anchor, op)
        nodes[anchor.name] = op  # what a later block may read as its x
    return finish(rewritten)
