"""Options that commands share, and the kinds of their values. Importing this imports nothing large."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import Field
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from twellc.base.errors import UserError
from twellc.base.files import output_path
from twellc.options.option import OUTPUT, Number, declared, descriptions, option_of

_Function = TypeVar("_Function", bound=Callable[..., Any])


class FilePath(click.Path):
    """A path that every library can open."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path of a text, or fail."""
        if not value:
            self.fail("the path is empty.", parameter, context)
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail(f"{value!a} is not UTF-8, which some libraries insist on. Rename it.", parameter, context)
        return super().convert(value, parameter, context)


class OutputPath(FilePath):
    """A path of a file to write."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the path of a text, or fail."""
        path = super().convert(value, parameter, context)
        output_path(max(parameter.opts, key=len) if parameter else "", value)
        return path


class _Choice(click.Choice[str]):
    """One of several values, which need not be texts."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = {str(value): value for value in values}
        super().__init__(tuple(self._values))

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the value for a text, or fail."""
        return self._values[super().convert(str(value), parameter, context)]


def options_of(kind: type[Any], names: Collection[str] = ()) -> Callable[[_Function], _Function]:
    """Return a decorator that gives a command the options of an options class, all or those with some names."""

    def decorate(function: _Function) -> _Function:
        help = descriptions(kind)
        for field in reversed(declared(kind)):
            if not names or field.name in names:
                function = _click_option(field, help[field.name])(function)
        return function

    return decorate


def _click_option(field: Field[Any], help: str) -> Callable[[_Function], _Function]:
    how, default = option_of(field), field.default
    assert how is not None
    name = field.name.replace("_", "-")
    names = how.names or (f"--{name}/--no-{name}" if default is True else f"--{name}",)
    several = default == () or "Sequence" in str(field.type)
    return click.option(
        *names,
        field.name,
        default=None if several else default,
        show_default=default not in (None, False, ()),
        type=_type(how.kind),
        metavar=how.metavar,
        multiple=several and not how.separator,
        is_flag=isinstance(default, bool),
        help=help,
    )


def _number(range: Number) -> Callable[[Any], Any]:
    """Return a function that turns a text into a number of a range, with the same check as in Python."""

    def convert(text: Any) -> Any:
        try:
            number = type(range.least)(text)
        except ValueError:
            number = text
        if fault := range.fault(number):
            raise click.BadParameter(f"{text} {fault}; expected {range}.")
        return number

    return convert


def _type(kind: Any) -> Callable[[Any], Any] | click.ParamType[Any] | None:
    if isinstance(kind, tuple):
        return _Choice(kind)
    if isinstance(kind, Number):
        return _number(kind)
    return FilePath() if kind is Path else OutputPath() if kind == OUTPUT else None


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


def refuse_other_options(context: click.Context, option: str, taken: Collection[str], why: str) -> None:
    """Fail if options are given that have no meaning beside another one.

    Args:
        context: The context of the command.
        option: The other option.
        taken: Names of the parameters that have a meaning beside it, its own included.
        why: The reason why others have none.

    Raises:
        UserError: There are such options.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in taken and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise UserError(max(parameter.opts, key=len), why, got=option, fix="Leave one out.")
