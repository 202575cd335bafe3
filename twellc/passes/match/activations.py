"""Recognise activations in an ATen graph, in all the spellings that mean the same."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.fx import Node

aten = torch.ops.aten

# Activations of feed-forward blocks whose zeros TwELL cannot use: named, so that a refusal can name them.
_OTHER = frozenset(
    (aten.silu, aten.gelu, aten.leaky_relu, aten.elu, aten.selu, aten.celu, aten.hardswish, aten.mish, aten.softplus,
     aten.sigmoid, aten.prelu, aten.relu6, aten.rrelu)
)  # fmt: skip
EACH_NEURON = "FATReLU with a threshold for each neuron"
# What may keep x above a threshold.
_CUTS = frozenset((aten.relu, aten.where, aten.masked_fill, aten.threshold, aten.mul))


@dataclass(frozen=True)
class Activation:
    """An activation found in the graph.

    Attributes:
        name: Its name.
        threshold: That of fatrelu, else 0.
        pre: What it is applied to.
        nodes: What computes it.
        bound: Of `EACH_NEURON` where x > bound is kept, and nothing else: that tensor [d_ff].
        rectifies: Whether, then, no x below 0 is kept, whatever the bound is.
    """

    name: str
    threshold: float
    pre: Node
    nodes: tuple[Node, ...]
    bound: Node | None = None
    rectifies: bool = False

    @property
    def sparse(self) -> bool:
        """Whether TwELL can use its zeros."""
        return self.name in ("relu", "relu2", "fatrelu")


def arguments(node: Node) -> tuple[Any, ...]:
    """Return the positional arguments of a node, whose types torch.fx leaves open."""
    return tuple(node.args)


def packet(node: Node) -> Any:
    """Return the operator of a node whatever its overload, or None."""
    return getattr(node.target, "overloadpacket", None) if node.op == "call_function" else None


def parse_activation(node: Node, strip: Callable[[Node], Node]) -> Activation | None:
    """Read `node` as an activation of some tensor, or return None.

    Args:
        node: The node that holds the activated tensor.
        strip: Looks through operations that change no value.
    """
    squared = square_of(node)
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


def spelt_out_relu(node: Node) -> Activation | None:
    """Read a ReLU that is spelt out in arithmetic: as relu or fatrelu, except that an x of -inf may give NaN.

    x * mask      relu(x) * mask      (x + |x|) / 2      x - min(x, 0)      -min(-x, 0)      x + relu(-x)
    x with zeros written into it: x[x < 0] = 0, masked_scatter(x, x < 0, zeros)
    rrelu in eval with slopes of 0
    """
    op = packet(node)
    if op is aten.mul:
        return _parse_masked(node) or _parse_mean_with_abs(node)
    if op is aten.div:
        return _parse_mean_with_abs(node)
    if op in (aten.add, aten.sub, aten.neg):
        return _parse_difference(node)
    if op in (aten.index_put, aten.masked_scatter):
        return _parse_written(node)
    if op is aten.rrelu and arguments(node)[1:3] == (0, 0) and True not in arguments(node)[3:4]:
        return Activation("relu", 0.0, arguments(node)[0], (node,))
    return None


def square_of(node: Node) -> Node | None:
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
        inner = _parse_relu(strip(factor))
        if inner is not None and strip(inner.pre) is strip(x):
            return Activation("relu2", 0.0, inner.pre, (node, *inner.nodes))
    return None


def _parse_simple(node: Node) -> Activation | None:
    op = packet(node)
    if op is None or not arguments(node) or not isinstance(arguments(node)[0], Node):
        return None
    pre = arguments(node)[0]
    if op is aten.relu or _is_flat_below_zero(node):
        cut = _parse_simple(pre) if packet(pre) in _CUTS else None
        if cut is not None and (cut.sparse or cut.name == EACH_NEURON):
            return replace(cut, nodes=(node, *cut.nodes), rectifies=True)
        return Activation("relu", 0.0, pre, (node,))
    if op in (aten.clamp, aten.clip, aten.clamp_min, aten.hardtanh):
        return _parse_clamp(node, pre)
    if op in (aten.maximum, aten.fmax) or node.target is aten.max.other:
        return _parse_maximum(node)
    if op is aten.threshold and len(arguments(node)) == 3:
        return _parse_threshold(node, pre)
    if op in (aten.where, aten.masked_fill):
        return _parse_where(node)
    if op is aten.scatter:
        return _parse_top_k(node)
    spelt_out = spelt_out_relu(node)
    return Activation(op.__name__, 0.0, pre, (node,)) if spelt_out is None and op in _OTHER else spelt_out


def _is_flat_below_zero(node: Node) -> bool:
    """Whether an activation that is a line below zero, or a curve there, has the factor 0 for it."""
    if packet(node) not in (aten.leaky_relu, aten.elu) or node.kwargs:
        return False
    return any(constant_number(factor) == 0 for factor in arguments(node)[1:2])


def _parse_clamp(node: Node, pre: Node) -> Activation | None:
    default = {"min_val": -1.0, "max_val": 1.0} if packet(node) is aten.hardtanh else {"min": None, "max": None}
    low, high = {**default, **dict(zip(default, arguments(node)[1:], strict=False)), **node.kwargs}.values()
    if constant_number(low) != 0 or isinstance(high, Node):
        return None
    nodes = (node, *_numbers_shaped_like(low, pre))
    if high is None or high == math.inf:
        return Activation("relu", 0.0, pre, nodes)
    # Not relu2, which is the square, for a bound of 2.
    return Activation("relu6" if high == 6 else f"relu up to {high:g}", 0.0, pre, nodes)


def _parse_maximum(node: Node) -> Activation | None:
    for pre, other in (arguments(node), reversed(arguments(node))):
        if isinstance(pre, Node) and isinstance(other, Node) and constant_number(other) == 0:
            return Activation("relu", 0.0, pre, (node, *_numbers_shaped_like(other, pre)))
    return None


def _parse_threshold(node: Node, pre: Node) -> Activation | None:
    _, threshold, value = arguments(node)
    if not isinstance(threshold, int | float) or value != 0 or not 0 <= threshold < math.inf:
        return None
    return Activation("fatrelu" if threshold else "relu", float(threshold), pre, (node,))


def _parse_where(node: Node) -> Activation | None:
    """Read where(x > t, x, 0), where(x <= t, 0, x), masked_fill(x, x <= t, 0), and all of them with >= and <."""
    condition, chosen, other = (arguments(node) + (None,) * 3)[:3]
    if packet(node) is aten.masked_fill:
        condition, chosen, other = chosen, other, condition
    mask = _mask(condition)
    if mask is None:
        return None
    kept, dropped = (other, chosen) if mask.inverse else (chosen, other)
    return _cut(kept, mask, (node, *_numbers_shaped_like(dropped, mask.x))) if constant_number(dropped) == 0 else None


def _parse_top_k(node: Node) -> Activation | None:
    """Read zeros with the k largest of x, or their ReLU, written to where they stand: no kernel selects in a row."""
    places = arguments(node)[2]
    top = arguments(places)[0] if places.target is operator.getitem else None
    if top is None or packet(top) is not aten.topk:
        return None
    return Activation("top-k", 0.0, arguments(top)[0], (node,))


def _parse_masked(node: Node) -> Activation | None:
    """Read x * mask, relu(x) * mask."""
    if len(arguments(node)) != 2:
        return None
    for kept, factor in (arguments(node), reversed(arguments(node))):
        mask = _mask(factor)
        if mask is None or mask.inverse or not isinstance(kept, Node):
            continue
        value, product = kept.meta["val"], node.meta["val"]
        if value.is_floating_point() and value.dtype == product.dtype and (found := _cut(kept, mask, (node,))):
            return found
    return None


def _parse_mean_with_abs(node: Node) -> Activation | None:
    """Read (x + |x|) / 2."""
    half = 2 if packet(node) is aten.div else 0.5
    for total, factor in (arguments(node), reversed(arguments(node))):
        if not isinstance(total, Node) or packet(total) is not aten.add or constant_number(factor) != half:
            continue
        for x, size in (arguments(total), reversed(arguments(total))):
            if isinstance(size, Node) and packet(size) is aten.abs and arguments(size)[0] is x and not total.kwargs:
                return Activation("relu", 0.0, x, (node, total, size))
    return None


def _parse_difference(node: Node) -> Activation | None:
    """Read x - min(x, 0), -min(-x, 0), x + relu(-x)."""
    if node.kwargs or not all(isinstance(operand, Node) for operand in arguments(node)):
        return None
    if packet(node) is aten.neg:
        x, nodes = _negative_part(arguments(node)[0])
        negated = x is not None and packet(x) is aten.neg
        return Activation("relu", 0.0, arguments(x)[0], (node, *nodes, x)) if x is not None and negated else None
    left, right = arguments(node)
    if packet(node) is aten.sub:
        x, nodes = _negative_part(right)
        return None if x is None or x is not left else Activation("relu", 0.0, x, (node, *nodes))
    for x, other in ((left, right), (right, left)):
        relu = _parse_relu(other) if packet(other) is not aten.add else None
        if relu is not None and packet(relu.pre) is aten.neg and arguments(relu.pre)[0] is x:
            return Activation("relu", 0.0, x, (node, *relu.nodes, relu.pre))
    return None


def _negative_part(node: Node) -> tuple[Node | None, tuple[Node, ...]]:
    """Return x where `node` computes min(x, 0), and the nodes that do."""
    if packet(node) in (aten.minimum, aten.fmin) or node.target is aten.min.other:
        for x, zero in (arguments(node), reversed(arguments(node))):
            if isinstance(x, Node) and constant_number(zero) == 0:
                return x, (node, *_numbers_shaped_like(zero, x))
    elif packet(node) in (aten.clamp, aten.clip, aten.clamp_max):
        x, *bounds = arguments(node)
        low, high = (None, *bounds) if packet(node) is aten.clamp_max else (*bounds, None, node.kwargs.get("max"))[:2]
        if low is None and constant_number(high) == 0:
            return x, (node, *_numbers_shaped_like(high, x))
    return None, ()


def _parse_written(node: Node) -> Activation | None:
    """Read x[x <= t] = 0, masked_scatter(x, x <= t, zeros)."""
    x, mask, value, *accumulate = arguments(node)
    if packet(node) is aten.index_put:
        if len(mask) != 1 or any(accumulate):
            return None
        (mask,) = mask
    found = _mask(mask)
    if found is None or not found.inverse or constant_number(value) != 0:
        return None
    return _cut(x, found, (node, *_numbers_shaped_like(value, found.x)))


# ---- masks ----


@dataclass(frozen=True)
class _Mask:
    """A tensor that is 1, or true, where x > threshold, and 0 elsewhere; the other way round if `inverse`.

    `threshold` is None where it differs between neurons. Then it is x > bound; or, if that is None, x >= something.
    """

    x: Node
    threshold: float | None
    inverse: bool
    nodes: tuple[Node, ...]
    bound: Node | None = None

    def inverted(self) -> _Mask:
        return replace(self, inverse=not self.inverse)


def _cut(kept: object, mask: _Mask, nodes: tuple[Node, ...]) -> Activation | None:
    """Return what it means that a mask keeps x, or relu(x), and that all else is 0; the latter's may be of relu(x)."""
    if not isinstance(kept, Node):
        return None
    nodes, threshold = (*nodes, *mask.nodes), mask.threshold
    relu, seen, narrow = _parse_relu(kept), mask.x, _before_widening(mask.x)
    x = kept if relu is None else relu.pre
    if seen is not x and narrow is not seen:
        seen, nodes = narrow, (*nodes, seen)
    if relu is not None:
        nodes, threshold = (*nodes, *relu.nodes), None if threshold is None else max(threshold, 0.0)
        below = _parse_relu(seen)
        seen, nodes = (seen, nodes) if below is None else (below.pre, (*nodes, *below.nodes))
    if seen is not x:
        return None
    if threshold is None:
        return Activation(EACH_NEURON, 0.0, x, nodes, mask.bound, rectifies=relu is not None)
    if not 0 <= threshold < math.inf:
        return None
    return Activation("fatrelu" if threshold else "relu", threshold, x, nodes)


