"""The one exception that reaches a user as a message instead of a traceback."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self


class UserError(Exception):
    """A mistake in the user's input: one message, exit status 2.

    Args:
        where: The file, option, layer or tensor that the message is about.
        what: The fault.
        got: The offending value, if there is one to show.
        expected: The values that are accepted.
        fix: A remedy.
    """

    def __init__(self, where: str, what: str, *, got: str = "", expected: str = "", fix: str = "") -> None:
        super().__init__(where)
        self.where, self.what, self.got, self.expected, self.fix = where, what, got, expected, fix

    def __str__(self) -> str:
        got = f"; got {self.got}" if self.got else ""
        expected = f"; expected {self.expected}" if self.expected else ""
        fix = f" {self.fix}" if self.fix else ""
        return f"{self.where}: {self.what}{got}{expected}.{fix}"

    def at(self, where: str) -> Self:
        """Return the same mistake in another place."""
        other = copy.copy(self)
        other.where = where
        return other

    def renamed(self, old: str, new: str) -> Self:
        """Return the same mistake with another name for its subject, the one that the user knows."""
        other = copy.copy(self)
        for field in ("where", "what", "got", "expected", "fix"):
            setattr(other, field, getattr(self, field).replace(old, new))
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields: errors cross processes."""
        return type(self).__new__, (type(self), self.where), self.__dict__


class UnregisteredOperatorsError(UserError):
    """A model calls operators of another package, which no module has registered in this process.

    Args:
        where: The model.
        operators: The operators, as `namespace.name`.
    """

    def __init__(self, where: str, operators: Sequence[str]) -> None:
        self.operators = list(operators)
        names = first_few([f"torch.ops.{name}" for name in operators])
        verb = "is not registered: its package" if len(operators) == 1 else "are not registered: their package"
        super().__init__(
            where, f"{names} {verb} must be imported", fix="Add --import MODULE, with the name of the package's module."
        )


_LONGEST_LINE = 1000
_FEW = 3


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error, for a message of ours; the error's name where it has no text.

    A line that ends in a colon announces the next one. Very long lines, such as torch's of all parameters, are cut off.
    """
    lines = [line for line in map(str.strip, str(error).splitlines()) if line]
    shown = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
    return shown if len(shown) <= _LONGEST_LINE else shown[:_LONGEST_LINE] + "…"


def first_few(things: Sequence[object], separator: str = ", ") -> str:
    """Join the first three of some things for a message of ours, with an ellipsis for the others."""
    return separator.join([*map(str, things[:_FEW]), *(["…"] if things[_FEW:] else [])])
