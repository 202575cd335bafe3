"""Data files of measured times: what is written is read again, what is bad is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twellc.base.errors import UserError
from twellc.decisions.targets import TARGETS, shipped_times
from twellc.decisions.times import DensePoint, GpuTimes, TwellPoint, read_times, zipf_rates

DENSE = DensePoint("gated", 2048, 5632, 8, 28.0, 27.5, 28.5, "packed")
TWELL = TwellPoint("gated", 2048, 5632, 8, 12.0, 11.5, 12.5, 0.0048, 0.005, "zipf", 128)
TIMES = GpuTimes({"gpu": "NVIDIA Test", "date": "2026-11-25"}, True, [DENSE], [TWELL])


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(TIMES.to_text())
    assert read_times(path) == TIMES
    assert TIMES.gpu == "NVIDIA Test"
    assert sum('"us"' in line for line in TIMES.to_text().splitlines()) == 2, "a line a point"


def changed(**changes: Any) -> str:
    return json.dumps({**json.loads(TIMES.to_text()), **changes})


def point(row: DensePoint | TwellPoint, **changes: Any) -> list[Any]:
    return [row.to_json(), {**row.to_json(), **changes}]


BAD = {
    "no JSON": ("{", "holds no measured times: it is no JSON"),
    "a list": ("[]", "holds no measured times: it names no format"),
    "no format": ("{}", "holds no measured times: it names no format"),
    "other format": (changed(format=2), "are of another format; got 2; expected 1"),
    "no GPU": (changed(machine={}), "the measured times name no GPU"),
    "complete": (changed(complete=1), "complete is neither true nor false"),
    "no points": (changed(dense=[]), "dense is no list of points"),
    "no object": (changed(dense=[3]), r"dense\[0\] is no object"),
    "missing": (changed(twell=[{"variant": "gated"}]), r"twell\[0\] has no d_model"),
    "variant": (changed(dense=point(DENSE, variant="odd")), r"dense\[1\] has 'odd' as variant, not gated or plain"),
    "neurons": (changed(twell=point(TWELL, neurons="odd")), r"twell\[1\] has 'odd' as neurons"),
    "form": (changed(dense=point(DENSE, by=1)), r"dense\[1\] has 1 as by"),
    "count": (changed(dense=point(DENSE, tokens=0)), r"dense\[1\] has 0 as tokens, not a count"),
    "fraction": (changed(dense=point(DENSE, d_ff=5632.5)), r"dense\[1\] has 5632.5 as d_ff, not a count"),
    "time": (changed(dense=point(DENSE, us=-1)), r"dense\[1\] has -1 as us, not a time"),
    "NaN": (changed(dense=point(DENSE, us=float("nan"))), r"dense\[1\] has nan as us, not a number"),
    "text": (changed(dense=point(DENSE, us="1")), r"dense\[1\] has '1' as us, not a number"),
    "share": (changed(twell=point(TWELL, density=1.5)), r"twell\[1\] has 1.5 as density, not a share"),
    "too hot": (changed(twell=point(TWELL, hot=5632)), r"twell\[1\] has 5632 as hot, not fewer than d_ff"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_times(path)
    assert str(error.value).startswith(f"--target-gpu {path}: ")
    assert "Measure the GPU again: twellc bench --calibrate -o FILE" in str(error.value)


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
