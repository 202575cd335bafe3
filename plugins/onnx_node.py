"""The ONNX form of the plugins: node types, inputs and attributes, as TensorRT's parser takes them.

    twell::TwellGatedMlp(x, w_gate, [b_gate], w_up, [b_up], w_down, [b_down], [residual])
    twell::TwellMlp(x, w_up, [b_up], w_down, [b_down], [residual])
    twell::TwellAttention(q, k, v, [lengths])

What is in brackets is left out of the inputs where it is absent; the attributes `gate_bias`, `up_bias`, `down_bias`,
`residual` and `lengths` say what is there. The lengths must be 1 to the number of keys: a graph that cannot promise
that clamps them before, since the plugin has no kernel of its own to do it.

TensorRT's parser finds the plugin by the node's type and its attributes `plugin_version` and `plugin_namespace`.
"""

from __future__ import annotations

from twellc.plugins.library import ATTENTION_NAME, PLUGIN_NAMES, PLUGIN_NAMESPACE, PLUGIN_VERSION

GATED, PLAIN = PLUGIN_NAMES
ATTENTION = ATTENTION_NAME
# Attributes that say which optional inputs there are.
RESIDUAL = "residual"
# The attribute that says how many neurons, the first ones, calls with many tokens compute densely.
HOT = "hot"
BIASES = {GATED: ("gate_bias", "up_bias", "down_bias"), PLAIN: ("up_bias", "down_bias")}


def node_attributes(
    op_type: str, present: list[bool], residual: bool, activation: str, threshold: float, compression: int, hot: int
) -> dict[str, str | int | float]:
    """Return the attributes of a node; `present` says of each bias in `BIASES[op_type]` whether it is there."""
    return {
        "activation": activation,
        "threshold": float(threshold),
        "compression": compression,
        HOT: hot,
        **{name: int(there) for name, there in zip(BIASES[op_type], present, strict=True)},
        RESIDUAL: int(residual),
        "plugin_version": PLUGIN_VERSION,
        "plugin_namespace": PLUGIN_NAMESPACE,
    }


def attention_attributes(scale: float, causal: bool, lengths: bool) -> dict[str, str | int | float]:
    """Return the attributes of an attention node; `lengths` says whether that input is there."""
    return {
        "scale": float(scale),
        "causal": int(causal),
        "lengths": int(lengths),
        "plugin_version": PLUGIN_VERSION,
        "plugin_namespace": PLUGIN_NAMESPACE,
    }
