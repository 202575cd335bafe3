"""The GPU to decide for: its times come with twellc, or in a file of `twellc bench --measure-gpu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from twellc.base.errors import UserError
from twellc.decisions.predict import CostModel
from twellc.decisions.times import GpuTimes, read_times

_FOLDER = Path(__file__).with_name("data")
DEFAULT_TARGET = "h100"
TARGETS = ("h100", "h200")


@dataclass(frozen=True)
class Target:
    """A GPU to decide for.

    Attributes:
        model: Times on it.
        note: A note for the user about the choice; empty without one.
        at_hand: The GPU at hand, if its times are not known and those of another one decide; empty otherwise.
    """

    model: CostModel
    note: str
    at_hand: str = ""

    @property
    def gpu(self) -> str:
        """Its name."""
        return self.model.times.gpu


def choose_target(requested: str | None, at_hand: str | None) -> Target:
    """Return the GPU to decide for.

    Args:
        requested: Its short name, in any case, or a data file; None takes the GPU at hand where its times are known,
            else an H100.
        at_hand: The driver's name of the GPU at hand; None without one.

    Raises:
        UserError: It is neither a known name nor a data file.
    """
    if requested is not None:
        if requested.lower() in TARGETS:
            return Target(_shipped(requested.lower()), "")
        if not Path(requested).exists():
            where, what = f"--target-gpu {requested}", "neither the name of a GPU nor a file"
            fix = "Measure another GPU: twellc bench --measure-gpu -o FILE"
            raise UserError(where, what, expected=f"{' or '.join(TARGETS)}, or a data file", fix=fix)
        return Target(CostModel(read_times(Path(requested))), "")
    for name in TARGETS if at_hand is not None else ():
        if shipped_times(name).gpu == at_hand:
            return Target(_shipped(name), "")
    gpu = shipped_times(DEFAULT_TARGET).gpu
    why = "there is no GPU here" if at_hand is None else f"the times of {at_hand} are not known"
    note = f"decided for {gpu}, since {why} (--target-gpu changes it)"
    return Target(_shipped(DEFAULT_TARGET), note, at_hand or "")


@functools.cache
def shipped_times(name: str) -> GpuTimes:
    """Return the times of a GPU that come with twellc."""
    return read_times(_FOLDER / f"{name}.json")


@functools.cache
def _shipped(name: str) -> CostModel:
    return CostModel(shipped_times(name))


def gpu_at_hand() -> str | None:
    """Return the driver's name of torch's current GPU; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
