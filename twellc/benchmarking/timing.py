"""Time calls on the GPU: recorded as CUDA graphs, in turns, as medians.

The time of a single call would be the host's. So calls are recorded, one for each of several sets of weights where
these would stay in a cache. All contestants take turns, in a new order in each repetition, as the clock falls under
load.
"""

from __future__ import annotations

import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from twellc.base.errors import UserError
from twellc.base.records import Record, Size, Time
from twellc.plugins import library

Call = Callable[[], object]

# The weights in rotation have about this size, several times the L2 cache of any GPU.
_ROTATED_BYTES = 512 << 20
_WARM_UPS = 3  # the first call compiles, and cuBLAS sets itself up


@dataclass(frozen=True)
class CallTime(Record):
    """The time of one call in microseconds: the median, and the range that holds the middle 80 % of repetitions."""

    median_us: Time
    p10_us: Time
    p90_us: Time


@dataclass(frozen=True)
class Machine(Record):
    """The machine of a measurement: names and versions, and the GPU's multiprocessors."""

    gpu: str
    multiprocessors: Size
    python: str
    torch: str
    cuda: str
    twellc: str


def machine() -> Machine:
    """Describe torch's current GPU.

    Raises:
        UserError: The plugin library is missing.
    """
    properties = torch.cuda.get_device_properties()
    return Machine(
        gpu=properties.name,
        multiprocessors=properties.multi_processor_count,
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        twellc=library.load().twell_version().decode(),
    )


def commit_of(folder: Path) -> str:
    """Return the commit of the source tree around a folder; an empty text where there is none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def refuse_without_gpu(where: str, instead: str) -> None:
    """Fail on a machine whose torch sees no GPU.

    Args:
        where: The command or option.
        instead: A sentence about what it would do with a GPU.

    Raises:
        UserError: It sees none.
    """
    if not torch.cuda.is_available():
        raise UserError(where, "measures on a GPU, and torch sees none here", fix=instead)


def record(calls: Sequence[Call]) -> Call:
    """Record calls, one after the other, as a CUDA graph; return a call that replays it.

    The calls run a few times before, on the current stream. The caller must keep their results if it is to read them
    after a replay.
    """
    for _ in range(_WARM_UPS):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def time_calls(calls: Sequence[Call], repeats: int, count: int = 1) -> list[CallTime]:
    """Time calls in turns, in a new order in each repetition.

    Each of them runs twice in its turn, and the second time counts.

    Args:
        calls: The calls to time; short ones as `record` returns them.
        repeats: Repetitions that count; one more warms up.
        count: How many calls of interest each of these makes: the times are divided by it.

    Returns:
        The times, in the order of `calls`.
    """
    found: list[list[float]] = [[] for _ in calls]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for repetition in range(-1, repeats):
        for index in random.sample(range(len(calls)), len(calls)):
            calls[index]()
            start.record()
            calls[index]()
            end.record()
            end.synchronize()
            if repetition >= 0:
                found[index].append(start.elapsed_time(end) * 1e3 / count)
    return [times_of(values) for values in found]


def sets_in_rotation(bytes_each: int) -> int:
    """Return the number of sets of weights to record, so that weights come from memory as in a model."""
    return max(2, min(12, _ROTATED_BYTES // bytes_each))


def times_of(values: Sequence[float]) -> CallTime:
    """Return the median and the range of times in microseconds."""
    deciles = statistics.quantiles(values, n=10) if len(values) > 1 else [values[0]] * 9
    return CallTime(statistics.median(values), deciles[0], deciles[-1])
