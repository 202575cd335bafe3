"""Contestants, which are kept or named with what is wrong, and the timing of their calls on a GPU."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twellc.base.errors import UserError
from twellc.benchmarking.contest import Contest
from twellc.benchmarking.timing import machine, record, refuse_without_gpu, time_calls, times_of

TRUTH = torch.randn(8, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def rounded(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: TRUTH.to(dtype).to(torch.bfloat16)


def fail() -> Any:
    raise RuntimeError("no room\nat all")


@pytest.mark.usefixtures("no_gpu_needed")
def test_who_is_kept() -> None:
    found = Contest(TRUTH, lambda result: result, language_model=False)
    found.add("yardstick", rounded(torch.bfloat16))
    found.add("as good", rounded(torch.float64))
    found.add("wrong", lambda: TRUTH.bfloat16() * 0.5)
    found.add("wrong, and may be", lambda: TRUTH.bfloat16() * 0.9, lossy=True)
    found.add("fails", fail)
    assert list(found.time(3)) == ["yardstick", "as good", "wrong, and may be"]
    assert "as good" in found and "wrong" not in found
    assert found.errors["wrong, and may be"] == pytest.approx(0.1, abs=0.01)
    assert found.failed["fails"] == "RuntimeError: no room"
    assert "its result is off" in found.failed["wrong"]


@pytest.mark.usefixtures("no_gpu_needed")
def test_what_a_call_reads_lives_as_long_as_its_recording() -> None:
    """A CUDA graph holds nothing: what only the call refers to would be memory of somebody else."""
    read = rounded(torch.bfloat16)
    alive = weakref.ref(read)
    found = Contest(TRUTH, lambda result: result, language_model=False)
    found.add("yardstick", read)
    found._replays.clear()  # the stand-in for a graph, which refers to the call
    del read
    gc.collect()
    assert alive() is not None


@pytest.mark.usefixtures("no_gpu_needed")
def test_without_a_yardstick() -> None:
    found = Contest(TRUTH, lambda result: result, language_model=False)
    found.add("yardstick", fail)
    found.add("other", rounded(torch.bfloat16))
    assert not found.time(1) and "the first contestant failed" in found.failed["other"]


@pytest.mark.usefixtures("no_gpu_needed")
@pytest.mark.parametrize("lossy", [False, True])
def test_what_is_not_finite(lossy: bool) -> None:
    """NaN for NaN is no agreement, nor one that a lossy contestant may have."""
    found = Contest(TRUTH, lambda result: result, language_model=False)
    found.add("yardstick", lambda: (TRUTH * torch.nan).bfloat16(), lossy=lossy)
    found.add("as NaN", lambda: (TRUTH * torch.nan).bfloat16(), lossy=lossy)
    one = TRUTH.bfloat16()
    one[3, 5] = torch.inf
    found.add("one", lambda: one, lossy=lossy)
    found.add("right", rounded(torch.float64), lossy=lossy)
    assert list(found.time(1)) == ["right"]
    assert "NaN or infinite in 128 of 128 elements" in found.failed["yardstick"]
    assert "NaN or infinite in 1 of 128 elements" in found.failed["one"]
    nothing = Contest(TRUTH * torch.nan, lambda result: result, language_model=False)
    nothing.add("any", lambda: (TRUTH * torch.nan).bfloat16(), lossy=lossy)
    assert "cannot be compared" in nothing.failed["any"]


@pytest.mark.usefixtures("no_gpu_needed")
def test_without_a_truth() -> None:
    found = Contest(None, lambda result: result, language_model=False)
    found.add("any", lambda: torch.zeros(3))
    assert "any" in found and not found.errors


def test_median_and_range() -> None:
    assert times_of([7.0]).to_json() == {"median_us": 7.0, "p10_us": 7.0, "p90_us": 7.0}
    found = times_of([float(i) for i in range(1, 100)])
    assert (found.p10_us, found.median_us, found.p90_us) == (10.0, 50.0, 90.0)


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees none here"):
        refuse_without_gpu("twellc bench", "It would time two blocks.")


@pytest.mark.gpu
def test_calls_take_turns() -> None:
    x, y = torch.zeros(1 << 24, device="cuda"), torch.zeros(1, device="cuda")
    counted: list[str] = []

    def large() -> None:
        counted.append("large")
        x.add_(1)

    replay = record([large, lambda: y.add_(1)])
    before = len(counted)
    large_times, both = time_calls([large, replay], repeats=4)
    assert len(counted) - before == 2 * 5
    assert 0 < large_times.p10_us <= large_times.median_us <= large_times.p90_us
    assert both.median_us > 0
    # Three calls warm up a recording, which replays two in each of five turns; recording itself computes nothing.
    assert int(y) == 3 + 2 * 5
    (per_call,) = time_calls([replay], repeats=3, count=1000)
    assert per_call.median_us < both.median_us
    assert machine().multiprocessors > 0
