"""Optimization profiles: the shapes that a plan accepts, and the one that it is tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twellc.base.errors import UserError
from twellc.export.shapes import ShapeProfile, ShapeRange
from twellc.passes.sizes.conditions import SizeRanges, fitting_sizes
from twellc.passes.sizes.find_relations import SymbolSizes, relation_notes, relations_within
from twellc.passes.sizes.inputs import InputSpec, ModelInputs, form_of, size_at, size_of, symbol_value
from twellc.passes.sizes.relations import SizeRelation

_UNBOUNDED = 2048


@dataclass(frozen=True)
class PlanSizes:
    """The sizes that a plan is built for.

    Attributes:
        profiles: The optimization profiles.
        relations: What a caller must keep of sizes within these.
        notes: What the user should know of them.
        warnings: What the user should worry about.
    """

    profiles: list[ShapeProfile]
    relations: list[SizeRelation]
    notes: list[str]
    warnings: list[str]


def plan_sizes(
    where: str,
    inputs: ModelInputs,
    requested: list[tuple[str, ShapeRange]],
    defaults: Mapping[str, tuple[int, int, int]],
) -> PlanSizes:
    """Return the sizes that a plan is built for; `where` names the model in messages, see `resolve_profiles`.

    Raises:
        UserError: See `resolve_profiles` and `relations_within`.
    """
    profiles, notes = resolve_profiles(inputs, requested, defaults)
    relations, warnings = relations_within(where, inputs, [symbol_sizes(inputs, profile) for profile in profiles])
    return PlanSizes(profiles, relations, [*relation_notes(relations), *notes], warnings)


def resolve_profiles(
    inputs: ModelInputs,
    requested: list[tuple[str, ShapeRange]],
    defaults: Mapping[str, tuple[int, int, int]],
) -> tuple[list[ShapeProfile], list[str]]:
    """Complete the requested ranges to whole profiles.

    An input's ranges fix the symbols in its shape, and with them the ranges of other inputs that share them. What is
    left open comes from `defaults` or from the bounds that the model was exported with. The k-th range for an input
    belongs to the k-th profile.

    Args:
        inputs: The inputs of the model.
        requested: Ranges by input name, as a user gives them.
        defaults: (min, opt, max) by symbol.

    Returns:
        The profiles, and notes on what had to be assumed.

    Raises:
        UserError: A name is unknown, or a range contradicts the model, another range or the export's bounds.
    """
    specs = {spec.name: spec for spec in inputs.specs}
    numbered: list[dict[str, ShapeRange]] = []
    for name, given in requested:
        if name not in specs:
            raise UserError(
                "--optimization-profile", "the model has no such input", got=name, expected=" or ".join(specs)
            )
        index = sum(1 for profile in numbered if name in profile)
        if index == len(numbered):
            numbered.append({})
        numbered[index][name] = given
    notes: list[str] = []
    profiles = [_complete(inputs, specs, given, defaults, notes) for given in numbered or [{}]]
    return profiles, list(dict.fromkeys(notes))


def _complete(
    inputs: ModelInputs,
    specs: dict[str, InputSpec],
    given: dict[str, ShapeRange],
    defaults: Mapping[str, tuple[int, int, int]],
    notes: list[str],
) -> ShapeProfile:
    values: dict[str, tuple[int, int, int]] = {}
    for name, shape_range in given.items():
        _fix_symbols(specs[name], shape_range, inputs.bounds, values)
    asked = set(values)
    for spec in specs.values():
        for dim in spec.shape:
            for symbol in sorted(map(str, getattr(dim, "free_symbols", ()))):
                if symbol not in values:
                    values[symbol] = defaults.get(symbol) or _assume(inputs, spec.name, symbol, notes)
    # What TensorRT tunes for must be sizes that go together; those that the user asked for stay.
    tuned = {symbol: opt for symbol, (_, opt, _) in values.items()}
    ranges = {symbol: (opt, opt) if symbol in asked else (low, high) for symbol, (low, opt, high) in values.items()}
    fitting = fitting_sizes(inputs.conditions, ranges, tuned) or tuned
    profile = {}
    for spec in specs.values():
        least, largest = ({symbol: sizes[end] for symbol, sizes in values.items()} for end in (0, 2))
        shapes = (tuple(size_of(dim, chosen) for dim in spec.shape) for chosen in (least, fitting, largest))
        profile[spec.name] = ShapeRange(*shapes)
    for name, shape_range in given.items():
        if profile[name] != shape_range:
            raise UserError(
                "--optimization-profile", f"the shapes of {name} contradict the model or another profile",
                got=str(shape_range), expected=str(profile[name]),
            )  # fmt: skip
    return profile


def _fix_symbols(
    spec: InputSpec,
    shape_range: ShapeRange,
    bounds: SizeRanges,
    values: dict[str, tuple[int, int, int]],
) -> None:
    if len(shape_range.min) != len(spec.shape):
        raise UserError(
            "--optimization-profile",
            f"{spec.name} has {len(spec.shape)} dimensions",
            got=f"{len(shape_range.min)} in the profile",
        )
    for axis, dim in enumerate(spec.shape):
        wanted = (shape_range.min[axis], shape_range.opt[axis], shape_range.max[axis])
        if isinstance(dim, int):
            if wanted != (dim, dim, dim):
                raise UserError(
                    "--optimization-profile", f"dimension {axis} of {spec.name} is fixed in the model",
                    got=str(wanted), expected=str(dim), fix="Export the model with this dimension dynamic.",
                )  # fmt: skip
            continue
        if len(dim.free_symbols) != 1:
            continue  # of several symbols; the caller compares the whole in the end
        symbol = str(next(iter(dim.free_symbols)))
        sizes = [value for value in (symbol_value(dim, size) for size in wanted) if value is not None]
        if len(sizes) < len(wanted):
            raise UserError(
                "--optimization-profile", f"dimension {axis} of {spec.name} has impossible sizes", got=str(wanted),
                expected=form_of(dim),
            )  # fmt: skip
        low, largest = bounds.get(symbol, (1, None))
        given = (sizes[0], sizes[1], sizes[2])
        if given[0] < low or (largest is not None and given[2] > largest):
            least = size_at(dim, low)
            raise UserError(
                "--optimization-profile", f"dimension {axis} of {spec.name} leaves the range of the exported model",
                got=f"{wanted[0]} to {wanted[2]}",
                expected=f"{least} at least" if largest is None else f"{least} to {size_at(dim, largest)}",
            )  # fmt: skip
        found = values.setdefault(symbol, given)
        if found != given:
            raise UserError(
                "--optimization-profile", f"dimension {axis} of {spec.name} is shared with another input",
                got=str(wanted), expected=str(tuple(size_at(dim, value) for value in found)),
            )  # fmt: skip


def symbol_sizes(inputs: ModelInputs, profile: ShapeProfile) -> SymbolSizes:
    """Return the values of symbols at a profile's smallest, tuned and largest shapes; of those alone in a dimension."""
    found = {}
    for spec in inputs.specs:
        shapes = profile[spec.name]
        for dim, *sizes in zip(spec.shape, shapes.min, shapes.opt, shapes.max, strict=True):
            if not isinstance(dim, int):
                least, tuned, largest = (symbol_value(dim, size) for size in sizes)
                if least is not None and tuned is not None and largest is not None:
                    found.update({str(symbol): (least, tuned, largest) for symbol in dim.free_symbols})
    return found


def _assume(inputs: ModelInputs, name: str, symbol: str, notes: list[str]) -> tuple[int, int, int]:
    low, largest = inputs.bounds.get(symbol, (1, None))
    if largest is None:
        largest = max(_UNBOUNDED, low)
        notes.append(
            f"a dimension of {name} has no upper bound; the plan takes {low} to {largest} "
            "(--optimization-profile changes it)"
        )
    return low, min(max(inputs.hints[symbol], low), largest), largest
