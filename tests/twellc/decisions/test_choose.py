"""What becomes of a block, and what is said of it."""

import numpy as np
import pytest

from twellc.base.errors import UserError
from twellc.decisions.choose import Tokens, choose, choose_compression, count_text, overflow, percent
from twellc.decisions.predict import Widths
from twellc.decisions.targets import choose_target, shipped_times
from twellc.decisions.times import zipf_rates

GATED = Widths("gated", 2048, 5632, 2048)
H200 = choose_target("h200", None).model


def equal(density: float) -> np.ndarray:
    return np.full(5632, density)


def test_left_dense() -> None:
    choice = choose(H200, GATED, equal(0.11), [Tokens(1, 8192, 8192)])
    pays_below = choice.expectation.pays_below
    assert choice.facts == f"11 % active, pays below {percent(pays_below)} at 8192 tokens"
    assert (choice.decision, choice.hot) == ("dense", 0)
    assert 0.9 < choice.expectation.gain < 1.03
    assert 0.012 < pays_below < 0.022, "measured: 1.32 at 1 %, 0.99 at 2 %"
    assert [each.tokens for each in choice.expectation.times] == [1, 8192]


def test_sparse() -> None:
    choice = choose(H200, GATED, equal(0.005), [Tokens(1, 8192, 32768)])
    assert (choice.decision, choice.hot, choice.compression) == ("twell", 0, 8)
    assert choice.expectation.gain == pytest.approx(1.67, rel=0.05), "measured"
    assert choice.facts == f"0.5 % active, expected {choice.expectation.gain:.2f} times as fast at 8192 tokens"
    gains = {each.tokens: each.gain for each in choice.expectation.times}
    assert gains[1] > gains[32768] > gains[8192]


def test_profiles_of_several_sizes() -> None:
    profiles = [Tokens(1, 1, 8), Tokens(1, 16384, 16384)]
    choice = choose(H200, GATED, equal(0.01), profiles)
    assert choice.facts.endswith("times as fast at 1 and 16 384 tokens")
    alone = [choose(H200, GATED, equal(0.01), [profile]).expectation.gain for profile in profiles]
    assert choice.expectation.gain == pytest.approx((alone[0] * alone[1]) ** 0.5, rel=1e-3)
    assert choose(H200, GATED, equal(0.01), profiles[:1]).facts.endswith("at 1 token")


def test_hot_neurons() -> None:
    rates = np.random.default_rng(0).permutation(zipf_rates(5632, 0.02))
    choice = choose(H200, GATED, rates, [Tokens(8192, 8192, 8192)])
    assert choice.decision == "twell"
    assert choice.hot >= 128
    assert choice.facts.endswith(f", {choice.hot} hot neurons dense")
    without = H200.dense_us(GATED, 8192) / H200.twell_us(GATED, 8192, rates)
    assert choice.expectation.gain > 1.1 * without
    assert choice.compression == choose_compression(np.sort(rates)[::-1][choice.hot :])


def test_dead_layer() -> None:
    choice = choose(H200, GATED, equal(0.0), [Tokens(8192, 8192, 8192)])
    assert choice.decision == "twell"
    assert choice.facts.startswith("0 % active, expected ")


def test_compression() -> None:
    """The more neurons of a tile fire, the more slots it needs."""
    densities = (0.005, 0.05, 0.1, 0.3)
    assert [choose_compression(equal(density)) for density in densities] == [8, 4, 2, 1]
    assert overflow(equal(0.005), 8) < 1e-4
    assert overflow(equal(0.5), 8) > 0.9
    for density in densities:
        shares = [overflow(equal(density), compression) for compression in (1, 2, 4, 8)]
        assert shares == sorted(shares)
    assert overflow(equal(0.1), 4, row_spread=0.0) < overflow(equal(0.1), 4, row_spread=1.0)


def test_overflow_is_that_of_drawn_rows() -> None:
    rng = np.random.default_rng(0)
    rates = np.sort(zipf_rates(1000, 0.1))[::-1]
    activity = np.exp(0.8 * rng.standard_normal(4000) - 0.32)
    active = rng.random((4000, 1000)) < np.minimum(rates * activity[:, None], 1)
    counts = np.add.reduceat(active, np.arange(0, 1000, 256), axis=1, dtype=np.int64)
    for compression in (4, 8):
        assert overflow(rates, compression) == pytest.approx((counts > 256 // compression - 1).mean(), abs=0.03)


def test_texts() -> None:
    assert [percent(share) for share in (0.11, 0.0194, 0.00038, 1.0, 0.0)] == [
        "11 %",
        "1.9 %",
        "0.038 %",
        "100 %",
        "0 %",
    ]
    assert [count_text(count) for count in (1, 8192, 32768, 1000000)] == ["1", "8192", "32 768", "1 000 000"]


def test_target() -> None:
    h100 = shipped_times("h100").gpu
    assert choose_target("h200", None).gpu == "NVIDIA H200"
    assert choose_target(None, "NVIDIA H200").note == ""
    assert choose_target(None, "NVIDIA H200").gpu == "NVIDIA H200"
    default = choose_target(None, None)
    assert (default.gpu, default.note) == (
        h100,
        f"decided for {h100}, since there is no GPU here (--target-gpu changes it)",
    )
    assert "since the times of NVIDIA A100 are not known" in choose_target(None, "NVIDIA A100").note
    with pytest.raises(UserError, match=r"--target-gpu h300: neither the name of a GPU nor a file; .*h100 or h200, or"):
        choose_target("h300", None)
