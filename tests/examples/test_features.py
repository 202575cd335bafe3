"""examples/features: from texts to a page of features, and an autoencoder that twellc takes."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

import twellc
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("features", ROOT / "examples" / "features" / "features.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["features"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: Any, *arguments: object) -> click.testing.Result:
    with torch.random.fork_rng():
        return click.testing.CliRunner().invoke(script.main, list(map(str, arguments)))


def test_the_whole_way(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "OFTEN", 1.0)  # few features fire often
    sizes = ("--bytes", 6000, "--features", 64, "--steps", 300, "--batch", 64, "--l1", 0.3, "--contexts", 3)
    result = run(script, *sizes, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    unexplained = [float(each) for each in re.findall(r"([\d.]+)% unexplained", result.stderr)]
    assert unexplained[-1] < unexplained[0] / 2
    page = (tmp_path / "page.html").read_text()
    assert 0 < page.count("<h2>") < page.count("<mark>") <= 3 * page.count("<h2>")
    (layer,) = twellc.inspect(tmp_path).layers
    assert (layer.module, layer.d_ff, layer.decision) == ("block", 64, "twell")


def test_contexts_are_where_a_feature_is_largest(script: Any) -> None:
    values = torch.zeros(2 * script.WINDOW, 8)
    values[:, 0] = 1.0  # fires too often
    values[torch.tensor([5, 300, 400]), 3] = torch.tensor([2.0, 9.0, 4.0])
    token, number = values.nonzero(as_tuple=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (values != 0).sum(1).cumsum(0)])
    found = twellc.features.Features(number.int(), values[token, number], offsets, 8, values.shape[:1])
    (shown,) = script.strongest(found, 5, 2)
    assert (shown.number, shown.places, shown.values) == (3, [300, 400, 5], [9.0, 4.0, 2.0])
    ids = torch.full((2, 1 + script.WINDOW), ord("a"))
    ids[1, 1 + 300 - script.WINDOW] = ord("<")
    assert script.context_of(ids, 300) == "a" * 40 + "<mark>&lt;</mark>" + "a" * 16


def test_refused(script: Any, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    for arguments, message in (
        (("--layer", 4), "--layer 4: the model has no such layer; expected 0 to 3"),
        (("--text", tmp_path / "short.txt"), "there are too few bytes; got 5; expected 512 at least"),
    ):
        result = run(script, *arguments, "--output", tmp_path / "out")
        assert result.exit_code == 2 and message in result.stderr
