"""A program with caches as torch runs it.

    program ─ caches written in place ─┬─ few: linear layers and norms by the `twell` ops, as in a plan
                                       └─ many: linear layers and norms by torch's own

Both have the same tensors. Calls of up to 16 tokens on a GPU run the first, all others the second: there torch's
products are as fast, and torch.compile joins norms with what is before them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from twellc.base.caches import INPUT_IDS, TOKEN_COUNT, WRITE_INDEX
from twellc.base.torch_private import dynamo, schema_of
from twellc.base.transformers_private import GROUPED_PRODUCT, grouped_product
from twellc.generation.backend import places_for
from twellc.plugins import block, linear
from twellc.plugins.cache_op import IN_PLACE
from twellc.plugins.fp8 import Fp8
from twellc.plugins.library import FEW_TOKENS_LINEAR
from twellc.plugins.linear_op import LINEAR
from twellc.plugins.ops import VARIANT_OF

# Numbers of rows, and sizes of prompts and caches, that a program is compiled for; torch would go on without compiling
# after the eighth, and say little.
_MOST_SIZES = 256
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class ProgramCalls:
    """Runs a program with caches in torch, see `PlanCalls`: steps and longer calls may be compiled apart."""

    def __init__(self, program: ExportedProgram, names: Sequence[str], device: torch.device, compiled: bool) -> None:
        """Take a program on `device`, and the names of its inputs in order; `compiled`: see `LLM`."""
        few = in_place(program)
        many = by_torch(few, fp8=device.type == "cpu")
        forms = {True: few if device.type == "cuda" else many, False: many}  # by whether tokens are few
        self._calls: dict[tuple[bool, bool], Callable[..., Tensor]] = {
            (is_few, is_step): compiled_call(form, dynamic=not is_step) if compiled else form
            for is_few, form in forms.items()
            for is_step in (True, False)
        }
        self.device, self._names = device, names
        self._narrows = device.type == "cpu" and not compiled
        self._caches: dict[str, Tensor] = {}

    def bind(self, caches: dict[str, Tensor]) -> None:
        """Take the caches; see `PlanCalls`."""
        self._caches = caches

    @torch.no_grad()
    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the program; see `PlanCalls`."""
        caches = self._caches
        if self._narrows:  # there a mask says which places are seen
            places = int((inputs[WRITE_INDEX] + inputs[TOKEN_COUNT]).max())
            caches = {name: each[:, :, : places_for(places, each.shape[2])] for name, each in caches.items()}
        given = {**inputs, **caches}
        rows, tokens = inputs[INPUT_IDS].shape
        call = self._calls[rows * tokens <= FEW_TOKENS_LINEAR, tokens == 1]
        logits: Tensor = call(*(given[name] for name in self._names))
        return logits


def compiled_call(function: Callable[..., Tensor], dynamic: bool) -> Callable[..., Tensor]:
    """Return a function as torch.compile compiles it, for many sizes."""
    compiled = torch.compile(function, dynamic=dynamic)

    def call(*tensors: Tensor) -> Tensor:
        with dynamo.config.patch(recompile_limit=_MOST_SIZES):  # of this thread
            return compiled(*tensors)

    return call


