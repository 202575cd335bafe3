"""Prove what an attention mask that depends on positions alone lets through.

Exporters write a causal mask as arithmetic on ranges, `arange(t) <= arange(t)[:, None]`, often with more around it:
indices into expanded ranges, a search for packed sequences in positions that are never packed, `where(…, 0, -inf)`.
Here every tensor of such a graph is read as an expression of sympy over its own coordinates: an integer one as a sum,
a boolean one as conditions `sum >= 0`, a floating-point one as a number, or as a bias of two numbers. What is not of
this kind is unknown, and a mask that needs it stays as it is. So the answer holds for all sizes, not only for some that
were tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.linear import same_sizes

aten = torch.ops.aten


@dataclass(frozen=True)
class _Bias:
    """A floating-point tensor that is 0 where something is true, and elsewhere so low that softmax gives 0."""

    kept: Boolean


# What a tensor is; None where that is not known.
_Value: TypeAlias = "sympy.Basic | _Bias | None"


def positions_kept(mask: Node) -> str | None:
    """Return which keys an attention mask keeps for each query, for all sizes.

    Args:
        mask: A boolean mask (true: keep), or one that is added to the scores; [..., queries, keys].

    Returns:
        `causal` if query i sees keys 0 to i; `all` if it sees all; None if that is not so, or cannot be proved.
    """
    value = _Reader().read(mask)
    kept = value.kept if isinstance(value, _Bias) else value
    return "all" if kept == sympy.true else "causal" if kept == _below_diagonal(0) else None


def _coordinate(axis: int) -> Any:
    """Return the coordinate along an axis, which is counted from the last one, 1, so that broadcasting changes none."""
    return sympy.Symbol(f"i{axis}", integer=True, nonnegative=True)


def _at_least_zero(value: sympy.Expr) -> Boolean:
    return sympy.Ge(sympy.expand(value), 0)


def _below_diagonal(diagonal: int) -> Boolean:
    return _at_least_zero(_coordinate(2) - _coordinate(1) + diagonal)


def _opposite(condition: _Value) -> Boolean | None:
    if isinstance(condition, sympy.Ge):
        return _at_least_zero(-1 - condition.lhs)
    return sympy.Not(condition) if condition in (sympy.true, sympy.false) else None


def _replaced(value: _Value, coordinates: Mapping[int, Any]) -> _Value:
    """Return a value with others in place of some coordinates, by their axes."""
    if isinstance(value, _Bias):
        return _Bias(_replaced(value.kept, coordinates))
    others = {_coordinate(axis): other for axis, other in coordinates.items()}
    return None if value is None else value.xreplace(others)


class _Reader:
    """Reads nodes as functions of their coordinates."""

    def __init__(self) -> None:
        self._known: dict[Node, _Value] = {}

    def read(self, argument: Any) -> _Value:
        """Return what a node, or a number among the arguments of one, is."""
        if isinstance(argument, bool | int | float):
            return sympy.sympify(argument)
        if not isinstance(argument, Node):
            return None
        if argument not in self._known:
            self._known[argument] = self._compute(argument)
        return self._known[argument]

    def integers(self, arguments: Sequence[Any]) -> list[Any] | None:
        """Return what several arguments are; None where one is not known, or is not an integer."""
        values: list[Any] = [self.read(argument) for argument in arguments]
        known = all(isinstance(value, sympy.Expr) and not isinstance(value, sympy.Float) for value in values)
        return values if known else None

    def _compute(self, node: Node) -> _Value:
        read, value = _READERS.get(packet(node)), node.meta.get("val")
        if read is None or not isinstance(value, torch.Tensor):
            return None
        # The coordinate along a dimension of size 1 is 0.
        flat = [axis for axis, size in enumerate(reversed(value.shape), 1) if statically_known_true(size == 1)]
        return _replaced(read(self, node), dict.fromkeys(flat, sympy.S.Zero))


def _range(_: _Reader, node: Node) -> _Value:
    start, step = 0, 1
    if len(arguments(node)) > 1:
        start, step = (*arguments(node), 1)[:3:2]
    whole = not node.meta["val"].is_floating_point() and isinstance(start, int) and isinstance(step, int)
    return start + step * _coordinate(1) if whole else None


def _of_integers(function: Callable[[Any, Any], Any]) -> Callable[[_Reader, Node], _Value]:
    """Return a reader of a function of two integers that takes the second `alpha` times."""

    def read(reader: _Reader, node: Node) -> _Value:
        values = reader.integers([*arguments(node)[:2], node.kwargs.get("alpha", 1)])
        return None if values is None else function(values[0], values[1] * values[2])

    return read


def _same(reader: _Reader, node: Node) -> _Value:
    return reader.read(arguments(node)[0])


def _as_integer(value: _Value) -> _Value:
    return sympy.Integer(value == sympy.true) if value in (sympy.true, sympy.false) else value


def _cast(reader: _Reader, node: Node) -> _Value:
    value, dtype = reader.read(arguments(node)[0]), node.meta["val"].dtype
    was_float = arguments(node)[0].meta["val"].is_floating_point()
    if dtype == torch.bool:
        return value if isinstance(value, Boolean) else None
    if dtype.is_floating_point or was_float:
        return value if dtype.is_floating_point and was_float else None
    value = _as_integer(value)
    return value if isinstance(value, sympy.Expr) else None


def _view(reader: _Reader, node: Node) -> _Value:
    """Read a view that only inserts or removes dimensions of size 1."""
    source = arguments(node)[0]
    old, new = (
        {axis: size for axis, size in enumerate(reversed(shape), 1) if not statically_known_true(size == 1)}
        for shape in (source.meta["val"].shape, node.meta["val"].shape)
    )
    if not same_sizes(list(old.values()), list(new.values())):
        return None
    return _replaced(reader.read(source), dict(zip(old, map(_coordinate, new), strict=True)))


def _slice(reader: _Reader, node: Node) -> _Value:
    source, *given = arguments(node)
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, _, step = (*given, *defaults[len(given) :])
    start = 0 if start is None else start
    if not isinstance(start, int) or start < 0 or step != 1:
        return None
    axis = _from_the_last(source, dim)
    return _replaced(reader.read(source), {axis: _coordinate(axis) + start})


def _from_the_last(node: Node, dim: int) -> int:
    rank: int = node.meta["val"].dim()
    return rank - dim % rank


def _difference(reader: _Reader, node: Node) -> _Value:
    """Read diff(x, 1, -1, prepend) where the first difference is as all others."""
    operands = arguments(node)
    values = reader.integers(operands[::3])
    if len(operands) != 4 or operands[1] != 1 or values is None:
        return None
    axis = _from_the_last(operands[0], operands[2])
    others = sympy.expand(values[0] - values[0].xreplace({_coordinate(axis): _coordinate(axis) - 1}))
    first = sympy.expand(values[0].xreplace({_coordinate(axis): sympy.S.Zero}) - values[1])
    return others if first == others and first.is_number else None


def _running_sum(reader: _Reader, node: Node) -> _Value:
    source, dim = arguments(node)[:2]
    value = _as_integer(reader.read(source))
    if not isinstance(value, sympy.Integer):
        return None
    return value * (_coordinate(_from_the_last(source, dim)) + 1)


def _index(reader: _Reader, node: Node) -> _Value:
    """Read x[i, j, …] with an index for each dimension."""
    source, indices = arguments(node)
    places = reader.integers(indices)
    # A negative index would count from the end.
    if places is None or len(indices) != source.meta["val"].dim() or not all(each.is_nonnegative for each in places):
        return None
    return _replaced(reader.read(source), dict(enumerate(reversed(places), 1)))


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
    return sympy.sympify(
        bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)
    )


def _joined(join: Callable[..., Boolean], decides: Boolean) -> Callable[[_Reader, Node], _Value]:
    def read(reader: _Reader, node: Node) -> _Value:
        values = [reader.read(argument) for argument in arguments(node)[:2]]
        if decides in values:
            return decides
        return join(*values) if all(isinstance(value, Boolean) for value in values) else None

    return read


def _not(reader: _Reader, node: Node) -> _Value:
    return _opposite(reader.read(arguments(node)[0]))


def _where(reader: _Reader, node: Node) -> _Value:
    condition, value, other = (reader.read(argument) for argument in arguments(node))
    return _chosen(condition, value, other, node)


def _masked_fill(reader: _Reader, node: Node) -> _Value:
    kept, condition, filled = (reader.read(argument) for argument in arguments(node))
    return _chosen(condition, filled, kept, node)


def _chosen(condition: _Value, value: _Value, other: _Value, node: Node) -> _Value:
    """Return `value` where a condition holds, and `other` elsewhere."""
    opposite = _opposite(condition)
    if node.meta["val"].dtype == torch.bool:
        return {(sympy.true, sympy.false): condition, (sympy.false, sympy.true): opposite}.get((value, other))
    for kept, zero, hidden in ((condition, value, other), (opposite, other, value)):
        if isinstance(kept, Boolean) and isinstance(zero, sympy.Number) and isinstance(hidden, sympy.Number):
            least = torch.finfo(node.meta["val"].dtype).min
            if float(zero) == 0 and float(hidden) <= least:  # added to any score it leaves softmax nothing
                return _Bias(kept)
    return None


def _triangle(lower: bool) -> Callable[[_Reader, Node], _Value]:
    def read(reader: _Reader, node: Node) -> _Value:
        source, diagonal = (*arguments(node), 0)[:2]
        inside = _below_diagonal(diagonal) if lower else _opposite(_below_diagonal(diagonal - 1))
        outside = sympy.false if node.meta["val"].dtype == torch.bool else sympy.S.Zero
        return _chosen(inside, reader.read(source), outside, node)

    return read


_READERS: dict[Any, Callable[[_Reader, Node], _Value]] = {
    aten.arange: _range,
    aten.add: _of_integers(lambda left, right: left + right),
    aten.sub: _of_integers(lambda left, right: left - right),
    aten.le: _of_integers(lambda left, right: _at_least_zero(right - left)),
    aten.lt: _of_integers(lambda left, right: _at_least_zero(right - left - 1)),
    aten.ge: _of_integers(lambda left, right: _at_least_zero(left - right)),
    aten.gt: _of_integers(lambda left, right: _at_least_zero(left - right - 1)),
    aten.eq: _of_integers(lambda left, right: sympy.Eq(sympy.expand(left - right), 0)),
    aten.ne: _of_integers(lambda left, right: sympy.Ne(sympy.expand(left - right), 0)),
    **dict.fromkeys((aten.clone, aten.alias, aten.contiguous, aten.lift_fresh_copy, aten.expand), _same),
    **dict.fromkeys((aten._to_copy, aten.to), _cast),
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.squeeze, aten.unsqueeze), _view),
    aten.slice: _slice,
    aten.diff: _difference,
    aten.cumsum: _running_sum,
    aten.index: _index,
    **dict.fromkeys(
        (aten.full, aten.full_like, aten.new_full, aten.ones, aten.new_ones, aten.ones_like, aten.zeros, aten.new_zeros,
         aten.zeros_like, aten.scalar_tensor),
        _filled,
    ),
    **dict.fromkeys((aten.__and__, aten.bitwise_and, aten.logical_and), _joined(sympy.And, sympy.false)),
    **dict.fromkeys((aten.__or__, aten.bitwise_or, aten.logical_or), _joined(sympy.Or, sympy.true)),
    **dict.fromkeys((aten.logical_not, aten.bitwise_not), _not),
    aten.where: _where,
    aten.masked_fill: _masked_fill,
    aten.tril: _triangle(lower=True),
    aten.triu: _triangle(lower=False),
}  # fmt: skip
