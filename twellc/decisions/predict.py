"""Predict the time of a block on a GPU, in microseconds, from times that were measured there.

There are two steps. A *floor* adds up the parts of a block's work, each with a price:

    dense   constant + products + bytes of x, weights and y + bytes of the tensors between the products
    TwELL   constant + products of the gate + bytes of x, y, the gate and the rows of neurons that fire
            + gathered rows, those of the most active neurons and of the others separately
            + constant, products and bytes of the hot neurons, which are a dense product

Least squares of the relative error fit the prices to the measured times, none below zero; for TwELL separately in
ranges of tokens, since other kernels run there. Then the ratio of measured time to floor is *interpolated* between
measured points, by logarithms of tokens, widths and density, by variant, and by how unequal neurons are: kriging with
an exponential covariance. Along one axis that is linear between neighbours; far from all points it is their average.

Unequal neurons count twice: fewer of them fire in a call of few tokens, and rows of the most active ones stay in
caches.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from twellc.decisions.times import DensePoint, GpuTimes, Measured, Rates, TwellPoint, zipf_rates
from twellc.plugins.library import limits

_Array = np.ndarray[Any, np.dtype[np.float64]]

# Numbers of hot neurons to try.
_HOT_COUNTS = (0, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# The range of tokens in which most blocks are dense, whatever their density.
_DENSE_RANGE = 2
# The widths, d_model and d_ff, of the layer that sets the end of the last range of tokens.
_USUAL = (2048, 5632)
_ELEMENT = 2
# Floors of TwELL are fitted below this density: above it dense paths take over.
_SPARSE = 0.03
# For the kriging: the octaves over which the covariance falls to 1/e; the distances in octaves of another variant, of
# another range of tokens, and between blocks whose most active neurons have all active pairs, or none; the noise of a
# measurement.
_LENGTH = 8.0
_OTHER_VARIANT = 4.0
_OTHER_RANGE = 8.0
_ALL_MOST_ACTIVE = 4.0
_NOISE = 0.02
_LEAST_DENSITY = 1e-5


@dataclass(frozen=True)
class Widths:
    """A block: `gated` or `plain`, widths of x and y, and neurons."""

    variant: str
    d_model: int
    d_ff: int
    d_out: int

    @property
    def inputs(self) -> int:
        """The number of projections that read x."""
        return 2 if self.variant == "gated" else 1


@dataclass(frozen=True)
class ModelError:
    """The errors of predictions: the shares within 10 % and 20 % of the measured time, and the number of predictions.

    For `points`, points are left out one by one, for `widths` with all others of the same widths; None where no other
    widths were measured.
    """

    points: tuple[float, float, int]
    widths: tuple[float, float, int] | None


@dataclass(frozen=True)
class _Call:
    """A call of a block: rates are how often each neuron fires, the hot ones first; None for a dense block.

    Calls of few tokens are not split, but there, too, the hot neurons come first.
    """

    widths: Widths
    tokens: int
    rates: Rates | None = None
    hot: int = 0

    @functools.cached_property
    def split(self) -> int:
        """How many of the hot neurons are a dense product."""
        return self.hot if is_split(self.widths, self.tokens) else 0

    @functools.cached_property
    def sparse_rates(self) -> Rates:
        """The rates of the neurons outside of that product."""
        assert self.rates is not None
        rates: Rates = self.rates[self.split :]
        return rates

    @functools.cached_property
    def pairs(self) -> tuple[float, float]:
        """Active pairs of a token and a neuron outside of that product: with the most active neurons, with others."""
        rates = np.sort(self.sparse_rates)[::-1]
        most = limits().most_hot  # the kernels treat as many neurons as hot
        return self.tokens * float(rates[:most].sum()), self.tokens * float(rates[most:].sum())


# Times with FP8 weights over times with 16 bits, by tokens, of a gated block of 2048 / 5632 on an H200, 2026-11-29
# (benchmarks/results/kernels.md): of TwELL at 0.5 % active and at 2 %. Those of dense blocks, and at 2 % from 1024
# tokens on, are of an H100. Values between these are interpolated by logarithms; other GPUs and blocks are taken to be
# alike.
_FP8_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 768, 1024, 2048, 8192)
_FP8_SPARSE = (0.90, 0.90, 0.94, 1.19, 1.13, 1.04, 0.97, 0.90, 0.88, 0.74, 0.79, 0.83)
_FP8_ACTIVE = (0.92, 0.90, 0.86, 0.98, 0.82, 0.88, 0.97, 0.90, 0.87, 1.11, 0.88, 0.83)
_FP8_DENSE = (1.0, 1.0, 1.0, 1.0, 0.77, 0.78, 0.88, 0.80, 0.77, 0.76, 0.66, 0.63)
_FP8_DENSITIES = (0.005, 0.02)  # _FP8_SPARSE holds up to the first, _FP8_ACTIVE from the second on


class CostModel:
    """Predicts the times of blocks on one GPU from measured ones; it is fitted at the first prediction.

    Attributes:
        times: The measured times.
        bits: The bits of the weights that TwELL reads.
    """

    def __init__(self, times: GpuTimes) -> None:
        self.times = times
        self.bits = 16

    @functools.cached_property
    def fp8(self) -> CostModel:
        """The model for blocks with FP8 weights in TwELL; dense ones have 16 bits as before."""
        assert self._dense is not None and self._twell is not None  # fitted once, for both
        made = copy.copy(self)
        made.bits = 8
        return made

    @functools.cached_property
    def _dense(self) -> _Interpolated:
        return _Interpolated(list(map(_dense_call, self.times.dense)), self.times.dense, None)

    @functools.cached_property
    def _twell(self) -> _Interpolated:
        return _Interpolated(list(map(_twell_call, self.times.twell)), self.times.twell, self._dense)

    def dense_us(self, widths: Widths, tokens: int) -> float:
        """Return the time of a dense block in the fastest form."""
        return self._dense.predict(_Call(widths, tokens))

    def twell_us(self, widths: Widths, tokens: int, rates: Rates, hot: int = 0) -> float:
        """Return the time of a block by TwELL.

        Args:
            widths: The block.
            tokens: Rows of the call.
            rates: How often each neuron fires, as a share of the tokens: [d_ff].
            hot: How many neurons, the first in `rates`, are a dense product where calls are split. With FP8 only
                all of them can be.
        """
        if self.bits == 16:
            return self._twell_us(widths, tokens, rates, hot)
        at = math.log(max(tokens, 1))
        sparse, active, dense = (
            float(np.interp(at, np.log(_FP8_TOKENS), ratios)) for ratios in (_FP8_SPARSE, _FP8_ACTIVE, _FP8_DENSE)
        )
        if hot == widths.d_ff and is_packed_scaled(widths, tokens):
            return dense * self.dense_us(widths, tokens)
        density = math.log(max(float(rates.mean()), _LEAST_DENSITY))
        ratio = float(np.interp(density, np.log(_FP8_DENSITIES), (sparse, active)))
        return ratio * self._twell_us(widths, tokens, rates, 0)

    def hot_counts(self, widths: Widths, tokens: Sequence[int]) -> Sequence[int]:
        """Return the numbers of hot neurons to try for calls of so many tokens, the fewest first."""
        if self.bits == 8:
            return (0, widths.d_ff) if any(is_packed_scaled(widths, each) for each in tokens) else (0,)
        if not any(is_split(widths, each) for each in tokens):
            return (0,)
        return [hot for hot in _HOT_COUNTS if hot < widths.d_ff]

    def _twell_us(self, widths: Widths, tokens: int, rates: Rates, hot: int) -> float:
        call = _Call(widths, tokens, rates, hot)
        if self._twell.splits or not hot:
            return self._twell.predict(call)
        if not call.split:
            return self._twell.predict(replace(call, hot=0))
        return self._twell.predict(_sparse_block(call)) + self._dense.predict(_hot_block(call)) - self._dense.constant

    def is_near(self, widths: Widths) -> bool:
        """Whether d_model and d_ff are those of measured blocks, or at most twice or half of some."""
        return all(
            min(measured) / 2 <= width <= 2 * max(measured)
            for width, measured in (
                (widths.d_model, [d_model for _, d_model, _ in self.shapes]),
                (widths.d_ff, [d_ff for *_, d_ff in self.shapes]),
            )
        )

    def error(self) -> ModelError:
        """Return the errors of predictions, found by predicting each measured point from the others."""
        errors = []
        for shape in self.shapes if len(self.shapes) > 1 else ():
            rest = CostModel(
                replace(
                    self.times,
                    dense=[point for point in self.times.dense if _shape(point) != shape],
                    twell=[point for point in self.times.twell if _shape(point) != shape],
                )
            )
            own = [point for point in self.times.twell if _shape(point) == shape]
            errors += [math.log(point.us / rest._twell.predict(_twell_call(point))) for point in own]
        return ModelError(_within(self._twell.left_out()), _within(np.array(errors)) if errors else None)

    @property
    def shapes(self) -> set[tuple[str, int, int]]:
        """Variant, d_model and d_ff of the blocks that were measured by TwELL."""
        return set(map(_shape, self.times.twell))


def _shape(point: Measured) -> tuple[str, int, int]:
    return point.variant, point.d_model, point.d_ff


def _within(errors: _Array) -> tuple[float, float, int]:
    off = np.abs(np.expm1(errors))
    return float((off <= 0.1).mean()), float((off <= 0.2).mean()), len(off)


def _dense_call(point: DensePoint) -> _Call:
    return _Call(Widths(point.variant, point.d_model, point.d_ff, point.d_model), point.tokens)


def _twell_call(point: TwellPoint) -> _Call:
    widths = Widths(point.variant, point.d_model, point.d_ff, point.d_model)
    return _Call(widths, point.tokens, point_rates(point), point.hot)


def point_rates(point: TwellPoint) -> Rates:
    """Return how often each neuron fired when a point was measured, the most active first."""
    if point.neurons == "equal":
        return np.full(point.d_ff, point.density)
    rates = zipf_rates(point.d_ff, point.nominal)
    scaled: Rates = np.minimum(rates * (point.density / rates.mean()), 1.0)
    return scaled


def is_split(widths: Widths, tokens: int) -> bool:
    """Whether hot neurons are a separate dense product in a call, as in routes.cu for Hopper."""
    return _is_beyond(widths, tokens, limits().dense_block_tokens_if_split, limits().dense_block_products_if_split)


def is_packed_scaled(widths: Widths, tokens: int) -> bool:
    """Likewise with FP8 weights, unless all neurons are hot: whether the gate is packed."""
    return _is_beyond(widths, tokens, limits().dense_block_tokens_scaled, limits().dense_block_products_scaled)


def _is_beyond(widths: Widths, tokens: int, most_tokens: int, most_products: int) -> bool:
    narrow = limits().narrow_gated if widths.variant == "gated" else limits().narrow_plain
    products = tokens * widths.d_model * widths.d_ff
    return tokens > most_tokens and products > most_products and max(widths.d_model, widths.d_out) > narrow


@functools.cache
def _ranges() -> tuple[int, ...]:
    """Return the token counts that divide the ranges with separate prices: other kernels run above each."""
    dense = limits().dense_block_products // math.prod(_USUAL)
    return limits().few_tokens, limits().few_tokens_sm90, dense


def _range_of(tokens: int) -> int:
    return sum(tokens > end for end in _ranges())


def _dense_parts(call: _Call) -> list[float]:
    """Return the parts of a dense block's work, as counts that have a price each."""
    w, tokens = call.widths, call.tokens
    weights = w.inputs * w.d_model * w.d_ff + w.d_ff * w.d_out
    outside = _ELEMENT * (weights + tokens * (w.d_model + w.d_out))
    return [1.0, 2.0 * tokens * weights, outside, _ELEMENT * w.inputs * tokens * w.d_ff]


