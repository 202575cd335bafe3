"""What is drawn to measure, and the measuring itself where there is a GPU."""

import itertools
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from twellc.benchmarking import forms, measure_gpu
from twellc.benchmarking.measure_gpu import Activity, Grid, draw_rows, draw_weights, place_columns, twell
from twellc.cli import main
from twellc.decisions.times import read_times, zipf_rates

ACTIVITIES = (*(Activity(density) for density in (0.005, 0.1, 1.0)), *(Activity(0.02, "zipf", hot) for hot in (0, 100)))


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_as_many_are_active_as_asked(activity: Activity) -> None:
    torch.manual_seed(0)
    columns = place_columns(ACTIVITIES)
    weights = draw_weights(Grid("gated", 512, 1408, (), ACTIVITIES), columns, "cpu")
    x = draw_rows(1000, 512, activity.distribution, columns, "cpu")
    wanted = activity.density if activity.neurons == "equal" else zipf_rates(1408, activity.density).mean()
    assert measure_gpu.share_active(x, weights) == pytest.approx(wanted, rel=0.1)
    rates = weights.block.active(x).double().mean(dim=0)
    if activity.neurons == "equal":
        assert rates.max() < 4 * activity.density
    else:
        assert rates.max() > 0.4
        assert (rates[:100].mean() > 0.1) == bool(activity.hot)
        others = rates[activity.hot :].sort(descending=True).values
        assert others[:64].sum() > 1.5 * rates[activity.hot : activity.hot + 64].sum(), "the others are in no order"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_contestants_compute_the_same(variant: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if not compiled:
        monkeypatch.setattr(forms, "_compiled", lambda function, *_, **__: function)
    weights = draw_weights(Grid(variant, 64, 256, (), ()), {}, "cpu")
    x = draw_rows(8, 64, (0.1, "equal", 0), {}, "cpu")
    y = weights.block.dense(x)
    torch.testing.assert_close(twell(x, 0, weights), y, rtol=0.05, atol=0.05)
    torch.testing.assert_close(weights.packed(x), y)


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "--measure-gpu", "-o", str(tmp_path / "gpu.json")])
    assert result.exit_code == 2
    assert "--measure-gpu: measures on a GPU, and torch sees none here. Run it on a machine with" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Grid("gated", 256, 768, (1, 300), ACTIVITIES)
    monkeypatch.setattr(
        measure_gpu, "grids", lambda: (gated, Grid("plain", 256, 512, (8,), ()), Grid("gated", 256, 64, (8,), ()))
    )
    path = tmp_path / "gpu.json"
    result = CliRunner().invoke(main, ["bench", "--measure-gpu", "-o", str(path)])
    assert result.exit_code == 0, result.output
    times = read_times(path)
    assert times.complete
    assert times.gpu == torch.cuda.get_device_name()
    measured = [(point.variant, point.tokens) for point in times.dense]
    assert measured == [("gated", 300), ("gated", 1), ("plain", 8), ("gated", 8)]
    # Three hundred tokens of so narrow a block are not split: hot neurons are not measured there.
    assert [point.tokens for point in times.twell] == [300] * (len(ACTIVITIES) - 1) + [1] * len(ACTIVITIES)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.gpu
def test_out_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_gpu, "grids", lambda: (Grid("gated", 256, 768, (1, 2), ACTIVITIES[:1]),))
    clock = itertools.count(step=150)
    monkeypatch.setattr(measure_gpu, "monotonic", lambda: next(clock))
    path = tmp_path / "gpu.json"
    result = CliRunner().invoke(main, ["bench", "--measure-gpu", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "time or memory ran out before all of the grid was measured" in result.output
    assert not read_times(path).complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--measure-gpu"], "--measure-gpu: no data file to write. Add -o FILE."),
        (["model.pt2", "--measure-gpu", "-o", "gpu.json"], "--measure-gpu: measures no model; got model.pt2."),
        (
            ["--measure-gpu", "-o", "gpu.json", "--dtype", "bf16"],
            "--dtype: is for measuring a model; got --measure-gpu.",
        ),
        ([], "MODEL: there is nothing to measure; expected a model, or --measure-gpu."),
        (["model.pt2", "-o", "gpu.json"], "--output gpu.json: is for --measure-gpu alone. Use --json > FILE."),
    ],
)
def test_what_does_not_go_together(options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bench", *options])
    assert result.exit_code == 2
    assert message in result.output


def test_no_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = tmp_path / "gpu.json"
    path.write_text("")
    result = CliRunner().invoke(main, ["bench", "--measure-gpu", "-o", str(path)])
    assert result.exit_code == 2
    assert f"--output {path}: the file exists already. Add --overwrite to replace it." in result.output
