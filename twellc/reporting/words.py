"""Numbers and names in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from twellc.decisions import choose

_LONGEST_NAME = 16
_NARROW_SPACE = "\u202f"


def percent(share: float) -> str:
    """Write a share as a percentage of three digits at most."""
    return choose.percent(share, 3)


def count(number: int) -> str:
    """Write a count, from five digits on in groups of three."""
    return choose.count_text(number).replace(" ", _NARROW_SPACE)


def short_count(number: int) -> str:
    """Write a count for an axis: thousands, in the binary sense where that is what they are, as k."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k"), (1_000_000, "M"), (1000, "k")):
        if number >= unit and number % unit == 0:
            return f"{number // unit}{letter}"
    return str(number)


def times(gain: float) -> str:
    """Write how many times as fast something is."""
    return f"{gain:.2f}{_NARROW_SPACE}\N{MULTIPLICATION SIGN}"


def clean(text: str) -> str:
    """Spell out what no page can hold: control characters and halves of characters. Names come from users' models."""
    return re.sub("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", lambda found: ascii(found[0])[1:-1], text)


@dataclass(frozen=True)
class Names:
    """Names of blocks: `pattern` is the path of all modules, with … where they differ, which is what `short` has."""

    pattern: str
    short: list[str]


def short_names(modules: Sequence[str]) -> Names:
    """Return what tells modules apart: their paths without the parts that all of them begin and end with."""
    paths = [clean(module).split(".") for module in modules]
    shortest = min(map(len, paths), default=0)
    begin = _common(paths, shortest - 1)
    end = _common([path[::-1] for path in paths], shortest - 1 - begin)
    differing = [path[begin : len(path) - end] for path in paths]
    pattern = (
        ".".join([*paths[0][:begin], "…", *paths[0][len(paths[0]) - end :]])
        if len(paths) > 1 and (begin or end)
        else ""
    )
    return Names(pattern, [_shortened(".".join(each)) for each in differing])


def _common(paths: list[list[str]], most: int) -> int:
    """Return how many parts all paths begin with, `most` at most."""
    length = 0
    while length < most and len({path[length] for path in paths}) == 1:
        length += 1
    return length


def _shortened(name: str) -> str:
    half = (_LONGEST_NAME - 1) // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[-half:]}"