def _parse_relu(node: Node) -> Activation | None:
    """Read a ReLU itself."""
    found = _parse_simple(node)
    return found if found is not None and found.name == "relu" else None


def _mask(node: object) -> _Mask | None:
    """Read a mask, of any type."""
    if not isinstance(node, Node) or not arguments(node):
        return None
    op, given = packet(node), arguments(node)
    if op in _MIRRORED:
        return _comparison(node)
    if op is aten.heaviside:
        at_zero = constant_number(given[1])
        finite = at_zero is not None and math.isfinite(at_zero)
        return _Mask(given[0], 0.0, False, (node, *_numbers_shaped_like(given[1], given[0]))) if finite else None
    if op is aten.sign:
        relu = _parse_relu(given[0])
        return None if relu is None else _Mask(relu.pre, 0.0, False, (node, *relu.nodes))
    inner: _Mask | None = None
    if op in (aten._to_copy, aten.to):
        inner = _mask(given[0])
    elif op in (aten.logical_not, aten.bitwise_not) and given[0].meta["val"].dtype == torch.bool:
        inner = _mask(given[0])
        inner = inner and inner.inverted()
    elif op is aten.where and len(given) == 3:
        inner, ends = _mask(given[0]), (constant_number(given[1]), constant_number(given[2]))
        if inner is None or ends not in ((1, 0), (0, 1)):
            return None
        inner = inner if ends == (1, 0) else inner.inverted()
        filled = (each for end in given[1:] for each in _numbers_shaped_like(end, inner.x))
        inner = replace(inner, nodes=(*inner.nodes, *filled))
    elif op in (aten.rsub, aten.sub) and len(given) == 2 and not node.kwargs:
        whole, part = given if op is aten.sub else given[::-1]
        inner = _mask(part) if constant_number(whole) == 1 else None
        inner = inner and inner.inverted()
    elif op in (aten.relu, aten.clamp, aten.clamp_min):
        relu = _parse_relu(node)
        if relu is not None and packet(relu.pre) is aten.sign:
            return _Mask(arguments(relu.pre)[0], 0.0, False, (*relu.nodes, relu.pre))
    return None if inner is None else replace(inner, nodes=(node, *inner.nodes))


