"""Find feed-forward blocks in an ONNX graph of plain operators, and replace them by `twell` nodes.

    before   x ─┬─ MatMul(Wg) ─ Relu ─┬─ Mul ─ MatMul(Wd) ─ y            in bfloat16 or float16
                └─ MatMul(Wu) ────────┘
    after    x ─ TwellGatedMlp(Wg [d_ff, d_model], Wu [d_ff, d_model], Wd [d_ff, d_out]) ─ y

A block with a residual takes in the Add behind y (see `residual.py`). A block in float32 gets a cast before and behind,
and its weights are converted; the rest of the graph stays as it is:

    after    x ─ Cast(bfloat16) ─ TwellGatedMlp(…) ─ Cast(float32) ─ y

Blocks are found, and refused, by the same matcher as in PyTorch programs (`find_ffn.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import onnx
import onnx_ir
import onnx_ir.passes.common
import torch
from torch.fx import Node

from twellc.base.arrays import to_torch
from twellc.base.dtypes import BY_NAME, dtype_name
from twellc.base.errors import UserError, first_line
from twellc.passes.decide import Advise, decide, options_of
from twellc.passes.fold_constants import fold_constants_in
from twellc.passes.fold_weights import fold_weights_in
from twellc.passes.fp8 import Wish, both_forms, fp8_of, judge, said_dequantised
from twellc.passes.graph.program import free_name
from twellc.passes.match.find_ffn import FfnBlock, find_blocks
from twellc.passes.match.linear import Weight
from twellc.passes.onnx.graph import (
    Shadow,
    constant,
    constant_values,
    graphs_in,
    in_fp8,
    names_in_fp8,
    shadow_of,
)
from twellc.passes.precision import convert
from twellc.passes.report import Layer, reads_fp8
from twellc.passes.rewrite_ffn import arranged_copy, weights_of
from twellc.plugins.block import FLOAT32, SCALES, Operands, TensorField, WeightOperands
from twellc.plugins.fp8 import Fp8
from twellc.plugins.library import PLUGIN_NAMESPACE
from twellc.plugins.onnx_node import node_attributes

# Initializers above this size take no part in shape inference, which would copy them.
_SMALL = 1024
_FIRST_WITH_E4M3 = 9  # of the versions of the format
# Of nodes that stand for blocks as dense FP8 computes them; `twellc check` alone knows them.
DENSE_FP8 = "twell.dense_fp8"
_Operands: TypeAlias = "Operands[onnx_ir.Value]"


@dataclass(frozen=True)
class Ends:
    """Names of what a block reads and computes in a graph; it may have no residual. Experts have ids and weights."""

    x: str
    residual: str | None
    y: str
    routing: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnnxBlocks:
    """The feed-forward blocks of an ONNX graph.

    Attributes:
        model: The model, not changed.
        blocks: The blocks; one in float32 that can be rewritten has the dtype that it will be rewritten in.
        layers: What becomes of each.
        ends: Names of the tensors of each.
        casts: Whether some of those that are rewritten compute in float32 in the model.
        folds: Whether some of them have weights that the model computes, or that constants are folded into.
        dequantised: What the user should know of their FP8 weights that are dequantised.
    """

    model: onnx.ModelProto
    blocks: list[FfnBlock]
    layers: list[Layer]
    ends: list[Ends]
    casts: bool
    folds: bool
    dequantised: list[str]

    @property
    def fp8(self) -> bool:
        """Whether weights of some that are rewritten are read in FP8."""
        return any(reads_fp8(layer.weights) for layer in self.layers)


def find_onnx_blocks(
    model: onnx.ModelProto,
    dtype: torch.dtype,
    layers: str,
    advise: Advise | None = None,
    weights: Wish = Wish(),  # noqa: B008
) -> OnnxBlocks:
    """Find the blocks of a model and decide what becomes of each.

    Args:
        model: A model with its weights in memory.
        dtype: What blocks in float32 are rewritten in: bfloat16 or float16.
        layers: See `decide`.
        advise: Likewise.
        weights: See `judge`.

    Raises:
        UserError: See `decide`.
    """
    (_, shadow), blocks = _open(model)

    def name(node: Node) -> str:
        return str(shadow.tensors[node].name) if node in shadow.tensors else node.name

    ends = [
        Ends(name(block.x), name(block.residual.other) if block.residual else None, name(block.y)) for block in blocks
    ]
    given = [block.dtype for block in blocks]
    blocks = [replace(block, dtype=dtype) if block.dtype == torch.float32 else block for block in blocks]
    blocks = [replace(block, weights=judge(block, _stored(shadow), weights)) for block in blocks]
    decisions = decide(blocks, layers, advise)
    taken = [index for index, layer in enumerate(decisions) if layer.decision == "twell"]
    casts = any(given[index] == torch.float32 for index in taken)
    folds = any(_is_folded(blocks[index], shadow) for index in taken)
    wide = [weights_of(blocks[index], lambda each, _: each) for index in taken if not reads_fp8(blocks[index].weights)]
    names = (names_in_fp8(shadow.tensors[each.node]) for weights in wide for each in weights.named().values())
    dequantised = said_dequantised(list(dict.fromkeys(chain.from_iterable(names))))
    return OnnxBlocks(model, blocks, decisions, ends, casts, folds, dequantised)


def rewrite_onnx(found: OnnxBlocks, compression: int | None = None) -> onnx_ir.Model:
    """Return the model with `twell` nodes in place of the blocks that were decided to be rewritten.

    Args:
        found: The blocks.
        compression: The TwELL compression factor of all blocks; None takes the default.

    Raises:
        UserError: A weight does not fit into float16.
    """

    def make(block: FfnBlock, layer: Layer, operands: _Operands, y: onnx_ir.Value, emit: _Emitter) -> None:
        op_type = operands.variant.node
        attributes: dict[str, Any] = node_attributes(operands, options_of(block, layer, compression))
        inputs = operands.named().values()
        emit(op_type, *inputs, out=y, domain=PLUGIN_NAMESPACE, name=f"{block.module}/{op_type}", **attributes)

    return _replace(found, make, always=True)


def lower_onnx(found: OnnxBlocks, dense_fp8: bool = False) -> onnx.ModelProto:
    """Return the model with the blocks as plain operators whose precision or weights the rewriting changes.

    What remains between it and the rewritten model is the kernels' doing.

    Args:
        found: The blocks.
        dense_fp8: Whether blocks with FP8 weights become nodes of the domain `DENSE_FP8`, which have the
            form of `twell` nodes.
    """

    def make(block: FfnBlock, layer: Layer, operands: _Operands, y: onnx_ir.Value, emit: _Emitter) -> None:
        if not dense_fp8 or not operands.scales():
            _emit_plain(block, operands, y, emit)
            return
        op_type, inputs = operands.variant.node, operands.named().values()
        attributes: dict[str, Any] = node_attributes(operands, options_of(block, layer, None))
        emit(op_type, *inputs, out=y, domain=DENSE_FP8, **attributes)

    return onnx_ir.serde.serialize_model(_replace(found, make, always=False))


def _emit_plain(block: FfnBlock, operands: _Operands, y: onnx_ir.Value, emit: _Emitter) -> None:
    """Emit plain operators that compute y of a block."""

    def project(x: Any, weight: Any, bias: Any, stored_in_out: bool, out: onnx_ir.Value | None = None) -> onnx_ir.Value:
        matrix = weight if stored_in_out else emit("Transpose", weight, perm=[1, 0])
        product = emit("MatMul", x, matrix, out=out if bias is None else None)
        return product if bias is None else emit("Add", product, bias, out=out)

    given = operands.named()
    for name in operands.scales():
        of = name.removesuffix("_scale")
        matrix = Fp8(*(_tensor(each) for each in (given[of], given.pop(name))))
        exact = constant(f"{y.name}/{of}", matrix.dequantize(torch.float64))
        given[of] = emit("Cast", exact, to=BY_NAME[dtype_name(block.dtype)].onnx)
    operands = Operands(**given)
    x = operands.x
    z = project(x, *operands.first, False)
    if block.activation == "fatrelu":
        wide = emit("Cast", z, to=onnx.TensorProto.FLOAT)
        stored = torch.tensor(block.threshold)
        if operands.thresholds is not None:
            stored = _tensor(operands.thresholds).clamp_min(0)
        threshold = constant(f"{y.name}/threshold", stored)
        zero = constant(f"{y.name}/zero", torch.zeros((), dtype=block.dtype))
        hidden = emit("Where", emit("Greater", wide, threshold), z, zero)
    else:
        hidden = emit("Relu", z)
    if block.activation == "relu2":
        hidden = emit("Mul", hidden, hidden)
    if operands.w_gate is not None:
        up = project(x, operands.w_up, operands.b_up, False)
        hidden = emit("Mul", hidden, emit("Relu", up) if block.activation == "drelu" else up)
    if operands.residual is None:
        project(hidden, operands.w_down, operands.b_down, True, out=y)
    else:
        emit("Add", operands.residual, project(hidden, operands.w_down, operands.b_down, True), out=y)


def fp8_weights(found: OnnxBlocks) -> list[tuple[WeightOperands[torch.Tensor], WeightOperands[torch.Tensor]] | None]:
    """Return for each block that is rewritten its FP8 weights, and as the model has them.

    None is a block whose weights are read in 16 bits.
    """
    (_, shadow), blocks = _open(found.model)
    result: list[tuple[WeightOperands[torch.Tensor], WeightOperands[torch.Tensor]] | None] = []
    for found_block, judged, layer in zip(blocks, found.blocks, found.layers, strict=True):
        if layer.decision != "twell":
            continue
        block = replace(found_block, dtype=judged.dtype, weights=judged.weights)
        values = functools.partial(_values, shadow)
        result.append(both_forms(block, _stored(shadow), values) if reads_fp8(block.weights) else None)
    return result


def _stored(shadow: Shadow) -> Callable[[Weight], Fp8 | None]:
    return lambda weight: in_fp8(shadow.tensors[weight.node])


def _values(shadow: Shadow, weight: Weight) -> torch.Tensor:
    return _tensor(shadow.tensors[weight.node]).reshape(weight.node.meta["val"].shape)


def _tensor(value: onnx_ir.Value) -> torch.Tensor:
    """Return the values of a constant."""
    values = constant_values(value)
    assert values is not None
    return to_torch(values)


def _open(model: onnx.ModelProto) -> tuple[tuple[onnx_ir.Model, Shadow], list[FfnBlock]]:
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton(model), data_prop=True)
    except (onnx.shape_inference.InferenceError, MemoryError) as error:
        what = f"its shapes contradict themselves ({first_line(error)})"
        raise UserError("ONNX model", what, fix="Export it again.") from error
    opened = onnx_ir.serde.deserialize_model(model)
    values = {value.name: value for node in opened.graph for value in node.outputs}
    for info in (*inferred.graph.value_info, *inferred.graph.output):
        if info.name in values and info.type.tensor_type.elem_type:
            values[info.name].type = onnx_ir.serde.deserialize_type_proto_for_type(info.type)
            values[info.name].shape = onnx_ir.serde.deserialize_type_proto_for_shape(info.type)
    shadow, blocks = _blocks_of(opened.graph)
    names = {block.module for block in blocks}
    for where, inner in _inner_graphs(opened.graph):
        inner_shadow, found = _blocks_of(inner)
        shadow.tensors |= inner_shadow.tensors
        for block in found:
            module = free_name(block.module, names, "#")
            names.add(module)
            blocks.append(replace(block, module=module, refusal=f"it is in a graph of {where}", residual=None))
    return (opened, shadow), blocks


def _blocks_of(graph: onnx_ir.Graph) -> tuple[Shadow, list[FfnBlock]]:
    shadow = shadow_of(graph)
    fold_weights_in(shadow)
    fold_constants_in(shadow)
    blocks = []
    for block in find_blocks(shadow.graph, shadow.names, functools.partial(_values, shadow)):
        ends = (block.x, block.y, *((block.residual.other,) if block.residual else ()))
        if not all(end in shadow.tensors for end in ends):
            block = replace(block, refusal="what it computes is a tensor of another shape in the graph", residual=None)
        blocks.append(block)
    return shadow, blocks


def _is_folded(block: FfnBlock, shadow: Shadow) -> bool:
    """Whether the graph computes a weight of a block, or constants are folded into one."""
    parts = [part for part in (block.gate, block.up, block.down) if part is not None]
    weights = (weight for part in parts for weight in (part.weight, part.bias) if weight is not None)
    return any(weight.node in shadow.computed for weight in weights)


def _inner_graphs(graph: onnx_ir.Graph) -> Iterator[tuple[str, onnx_ir.Graph]]:
    """Yield the graphs in nodes, and in theirs, with what has them."""
    for where, inner in (each for node in graph for each in graphs_in(node)):
        yield where, inner
        yield from _inner_graphs(inner)


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with large initializers as inputs: what checks and shape inference need, without the weights."""
    graph = onnx.GraphProto(name=model.graph.name)
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    for tensor in model.graph.initializer:
        graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tuple(tensor.dims)))
        if tensor.ByteSize() <= _SMALL:
            graph.initializer.append(tensor)
    light = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    return light


