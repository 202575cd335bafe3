"""What docs hold of the program is current, and what the program prints is as they say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import onnx
import pytest

from tests import generated_docs
from tests.conftest import Cli
from tests.onnx_graphs import gated
from tests.twellc.reporting import pages
from twellc.base.records import of_json
from twellc.benchmarking.result import BenchResult
from twellc.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = generated_docs.PAGE.read_text(encoding="utf-8")
FIX = "run python -m tests.generated_docs"


def test_the_page_of_the_command_line_is_current() -> None:
    assert generated_docs.page() == PAGE, FIX


@pytest.mark.parametrize("name", generated_docs.SCHEMAS)
def test_schemas_are_current(name: str) -> None:
    assert json.loads(generated_docs.schema_file(name).read_text()) == generated_docs.schema(name), FIX


@pytest.mark.parametrize("command", ["twellc", *sorted(main.commands)])
def test_every_option_is_documented(command: str) -> None:
    section = PAGE.partition(f"<!-- options of {command} -->")[2].partition("<!-- end -->")[0]
    options = main.params if command == "twellc" else main.commands[command].params
    for option in options:
        if isinstance(option, click.Option) and not option.hidden:
            assert option.help, f"{command} {option.name}"
            assert f"`{max(option.opts, key=len)}`" in section, f"{command} {option.name}"
            assert re.sub(r"\s+", " ", option.help).rstrip(".").replace("|", r"\|") in section


def refuse(name: str, content: Any) -> None:
    """Demand that a report is as its schema says, and has nothing else."""
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(generated_docs.schema(name, strict=True)).validate(content)


def test_reports_are_as_the_schemas_say(cli: Cli, archive: Path, tmp_path: Path) -> None:
    plan, graph = tmp_path / "m.plan", tmp_path / "m.onnx"
    printed = cli("compile", archive, "-o", plan, "--onnx", graph, "--json")
    assert printed.exit_code == 0, printed.output
    manifest = json.loads(printed.stdout)
    assert manifest == json.loads((tmp_path / "m.plan.json").read_text())
    refuse("manifest", manifest)
    for target in (archive, plan, graph):
        refuse("inspect", json.loads(cli("inspect", target, "--json").stdout))
    refuse("check", json.loads(cli("check", archive, graph, "--json").stdout))


def test_other_reports_are_as_the_schemas_say(cli: Cli, llama: Path, tmp_path: Path) -> None:
    onnx.save(gated(), tmp_path / "g.onnx")
    for model in (llama, tmp_path / "g.onnx"):
        written = cli("compile", model, "--backend", "none", "--onnx", tmp_path / f"{model.stem}.out.onnx", "--json")
        assert written.exit_code == 0, written.output
        refuse("manifest", json.loads(written.stdout))
        refuse("inspect", json.loads(cli("inspect", model, "--json").stdout))
    refuse("bench", of_json(BenchResult, pages.bench_result()).to_json())


def test_a_schema_refuses_what_is_not_a_report() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    result = of_json(BenchResult, pages.bench_result()).to_json()
    reports: tuple[dict[str, Any], ...] = (
        {}, {**result, "layers": [{}]}, {**result, "results": 3}, {**result, "dtype": None},
    )  # fmt: skip
    for damaged in reports:
        with pytest.raises(jsonschema.ValidationError):
            refuse("bench", damaged)


def test_every_folder_is_described_once() -> None:
    files = subprocess.run(
        ["git", "ls-files", "twellc", "passes", "export", "plugins", "tests"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    if not files:
        pytest.skip("not in a repository")
    deepest = {"twellc": 3, "passes": 2, "plugins": 2, "tests": 2, "export": 1}
    folders = {"/".join(parts[:depth]) for parts in (file.split("/")[:-1] for file in files) if parts
               for depth in range(1, min(len(parts), deepest[parts[0]]) + 1)}  # fmt: skip
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
    named = [
        folder
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for folder in re.findall(r"`([^`]*)/`", row)
    ]
    assert sorted(set(named) - {"benchmarks", "docs", "examples"}) == sorted(folders)
    assert len(named) == len(set(named))
