"""Whether a model takes every size that a plan is to take, and what to say where it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sympy

from twellc.base.errors import UserError, first_few
from twellc.export.profiles import ModelInputs, program_inputs, size_at, symbol_sizes
from twellc.export.shapes import ShapeProfile
from twellc.loaders.loaded import LoadedModel
from twellc.passes.graph.program import largest_size
from twellc.passes.graph.size_assertions import (
    Held,
    SizeRanges,
    Verdict,
    holds_at,
    size_assertions,
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
# So many sizes are looked at to say which of them a condition takes, and so many of others that are in it.
_LOOKED_AT, _OTHERS = 4096, 16


def refuse_sizes(model: LoadedModel, profiles: list[ShapeProfile]) -> list[str]:
    """Fail where a model computes something else than its program for sizes within a profile.

    Args:
        model: The model.
        profiles: The profiles, by names of the program's inputs.

    Returns:
        Warnings of conditions of which that cannot be said.

    Raises:
        UserError: What was true of the sizes that the model was traced with is not true of some in a profile.
    """
    inputs, conditions = program_inputs(model.program), size_assertions(model.program)
    places = _places(program_inputs(model.program, model.input_names))
    warnings: dict[str, None] = {}
    for profile in profiles:
        ranges = _ranges(inputs, profile)
        verdicts = {condition: verdict(condition, ranges) for condition in conditions}
        failing, unknown = (
            [condition for condition, found in verdicts.items() if found == wanted]
            for wanted in (Verdict.FAILS, Verdict.UNKNOWN)
        )
        if failing:
            demands = first_few(_demands(failing, ranges, places), "; ")
            raise UserError(str(model.path), f"the model does not take every size: {demands}", fix=_FIX)
        for demand in _demands(unknown, ranges, places):
            warnings[f"that the model takes every size is not proven, only tried with some: {demand}"] = None
    return list(warnings)


def value_warnings(model: LoadedModel) -> list[str]:
    """Point out that a model checks values as it runs."""
    checks = value_assertions(model.program)
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

    name: str
    size: sympy.Expr


def _places(inputs: ModelInputs) -> dict[str, _Place]:
    """Return where each symbol stands, of several places one where it does so by itself."""
    places: dict[str, _Place] = {}
    dims = [(f"dimension {axis} of {spec.name}", dim) for spec in inputs.specs for axis, dim in enumerate(spec.shape)]
    for name, dim in sorted(dims, key=lambda each: not getattr(each[1], "is_Symbol", False)):
        for symbol in getattr(dim, "free_symbols", ()):
            places.setdefault(str(symbol), _Place(name, dim))
    return places


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