def in_place(program: ExportedProgram) -> GraphModule:
    """Return a module of a program with caches that writes these in place: it takes its inputs, and returns the logits.

    Nothing in the program reads a cache as it was before it is written.
    """
    module = program.module(check_guards=False)
    graph: Any = module.graph
    for node in [each for each in graph.nodes if each.target in IN_PLACE]:
        op = IN_PLACE[node.target]
        with graph.inserting_before(node):
            call = graph.call_function(op, node.args, node.kwargs)
        written = zip(node.args, schema_of(op).arguments, strict=False)  # others have defaults
        results = [call] * len(schema_of(op).returns) + [cache for cache, argument in written if argument.is_write]
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
    for node in graph.nodes:
        if str(node.target) == GROUPED_PRODUCT:
            node.target = grouped_product
        elif node.target is _ATTENTION:
            node.target = _attend
    output = graph.output_node()
    logits, *caches = output.args[0]
    assert all(each.op == "placeholder" for each in caches), "an op that returns caches is not in IN_PLACE"
    output.args = (logits,)
    graph.set_codegen(CodeGen())  # inputs and outputs one by one, not as the traced function had them
    graph.eliminate_dead_code()
    return GraphModule(module, graph)  # without what checks inputs first


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as torch does, but where heads share keys: with a mask it would take its slowest kernel."""
    batch, heads, tokens, width = q.shape
    groups = k.shape[1]
    if heads != groups and tokens == 1 and (attn_mask is None or attn_mask.shape[1] == 1):
        q = q.reshape(batch, groups, heads // groups, width)  # the queries of a group as queries of one head
    elif heads != groups:
        k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask, is_causal=is_causal, scale=scale).reshape(batch, heads, tokens, -1)


def by_torch(module: GraphModule, fp8: bool) -> GraphModule:
    """Return a module with the same tensors that computes linear layers, and norms before blocks, by torch's own ops.

    Args:
        module: What `in_place` returns.
        fp8: Whether linear layers in FP8 are computed so, too.
    """
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.target is LINEAR:
            _write_linear(node, module, fp8)
        elif node.target in VARIANT_OF:
            _write_norm(node, module)
    graph.eliminate_dead_code()
    return GraphModule(module, graph)


def _write_linear(node: Node, module: GraphModule, fp8: bool) -> None:
    """Write a linear layer with its norm and its sum as torch's operations, each of which rounds."""
    graph: Any = node.graph
    operands, options = linear.call_of(node.args, node.kwargs)
    weight = operands.weight
    if operands.weight_scale is not None and not fp8:
        return
    out, width = _tensor(module, weight).shape
    with graph.inserting_before(node):
        x = _norm(graph, operands.x, width, options, operands.norm_weight, operands.norm_bias)
        if operands.weight_scale is not None:
            weight = graph.get_attr(_dequantised(module, weight, operands.weight_scale, node.meta["val"][0].dtype))
        y = graph.call_function(torch.nn.functional.linear, (x, weight, operands.bias))
        if operands.residual is not None:
            y = graph.call_function(torch.add, (y, operands.residual))
        if options.choose:
            results = [graph.call_method("argmax", (y, -1))]
        elif len(options.splits) > 1:
            pieces = graph.call_method("split", (y, options.widths(out), -1))
            parts = [graph.call_function(operator.getitem, (pieces, each)) for each in range(len(options.splits))]
            results = [graph.call_method("contiguous", (part,)) for part in parts]
        else:
            results = [y]
    for item in list(node.users):
        index: Any = item.args[1]
        item.replace_all_uses_with(results[index])


def _dequantised(module: GraphModule, weight: Node, scale: Node, dtype: torch.dtype) -> str:
    """Give a module a weight in `dtype` besides one in FP8, and return its name."""
    name = f"{weight.name}_dequantised"
    matrix = Fp8(_tensor(module, weight), _tensor(module, scale))
    module.register_buffer(name, matrix.dequantize(dtype), persistent=False)
    return name


def _write_norm(node: Node, module: GraphModule) -> None:
    """Write the norm of a block before it."""
    graph: Any = node.graph
    operands, options = block.call_of(VARIANT_OF[node.target], node.args, node.kwargs)
    if options.norm == "none":
        return
    with graph.inserting_before(node):
        width = _tensor(module, operands.w_up).shape[1]
        x = _norm(graph, operands.x, width, options, operands.norm_weight, operands.norm_bias)
    operands = replace(operands, x=x, norm_weight=None, norm_bias=None)
    node.args = (*operands.arguments(), *replace(options, norm="none", eps=0.0).arguments())
    node.kwargs = operands.by_name()


def _norm(graph: Any, x: Node, width: int, options: Any, weight: Node | None, bias: Node | None) -> Any:
    if options.norm == "rms":
        return graph.call_function(torch.nn.functional.rms_norm, (x, (width,), weight, options.eps))
    if options.norm == "layer":
        return graph.call_function(torch.nn.functional.layer_norm, (x, (width,), weight, bias, options.eps))
    return x


def _tensor(module: GraphModule, node: Node) -> Tensor:
    """Return the tensor of a module that a node gets."""
    found: Any = functools.reduce(getattr, str(node.target).split("."), module)
    return found  # type: ignore[no-any-return]
