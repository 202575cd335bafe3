"""Optimization profiles: the shapes that a plan accepts, and the one that it is tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.export import ExportedProgram

from twellc.base.errors import UserError
from twellc.export.shapes import ShapeProfile, ShapeRange
from twellc.passes.graph.program import largest_size, user_inputs
from twellc.passes.graph.size_assertions import equalities_joined, fitting_sizes, size_assertions

_UNBOUNDED = 2048


@dataclass(frozen=True)
class InputSpec:
    """An input of a program: `shape` holds integers and, for dynamic dimensions, expressions over symbols."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | sympy.Expr, ...]


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model, and what is known of their symbolic dimensions.

    Attributes:
        specs: The inputs in order.
        bounds: Least and largest size by symbol; a symbol without an entry is free.
        hints: A size to tune for by symbol.
        conditions: What is true of sizes that the model takes together, over symbols.
    """

    specs: list[InputSpec]
    bounds: dict[str, tuple[int, object]]
    hints: dict[str, int]
    conditions: list[sympy.Basic] = field(default_factory=list)


def program_inputs(program: ExportedProgram, names: Mapping[str, str] | None = None) -> ModelInputs:
    """Return the inputs of a program, with the bounds that it was exported with and the sizes that it was traced with.

    The size of a symbol that only occurs in expressions of several symbols is that of the first of these.

    Args:
        program: The program.
        names: Names of inputs that differ from those of their placeholders, by these.
    """
    hints: dict[str, int] = {}
    for node in user_inputs(program):
        for dim in node.meta["val"].shape:
            if isinstance(dim, torch.SymInt):
                symbols, size = dim.node.expr.free_symbols, int(dim.node.hint)
                for symbol in symbols:
                    hints.setdefault(str(symbol), symbol_value(dim.node.expr, size) or size)
    # Symbols of values, such as of a tensor's item, have ranges without a lower end.
    ranges = {str(symbol): sizes for symbol, sizes in program.range_constraints.items() if str(symbol) in hints}
    bounds = {symbol: (int(sizes.lower), sizes.upper) for symbol, sizes in ranges.items()}
    specs = [replace(spec, name=(names or {}).get(spec.name, spec.name)) for spec in input_specs(program)]
    return ModelInputs(specs, bounds, hints, equalities_joined(size_assertions(program)))


def input_specs(program: ExportedProgram) -> list[InputSpec]:
    """Return the tensor inputs of a program in order."""
    specs = []
    for node in user_inputs(program):
        value = node.meta["val"]
        shape = tuple(dim.node.expr if isinstance(dim, torch.SymInt) else int(dim) for dim in value.shape)
        shape = tuple(int(dim) if isinstance(dim, sympy.Integer) else dim for dim in shape)
        specs.append(InputSpec(node.name, value.dtype, shape))
    return specs


def resolve_profiles(
    inputs: ModelInputs,
    requested: list[tuple[str, ShapeRange]],
    defaults: dict[str, tuple[int, int, int]],
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
            raise UserError("--profile", "the model has no such input", got=name, expected=" or ".join(specs))
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
    defaults: dict[str, tuple[int, int, int]],
    notes: list[str],
) -> ShapeProfile:
    bounds = inputs.bounds
    values: dict[str, tuple[int, int, int]] = {}
    for name, shape_range in given.items():
        _fix_symbols(specs[name], shape_range, bounds, values)
    ranges = {symbol: (opt, opt) for symbol, (_, opt, _) in values.items()}  # a user's stay
    for spec in specs.values():
        for dim in spec.shape:
            for symbol in sorted(map(str, getattr(dim, "free_symbols", ()))):
                if symbol not in values:
                    values[symbol] = defaults.get(symbol) or _assume(inputs, spec.name, symbol, notes)
    # What TensorRT tunes for must be sizes that go together.
    wanted = {symbol: sizes[1] for symbol, sizes in values.items()}
    ranges = {symbol: (least, most) for symbol, (least, _, most) in values.items()} | ranges
    fitting = fitting_sizes(inputs.conditions, ranges, wanted)
    if fitting is not None:
        values = {symbol: (least, fitting[symbol], most) for symbol, (least, _, most) in values.items()}
    profile = {}
    for spec in specs.values():
        shapes = []
        for which in range(3):
            chosen = {symbol: value[which] for symbol, value in values.items()}
            shapes.append(tuple(_evaluate(dim, chosen) for dim in spec.shape))
        profile[spec.name] = ShapeRange(*shapes)
    for name, shape_range in given.items():
        if profile[name] != shape_range:
            raise UserError(
                "--profile", f"the shapes of {name} contradict the model or another profile",
                got=str(shape_range), expected=str(profile[name]),
            )  # fmt: skip
    return profile


def _evaluate(dim: int | sympy.Expr, values: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return int(dim.xreplace({symbol: sympy.Integer(values[str(symbol)]) for symbol in dim.free_symbols}))


def symbol_value(dim: sympy.Expr, size: int) -> int | None:
    """Return the value of the only symbol in `dim` for which it is `size`; None without one, or of several."""
    if len(dim.free_symbols) != 1:
        return None
    (symbol,) = dim.free_symbols
    # The symbols of a graph are integers; solving over the reals finds the candidates, for 2*s as for s/2.
    free = sympy.Symbol("n", real=True)
    for solution in sympy.solve(dim.xreplace({symbol: free}) - size, free):
        if solution.is_Integer and solution > 0:
            return int(solution)
    return None


def size_at(dim: sympy.Expr, value: int) -> int:
    """Return the size of a dimension of one symbol for a value of that: the inverse of `symbol_value`."""
    return int(dim.xreplace(dict.fromkeys(dim.free_symbols, sympy.Integer(value))))


def form_of(dim: sympy.Expr) -> str:
    """Return a dimension of one symbol for a message, such as `2*n`: torch's own names of symbols say nothing."""
    return str(dim.xreplace(dict.fromkeys(dim.free_symbols, sympy.Symbol("n"))))


