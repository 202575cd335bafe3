"""Run Python in other processes with the twellc that the tests imported: the installed one or the source tree's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import twellc

PACKAGE_FOLDER = str(Path(twellc.__file__).resolve().parents[1])
# -P keeps the working directory, which may be the source tree, off the module path.
TWELLC = (sys.executable, "-P", "-m", "twellc")


def environment(*folders: str | Path, **settings: str) -> dict[str, str]:
    """Return this process's environment with its module path, twellc's folder and `folders` first, and `settings`."""
    path = dict.fromkeys(map(str, (PACKAGE_FOLDER, *folders, *filter(None, sys.path))))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **settings}


def end_with_parent() -> None:
    """Let a process that waits for nothing end with the one that starts it, in whatever way: a `preexec_fn`."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
