"""Predicted times: near measured ones, and sound between them."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twellc.base.errors import UserError
from twellc.decisions import times
from twellc.decisions.predict import CostModel, Widths, is_split, point_rates
from twellc.decisions.targets import TARGETS, choose_target, shipped_times
from twellc.decisions.times import DensePoint, GpuTimes, TwellPoint, read_times, zipf_rates
from twellc.plugins import library

GATED = Widths("gated", 2048, 5632, 2048)
H200 = choose_target("h200", None).model


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_error_of_the_model(target: str) -> None:
    """Nine of ten times are within 10 %, each predicted from all others; docs/when-it-pays.md states these."""
    error = choose_target(target, None).model.error()
    assert error.points[0] >= 0.9
    assert error.points[1] >= 0.95
    assert error.widths is None or error.widths[1] >= 0.95


@pytest.mark.parametrize("target", TARGETS)
def test_at_a_measured_point(target: str) -> None:
    times = shipped_times(target)
    model = CostModel(times)
    for dense in times.dense[::10]:
        widths = Widths(dense.variant, dense.d_model, dense.d_ff, dense.d_model)
        assert model.dense_us(widths, dense.tokens) == pytest.approx(dense.us, rel=0.1)
    errors = []
    for point in times.twell[::10]:
        widths = Widths(point.variant, point.d_model, point.d_ff, point.d_model)
        errors.append(model.twell_us(widths, point.tokens, point_rates(point), point.hot) / point.us - 1)
    assert np.quantile(np.abs(errors), 0.9) < 0.06


@pytest.mark.parametrize(("tokens", "ratio"), [(1, 0.90), (2048, 0.79), (100_000, 0.83)])
def test_weights_in_fp8(tokens: int, ratio: float) -> None:
    rates, narrow = np.full(5632, 0.005), H200.fp8
    assert narrow.twell_us(GATED, tokens, rates) == pytest.approx(ratio * H200.twell_us(GATED, tokens, rates))
    assert narrow.dense_us(GATED, tokens) == H200.dense_us(GATED, tokens)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 1000, 2048, 8192, 32768])
def test_more_active_neurons_take_longer(target: str, tokens: int) -> None:
    model = choose_target(target, None).model
    times = [model.twell_us(GATED, tokens, np.full(5632, density)) for density in (0.001, 0.004, 0.016, 0.064)]
    if tokens == 1000:  # a dense block, whatever its density
        assert max(times) < 1.1 * min(times)
    else:
        assert all(after > 0.97 * before for before, after in pairwise(times))
        assert times[-1] > 1.1 * times[0]


@pytest.mark.parametrize("target", TARGETS)
def test_more_tokens_take_longer(target: str) -> None:
    model = choose_target(target, None).model
    for time in (model.dense_us, lambda w, n: model.twell_us(w, n, np.full(w.d_ff, 0.005))):
        times = [time(GATED, tokens) for tokens in (1, 8, 64, 512, 4096, 32768, 262144)]
        assert all(after > before for before, after in pairwise(times))


def test_wider_blocks_take_longer() -> None:
    for tokens in (1, 64, 1000, 8192):
        times = [
            (H200.dense_us(w, tokens), H200.twell_us(w, tokens, np.full(w.d_ff, 0.005)))
            for w in (Widths("gated", width, 4 * width, width) for width in (512, 1024, 2048, 4096, 8192))
        ]
        assert all(b[0] > a[0] and b[1] > a[1] for a, b in pairwise(times))


def test_neurons_that_differ() -> None:
    """As many non-zeros of few neurons take less than of many, where fewer rows of the weights are read."""
    rates = zipf_rates(5632, 0.02)
    equal = np.full(5632, rates.mean())
    assert H200.twell_us(GATED, 32, rates) < H200.twell_us(GATED, 32, equal)
    assert H200.twell_us(GATED, 8192, rates[::-1]) == pytest.approx(H200.twell_us(GATED, 8192, rates))


def test_hot_neurons_of_few_tokens_are_not_split() -> None:
    """That they come first takes a little longer, as measured: the same CTAs have them all."""
    rates = zipf_rates(5632, 0.02)
    for tokens in (1, 32, 128):
        assert 1 <= H200.twell_us(GATED, tokens, rates, 512) / H200.twell_us(GATED, tokens, rates) < 1.3
    assert H200.twell_us(GATED, 8192, rates, 512) < H200.twell_us(GATED, 8192, rates)


@pytest.mark.parametrize(
    ("variant", "width", "d_ff"),
    [
        *(("gated", 2048, 5632), ("gated", 4096, 11008), ("gated", 1024, 8192), ("gated", 2048, 512)),
        *(("plain", 1536, 8192), ("plain", 2048, 8192)),
    ],
)
def test_calls_are_split_where_the_kernels_split_them(variant: str, width: int, d_ff: int) -> None:
    widths = Widths(variant, width, d_ff, width)
    for tokens in (1, 16, 128, 512, 640, 641, 660, 661, 960, 961, 2048, 8192, 20_000):
        sizes = {"tokens": tokens, "d_model": width, "d_ff": d_ff, "d_out": width}
        problem = library.Problem(**sizes, compression=8, variant=library.VARIANTS[variant], hot=256)
        text = library.describe(problem, library.GPUS["H100"])
        assert is_split(widths, tokens) == ("hidden" in text and "gate_sm90" in text), text


def test_measured_splits_are_taken_as_they_are() -> None:
    """With points of hot neurons among the times, these decide what hot neurons take."""
    times = shipped_times("h200")
    zipf = [point for point in times.twell if point.neurons == "zipf" and not point.hot]
    slow = [replace(point, hot=512, us=1.5 * point.us) for point in zipf]
    model = CostModel(replace(times, twell=[*(point for point in times.twell if not point.hot), *slow]))
    edges = (1280, 1281, 1920, 1921)  # neighbours between which calls that are not split take another route
    for point in (point for point in slow if point.tokens not in edges):
        widths = Widths(point.variant, point.d_model, point.d_ff, point.d_model)
        assert model.twell_us(widths, point.tokens, point_rates(point), 512) == pytest.approx(point.us, rel=0.15)


@pytest.mark.parametrize("rates", [np.zeros(5632), np.ones(5632)])
def test_extremes(rates: np.ndarray) -> None:
    for tokens in (1, 100, 1000, 100_000):
        assert 0 < H200.twell_us(GATED, tokens, rates) < 1.3 * H200.dense_us(GATED, tokens)


DENSE = DensePoint("gated", 2048, 5632, 8, 28.0, 27.5, 28.5, "packed")
TWELL = TwellPoint("gated", 2048, 5632, 8, 12.0, 11.5, 12.5, 0.0048, 0.005, "zipf", 128)
TIMES = GpuTimes({"gpu": "NVIDIA Test", "date": "2026-11-25"}, True, [DENSE], [TWELL])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(TIMES.to_text())
    assert read_times(path) == TIMES
    assert TIMES.gpu == "NVIDIA Test"
    assert sum(line.startswith('  ["gated"') for line in TIMES.to_text().splitlines()) == 2, "a line a size"
    path.write_text(json.dumps({"format": 1, **TIMES.to_json()}))  # points as objects
    assert read_times(path) == TIMES


@pytest.mark.parametrize("target", TARGETS)
def test_shipped_files_are_as_the_program_writes_them(target: str) -> None:
    file = Path(times.__file__).with_name("data") / f"{target}.json"
    assert file.read_text() == shipped_times(target).to_text()


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(TIMES.to_text()), **changes})


def point(row: DensePoint | TwellPoint, **changes: Any) -> list[Any]:
    return [row.to_json(), {**row.to_json(), **changes}]


BAD = {
    "no JSON": ("{", "holds no measured times: it cannot be read as JSON"),
    "a list": ("[]", "holds no measured times: it names no format"),
    "no format": ("{}", "holds no measured times: it names no format"),
    "other format": (changed(format=3), "are of another format; got 3; expected 1 or 2"),
    "no GPU": (changed(machine={}), "the measured times are damaged: machine has no gpu"),
    "complete": (changed(complete=1), "complete is not true or false"),
    "no points": (changed(dense=[]), "dense is empty"),
    "no rows": (changed(dense={"fields": ["us"]}), "dense has no rows"),
    "short row": (changed(dense={"fields": ["us"], "rows": [[1], []]}), r"dense.rows\[1\] has 0 values for 1 field"),
    "no object": (changed(dense=[3]), r"dense\[0\] is not an object"),
    "missing": (changed(twell=[{"variant": "gated"}]), r"twell\[0\] has no d_model"),
    "variant": (changed(dense=point(DENSE, variant="odd")), r"dense\[1\].variant is not gated or plain: 'odd'"),
    "neurons": (changed(twell=point(TWELL, neurons="odd")), r"twell\[1\].neurons is not equal or zipf: 'odd'"),
    "form": (changed(dense=point(DENSE, by=1)), r"dense\[1\].by is not a string"),
    "count": (changed(dense=point(DENSE, tokens=0)), r"dense\[1\].tokens is not at least 1: 0"),
    "fraction": (changed(dense=point(DENSE, d_ff=5632.5)), r"dense\[1\].d_ff is not an integer"),
    "time": (changed(dense=point(DENSE, us=-1)), r"dense\[1\].us is not more than 0: -1.0"),
    "NaN": (changed(dense=point(DENSE, us=float("nan"))), r"NaN is not a number of JSON"),
    "infinite": (changed(dense=point(DENSE, us=0)).replace('"us": 0', '"us": 1e999'), r"dense\[1\].us is not at most"),
    "null": (changed(dense=point(DENSE, us=None)), r"dense\[1\] has a null that is not a time or a share"),
    "text": (changed(dense=point(DENSE, us="1")), r"dense\[1\].us is not a number"),
    "share": (changed(twell=point(TWELL, density=1.5)), r"twell\[1\].density is not at most 1: 1.5"),
    "too hot": (changed(twell=point(TWELL, hot=5632)), r"twell\[1\].hot is not less than d_ff"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_times(path)
    assert str(error.value).startswith(f"--target-gpu {path}: ")
    assert "Measure the GPU again: twellc bench --measure-gpu -o FILE" in str(error.value)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_times(tmp_path)


def test_zipf() -> None:
    rates = zipf_rates(5632, 0.005)
    assert rates.max() == 0.5
    assert rates[99] / rates[999] == pytest.approx(10)
    assert rates.mean() == pytest.approx(0.0042, rel=0.01)


@pytest.mark.parametrize("target", TARGETS)
def test_shipped_times_name_their_origin(target: str) -> None:
    machine = shipped_times(target).machine
    assert {"gpu", "multiprocessors", "torch", "form", "commit", "date"} <= machine.keys()
    assert all(machine.values())
