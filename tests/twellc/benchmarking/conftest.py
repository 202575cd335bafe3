"""A machine without a GPU does what `twellc bench` does with one, but for recording, compiling and the clock."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from twellc.benchmarking import contest, forms
from twellc.benchmarking.timing import CallTime, Machine


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything on the CPU, as it is written; the n-th contestant takes 1000 - n microseconds."""
    bench: Any = importlib.import_module("twellc.benchmarking.bench")

    def record(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        return lambda: [call() for call in calls]

    def time_calls(calls: Sequence[Callable[[], object]], repeats: int, count: int = 1) -> list[CallTime]:
        assert repeats > 0
        results = [call() for call in calls]
        assert count == 1 or all(len(result) == count for result in results)  # type: ignore[arg-type]
        return [CallTime(1000.0 - index, 900.0, 1100.0) for index in range(len(calls))]

    monkeypatch.setattr(contest, "record", record)
    monkeypatch.setattr(contest, "time_calls", time_calls)
    monkeypatch.setattr(forms, "_compiled", lambda function, *_, **__: function)
    monkeypatch.setattr(forms, "takes_fp8", lambda block: True)
    monkeypatch.setattr(forms, "takes_int4", lambda block: False)  # torch's product of 4 bits is a GPU's
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(bench, "_DEVICE", "cpu")
    monkeypatch.setattr(bench, "refuse_without_gpu", lambda *_: None)
    monkeypatch.setattr(bench, "machine", lambda: Machine("a CPU", 2, "3", torch.__version__, "none", "0"))
