"""Prove what an attention mask that depends on positions alone lets through.

Exporters write a causal mask as arithmetic on ranges, `arange(t) <= arange(t)[:, None]`, often with more around it:
indices into expanded ranges, a search for packed sequences in positions that are never packed, `where(…, 0, -inf)`.
Here every tensor of such a graph is read as a function of its own coordinates i0, i1, …: an integer one as an affine
function c + a0·i0 + a1·i1 + …, a boolean one as a set of such functions that must all be at least 0. What is not of
this kind is unknown, and a mask that needs it stays as it is. So the answer holds for all sizes, not only for some that
were tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from twellc.passes.match.activations import arguments, packet

aten = torch.ops.aten


@dataclass(frozen=True)
class _Affine:
    """constant + the sum of factors times coordinates; the last factor is the last dimension's."""

    constant: int
    factors: tuple[int, ...]

    def plus(self, other: _Affine, times: int = 1) -> _Affine:
        rank = max(len(self.factors), len(other.factors))
        mine, theirs = _padded(self.factors, rank), _padded(other.factors, rank)
        added = tuple(a + times * b for a, b in zip(mine, theirs, strict=True))
        return _Affine(self.constant + times * other.constant, added)

    @property
    def is_constant(self) -> bool:
        return not any(self.factors)

    @property
    def never_negative(self) -> bool:
        """Coordinates are never negative."""
        return self.constant >= 0 and all(factor >= 0 for factor in self.factors)


@dataclass(frozen=True)
class _Truth:
    """Where a boolean tensor is true: where none of these is negative; `never` is false everywhere."""

    conditions: frozenset[_Affine] = frozenset()
    never: bool = False

    def both(self, other: _Truth) -> _Truth:
        return _Truth(self.conditions | other.conditions, self.never or other.never)

    def opposite(self) -> _Truth | None:
        if self.never or not self.conditions:
            return _Truth(never=not self.never)
        if len(self.conditions) > 1:
            return None
        (condition,) = self.conditions
        return _at_least_zero(_Affine(-1, ()).plus(condition, -1))


@dataclass(frozen=True)
class _Number:
    """A floating-point tensor of one value."""

    value: float


@dataclass(frozen=True)
class _Bias:
    """A floating-point tensor that is 0 where something is true, and elsewhere so low that softmax gives 0."""

    kept: _Truth


_Value = _Affine | _Truth | _Number | _Bias | None


def positions_kept(mask: Node) -> str | None:
    """Return which keys an attention mask keeps for each query, for all sizes.

    Args:
        mask: A boolean mask (true: keep), or one that is added to the scores; [..., queries, keys].

    Returns:
        `causal` if query i sees keys 0 to i; `all` if it sees all; None if that is not so, or cannot be proved.
    """
    value = _Reader().read(mask)
    truth = value.kept if isinstance(value, _Bias) else value
    if not isinstance(truth, _Truth) or truth.never:
        return None
    if not truth.conditions:
        return "all"
    (first, *others) = truth.conditions
    rank = mask.meta["val"].dim()
    causal = _Affine(0, (*(0,) * (rank - 2), 1, -1))
    return "causal" if not others and _Affine(first.constant, _padded(first.factors, rank)) == causal else None


