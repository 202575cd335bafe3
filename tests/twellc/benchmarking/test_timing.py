"""Timing on the GPU: what is counted and what a machine without one is told."""

import pytest
import torch

from twellc.base.errors import UserError
from twellc.benchmarking.timing import machine, record, refuse_without_gpu, time_calls, times_of


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
