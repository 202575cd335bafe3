"""Ranges of input shapes, as users write them and as TensorRT's optimization profiles hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from twellc.base.errors import UserError
from twellc.base.records import Range

Shape = tuple[int, ...]

# TensorRT counts in 32 bits.
LARGEST_SIZE = 2**31 - 1
Sizes = tuple[Annotated[int, Range(1, LARGEST_SIZE)], ...]


@dataclass(frozen=True)
class ShapeRange:
    """Smallest, tuned and largest shape of one input."""

    min: Sizes
    opt: Sizes
    max: Sizes


# One optimization profile: a range for every input.
ShapeProfile = dict[str, ShapeRange]


# Sizes of inputs by their names, 0 for those that may vary.
FixedSizes = tuple[tuple[str, Shape], ...]


def fixed_sizes(profiles: Iterable[tuple[str, ShapeRange]]) -> FixedSizes:
    """Return the only sizes that inputs have in ranges of theirs."""
    ranges: dict[str, list[Shape]] = {}
    for name, given in profiles:
        ranges.setdefault(name, []).extend((given.min, given.opt, given.max))
    sizes = {
        name: tuple(dims[0] if len(set(dims)) == 1 else 0 for dims in zip(*shapes, strict=False))
        for name, shapes in ranges.items()
    }
    return tuple((name, shape) for name, shape in sizes.items() if any(shape))


def parse_size(digits: str) -> int:
    """Return the size that decimal digits stand for; of sizes above the largest the first, since int() has a limit."""
    return int(min(float(digits), LARGEST_SIZE + 1))


def _sizes_in(text: str) -> Shape:
    """Return the sizes in a text such as `1x512`; none where it is another."""
    return tuple(map(parse_size, text.split("x"))) if re.fullmatch(r"[0-9]+(x[0-9]+)*", text) else ()


def parse_sizes(text: str) -> Shape:
    """Parse sizes of dimensions, such as `1x512`.

    Raises:
        UserError: The text does not have this form, or a size is too large.
    """
    sizes = _sizes_in(text)
    if not sizes or not all(1 <= size <= LARGEST_SIZE for size in sizes):
        raise UserError(
            "--shapes", "not the sizes of dimensions", got=repr(text),
            expected=f"numbers from 1 to {LARGEST_SIZE} such as 1x512",
        )  # fmt: skip
    return sizes


def parse_profile(text: str) -> tuple[str, ShapeRange]:
    """Parse `NAME:MIN:OPT:MAX`.

    Raises:
        UserError: The text does not have this form, MIN <= OPT <= MAX does not hold, or a size is too large.
    """
    name, *shapes = text.rsplit(":", 3)
    sizes = list(map(_sizes_in, shapes))
    if len(shapes) != 3 or not name or not all(sizes):
        raise UserError(
            "--optimization-profile",
            "not a profile",
            got=repr(text),
            expected="NAME:MIN:OPT:MAX with shapes such as 1x128",
        )
    low, opt, high = sizes
    if not len(low) == len(opt) == len(high) or any(
        not 1 <= a <= b <= c <= LARGEST_SIZE for a, b, c in zip(low, opt, high, strict=True)
    ):
        order = f"1 <= MIN <= OPT <= MAX <= {LARGEST_SIZE}"
        raise UserError("--optimization-profile", "the shapes are not a range", got=repr(text), expected=order)
    return name, ShapeRange(low, opt, high)
