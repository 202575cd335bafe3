"""Write an ExportedProgram with `twell` ops as an ONNX file with nodes of the `twell` domain.

    torch.ops.twell.gated_mlp  ->  twell::TwellGatedMlp(x, w_gate, [b_gate], w_up, [b_up], w_down, [b_down], [residual],
                                                        [scales])
    torch.ops.twell.mlp        ->  twell::TwellMlp(x, w_up, [b_up], w_down, [b_down], [residual], [scales])
    torch.ops.twell.linear     ->  twell::TwellLinear(x, weight, [bias], [norm_weight], [norm_bias], [residual],
                                                      [weight_scale])
    torch.ops.twell.experts    ->  twell::TwellExperts(x, up, [gate], down, ids, weights, [scales], [thresholds])
    torch.ops.twell.attention  ->  twell::TwellAttention(q, k, v, [lengths])
    torch.ops.twell.cached_attention, append_caches  ->  twell::TwellCachedAttention, twell::TwellAppendCaches
    torch.ops.twell.all_reduce ->  trt::DistCollective(x), an operator of TensorRT's own

`twellc.plugins.onnx_node` documents inputs and attributes.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import torch
from onnxscript import opset20, values
from torch.export import ExportedProgram

from twellc.base.errors import UserError, first_few, first_line
from twellc.base.files import external_data
from twellc.base.torch_private import promoting_by_known_values, without_notes
from twellc.export.names import name_ends
from twellc.export.onnx_optimizer import optimize_exactly
from twellc.export.refused_nodes import COLLECTIVE, TENSORRT_DOMAIN
from twellc.passes.attention import OPERATOR
from twellc.passes.dump import NOWHERE, GraphDump
from twellc.passes.graph.program import editable, quiet_torch
from twellc.passes.report import Attention
from twellc.plugins import linear
from twellc.plugins.all_reduce_op import ALL_REDUCE
from twellc.plugins.attention_op import ATTENTION
from twellc.plugins.block import OPTIONS, Variant, call_of
from twellc.plugins.cache_op import APPEND, CACHED_ATTENTION
from twellc.plugins.experts_op import EXPERTS
from twellc.plugins.library import EXPERTS_NAME, LINEAR_NAME, PLUGIN_NAMESPACE
from twellc.plugins.linear_op import LINEAR
from twellc.plugins.onnx_node import APPEND as APPEND_NODE
from twellc.plugins.onnx_node import ATTENTION as ATTENTION_NODE
from twellc.plugins.onnx_node import (
    ATTRIBUTES,
    IDENTITY,
    attention_attributes,
    cache_attributes,
    experts_attributes,
    linear_attributes,
    node_attributes,
)
from twellc.plugins.onnx_node import CACHED_ATTENTION as CACHED_ATTENTION_NODE
from twellc.plugins.ops import OPS

# The first with the operators of our graphs, and the first with Attention.
_OPSET, _ATTENTION_OPSET = 20, 23
_E4M3 = onnx_ir.DataType.FLOAT8E4M3FN
_SCOPES = "pkg.torch.onnx.name_scopes"
# Protobuf ends at 2 GiB a message; weights of larger models go into a file beside the model.
_LARGEST_SINGLE_FILE = 2**30


def opset_of(attention: list[Attention]) -> int:
    """Return the opset that the forms of a program's attention need."""
    return _ATTENTION_OPSET if any(block.form == OPERATOR for block in attention) else _OPSET


