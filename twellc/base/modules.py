"""Import modules that the user names, such as those that register operators, and packages of twellc's extras."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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
        except Exception as error:  # a module's code may raise anything
            where, what = f"--import {name}", f"cannot be imported ({first_line(error)})"
            fix = "Add its folder to PYTHONPATH." if isinstance(error, ImportError) else ""
            raise UserError(where, what, expected="the name of a module, such as torchvision", fix=fix) from error


@dataclass(frozen=True)
class Extra:
    """A package that an extra of twellc installs.

    Attributes:
        user: The module of twellc that needs it.
        package: Its name in Python.
        title: Its name.
        extra: The extra.
        tested: The releases with which that module ran, by their first two numbers.
    """

    user: str
    package: str
    title: str
    extra: str
    tested: tuple[tuple[int, int], ...]

    def load(self, module: str) -> Any:
        """Import a module of it.

        Raises:
            UserError: It is not installed, or cannot be imported.
        """
        try:
            importlib.import_module(self.package)
            return importlib.import_module(f"{self.package}.{module}")
        except Exception as error:  # with an unfit release of another package it may raise anything
            what = f"{self.title} cannot be imported ({first_line(error)})"
            if isinstance(error, ModuleNotFoundError) and error.name in (self.package, None):
                what = f"the module {error.name} is not installed"
            raise UserError(self.user, what, fix=f"Install it: pip install 'twellc[{self.extra}]'.") from error

    def version(self) -> str:
        """Return the installed release, as the package names it."""
        return str(getattr(importlib.import_module(self.package), "__version__", "an unknown release"))

    def tried(self) -> str:
        """Return the tested releases in words."""
        return ", ".join(f"{major}.{minor}" for major, minor in self.tested)

    def warn_of_untried(self, log: logging.Logger) -> None:
        """Warn if the installed release is not a tested one."""
        version = self.version()
        if tuple(map(int, re.findall(r"\d+", version)[:2])) not in self.tested:
            log.warning("%s %s was not tried with twellc; tried: %s", self.title, version, self.tried())
