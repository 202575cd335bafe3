"""What docs hold of the program is current, and what the program prints is as they say."""

import json
import re
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests import generated_docs
from tests.conftest import Cli
from tests.onnx_graphs import gated
from tests.twellc.reporting import pages
from twellc.base.records import of_json
from twellc.benchmarking.result import BenchResult
from twellc.cli import main

PAGE = generated_docs.PAGE.read_text(encoding="utf-8")
FIX = "run python -m tests.generated_docs"


def test_the_page_of_the_command_line_is_current() -> None:
    assert generated_docs.page() == PAGE, FIX


def test_the_keywords_are_current() -> None:
    assert generated_docs.keywords() == generated_docs.STUB.read_text(encoding="utf-8"), FIX


@pytest.mark.parametrize("name", generated_docs.SCHEMAS)
def test_schemas_are_current(name: str) -> None:
    assert json.loads(generated_docs.schema_file(name).read_text()) == generated_docs.written_schema(name), FIX


@pytest.mark.parametrize("command", ["twellc", *sorted(main.commands)])
def test_every_option_is_documented(command: str) -> None:
    section, shared = (
        PAGE.partition(f"<!-- options of {name} -->")[2].partition("<!-- end -->")[0] for name in (command, "shared")
    )
    for name, option in generated_docs.options_of(command).items():
        assert option.help and f"`{name}`" in section, f"{command} {name}"
        assert re.sub(r"\s+", " ", option.help).rstrip(".").replace("|", r"\|") in section + shared


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


@pytest.mark.parametrize("kind", ["onnx", pytest.param("llama", marks=pytest.mark.slow)])
def test_reports_of_other_models(cli: Cli, llama: Path, tmp_path: Path, kind: str) -> None:
    model = llama if kind == "llama" else tmp_path / "g.onnx"
    onnx.save(gated(), tmp_path / "g.onnx")
    written = cli("compile", model, "--backend", "none", "--onnx", tmp_path / "out.onnx", "--json")
    assert written.exit_code == 0, written.output
    refuse("manifest", json.loads(written.stdout))
    refuse("inspect", json.loads(cli("inspect", model, "--json").stdout))


def test_a_bench_report_is_as_its_schema_says() -> None:
    result = of_json(BenchResult, pages.bench_result()).to_json()
    refuse("bench", result)
    jsonschema, referencing = pytest.importorskip("jsonschema"), pytest.importorskip("referencing")

    def read(uri: str) -> Any:
        return referencing.Resource.from_contents(json.loads(generated_docs.schema_file(uri[:-5]).read_text()))

    registry = referencing.Registry(retrieve=read)
    written = jsonschema.Draft202012Validator({"$ref": "bench.json"}, registry=registry)
    written.validate(result)
    with pytest.raises(jsonschema.ValidationError):  # of a record that the manifest's schema has
        written.validate(result | {"layers": [{}]})


def test_a_schema_refuses_what_is_not_a_report() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    result = of_json(BenchResult, pages.bench_result()).to_json()
    damages: tuple[dict[str, Any], ...] = ({"layers": [{}]}, {"results": 3}, {"dtype": None})
    for damaged in ({}, *({**result, **damage} for damage in damages)):
        with pytest.raises(jsonschema.ValidationError):
            refuse("bench", damaged)
