"""Replace linear layers outside of feed-forward blocks by `twell` ops.

    before   x ─ norm ─┬─ linear(Wq, bq) ─ q          x ─ linear(Wo, bo) ─ add ─ sum
                       ├─ linear(Wk, bk) ─ k                    other ─────┘
                       └─ linear(Wv, bv) ─ v
    after    x ─ twell.linear(W, b, norm) ─ q, k, v   x ─ twell.linear(Wo, bo, residual other) ─ sum

    before   x ─ norm ─ linear(W, b) ─ argmax ─ token
    after    x ─ twell.linear(W, b, norm, choose) ─ token

W [out, in] and b [out] are new parameters where several products are joined, a weight is stored [in, out], or is to be
read in FP8; else the model's own. So are a norm's weight and bias that are computed from others, as Gemma's
1 + w, or are in another dtype: they are rounded once to that of x. Nodes between a norm and a product come
before the norm then.

A parameter that nothing reads any more is dropped from the program. `find_linear.py` says which layers stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.norm_vectors import NormVectors
from twellc.passes.graph.program import add_call, add_parameter, editable, finish, infer, replace_node, tensor_of
from twellc.passes.match.find_linear import FoundLinear
from twellc.passes.match.linear import operand, width
from twellc.passes.rewrite_ffn import arranged_view
from twellc.plugins.fp8 import Fp8
from twellc.plugins.linear import LinearOperands
from twellc.plugins.linear_op import LINEAR


def rewrite_linear(
    program: ExportedProgram,
    layers: Sequence[FoundLinear],
    in_fp8: Callable[[FoundLinear], Fp8 | None] = lambda layer: None,
    device: torch.device | None = None,
) -> ExportedProgram:
    """Return the program with linear layers rewritten; itself where there are none.

    Args:
        program: A canonical program.
        layers: Some of those found in it.
        in_fp8: Returns the weight of a layer that is to be read in FP8, [out, in]; None of others.
        device: Where copies of weights are put, see `PassOptions`.
    """
    if not layers:
        return program
    rewritten = editable(program)
    writer = _Writer(rewritten, in_fp8, device)
    for each in layers:
        writer.write(each)
    return finish(rewritten)


class _Writer:
    """Writes layers into a copy of the program that they were found in."""

    def __init__(
        self, program: ExportedProgram, in_fp8: Callable[[FoundLinear], Fp8 | None], device: torch.device | None
    ) -> None:
        self._program, self._in_fp8, self._device = program, in_fp8, device
        self._nodes: dict[str, Node] = {node.name: node for node in program.graph.nodes}
        self._order = {node.name: index for index, node in enumerate(program.graph.nodes)}
        self._vectors = NormVectors(program)

    def write(self, layer: FoundLinear) -> None:
        """Replace a layer."""
        norm, graph = layer.norm, self._program.graph
        dtype = layer.x.meta["val"].dtype
        like = self._nodes[layer.linears[0].node.name]
        first = min(layer.outputs, key=lambda output: self._order[output.name])
        with graph.inserting_before(self._nodes[first.name]):
            weight, scale = self._weight(layer)
            operands = LinearOperands(
                x=self._x(layer),
                weight=weight,
                bias=self._bias(layer),
                norm_weight=None if norm is None else self._vectors.placeholder(norm.weight, dtype),
                norm_bias=None if norm is None else self._vectors.placeholder(norm.bias, dtype),
                residual=None if layer.residual is None else self._nodes[layer.residual.other.name],
            )
            splits = layer.widths if len(layer.outputs) > 1 else []
            options = ("none", 0.0) if norm is None else (norm.kind, norm.eps)
            chooses = layer.choice is not None
            scales = {} if scale is None else {"weight_scale": scale}
            call = add_call(graph, LINEAR, *operands.arguments(), *options, splits, chooses, like=like, **scales)
            parts = [add_call(graph, operator.getitem, call, index, like=like) for index in range(len(layer.results))]
        for output, part in zip(layer.results, parts, strict=True):
            replace_node(self._program, self._nodes[output.name], part)
            self._nodes[output.name] = part  # what a later layer may read

    def _x(self, layer: FoundLinear) -> Node:
        """Return what the op reads: x, or what the norm normalises, on the way that its result takes."""
        if layer.norm is None:
            return self._nodes[layer.x.name]
        node = self._nodes[layer.norm.x.name]
        for each in reversed(layer.way):
            copied, source = self._nodes[each.name], operand(self._nodes[each.name])
            made = self._program.graph.node_copy(copied, lambda old, now=node, was=source: now if old is was else old)
            infer(made)
            node = made
        return node

    def _weight(self, layer: FoundLinear) -> tuple[Node, Node | None]:
        """Return placeholders of the weight [out, in], and of its scales if it is in FP8."""
        weights = [each.weight for each in layer.linears]
        placeholder = self._nodes[weights[0].node.name]
        matrix = self._in_fp8(layer)
        if matrix is not None:
            values, scale = (
                add_parameter(self._program, f"{weights[0].name}_{suffix}", tensor, like=placeholder)
                for suffix, tensor in (("e4m3", matrix.values), ("scale", matrix.scale))
            )
            return values, scale
        if len(weights) == 1 and not weights[0].in_out and placeholder.meta["val"].dim() == 2:
            return placeholder, None
        views = [arranged_view(tensor_of(self._program, each.name).detach(), each, in_out=False)[1] for each in weights]
        joined = torch.cat([view.to(self._device or view.device) for view in views]).contiguous()
        return add_parameter(self._program, f"{weights[0].name}_of_linear", joined, like=placeholder), None

    def _bias(self, layer: FoundLinear) -> Node | None:
        """Return a placeholder of the bias [out]; None where no product has one."""
        biases = [each.bias for each in layer.linears]
        given = [each for each in biases if each is not None]
        if not given:
            return None
        like = self._nodes[given[0].node.name]
        if len(biases) == 1:
            return like
        some = tensor_of(self._program, given[0].name).detach()
        made = [
            some.new_zeros(width(each.node)) if each.bias is None else tensor_of(self._program, each.bias.name).detach()
            for each in layer.linears
        ]
        return add_parameter(self._program, f"{given[0].name}_of_linear", torch.cat(made), like=like)
