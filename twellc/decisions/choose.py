"""Decide what becomes of a block from how often its neurons fire.

It is dense, or TwELL's, or TwELL's beside a dense product of its hot neurons; and it has so many slots. Times are
predicted by a `CostModel` at the number of tokens that each optimization profile is tuned for; over several profiles
the geometric mean of the gains decides. Neurons are taken to be in the order of their firing, as the reordering leaves
them: the hot ones are the first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twellc.base.records import Record
from twellc.decisions.predict import CostModel, Widths
from twellc.decisions.times import Rates
from twellc.plugins.library import COMPRESSIONS, TILE

# Numbers of hot neurons that are tried.
_HOT = (0, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# More hot neurons have to be so much better; TwELL so much faster than a dense block, which needs no plugin.
_WORTH_IT = 0.99
_LEAST_GAIN = 1.03
# Of the tiles of a row: so few may hold more non-zeros than slots.
_MOST_OVERFLOWS = 0.01
# Of the rows' non-zeros, log-normal, where nothing is known of them.
DEFAULT_ROW_SPREAD = 0.8
_NODES = 16
# Densities that are tried for the one up to which TwELL pays.
_DENSITIES = np.geomspace(1e-4, 1.0, 97)


@dataclass(frozen=True)
class Tokens(Record):
    """Rows of the calls that an optimization profile allows: the fewest, those it is tuned for, the most."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class Expected(Record):
    """What a block is expected to take in a call of so many tokens, in microseconds."""

    tokens: int
    dense_us: float
    twell_us: float

    @property
    def gain(self) -> float:
        """How many times as fast TwELL is."""
        return self.dense_us / self.twell_us


@dataclass(frozen=True)
class Choice(Record):
    """What becomes of a block.

    Attributes:
        decision: `twell` or `dense`.
        reason: Why, in words.
        density: Share of gate activations that are not zero.
        hot: How many neurons, the most active ones, are a dense product; 0 where it is dense.
        compression: The TwELL compression factor.
        gain: How many times as fast as dense TwELL is expected to be, over the profiles.
        pays_below: The density below which TwELL pays, if neurons differ as these do; 1 where it always does, 0 where
            it never does.
        expected: Times of TwELL, with these hot neurons, and of the dense block, by profile at min, opt and max.
    """

    decision: str
    reason: str
    density: float
    hot: int
    compression: int
    gain: float
    pays_below: float
    expected: list[Expected]


def choose(
    model: CostModel,
    widths: Widths,
    rates: Rates,
    profiles: Sequence[Tokens],
    row_spread: float = DEFAULT_ROW_SPREAD,
) -> Choice:
    """Decide what becomes of a block.

    Args:
        model: Times on the target GPU.
        widths: The block.
        rates: How often each neuron fires, as a share of the tokens, in any order: [d_ff].
        profiles: Rows of the calls that it is for.
        row_spread: How unequal rows are: standard deviation of the logarithm of their non-zeros.
    """
    rates = np.sort(np.asarray(rates, dtype=np.float64))[::-1]
    tuned = sorted({profile.opt for profile in profiles})
    dense = {tokens: model.dense_us(widths, tokens) for tokens in tuned}
    hot, gain = _best(model, widths, rates, dense)
    pays_below = _break_even(model, widths, rates, dense, hot)
    counts = sorted({count for profile in profiles for count in (profile.min, profile.opt, profile.max)})
    expected = [
        Expected(count, round(model.dense_us(widths, count), 2), round(model.twell_us(widths, count, rates, hot), 2))
        for count in counts
    ]
    density = float(rates.mean())
    at = f"at {_and(list(map(count_text, tuned)))} token{'s' if tuned != [1] else ''}"
    if gain >= _LEAST_GAIN:
        reason = f"{percent(density)} active, expected {gain:.2f} times as fast {at}"
        reason += f", {hot} hot neurons dense" if hot else ""
        decision = "twell"
    else:
        limit = f"pays below {percent(pays_below)}" if pays_below else "does not pay at any density"
        decision, reason = "dense", f"left dense: {percent(density)} active, {limit} {at}"
    compression = choose_compression(rates[hot:], row_spread)
    taken = hot if decision == "twell" else 0
    return Choice(decision, reason, density, taken, compression, round(gain, 4), pays_below, expected)


def choose_compression(rates: Rates, row_spread: float = DEFAULT_ROW_SPREAD) -> int:
    """Return the largest compression factor, the fewest slots, with which few tiles overflow.

    A row's non-zeros in a tile are taken to be a Poisson variable, whose mean follows how active the row is.

    Args:
        rates: How often each neuron fires, in the order of the weights, without hot ones: [neurons].
        row_spread: See `choose`.
    """
    factors = sorted(COMPRESSIONS, reverse=True)
    return next((factor for factor in factors if overflow(rates, factor, row_spread) <= _MOST_OVERFLOWS), factors[-1])


def overflow(rates: Rates, compression: int, row_spread: float = DEFAULT_ROW_SPREAD) -> float:
    """Return the share of all tiles of all rows that have more non-zeros than slots."""
    tiles = np.add.reduceat(rates, np.arange(0, len(rates), TILE))
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    activity = np.exp(row_spread * nodes - row_spread**2 / 2)
    means = np.maximum(tiles[:, None] * activity, 1e-30)  # [tiles, nodes]
    slots = TILE // compression - 1
    counts = np.arange(slots + 1)
    factorials = np.array([math.lgamma(count + 1) for count in counts])
    fits = np.exp(counts * np.log(means)[..., None] - means[..., None] - factorials).sum(axis=-1)
    return float(np.clip(((1 - fits) @ weights / weights.sum()).mean(), 0, 1))


def percent(share: float) -> str:
    """Write a share as a percentage of two digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def count_text(count: int) -> str:
    """Write a count, from five digits on in groups of three."""
    return f"{count:,}".replace(",", " ") if count >= 10_000 else str(count)


def _best(model: CostModel, widths: Widths, rates: Rates, dense: dict[int, float]) -> tuple[int, float]:
    """Return the fewest hot neurons with which the gain is next to the best one, and that gain."""
    gains = {hot: _gain(model, widths, rates, dense, hot) for hot in _HOT if hot < widths.d_ff}
    best = max(gains.values())
    return next((hot, gain) for hot, gain in gains.items() if gain >= best * _WORTH_IT)


def _gain(model: CostModel, widths: Widths, rates: Rates, dense: dict[int, float], hot: int) -> float:
    ratios = [math.log(us / model.twell_us(widths, tokens, rates, hot)) for tokens, us in dense.items()]
    return math.exp(sum(ratios) / len(ratios))


def _break_even(model: CostModel, widths: Widths, rates: Rates, dense: dict[int, float], hot: int) -> float:
    """Return the density below which TwELL pays if all neurons fire more or less often, by the same factor."""
    density = float(rates.mean())
    shape = rates / density if density else np.ones(widths.d_ff)
    limit = 0.0
    for tried in _DENSITIES:
        scaled = np.minimum(shape * tried, 1.0)
        if max(_gain(model, widths, scaled, dense, count) for count in {0, hot}) < _LEAST_GAIN:
            break
        limit = float(scaled.mean())
    else:
        return 1.0
    return limit


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]
