"""The README against the program: its commands are CI's, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Cli
from tests.models import Plain

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_two_commands() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    commands = re.findall(r"^    (pip install .*)$", README, re.MULTILINE)
    assert len(commands) == 2, "one installs and compiles, one installs what the tests need and runs them"
    for command in commands:
        start, _, end = command.partition(" && ")
        assert start in script
        assert end.split(" -o ")[0] in script


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target


def test_the_table_is_what_the_command_prints(cli: Cli, tmp_path: Path) -> None:
    """The plan itself is built where CI runs the command."""
    graph = tmp_path / "bytelm.onnx"
    printed = cli("compile", ROOT / "examples" / "bytelm", "--backend", "none", "--onnx", graph).stdout
    rows = re.findall(r"^    (│.*│)$", README, re.MULTILINE)
    assert len(rows) == 4
    assert [row for row in rows if row not in printed] == []


def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^    import twellc\n((?:    .*\n|\n)+)", README, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(Plain()).bfloat16().eval()
    space: dict[str, Any] = {"model": model, "x": torch.randn(4, 16).bfloat16()}
    exec(compile("import twellc\n" + re.sub("^    ", "", block, flags=re.MULTILINE), "README.md", "exec"), space)
    assert len(space["manifest"].plan.plugin_layers) == 1
    assert len(space["twellc"].optimized_blocks(model)) == 1


def test_every_page_can_be_reached() -> None:
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        links = {(page.parent / link).resolve() for page in new
                 for link in re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text())}  # fmt: skip
        new = links - found
    pages = {page for folder in ("docs", "examples", "plugins") for page in (ROOT / folder).rglob("*.md")}
    assert sorted(map(str, pages - found)) == []
