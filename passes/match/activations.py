"""Recognise activations in an ATen graph, in all the spellings that mean the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

aten = torch.ops.aten

# Activations of feed-forward blocks whose zeros TwELL cannot use: named, so that a refusal can say what stands there.
_OTHER = {
    aten.silu: "silu",
    aten.gelu: "gelu",
    aten.leaky_relu: "leaky_relu",
    aten.elu: "elu",
    aten.selu: "selu",
    aten.celu: "celu",
    aten.hardswish: "hardswish",
    aten.mish: "mish",
    aten.softplus: "softplus",
    aten.sigmoid: "sigmoid",
    aten.prelu: "prelu",
    aten.relu6: "relu6",
}


@dataclass(frozen=True)
class Activation:
    """An activation found in the graph: `name(pre)` with its threshold, and the nodes that compute it."""

    name: str
    threshold: float
    pre: Node
    nodes: tuple[Node, ...]

    @property
    def sparse(self) -> bool:
        """Whether TwELL can use its zeros."""
        return self.name in ("relu", "relu2", "fatrelu")


def arguments(node: Node) -> tuple[Any, ...]:
    """Return the positional arguments of a node, whose types torch.fx leaves open."""
    return tuple(node.args)


def packet(node: Node) -> object:
    """Return the operator of a node whatever its overload, or None."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def parse_activation(node: Node, strip: Callable[[Node], Node]) -> Activation | None:
    """Read `node` as an activation of some tensor, or return None.

    Args:
        node: The node that holds the activated tensor.
        strip: Looks through operations that change no value.
    """
    squared = _square_of(node)
    if squared is not None:
        inner = _parse_simple(strip(squared))
        if inner is not None and inner.name == "relu":
            return Activation("relu2", 0.0, inner.pre, (node, *inner.nodes))
        return None
    return _parse_product_with_relu(node, strip) or _parse_simple(node)


def is_squared_relu(node: Node) -> bool:
    """Whether `node` squares a ReLU, with nothing in between."""
    activation = parse_activation(node, lambda source: source)
    return activation is not None and activation.name == "relu2"


def masked_relu(node: Node) -> Activation | None:
    """Read x * (x > t) or x * (x >= t), which is relu or fatrelu except that an x of -inf gives NaN."""
    if packet(node) is not aten.mul:
        return None
    for x, mask in (arguments(node), reversed(arguments(node))):
        if not isinstance(x, Node) or not isinstance(mask, Node):
            return None
        casts = (mask,) if packet(mask) in (aten._to_copy, aten.to) else ()
        mask = arguments(mask)[0] if casts else mask
        if packet(mask) not in (aten.gt, aten.ge) or arguments(mask)[0] is not x:
            continue
        value, product = x.meta["val"], node.meta["val"]
        threshold = _threshold(mask)
        if threshold is None or not value.is_floating_point() or value.dtype != product.dtype:
            return None
        return Activation("fatrelu" if threshold else "relu", threshold, x, (node, mask, *casts))
    return None


def _square_of(node: Node) -> Node | None:
    """Return t where `node` computes t * t."""
    op, operands = packet(node), arguments(node)
    squares = op is aten.square or (op in (aten.pow, aten.mul) and len(operands) == 2)
    if not squares or not isinstance(operands[0], Node):
        return None
    if op is aten.pow and operands[1] != 2:
        return None
    if op is aten.mul and operands[1] is not operands[0]:
        return None
    return operands[0]


def _parse_product_with_relu(node: Node, strip: Callable[[Node], Node]) -> Activation | None:
    """Read x * relu(x), which is relu(x) squared except that an x of -inf gives NaN."""
    if packet(node) is not aten.mul or not all(isinstance(factor, Node) for factor in arguments(node)):
        return None
    for x, factor in (arguments(node), reversed(arguments(node))):
        inner = _parse_simple(strip(factor))
        if inner is not None and inner.name == "relu" and strip(inner.pre) is strip(x):
            return Activation("relu2", 0.0, inner.pre, (node, *inner.nodes))
    return None


def _parse_simple(node: Node) -> Activation | None:
    op = packet(node)
    if op is None or not arguments(node) or not isinstance(arguments(node)[0], Node):
        return None
    pre = arguments(node)[0]
    if op is aten.relu:
        return Activation("relu", 0.0, pre, (node,))
    if op in (aten.clamp, aten.clip, aten.clamp_min, aten.hardtanh):
        return _parse_clamp(node, pre)
    if op is aten.maximum or node.target is aten.max.other:
        return _parse_maximum(node)
    if op is aten.threshold and len(arguments(node)) == 3:
        return _parse_threshold(node, pre)
    if op in (aten.where, aten.masked_fill):
        return _parse_where(node)
    if op is aten.mul:
        return masked_relu(node)
    if op in _OTHER:
        return Activation(_OTHER[op], 0.0, pre, (node,))
    return None


