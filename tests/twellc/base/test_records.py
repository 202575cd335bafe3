"""Records become JSON, and JSON records again."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from twellc.base.records import OPTIONAL, Record, of_json


@dataclass(frozen=True)
class Part(Record):
    name: str
    weights: list[float]


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
        ([], "is no object"),
        ({"count": True}, "count is no integer"),
        ({"count": 1.0}, "count is no integer"),
        ({"parts": {}}, "parts is no list"),
        ({"parts": [{"name": "a"}]}, r"parts\[0\] has no weights"),
        ({"parts": [{"name": "a", "weights": [1, "2"]}]}, r"parts\[0\].weights\[1\] is no number"),
        ({"by_name": {"x": "1"}}, "by_name.x is no number"),
        ({"best": 1}, "best is no object"),
        ({"note": 1}, "note is no string"),
    ],
)
def test_other_forms(values: Any, message: str) -> None:
    given = {**WHOLE.to_json(), **values} if isinstance(values, dict) else values
    with pytest.raises(ValueError, match=f"^{message}$"):
        of_json(Whole, given)
