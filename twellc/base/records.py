"""Results as JSON, and back: dataclasses, nested as the JSON is, with a range for each value."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record", bound="Record")

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


class Record:
    """A dataclass that is an object in JSON; an optional field that is None is left out of it."""

    # Properties that the object has, too.
    computed: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON types; NaN and infinity become null."""
        assert is_dataclass(self)
        found = {
            field.name: as_json(value)
            for field in fields(self)
            if not ((value := getattr(self, field.name)) is None and field.metadata.get("optional"))
        }
        return found | {name: as_json(getattr(self, name)) for name in self.computed}


OPTIONAL = {"optional": True}  # metadata of a field

# The largest integer of 64 bits: no number of ours is larger, while JSON sets no limit.
LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """The range of a number, with both ends, or without the least value."""

    least: float
    most: float
    open: bool = False

    def misfit(self, value: float) -> str:
        """Return the fault of a number; an empty text where it fits."""
        if self.least <= value <= self.most and not (self.open and value == self.least):
            return ""
        ends = f"more than {self.least:g}" if self.open else f"at least {self.least:g}"
        return f"is not {ends}" if value <= self.least else f"is not at most {self.most:g}"


@dataclass(frozen=True)
class OneOf:
    """The values that a text or a number may have."""

    choices: tuple[object, ...]

    def misfit(self, value: object) -> str:
        """Return the fault of a value; an empty text where it is one of them."""
        return "" if value in self.choices else f"is not {' or '.join(map(str, self.choices))}"


Count = Annotated[int, Range(0, LARGEST)]
Size = Annotated[int, Range(1, LARGEST)]
Share = Annotated[float, Range(0, 1)]
Amount = Annotated[float, Range(0, 1e300)]
Time = Annotated[float, Range(0, 1e300, open=True)]
# Ranges of numbers without one in their annotation.
_RANGES: dict[Any, Range] = {int: Range(-LARGEST, LARGEST), float: Range(-1e300, 1e300)}


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


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of any origin.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or has values that only Python's JSON has, such as NaN.
    """

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not a number of JSON")

    try:
        content = json.loads(text, parse_constant=refuse)
        json.dumps(content, ensure_ascii=False).encode()  # JSON can spell half a character; UTF-8 cannot
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return content


def of_json(kind: type[_Record], value: Any, place: str = "") -> _Record:
    """Return the record for a JSON value. Keys without a field are left out.

    Args:
        kind: The dataclass.
        value: The value; null means NaN where a float is wanted.
        place: The place of the value, for messages.

    Raises:
        ValueError: It has another form, or a value is out of range; the message names the place.
    """
    record: _Record = _of_json(kind, value, place)
    return record


_KINDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _of_json(form: Any, value: Any, place: str) -> Any:
    if get_origin(form) in (Union, UnionType):  # of a form and None
        return None if value is None else _of_json(get_args(form)[0], value, place)
    if form is Any:
        return value
    limit = _RANGES.get(form)
    if get_origin(form) is Annotated:
        form, limit = get_args(form)
    if form is float and (value is None or type(value) is int):
        if value is None:
            return math.nan
        value = float(value) if abs(value) <= LARGEST else math.inf if value > 0 else -math.inf
    container: Any = dict if is_dataclass(form) else get_origin(form) or form
    wanted: Any = list if container is tuple else container
    if type(value) is not wanted:
        raise ValueError(f"{place} is not {_KINDS[wanted]}".strip())
    misfit = limit.misfit(value) if limit is not None else ""
    if misfit:
        raise ValueError(f"{place} {misfit}: {_shown(value)}".strip())
    if is_dataclass(form):
        return _record_of_json(form, value, place)
    if container in (list, tuple):
        return container(_of_json(get_args(form)[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if container is dict:
        return {key: _of_json(get_args(form)[1], item, f"{place}.{key}".strip(".")) for key, item in value.items()}
    return value


@functools.cache
def forms_of(kind: Any) -> dict[str, Any]:
    """Return the forms of a dataclass's fields, by name."""
    return get_type_hints(kind, include_extras=True)


def _shown(value: object) -> str:
    """Return a value as a message shows it, however long it is."""
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < 10**20
        else f"about {'-' if value < 0 else ''}1e{len(str(abs(value))) - 1}"
    )
    return text if len(text) <= 40 else text[:37] + "..."


def _record_of_json(kind: Any, values: dict[str, Any], place: str) -> Any:
    forms, found = forms_of(kind), {}
    for each in fields(kind):
        if each.name in values:
            found[each.name] = _of_json(forms[each.name], values[each.name], f"{place}.{each.name}".strip("."))
        elif each.default is MISSING:
            raise ValueError(f"{place} has no {each.name}".strip())
    return kind(**found)
