"""What the benchmarks share, with made-up contestants: which take part, what is right, what is printed and written."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from tests.twellc.benchmarking.conftest import no_gpu_needed
from twellc.options.option import option

__all__ = ["no_gpu_needed"]


@pytest.fixture
def run(harness: Any, no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., click.testing.Result]:
    """Return a function that runs a benchmark of contestants that are off by so much."""
    monkeypatch.setattr(harness, "DEVICE", "cpu")

    @dataclass(frozen=True, kw_only=True)
    class Options(harness.Options):  # type: ignore[misc, name-defined]
        """Two lists."""

        tokens: tuple[int, ...] = option("1,16", "N,…", harness.NUMBERS)
        heads: tuple[tuple[int, int], ...] = option("1x2", "SHAPE,…", harness.shapes("1x2"))

    def start(errors: dict[str, float], *arguments: str) -> click.testing.Result:
        @harness.benchmark(Options, tokens="3")
        def main(run: Any, options: Options) -> None:
            """Compare."""
            run.begin(
                {"tokens": harness.field("tokens"), **harness.times_of(*errors), "gain": harness.over(["a"], "b")}
            )
            for tokens in options.tokens:
                exact = torch.ones(4, tokens, dtype=torch.float64)
                calls = {name: [lambda exact=exact, error=error: exact * (1 + error)] for name, error in errors.items()}
                chosen = run.chosen(calls, "a")
                found = harness.check("here", chosen, exact[:2], slice(2), yardstick="a", slack=0.0)
                run.add({"tokens": tokens, "heads": options.heads, "errors": found, "times": run.time(chosen)})

        return click.testing.CliRunner().invoke(main, arguments)

    return start


def test_rows_as_they_are_measured(run: Any, tmp_path: Path) -> None:
    done = run({"a": 0.1, "b": 0.15}, "--json", str(tmp_path / "r.json"))
    assert done.output.splitlines()[2:] == [
        "| tokens | a | b | gain |",
        "| --- | ---: | ---: | ---: |",
        "| 1 | 1000.0 | 999.0 | 1.00 |",
        "| 16 | 1000.0 | 999.0 | 1.00 |",
    ]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["arguments"]["tokens"] == "1,16" and report["results"][1]["heads"] == [[1, 2]]
    assert report["results"][0]["errors"] == {"a": pytest.approx(0.1), "b": pytest.approx(0.15)}


def test_only_some(run: Any) -> None:
    assert run({"a": 0.1, "b": 0.15, "c": 0.1}, "--smoke", "--only", "c").output.splitlines()[-1] == (
        "| 3 | 1000.0 | - | 999.0 | - |"
    )


def test_what_is_wrong_ends_the_run(run: Any) -> None:
    done = run({"a": 0.1, "b": 0.21})
    assert done.exit_code == 1 and "Error: here: b is off by 2.10e-01, a by 1.00e-01\n" in done.output
    for only, message in (("z", "there is no 'z' among a, b"), ("(", "'(' is not a regular expression")):
        done = run({"a": 0.1, "b": 0.1}, "--only", only)
        assert done.exit_code == 2 and f"Invalid value for --only: {message}" in done.output
    for wrong in (("--tokens", "1,a"), ("--heads", "1x2x3"), ("--heads", "0x1")):
        done = run({"a": 0.1}, *wrong)
        assert done.exit_code == 2 and f"Invalid value for {wrong[0]}: '{wrong[1]}' is not a list" in done.output
