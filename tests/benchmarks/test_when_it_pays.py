"""The tables of docs/when-it-pays.md are those that committed data gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_tables_are_up_to_date(benchmark_module: Callable[[str], Any]) -> None:
    pays = benchmark_module("when_it_pays")
    text = pays.PAGE.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in text for name in pays.TABLES)
    assert text == pays.filled(text), "run python benchmarks/when_it_pays.py"
