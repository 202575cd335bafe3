"""benchmarks/generate.py on a CPU: the contestants compute the same, and its page; what times it is a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from twellc.benchmarking import contest
from twellc.benchmarking.timing import CallTime


@pytest.fixture
def generate(benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script on a CPU: calls run as they are, and times are counted up."""

    def record(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        return lambda: [call() for call in calls]

    def time_calls(calls: Sequence[Callable[[], object]], repeats: int) -> list[CallTime]:
        for call in calls:
            call()
        return [CallTime(1000.0 * number, 1.0, 9999.0) for number in range(1, len(calls) + 1)]

    module = benchmark_module("generate")
    monkeypatch.setattr(module.session, "DEVICE", "cpu")
    monkeypatch.setattr(module.session, "refuse_without_gpu", lambda: None)
    monkeypatch.setattr(module, "takes_fp8", lambda block: False)
    monkeypatch.setattr(contest, "record", record)
    monkeypatch.setattr(contest, "time_calls", time_calls)
    return module


def run(module: Any, *arguments: object) -> click.testing.Result:
    with torch.random.fork_rng(devices=[]):
        return click.testing.CliRunner().invoke(module.main, ["--smoke", *map(str, arguments)])


def test_contestants_compute_the_same(generate: Any, tmp_path: Path) -> None:
    done = run(generate, "--contestants", "dense eager,twell eager", "--json", tmp_path / "r.json")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "r.json").read_text())
    assert [each["setting"] for each in found["results"]] == ["prefill", "decode-2"]
    for each in found["results"]:
        assert 0 < each["errors"]["twell eager"] < 2 * each["errors"]["dense eager"] < 0.1
    stats = found["results"][1]["answers"]["twell eager"]
    assert stats["new_tokens"] == 2 * 64 and not stats["graph"]
    assert "| twell eager over the fastest dense form in bf16 | 0.50 | 0.50 |" in done.stdout
    assert (tmp_path / "r.md").read_text() in done.stdout


def test_parts(generate: Any, tmp_path: Path) -> None:
    options = ("--contestants", "dense eager", "--only", "decode-2", "--json", tmp_path / "r.json")
    assert run(generate, *options).exit_code == 0
    (result,) = json.loads((tmp_path / "r.json").read_text())["results"]
    assert result["setting"] == "decode-2"
    for wrong in (("--only", "decode-3"), ("--contestants", "dense, twell")):
        assert "there is no " in run(generate, *wrong).output
