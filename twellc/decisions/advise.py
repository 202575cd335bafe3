"""Advice about the blocks of a model, by how often their neurons fire, or by what has to be assumed of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from twellc.base.errors import first_few
from twellc.decisions.choose import (
    DEFAULT_ROW_SPREAD,
    Tokens,
    active_text,
    choose,
    choose_compression,
    pays_text,
    percent,
)
from twellc.decisions.predict import Widths
from twellc.decisions.targets import Target
from twellc.decisions.times import Rates
from twellc.options.commands import DEFAULT_COMPRESSION, DEFAULT_DENSITY
from twellc.passes.block_profile import Calibration, Counts
from twellc.passes.decide import Advise
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.neurons import without
from twellc.passes.report import Choice, Layer

# Calls in fp16 are not split: sums over the hot neurons alone may be out of its range.
_SPLIT_DTYPE = torch.bfloat16
# Of a choice, what another compilation needs to choose the same.
_REPEATED = ("decision", "facts", "hot", "compression")


@dataclass(frozen=True, eq=False)
class Firing:
    """How the neurons of a block fire.

    Attributes:
        rates: How often each neuron does, as a share of the tokens: [d_ff].
        row_spread: See `choose`.
        removed: How many neurons it had besides these.
    """

    rates: Rates
    row_spread: float = DEFAULT_ROW_SPREAD
    removed: int = 0


class Advisor:
    """Says what is best for each block of a model; see `decide`.

    Attributes:
        decided: What was decided for blocks of which something is known, by module; see `repeat`.

    Args:
        target: The GPU.
        firing: How neurons fire, by the path of the module that holds a block's weights.
        tokens: Returns the rows of a block's calls, by optimization profile.
        density: What is assumed of other blocks: the share of gate activations that are not zero.
        compression: The TwELL compression factor of all blocks; None chooses one for each.
    """

    def __init__(
        self,
        target: Target,
        firing: Mapping[str, Firing],
        tokens: Callable[[FfnBlock], list[Tokens]],
        density: float = DEFAULT_DENSITY,
        compression: int | None = None,
    ) -> None:
        self._target, self._firing, self._tokens, self._density = target, firing, tokens, density
        self._compression = compression
        self.decided: dict[str, dict[str, Any]] = {}
        self._assumed: dict[tuple[Widths, tuple[Tokens, ...]], Choice] = {}

    def __call__(self, block: FfnBlock) -> Choice:
        """Return what is best for a block."""
        widths = _widths(block)
        tokens = tuple(self._tokens(block))
        known = self._firing.get(block.module)
        if known is not None:
            kept = replace(widths, d_ff=len(known.rates))
            choice = choose(
                self._target.model, kept, known.rates, tokens, known.row_spread,
                splits=block.dtype == _SPLIT_DTYPE, removed=known.removed,
            )  # fmt: skip
            if not self._target.model.is_near(kept):  # a guess leaves nothing dense
                active = active_text(float(known.rates.mean()), kept.d_ff, known.removed)
                slots = choose_compression(known.rates, known.row_spread)
                choice = replace(choice, decision="twell", facts=active, hot=0, compression=slots)
            choice = replace(choice, compression=self._compression or choice.compression)
            self.decided[block.module] = {name: getattr(choice, name) for name in _REPEATED}
            return choice
        if (widths, tokens) not in self._assumed:
            rates = np.full(block.d_ff, self._density)
            choice = choose(self._target.model, widths, rates, tokens, assumed=True)
            self._assumed[widths, tokens] = replace(choice, hot=0, compression=DEFAULT_COMPRESSION)
        return self._assumed[widths, tokens]

    def notes(self, layers: list[Layer]) -> list[str]:
        """Return what the user should know: the GPU that was decided for, and what was assumed of which blocks."""
        expected = [(layer, layer.expectation) for layer in layers if layer.expectation is not None]
        if not expected:
            return []
        notes = [self._target.note] if self._target.note else []
        far = {(layer.d_model, layer.d_ff) for layer, _ in expected if not self._target.model.is_near(_widths(layer))}
        if far:
            sizes = first_few([f"{d_model} / {d_ff}" for d_model, d_ff in sorted(far)])
            notes.append(f"no blocks of d_model / d_ff like {sizes} were measured: what is expected of them is a guess")
        assumed = [expectation for layer, expectation in expected if expectation.assumed and layer.decision == "twell"]
        if assumed:
            least, most = (pick(assumed, key=lambda each: each.gain) for pick in (min, max))
            gains = f"{least.gain:.2f}" + (f" to {most.gain:.2f}" if most.gain - least.gain >= 0.01 else "")
            notes.append(
                f"--layers auto rewrites every match, since no profile says how often neurons fire. With "
                f"{percent(self._density)} of the activations not zero, in all neurons alike, blocks are expected to "
                f"be {gains} times as fast as dense ones on an {least.gpu}; TwELL {pays_text(least.pays_below)}"
            )
        return notes


def _widths(block: FfnBlock | Layer) -> Widths:
    return Widths(block.variant, block.d_model, block.d_ff, block.d_out)


def repeat(decided: Mapping[str, Mapping[str, Any]]) -> Advise:
    """Return what advises as an `Advisor` did, from its `decided`; other blocks are taken.

    Raises:
        TypeError, AttributeError, KeyError: It has not that form.
    """
    choices = {
        module: Choice(**{name: each[name] for name in _REPEATED}, expectation=None) for module, each in decided.items()
    }
    unknown = Choice("twell", "matches", 0, DEFAULT_COMPRESSION, None)
    return lambda block: choices.get(block.module, unknown)


def firing_of(calibration: Calibration | None) -> dict[str, Firing]:
    """Return how neurons fire as a calibration has it, without those that it removes."""
    found = {}
    for module, block in calibration.blocks.items() if calibration is not None else ():
        rates = block.rates
        if calibration is not None and calibration.prune_dead:
            rates = rates[without(block.never)]
        found[module] = Firing(rates, row_spread(block.rows), len(block.rates) - len(rates))
    return found


def row_spread(rows: Counts) -> float:
    """Return the standard deviation of the logarithm of a log-normal variable that varies as rows do.

    Args:
        rows: How many tokens had 0, 1, 2, … non-zeros: [d_ff + 1].
    """
    counts = np.arange(len(rows))
    total = rows.sum()
    mean = float(rows @ counts / total) if total else 0.0
    if mean == 0:
        return DEFAULT_ROW_SPREAD
    variance = float(rows @ (counts - mean) ** 2 / total)
    # Of what a Poisson variable of a fixed mean would vary.
    return math.sqrt(math.log1p(max(variance - mean, 0.0) / mean**2))