def _twell_parts(call: _Call) -> list[float]:
    """Return the parts of TwELL's work, as such counts; the last four are those of the hot neurons."""
    w, tokens, hot = call.widths, call.tokens, call.split
    neuron = (w.inputs - 1) * w.d_model + w.d_out
    with np.errstate(divide="ignore"):
        distinct = float(-np.expm1(tokens * np.log1p(-np.minimum(call.sparse_rates, 1.0))).sum())
    sparse = w.d_ff - hot
    outside = _ELEMENT * (tokens * (w.d_model + w.d_out) + sparse * w.d_model + distinct * neuron)
    most, others = (_ELEMENT * neuron * pairs for pairs in call.pairs)
    _, products, _, between = _dense_parts(_hot_block(call))
    of_hot = [float(hot > 0), products, _ELEMENT * hot * (w.d_model + neuron), between]
    return [1.0, 2.0 * tokens * sparse * w.d_model, outside, most, others, *of_hot]


_MOST, _OTHERS, _HOT = 3, 4, slice(5, None)  # indices of parts


def _hot_block(call: _Call) -> _Call:
    """Return the dense block of the hot neurons."""
    return _Call(replace(call.widths, d_ff=call.split), call.tokens)


def _sparse_block(call: _Call) -> _Call:
    """Return the block of all other neurons."""
    return _Call(replace(call.widths, d_ff=call.widths.d_ff - call.split), call.tokens, call.sparse_rates)


