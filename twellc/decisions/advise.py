"""Advice about the blocks of a model, by how often their neurons fire, or by what has to be assumed of it."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from twellc.passes.report import Choice, Layer, Repeated, reads_fp8
from twellc.plugins.block import compression_of

# Calls in fp16 are not split: sums over the hot neurons alone may be out of its range.
_SPLIT_DTYPE = torch.bfloat16


class Advisor:
    """Says what is best for each block of a model; see `decide`.

    What is known of a block decides. Of others a density is assumed; that leaves a block dense only where TwELL pays at
    no density, and only where blocks of such widths were measured.

    Attributes:
        decided: What was decided for blocks of which something is known, or that are left dense, by module; see
            `repeat`.

    Args:
        target: The GPU.
        tokens: Returns the rows of a block's calls, by optimization profile.
        density: What is assumed of blocks of which nothing is known: the share of gate activations that are not zero.
        compression: The TwELL compression factor of all blocks; None chooses one for each.
    """

    def __init__(
        self,
        target: Target,
        tokens: Callable[[FfnBlock], list[Tokens]],
        density: float = DEFAULT_DENSITY,
        compression: int | None = None,
    ) -> None:
        self._target, self._tokens, self._density = target, tokens, density
        self._compression = compression
        self.decided: dict[str, Repeated] = {}
        self._assumed: dict[tuple[Widths, tuple[Tokens, ...], bool], Choice] = {}

    def __call__(self, block: FfnBlock, neurons: Staying) -> Choice:
        """Return what is best for a block of which these neurons stay."""
        widths = replace(_widths(block), d_ff=len(neurons.kept))
        tokens = tuple(self._tokens(block))
        fp8 = reads_fp8(block.weights)
        model = self._target.model.fp8 if fp8 else self._target.model
        if neurons.rates is None:
            key = widths, tokens, fp8
            if key not in self._assumed:
                self._assumed[key] = self._assume(model, widths, tokens)
            choice = self._assumed[key]
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
        """Return what is best for a block of which it is known how its neurons fire."""
        assert neurons.rates is not None
        spread = DEFAULT_ROW_SPREAD if neurons.rows is None else row_spread(neurons.rows)
        removed = block.d_ff - widths.d_ff
        splits = neurons.movable and (model.bits == 8 or block.dtype == _SPLIT_DTYPE)
        choice = choose(model, widths, neurons.rates, tokens, spread, splits=splits, removed=removed)
        if not model.is_near(widths):  # a guess leaves nothing dense
            active = active_text(float(neurons.rates.mean()), widths.d_ff, removed)
            slots = choose_compression(neurons.rates, spread)
            choice = replace(choice, decision="twell", facts=active, hot=0, compression=slots)
        return replace(choice, compression=compression_of(self._compression, choice.compression))

    def _assume(self, model: CostModel, widths: Widths, tokens: tuple[Tokens, ...]) -> Choice:
        """Return what becomes of a block of which nothing is known."""
        choice = choose(model, widths, np.full(widths.d_ff, self._density), tokens, assumed=True)
        expectation = choice.expectation
        if expectation is None or expectation.pays_below > 0 or not model.is_near(widths):
            return Choice("twell", "matches", 0, None, expectation)
        facts = f"TwELL {pays_text(expectation.pays_below)} {at_tokens(tuned_for(tokens))}"
        return Choice("dense", facts, 0, compression_of(self._compression), expectation)

    def notes(self, layers: list[Layer]) -> list[str]:
        """Return what the user should know: the GPU that was decided for, and what was assumed of which blocks."""
        expected = [(layer, layer.expectation) for layer in layers if layer.expectation is not None]
        if not expected:
            return []
        notes = [self._target.note] if self._target.note else []
        widths = [(layer, replace(_widths(layer), d_ff=layer.kept)) for layer, _ in expected]
        far = {(layer.d_model, layer.d_ff) for layer, kept in widths if not self._target.model.is_near(kept)}
        if far:
            sizes = first_few([f"{d_model} / {d_ff}" for d_model, d_ff in sorted(far)])
            notes.append(f"no blocks of d_model / d_ff like {sizes} were measured: what is expected of them is a guess")
        assumed = [expectation for layer, expectation in expected if expectation.assumed and layer.decision == "twell"]
        left = any(expectation.assumed and layer.decision == "dense" for layer, expectation in expected)
        if assumed:
            least, most = (pick(assumed, key=lambda each: each.gain) for pick in (min, max))
            gains = f"{least.gain:.2f}" + (f" to {most.gain:.2f}" if most.gain - least.gain >= 0.01 else "")
            which = "every match for which TwELL can pay" if left else "every match"
            notes.append(
                f"--layers auto rewrites {which}, since no profile says how often neurons fire. With "
                f"{percent(self._density)} of the activations not zero, in all neurons alike, blocks are expected to "
                f"be {gains} times as fast as dense ones on an {least.gpu}; TwELL {pays_text(least.pays_below)}"
            )
        return notes


def _widths(block: FfnBlock | Layer) -> Widths:
    return Widths(block.variant, block.d_model, block.d_ff, block.d_out)


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
