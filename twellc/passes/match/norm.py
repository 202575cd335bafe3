"""Recognise normalisations of rows, in the forms that mean the same.

    rms      x / sqrt(mean(x^2) + eps) * w
    layer    (x - mean(x)) / sqrt(var(x) + eps) * w + b

Read are torch's own operators and what they are decomposed into: products with rsqrt or a power of -1/2, quotients by
sqrt, squares in any form that `activations.py` reads, the variance spelt out or an operator. w and b are a number for
each feature, computed from constants alone, such as Gemma's 1 + w. A cast of x goes to a wider dtype; what comes behind
the quotient may be cast anywhere: models differ in where they round.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from twellc.passes.match.activations import arguments, packet, square_of
from twellc.passes.match.linear import CASTS, WIDENING, operand, same_sizes, strip

aten = torch.ops.aten

_RMS_NORMS = (aten.rms_norm, aten._fused_rms_norm)


@dataclass(frozen=True)
class Norm:
    """A normalisation.

    Attributes:
        kind: `rms` or `layer`.
        node: Its result, before it is cast.
        x: What is normalised, of the shape of `node`, in the dtype that it has before it is widened.
        eps: What is added to the mean of squares, or to the variance.
        weight, bias: The factor of the quotient, and the term added, computed from constants alone: a number for each
            feature, [d] or [1, ..., d].
    """

    kind: str
    node: Node
    x: Node
    eps: float
    weight: Node | None = None
    bias: Node | None = None


def read_norm(node: Node, fixed: Collection[Node]) -> Norm | None:
    """Read a node as the result of a normalisation; `fixed` are the nodes that are computed from constants alone."""
    node = _behind_casts(node)
    found = _operator(node)
    if found is None:
        place, bias = _without(node, aten.add, fixed)
        place, weight = _without(place, aten.mul, fixed)
        quotient = _quotient(place)
        if quotient is None or (quotient.kind == "rms" and bias is not None):
            return None
        found = replace(quotient, node=node, weight=weight, bias=bias)
    known = all(_is_vector(each, found.x) and each in fixed for each in (found.weight, found.bias) if each is not None)
    return found if known and same_sizes(found.x.meta["val"].shape, node.meta["val"].shape) else None


def _operator(node: Node) -> Norm | None:
    """Read an operator of torch."""
    call = node
    if node.target is operator.getitem:
        call, index = arguments(node)
        if index != 0:
            return None
    op, given = packet(call), (*arguments(call), *(None,) * 5)[:5]
    layer = op in (aten.layer_norm, aten.native_layer_norm)
    if not layer and op not in _RMS_NORMS:
        return None
    x, sizes, weight, bias, eps = given if layer else (*given[:3], None, given[3])
    eps = call.kwargs.get("eps", eps)
    if eps is None:
        eps = 1e-5 if layer else _own_eps(x)
    weight, bias = call.kwargs.get("weight", weight), call.kwargs.get("bias", bias)
    return Norm("layer" if layer else "rms", node, _before_widening(x), eps, weight, bias) if len(sizes) == 1 else None


def _own_eps(x: Node) -> float:
    """Return the eps of an RMS norm that is given none: the machine epsilon of what its sums are computed in."""
    return torch.finfo(torch.promote_types(x.meta["val"].dtype, torch.float32)).eps


def write_eps(node: Node) -> None:
    """Write the eps of an RMS norm that is given none as a number, which stays when the dtype of x changes."""
    x, sizes, weight, eps = (*arguments(node), *(None,) * 4)[:4]
    if packet(node) in _RMS_NORMS and eps is None and node.kwargs.get("eps") is None:
        weight = node.kwargs.get("weight", weight)
        node.args, node.kwargs = (x, sizes, weight, _own_eps(x)), {}


def _quotient(node: Node) -> Norm | None:
    """Read x times what normalises it."""
    operands = [each for each in arguments(node) if isinstance(each, Node)]
    if len(operands) != 2 or node.kwargs:
        return None
    x, divisor = operands
    if packet(node) is aten.mul:
        pairs, powers = [(x, divisor), (divisor, x)], (aten.rsqrt, -0.5)
    else:
        pairs, powers = [(x, divisor)] if packet(node) is aten.div else [], (aten.sqrt, 0.5)
    for x, root in pairs:
        root = _behind_casts(root)
        if packet(root) is not powers[0] and not (packet(root) is aten.pow and arguments(root)[1] == powers[1]):
            continue
        total = _behind_casts(operand(root))
        if packet(total) is not aten.add or total.kwargs:
            continue
        spread, eps = arguments(total)
        if isinstance(spread, Node) and isinstance(eps, int | float):
            return _of_spread(node, x, _behind_casts(spread), float(eps))
    return None


def _of_spread(node: Node, x: Node, spread: Node, eps: float) -> Norm | None:
    """Read x over the root of its mean square, or of its variance."""
    source = _centred(x)
    kind = "rms" if source is None else "layer"
    if packet(spread) is aten.var:
        is_known = source is not None and _is_same(operand(spread), source) and _is_variance(spread)
    else:
        squared = square_of(_behind_casts(operand(spread))) if _is_mean(spread) else None
        again = None if squared is None or source is None else _centred(squared)  # x - mean(x), computed twice
        is_known = squared is not None and (_is_same(squared, x) or (again is not None and again is source))
    return Norm(kind, node, _before_widening(source or x), eps) if is_known else None


def _centred(node: Node) -> Node | None:
    """Return x of x - mean(x)."""
    node = _behind_casts(node)
    if packet(node) is not aten.sub or node.kwargs or not all(isinstance(each, Node) for each in arguments(node)):
        return None
    x, mean = operand(node), _behind_casts(operand(node, 1))
    return x if _is_mean(mean) and _is_same(operand(mean), x) else None


def _is_mean(node: Node) -> bool:
    """Whether a node is the mean of each row, [..., 1]."""
    return packet(node) is aten.mean and _is_over_last(node) and (*arguments(node), None, None)[2] is True


def _is_variance(node: Node) -> bool:
    """Whether a node is the variance of each row, [..., 1], as the mean of squares."""
    _, _, unbiased, keeps = (*arguments(node), None, None, None)[:4]
    if node.target is aten.var.correction:
        unbiased, keeps = node.kwargs.get("correction") != 0, node.kwargs.get("keepdim")
    return unbiased is False and keeps is True and _is_over_last(node)


def _is_over_last(node: Node) -> bool:
    _, dims = (*arguments(node), None)[:2]
    return isinstance(dims, list | tuple) and len(dims) == 1 and dims[0] in (-1, operand(node).meta["val"].dim() - 1)


def _without(node: Node, op: Any, fixed: Collection[Node]) -> tuple[Node, Node | None]:
    """Return a node without a factor or term computed from constants alone, and that."""
    if packet(node) is op and len(arguments(node)) == 2 and not node.kwargs:
        for x, constant in (arguments(node), arguments(node)[::-1]):
            if constant in fixed and isinstance(x, Node) and _is_vector(constant, node):
                return _behind_casts(x), constant
    return node, None


def _is_vector(node: Node, x: Node) -> bool:
    """Whether a constant has a number for each feature of x."""
    sizes, wanted = node.meta["val"].shape, x.meta["val"].shape[-1:]
    return len(sizes) > 0 and same_sizes(sizes[-1:], wanted) and all(size == 1 for size in sizes[:-1])


def _behind_casts(node: Node) -> Node:
    while packet(node) in CASTS and operand(node).meta["val"].is_floating_point():
        node = operand(node)
    return node


def _before_widening(node: Node) -> Node:
    """Return a node before it is cast to a wider dtype."""
    while packet(node) in CASTS:
        source = operand(node)
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if before != after and after not in WIDENING.get(before, ()):
            break
        node = source
    return node


def _is_same(first: Node, second: Node) -> bool:
    """Whether two nodes have the same values, whatever wider dtype they are in."""
    first, second = (strip(_before_widening(each)) for each in (first, second))
    return first is second
