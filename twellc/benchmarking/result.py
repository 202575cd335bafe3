"""The results of `twellc bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twellc.base.records import Amount, Record, Share, Size, Time
from twellc.benchmarking.blocks import TWELL
from twellc.benchmarking.forms import BASELINES, FP8, FP8_TUNED, INT4
from twellc.benchmarking.timing import CallTime, Machine
from twellc.passes.report import Layer

SCHEMA = 1


@dataclass(frozen=True)
class Standings(Record):
    """Contestants that compute the same.

    Attributes:
        times: The time of each, in microseconds.
        errors: The relative error of each result, against float64.
        failed: Contestants that were left out, and why.
        joules_per_token: The energy of some, if it was measured.
    """

    computed = ("baseline", "speed_ups")

    times: dict[str, CallTime]
    errors: dict[str, Amount]
    failed: dict[str, str]
    joules_per_token: dict[str, Amount]

    @property
    def baseline(self) -> str | None:
        """The fastest dense contestant in torch, without FP8 and INT4; None where all failed."""
        return self.fastest(BASELINES)

    @property
    def speed_ups(self) -> dict[str, float]:
        """The speed-up of each over the baseline."""
        if self.baseline is None:
            return {}
        base = self.times[self.baseline].median_us
        return {label: base / times.median_us for label, times in self.times.items()}

    def fastest(self, labels: tuple[str, ...]) -> str | None:
        """Return the fastest of some contestants, None where all of them are missing."""
        return min(filter(self.times.__contains__, labels), key=lambda label: self.times[label].median_us, default=None)


@dataclass(frozen=True)
class BlockTimes(Record):
    """The times of one block by itself, in microseconds, with weights that come from memory.

    Attributes:
        module: Path of the module.
        dense: The fastest dense form in torch, without FP8 and INT4.
        dense_us: Time of this form.
        twell_us: Time of TwELL.
    """

    module: str
    dense: str
    dense_us: Time
    twell_us: Time

    @property
    def gain(self) -> float:
        """The speed-up of TwELL."""
        return self.dense_us / self.twell_us


@dataclass(frozen=True)
class ShapeResult(Record):
    """The measurements at one shape.

    Attributes:
        shape: The sizes of the dynamic dimensions, such as `1x512`.
        tokens: Rows of x in the first block.
        densities: Share of gate activations that are not zero, for each rewritten block.
        model: The whole model.
        blocks: The rewritten blocks alone, one after the other, on the inputs that they have in the model.
        by_block: Each block by itself; empty where TwELL, or all dense forms, were left out.
    """

    shape: str
    tokens: Size
    densities: list[Share]
    model: Standings
    blocks: Standings
    by_block: list[BlockTimes]


@dataclass(frozen=True)
class BenchResult(Record):
    """The results of `twellc bench`.

    Attributes:
        schema: The version of this form.
        machine: The GPU and the software.
        model: Name of the model.
        dtype: Precision of all models but those in FP8 and INT4.
        inputs: A description of the inputs.
        notes: Notes for the user.
        layers: The decision for each feed-forward block.
        results: The measurements, by shape.
    """

    schema: int
    machine: Machine
    model: str
    dtype: str
    inputs: str
    notes: list[str]
    layers: list[Layer]
    results: list[ShapeResult]


def gains_of(labels: tuple[str, ...], tokens: Sequence[int], standings: Sequence[Standings]) -> list[tuple[int, float]]:
    """Return the tokens of each call with the speed-up of the fastest of some contestants over the baseline."""
    return sorted(
        (count, each.speed_ups[best])
        for count, each in zip(tokens, standings, strict=True)
        if (best := each.fastest(labels)) is not None and each.speed_ups
    )


# Contestants of a picture, by their names in it: it shows the fastest of each tuple.
TWELL_EAGER, TWELL_COMPILED = "twell eager", "twell compiled"
SHOWN = {
    "twell": (TWELL, TWELL_EAGER, TWELL_COMPILED),
    FP8: (FP8, FP8_TUNED),
    INT4: (INT4,),
    "plan twell": ("plan twell",),
    "plan dense": ("plan dense",),
}
