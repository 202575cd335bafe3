"""Results as JSON, and back: dataclasses that are nested as the JSON is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record", bound="Record")

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


def of_json(kind: type[_Record], value: Any, place: str = "") -> _Record:
    """Return the record that a JSON value stands for. What the record has no field for is left out.

    Args:
        kind: The dataclass.
        value: The value; null stands for NaN where a number is wanted.
        place: Where the value stands, for messages.

    Raises:
        ValueError: It has another form; the message names the place.
    """
    record: _Record = _of_json(kind, value, place)
    return record


_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "list", dict: "object"}


def _of_json(form: Any, value: Any, place: str) -> Any:
    if isinstance(form, UnionType):  # of a form and None
        return None if value is None else _of_json(get_args(form)[0], value, place)
    if form is float and (value is None or type(value) is int):
        return math.nan if value is None else float(value)
    container = dict if is_dataclass(form) else get_origin(form) or form
    if type(value) is not container:
        raise ValueError(f"{place} is no {_KINDS[container]}".strip())
    if is_dataclass(form):
        return _record_of_json(form, value, place)
    if container is list:
        return [_of_json(get_args(form)[0], item, f"{place}[{index}]") for index, item in enumerate(value)]
    if container is dict:
        return {key: _of_json(get_args(form)[1], item, f"{place}.{key}") for key, item in value.items()}
    return value


def _record_of_json(kind: Any, values: dict[str, Any], place: str) -> Any:
    forms = get_type_hints(kind)
    for each in fields(kind):
        if each.name not in values and each.default is MISSING:
            raise ValueError(f"{place} has no {each.name}".strip())
    return kind(**{
        each.name: _of_json(forms[each.name], values[each.name], f"{place}.{each.name}".strip("."))
        for each in fields(kind) if each.name in values
    })  # fmt: skip
