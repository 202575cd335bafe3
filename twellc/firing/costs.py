"""What nodes of a graph take, known from the sizes of tensors before anything is computed."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from twellc.base.torch_private import OpOverload
from twellc.passes.match.activations import packet
from twellc.passes.match.linear import is_grouped
from twellc.passes.sizes.inputs import size_of
from twellc.plugins.cache_op import APPEND, CACHE_MASK, CACHED_ATTENTION

aten = torch.ops.aten
# What computes one value of each of the operands', or moves, sums or sorts values; besides views and what torch tags as
# pointwise.
_LINEAR_TIME = frozenset(
    (aten.__and__, aten.__or__, aten._softmax, aten._to_copy, aten.all, aten.amax, aten.amin, aten.any,
     aten.arange, aten.argmax, aten.argmin, aten.cat, aten.clone, aten.constant_pad_nd, aten.contiguous,
     aten.copy, aten.cumsum, aten.diff, aten.embedding, aten.empty, aten.empty_like, aten.flatten,
     aten.floor_divide, aten.full, aten.full_like, aten.gather, aten.group_norm, aten.histc, aten.index,
     aten.index_put, aten.index_select, aten.layer_norm, aten.linspace, aten.log_softmax, aten.logsumexp,
     aten.masked_fill, aten.max, aten.mean, aten.min, aten.native_layer_norm, aten.new_empty, aten.new_full,
     aten.new_ones, aten.new_zeros, aten.one_hot, aten.ones, aten.ones_like, aten.pad, aten.repeat,
     aten.repeat_interleave, aten.reshape, aten.rms_norm, aten.rsub, aten.scalar_tensor, aten.scatter,
     aten.slice_scatter, aten.softmax, aten.sort, aten.stack, aten.sum, aten.to, aten.topk, aten.tril, aten.triu,
     aten.var, aten.var_mean, aten.where, aten.zeros, aten.zeros_like)
)  # fmt: skip
_PRODUCTS = {aten.linear: 0, aten.matmul: 0, aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}  # places of x
_CONVOLUTIONS = (aten.conv1d, aten.conv2d, aten.conv3d)
_ATTENTIONS = {aten.scaled_dot_product_attention: 2, CACHED_ATTENTION.overloadpacket: 1}  # axes of the queries
_WIDEST = 4  # bytes of an element that attention and convolutions compute in


@dataclass(frozen=True)
class Cost:
    """What a node takes.

    Attributes:
        products: Its products, or else the values that it reads and writes.
        bytes: Bytes of its result; of a view none.
        within: Bytes that it takes besides while it runs, at most.
        is_view: Whether its result may be a view of what it reads.
    """

    products: int
    bytes: int = 0
    within: int = 0
    is_view: bool = False


def cost_of(node: Node, sizes: Mapping[str, int]) -> Cost | None:
    """Return what a node takes at sizes of symbols; None where sizes do not say it."""
    if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
        return Cost(1)
    if node.target is operator.getitem:
        return Cost(1, is_view=True)
    op, is_view = packet(node), bool(getattr(node.target, "is_view", False))
    try:
        result = _shapes(node, sizes)
        count = sum(math.prod(shape) for shape, _ in result)
        size = sum(math.prod(shape) * width for shape, width in result)
        if op in _PRODUCTS or is_grouped(node):
            return _of_product(node, _PRODUCTS.get(op, 0), count, size, sizes)
        if op in _CONVOLUTIONS:
            ((weight, _),) = _shapes(node.args[1], sizes)
            columns = count // max(weight[0], 1) * math.prod(weight[1:])
            return Cost(count * math.prod(weight[1:]), size, _WIDEST * columns)
        if op in _ATTENTIONS:
            ((queries, _),), ((keys, _),) = (_shapes(each, sizes) for each in node.args[:2])
            scores = math.prod(queries[:-1]) * keys[2]
            repeated = scores // max(queries[_ATTENTIONS[op]], 1) * queries[-1]  # keys and values, for each head
            return Cost(2 * scores * queries[-1], size, 2 * _WIDEST * (scores + repeated))
        read = sum(math.prod(shape) for each in node.all_input_nodes for shape, _ in _shapes(each, sizes))
    except (_UnknownError, AttributeError, ValueError, IndexError, KeyError):
        return None
    if op in _LINEAR_TIME or node.target in (APPEND, CACHE_MASK) or _is_pointwise(node):
        return Cost(count + read, size, is_view=is_view)
    return Cost(1, is_view=True) if is_view else None


def _of_product(node: Node, place: int, count: int, size: int, sizes: Mapping[str, int]) -> Cost:
    """Return what a matrix product takes, of which torch may copy the operands, and repeat them along other axes."""
    ((left, width),), ((right, _),) = (_shapes(each, sizes) for each in node.args[place : place + 2])
    copied = math.prod(left)
    if len(right) > 2:
        ((result, _),) = _shapes(node, sizes)
        copied = math.prod(result[:-2]) * (math.prod(left[-2:]) + math.prod(right[-2:]))
    return Cost(count * left[-1], size, width * copied)


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


class _UnknownError(Exception):
    """A size is not known before values are."""


def _shapes(node: object, sizes: Mapping[str, int]) -> list[tuple[tuple[int, ...], int]]:
    """Return the shapes of a node's tensors, each with the bytes of an element."""
    assert isinstance(node, Node)
    value = node.meta["val"]
    values = value if isinstance(value, tuple | list) else [value]
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    return [(tuple(_size(dim, sizes) for dim in each.shape), each.dtype.itemsize) for each in tensors]


def _size(dim: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    try:
        return size_of(dim.node.expr, sizes)
    except (KeyError, TypeError) as error:  # values decide it
        raise _UnknownError from error