def _place(call: _Call) -> list[float]:
    """Return the coordinates of a call for the kriging, in octaves."""
    w = call.widths
    place = [math.log2(call.tokens), math.log2(w.d_model * w.d_out) / 2, math.log2(w.d_ff - call.split)]
    place.append(_OTHER_VARIANT * (w.variant == "plain"))
    if call.rates is not None:
        most, others = call.pairs
        density = (most + others) / (call.tokens * (w.d_ff - call.split))
        share = most / (most + others) if most + others else 0.0
        place += [
            math.log2(max(density, _LEAST_DENSITY)),
            _ALL_MOST_ACTIVE * share,
            math.log2(1 + call.hot / limits().most_hot),
        ]
    return place


_Point = TypeVar("_Point", bound=Measured)
# No prediction is below this share of the shortest measured time: narrower blocks take less, but not nothing.
_LEAST_SHARE = 0.5


class _Interpolated:
    """Times by floor and interpolated ratio; the times that `dense` predicts for dense blocks bound floors of TwELL."""

    def __init__(self, calls: list[_Call], points: Sequence[Measured], dense: _Interpolated | None) -> None:
        self._bound = dense
        self.splits = any(call.split for call in calls)
        us = np.array([point.us for point in points])
        self._least = _LEAST_SHARE * float(us.min())
        groups = np.array([self._group(call) for call in calls])
        self._prices: dict[int, _Array] = {}
        for group in set(groups.tolist()):
            members = np.flatnonzero(groups == group)
            self._prices[group] = self._fit([calls[index] for index in members], us[members])
        self._places = np.array([_place(call) for call in calls])
        self._groups = groups
        self._ratios = np.log(us / np.array([self._floor(call) for call in calls]))
        self._mean = float(self._ratios.mean())
        noise = _NOISE**2 / max(float(self._ratios.var()), _NOISE**2)
        covariance = self._covariance(self._places, self._groups) + noise * np.eye(len(calls))
        self._inverse = np.linalg.inv(covariance)
        self._weights = self._inverse @ (self._ratios - self._mean)

    @property
    def constant(self) -> float:
        """The time of a dense block without any work."""
        return float(self._prices[0][0])

    def predict(self, call: _Call) -> float:
        """Return the time of a call in microseconds, no less than half of the shortest that was measured."""
        near = self._covariance(np.array([_place(call)]), np.array([self._group(call)]))[0]
        return max(self._floor(call) * math.exp(self._mean + float(near @ self._weights)), self._least)

    def left_out(self) -> _Array:
        """Return the logarithm of measured by predicted time for each point, predicted from all others."""
        errors: _Array = self._weights / np.diag(self._inverse)
        return errors

    def _group(self, call: _Call) -> int:
        if call.rates is None:
            return 0
        return len(_ranges()) if call.split else _range_of(call.tokens)

    def _fit(self, calls: list[_Call], us: _Array) -> _Array:
        """Return the prices of a group of calls."""
        if calls[0].rates is None or self._group(calls[0]) == _DENSE_RANGE:
            return _least_squares(np.array([_dense_parts(call) for call in calls]), us)
        fitted = np.array([sum(call.pairs) < _SPARSE * call.tokens * call.widths.d_ff for call in calls])
        parts = np.array([_twell_parts(call) for call in calls])[fitted]
        # Only unequal neurons tell the price of the most active ones apart.
        apart = bool((parts[:, _MOST] > parts[:, _OTHERS] / 2).any())
        if not apart:
            parts[:, _OTHERS] += parts[:, _MOST]
            parts[:, _MOST] = 0
        prices = _least_squares(parts, us[fitted])
        if not apart:
            prices[_MOST] = prices[_OTHERS]
        return prices

    def _floor(self, call: _Call) -> float:
        prices = self._prices[self._group(call)]
        if call.rates is None or self._group(call) == _DENSE_RANGE:
            return float(prices @ _dense_parts(call))
        assert self._bound is not None
        priced = prices * _twell_parts(call)
        bound = self._bound.predict(replace(_sparse_block(call), rates=None))
        return min(float(priced[: _HOT.start].sum()), bound) + float(priced[_HOT].sum())

    def _covariance(self, places: _Array, groups: _Array) -> _Array:
        distance = _OTHER_RANGE * (groups[:, None] != self._groups[None])
        for axis in range(places.shape[1]):
            distance += np.abs(places[:, None, axis] - self._places[None, :, axis])
        covariance: _Array = np.exp(-distance / _LENGTH)
        return covariance


def _least_squares(parts: _Array, us: _Array) -> _Array:
    """Return prices, none below zero, for which parts [points, kinds] come to `us` with small relative errors."""
    scaled = parts / us[:, None]
    scale = np.abs(scaled).max(axis=0, initial=1e-300)
    used = np.arange(parts.shape[1])
    while True:
        prices = np.zeros(parts.shape[1])
        prices[used] = np.linalg.lstsq((scaled / scale)[:, used], np.ones(len(us)), rcond=None)[0]
        if not (prices < 0).any():
            found: _Array = prices / scale
            return found
        used = used[prices[used] > 0]
