"""Records become JSON, and JSON records again."""

import json
import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import pytest

from twellc.base.records import LARGEST, OPTIONAL, Count, OneOf, Record, Share, Size, Time, of_json, parse_json


@dataclass(frozen=True)
class Part(Record):
    name: str
    weights: list[float]


@dataclass(frozen=True)
class Ranged(Record):
    plain: int
    real: float
    count: Count
    size: Size
    share: Share
    time: Time
    kind: Annotated[str, OneOf(("a", "b"))]
    shape: tuple[Size, ...]
    maybe: Count | None = field(default=None, metadata=OPTIONAL)


RANGED = Ranged(-5, -0.5, 0, 1, 1.0, 0.25, "b", (1, 2), 3)


@dataclass(frozen=True)
class Whole(Record):
    count: int
    parts: list[Part]
    by_name: dict[str, float]
    best: Part | None
    note: str | None = field(default=None, metadata=OPTIONAL)


WHOLE = Whole(2, [Part("a", [1.0, 2.5])], {"x": 0.5}, None)


def test_there_and_back() -> None:
    text = json.dumps({**WHOLE.to_json(), "of another version": 1})
    assert of_json(Whole, json.loads(text)) == WHOLE
    best = {"name": "b", "weights": []}
    found = of_json(Whole, {"count": 1, "parts": [], "by_name": {"x": None, "y": 1}, "best": best})
    assert math.isnan(found.by_name["x"]) and isinstance(found.by_name["y"], float)
    assert found.best == Part("b", []) and found.note is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "is not an object"),
        ({"count": True}, "count is not an integer"),
        ({"count": 1.0}, "count is not an integer"),
        ({"parts": {}}, "parts is not a list"),
        ({"parts": [{"name": "a"}]}, r"parts\[0\] has no weights"),
        ({"parts": [{"name": "a", "weights": [1, "2"]}]}, r"parts\[0\].weights\[1\] is not a number"),
        ({"by_name": {"x": "1"}}, "by_name.x is not a number"),
        ({"best": 1}, "best is not an object"),
        ({"note": 1}, "note is not a string"),
    ],
)
def test_other_forms(values: Any, message: str) -> None:
    given = {**WHOLE.to_json(), **values} if isinstance(values, dict) else values
    with pytest.raises(ValueError, match=f"^{message}$"):
        of_json(Whole, given)


def test_ranges_there_and_back() -> None:
    assert of_json(Ranged, parse_json(json.dumps(RANGED.to_json()))) == RANGED
    assert of_json(Ranged, {**RANGED.to_json(), "plain": LARGEST, "maybe": None}).plain == LARGEST


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plain", "9223372036854775808", "plain is not at most 9.22337e+18: 9223372036854775808"),
        ("plain", "-1" + "0" * 400, "plain is not at least -9.22337e+18: about -1e400"),
        ("real", "1e999", "real is not at most 1e+300: inf"),
        ("real", "-1e999", "real is not at least -1e+300: -inf"),
        ("real", "1" + "0" * 400, "real is not at most 1e+300: inf"),
        ("count", "-1", "count is not at least 0: -1"),
        ("size", "0", "size is not at least 1: 0"),
        ("share", "1.5", "share is not at most 1: 1.5"),
        ("share", "2", "share is not at most 1: 2.0"),
        ("time", "0", "time is not more than 0: 0.0"),
        ("kind", '"c"', "kind is not a or b: 'c'"),
        ("shape", "[1, 0]", r"shape[1] is not at least 1: 0"),
        ("shape", "3", "shape is not a list"),
        ("maybe", "-3", "maybe is not at least 0: -3"),
    ],
)
def test_out_of_range(name: str, text: str, message: str) -> None:
    content = json.dumps({**RANGED.to_json(), name: "VALUE"}).replace('"VALUE"', text)
    with pytest.raises(ValueError) as error:
        of_json(Ranged, parse_json(content))
    assert str(error.value) == message


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "[" * 100_000, '"\\ud800"', "1" * 5000, "{", ""])
def test_no_json(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
