"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is words and all others are numbers."""
    return "\n".join([head(header), *map(row, rows)])


def head(header: Sequence[str]) -> str:
    """Return the first two lines of such a table, whose rows come later."""
    return f"{row(header)}\n{row(['---', *['---:'] * (len(header) - 1)])}"


def row(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"
