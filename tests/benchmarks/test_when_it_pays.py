"""The tables of docs/when-it-pays.md are those that committed data gives, and so is the data file of the H200."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.conftest import ROOT
from twellc.decisions.targets import shipped_times


def test_tables_are_up_to_date(benchmark_module: Callable[[str], Any]) -> None:
    pays = benchmark_module("when_it_pays")
    text = pays.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in text for name in pays.TABLES)
    assert text == pays.filled(text), "run python benchmarks/when_it_pays.py"


def test_shipped_times_of_the_h200_are_the_committed_results(benchmark_module: Callable[[str], Any]) -> None:
    shipped = shipped_times("h200")
    report = json.loads((ROOT / "benchmarks" / "results" / "suite-h200-2026-11-24.json").read_text())
    convert = benchmark_module("cost_data").convert
    assert shipped == convert([report], shipped.machine["commit"], shipped.machine["date"])
