"""The page of a training run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import twellc
from tests.conftest import Cli
from tests.twellc.reporting.pages import MODULES, profile
from tests.twellc.reporting.test_report import Page
from tests.twellc.test_cli import failed
from twellc.training.log import LoggedBlock, LoggedStep, LogWriter


def write_log(path: Path, modules: list[str], widths: list[int], steps: int = 3, **changes: Any) -> Path:
    writer = LogWriter(path, "tiny", "ab", [LoggedBlock(*each) for each in zip(modules, widths, strict=True)], 0)
    for step in range(1, steps + 1):
        shares = [0.9 / (step + place) for place in range(len(modules))]
        values: dict[str, Any] = {
            "step": 1000 * step, "loss": 6.0 / step, "l1": 1.0, "coefficient": 0.1, "tokens": 64, "density": shares,
            "dead": [share / 3 for share in shares], "relu": 1.0, "reinitialised": 0,
        }  # fmt: skip
        writer.add(LoggedStep(**{**values, **changes}))
    return path


def test_a_run_by_itself(cli: Cli, tmp_path: Path) -> None:
    log = write_log(tmp_path / "t.jsonl", ["a.0.mlp", "a.1.mlp"], [64, 128], eval_loss=2.5)
    result = cli("report", "--training", log, "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    page = Page((tmp_path / "page.html").read_text())
    for expected in (
        "How did it train? 2 loss at step 3000, 6 at 1000",
        "26.2 % of the activations are not zero, 67.5 % at step 1000",
        "8.75 % of the neurons did not fire in the last steps", "2 blocks, 3000 steps", "on held-out data",
        "a.0.mlp 64 30 % 10 %", "a.1.mlp 128 22.5 % 7.5 %", "How the model was trained",
    ):  # fmt: skip
        assert expected in page.text, page.text
    assert page.tags.count("svg") == 3
    assert twellc.report(training=log) == (tmp_path / "page.html").read_text()


def test_one_record_and_a_loss_that_is_not_known(tmp_path: Path) -> None:
    log = write_log(tmp_path / "t.jsonl", ["a"], [64], steps=1, loss=float("nan"), density=[0.0], dead=[1.0])
    page = Page(twellc.report(training=log))
    assert "100 % of the neurons did not fire" in page.text and page.tags.count("svg") == 3


def test_beside_a_profile(tmp_path: Path) -> None:
    own = profile()
    widths = [own.blocks[module].d_ff for module in MODULES]
    log = write_log(tmp_path / "t.jsonl", list(MODULES), widths)
    page = Page(twellc.report(profile=own, training=log))
    assert "How did it train?" in page.text and "Is it sparse?" in page.text
    other = write_log(tmp_path / "o.jsonl", list(MODULES), [width + 8 for width in widths])
    with pytest.raises(twellc.UserError, match="--training: is of another model than the rest of the report"):
        twellc.report(profile=own, training=other)


def test_refuses(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    failed(cli("report", "--training", path, "-o", tmp_path / "p.html"), "there is no such file")
    path.write_text(json.dumps({"a": 1}))
    failed(cli("report", "--training", path, "-o", tmp_path / "p.html"), "is not a log of training")
    path.unlink()  # a log replaces no other file
    write_log(path, ["a"], [64], steps=0)
    failed(cli("report", "--training", path, "-o", tmp_path / "p.html"), "has no record of a step yet")
    failed(cli("report", "--training", path, "-o", path), str(path))
    assert not (tmp_path / "p.html").exists()
