"""The ONNX form of the plugins: node types, inputs and attributes, as TensorRT's parser takes them.

    twell::TwellGatedMlp(x, w_gate, [b_gate], w_up, [b_up], w_down, [b_down], [residual], [scales], [thresholds],
                         [norm_weight], [norm_bias])
    twell::TwellMlp(x, w_up, [b_up], w_down, [b_down], [residual], [scales], [thresholds], [norm_weight], [norm_bias])
    twell::TwellLinear(x, weight, [bias], [norm_weight], [norm_bias], [residual], [weight_scale])  -> an output a split
    twell::TwellExperts(x, up, [gate], down, ids, weights, [up_scale], [gate_scale], [down_scale], [thresholds])
    twell::TwellAttention(q, k, v, [lengths])
    twell::TwellCachedAttention(q, keys, values, query_counts, key_counts, [cosines, sines])
    twell::TwellAppendCaches(keys, values, new_keys, new_values, starts, counts, [cosines, sines])  -> keys, values

Inputs in brackets are left out where they are absent. The attributes `gate_bias`, `up_bias`, `down_bias`, `bias`,
`norm_weight`, `norm_bias`, `residual`, `gate`, `scales`, `thresholds`, `lengths` and `rotated` show which are there.
`scales` are those of FP8 weights, one for each matrix, `thresholds` those of fatrelu, one for each neuron. The other
attributes of a block and of a linear layer are the options, see `block.py` and `linear.py`; the `splits` of a node give
the width of each output, also of a single one. Experts are those of the op in `experts_op.py`. The lengths must be 1 to
the number of keys: a graph that cannot promise this clamps them before, since the plugin has no kernel for it. Nodes
over caches have the meaning of the ops of the same names in `cache_op.py`; TwellAppendCaches writes its inputs in
place, and its outputs share their memory. Their attribute `fp8` says that caches are float8e4m3fn, and not of the
type of q: then `key_scale` and `value_scale` count, which are 1 else.

TensorRT's parser finds the plugin by the node's type and its attributes `plugin_version` and `plugin_namespace`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from twellc.plugins import linear
from twellc.plugins.block import BY_NODE, NORM_TENSORS, OPTIONS, SCALES_FLAG, THRESHOLDS, BlockOptions, Operands
from twellc.plugins.library import (
    APPEND_NAME,
    ATTENTION_NAME,
    CACHED_ATTENTION_NAME,
    EXPERTS_NAME,
    LINEAR_NAME,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
)
from twellc.plugins.linear import LinearOperands, LinearOptions

T = TypeVar("T")
ATTENTION, CACHED_ATTENTION, APPEND = ATTENTION_NAME, CACHED_ATTENTION_NAME, APPEND_NAME
IDENTITY = {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
_BY_NAME = (THRESHOLDS, *NORM_TENSORS)  # tensors of a block behind its scales
_OF_CACHES = {"rotated": int, "fp8": int, "key_scale": float, "value_scale": float}  # of nodes over caches
# Attributes and their types, by node.
ATTRIBUTES: dict[str, dict[str, type]] = {
    **{
        name: {
            **{each.name: each.kind for each in OPTIONS},
            **{each.flag: int for each in variant.tensors if each.flag},
            SCALES_FLAG: int,
            **{each.flag: int for each in _BY_NAME},
        }
        for name, variant in BY_NODE.items()
    },
    LINEAR_NAME: linear.ATTRIBUTES,
    EXPERTS_NAME: {"activation": str, "threshold": float, "gate": int, SCALES_FLAG: int, THRESHOLDS.flag: int},
    ATTENTION: {"scale": float, "causal": int, "lengths": int},
    CACHED_ATTENTION: {"scale": float, **_OF_CACHES},
    APPEND: _OF_CACHES,
}
# The tensors of experts, named and ordered as in the op, each with the attributes that it needs to be there.
_OF_EXPERTS: dict[str, tuple[str, ...]] = {
    "x": (),
    "up": (),
    "gate": ("gate",),
    "down": (),
    "ids": (),
    "weights": (),
    "up_scale": (SCALES_FLAG,),
    "gate_scale": ("gate", SCALES_FLAG),
    "down_scale": (SCALES_FLAG,),
    "thresholds": (THRESHOLDS.flag,),
}
# The scales of a node that has some: its last inputs.
SCALES = {**{name: variant.scales for name, variant in BY_NODE.items()}, LINEAR_NAME: (linear.TENSORS[-1].name,)}


def node_attributes(operands: Operands[Any], options: BlockOptions) -> dict[str, str | int | float]:
    """Return the attributes of a block's node; its inputs are the operands that are there, in their order."""
    given = operands.named()
    flags = {each.flag: int(each.name in given) for each in operands.variant.tensors if each.flag}
    flags |= {SCALES_FLAG: int(bool(operands.scales())), **{each.flag: int(each.name in given) for each in _BY_NAME}}
    return {**{each.name: each.kind(getattr(options, each.name)) for each in OPTIONS}, **flags, **IDENTITY}


