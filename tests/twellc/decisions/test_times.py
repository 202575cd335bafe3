"""Data files of measured times: what is written is read again, what is bad is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from twellc.base.errors import UserError
from twellc.decisions import times
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
    assert sum(line.startswith('  ["gated"') for line in TIMES.to_text().splitlines()) == 2, "a line a size"


def test_points_as_objects_are_read(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"format": 1, **TIMES.to_json()}))
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