class _Emitter:
    """Makes the nodes that compute a block."""

    def __init__(self, constants: _Constants, stem: str) -> None:
        self.nodes: list[onnx_ir.Node] = []
        self._constants, self._stem = constants, stem

    def tensor(self) -> onnx_ir.Value:
        """Return a new tensor."""
        return onnx_ir.val(self._constants.unique(self._stem))

    def __call__(
        self, op: str, *inputs: onnx_ir.Value, out: onnx_ir.Value | None = None, domain: str = "", name: str = "",
        **attributes: Any,
    ) -> onnx_ir.Value:  # fmt: skip
        """Add a node, and return its output: `out`, or a new tensor."""
        result = out or self.tensor()
        name = name or f"{result.name}/{op}"
        self.nodes.append(onnx_ir.node(op, inputs, attributes, domain=domain, outputs=[result], name=name))
        return result


# Emits the nodes of a block from what was decided of it, its operands and y.
_Make = Callable[[FfnBlock, Layer, _Operands, onnx_ir.Value, _Emitter], None]


def _replace(found: OnnxBlocks, make: _Make, *, always: bool) -> onnx_ir.Model:
    (model, shadow), blocks = _open(found.model)
    graph, constants = model.graph, _Constants(model.graph, shadow)
    made: dict[onnx_ir.Value, onnx_ir.Value] = {}  # results of blocks that others read, by those before
    for found_block, judged, layer in zip(blocks, found.blocks, found.layers, strict=True):
        casts = found_block.dtype != judged.dtype
        changes = casts or reads_fp8(judged.weights) or _is_folded(found_block, shadow)
        if layer.decision != "twell" or not (always or changes):
            continue
        block = replace(found_block, dtype=judged.dtype, weights=judged.weights)
        y, x = shadow.tensors[block.y], shadow.tensors[block.x]
        residual = shadow.tensors[block.residual.other] if block.residual else None  # none between casts
        matrices = constants.in_fp8(block) if reads_fp8(block.weights) else {}
        place = functools.partial(constants.arranged, dtype=block.dtype, fp8=matrices)
        weights = WeightOperands(**{**weights_of(block, place).named(), **matrices})
        operands = weights.of(made.get(x, x), residual and made.get(residual, residual))
        emit, new = _Emitter(constants, f"{y.name}/twell"), onnx_ir.val(y.name)
        if casts:
            low = emit("Cast", operands.x, to=BY_NAME[dtype_name(block.dtype)].onnx)
            result = emit.tensor()
            make(block, layer, replace(operands, x=low), result, emit)
            emit("Cast", result, out=new, to=BY_NAME[dtype_name(found_block.dtype)].onnx)
        else:
            make(block, layer, operands, new, emit)
        made[y] = new
        before = y.producer()
        assert before is not None
        onnx_ir.convenience.replace_nodes_and_values(graph, before, [], emit.nodes, [y], [new])
        for node in emit.nodes:
            model.opset_imports.setdefault(node.domain, 1)
            for each in node.inputs:
                if each is not None and each.const_value is not None and each.name not in graph.initializers:
                    graph.register_initializer(each)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)
    if found.fp8:
        model.ir_version = max(model.ir_version, _FIRST_WITH_E4M3)
    return model


