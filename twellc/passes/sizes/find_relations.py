"""Write the conditions on a model's sizes as relations of its inputs' dimensions, and in words.

    n % 8 == 0       x [2, n, 16]          ->  d0 % 8 == 0, d0 is x[1]: "dimension 1 of x must be a multiple of 8"
    t == p + n       mask [2, t], …        ->  d0 == d1 + d2: "dimension 1 of mask must be dimension 1 of past + …"

A relation is kept where the sizes within an optimization profile do not all fulfil its condition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sympy

from twellc.base.errors import UserError, first_few
from twellc.base.torch_private import FloorDiv, PythonPrinter
from twellc.passes.sizes.conditions import Held, SizeRanges, Verdict, fitting_sizes, holds_at, varying, verdict
from twellc.passes.sizes.inputs import ModelInputs, size_at
from twellc.passes.sizes.relations import SizeRelation

# Least, tuned and largest value of each symbol in an optimization profile.
SymbolSizes = Mapping[str, tuple[int, int, int]]
_FIX = (
    "Compile it for such sizes by --optimization-profile, or export the model at one of them and compile that archive."
)
_COMPARED = {
    ">": "must be more than", ">=": "must be at least", "<": "must be less than", "<=": "must be at most",
    "==": "must be", "!=": "must not be",
}  # fmt: skip
_FEW = 3  # sizes are named one by one
# How many sizes of a symbol are tried to describe those that fit, and of each other symbol in the condition.
_TRIED, _TRIED_OF_OTHERS = 4096, 16


def relations_within(
    where: str, inputs: ModelInputs, profiles: Sequence[SymbolSizes]
) -> tuple[list[SizeRelation], list[str]]:
    """Return the relations that sizes within profiles must keep, and warnings about conditions that were only tried.

    Args:
        where: What to name in the message.
        inputs: The inputs of the model, with its conditions.
        profiles: The sizes of each profile.

    Raises:
        UserError: No sizes within a profile go together, or a condition cannot be written as a relation.
    """
    dimensions = _dimensions(inputs)
    conditions = [*inputs.conditions, *_computed_sizes(inputs, dimensions)]
    relations: dict[str, SizeRelation] = {}
    warnings: dict[str, None] = {}
    for profile in profiles:
        ranges = {**inputs.bounds, **{symbol: (low, high) for symbol, (low, _, high) in profile.items()}}
        verdicts = {condition: verdict(condition, ranges) for condition in conditions}
        failing = [each for each in inputs.conditions if verdicts[each] == Verdict.FAILS]
        if fitting_sizes(failing, ranges, {symbol: tuned for symbol, (_, tuned, _) in profile.items()}) is None:
            demands = first_few(_describe(failing, ranges, dimensions), "; ")
            raise UserError(where, f"the model takes no size within the profile: {demands}", fix=_FIX)
        for condition, found in verdicts.items():
            if found == Verdict.HOLDS:
                continue
            text = _describe([condition], ranges, dimensions)[0]
            relation = _relation(condition, text, dimensions)
            if relation is not None:
                relations.setdefault(f"{relation.expression} {relation.sizes}", relation)
            elif found == Verdict.FAILS:
                raise UserError(where, f"the model does not take every size: {text}", fix=_FIX)
            else:
                warnings[f"that the model takes every size is not proven, only tried with some: {text}"] = None
    return list(relations.values()), list(warnings)


def relations_of(inputs: ModelInputs) -> list[SizeRelation]:
    """Return the relations that sizes must keep, in no profile; without conditions that cannot be written so."""
    dimensions = _dimensions(inputs)
    conditions = [*inputs.conditions, *_computed_sizes(inputs, dimensions)]
    texts = [_describe([condition], inputs.bounds, dimensions)[0] for condition in conditions]
    found = (_relation(condition, text, dimensions) for condition, text in zip(conditions, texts, strict=True))
    return [relation for relation in found if relation is not None]


def relation_notes(relations: list[SizeRelation]) -> list[str]:
    """Tell the user which relations a caller must keep."""
    if not relations:
        return []
    texts = first_few([relation.text for relation in relations], "; ")
    return [f"the model does not take every size together: {texts}. twellc checks that before a run; other hosts must"]


# ---- dimensions ----


@dataclass(frozen=True)
class _Dimension:
    """A dimension of an input: its size is a symbol, or an expression of symbols."""

    input: str
    axis: int
    size: sympy.Expr

    def __str__(self) -> str:
        return f"dimension {self.axis} of {self.input}"


def _dimensions(inputs: ModelInputs) -> dict[str, _Dimension]:
    """Return a dimension for each symbol: one whose size is the symbol itself, if there is one."""
    found: dict[str, _Dimension] = {}
    every = [_Dimension(spec.name, axis, dim) for spec in inputs.specs for axis, dim in enumerate(spec.shape)]
    for dimension in sorted(every, key=lambda each: not getattr(each.size, "is_Symbol", False)):
        for symbol in getattr(dimension.size, "free_symbols", ()):
            found.setdefault(str(symbol), dimension)
    return found


def _computed_sizes(inputs: ModelInputs, dimensions: dict[str, _Dimension]) -> list[sympy.Basic]:
    """Return equations for dimensions that other ones determine, such as past + tokens; add these to `dimensions`."""
    found = []
    for spec in inputs.specs:
        for axis, dim in enumerate(spec.shape):
            symbols = getattr(dim, "free_symbols", ())
            stands_for = [dimensions[str(symbol)] for symbol in symbols]
            is_own = any((each.input, each.axis) == (spec.name, axis) for each in stands_for)
            if symbols and not is_own and not getattr(dim, "is_Symbol", False):
                size = sympy.Symbol(f"{spec.name}[{axis}]", integer=True, positive=True)
                dimensions[str(size)] = _Dimension(spec.name, axis, size)
                found.append(sympy.Eq(size, dim, evaluate=False))
    return found


def _relation(condition: sympy.Basic, text: str, dimensions: Mapping[str, _Dimension]) -> SizeRelation | None:
    """Return a condition over symbols as a relation of dimensions; None where it cannot be written so."""
    order = list(dimensions)
    # A message names sizes that fit of the first dimension: the one that an equation is solved for.
    solved = condition.lhs if isinstance(condition, sympy.Eq) else None
    values: dict[sympy.Symbol, sympy.Expr] = {}
    sizes: dict[str, str] = {}
    for symbol in sorted(condition.free_symbols, key=lambda each: (each != solved, order.index(str(each)))):
        dimension, name = dimensions[str(symbol)], sympy.Symbol(f"d{len(sizes)}", integer=True, positive=True)
        factor = dimension.size.coeff(symbol)
        rest = sympy.expand(dimension.size - factor * symbol)
        if not factor.is_Integer or not rest.is_Integer:
            return None
        values[symbol] = name if factor == 1 and rest == 0 else FloorDiv(name - rest, factor)
        sizes[str(name)] = f"{dimension.input}[{dimension.axis}]"
    try:
        return SizeRelation(PythonPrinter().doprint(condition.xreplace(values)), sizes, text)
    except ValueError:
        return None


# ---- words ----


def _describe(conditions: Sequence[sympy.Basic], ranges: SizeRanges, dimensions: Mapping[str, _Dimension]) -> list[str]:
    """Say what conditions demand: first of single sizes, each with all that is demanded of it, then of several."""
    fitting: dict[sympy.Symbol, Held] = {}
    texts: list[str] = []
    for condition in conditions:
        by_size = {symbol: _fitting(condition, symbol, ranges) for symbol in condition.free_symbols}
        demanding = [(symbol, held) for symbol, held in by_size.items() if held is not None and not held.all()]
        if len(demanding) == 1 and len(dimensions[str(demanding[0][0])].size.free_symbols) == 1:
            ((symbol, held),) = demanding
            fitting[symbol] = fitting.get(symbol, held) & held
        else:
            texts.append(_comparison(condition, dimensions))
    for symbol, held in fitting.items():
        dimension = dimensions[str(symbol)]
        sizes = [size_at(dimension.size, value) for value in _tried(symbol, ranges, _TRIED)]
        taken = [size for size, holds in zip(sizes, held, strict=True) if holds]
        texts.insert(0, f"{dimension} {_demand(taken, sizes[0], sizes[-1])}")
    return list(dict.fromkeys(texts))


def _fitting(condition: sympy.Basic, symbol: sympy.Symbol, ranges: SizeRanges) -> Held | None:
    """Return for which of a symbol's values a condition holds; None if other symbols matter."""
    symbols = sorted(condition.free_symbols, key=str)
    axes = [_tried(each, ranges, _TRIED if each == symbol else _TRIED_OF_OTHERS) for each in symbols]
    held = holds_at(condition, symbols, axes)
    if held is None:
        return None
    own = symbols.index(symbol)
    held = np.moveaxis(held, own, 0).reshape(len(axes[own]), -1)
    return held[:, 0] if (held == held[:, :1]).all() else None


