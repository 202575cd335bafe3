"""Results as JSON: dataclasses that are nested as the JSON is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


class Record:
    """A dataclass that is an object in JSON; an optional field that is None is left out there."""

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON types; what is NaN or infinite becomes null."""
        assert is_dataclass(self)
        return {
            field.name: as_json(value)
            for field in fields(self)
            if not ((value := getattr(self, field.name)) is None and field.metadata.get("optional"))
        }


OPTIONAL = {"optional": True}  # metadata of a field


def as_json(value: Any) -> Json:
    """Return a value of a result as JSON types."""
    if isinstance(value, Record):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, str | int | float | bool)
    return value
