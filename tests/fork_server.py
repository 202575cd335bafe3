"""Run the command line many times, each time in a process of its own that has everything imported already.

`ForkServer` starts this file as a process, which imports twellc and what it uses, and forks for each run: that takes
milliseconds where a new process takes seconds. A run has limits of memory and time, and may die, as a fuzz test needs.
What `twellc` does in child processes, it does in the forked one.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 60
MEMORY = 2 << 30


@dataclass(frozen=True)
class Run:
    """How a run ended: `status` is negative after a signal; it was killed if it was `late`."""

    status: int
    late: bool
    stdout: str
    stderr: str


class ForkServer:
    """The server's process; use as a context manager."""

    def __init__(self, environment: dict[str, str], warm_up: list[list[str]]) -> None:
        # One thread: those of a pool would be missing after a fork.
        single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **single},
            start_new_session=True,
        )
        self._ask({"warm_up": warm_up})

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=SECONDS)

    def run(self, *arguments: object, folder: Path) -> Run:
        """Run `twellc ARGUMENTS` in a folder."""
        return Run(**self._ask({"arguments": list(map(str, arguments)), "folder": str(folder)}))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer


def serve() -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            question = json.loads(line)
            answer = warm_up(question["warm_up"]) if "warm_up" in question else answer_to(**question)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def warm_up(commands: list[list[str]]) -> dict[str, Any]:
    """Import what commands import, by running them here."""
    import torch

    import twellc.cli
    import twellc.compiling.compiler

    def run_here(function: Callable[..., Any], *arguments: Any, progress: Callable[[str], None]) -> Any:
        return function(*arguments, progress)

    torch.set_num_threads(1)
    twellc.compiling.compiler.run_isolated = run_here  # type: ignore[assignment, attr-defined]
    for command in commands:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
            twellc.cli.main(command)
    return {}


def answer_to(arguments: list[str], folder: str) -> dict[str, Any]:
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = os.fork()
        if child == 0:
            run_forked(arguments, folder, stdout.fileno(), stderr.fileno())
        deadline = time.monotonic() + SECONDS
        late = False
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline and not late:
                late = True
                os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return {"status": os.waitstatus_to_exitcode(status), "late": late, "stdout": texts[0], "stderr": texts[1]}


def run_forked(arguments: list[str], folder: str, stdout: int, stderr: int) -> None:
    """Run the command line and end this process as Python would."""
    status = 1
    try:
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.chdir(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        import twellc.cli

        try:
            twellc.cli.main(arguments)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