def _tried(symbol: sympy.Symbol, ranges: SizeRanges, count: int) -> range:
    """Return the first `count` values of a symbol."""
    low, high = varying(*ranges.get(str(symbol), (1, None)))
    return range(low, (low + count if high is None else min(low + count, high + 1)))


def _demand(taken: list[int], least: int, largest: int) -> str:
    """Say which sizes from `least` to `largest` are taken: by a step and bounds, or one by one."""
    if not taken:
        return f"must be none of {least} to {largest}" if least < largest else f"must not be {least}"
    step = math.gcd(*np.diff(taken).tolist()) or 1
    if taken != list(range(taken[0], taken[-1] + 1, step)) or taken[0] % step:
        refused = [size for size in range(least, largest) if size not in taken] if largest - least < _TRIED else []
        return f"must not be {first_few(refused)}" if 0 < len(refused) <= _FEW else f"must be {first_few(taken)}"
    parts = [f"a multiple of {step}"] if step > 1 else []
    is_bound_below, is_bound_above = taken[0] - step >= least, taken[-1] + step <= largest
    if is_bound_below and is_bound_above:
        parts.append(f"{taken[0]} to {taken[-1]}" if len(taken) > 1 else f"{taken[0]}")
    elif is_bound_below:
        parts.append(f"{taken[0]} at least")
    elif is_bound_above:
        parts.append(f"{taken[-1]} at most")
    return f"must be {', '.join(parts)}"


def _comparison(condition: sympy.Basic, dimensions: Mapping[str, _Dimension]) -> str:
    """Return a condition with the names of dimensions in place of symbols."""
    names: dict[sympy.Symbol, sympy.Symbol] = {}
    for symbol in condition.free_symbols:
        dimension = dimensions[str(symbol)]
        is_whole = dimension.size == symbol
        names[symbol] = sympy.Symbol(str(dimension) if is_whole else f"({symbol} of {dimension.size} in {dimension})")
    named = condition.xreplace(names)
    compared = _COMPARED.get(getattr(named, "rel_op", ""))
    return f"{named.lhs} {compared} {named.rhs}" if compared else f"{named} must hold"
