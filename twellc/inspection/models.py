"""What `twellc inspect` shows of a model, or of a rewritten ONNX file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx

from twellc.base.dtypes import dtype_name, torch_dtype
from twellc.base.modules import import_modules
from twellc.compiling.result import noted_layers, noted_settings
from twellc.compiling.translate_onnx import onnx_notes
from twellc.compiling.translate_torch import activation_notes, call_notes
from twellc.decisions.advise import Advisor
from twellc.decisions.choose import Tokens
from twellc.decisions.targets import choose_target, gpu_at_hand
from twellc.firing.calibration import load_calibration
from twellc.firing.short_run import run_shortly
from twellc.inspection.description import Description, PluginNode
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.loaders.onnx_models import KIND, choose_onnx_dtype, open_model
from twellc.loaders.precision import choose_dtype
from twellc.options.commands import InspectOptions
from twellc.options.decisions import refuse_calibration, refuse_decisions, refuse_linear
from twellc.options.source import refuse_choices, refuse_tracing
from twellc.options.weights import FP8, KEEP, refuse_weight_type
from twellc.passes.attention import MATMUL
from twellc.passes.fp8 import Wish
from twellc.passes.onnx.ffn import find_onnx_blocks
from twellc.passes.onnx.graph import dtype_of
from twellc.passes.pipeline import PassOptions, Stage, run_until
from twellc.passes.report import Layer, Weights
from twellc.passes.sizes.conditions import value_warnings
from twellc.plugins.block import BY_NODE, NORM_TENSORS, SCALES_FLAG, THRESHOLDS
from twellc.plugins.library import BLOCK_NAMES, EXPERTS_NAME, NORMS, PLUGIN_NAMESPACE
from twellc.plugins.onnx_node import SCALES


def describe_model(options: InspectOptions, progress: Callable[[str], None]) -> Description:
    """Return what is known of a model or a rewritten ONNX file.

    Raises:
        UserError: It is not a model, or not one that `dtype` or `inputs` are for.
    """
    import_modules(options.import_modules)
    calls = [Tokens(options.tokens, options.tokens, options.tokens)]
    target = choose_target(options.target_gpu, gpu_at_hand())
    advisor = Advisor(target, lambda block: calls, options.density, options.compression)
    if looks_like_onnx(options.model):
        refuse_calibration(options, f"{options.model}, an ONNX file")
        progress("loading the model")
        return inspect_onnx(options, advisor)
    progress("loading and tracing the model")
    calibrated = load_calibration(options, options.model)
    model = load_model(options)
    chosen, notes = choose_dtype(model, options.dtype)
    progress("looking for feed-forward blocks")
    calibration = None if calibrated is None else calibrated.calibration
    wanted = PassOptions(
        torch_dtype(chosen), options.layers, options.compression, (MATMUL,), calibration, advise=advisor,
        weights=Wish(options.weights != KEEP, linear=options.weights == FP8), linear=options.linear,
        calls=lambda x: (options.tokens,),
    )  # fmt: skip
    passed = run_until(model.program, wanted, Stage.FIND)
    if calibrated is None and options.density is None:
        progress("measuring how many neurons are active")
        advisor.run, advisor.unmeasured = run_shortly(model, passed)
    progress("deciding on feed-forward blocks")
    passed = run_until(passed, wanted, Stage.FIND_LINEAR, without=(Stage.FFN,))
    layers = passed.layers
    if calibrated is not None:
        calibrated.refuse_other_blocks(layers)
    notes = [
        *model.notes,
        *notes,
        *activation_notes(model, layers),
        *call_notes(model.program),
        *advisor.notes(layers),
        *passed.dequantised,
        *value_warnings(model.program),
    ]
    if calibrated is not None:
        notes += [*calibrated.profile.warnings, *calibrated.notes(layers, chosen)]
    return Description(model.kind, layers, notes, dtype=chosen, attention=passed.attention, linear=passed.linear)


def inspect_onnx(options: InspectOptions, advisor: Advisor) -> Description:
    """Return what `twellc inspect` shows of an ONNX file; of a rewritten one also its `twell` nodes."""
    path = options.model
    model = open_model(path, options.input_specs)
    nodes = twell_nodes(model)
    if nodes:
        refuse_tracing(options, f"{path}, a rewritten graph")
        refuse_decisions(options, f"{path}, a rewritten graph")
        refuse_weight_type(options, f"{path}, a rewritten graph")
        settings, layers = noted_settings(model), noted_layers(model)
        dtype = None if settings is None else settings.dtype
        layers = layers or [_layer_of(node) for node in nodes if node.type in BLOCK_NAMES]
        notes = [f"{path.name} is a rewritten graph: {len(nodes)} of its nodes are plugins"]
        return Description("rewritten ONNX file", layers, notes, dtype=dtype, nodes=nodes)
    refuse_choices(options.padding, options.logits, f"{path}, an {KIND}")
    refuse_linear(options, f"{path}, an {KIND}")
    chosen = choose_onnx_dtype(model, options.dtype)
    wish = Wish(options.weights != KEEP)
    found = find_onnx_blocks(model, torch_dtype(chosen), options.layers, advisor, wish)
    return Description(KIND, found.layers, [*onnx_notes(found, chosen), *advisor.notes(found.layers)], dtype=chosen)


def twell_nodes(model: onnx.ModelProto) -> list[PluginNode]:
    """Return the `twell` nodes of a graph: names, types, fields, and shapes of the weights."""
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    dtypes = {tensor.name: dtype_of(tensor.data_type) for tensor in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.domain != PLUGIN_NAMESPACE:
            continue
        fields = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        fields = {name: value.decode() if isinstance(value, bytes) else value for name, value in fields.items()}
        weights = _weights_of(node, fields, shapes)
        dtype = dtypes.get(weights[0]) if weights else None
        nodes.append(
            PluginNode(
                name=node.name,
                type=node.op_type,
                dtype=dtype_name(dtype) if dtype else None,
                inputs=list(node.input),
                outputs=list(node.output),
                weights={name: shapes[name] for name in weights},
                fields=fields,
            )
        )
    return nodes


def _weights_of(node: onnx.NodeProto, fields: dict[str, Any], shapes: dict[str, list[int]]) -> list[str]:
    """Return the names of a node's matrices among the constants; `shapes` has those of the constants."""
    if node.op_type == EXPERTS_NAME:  # behind x
        return [name for name in node.input[1 : 4 if fields.get("gate") else 3] if name in shapes]
    scales = SCALES.get(node.op_type, ()) if fields.get(SCALES_FLAG) else ()
    behind = (THRESHOLDS, *NORM_TENSORS) if node.op_type in BY_NODE else ()
    last = len(scales) + sum(bool(fields.get(each.flag)) for each in behind)
    return [name for name in node.input[: len(node.input) - last] if len(shapes.get(name, ())) == 2]


def _layer_of(node: PluginNode) -> Layer:
    """Describe a node in a graph that does not say what its layers were."""
    shapes = list(node.weights.values())
    (d_ff, d_model), d_out = shapes[0] if shapes else (0, 0), shapes[-1][1] if shapes else 0
    hot, norm = node.fields.get("hot"), node.fields.get("norm")
    return Layer(
        module=node.name or node.outputs[0],
        variant=BY_NODE[node.type].name,
        activation=str(node.fields.get("activation")),
        d_model=d_model,
        d_ff=d_ff,
        d_out=d_out,
        matched=True,
        decision="twell",
        reason="is a plugin node",
        residual=node.fields.get("residual") == 1,
        weights=Weights(8, "as the node has them") if node.fields.get(SCALES_FLAG) else None,
        hot=hot if isinstance(hot, int) else 0,
        norm=norm if isinstance(norm, str) and norm in NORMS else "none",
    )