def _padded(factors: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (0,) * (rank - len(factors)) + factors


def _at_least_zero(value: _Affine) -> _Truth:
    if value.never_negative:
        return _Truth()
    if value.is_constant:
        return _Truth(never=True)
    return _Truth(frozenset([value]))


class _Reader:
    """Reads nodes as functions of their coordinates."""

    def __init__(self) -> None:
        self._known: dict[Node, _Value] = {}

    def read(self, argument: Any) -> _Value:
        """Return what a node, or a number among the arguments of one, is; None where that is not known."""
        if isinstance(argument, bool):
            return _Truth(never=not argument)
        if isinstance(argument, int):
            return _Affine(argument, ())
        if isinstance(argument, float):
            return _Number(argument)
        if not isinstance(argument, Node):
            return None
        if argument not in self._known:
            self._known[argument] = self._forget_flat(argument, self._compute(argument))
        return self._known[argument]

    def _forget_flat(self, node: Node, value: _Value) -> _Value:
        """The coordinate along a dimension of size 1 is 0."""
        if not isinstance(value, _Affine):
            return value
        sizes = node.meta["val"].shape
        factors = _padded(value.factors, len(sizes))
        return _Affine(
            value.constant,
            tuple(0 if statically_known_true(size == 1) else a for size, a in zip(sizes, factors, strict=True)),
        )

    def _compute(self, node: Node) -> _Value:
        op = packet(node)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        read = _READERS.get(op)
        return None if read is None else read(self, node)


def _range(_: _Reader, node: Node) -> _Value:
    numbers = arguments(node)
    if node.target is aten.arange.default:
        start, step = 0, 1
    else:
        start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    whole = not node.meta["val"].is_floating_point() and isinstance(start, int) and isinstance(step, int)
    return _Affine(start, (step,)) if whole else None


def _sum(sign: int) -> Callable[[_Reader, Node], _Value]:
    def read(reader: _Reader, node: Node) -> _Value:
        left, right = (reader.read(argument) for argument in arguments(node)[:2])
        alpha = node.kwargs.get("alpha", 1)
        if not isinstance(left, _Affine) or not isinstance(right, _Affine) or not isinstance(alpha, int):
            return None
        return left.plus(right, sign * alpha)

    return read


def _compare(condition: Callable[[_Affine, _Affine], _Truth | None]) -> Callable[[_Reader, Node], _Value]:
    def read(reader: _Reader, node: Node) -> _Value:
        left, right = (reader.read(argument) for argument in arguments(node)[:2])
        if not isinstance(left, _Affine) or not isinstance(right, _Affine):
            return None
        return condition(left, right)

    return read


def _equal(left: _Affine, right: _Affine) -> _Truth | None:
    difference = left.plus(right, -1)
    return _Truth(never=difference.constant != 0) if difference.is_constant else None


def _unequal(left: _Affine, right: _Affine) -> _Truth | None:
    truth = _equal(left, right)
    return None if truth is None else truth.opposite()


def _shifted(value: _Value, change: Callable[[tuple[int, ...]], tuple[int, ...]], rank: int) -> _Value:
    """Return a value whose factors are rearranged; they are padded to `rank` before."""
    if isinstance(value, _Affine):
        return _Affine(value.constant, change(_padded(value.factors, rank)))
    if isinstance(value, _Truth):
        moved = (_Affine(each.constant, change(_padded(each.factors, rank))) for each in value.conditions)
        return _Truth(frozenset(moved), value.never)
    return _Bias(kept) if isinstance(value, _Bias) and isinstance(
        kept := _shifted(value.kept, change, rank), _Truth) else value  # fmt: skip


def _same(reader: _Reader, node: Node) -> _Value:
    return reader.read(arguments(node)[0])


def _cast(reader: _Reader, node: Node) -> _Value:
    value = reader.read(arguments(node)[0])
    dtype = node.meta["val"].dtype
    if dtype == torch.bool:
        return value if isinstance(value, _Truth) else None
    if dtype.is_floating_point:
        return value if isinstance(value, _Number | _Bias) else None
    if isinstance(value, _Truth) and not value.conditions:
        return _Affine(int(not value.never), ())
    return value if isinstance(value, _Affine) else None


def _unsqueeze(reader: _Reader, node: Node) -> _Value:
    source, dim = arguments(node)[:2]
    rank = source.meta["val"].dim()
    dim = dim + rank + 1 if dim < 0 else dim
    return _shifted(reader.read(source), lambda factors: (*factors[:dim], 0, *factors[dim:]), rank)


def _view(reader: _Reader, node: Node) -> _Value:
    """Read a view that only inserts or removes dimensions of size 1."""
    source = arguments(node)[0]
    old, new = source.meta["val"].shape, node.meta["val"].shape
    kept = [axis for axis, size in enumerate(old) if not statically_known_true(size == 1)]
    places = [axis for axis, size in enumerate(new) if not statically_known_true(size == 1)]
    if len(kept) != len(places) or not all(
        statically_known_true(old[a] == new[b]) for a, b in zip(kept, places, strict=True)
    ):
        return None
    moved = dict(zip(places, kept, strict=True))

    def change(factors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(factors[moved[axis]] if axis in moved else 0 for axis in range(len(new)))

    return _shifted(reader.read(source), change, len(old))


def _slice(reader: _Reader, node: Node) -> _Value:
    source, *rest = arguments(node)
    dim = rest[0] if rest else 0
    start = rest[1] if len(rest) > 1 and rest[1] is not None else 0
    value = reader.read(source)
    if not isinstance(value, _Affine) or not isinstance(start, int) or start < 0 or (len(rest) > 3 and rest[3] != 1):
        return None
    factor = _padded(value.factors, source.meta["val"].dim())[dim]
    return _Affine(value.constant + factor * start, value.factors)


def _difference(reader: _Reader, node: Node) -> _Value:
    """Read diff(x, 1, -1, prepend) where the first difference is as all others."""
    operands = arguments(node)
    if len(operands) != 4 or operands[1] != 1:
        return None
    source, _, dim, before = operands
    value, prepended = reader.read(source), reader.read(before)
    if not isinstance(value, _Affine) or not isinstance(prepended, _Affine):
        return None
    rank = source.meta["val"].dim()
    factors = _padded(value.factors, rank)
    others = tuple(0 if axis == dim % rank else factor for axis, factor in enumerate(factors))
    first = _Affine(value.constant, others).plus(prepended, -1)
    step = factors[dim % rank]
    return _Affine(step, ()) if first.is_constant and first.constant == step else None


def _running_sum(reader: _Reader, node: Node) -> _Value:
    source, dim = arguments(node)[:2]
    value = reader.read(source)
    if isinstance(value, _Truth) and not value.conditions:
        value = _Affine(int(not value.never), ())
    if not isinstance(value, _Affine) or not value.is_constant:
        return None
    rank = source.meta["val"].dim()
    factors = [0] * rank
    factors[dim % rank] = value.constant
    return _Affine(value.constant, tuple(factors))


def _index(reader: _Reader, node: Node) -> _Value:
    """Read x[i, j, …] with an index for each dimension."""
    source, indices = arguments(node)
    value = reader.read(source)
    rank = source.meta["val"].dim()
    if not isinstance(value, _Affine) or len(indices) != rank:
        return None
    result = _Affine(value.constant, ())
    for factor, index in zip(_padded(value.factors, rank), indices, strict=True):
        place = reader.read(index)
        # A negative index would count from the end.
        if not isinstance(place, _Affine) or not place.never_negative:
            return None
        result = result.plus(place, factor)
    return result


def _filled(reader: _Reader, node: Node) -> _Value:
    op, operands = packet(node), arguments(node)
    value: Any
    if op in (aten.ones, aten.new_ones, aten.ones_like):
        value = 1
    elif op in (aten.zeros, aten.new_zeros, aten.zeros_like):
        value = 0
    else:
        value = operands[0 if op is aten.scalar_tensor else 2 if op is aten.new_full else 1]
    dtype = node.meta["val"].dtype
    if not isinstance(value, bool | int | float):
        return None
    if dtype == torch.bool:
        return _Truth(never=not value)
    return _Number(float(value)) if dtype.is_floating_point else _Affine(int(value), ())


def _and(reader: _Reader, node: Node) -> _Value:
    left, right = (reader.read(argument) for argument in arguments(node)[:2])
    return left.both(right) if isinstance(left, _Truth) and isinstance(right, _Truth) else None


def _or(reader: _Reader, node: Node) -> _Value:
    values = [reader.read(argument) for argument in arguments(node)[:2]]
    if any(isinstance(value, _Truth) and not value.never and not value.conditions for value in values):
        return _Truth()
    left, right = values
    if isinstance(left, _Truth) and left.never:
        return right
    return left if isinstance(right, _Truth) and right.never else None


def _not(reader: _Reader, node: Node) -> _Value:
    value = reader.read(arguments(node)[0])
    return value.opposite() if isinstance(value, _Truth) else None


def _is_low(value: _Value, node: Node) -> bool:
    """Whether a number hides a key: added to any score it leaves softmax nothing."""
    return isinstance(value, _Number) and value.value <= torch.finfo(node.meta["val"].dtype).min


def _where(reader: _Reader, node: Node) -> _Value:
    condition, kept, hidden = (reader.read(argument) for argument in arguments(node))
    if not isinstance(condition, _Truth):
        return None
    if node.meta["val"].dtype == torch.bool:
        sure = isinstance(kept, _Truth) and not kept.conditions and isinstance(hidden, _Truth) and not hidden.conditions
        if not sure or not isinstance(kept, _Truth) or not isinstance(hidden, _Truth) or kept.never == hidden.never:
            return None
        return condition if hidden.never else condition.opposite()
    return _bias(condition, kept, hidden, node)


def _masked_fill(reader: _Reader, node: Node) -> _Value:
    kept, condition, hidden = (reader.read(argument) for argument in arguments(node))
    if not isinstance(condition, _Truth) or not node.meta["val"].is_floating_point():
        return None
    opposite = condition.opposite()
    return None if opposite is None else _bias(opposite, kept, hidden, node)


def _bias(condition: _Truth, kept: _Value, hidden: _Value, node: Node) -> _Value:
    if isinstance(kept, _Number) and kept.value == 0 and _is_low(hidden, node):
        return _Bias(condition)
    opposite = condition.opposite()
    if opposite is not None and isinstance(hidden, _Number) and hidden.value == 0 and _is_low(kept, node):
        return _Bias(opposite)
    return None


def _triangle(lower: bool) -> Callable[[_Reader, Node], _Value]:
    def read(reader: _Reader, node: Node) -> _Value:
        source, diagonal = (*arguments(node), 0)[:2]
        value = reader.read(source)
        rank = source.meta["val"].dim()
        below = _Affine(diagonal, (*(0,) * (rank - 2), 1, -1))  # row - column + diagonal
        inside = _at_least_zero(below if lower else _Affine(0, ()).plus(below, -1))
        if isinstance(value, _Truth) and not value.never and not value.conditions:
            return inside
        if _is_low(value, node):  # 0 outside of the triangle
            outside = inside.opposite()
            return None if outside is None else _Bias(outside)
        return None

    return read


_ORDER: dict[Any, Callable[[_Affine, _Affine], _Truth | None]] = {
    aten.le: lambda left, right: _at_least_zero(right.plus(left, -1)),
    aten.lt: lambda left, right: _at_least_zero(right.plus(left, -1).plus(_Affine(-1, ()))),
    aten.ge: lambda left, right: _at_least_zero(left.plus(right, -1)),
    aten.gt: lambda left, right: _at_least_zero(left.plus(right, -1).plus(_Affine(-1, ()))),
    aten.eq: _equal,
    aten.ne: _unequal,
}
_READERS: dict[Any, Callable[[_Reader, Node], _Value]] = {
    aten.arange: _range,
    aten.add: _sum(1),
    aten.sub: _sum(-1),
    **{op: _compare(condition) for op, condition in _ORDER.items()},
    **dict.fromkeys((aten.clone, aten.alias, aten.contiguous, aten.lift_fresh_copy, aten.expand), _same),
    **dict.fromkeys((aten._to_copy, aten.to), _cast),
    aten.unsqueeze: _unsqueeze,
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.squeeze), _view),
    aten.slice: _slice,
    aten.diff: _difference,
    aten.cumsum: _running_sum,
    aten.index: _index,
    **dict.fromkeys(
        (aten.full, aten.full_like, aten.new_full, aten.ones, aten.new_ones, aten.ones_like, aten.zeros, aten.new_zeros,
         aten.zeros_like, aten.scalar_tensor),
        _filled,
    ),
    **dict.fromkeys((aten.__and__, aten.bitwise_and, aten.logical_and), _and),
    **dict.fromkeys((aten.__or__, aten.bitwise_or, aten.logical_or), _or),
    **dict.fromkeys((aten.logical_not, aten.bitwise_not), _not),
    aten.where: _where,
    aten.masked_fill: _masked_fill,
    aten.tril: _triangle(lower=True),
    aten.triu: _triangle(lower=False),
}  # fmt: skip
