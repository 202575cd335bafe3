"""The one exception that reaches a user as a message instead of a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UserError(Exception):
    """A mistake in what the user gave: one message, exit status 2.

    Args:
        where: The file, option, layer or tensor that the message is about.
        what: What is wrong with it.
        got: The offending value, if there is one to show.
        expected: What would have been accepted.
        fix: What to do about it.
    """

    def __init__(self, where: str, what: str, *, got: str = "", expected: str = "", fix: str = "") -> None:
        message = f"{where}: {what}"
        if got:
            message += f"; got {got}"
        if expected:
            message += f"; expected {expected}"
        message += "."
        if fix:
            message += f" {fix}"
        super().__init__(message)

    def about(self, path: str, name: str) -> UserError:
        """Return the same mistake, of something that the user knows by another name than that of its file."""
        return _restore(str(self).replace(path, name))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the finished message: errors cross processes."""
        return _restore, (str(self),)


class UnregisteredOperatorsError(UserError):
    """A model calls operators of another package, which no module has registered in this process.

    Args:
        where: The model.
        operators: The operators, as `namespace.name`.
    """

    def __init__(self, where: str, operators: Sequence[str]) -> None:
        self.where, self.operators = where, list(operators)
        names = first_few([f"torch.ops.{name}" for name in operators])
        verb = "is not registered: its package" if len(operators) == 1 else "are not registered: their package"
        super().__init__(
            where, f"{names} {verb} must be imported", fix="Add --import MODULE, with the name of the package's module."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of."""
        return type(self), (self.where, self.operators)


_LONGEST_LINE = 1000
_FEW = 3


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error for a message of ours, or the error's name where it says nothing.

    A line that ends in a colon announces the next one. Very long lines, such as torch's of all parameters, are cut off.
    """
    lines = [line for line in map(str.strip, str(error).splitlines()) if line]
    shown = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]) or type(error).__name__
    return shown if len(shown) <= _LONGEST_LINE else shown[:_LONGEST_LINE] + "…"


def first_few(things: Sequence[object], separator: str = ", ") -> str:
    """Join the first three of some things for a message of ours; an ellipsis stands for the others."""
    return separator.join([*map(str, things[:_FEW]), *(["…"] if things[_FEW:] else [])])


def _restore(message: str) -> UserError:
    error = UserError.__new__(UserError)
    Exception.__init__(error, message)
    return error
