"""Attributes that have other values for a time."""

from __future__ import annotations

from typing import Any

_MISSING = object()
# An object, an attribute of it, and its value.
Change = tuple[Any, str, Any]


class Changed:
    """Attributes that have other values within this context, which may be entered again and again.

    Behind it each is as before, or missing again.
    """

    def __init__(self, *changes: Change) -> None:
        self._changes = changes

    def __enter__(self) -> None:
        self._before = [(owner, name, getattr(owner, name, _MISSING)) for owner, name, _ in self._changes]
        for owner, name, value in self._changes:
            setattr(owner, name, value)

    def __exit__(self, *_: object) -> None:
        for owner, name, value in self._before:
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
