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


def options_of(command: str) -> list[click.Option]:
    return [each for each in main.commands[command].params if isinstance(each, click.Option)]


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_option_is_documented(command: str) -> None:
    assert f"twellc {command}" in README
    for parameter in options_of(command):
        name = max(parameter.opts, key=len)
        assert re.search(rf"{name}(?![\w-])", README), f"{command} {name}"
        assert parameter.help, f"{command} {name}"


def test_the_table_of_options_is_that_of_compile() -> None:
    rows = re.findall(r"^\| `(?:-\w, )?(--[\w-]+)([^`]*)` \|", README, re.MULTILINE)
    options = {max(option.opts, key=len): option for option in options_of("compile")}
    assert sorted(name for name, _ in rows) == sorted(options)
    for name, values in rows:
        kind = options[name].type
        if isinstance(kind, click.Choice):
            assert values == " " + r"\|".join(kind.choices)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").iterdir())]
)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).exists(), target
