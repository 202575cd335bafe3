"""Register plugin libraries of other people in TensorRT. Importing this imports neither torch nor a TensorRT."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from twellc.base.errors import UserError
from twellc.base.files import digest
from twellc.base.records import Record
from twellc.plugins.elf import expected_size

OPTION = "--plugin-library"
# Functions that TensorRT looks for in a plugin library: for creators, of IPluginV3 or IPluginV2, and for its logger.
_ENTRY_POINTS = (("getCreators", "getPluginCreators"), ("setLoggerFinder",))


@dataclass(frozen=True)
class PluginLibrary(Record):
    """A plugin library of other people: the plugins that it brings, and name and SHA-256 of its file."""

    names: list[str]
    file: str
    sha256: str


def check_libraries(paths: tuple[Path, ...]) -> None:
    """Fail if a file is not a whole shared library, without opening it as one.

    Raises:
        UserError: A file is missing, of another kind, truncated, or given twice.
    """
    for index, path in enumerate(paths):
        where = f"{OPTION} {path}"
        if not path.is_file():
            raise UserError(where, "there is no such file", expected="a shared library with TensorRT plugins")
        expected, size = expected_size(path), path.stat().st_size
        if expected is None:
            raise UserError(where, "is not a shared library", expected="a 64-bit ELF file with TensorRT plugins")
        if expected > size:
            raise UserError(where, "is cut off", got=f"{size} bytes", expected=f"{expected} bytes")
        if any(path.samefile(other) for other in paths[:index]):
            raise UserError(where, "is given twice", fix="Leave one out.")


def register_libraries(module: ModuleType, version: str, paths: list[Path]) -> list[PluginLibrary]:
    """Register plugin libraries in a TensorRT, which runs their code.

    Args:
        module: The Python module of the TensorRT.
        version: Its version.
        paths: The libraries.

    Raises:
        UserError: One is not a plugin library, cannot be loaded, or brings no plugin that this TensorRT takes.
    """
    return [_register(module, version, path.resolve()) for path in paths]


@functools.cache  # TensorRT takes a library only once
def _register(module: ModuleType, version: str, path: Path) -> PluginLibrary:
    where = f"{OPTION} {path}"
    registry: Any = getattr(module, "get_plugin_registry")()  # noqa: B009  a module of any TensorRT
    before = _creators(registry)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(where, f"cannot be loaded ({error})", fix="Install what it needs.") from error
    if _creators(registry) == before:  # else the library has registered them itself as it was opened
        for names in _ENTRY_POINTS:
            if not any(hasattr(library, name) for name in names):
                raise UserError(where, f"is not a library of TensorRT plugins: it has no function {names[0]}")
        registry.load_library(str(path))
    brought = sorted(name for name, *_ in _creators(registry) - before)
    if not brought:
        what = f"brings no plugin that {module.__name__} {version} takes"
        raise UserError(where, what, expected="a library for this TensorRT, with plugins that are not registered yet")
    return PluginLibrary(brought, path.name, digest(path))


def _creators(registry: Any) -> set[tuple[str, str, str]]:
    """Return name, version and namespace of every plugin in a registry."""
    return {(each.name, each.plugin_version, each.plugin_namespace) for each in registry.all_creators_recursive}
