"""The examples of pages run, in their order, each by itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BYTELM = "examples/bytelm/README.md"
EXAMPLES = [
    (page, example)
    for page in (*(f"docs/{name}.md" for name in ("api", "generate", "profile", "report", "training")), BYTELM)
    for example in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    space: dict[str, Any] = {"__name__": "example"}
    page, example = EXAMPLES[number]
    exec(compile(example, f"{page}, example {number + 1}", "exec"), space)
