"""Run a function in another process.

Loading and exporting a model leaves memory behind that Python does not give back, and TensorRT ends its process on some
faults and does not return for an interrupt. In a process that ends, neither matters.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from twellc.base.errors import UserError
from twellc.base.files import ENDING_SIGNALS, uninterrupted
from twellc.base.threads import PROCESS_WIDE

_SECONDS_TO_END = 30
Result = TypeVar("Result")


def run_isolated(function: Callable[..., Result], *arguments: Any, progress: Callable[[str], None]) -> Result:
    """Call a function in a new process and return its result.

    Args:
        function: A function of a module, which the new process imports. Its last parameter receives a callback that
            takes the name of each step.
        arguments: Its other arguments; they and the result are pickled.
        progress: Receives the names of the steps here.

    Raises:
        UserError: The function raised one, or the process ended without an answer.
        OSError: The function raised one.
        RuntimeError: The function raised any other exception; this holds its traceback.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    call = pickle.dumps((function, arguments))  # _serve unpickles it, so that faults of imports are reported
    process = context.Process(target=_serve, args=(sender, call, not sys.warnoptions), daemon=True)
    with PROCESS_WIDE, _quiet_resource_tracker():
        # Started by the process, it would let the signals through again.
        resource_tracker.ensure_running()
        with _signals_held_back(), _main_left_out():
            process.start()
    sender.close()
    step, answer = "starting", None
    try:
        while answer is None:
            kind, content = _receive(receiver)
            if kind == "step":
                step = content
                progress(step)
            else:
                answer = kind, content
        process.join(_SECONDS_TO_END)
    except EOFError:
        process.join()
        code = process.exitcode or 0
        got = f"signal {-code}" if code < 0 else f"status {code}"
        fix = "Signal 9 means that memory ran out." if code == -9 else ""
        raise UserError(step, "the process that did this ended unexpectedly", got=got, fix=fix) from None
    finally:
        receiver.close()
        process.kill()
        process.join()
    kind, content = answer
    if kind == "error":
        raise content
    if kind == "fault":
        raise RuntimeError(f"{step}: {content}")
    result: Result = content
    return result


def _receive(receiver: Connection) -> tuple[str, Any]:
    message = receiver.recv_bytes()
    with uninterrupted():  # unpickling imports modules, and native ones do not survive an interrupt
        answer: tuple[str, Any] = pickle.loads(message)
    return answer


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Start processes that ignore Ctrl-C, which a terminal sends to all of them: this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _main_left_out() -> Iterator[None]:
    """Keep a new process from running the user's script to find functions in it: ours are in modules."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    kept: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        del main["__spec__"]
        main.update(kept)


@contextmanager
def _quiet_resource_tracker() -> Iterator[None]:
    """Keep multiprocessing's helper from warning, after an interrupt, of locks that libraries held in the process."""
    before = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def _serve(sender: Connection, call: bytes, quiet: bool) -> None:
    # Libraries write to standard output, too; there only the command's own result belongs.
    os.dup2(sys.stderr.fileno(), 1)
    if quiet:
        warnings.simplefilter("ignore")
    step = "starting"

    def progress(name: str) -> None:
        nonlocal step
        step = name
        send("step", step)

    def send(kind: str, content: object) -> None:
        try:
            sender.send((kind, content))
        except BrokenPipeError:  # the process that asked has been killed
            os._exit(1)

    try:
        function, arguments = pickle.loads(call)
        result = function(*arguments, progress)
    except (UserError, OSError) as error:
        send("error", error)
    except MemoryError:
        send("error", UserError(step, "memory ran out", fix="Use a machine with more memory."))
    except Exception:
        send("fault", traceback.format_exc())
    else:
        send("result", result)
