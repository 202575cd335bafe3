"""Options that say which inputs a model is run on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Which inputs a model is run on; at most one of these is given.

    Attributes:
        seed: Seed of random inputs; None takes 0.
        arrays: An `.npz` file with the inputs, instead of random ones.
        text: A text to make the inputs from, instead of random ones.
    """

    seed: int | None = None
    arrays: Path | None = None
    text: Path | None = None
