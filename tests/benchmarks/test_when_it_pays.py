"""The tables of docs/when-it-pays.md are those that committed data gives."""

from typing import Any

import click.testing
import pytest


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
def test_table_is_up_to_date(when_it_pays: Any, name: str) -> None:
    table = f"<!-- {name} -->\n{when_it_pays.TABLES[name]()}\n<!-- end -->"
    assert table in when_it_pays.PAGE.read_text(encoding="utf-8"), "run python benchmarks/when_it_pays.py"


def test_the_page_is_filled(when_it_pays: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in when_it_pays.TABLES:
        monkeypatch.setitem(when_it_pays.TABLES, name, lambda name=name: f"table of {name}")
    done = click.testing.CliRunner().invoke(when_it_pays.main, ["--smoke"], catch_exceptions=False)
    assert done.stdout == "\n\n".join(f"table of {name}" for name in when_it_pays.TABLES) + "\n"
    page = when_it_pays.filled(when_it_pays.PAGE.read_text(encoding="utf-8"))
    assert all(f"<!-- {name} -->\ntable of {name}\n<!-- end -->" in page for name in when_it_pays.TABLES)
