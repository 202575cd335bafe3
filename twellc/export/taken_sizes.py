"""Which sizes that a plan is to take a model takes, and what to say where these are not all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
from torch.export import ExportedProgram

from twellc.base.errors import UserError, first_few
from twellc.base.torch_private import FloorDiv, PythonPrinter
from twellc.export.profiles import ModelInputs, size_at, symbol_sizes
from twellc.export.relations import SizeRelation
from twellc.export.shapes import ShapeProfile
from twellc.passes.graph.program import largest_size
from twellc.passes.graph.size_assertions import (
    Held,
    SizeRanges,
    Verdict,
    fitting_sizes,
    holds_at,
    value_assertions,
    varying,
    verdict,
)

_FIX = "Compile it for such sizes by --profile. For others export the model at one of them, and compile that archive."
_RELATIONS = {
    ">": "must be more than", ">=": "must be at least", "<": "must be less than", "<=": "must be at most",
    "==": "must be", "!=": "must not be",
}  # fmt: skip
_FEW = 3  # sizes are named one by one
# Number of sizes to try when describing what a condition takes, and of others that are in it.
_LOOKED_AT, _OTHERS = 4096, 16


def size_relations(
    where: str, inputs: ModelInputs, profiles: list[ShapeProfile], named: ModelInputs | None = None
) -> tuple[list[SizeRelation], list[str]]:
    """Return what a caller must keep of sizes within profiles, and warnings of what cannot be said or checked.

    Args:
        where: What to name in the message.
        inputs: The inputs, whose `conditions` are true of sizes that the model takes.
        profiles: The profiles.
        named: The inputs with the names that a caller knows, where these differ.

    Raises:
        UserError: No sizes within a profile go together, or what they must be cannot be written down.
    """
    places = _places(named or inputs)
    conditions = [*inputs.conditions, *_computed_sizes(named or inputs, places)]
    relations: dict[str, SizeRelation] = {}
    warnings: dict[str, None] = {}
    for profile in profiles:
        ranges = _ranges(inputs, profile)
        verdicts = {condition: verdict(condition, ranges) for condition in conditions}
        left = [condition for condition, found in verdicts.items() if found != Verdict.HOLDS]
        failing = [each for each in inputs.conditions if verdicts[each] == Verdict.FAILS]
        tuned = symbol_sizes(inputs, profile)[1]
        if fitting_sizes(failing, ranges, tuned) is None:
            demands = first_few(_demands(failing, ranges, places), "; ")
            raise UserError(where, f"the model takes no size within the profile: {demands}", fix=_FIX)
        for condition in left:
            demand = _demands([condition], ranges, places)[0]
            relation = _relation(condition, places, demand)
            if relation is not None:
                relations.setdefault(f"{relation.expression} {relation.sizes}", relation)
            elif verdicts[condition] == Verdict.FAILS:
                raise UserError(where, f"the model does not take every size: {demand}", fix=_FIX)
            else:
                warnings[f"that the model takes every size is not proven, only tried with some: {demand}"] = None
    return list(relations.values()), list(warnings)


def relations_of(inputs: ModelInputs) -> list[SizeRelation]:
    """Return what sizes must keep that a model takes, whatever they are; but what cannot be written so."""
    ranges = {symbol: (low, largest_size(high)) for symbol, (low, high) in inputs.bounds.items()}
    places = _places(inputs)
    conditions = [*inputs.conditions, *_computed_sizes(inputs, places)]
    written = [_relation(each, places, _demands([each], ranges, places)[0]) for each in conditions]
    return [relation for relation in written if relation is not None]


def relation_notes(relations: list[SizeRelation]) -> list[str]:
    """Say what a caller must keep of sizes."""
    if not relations:
        return []
    texts = first_few([relation.text for relation in relations], "; ")
    return [f"the model does not take every size together: {texts}. twellc checks that before a run; other hosts must"]


def _relation(condition: sympy.Basic, places: Mapping[str, _Place], text: str) -> SizeRelation | None:
    """Return a condition as a relation of dimensions; None where it cannot be written so."""
    names: dict[Any, Any] = {}
    sizes: dict[str, str] = {}
    solved = (
        condition.lhs if isinstance(condition, sympy.Eq) else None
    )  # the first one of which a message says what fits
    for symbol in sorted(condition.free_symbols, key=lambda each: (each != solved, list(places).index(str(each)))):
        place = places[str(symbol)]
        name = sympy.Symbol(f"d{len(sizes)}", integer=True, positive=True)
        factor, rest = place.size.coeff(symbol), sympy.expand(place.size - place.size.coeff(symbol) * symbol)
        if not factor.is_Integer or not rest.is_Integer:
            return None
        names[symbol] = name if factor == 1 and rest == 0 else FloorDiv(name - rest, factor)
        sizes[str(name)] = f"{place.input}[{place.axis}]"
    try:
        return SizeRelation(PythonPrinter().doprint(condition.xreplace(names)), sizes, text)
    except ValueError:
        return None


def value_warnings(program: ExportedProgram) -> list[str]:
    """Point out that a model checks values as it runs."""
    checks = value_assertions(program)
    return ["the model checks values as it runs; the plan does not, and computes with any"] if checks else []


def _ranges(inputs: ModelInputs, profile: ShapeProfile) -> SizeRanges:
    bounds = inputs.bounds.items()
    ranges = {symbol: (low, largest_size(high)) for symbol, (low, high) in bounds}
    least, _, largest = symbol_sizes(inputs, profile)
    return {**ranges, **{symbol: (least[symbol], largest[symbol]) for symbol in least}}


# ---- words ----


@dataclass(frozen=True)
class _Place:
    """A dimension of an input, whose size is a symbol or an expression of one."""

    input: str
    axis: int
    size: sympy.Expr

    @property
    def name(self) -> str:
        """What a message calls it."""
        return f"dimension {self.axis} of {self.input}"


def _places(inputs: ModelInputs) -> dict[str, _Place]:
    """Return where each symbol stands, of several places one where it does so by itself."""
    places: dict[str, _Place] = {}
    dims = [_Place(spec.name, axis, dim) for spec in inputs.specs for axis, dim in enumerate(spec.shape)]
    for place in sorted(dims, key=lambda each: not getattr(each.size, "is_Symbol", False)):
        for symbol in getattr(place.size, "free_symbols", ()):
            places.setdefault(str(symbol), place)
    return places


def _computed_sizes(inputs: ModelInputs, places: dict[str, _Place]) -> list[sympy.Basic]:
    """Return what is true of dimensions that are computed of others, such as of past and tokens; add their places."""
    found = []
    for spec in inputs.specs:
        for axis, dim in enumerate(spec.shape):
            symbols = getattr(dim, "free_symbols", ())
            own = any((places[str(symbol)].input, places[str(symbol)].axis) == (spec.name, axis) for symbol in symbols)
            if symbols and not own and not getattr(dim, "is_Symbol", False):
                size = sympy.Symbol(f"{spec.name}[{axis}]", integer=True, positive=True)
                places[str(size)] = _Place(spec.name, axis, size)
                found.append(sympy.Eq(size, dim, evaluate=False))
    return found


def _demands(conditions: Sequence[sympy.Basic], ranges: SizeRanges, places: Mapping[str, _Place]) -> list[str]:
    """Return what sizes must be: all that conditions demand of one of them, then those of several."""
    alone: dict[sympy.Symbol, Held] = {}
    texts: list[str] = []
    for condition in conditions:
        held = {symbol: _held_by(condition, symbol, ranges) for symbol in condition.free_symbols}
        by_one = [(symbol, found) for symbol, found in held.items() if found is not None and not found.all()]
        if len(by_one) == 1 and len(places[str(by_one[0][0])].size.free_symbols) == 1:
            ((symbol, found),) = by_one
            alone[symbol] = alone.get(symbol, found) & found
        else:
            texts.append(_text(condition, places))
    for symbol, held_by in alone.items():
        place, sizes = places[str(symbol)], _looked_at(symbol, ranges, _LOOKED_AT)
        taken = [size_at(place.size, size) for size, holds in zip(sizes, held_by, strict=True) if holds]
        demand = _of_one(taken, size_at(place.size, sizes[0]), size_at(place.size, sizes[-1]))
        texts.insert(0, f"{place.name} {demand}")
    return list(dict.fromkeys(texts))


def _held_by(condition: sympy.Basic, symbol: sympy.Symbol, ranges: SizeRanges) -> Held | None:
    """Return for which sizes of a symbol a condition holds; None if that depends on others."""
    symbols = sorted(condition.free_symbols, key=str)
    axes = [_looked_at(each, ranges, _LOOKED_AT if each == symbol else _OTHERS) for each in symbols]
    held = holds_at(condition, symbols, axes)
    if held is None:
        return None
    held = np.moveaxis(held, symbols.index(symbol), 0).reshape(len(axes[symbols.index(symbol)]), -1)
    return held[:, 0] if (held == held[:, :1]).all() else None


def _looked_at(symbol: sympy.Symbol, ranges: SizeRanges, count: int) -> range:
    low, high = varying(*ranges.get(str(symbol), (1, None)))
    return range(low, (low + count if high is None else min(low + count, high + 1)))


def _of_one(taken: list[int], least: int, largest: int) -> str:
    """Say what a size must be that is one of some, as far as these are regular."""
    if not taken:
        return f"must be none of {least} to {largest}" if least < largest else f"must not be {least}"
    step = math.gcd(*np.diff(taken).tolist()) or 1
    if taken != list(range(taken[0], taken[-1] + 1, step)) or taken[0] % step:
        refused = [size for size in range(least, largest) if size not in taken] if largest - least < _LOOKED_AT else []
        return f"must not be {first_few(refused)}" if 0 < len(refused) <= _FEW else f"must be {first_few(taken)}"
    parts = [f"a multiple of {step}"] if step > 1 else []
    first, last = taken[0] - step >= least, taken[-1] + step <= largest
    if first and last:
        parts.append(f"{taken[0]} to {taken[-1]}" if len(taken) > 1 else f"{taken[0]}")
    elif first:
        parts.append(f"{taken[0]} at least")
    elif last:
        parts.append(f"{taken[-1]} at most")
    return f"must be {', '.join(parts)}"


def _text(condition: sympy.Basic, places: Mapping[str, _Place]) -> str:
    named = condition.xreplace({symbol: sympy.Symbol(_name(symbol, places)) for symbol in condition.free_symbols})
    relation = _RELATIONS.get(getattr(named, "rel_op", ""))
    return f"{named.lhs} {relation} {named.rhs}" if relation else f"{named} must hold"


def _name(symbol: sympy.Symbol, places: Mapping[str, _Place]) -> str:
    place = places[str(symbol)]
    return place.name if place.size == symbol else f"({symbol} of {place.size} in {place.name})"