# Comparisons, and what they are with their operands swapped.
_MIRRORED: dict[object, object] = {aten.gt: aten.lt, aten.ge: aten.le, aten.lt: aten.gt, aten.le: aten.ge}


def compared_in(x: Node, bound: object) -> torch.dtype:
    """Return the dtype that torch compares a tensor in with a number, or with what that fills: one with dimensions."""
    value = bound.meta["val"] if isinstance(bound, Node) else None
    dtype: torch.dtype = x.meta["val"].dtype
    return dtype if value is None or not value.dim() else torch.promote_types(dtype, value.dtype)


def _comparison(node: Node) -> _Mask | None:
    op, (x, bound) = packet(node), arguments(node)
    if constant_number(x) is not None or (_is_vector_of_constants(x, bound) and not _is_vector_of_constants(bound, x)):
        op, x, bound = _MIRRORED[op], bound, x
    if not isinstance(x, Node) or not x.meta["val"].is_floating_point():
        return None
    nodes, inverse = (node, *_numbers_shaped_like(bound, x)), op in (aten.le, aten.lt)
    number = constant_number(bound)
    if number is None:
        if not isinstance(bound, Node) or not _is_vector_of_constants(bound, x):
            return None
        is_kept_above = op in (aten.gt, aten.le)
        return _Mask(x, None, inverse, nodes, _before_widening(bound) if is_kept_above else None)
    dtype = compared_in(x, bound)
    # The comparison rounds its number to that, the op does not.
    threshold = float(torch.tensor(number, dtype=torch.float64).to(dtype))
    if op in (aten.ge, aten.lt) and threshold > 0:
        # x >= t is x > the float32 before t, for every x of float32 or a narrower type.
        if dtype == torch.float64 or threshold == math.inf:
            return None
        threshold = float(np.nextafter(np.float32(threshold), np.float32(0)))
    return None if math.isnan(threshold) else _Mask(x, threshold, inverse, nodes)