class _Constants:
    """The constants of weights as nodes read them. Weights that blocks share have one."""

    def __init__(self, graph: onnx_ir.Graph, shadow: Shadow) -> None:
        self._shadow = shadow
        self._arranged: dict[tuple[Any, ...], onnx_ir.Value] = {}
        self._fp8: dict[tuple[Any, ...], dict[str, onnx_ir.Value]] = {}
        computed = (value for node in graph.all_nodes() for value in node.outputs)
        known = (*graph.inputs, *graph.initializers.values(), *computed, *shadow.tensors.values())
        self._taken = {str(value.name) for value in known}

    def unique(self, name: str) -> str:
        """Return a name that no tensor has, and take it."""
        result = free_name(name, self._taken)
        self._taken.add(result)
        return result

    def in_fp8(self, block: FfnBlock) -> dict[str, onnx_ir.Value]:
        """Return the matrices and scales of a block that is read in FP8, by name."""
        shadow = self._shadow
        weights = weights_of(block, lambda weight, _: weight).named()
        key = tuple((shadow.tensors[each.node].name, each.rows, each.in_out) for each in weights.values())
        if key not in self._fp8:
            made = {}
            for name, values in fp8_of(block, _stored(shadow), functools.partial(_values, shadow), None).items():
                stem = shadow.tensors[weights[name.removesuffix("_scale")].node].name
                suffix = "scale" if name in SCALES else "e4m3"
                made[name] = constant(self.unique(f"{stem}_{suffix}"), values)
            self._fp8[key] = made
        return self._fp8[key]

    def arranged(
        self, weight: Weight, role: TensorField, dtype: torch.dtype, fp8: dict[str, onnx_ir.Value]
    ) -> onnx_ir.Value:
        """Return that of a weight as the node reads it; `fp8` has those of a block that is read in FP8."""
        if role.name in fp8:
            return fp8[role.name]
        tensor, in_out = self._shadow.tensors[weight.node], role.in_out
        dtype = torch.float32 if role.name in FLOAT32 else dtype
        dims = weight.node.meta["val"].dim()
        same = weight.in_out == in_out and weight.rows is None and dims == len(tensor.shape or ()) and dims <= 2
        if same and weight.node.meta["val"].dtype == dtype and tensor.const_value is not None:
            return tensor
        key = (tensor.name, (weight.rows, weight.in_out), in_out, dtype)
        if key not in self._arranged:
            values = _values(self._shadow, weight)
            suffix = ""
            if not same:
                suffix, values = arranged_copy(values, weight, in_out)
            name = self.unique(f"{tensor.name}{suffix}")
            self._arranged[key] = constant(name, convert(values, dtype, f"initializer {tensor.name}"))
        return self._arranged[key]
