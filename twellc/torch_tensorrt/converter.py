"""The converter of the `twell` ops in Torch-TensorRT: a check whether the plugins take a call, and its layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from torch.fx import Node

from twellc.base.dtypes import dtype_name
from twellc.base.torch_private import OpOverload, schema_of
from twellc.plugins import library
from twellc.plugins.block import VARIANTS, BlockOptions, Operands, call_of, problem_of
from twellc.plugins.onnx_node import IDENTITY, node_attributes

_LOG = logging.getLogger("twellc")


def takes(node: Node, _settings: object = None) -> bool:
    """Whether the plugins take a call of a `twell` op; if not, the logger `twellc` says why."""
    operands, options = _call(node.target, node.args, node.kwargs)
    fault = _fault(operands, options)
    if fault:
        _LOG.warning("%s is left to torch: %s", node.name, fault)
    return not fault


def _call(target: Any, args: Any, kwargs: Any) -> tuple[Operands[Any], BlockOptions]:
    """Return the tensors and the options of a call."""
    variant = next(each for each in VARIANTS.values() if each.op == schema_of(target).name.partition("::")[2])
    return call_of(variant, args, kwargs)


def _fault(operands: Operands[Node], options: BlockOptions) -> str:
    """Return why the plugins do not take a call; an empty text where they do."""
    if operands.scales():
        return "its weights are in FP8, which only plans of twellc compile take"
    if operands.thresholds is not None:
        return "it has a threshold for each neuron, which only plans of twellc compile take"
    # Only weights are checked: nodes from Torch-TensorRT's lowering before a block may lack `val`. All have one dtype.
    first, w_down = (weight.meta["val"] for weight in (operands.first[0], operands.w_down))
    dtype = dtype_name(first.dtype)
    if dtype not in library.DTYPES:
        return f"its tensors are {dtype}; the plugins take {' or '.join(library.DTYPES)}"
    (d_ff, d_model), d_out = first.shape, w_down.shape[1]
    if not all(isinstance(width, int) for width in (d_ff, d_model, d_out)):
        return "the shapes of its weights are dynamic"
    problem = problem_of(operands.variant, options, dtype, tokens=1, d_model=d_model, d_ff=d_ff, d_out=d_out)
    return library.fault_of(problem)


def convert(ctx: Any, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Add the plugin layer of a `twell` op to the network of `ctx`; return its output, y [..., d_out]."""
    from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor, set_layer_name

    operands, options = _call(target, args, kwargs)
    plugin = make_plugin(name, operands, options)
    inputs = [get_trt_tensor(ctx, value, f"{name}_{each}") for each, value in operands.named().items()]
    layer = ctx.net.add_plugin_v3(inputs, [], plugin)
    set_layer_name(layer, target, name)
    return layer.get_output(0)


def make_plugin(name: str, operands: Operands[Any], options: BlockOptions) -> Any:
    """Make the plugin of a block, through the registry of the module `tensorrt`.

    Raises:
        RuntimeError: The plugin refuses its fields; TensorRT's log says which.
    """
    import tensorrt

    kinds: dict[type, tuple[Any, Callable[[Any], Any]]] = {
        str: (tensorrt.PluginFieldType.CHAR, lambda text: np.frombuffer(text.encode(), np.int8)),
        float: (tensorrt.PluginFieldType.FLOAT32, lambda number: np.array([number], np.float32)),
        int: (tensorrt.PluginFieldType.INT32, lambda number: np.array([number], np.int32)),
    }
    # A field does not keep its array alive.
    arrays, fields = [], []
    for each, value in node_attributes(operands, options).items():
        if each not in IDENTITY:
            kind, as_array = kinds[type(value)]
            arrays.append(as_array(value))
            fields.append(tensorrt.PluginField(each, arrays[-1], kind))
    creator = tensorrt.get_plugin_registry().get_creator(
        operands.variant.node, IDENTITY["plugin_version"], IDENTITY["plugin_namespace"]
    )
    plugin = creator.create_plugin(name, tensorrt.PluginFieldCollection(fields), tensorrt.TensorRTPhase.BUILD)
    if plugin is None:
        raise RuntimeError(f"{name}: the plugin {operands.variant.node} refuses its fields; TensorRT's log says which")
    return plugin
