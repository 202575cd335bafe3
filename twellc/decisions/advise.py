"""Decisions for the blocks of a model, from how often their neurons fire, or from assumptions about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from twellc.base.errors import first_few
from twellc.decisions.choose import (
    DEFAULT_ROW_SPREAD,
    Tokens,
    active_text,
    at_tokens,
    choose,
    choose_compression,
    pays_text,
    percent,
    tuned_for,
)
from twellc.decisions.predict import CostModel, Widths
from twellc.decisions.targets import Target
from twellc.options.commands import DEFAULT_DENSITY
from twellc.passes.block_profile import Counts
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.neurons import Staying
from twellc.passes.report import Choice, Expectation, Layer, Repeated, ShortRun, reads_fp8
from twellc.plugins.block import compression_of

# Calls in fp16 are not split: fp16 may not hold sums over the hot neurons alone.
_SPLIT_DTYPE = torch.bfloat16


class Advisor:
    """Chooses the fastest form of each block of a model; see `decide`.

    A profile decides. A block in no profile stays dense only where TwELL pays at no density, and only where blocks of
    such widths were measured. A short run, or a density that the user assumes, changes the expectation alone.

    Attributes:
        decided: The decisions for blocks in a profile, and for those that stay dense, by module; see `repeat`.
        run: How many neurons were active in a short run, by module.
        unmeasured: Why this is not known for all blocks; empty where it is known, or nobody has tried.

    Args:
        target: The GPU.
        tokens: Returns the rows of a block's calls, by optimization profile.
        density: The share of gate activations that are not zero, as the user assumes it for blocks in no profile; None
            if nothing is assumed.
        compression: The TwELL compression factor of all blocks; None chooses one for each.
    """

    def __init__(
        self,
        target: Target,
        tokens: Callable[[FfnBlock], list[Tokens]],
        density: float | None = None,
        compression: int | None = None,
    ) -> None:
        self._target, self._tokens, self._density = target, tokens, density
        self._compression = compression
        self.decided: dict[str, Repeated] = {}
        self.run: Mapping[str, ShortRun] = {}
        self.unmeasured = ""
        self._unknown: dict[tuple[Widths, tuple[Tokens, ...], bool], Choice] = {}

    def __call__(self, block: FfnBlock, neurons: Staying) -> Choice:
        """Return the choice for a block with the neurons that stay. Experts are taken: no times of them are known."""
        if block.routing is not None:
            return Choice("twell", "matches", 0, None, None, self.run.get(block.module))
        widths = replace(_widths(block), d_ff=len(neurons.kept))
        tokens = tuple(self._tokens(block))
        fp8 = reads_fp8(block.weights)
        model = self._target.model.fp8 if fp8 else self._target.model
        if neurons.rates is None:
            key = widths, tokens, fp8
            if key not in self._unknown:
                self._unknown[key] = self._without_profile(model, widths, tokens)
            run = self.run.get(block.module)
            density = self._density if run is None else run.density
            expected = None if density is None else self._expect(model, widths, tokens, density)
            choice = replace(self._unknown[key], expectation=expected, short_run=run)
            if choice.decision == "twell":
                return choice
        else:
            choice = self._choose(model, block, widths, tokens, neurons)
        compression = compression_of(choice.compression)
        self.decided[block.module] = Repeated(choice.decision, choice.facts, choice.hot, compression)
        return choice

    def _choose(
        self, model: CostModel, block: FfnBlock, widths: Widths, tokens: tuple[Tokens, ...], neurons: Staying
    ) -> Choice:
        """Return the choice for a block from how often its neurons fire."""
        assert neurons.rates is not None
        spread = DEFAULT_ROW_SPREAD if neurons.rows is None else row_spread(neurons.rows)
        removed = block.d_ff - widths.d_ff
        splits = neurons.movable and (model.bits == 8 or block.dtype == _SPLIT_DTYPE)
        choice = choose(model, widths, neurons.rates, tokens, spread, splits=splits, removed=removed)
        active = active_text(float(neurons.rates.mean()), widths.d_ff, removed)
        if not model.is_near(widths):  # a guess leaves nothing dense
            slots = choose_compression(neurons.rates, spread)
            choice = Choice("twell", active, 0, slots, None)
        elif self._target.at_hand:
            choice = replace(choice, facts=choice.facts if choice.decision == "dense" else active, expectation=None)
        return replace(choice, compression=compression_of(self._compression, choice.compression))

    def _without_profile(self, model: CostModel, widths: Widths, tokens: tuple[Tokens, ...]) -> Choice:
        """Return the choice for a block that is in no profile."""
        taken = Choice("twell", "matches", 0, None, None)
        if not model.is_near(widths):
            return taken
        expectation = choose(model, widths, np.full(widths.d_ff, DEFAULT_DENSITY), tokens).expectation
        if expectation is None or expectation.pays_below > 0:
            return taken
        facts = f"TwELL {pays_text(expectation.pays_below)} {at_tokens(tuned_for(tokens))}"
        return Choice("dense", facts, 0, compression_of(self._compression), None)

    def _expect(
        self, model: CostModel, widths: Widths, tokens: tuple[Tokens, ...], density: float
    ) -> Expectation | None:
        """Return the expectation for a block without hot neurons; None where nothing like it was measured."""
        if self._target.at_hand or not model.is_near(widths):
            return None
        return choose(model, widths, np.full(widths.d_ff, density), tokens, assumed=True, splits=False).expectation

    def notes(self, layers: list[Layer]) -> list[str]:
        """Return notes for the user: the GPU of the decisions, and the sources of the figures."""
        advised = [layer for layer in layers if layer.matched and not layer.experts]
        if not advised:
            return []
        notes = [self._target.note] if self._target.note else []
        widths = [(layer, replace(_widths(layer), d_ff=layer.kept)) for layer in advised]
        far = {(layer.d_model, layer.d_ff) for layer, kept in widths if not self._target.model.is_near(kept)}
        if self._target.at_hand:
            notes.append(f"how fast blocks are on an {self._target.at_hand} was not measured, so no speed is expected")
        elif far:
            sizes = first_few([f"{d_model} / {d_ff}" for d_model, d_ff in sorted(far)])
            what = f"no blocks of d_model / d_ff like {sizes} were measured on an {self._target.gpu}"
            notes.append(f"{what}, so no speed is expected of them")
        return [*notes, *self._notes_on_run(advised), *self._notes_on_gains(advised)]

    def _notes_on_run(self, advised: list[Layer]) -> list[str]:
        """Return the results of a short run, and why some blocks were not measured."""
        notes = []
        runs = [layer.short_run for layer in advised if layer.short_run is not None]
        if runs:
            active = _range([percent(pick(run.density for run in runs)) for pick in (min, max)])
            notes.append(
                f"{active} of the neurons were active in a short run on {runs[0].inputs} ({runs[0].tokens} tokens); "
                "this decides nothing, `twellc profile` counts on your data"
            )
        missing = [layer.module for layer in advised if layer.short_run is None]
        if self.unmeasured and missing:
            notes.append(f"how many neurons are active was not measured of {first_few(missing)}: {self.unmeasured}")
        return notes

    def _notes_on_gains(self, advised: list[Layer]) -> list[str]:
        """Return the expected gains of blocks that are rewritten without a profile."""
        taken = [layer for layer in advised if layer.decision == "twell"]
        assumed = [each for each in (layer.expectation for layer in taken) if each is not None and each.assumed]
        if not assumed:
            return []
        limits, gains = ([getattr(each, name) for each in assumed] for name in ("pays_below", "gain"))
        pays = f"; TwELL {pays_text(min(limits))}" if 0 < min(limits) < 1 else ""
        some = any(layer.decision == "dense" for layer in advised)
        which = "every match for which TwELL can pay" if some else "every match"
        expected = _range([f"{pick(gains):.2f}" for pick in (min, max)])
        return [
            f"--layers auto rewrites {which}, since there is no profile; blocks are expected to be {expected} times as "
            f"fast as dense ones on an {self._target.gpu}{pays}"
        ]


def _range(ends: list[str]) -> str:
    """Join the least and the most; write one where they are the same."""
    return " to ".join(dict.fromkeys(ends))


def _widths(block: FfnBlock | Layer) -> Widths:
    return Widths(block.variant, block.d_model, block.d_ff, block.d_out)


def row_spread(rows: Counts) -> float:
    """Return the standard deviation of the logarithm of a log-normal variable that varies as the rows do.

    Args:
        rows: How many tokens had 0, 1, 2, … non-zeros: [d_ff + 1].
    """
    counts = np.arange(len(rows))
    total = rows.sum()
    mean = float(rows @ counts / total) if total else 0.0
    if mean == 0:
        return DEFAULT_ROW_SPREAD
    variance = float(rows @ (counts - mean) ** 2 / total)
    # A Poisson variable of a fixed mean has that mean as its variance: only the rest counts.
    return math.sqrt(math.log1p(max(variance - mean, 0.0) / mean**2))
