"""Import modules that the user names, such as those that register operators."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from twellc.base.errors import UserError, first_line
from twellc.base.files import uninterrupted


def import_modules(names: Iterable[str]) -> None:
    """Import modules, which executes their code.

    Raises:
        UserError: One cannot be imported.
    """
    for name in names:
        try:
            with uninterrupted():  # native modules do not survive an interrupt while they are imported
                importlib.import_module(name)
        except Exception as error:  # a module's code raises what it likes
            raise UserError(
                f"--import {name}", f"cannot be imported ({first_line(error)})",
                expected="the name of a module, such as torchvision",
                fix="Name the folder that it stands in by PYTHONPATH." if isinstance(error, ImportError) else "",
            ) from error  # fmt: skip
