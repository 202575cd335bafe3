"""What other processes answer."""

from __future__ import annotations

import multiprocessing
import signal
from typing import Any

import pytest

from twellc.files import ENDING_SIGNALS
from twellc.isolation import _receive

steps: list[str] = []


class Interrupting:
    """Unpickled, it gets a signal in the middle, as where an import takes its time."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, ()


def _unpickled() -> str:
    signal.raise_signal(signal.SIGTERM)
    steps.append("complete")
    return "result"


def test_signal_while_a_result_is_unpickled() -> None:
    """Native modules that are imported then do not survive an interrupt, so it waits."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(("result", Interrupting()))
    handlers = {number: signal.signal(number, interrupt) for number in ENDING_SIGNALS}
    try:
        with pytest.raises(KeyboardInterrupt):
            _receive(receiver)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert steps == ["complete"]