def _fix_symbols(
    spec: InputSpec,
    shape_range: ShapeRange,
    bounds: dict[str, tuple[int, object]],
    values: dict[str, tuple[int, int, int]],
) -> None:
    if len(shape_range.min) != len(spec.shape):
        raise UserError(
            "--profile", f"{spec.name} has {len(spec.shape)} dimensions", got=f"{len(shape_range.min)} in the profile"
        )
    for axis, dim in enumerate(spec.shape):
        wanted = (shape_range.min[axis], shape_range.opt[axis], shape_range.max[axis])
        if isinstance(dim, int):
            if wanted != (dim, dim, dim):
                raise UserError(
                    "--profile", f"dimension {axis} of {spec.name} is fixed in the model",
                    got=str(wanted), expected=str(dim), fix="Export the model with this dimension dynamic.",
                )  # fmt: skip
            continue
        if len(dim.free_symbols) != 1:
            continue  # of several symbols; the caller compares the whole in the end
        symbol = str(next(iter(dim.free_symbols)))
        sizes = [value for value in (symbol_value(dim, size) for size in wanted) if value is not None]
        if len(sizes) < len(wanted):
            raise UserError(
                "--profile", f"dimension {axis} of {spec.name} has impossible sizes", got=str(wanted),
                expected=form_of(dim),
            )  # fmt: skip
        low, high = bounds.get(symbol, (1, sympy.oo))
        largest = largest_size(high)
        given = (sizes[0], sizes[1], sizes[2])
        if given[0] < low or (largest is not None and given[2] > largest):
            least = size_at(dim, low)
            raise UserError(
                "--profile", f"dimension {axis} of {spec.name} leaves the range that the model was exported with",
                got=f"{wanted[0]} to {wanted[2]}",
                expected=f"{least} at least" if largest is None else f"{least} to {size_at(dim, largest)}",
            )  # fmt: skip
        found = values.setdefault(symbol, given)
        if found != given:
            raise UserError(
                "--profile", f"dimension {axis} of {spec.name} is shared with another input",
                got=str(wanted), expected=str(tuple(size_at(dim, value) for value in found)),
            )  # fmt: skip


def symbol_sizes(inputs: ModelInputs, profile: ShapeProfile) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Return what the symbols of a model's inputs stand for at a profile's smallest, tuned and largest shapes."""
    sizes: tuple[dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {})
    for spec in inputs.specs:
        shapes = profile[spec.name]
        for values, shape in zip(sizes, (shapes.min, shapes.opt, shapes.max), strict=True):
            for dim, size in zip(spec.shape, shape, strict=True):
                value = None if isinstance(dim, int) else symbol_value(dim, size)
                if value is not None:
                    values.update({str(symbol): value for symbol in getattr(dim, "free_symbols", ())})
    return sizes


def _assume(inputs: ModelInputs, name: str, symbol: str, notes: list[str]) -> tuple[int, int, int]:
    low, high = inputs.bounds.get(symbol, (1, sympy.oo))
    low = max(low, 1)
    largest = largest_size(high)
    if largest is None:
        largest = max(_UNBOUNDED, low)
        notes.append(
            f"a dimension of {name} has no upper bound; the plan takes {low} to {largest} (--profile changes it)"
        )
    return low, min(max(inputs.hints[symbol], low), largest), largest
