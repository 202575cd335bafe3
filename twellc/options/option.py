"""How an option is declared: once, as a field of an options class, described in the docstring of that class.

The options of the commands, the checks of arguments from Python, and the tables in docs/cli.md are made from it.
"""

from __future__ import annotations

import inspect
import math
import numbers
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from twellc.base.errors import UserError
from twellc.base.files import output_path
from twellc.export.shapes import LARGEST_SIZE

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Number:
    """The range of a number: an integer, or any number if `least` is a float.

    Attributes:
        least: The smallest number.
        most: The largest number; None: no limit.
        above: Whether the range begins above `least`.
    """

    least: Any
    most: Any = None
    above: bool = False

    def fault(self, value: Any) -> str:
        """Return the fault of a value; an empty text without one."""
        whole = isinstance(self.least, int)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral if whole else numbers.Real):
            return f"is not {self._kind}"
        most = self.most or (LARGEST_SEED if whole else sys.float_info.max)
        least = self.least < value or (not self.above and self.least == value)
        return "" if least and value <= most else "is out of its range"

    @property
    def _kind(self) -> str:
        return "an integer" if isinstance(self.least, int) else "a number"

    def __str__(self) -> str:
        if self.least == -math.inf:
            return self._kind
        most = "" if self.most is None else f" to {self.most:g}" if isinstance(self.most, float) else f" to {self.most}"
        return f"{self._kind} {'above' if self.above else 'from'} {self.least:g}{most or ('' if self.above else ' on')}"


COUNT = Number(1)
SIZE = Number(1, LARGEST_SIZE)
SEED = Number(0, LARGEST_SEED)
SHARE = Number(0.0, 1.0)
NOT_NEGATIVE = Number(0.0)
POSITIVE = Number(0.0, above=True)
OUTPUT = "output"


@dataclass(frozen=True)
class Option:
    """How to give the value of a field. A field with the default `()` holds several values, one with a bool is a flag.

    Attributes:
        metavar: The name of the value in the help.
        kind: The possible values in a tuple; a `Number`; `Path` for a path to read, `OUTPUT` for a file to write; or a
            function that turns a text into a value.
        names: The names on the command line; without any, that of the field.
        separator: The character between values in one text; without it the option is given several times.
    """

    metavar: str | None
    kind: Any
    names: tuple[str, ...]
    separator: str


def option(
    default: Any, metavar: str | None = None, kind: Any = str, *, names: tuple[str, ...] = (), separator: str = ""
) -> Any:
    """Return a field of an options class, see `Option`."""
    return field(default=default, metadata={"option": Option(metavar, kind, names, separator)})


def option_of(field: Field[Any]) -> Option | None:
    """Return the `Option` of a field; None for a field that is not an option."""
    return field.metadata.get("option")


def declared(kind: type[Any]) -> list[Field[Any]]:
    """Return the fields of an options class that are options: the class's own before those of the bases."""
    known = {each.name: each for each in fields(kind) if option_of(each)}
    names = dict.fromkeys(name for base in kind.__mro__ for name in inspect.get_annotations(base))
    return [known[name] for name in names if name in known]


def descriptions(kind: type[Any]) -> dict[str, str]:
    """Return the description of each field from the docstrings of an options class and its bases."""
    texts = [inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2] for base in reversed(kind.__mro__)]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", "\n".join(texts), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def taken(kind: type[Any], name: str, value: Any) -> Any:
    """Convert a given value to the one that a field holds: a path for a text, parsed texts in a tuple.

    Args:
        kind: The options class.
        name: The field.
        value: The given value.

    Raises:
        TypeError: No field has this name.
        UserError: The value is not a possible one, or a text cannot be parsed.
    """
    found = next((each for each in fields(kind) if each.name == name), None)
    if found is None:
        raise TypeError(f"there is no option {name!r}; {kind.__module__}.{kind.__name__} lists them")
    how = option_of(found)
    if how is None or (value is None and found.default in (None, ())):
        return value if how is None else found.default
    where = f"--{name.replace('_', '-')}"
    if isinstance(how.kind, Number):
        if fault := how.kind.fault(value):
            raise UserError(where, fault, got=repr(value), expected=str(how.kind))
        return type(how.kind.least)(value)
    if isinstance(how.kind, tuple) and value not in how.kind:
        raise UserError(where, "no such choice", got=repr(value), expected=" or ".join(map(str, how.kind)))
    if found.default == ():
        return tuple(how.kind(each) if isinstance(each, str) else each for each in _several(name, value, how))
    if how.kind == OUTPUT:
        return output_path(where, given_path(name, value))
    return Path(given_path(name, value)) if how.kind is Path else value


def _several(name: str, value: Any, how: Option) -> Iterable[Any]:
    if isinstance(value, str):
        return value.split(how.separator) if how.separator else [value]
    if not isinstance(value, Iterable):
        raise UserError(name, "is not a sequence", got=type(value).__name__, expected="a text, or several")
    return value


def given_path(name: str, value: object) -> str | os.PathLike[str]:
    """Return a path as it was given.

    Raises:
        UserError: It is not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise UserError(name, "is not a path", got=type(value).__name__, expected="a text or a pathlib.Path")
    return value
