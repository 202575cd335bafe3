"""What `twellc inspect` shows of a model, or of a rewritten ONNX file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import onnx

from twellc.base.dtypes import dtype_name, torch_dtype
from twellc.base.records import of_json
from twellc.compiling.result import METADATA_KEY
from twellc.compiling.translate_onnx import cast_notes
from twellc.compiling.translate_torch import activation_notes
from twellc.decisions.advise import Advisor, firing_of
from twellc.decisions.choose import Tokens
from twellc.decisions.targets import choose_target, gpu_at_hand
from twellc.firing.calibration import load_calibration
from twellc.inspection.description import Description, PluginNode
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.loaders.onnx_models import KIND, choose_onnx_dtype, open_model
from twellc.loaders.precision import choose_dtype
from twellc.options.commands import InspectOptions, refuse_calibration, refuse_dtype
from twellc.options.declared_inputs import InputDeclaration
from twellc.passes.attention import MATMUL, rewrite_attention
from twellc.passes.neurons import arrange_neurons
from twellc.passes.onnx.ffn import find_onnx_blocks
from twellc.passes.onnx.graph import dtype_of
from twellc.passes.pipeline import find, prepare
from twellc.passes.report import Layer
from twellc.plugins.library import PLUGIN_NAMES, PLUGIN_NAMESPACE
from twellc.plugins.onnx_node import GATED, HOT, RESIDUAL


def describe_model(options: InspectOptions, progress: Callable[[str], None]) -> Description:
    """Return what is known of a model or a rewritten ONNX file.

    Raises:
        UserError: It is no model, or not one that `dtype` or `inputs` are for.
    """
    calls = [Tokens(options.tokens, options.tokens, options.tokens)]
    target = choose_target(options.target_gpu, gpu_at_hand())
    if looks_like_onnx(options.target):
        refuse_calibration(options, f"{options.target}, an ONNX file")
        progress("loading the model")
        return inspect_onnx(
            options.target, options.dtype, options.inputs, Advisor(target, {}, lambda block: calls, options.density)
        )
    progress("loading and tracing the model")
    calibrated = load_calibration(options, options.target)
    model = load_model(options.target, options.trust_model, options.inputs)
    chosen, notes = choose_dtype(model, options.dtype)
    progress("looking for feed-forward blocks")
    program = prepare(model.program, torch_dtype(chosen))
    calibration = None if calibrated is None else calibrated.calibration
    advisor = Advisor(target, firing_of(calibration), lambda block: calls, options.density)
    found = find(program, "auto", advisor)
    if calibrated is not None:
        calibrated.refuse_other_blocks(found.layers)
    layers = arrange_neurons(program, found.blocks, found.layers, calibration)[1]
    attention = rewrite_attention(program, (MATMUL,))[1]
    notes = [*model.notes, *notes, *activation_notes(model, layers), *advisor.notes(layers)]
    if calibrated is not None:
        notes += [*calibrated.profile.warnings, *calibrated.notes(layers, chosen)]
    return Description(model.kind, layers, notes, dtype=chosen, attention=attention)


def inspect_onnx(
    path: Path, dtype: str | None, declared: tuple[InputDeclaration, ...], advisor: Advisor
) -> Description:
    """Return what `twellc inspect` shows of an ONNX file; of a rewritten one also its `twell` nodes."""
    model = open_model(path, declared)
    nodes = twell_nodes(model)
    if nodes:
        refuse_dtype(dtype, f"{path}, a rewritten graph")
        chosen, layers = _metadata(model)
        layers = layers or [_layer_of(node) for node in nodes if node.type in PLUGIN_NAMES]
        notes = [f"{path.name} is a rewritten graph: {len(nodes)} of its nodes are plugins"]
        return Description("rewritten ONNX file", layers, notes, dtype=chosen, nodes=nodes)
    chosen = choose_onnx_dtype(model, dtype)
    found = find_onnx_blocks(model, torch_dtype(chosen), "auto", advisor)
    return Description(KIND, found.layers, [*cast_notes(found, chosen), *advisor.notes(found.layers)], dtype=chosen)


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
        weights = [name for name in node.input if len(shapes.get(name, ())) == 2]
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


def _layer_of(node: PluginNode) -> Layer:
    """Describe a node in a graph that does not say what its layers were."""
    shapes = list(node.weights.values())
    (d_ff, d_model), d_out = shapes[0] if shapes else (0, 0), shapes[-1][1] if shapes else 0
    hot = node.fields.get(HOT)
    return Layer(
        module=node.name or node.outputs[0],
        variant="gated" if node.type == GATED else "plain",
        activation=str(node.fields.get("activation")),
        d_model=d_model, d_ff=d_ff, d_out=d_out, matched=True, decision="twell", reason="is a plugin node",
        residual=node.fields.get(RESIDUAL) == 1,
        hot=hot if isinstance(hot, int) else 0,
    )  # fmt: skip


def _metadata(model: onnx.ModelProto) -> tuple[str | None, list[Layer]]:
    """Return the precision and the layers that a rewritten graph notes, as far as it does and in this form."""
    text = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), "")
    try:
        content = json.loads(text)
        layers = [of_json(Layer, layer) for layer in content["layers"]]
        dtype = str(content["settings"]["dtype"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, []
    return dtype, layers
