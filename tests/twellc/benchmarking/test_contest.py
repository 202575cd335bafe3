"""Contestants: who is kept, and who is named with what is wrong."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from twellc.benchmarking import contest
from twellc.benchmarking.contest import Contest
from twellc.benchmarking.timing import CallTime

TRUTH = torch.randn(8, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run calls as they are, and give each a time."""

    def record(calls: list[Callable[[], object]]) -> Callable[[], object]:
        return lambda: [call() for call in calls]

    monkeypatch.setattr(contest, "record", record)
    monkeypatch.setattr(contest, "time_calls", lambda calls, repeats: [CallTime(i, i, i) for i in range(len(calls))])


def rounded(dtype: torch.dtype) -> Callable[[], Any]:
    return lambda: TRUTH.to(dtype).to(torch.bfloat16)


def fail() -> Any:
    raise RuntimeError("no room\nat all")


@pytest.mark.usefixtures("on_cpu")
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


@pytest.mark.usefixtures("on_cpu")
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


@pytest.mark.usefixtures("on_cpu")
def test_without_a_yardstick() -> None:
    found = Contest(TRUTH, lambda result: result, language_model=False)
    found.add("yardstick", fail)
    found.add("other", rounded(torch.bfloat16))
    assert not found.time(1) and "the first contestant failed" in found.failed["other"]


@pytest.mark.usefixtures("on_cpu")
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


@pytest.mark.usefixtures("on_cpu")
def test_without_a_truth() -> None:
    found = Contest(None, lambda result: result, language_model=False)
    found.add("any", lambda: torch.zeros(3))
    assert "any" in found and not found.errors