def export_onnx(
    program: ExportedProgram,
    input_names: list[str],
    output_names: list[str],
    dimension_names: dict[str, str],
    opset: int = _OPSET,
    dump: GraphDump = NOWHERE,
) -> onnx_ir.Model:
    """Translate a program.

    Args:
        program: A program, rewritten or not.
        input_names: Names for the graph's inputs, in the program's order.
        output_names: Names for the graph's outputs, in the program's order, none of them that of an input.
        dimension_names: Names for the program's symbolic dimensions, by symbol.
        opset: The version of ONNX's operators.
        dump: Receives the ONNX graph as torch writes it, and optimized.

    Raises:
        UserError: An operation has no ONNX form.
    """
    try:
        with quiet_torch(), without_notes(), promoting_by_known_values():
            exported = torch.onnx.export(
                _Decomposed.of(program),
                (),
                opset_version=opset,
                dynamo=True,
                optimize=False,
                verbose=False,
                custom_translation_table=_TRANSLATIONS,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        raise _untranslatable(program, error) from error
    assert exported is not None
    model = exported.model
    dump.text("onnx", lambda: str(model))
    optimize_exactly(model)
    dump.text("optimize_exactly", lambda: str(model))
    name_ends(model.graph, input_names, output_names)
    model.graph.metadata_props.clear()
    for node in model.graph:
        # Named `<module path>/<operation>/<name>`: TensorRT's layers bear the names of nodes. Scopes are the modules
        # from the outermost one on, each with its whole path, and the name of the operation in torch's graph.
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
        node.name = "/".join([*scopes[-2:], node.name or node.op_type])
        # The exporter notes stack traces of the machine that it ran on.
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            _rename_dimensions(value, dimension_names)
    for value in model.graph.inputs:
        _rename_dimensions(value, dimension_names)
    return model


class _Decomposed(ExportedProgram):
    """A program that is traced again only where an operation is to be decomposed, which torch.onnx.export asks for."""

    @classmethod
    def of(cls, program: ExportedProgram) -> ExportedProgram:
        """Return a copy of a program as one of this class."""
        copied = editable(program)
        copied.__class__ = cls
        return copied

    def run_decompositions(self, decomp_table: Any = None, *others: Any, **options: Any) -> ExportedProgram:
        """Return itself, or what torch makes of it; see there."""
        nodes = self.graph.nodes
        if decomp_table is not None and not any(node.op == "get_attr" or node.target in decomp_table for node in nodes):
            return self
        made: ExportedProgram = super().run_decompositions(decomp_table, *others, **options)
        return made


def save_onnx(model: onnx_ir.Model, path: Path) -> list[Path]:
    """Write a model to `path`; weights above 1 GiB go to `path` + `.data`. Returns the files that were written.

    Raises:
        onnx.checker.ValidationError: It is not valid, which is a fault of ours.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    data = external_data(path) if size > _LARGEST_SINGLE_FILE else None
    onnx_ir.save(model, path, external_data=None if data is None else data.name)
    onnx.checker.check_model(path)
    return [path] if data is None else [path, data]


def check_types(path: Path) -> str:
    """Say what is against ONNX's rules of types and shapes in a file; an empty text where nothing is.

    TensorRT takes more than ONNX allows, such as convolutions in bfloat16 before opset 22.
    """
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return first_line(error)
    return ""


def _rename_dimensions(value: onnx_ir.Value, names: dict[str, str]) -> None:
    value.metadata_props.clear()
    if value.shape is None:
        return

    def rename(dim: int | onnx_ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int) or dim.value is None:
            return dim if isinstance(dim, int) else None
        return re.sub(r"\b\w+\b", lambda match: names.get(match[0], match[0]), dim.value)

    value.shape = onnx_ir.Shape([rename(dim) for dim in value.shape])


def _untranslatable(program: ExportedProgram, error: Exception) -> UserError:
    """Return what to say of a program that has no ONNX form: the operator, and in which module it is called."""
    cause = _cause(error)
    what, fix = f"the model cannot be written as ONNX ({cause})", "Replace the operation in the model"
    found = _NO_FORM.search(cause)
    if found is not None:
        operator = ".".join(found.groups())
        called = [node for node in program.graph.nodes if str(node.target) == operator]
        stacks = [list((node.meta.get("nn_module_stack") or {}).values()) for node in called]
        modules = list(dict.fromkeys(stack[-1][0] for stack in stacks if stack and stack[-1][0]))
        where = f" (called in {first_few(modules)})" if modules else ""
        what = f"torch.ops.{operator} has no ONNX form{where}"
        fix = "Write it with torch's own operators in the model"
    return UserError("ONNX export", what, fix=f"{fix}, or export a part of the model.")


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


_NO_FORM = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'\)>")
_KINDS = onnx.defs.OpSchema.AttrType
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KIND_OF = {str: _KINDS.STRING, float: _KINDS.FLOAT, int: _KINDS.INT, list: _KINDS.INTS}


def _schema(
    op_type: str, attributes: dict[str, type], domain: str, outputs: Sequence[str] = ("y",)
) -> onnx.defs.OpSchema:
    parameter, parameter_option = onnx.defs.OpSchema.FormalParameter, onnx.defs.OpSchema.FormalParameterOption
    types, fp8 = ("float16", "bfloat16", "float", "double"), "float8e4m3fn"
    return onnx.defs.OpSchema(
        op_type,
        domain,
        1,
        # Not all of one type: lengths and numbers of experts are integers, weights and caches may be in FP8.
        inputs=[parameter("operands", "I", param_option=parameter_option.Variadic, is_homogeneous=False)],
        outputs=[parameter(name, "T") for name in outputs],
        type_constraints=[
            ("T", [f"tensor({name})" for name in (*types, fp8)], ""),
            ("I", [f"tensor({name})" for name in (*types, "int32", "int64", fp8)], ""),
        ],
        attributes=[onnx.defs.OpSchema.Attribute(name, _KIND_OF[kind]) for name, kind in attributes.items()],
    )


_TWELL = values.Opset(PLUGIN_NAMESPACE, 1)


def _node(name: str, *outputs: str) -> Callable[..., Any]:
    """Return what writes a node of this type with these outputs: torch.onnx counts those of its schema."""
    attributes = {**ATTRIBUTES[name], **dict.fromkeys(IDENTITY, str)}
    return values.Op(_TWELL, name, _schema(name, attributes, PLUGIN_NAMESPACE, outputs))


_NODES: dict[str, Callable[..., Any]] = {
    name: _node(name, *(("keys", "values") if name == APPEND_NODE else ("y",))) for name in ATTRIBUTES
}


def _block(variant: Variant) -> Callable[..., Any]:
    """Return what writes a call of the variant's op as a node."""

    def write(*arguments: Any, **named: Any) -> Any:
        operands, options = call_of(variant, arguments, named)
        return _NODES[variant.node](*operands.named().values(), **node_attributes(operands, options))

    # torch.onnx takes from these how to call it.
    parameters = [inspect.Parameter(each.name, _POSITIONAL, annotation=Any) for each in variant.tensors]
    for each in OPTIONS:
        default = inspect.Parameter.empty if each.default is None else each.default
        parameters.append(inspect.Parameter(each.name, _POSITIONAL, annotation=each.kind, default=default))
    parameters += [inspect.Parameter(name, _POSITIONAL, annotation=Any, default=None) for name in variant.by_name]
    write.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    write.__annotations__ = {each.name: each.annotation for each in parameters}
    return write


def _linear(
    x: Any,
    weight: Any,
    bias: Any,
    norm_weight: Any,
    norm_bias: Any,
    residual: Any,
    norm: str = "none",
    eps: float = 0.0,
    splits: Sequence[int] = (),
    choose: bool = False,
    weight_scale: Any = None,
) -> Any:
    tensors = (x, weight, bias, norm_weight, norm_bias, residual)
    operands, options = linear.call_of((*tensors, norm, eps, splits, choose), {"weight_scale": weight_scale})
    attributes = linear_attributes(operands, options, weight.shape[0])
    outputs = [f"y{index}" for index in range(len(attributes["splits"]))]
    results = _node(LINEAR_NAME, *outputs)(*operands.named().values(), **attributes)
    return results if len(outputs) > 1 else [results]


def _experts(
    x: Any,
    up: Any,
    gate: Any,
    down: Any,
    ids: Any,
    weights: Any,
    activation: str,
    threshold: float = 0.0,
    up_scale: Any = None,
    gate_scale: Any = None,
    down_scale: Any = None,
    thresholds: Any = None,
) -> Any:
    inputs = {"x": x, "up": up, "gate": gate, "down": down, "ids": ids, "weights": weights, "up_scale": up_scale}
    inputs |= {"gate_scale": gate_scale, "down_scale": down_scale, "thresholds": thresholds}
    given = {name: value for name, value in inputs.items() if value is not None}
    return _NODES[EXPERTS_NAME](*given.values(), **experts_attributes(given, activation, threshold))


def _attention(q: Any, k: Any, v: Any, lengths: Any, scale: float, causal: bool) -> Any:
    if lengths is not None:  # the op's own meaning; the plugin takes 1 to the number of keys
        keys = opset20.Cast(opset20.Shape(k, start=1, end=2), to=onnx.TensorProto.INT32)
        one = opset20.Constant(value=onnx.numpy_helper.from_array(np.ones(1, np.int32)))
        lengths = opset20.Min(opset20.Max(lengths, one), keys)
    inputs = [operand for operand in (q, k, v, lengths) if operand is not None]
    return _NODES[ATTENTION_NODE](*inputs, **attention_attributes(scale, causal, lengths is not None))


def _cached_attention(
    q: Any, keys: Any, values: Any, query_counts: Any, key_counts: Any, scale: float, cosines: Any = None,
    sines: Any = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> Any:  # fmt: skip
    angles = [] if cosines is None else [cosines, sines]
    attributes = cache_attributes(bool(angles), keys.dtype == _E4M3, key_scale, value_scale)
    return _NODES[CACHED_ATTENTION_NODE](q, keys, values, query_counts, key_counts, *angles, scale=scale, **attributes)


def _append(
    keys: Any, values: Any, new_keys: Any, new_values: Any, starts: Any, counts: Any, cosines: Any = None,
    sines: Any = None, key_scale: float = 1.0, value_scale: float = 1.0,
) -> Any:  # fmt: skip
    angles = [] if cosines is None else [cosines, sines]
    attributes = cache_attributes(bool(angles), keys.dtype == _E4M3, key_scale, value_scale)
    return _NODES[APPEND_NODE](keys, values, new_keys, new_values, starts, counts, *angles, **attributes)


def _all_reduce(x: Any, ranks: int) -> Any:
    # Without groups all ranks take part; the other attributes have no meaning for a sum.
    return _DIST_COLLECTIVE(x, collective_operation="all_reduce", reduce_op="sum", root=-1, group_size=0, nb_rank=ranks)


def _tanh(x: Any) -> Any:
    # A plan's logits of 30 tanh(x / 30) in bfloat16 were off by up to 30 * 1e-3, evenly spread, in TensorRT 10.6: 5 %.
    if x.dtype not in (onnx_ir.DataType.BFLOAT16, onnx_ir.DataType.FLOAT16):
        return opset20.Tanh(x)
    wide: Any = opset20.Cast(x, to=onnx.TensorProto.FLOAT)
    y: Any = opset20.Tanh(wide)
    return opset20.Cast(y, to=int(x.dtype))


def _slice_scatter(x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    # torch's own form is ScatterND over the exchanged axes, which TensorRT 10.6 does not take in bfloat16.
    size = x.shape[dim] if x.shape is not None else None
    if step != 1 or not all(isinstance(each, int | None) for each in (start, end)) or not isinstance(size, int):
        from onnxscript.function_libs.torch_lib.ops.core import aten_slice_scatter  # not promised to stay there

        return aten_slice_scatter(x, source, dim, start, end, step)
    first, last, _ = slice(start, end).indices(size)

    def part(begin: int, until: int) -> list[Any]:
        return [opset20.Slice(x, *map(_integers, (begin, until, dim)))] if begin < until else []

    return opset20.Concat(*part(0, first), source, *part(max(first, last), size), axis=dim)


def _integers(number: int) -> Any:
    return opset20.Constant(value=onnx.numpy_helper.from_array(np.array([number])))


_COLLECTIVE_ATTRIBUTES = {"collective_operation": str, "reduce_op": str, "root": int, "group_size": int, "nb_rank": int}
_DIST_COLLECTIVE = values.Op(
    values.Opset(TENSORRT_DOMAIN, 1), COLLECTIVE, _schema(COLLECTIVE, _COLLECTIVE_ATTRIBUTES, TENSORRT_DOMAIN)
)
_TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    **{op: _block(variant) for variant, op in OPS.items()},
    LINEAR: _linear,
    EXPERTS: _experts,
    ATTENTION: _attention,
    CACHED_ATTENTION: _cached_attention,
    APPEND: _append,
    ALL_REDUCE: _all_reduce,
    torch.ops.aten.slice_scatter.default: _slice_scatter,
    torch.ops.aten.tanh.default: _tanh,
}
