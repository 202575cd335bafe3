"""The README against the program: its commands are CI's, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
