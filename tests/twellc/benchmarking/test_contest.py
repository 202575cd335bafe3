"""Contestants: who is kept, and who is named with what is wrong."""

from __future__ import annotations

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
def test_without_a_yardstick() -> None:
    found = Contest(TRUTH, lambda result: result, language_model=False)
    found.add("yardstick", fail)
    found.add("other", rounded(torch.bfloat16))
    assert not found.time(1) and "the first contestant failed" in found.failed["other"]


@pytest.mark.usefixtures("on_cpu")
def test_without_a_truth() -> None:
    found = Contest(None, lambda result: result, language_model=False)
    found.add("any", lambda: torch.zeros(3))
    assert "any" in found and not found.errors
