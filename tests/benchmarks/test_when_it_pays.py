"""The tables of docs/when-it-pays.md are those that committed data gives."""

from collections.abc import Callable
from typing import Any

import click.testing
import pytest


@pytest.fixture(scope="module")
def pays(benchmark_module: Callable[[str], Any]) -> Any:
    return benchmark_module("when_it_pays")


@pytest.mark.parametrize(
    "name",
    [
        "measured gains",
        "break-evens",
        "trained layers",
        "measured layers",
        pytest.param("errors", marks=pytest.mark.slow),
    ],
)
def test_table_is_up_to_date(pays: Any, name: str) -> None:
    table = f"<!-- {name} -->\n{pays.TABLES[name]()}\n<!-- end -->"
    assert table in pays.PAGE.read_text(encoding="utf-8"), "run python benchmarks/when_it_pays.py"


def test_the_page_is_filled(pays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pays.TABLES:
        monkeypatch.setitem(pays.TABLES, name, lambda name=name: f"table of {name}")
    done = click.testing.CliRunner().invoke(pays.main, ["--smoke"], catch_exceptions=False)
    assert done.stdout == "\n\n".join(f"table of {name}" for name in pays.TABLES) + "\n"
    page = pays.filled(pays.PAGE.read_text(encoding="utf-8"))
    assert all(f"<!-- {name} -->\ntable of {name}\n<!-- end -->" in page for name in pays.TABLES)
