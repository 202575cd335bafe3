"""Functions in processes of their own."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from twellc.files import ENDING_SIGNALS
from twellc.isolation import run_isolated

steps: list[str] = []


class Interrupting:
    """Unpickled, it gets a signal in the middle, as where an import takes its time."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ()


def _unpickled() -> str:
    signal.raise_signal(signal.SIGTERM)
    steps.append("complete")
    return "result"


def interrupting(progress: Any) -> Interrupting:
    return Interrupting()


def test_signal_while_a_result_is_unpickled() -> None:
    """Native modules that are imported then do not survive an interrupt, so it waits."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        with pytest.raises(KeyboardInterrupt):
            run_isolated(f"{__name__}:interrupting", progress=lambda step: None)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert steps == ["complete"]
