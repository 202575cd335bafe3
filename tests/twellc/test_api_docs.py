"""The examples of docs/api.md run, in their order, each by itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE | re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    space: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLES[number], f"docs/api.md, example {number + 1}", "exec"), space)
