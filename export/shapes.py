"""Ranges of input shapes, as users write them and as TensorRT's optimization profiles hold them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from twellc.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ShapeRange:
    """Smallest, tuned and largest shape of one input."""

    min: Shape
    opt: Shape
    max: Shape


# One optimization profile: a range for every input.
Profile = dict[str, ShapeRange]


def parse_profile(text: str) -> tuple[str, ShapeRange]:
    """Parse `NAME:MIN:OPT:MAX`.

    Raises:
        UserError: The text does not have this form, or MIN <= OPT <= MAX does not hold.
    """
    name, *shapes = text.rsplit(":", 3)
    if len(shapes) != 3 or not name or not all(re.fullmatch(r"\d+(x\d+)*", shape) for shape in shapes):
        raise UserError(
            "--profile", "not a profile", got=repr(text), expected="NAME:MIN:OPT:MAX with shapes such as 1x128"
        )
    low, opt, high = (tuple(int(dim) for dim in shape.split("x")) for shape in shapes)
    if not len(low) == len(opt) == len(high) or any(
        not 1 <= a <= b <= c for a, b, c in zip(low, opt, high, strict=True)
    ):
        raise UserError("--profile", "the shapes are not ordered", got=repr(text), expected="1 <= MIN <= OPT <= MAX")
    return name, ShapeRange(low, opt, high)
