"""The README against the program: its commands are CI's, its options are all there, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from twellc.cli import main

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


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_option_is_documented(command: str) -> None:
    assert f"twellc {command}" in README
    for parameter in main.commands[command].params:
        if isinstance(parameter, click.Option):
            assert max(parameter.opts, key=len) in README, f"{command} {parameter.opts}"
            assert parameter.help, f"{command} {parameter.opts}"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").iterdir())]
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target
