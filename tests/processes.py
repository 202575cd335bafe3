"""Run Python in other processes with the twellc that the tests imported: the installed one or the source tree's."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import twellc

PACKAGE_FOLDER = str(Path(twellc.__file__).resolve().parents[1])
# -P keeps the working directory, which may be the source tree, off the module path.
TWELLC = (sys.executable, "-P", "-m", "twellc")


def environment(*folders: str | Path, **settings: str) -> dict[str, str]:
    """Return this process's environment with its module path, twellc's folder and `folders` first, and `settings`."""
    path = dict.fromkeys(map(str, (PACKAGE_FOLDER, *folders, *filter(None, sys.path))))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **settings}


def captured(
    command: Sequence[object], env: dict[str, str] | None = None, cwd: Path | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, in `environment()` unless another one is given, and keep what it prints."""
    words = list(map(str, command))
    return subprocess.run(
        words, env=env or environment(), cwd=cwd, check=check, capture_output=True, text=True, timeout=500
    )


def at_once(call: Callable[[int], object], count: int) -> None:
    """Call a function with each number below `count`, in a thread each, and wait for all."""
    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def end_with_parent() -> None:
    """Let a process that waits for nothing end with the one that starts it, in whatever way: a `preexec_fn`."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def listed_by_git(*patterns: str) -> list[str]:
    """Return the files that git has under some paths, from the root; skips the test outside of a checkout."""
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "ls-files", "-z", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not in a git checkout")
    return [each for each in listed.stdout.split("\0") if each]