def _parse_clamp(node: Node, pre: Node) -> Activation | None:
    default = (-1.0, 1.0) if packet(node) is aten.hardtanh else (None, None)
    names = ("min_val", "max_val") if packet(node) is aten.hardtanh else ("min", "max")
    bounds = [
        arguments(node)[i + 1] if len(arguments(node)) > i + 1 else node.kwargs.get(name, default[i])
        for i, name in enumerate(names)
    ]
    low, high = bounds
    if not _is_zero(low) or isinstance(high, Node):
        return None
    if high is None or high == math.inf:
        return Activation("relu", 0.0, pre, (node,))
    # Not relu2, which is the square, for a bound of 2.
    return Activation("relu6" if high == 6 else f"relu up to {high:g}", 0.0, pre, (node,))


def _parse_maximum(node: Node) -> Activation | None:
    for pre, other in (arguments(node), reversed(arguments(node))):
        if isinstance(pre, Node) and isinstance(other, Node) and _is_zero(other):
            return Activation("relu", 0.0, pre, (node, *_zeros_shaped_like(other, pre)))
    return None


def _parse_threshold(node: Node, pre: Node) -> Activation | None:
    _, threshold, value = arguments(node)
    if not isinstance(threshold, int | float) or value != 0 or not 0 <= threshold < math.inf:
        return None
    return Activation("fatrelu" if threshold else "relu", float(threshold), pre, (node,))


def _parse_where(node: Node) -> Activation | None:
    """where(x > t, x, 0), where(x <= t, 0, x), masked_fill(x, x <= t, 0), and all of them with >= and <."""
    condition, chosen, other = (arguments(node) + (None,) * 3)[:3]
    if packet(node) is aten.masked_fill:
        condition, chosen, other = chosen, other, condition
    if not isinstance(condition, Node) or len(arguments(condition)) != 2:
        return None
    keeps_pre = _is_zero(other)
    pre = chosen if keeps_pre else other if _is_zero(chosen) else None
    strict, loose = (aten.gt, aten.ge) if keeps_pre else (aten.le, aten.lt)
    if pre is None or arguments(condition)[0] is not pre or packet(condition) not in (strict, loose):
        return None
    assert isinstance(pre, Node)
    threshold = _threshold(condition)
    if threshold is None:
        return None
    zeros = (node for zero in (chosen, other, arguments(condition)[1]) for node in _zeros_shaped_like(zero, pre))
    return Activation("fatrelu" if threshold else "relu", threshold, pre, (node, condition, *zeros))


def _threshold(comparison: Node) -> float | None:
    """Return the t >= 0 that makes x > t mean what the comparison of a tensor with a number says, or its inverse."""
    op, (x, threshold) = packet(comparison), arguments(comparison)
    if isinstance(threshold, Node) and _is_zero(threshold):
        threshold = 0
    if not isinstance(threshold, int | float):
        return None
    dtype = x.meta["val"].dtype
    # The comparison rounds its number to the tensor's dtype, the op does not.
    rounded = float(torch.tensor(threshold, dtype=torch.float64).to(dtype))
    if not 0 <= rounded < math.inf:
        return None
    if op in (aten.gt, aten.le) or rounded == 0:
        return rounded
    # x >= t is x > the float32 before t, for every x of float32 or a narrower type.
    return None if dtype == torch.float64 else float(np.nextafter(np.float32(rounded), np.float32(0)))


def _zeros_shaped_like(argument: object, pre: Node) -> tuple[Node, ...]:
    """Return the node that reads `pre` only for its shape, if `argument` is one."""
    return (argument,) if isinstance(argument, Node) and argument is not pre and pre in argument.all_input_nodes else ()


def _is_zero(argument: object) -> bool:
    """Whether an argument is the number 0 or a tensor that the graph fills with 0."""
    if isinstance(argument, int | float):
        return argument == 0
    if not isinstance(argument, Node):
        return False
    op = packet(argument)
    if op in (aten.zeros_like, aten.zeros, aten.new_zeros):
        return True
    if op in (aten.full, aten.full_like, aten.scalar_tensor):
        return bool(arguments(argument)[-1] == 0)
    return False
