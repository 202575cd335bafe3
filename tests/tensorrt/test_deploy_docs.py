"""The Python code of docs/deploy.md runs, block after block, with the plan that its command compiles."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.tensorrt.plans import twellc

pytestmark = pytest.mark.tensorrt

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()


def test_python_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = re.findall(r"^    twellc (compile examples/bytelm .*)$", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    paths = {"examples/bytelm": str(ROOT / "examples" / "bytelm"), "bytelm.plan": str(tmp_path / "bytelm.plan")}
    done = twellc(*(paths.get(word, word) for word in command.split()))
    assert done.returncode == 0, done.stdout + done.stderr
    recipe = PAGE.split("\n## Python\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", recipe, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    space: dict[str, Any] = {"__name__": "recipe"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/deploy.md, block {number}", "exec"), space)
    assert space["logits"].shape == (1, 15, 256)
