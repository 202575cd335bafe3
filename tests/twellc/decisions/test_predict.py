"""Predicted times: near measured ones, and sound between them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from twellc.decisions.predict import CostModel, Widths, is_split, point_rates
from twellc.decisions.targets import TARGETS, choose_target, shipped_times
from twellc.decisions.times import zipf_rates
from twellc.plugins import library

GATED = Widths("gated", 2048, 5632, 2048)
H200 = choose_target("h200", None).model


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_error_of_the_model(target: str) -> None:
    """Nine of ten times are within 10 %, each predicted from all others; docs/when-it-pays.md states these."""
    error = choose_target(target, None).model.error()
    assert error.points[0] >= 0.9
    assert error.points[1] >= 0.95
    assert error.widths is None or error.widths[1] >= 0.95


@pytest.mark.parametrize("target", TARGETS)
def test_at_a_measured_point(target: str) -> None:
    times = shipped_times(target)
    model = CostModel(times)
    for dense in times.dense[::10]:
        widths = Widths(dense.variant, dense.d_model, dense.d_ff, dense.d_model)
        assert model.dense_us(widths, dense.tokens) == pytest.approx(dense.us, rel=0.1)
    errors = []
    for point in times.twell[::10]:
        widths = Widths(point.variant, point.d_model, point.d_ff, point.d_model)
        errors.append(model.twell_us(widths, point.tokens, point_rates(point), point.hot) / point.us - 1)
    assert np.quantile(np.abs(errors), 0.9) < 0.06


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 1000, 2048, 8192, 32768])
def test_more_active_neurons_take_longer(target: str, tokens: int) -> None:
    model = choose_target(target, None).model
    times = [model.twell_us(GATED, tokens, np.full(5632, density)) for density in (0.001, 0.004, 0.016, 0.064)]
    if tokens == 1000:  # a dense block, whatever its density
        assert max(times) < 1.1 * min(times)
    else:
        assert all(after > 0.97 * before for before, after in pairwise(times))
        assert times[-1] > 1.1 * times[0]


@pytest.mark.parametrize("target", TARGETS)
def test_more_tokens_take_longer(target: str) -> None:
    model = choose_target(target, None).model
    for time in (model.dense_us, lambda w, n: model.twell_us(w, n, np.full(w.d_ff, 0.005))):
        times = [time(GATED, tokens) for tokens in (1, 8, 64, 512, 4096, 32768, 262144)]
        assert all(after > before for before, after in pairwise(times))


def test_wider_blocks_take_longer() -> None:
    for tokens in (1, 64, 1000, 8192):
        times = [
            (H200.dense_us(w, tokens), H200.twell_us(w, tokens, np.full(w.d_ff, 0.005)))
            for w in (Widths("gated", width, 4 * width, width) for width in (512, 1024, 2048, 4096, 8192))
        ]
        assert all(b[0] > a[0] and b[1] > a[1] for a, b in pairwise(times))


def test_neurons_that_differ() -> None:
    """As many non-zeros of few neurons take less than of many, where fewer rows of the weights are read."""
    rates = zipf_rates(5632, 0.02)
    equal = np.full(5632, rates.mean())
    assert H200.twell_us(GATED, 32, rates) < H200.twell_us(GATED, 32, equal)
    assert H200.twell_us(GATED, 8192, rates[::-1]) == pytest.approx(H200.twell_us(GATED, 8192, rates))


def test_hot_neurons_of_few_tokens_are_not_split() -> None:
    """That they come first takes a little longer, as measured: the same CTAs have them all."""
    rates = zipf_rates(5632, 0.02)
    for tokens in (1, 32, 128):
        assert 1 <= H200.twell_us(GATED, tokens, rates, 512) / H200.twell_us(GATED, tokens, rates) < 1.3
    assert H200.twell_us(GATED, 8192, rates, 512) < H200.twell_us(GATED, 8192, rates)


@pytest.mark.parametrize(
    ("variant", "width", "d_ff"),
    [
        *(("gated", 2048, 5632), ("gated", 4096, 11008), ("gated", 1024, 8192), ("gated", 2048, 512)),
        *(("plain", 1536, 8192), ("plain", 2048, 8192)),
    ],
)
def test_calls_are_split_where_the_kernels_split_them(variant: str, width: int, d_ff: int) -> None:
    widths = Widths(variant, width, d_ff, width)
    for tokens in (1, 16, 128, 512, 640, 641, 660, 661, 960, 961, 2048, 8192, 20_000):
        sizes = {"tokens": tokens, "d_model": width, "d_ff": d_ff, "d_out": width}
        problem = library.Problem(**sizes, compression=8, variant=library.VARIANTS[variant], hot=256)
        text = library.describe(problem, library.GPUS["H100"])
        assert is_split(widths, tokens) == ("hidden" in text and "gate_sm90" in text), text


def test_measured_splits_are_taken_as_they_are() -> None:
    """With points of hot neurons among the times, these decide what hot neurons take."""
    times = shipped_times("h200")
    zipf = [point for point in times.twell if point.neurons == "zipf" and not point.hot]
    slow = [replace(point, hot=512, us=1.5 * point.us) for point in zipf]
    model = CostModel(replace(times, twell=[*(point for point in times.twell if not point.hot), *slow]))
    edges = (1280, 1281, 1920, 1921)  # neighbours between which calls that are not split take another route
    for point in (point for point in slow if point.tokens not in edges):
        widths = Widths(point.variant, point.d_model, point.d_ff, point.d_model)
        assert model.twell_us(widths, point.tokens, point_rates(point), 512) == pytest.approx(point.us, rel=0.15)


@pytest.mark.parametrize("rates", [np.zeros(5632), np.ones(5632)])
def test_extremes(rates: np.ndarray) -> None:
    for tokens in (1, 100, 1000, 100_000):
        assert 0 < H200.twell_us(GATED, tokens, rates) < 1.3 * H200.dense_us(GATED, tokens)
