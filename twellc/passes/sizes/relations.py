"""Relations that sizes of inputs must keep, as a manifest has them, and what checks them before a run."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from twellc.base.errors import UserError, first_few
from twellc.base.records import Record

# A message names sizes that fit below this one.
_LARGEST_NAMED = 1 << 14
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "float": float, "int": int, "floor": math.floor, "ceil": math.ceil,
    "trunc": math.trunc,
}  # fmt: skip
_PLACE = re.compile(r"(.+)\[(\d+)\]", re.DOTALL)


@dataclass(frozen=True)
class SizeRelation(Record):
    """A relation that sizes of inputs must keep in each call.

    Attributes:
        expression: The relation in Python, over the names in `sizes`, such as `d0 == d1 + d2`: integers, arithmetic,
            comparisons, `and`, `or`, `not`, `if`, min, max, abs, float, int and math's floor, ceil and trunc.
        sizes: The dimension of each name, such as `attention_mask[1]`.
        text: The relation in words.
    """

    expression: str
    sizes: dict[str, str]
    text: str

    def __post_init__(self) -> None:
        """Refuse what cannot be evaluated.

        Raises:
            ValueError: It has another form.
        """
        if not all(map(_PLACE.fullmatch, self.sizes.values())):
            raise ValueError(f"{self.sizes} are not dimensions of inputs")
        with suppress(ZeroDivisionError):
            evaluate(self.expression, dict.fromkeys(self.sizes, 2))

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether sizes keep the relation, by the names in `sizes`."""
        try:
            return bool(evaluate(self.expression, sizes))
        except (ArithmeticError, ValueError):  # a division by 0
            return False


def refuse_unrelated(where: str, relations: list[SizeRelation], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse shapes of inputs that do not keep a relation.

    Args:
        where: What to name in the message.
        relations: The relations.
        shapes: Shapes by input.

    Raises:
        UserError: One is not kept; the message says which sizes would fit.
    """
    for relation in relations:
        sizes = {name: _size(place, shapes) for name, place in relation.sizes.items()}
        if None in sizes.values() or relation.holds(sizes):  # type: ignore[arg-type]
            continue
        got = ", ".join(f"{place} = {sizes[name]}" for name, place in relation.sizes.items())
        raise UserError(
            where, f"the model does not take these sizes together: {relation.text}", got=got,
            expected=_fitting(relation, sizes),  # type: ignore[arg-type]
        )  # fmt: skip


def _size(place: str, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    found = _PLACE.fullmatch(place)
    assert found is not None
    shape = shapes.get(found[1], ())
    return shape[int(found[2])] if int(found[2]) < len(shape) else None


def _fitting(relation: SizeRelation, sizes: dict[str, int]) -> str:
    """Say which sizes of one dimension fit, with the others as they are: the nearest ones."""
    for name, place in relation.sizes.items():
        near = sorted(range(1, _LARGEST_NAMED), key=lambda size: abs(size - sizes[name]))
        fitting = [size for size in near if relation.holds({**sizes, name: size})][:3]
        if fitting:
            return f"{place} = {' or '.join(map(str, sorted(fitting)))}"
    return first_few(list(relation.sizes.values())) + " that keep it"


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression of a relation.

    Raises:
        ValueError: It has another form.
        ArithmeticError: It divides by 0.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not an expression over sizes") from error
    return _evaluate(tree, names)


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    def value(inner: ast.expr) -> Any:
        return _evaluate(inner, names)

    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=ast.USub()):
            return -value(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            return not value(node.operand)
        case ast.BinOp() if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        case ast.BoolOp():
            return (all if isinstance(node.op, ast.And) else any)(map(value, node.values))
        case ast.Compare() if all(type(each) in _BINARY for each in node.ops):
            sides = [value(node.left), *map(value, node.comparators)]
            return all(_BINARY[type(op)](a, b) for op, a, b in zip(node.ops, sides, sides[1:], strict=False))
        case ast.IfExp():
            return value(node.body) if value(node.test) else value(node.orelse)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="math"), attr=name), keywords=[]):
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value, node.args))
    raise ValueError(f"{ast.unparse(node)!r} is not an expression over sizes")
