"""What other processes answer."""

import math
import multiprocessing
import operator
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.processes import captured, environment
from twellc.base.errors import UserError
from twellc.base.files import ENDING_SIGNALS
from twellc.base.isolation import _receive, run_isolated

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
    for number in ENDING_SIGNALS:
        signal.signal(number, interrupt)
    with pytest.raises(KeyboardInterrupt):
        _receive(receiver)
    assert steps == ["complete"]


class Ending:
    """Unpickled in another process, it ends that."""

    def __init__(self, end: Callable[[int], object], number: int) -> None:
        self.end, self.number = end, number

    def __reduce__(self) -> tuple[Any, ...]:
        return self.end, (self.number,)


@pytest.mark.parametrize(
    ("end", "number", "message"),
    [
        (os._exit, 3, "the process that did this ended unexpectedly; got status 3."),
        (signal.raise_signal, 9, "ended unexpectedly; got signal 9. Signal 9 means that memory ran out."),
    ],
)
def test_process_that_ends_without_an_answer(end: Callable[[int], object], number: int, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        run_isolated(operator.contains, Ending(end, number), progress=lambda step: None)
    assert str(refusal.value).endswith(message)


def test_fault_in_another_process() -> None:
    """It comes with the traceback of that process."""
    with pytest.raises(RuntimeError, match=r"Traceback[\s\S]*TypeError: "):
        run_isolated(math.sqrt, progress=lambda step: None)


def test_result_of_another_process() -> None:
    assert run_isolated(operator.contains, ["a result"], progress=lambda step: None) is False


def test_a_process_that_asked_and_was_killed() -> None:
    """What it has started says nothing on its terminal."""
    script = (
        "import os, signal, time\n"
        "from twellc.base.isolation import run_isolated\n"
        "from tests.twellc.base.test_isolation import slowly\n"
        "def ready(step):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "run_isolated(slowly, progress=ready)\n"
    )
    done = captured([sys.executable, "-c", script], env=environment(ROOT))
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""


def slowly(progress: Callable[[str], None]) -> None:
    progress("one")
    time.sleep(2)
    progress("two")