def _before_widening(node: Node) -> Node:
    """Return what a cast to float32 is of that changes no value; else the node."""
    if packet(node) in (aten._to_copy, aten.to) and node.meta["val"].dtype == torch.float32:
        source = arguments(node)[0]
        if source.meta["val"].dtype in (torch.bfloat16, torch.float16):
            return _before_widening(source)
    return node


def _is_vector_of_constants(bound: object, x: object) -> bool:
    """Whether a tensor has a number for each neuron and is computed from stored tensors alone."""
    if not isinstance(bound, Node) or not isinstance(x, Node):
        return False
    sizes, wanted = bound.meta["val"].shape, x.meta["val"].shape[-1:]
    if not wanted or list(sizes[-1:]) != list(wanted) or any(size != 1 for size in sizes[:-1]):
        return False
    pending = [bound]
    for node in pending:
        pending += [source for source in node.all_input_nodes if source not in pending]
        if x in pending or len(pending) > 16:
            return False
    return True


def _numbers_shaped_like(argument: object, pre: Node) -> tuple[Node, ...]:
    """Return the node that reads `pre` only for its shape, if `argument` is one."""
    return (argument,) if isinstance(argument, Node) and argument is not pre and pre in argument.all_input_nodes else ()


def constant_number(argument: object) -> float | None:
    """Return the number that an argument is, or that fills it as a tensor."""
    if isinstance(argument, int | float):
        return float(argument)
    if not isinstance(argument, Node):
        return None
    op = packet(argument)
    if op in (aten.zeros_like, aten.zeros, aten.new_zeros):
        return 0.0
    if op in (aten.ones_like, aten.ones, aten.new_ones):
        return 1.0
    if op in (aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        return constant_number(arguments(argument)[-1])
    if op in (aten.clone, aten._to_copy, aten.expand, aten.view, aten.lift_fresh_copy, aten.alias):
        return constant_number(arguments(argument)[0])
    return None
