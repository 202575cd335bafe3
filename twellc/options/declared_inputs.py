"""How a user declares the inputs of a module that was not traced yet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twellc.base.errors import UserError
from twellc.export.shapes import LARGEST_SIZE, parse_size

_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")


@dataclass(frozen=True)
class InputDeclaration:
    """An input: a parameter of `forward`, with dtype and shape; a name in the shape is a dynamic dimension."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


def parse_input(text: str) -> InputDeclaration:
    """Parse `NAME:DTYPE[DIM,…]`, such as `x:float32[batch,sequence,512]`.

    Raises:
        UserError: The text does not have this form.
    """
    found = re.fullmatch(r"([A-Za-z_]\w*):(\w+)\[([\w, ]*)\]", text)
    if found is None or found[2] not in _DTYPES:
        expected = f"NAME:DTYPE[DIM,...] with a dtype of {', '.join(_DTYPES)} and dims that are sizes or names"
        raise UserError("--input-spec", "not an input", got=repr(text), expected=expected)
    dims = [dim.strip() for dim in found[3].split(",")] if found[3].strip() else []
    shape = tuple(parse_size(dim) if re.fullmatch("[0-9]+", dim) else dim for dim in dims)
    if not all(dim.isidentifier() if isinstance(dim, str) else 1 <= dim <= LARGEST_SIZE for dim in shape):
        raise UserError(
            "--input-spec", "not a shape", got=repr(text), expected=f"sizes from 1 to {LARGEST_SIZE}, or names"
        )
    return InputDeclaration(found[1], found[2], shape)


def refuse_inputs(declared: tuple[InputDeclaration, ...], target: str) -> None:
    """Raise `UserError` if inputs are declared for a target that has its own declarations."""
    if declared:
        raise UserError(
            "--input-spec", "only a pickled module needs its inputs declared", got=target, fix="Leave it out."
        )
