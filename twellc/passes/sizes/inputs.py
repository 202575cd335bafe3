"""The inputs of a model, and which sizes of them it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.export import ExportedProgram

from twellc.passes.graph.program import user_inputs
from twellc.passes.sizes.conditions import (
    SizeRanges,
    Verdict,
    equalities_joined,
    size_assertions,
    size_ranges,
    verdict,
)


@dataclass(frozen=True)
class InputSpec:
    """An input of a program: `shape` holds integers and, for dynamic dimensions, expressions over symbols."""

    name: str
    dtype: torch.dtype
    shape: tuple[int | sympy.Expr, ...]


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a model, and facts about their symbolic dimensions.

    Attributes:
        specs: The inputs in order.
        bounds: Least and largest size by symbol; a symbol without an entry is free.
        hints: A size to tune for by symbol.
        conditions: What is true of sizes that the model takes together, over symbols; not of all within the bounds.
    """

    specs: list[InputSpec]
    bounds: SizeRanges
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
    specs = [replace(spec, name=(names or {}).get(spec.name, spec.name)) for spec in input_specs(program)]
    ranges = size_ranges(program)
    conditions = [each for each in size_assertions(program) if verdict(each, ranges) != Verdict.HOLDS]
    return ModelInputs(specs, ranges, hints, equalities_joined(conditions))


def input_specs(program: ExportedProgram) -> list[InputSpec]:
    """Return the tensor inputs of a program in order."""
    specs = []
    for node in user_inputs(program):
        value = node.meta["val"]
        shape = tuple(dim.node.expr if isinstance(dim, torch.SymInt) else int(dim) for dim in value.shape)
        shape = tuple(int(dim) if isinstance(dim, sympy.Integer) else dim for dim in shape)
        specs.append(InputSpec(node.name, value.dtype, shape))
    return specs


# ---- dimensions ----


def size_of(dim: int | sympy.Expr, values: Mapping[str, int]) -> int:
    """Return the size of a dimension for values of its symbols."""
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
