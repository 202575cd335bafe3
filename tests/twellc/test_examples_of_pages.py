"""The examples of pages run, each by itself; and what the README prints is what the program prints."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import twellc
from tests.conftest import ROOT, Cli
from tests.models import Plain

README = (ROOT / "README.md").read_text()
PAGES = ("api", "features", "generate", "profile", "report", "training", "add-a-model-family")
EXAMPLES = {
    f"{page.stem}-{number}": example
    for page in (*(ROOT / "docs" / f"{name}.md" for name in PAGES), ROOT / "examples" / "bytelm" / "README.md")
    for number, example in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))
}
# They compile bytelm or build a plan; the README's Python builds one by default.
SLOW = ("api-1", "api-2")


def run(example: str, name: str, **space: Any) -> dict[str, Any]:
    exec(compile(example, name, "exec"), space := {"__name__": "example", **space})
    return space


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 9


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in EXAMPLES]
)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    run(EXAMPLES[name], name)
    if name.startswith("add-a-model-family"):  # the model that it makes is seen as the page says
        layers = twellc.inspect("persimmon").layers
        assert [(layer.variant, layer.activation, layer.residual) for layer in layers] == [("plain", "relu2", True)] * 2


@pytest.mark.slow
def test_the_table_of_the_readme_is_what_the_command_prints(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    """The plan itself is built where CI runs the command."""
    printed = cli("compile", bytelm, "--backend", "none", "--onnx", tmp_path / "bytelm.onnx").stdout
    rows = re.findall(r"^    (│.*│)$", README, re.MULTILINE)
    assert len(rows) == 4 and [row for row in rows if row not in printed] == []


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    (block,) = re.findall(r"^    (import twellc\n(?:    .*\n|\n)+)", README, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(Plain()).bfloat16().eval()
    space = run(re.sub("^    ", "", block, flags=re.MULTILINE), "README", model=model, x=torch.randn(4, 16).bfloat16())
    assert len(space["manifest"].plan.plugin_layers) == 1 and len(twellc.optimized_blocks(model)) == 1
