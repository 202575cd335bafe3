"""Decide the form of a block from how often its neurons fire.

The form is dense, or TwELL, or TwELL beside a dense product of its hot neurons, with a number of slots. A `CostModel`
predicts times at the number of tokens that each optimization profile is tuned for; over several profiles the geometric
mean of the gains decides. The hot neurons are those that fire most often, and come first; the others stay in the order
of the model, which decides how many slots they need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twellc.base.records import Record
from twellc.decisions.predict import CostModel, Widths
from twellc.decisions.times import Rates
from twellc.passes.block_profile import hot_first
from twellc.passes.report import Choice, Expectation, ExpectedTime
from twellc.plugins.library import COMPRESSIONS, TILE

# Fewer hot neurons are chosen if they reach this share of the best gain. A dense block, which needs no plugin, stays
# unless TwELL is this much faster.
_WORTH_IT = 0.99
_LEAST_GAIN = 1.03
# The share of a row's tiles that may hold more non-zeros than slots.
_MOST_OVERFLOWS = 0.01
# The spread of the rows' non-zeros, log-normal, where it is not known.
DEFAULT_ROW_SPREAD = 0.8
_NODES = 16
# Densities to try, to find the largest at which TwELL pays.
_DENSITIES = np.geomspace(1e-4, 1.0, 97)


@dataclass(frozen=True)
class Tokens(Record):
    """Rows of the calls that an optimization profile allows: the fewest, those it is tuned for, the most."""

    min: int
    opt: int
    max: int


def choose(
    model: CostModel,
    widths: Widths,
    rates: Rates,
    profiles: Sequence[Tokens],
    row_spread: float = DEFAULT_ROW_SPREAD,
    assumed: bool = False,
    splits: bool = True,
    removed: int = 0,
) -> Choice:
    """Decide the form of a block.

    Args:
        model: Times on the target GPU.
        widths: The block.
        rates: How often each neuron fires, as a share of the tokens, in the order of the model: [d_ff].
        profiles: Rows of the calls.
        row_spread: How unequal rows are: standard deviation of the logarithm of their non-zeros.
        assumed: Whether the rates are a guess.
        splits: Whether the kernels split calls of this dtype.
        removed: How many neurons were removed, besides those of `rates`.
    """
    in_order = np.asarray(rates, dtype=np.float64)
    rates = np.sort(in_order)[::-1]
    tuned = tuned_for(profiles)
    dense = {tokens: model.dense_us(widths, tokens) for tokens in tuned}
    hot, gain = _best(model, widths, rates, dense, splits)
    pays_below = _break_even(model, widths, rates, dense, hot)
    counts = sorted({count for profile in profiles for count in (profile.min, profile.opt, profile.max)})
    times = [
        ExpectedTime(
            count, round(model.dense_us(widths, count), 2), round(model.twell_us(widths, count, rates, hot), 2)
        )
        for count in counts
    ]
    density = float(rates.mean())
    pays = gain >= _LEAST_GAIN
    active = active_text(density, widths.d_ff, removed, stays=pays)
    taken = hot if pays else 0
    sparse = in_order[hot_first(in_order, taken)][taken:]
    return Choice(
        decision="twell" if pays else "dense",
        facts=_facts(active, gain, tuned, hot, widths)
        if pays
        else f"{active}, {pays_text(pays_below)} {at_tokens(tuned)}",
        hot=taken,
        compression=choose_compression(sparse if len(sparse) else in_order, row_spread),
        expectation=Expectation(
            model.times.gpu, assumed, round(density, 7), round(gain, 4), round(pays_below, 7), times
        ),
    )


def tuned_for(profiles: Sequence[Tokens]) -> list[int]:
    """Return the numbers of tokens that profiles are tuned for."""
    return sorted({profile.opt for profile in profiles})


def at_tokens(counts: Sequence[int]) -> str:
    """Write the numbers of tokens, such as «at 1 and 512 tokens»."""
    words = [count_text(count) for count in counts]
    several = " and ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]
    return f"at {several} token{'' if list(counts) == [1] else 's'}"


def pays_text(pays_below: float) -> str:
    """Write up to which density TwELL pays."""
    if pays_below in (0, 1):
        return f"pays at {'any' if pays_below else 'no'} density"
    return f"pays below {percent(pays_below)}"


def choose_compression(rates: Rates, row_spread: float = DEFAULT_ROW_SPREAD) -> int:
    """Return the largest compression factor, the fewest slots, with which few tiles overflow.

    A row's non-zeros in a tile are taken as a Poisson variable; its mean follows how active the row is.

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


def percent(share: float, digits: int = 2) -> str:
    """Write a share as a percentage, with a number of significant digits."""
    return f"{float(f'{100 * share:.{digits}g}'):g} %"


def count_text(count: int) -> str:
    """Write a count, from five digits on in groups of three."""
    return f"{count:,}".replace(",", " ") if count >= 10_000 else str(count)


def active_text(density: float, d_ff: int, removed: int, stays: bool = True) -> str:
    """Write the share of active neurons, of those that are left if some are removed; a dense block keeps all."""
    left = f" of the {count_text(d_ff)} neurons {'' if stays else 'that would be '}left" if removed else ""
    return f"{percent(density)}{left} active"


def _facts(active: str, gain: float, tuned: Sequence[int], hot: int, widths: Widths) -> str:
    facts = f"{active}, expected {gain:.2f} times as fast {at_tokens(tuned)}"
    which = "all" if hot == widths.d_ff else f"{hot} hot"
    return f"{facts}, {which} neurons dense" if hot else facts


def _best(model: CostModel, widths: Widths, rates: Rates, dense: dict[int, float], splits: bool) -> tuple[int, float]:
    """Return the fewest hot neurons whose gain is close to the best one, and that gain."""
    tried = model.hot_counts(widths, list(dense)) if splits else (0,)
    gains = {hot: _gain(model, widths, rates, dense, hot) for hot in tried}
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
