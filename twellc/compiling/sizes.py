"""How many rows the blocks of a model get, by optimization profile."""

from __future__ import annotations

import math
from collections.abc import Callable

import sympy
import torch

from twellc.decisions.choose import Tokens
from twellc.export.profiles import ModelInputs, symbol_sizes
from twellc.export.shapes import ShapeProfile
from twellc.passes.match.find_ffn import FfnBlock


def rows_of_blocks(inputs: ModelInputs, profiles: list[ShapeProfile]) -> Callable[[FfnBlock], list[Tokens]]:
    """Return what tells the rows of a block of a traced program: those of its x [..., d_model]."""
    sizes = [symbol_sizes(inputs, profile) for profile in profiles]

    def rows(block: FfnBlock) -> list[Tokens]:
        dims = block.x.meta["val"].shape[:-1]
        return [Tokens(*(max(1, math.prod(_size(dim, values) for dim in dims)) for values in each)) for each in sizes]

    return rows


def rows_of_inputs(inputs: ModelInputs, profiles: list[ShapeProfile]) -> Callable[[FfnBlock], list[Tokens]]:
    """Return what tells the rows of a block where shapes within the graph are not known: the most that an input has."""

    def most(profile: ShapeProfile, which: str) -> int:
        shapes = ((spec, getattr(profile[spec.name], which)) for spec in inputs.specs)
        # Floating-point inputs have features behind the tokens.
        rows = (math.prod(shape[:-1] if spec.dtype.is_floating_point else shape) for spec, shape in shapes)
        return max(rows, default=1)

    found = [Tokens(*(most(profile, which) for which in ("min", "opt", "max"))) for profile in profiles]
    return lambda block: found


def _size(dim: int | torch.SymInt, values: dict[str, int]) -> int:
    """Return the size of a dimension for sizes of symbols; the traced one where others are in it."""
    if isinstance(dim, int):
        return dim
    expression = dim.node.expr
    known = {symbol: sympy.Integer(values[str(symbol)]) for symbol in expression.free_symbols if str(symbol) in values}
    size = expression.xreplace(known)
    return int(size) if size.is_Integer else int(dim.node.hint)