def read_node(op_type: str, inputs: Sequence[T], attributes: Mapping[str, Any]) -> tuple[Operands[T], BlockOptions]:
    """Return the operands and the options of a block's node.

    Raises:
        ValueError: It has not the inputs and attributes of one.
    """
    variant = BY_NODE[op_type]
    try:
        present = [each.name for each in variant.tensors if not each.flag or attributes[each.flag]]
        # Graphs from before there were scales lack these attributes.
        present += variant.scales if attributes.get(SCALES_FLAG, 0) else ()
        present += [each.name for each in _BY_NAME if attributes.get(each.flag, 0)]
        operands = Operands(**dict(zip(present, inputs, strict=True)))
        return operands, read_options(attributes)
    except (KeyError, ValueError) as error:
        raise ValueError("it has not the fields and inputs of one") from error


def read_options(attributes: Mapping[str, Any]) -> BlockOptions:
    """Return the options among the attributes of a block's node.

    Raises:
        KeyError: One is missing.
    """
    given = {"norm": "none", "eps": 0.0, **attributes}  # graphs from before there were norms lack these
    return BlockOptions(**{each.name: each.kind(_text(given[each.name])) for each in OPTIONS})


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def linear_attributes(operands: LinearOperands[Any], options: LinearOptions, out: int) -> dict[str, Any]:
    """Return the attributes of a linear layer's node; its inputs are the operands that are there, in their order."""
    flags = {each.flag: int(getattr(operands, each.name) is not None) for each in linear.TENSORS if each.flag}
    return {
        "norm": options.norm,
        "eps": float(options.eps),
        "splits": list(options.widths(out)),
        "choose": int(options.choose),
        **flags,
        **IDENTITY,
    }


def read_linear(inputs: Sequence[T], attributes: Mapping[str, Any]) -> tuple[LinearOperands[T], LinearOptions]:
    """Return the operands and the options of a linear layer's node.

    Raises:
        ValueError: It has not the inputs and attributes of one.
    """
    try:
        present = [each.name for each in linear.TENSORS if not each.flag or attributes[each.flag]]
        operands = LinearOperands(**dict(zip(present, inputs, strict=True)))
        splits = tuple(map(int, attributes["splits"]))
        norm, eps = str(_text(attributes["norm"])), float(attributes["eps"])
        choose = bool(attributes.get("choose", 0))  # older graphs lack it
        options = LinearOptions(norm=norm, eps=eps, splits=splits if len(splits) > 1 else (), choose=choose)
        return operands, options
    except (KeyError, ValueError) as error:
        raise ValueError("it has not the fields and inputs of one") from error


def experts_attributes(given: Collection[str], activation: str, threshold: float) -> dict[str, Any]:
    """Return the attributes of a node of experts.

    Args:
        given: Names of the tensors that the op is given; they are the node's inputs, in the op's order.
        activation: The activation of the op.
        threshold: The threshold of the op.
    """
    flags = {"gate": "gate", SCALES_FLAG: "up_scale", THRESHOLDS.flag: "thresholds"}
    there = {flag: int(name in given) for flag, name in flags.items()}
    return {"activation": activation, "threshold": float(threshold), **there, **IDENTITY}


def read_experts(inputs: Sequence[T], attributes: Mapping[str, Any]) -> tuple[dict[str, T], str, float]:
    """Return the op's tensors by name, its activation and its threshold, from a node of experts.

    Raises:
        ValueError: It has not the inputs and attributes of one.
    """
    try:
        present = [name for name, flags in _OF_EXPERTS.items() if all(attributes[flag] for flag in flags)]
        tensors = dict(zip(present, inputs, strict=True))
        return tensors, str(_text(attributes["activation"])), float(attributes["threshold"])
    except (KeyError, ValueError) as error:
        raise ValueError("it has not the fields and inputs of one") from error


def attention_attributes(scale: float, causal: bool, lengths: bool) -> dict[str, str | int | float]:
    """Return the attributes of an attention node; `lengths` says whether that input is there."""
    return {
        "scale": float(scale),
        "causal": int(causal),
        "lengths": int(lengths),
        **IDENTITY,
    }


def cache_attributes(rotated: bool, fp8: bool, key_scale: float, value_scale: float) -> dict[str, str | int | float]:
    """Return the attributes that nodes over caches share; see the ops in `cache_op.py`."""
    return {
        "rotated": int(rotated),
        "fp8": int(fp8),
        "key_scale": float(key_scale),
        "value_scale": float(value_scale),
        **IDENTITY,
    }


def read_caches(inputs: Sequence[T], attributes: Mapping[str, Any], count: int) -> tuple[list[T], dict[str, Any]]:
    """Return the first `count` tensors of a node over caches, and the further arguments of its op by name."""
    # Graphs from before caches were in FP8 lack these.
    scales = {name: float(attributes.get(name, 1.0)) for name in ("key_scale", "value_scale")}
    angles = dict(zip(("cosines", "sines"), inputs[count:], strict=False))
    return list(inputs[:count]), {**angles, **scales}
