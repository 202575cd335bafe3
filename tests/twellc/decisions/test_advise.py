"""Advice about the blocks of a model, and how it gets into reports."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import Gated, Residual, blocks_of, canonical
from twellc.base.errors import UserError
from twellc.compiling.translate_onnx import rows_of_inputs
from twellc.compiling.translate_torch import rows_of
from twellc.decisions.advise import Advisor, row_spread
from twellc.decisions.choose import Tokens, choose, choose_compression, count_text, overflow, percent
from twellc.decisions.predict import CostModel, Widths
from twellc.decisions.targets import Target, choose_target, shipped_times
from twellc.decisions.times import DensePoint, GpuTimes, TwellPoint, zipf_rates
from twellc.export.profiles import resolve_profiles
from twellc.export.shapes import parse_profile
from twellc.passes.decide import Advise, decide, repeat
from twellc.passes.match.find_ffn import FfnBlock, find_ffn_blocks
from twellc.passes.neurons import Staying
from twellc.passes.report import Layer, ShortRun, Weights
from twellc.passes.sizes.inputs import program_inputs

TARGET = choose_target("h200", None)
TOKENS = [Tokens(1, 8192, 8192)]


@pytest.fixture(scope="module")
def blocks() -> list[FfnBlock]:
    """Two blocks, as wide as measured ones."""
    module = torch.nn.Sequential(Residual(Gated()), Residual(Gated())).bfloat16()
    found = blocks_of(module, torch.randn(2, 3, 16).bfloat16())
    return [replace(block, d_model=2048, d_ff=5632, d_out=2048) for block in found]


def advisor(density: float | None = None, compression: int | None = None) -> Advisor:
    return Advisor(TARGET, lambda block: TOKENS, density, compression)


def equal(rate: float, kept: int = 5632) -> Staying:
    """Return that the first neurons stay, and that each fires for this share of the tokens."""
    return Staying(np.arange(kept), np.full(kept, rate))


def unknown(block: FfnBlock) -> Staying:
    return Staying(np.arange(block.d_ff))


def decided(
    blocks: list[FfnBlock], advise: Advise | None, *neurons: Staying | None, layers: str = "auto"
) -> list[Layer]:
    """Decide on blocks by what is known of their neurons."""
    known = [unknown(block) if each is None else each for block, each in zip(blocks, neurons, strict=True)]
    return decide(blocks, layers, advise, known)


def test_what_is_known_decides(blocks: list[FfnBlock]) -> None:
    advise = advisor()
    first, second = decided(blocks, advise, equal(0.11), equal(0.003))
    assert (first.decision, first.matched, first.residual) == ("dense", True, False)
    assert re.fullmatch(r"left dense: 11 % active, pays below (1\.\d|2) % at 8192 tokens", first.reason)
    assert second.decision == "twell"
    assert second.reason.startswith("0.3 % active, expected 1.")
    assert second.expectation is not None and not second.expectation.assumed
    assert advise.notes([first, second]) == []


def test_in_fp8_dense_blocks_are_by_twell(blocks: list[FfnBlock]) -> None:
    narrow = [replace(block, weights=Weights(8, "quantised")) for block in blocks]
    first, second = decided(narrow, advisor(), equal(0.11), equal(0.003))
    assert (first.decision, first.hot, second.decision, second.hot) == ("twell", 5632, "twell", 0)
    assert re.match(r"11 % active, expected 1\.\d+ times as fast at 8192 tokens, all neurons dense;", first.reason)


def test_all_takes_what_does_not_pay(blocks: list[FfnBlock]) -> None:
    for layers in ("all", "0"):
        layer = decided(blocks, advisor(), equal(0.11), None, layers=layers)[0]
        assert layer.decision == "twell"
        assert layer.reason.startswith("11 % active, pays below ")
    reasons = {layer.reason for layer in decided(blocks, advisor(), equal(0.11), None, layers="none")}
    assert reasons == {"--layers none"}


def test_without_a_figure_nothing_is_expected(blocks: list[FfnBlock]) -> None:
    advise = advisor()
    layers = decided(blocks, advise, None, None)
    assert [(layer.decision, layer.reason, layer.expectation) for layer in layers] == [("twell", "matches", None)] * 2
    assert advise.notes(layers) == []
    advise.unmeasured = "it takes too long"
    assert advise.notes(layers) == ["how many neurons are active was not measured of 0.ffn, 1.ffn: it takes too long"]


def test_what_is_assumed_only_informs(blocks: list[FfnBlock]) -> None:
    advise = advisor(density=0.3)
    layers = decided(blocks, advise, None, None)
    assert [(layer.decision, layer.reason) for layer in layers] == [("twell", "matches")] * 2
    (note,) = advise.notes(layers)
    expectation = layers[0].expectation
    assert expectation is not None and expectation.assumed
    assert note == (
        "--layers auto rewrites every match, since there is no profile; blocks are expected to be "
        f"{expectation.gain:.2f} times as fast as dense ones on an NVIDIA H200; TwELL pays below "
        f"{percent(expectation.pays_below)}"
    )
    assert advise.notes([replace(layer, expectation=None) for layer in layers]) == []
    assert advise.decided == {}


@pytest.mark.parametrize("target", [TARGET, Target(TARGET.model, "decided for another", at_hand="NVIDIA A100")])
def test_a_short_run_only_informs(blocks: list[FfnBlock], target: Target) -> None:
    """Half of the neurons: nothing is gained, and the block is taken as without a run. No figure is of another GPU."""
    blocks = [blocks[0], replace(blocks[1], module="far", d_model=16, d_ff=40, d_out=16)]
    advise = Advisor(target, lambda block: TOKENS)
    before = decided(blocks, advise, None, None)
    advise.run = {
        block.module: ShortRun(density, 128, "random tokens") for block, density in zip(blocks, (0.5, 0.4), strict=True)
    }
    layers = decided(blocks, advise, None, None)
    assert [replace(layer, expectation=None, short_run=None) for layer in layers] == before and advise.decided == {}
    assert [layer.density for layer in layers] == [0.5, 0.4] and layers[1].expectation is None
    run = (
        "40 % to 50 % of the neurons were active in a short run on random tokens (128 tokens); this decides "
        "nothing, `twellc profile` counts on your data"
    )
    if target.at_hand:
        assert layers[0].expectation is None
        none = "how fast blocks are on an NVIDIA A100 was not measured, so no speed is expected"
        assert advise.notes(layers) == ["decided for another", none, run]
        return
    expectation = layers[0].expectation
    assert expectation is not None and expectation.density == 0.5 and expectation.gain < 1.03
    assert advise.notes(layers)[:2] == [
        "no blocks of d_model / d_ff like 16 / 40 were measured on an NVIDIA H200, so no speed is expected of them",
        run,
    ]


DENSITIES = (0.0001, 0.001, 0.01, 0.1, 0.5)


def gpu_times(
    variant: str, d_model: int, d_ff: int, us: Callable[[float], float] = lambda _: 20.0, densities: Any = DENSITIES
) -> GpuTimes:
    """Return times of blocks of one shape: dense ones take 10 us, and TwELL what a density does, by default 20 us."""
    sizes = [(variant, d_model, d_ff, tokens) for tokens in (1, 64, 1000, 2048, 8192)]
    dense = [DensePoint(*size, 10.0, 10.0, 10.0, "eager") for size in sizes]
    twell = [
        TwellPoint(*size, us(each), us(each), us(each), each, each, "equal") for size in sizes for each in densities
    ]
    return GpuTimes({"gpu": "NVIDIA Test"}, True, dense, twell)


SLOW = Target(CostModel(gpu_times("gated", 2048, 5632)), "")


def test_where_twell_pays_at_no_density_blocks_are_left_dense_without_a_profile(blocks: list[FfnBlock]) -> None:
    """And a later compilation that repeats the decisions leaves the same blocks dense."""
    advise = Advisor(SLOW, lambda block: TOKENS)
    layers = decided(blocks, advise, None, None)
    reason = "left dense: TwELL pays at no density at 8192 tokens"
    assert [(layer.decision, layer.matched, layer.reason) for layer in layers] == [("dense", True, reason)] * 2
    assert advise.notes(layers) == []
    assert [layer.reason for layer in decided(blocks, repeat(advise.decided), None, None)] == [reason] * 2
    for named in ("all", "ffn"):
        layers = decided(blocks, advise, None, None, layers=named)
        assert [layer.decision for layer in layers] == ["twell"] * 2
        assert layers[0].reason == "TwELL pays at no density at 8192 tokens"


def test_some_are_left_dense_without_a_profile(blocks: list[FfnBlock]) -> None:
    """Not where the same prediction is of widths that were not measured."""
    advise = Advisor(SLOW, lambda block: TOKENS)
    far = replace(blocks[1], d_model=256, d_ff=512, d_out=256)
    layers = decided([blocks[0], far], advise, None, None)
    assert [(layer.decision, layer.expectation) for layer in layers] == [("dense", None), ("twell", None)]
    assert list(advise.decided) == [blocks[0].module]


def test_a_guess_leaves_nothing_dense(blocks: list[FfnBlock]) -> None:
    far = replace(blocks[0], d_model=16, d_ff=40, d_out=16)
    (layer,) = decided([far], advisor(), equal(0.5, 40))
    assert (layer.decision, layer.reason, layer.hot, layer.expectation) == ("twell", "50 % active", 0, None)


def test_decisions_are_repeated(blocks: list[FfnBlock]) -> None:
    rates = np.random.default_rng(0).permutation(zipf_rates(5632, 0.02))
    advise, neurons = advisor(), (equal(0.11), Staying(np.arange(5632), rates))
    layers = decided(blocks, advise, *neurons)
    assert layers[1].hot >= 128
    again = decided(blocks, repeat(advise.decided), *neurons)
    assert again == [replace(layer, expectation=None) for layer in layers]


def test_a_block_of_which_nothing_is_known_is_repeated(blocks: list[FfnBlock]) -> None:
    """Its compression factor is left to the options both times."""
    advise = advisor(compression=4)
    layers = decided(blocks, advise, equal(0.003), None)
    assert [layer.compression for layer in layers] == [4, None]
    again = decided(blocks, repeat(advise.decided), equal(0.003), None)
    assert again == [replace(layer, expectation=None) for layer in layers]


def test_what_is_removed_is_not_counted(blocks: list[FfnBlock]) -> None:
    first, second = decided(blocks, advisor(), equal(0.3, 4000), equal(0.003, 4000))
    assert first.reason.startswith("left dense: 30 % of the 4000 neurons that would be left active, pays below ")
    assert second.reason.startswith("0.3 % of the 4000 neurons left active, expected ")


@pytest.mark.parametrize(("dtype", "movable"), [(torch.float16, True), (torch.bfloat16, False)])
def test_what_is_not_split(blocks: list[FfnBlock], dtype: torch.dtype, movable: bool) -> None:
    """Blocks in fp16, or whose weights something else reads: what is expected is the time without a split."""
    neurons = Staying(np.arange(5632), np.random.default_rng(0).permutation(zipf_rates(5632, 0.02)))
    given = [replace(blocks[0], dtype=dtype), blocks[1]]
    whole, split = decided(given, advisor(), replace(neurons, movable=movable), neurons)
    assert whole.hot == 0 and split.hot >= 128
    assert whole.expectation is not None and split.expectation is not None
    assert whole.expectation.gain < split.expectation.gain


def test_refused_blocks_get_no_advice(blocks: list[FfnBlock]) -> None:
    (layer,) = decided([replace(blocks[0], refusal="no")], advisor(), None)
    assert (layer.reason, layer.expectation) == ("no", None)


def test_row_spread() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.0, 0.4, 0.8):
        means = 60 * np.exp(spread * rng.standard_normal(50_000))
        rows = np.bincount(np.minimum(rng.poisson(means), 5632), minlength=5633)
        assert row_spread(rows) == pytest.approx(spread, abs=0.05)
    assert row_spread(np.array([10, 0, 0])) == row_spread(np.array([0, 0, 0])) == 0.8


def test_rows() -> None:
    batch, sequence = torch.export.Dim("batch", max=64), torch.export.Dim("sequence", max=4096)
    module, x = Residual(Gated()).bfloat16(), torch.randn(2, 3, 16).bfloat16()
    program = canonical(module, x, dynamic=({0: batch, 1: sequence},))
    inputs = program_inputs(program)
    name = inputs.specs[0].name
    given = [parse_profile(f"{name}:1x1x16:1x8x16:2x16x16"), parse_profile(f"{name}:1x100x16:4x200x16:8x300x16")]
    profiles, _ = resolve_profiles(inputs, given, {})
    (block,) = find_ffn_blocks(program)
    expected = [Tokens(1, 8, 32), Tokens(100, 800, 2400)]
    assert rows_of(inputs, profiles)(block.x) == expected
    assert rows_of_inputs(inputs, profiles)(block) == expected


GATED = Widths("gated", 2048, 5632, 2048)
H200 = TARGET.model


def alike(density: float) -> np.ndarray:
    return np.full(5632, density)


def test_left_dense() -> None:
    choice = choose(H200, GATED, alike(0.11), [Tokens(1, 8192, 8192)])
    pays_below = choice.expectation.pays_below
    assert choice.facts == f"11 % active, pays below {percent(pays_below)} at 8192 tokens"
    assert (choice.decision, choice.hot) == ("dense", 0)
    assert 0.9 < choice.expectation.gain < 1.03
    assert 0.012 < pays_below < 0.022, "measured: 1.32 at 1 %, 0.99 at 2 %"
    assert [each.tokens for each in choice.expectation.times] == [1, 8192]


def test_sparse() -> None:
    choice = choose(H200, GATED, alike(0.005), [Tokens(1, 8192, 32768)])
    assert (choice.decision, choice.hot, choice.compression) == ("twell", 0, 8)
    assert choice.expectation.gain == pytest.approx(1.67, rel=0.05), "measured"
    assert choice.facts == f"0.5 % active, expected {choice.expectation.gain:.2f} times as fast at 8192 tokens"
    gains = {each.tokens: each.gain for each in choice.expectation.times}
    assert gains[1] > gains[32768] > gains[8192]


def test_profiles_of_several_sizes() -> None:
    profiles = [Tokens(1, 1, 8), Tokens(1, 16384, 16384)]
    choice = choose(H200, GATED, alike(0.01), profiles)
    assert choice.facts.endswith("times as fast at 1 and 16 384 tokens")
    alone = [choose(H200, GATED, alike(0.01), [profile]).expectation.gain for profile in profiles]
    assert choice.expectation.gain == pytest.approx((alone[0] * alone[1]) ** 0.5, rel=1e-3)
    assert choose(H200, GATED, alike(0.01), profiles[:1]).facts.endswith("at 1 token")


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
    choice = choose(H200, GATED, alike(0.0), [Tokens(8192, 8192, 8192)])
    assert choice.decision == "twell"
    assert choice.facts.startswith("0 % active, expected ")


def test_compression() -> None:
    """The more neurons of a tile fire, the more slots it needs."""
    densities = (0.005, 0.05, 0.1, 0.3)
    assert [choose_compression(alike(density)) for density in densities] == [8, 4, 2, 1]
    assert overflow(alike(0.005), 8) < 1e-4
    assert overflow(alike(0.5), 8) > 0.9
    for density in densities:
        shares = [overflow(alike(density), compression) for compression in (1, 2, 4, 8)]
        assert shares == sorted(shares)
    assert overflow(alike(0.1), 4, row_spread=0.0) < overflow(alike(0.1), 4, row_spread=1.0)


def test_overflow_is_that_of_drawn_rows() -> None:
    rng = np.random.default_rng(0)
    rates = np.sort(zipf_rates(1000, 0.1))[::-1]
    activity = np.exp(0.8 * rng.standard_normal(4000) - 0.32)
    active = rng.random((4000, 1000)) < np.minimum(rates * activity[:, None], 1)
    counts = np.add.reduceat(active, np.arange(0, 1000, 256), axis=1, dtype=np.int64)
    for compression in (4, 8):
        assert overflow(rates, compression) == pytest.approx((counts > 256 // compression - 1).mean(), abs=0.03)


def test_texts() -> None:
    texts = {0.11: "11 %", 0.0194: "1.9 %", 0.00038: "0.038 %", 1.0: "100 %", 0.0: "0 %"}
    assert {share: percent(share) for share in texts} == texts
    assert [count_text(count) for count in (1, 8192, 32768, 1000000)] == ["1", "8192", "32 768", "1 000 000"]


def test_target() -> None:
    h100 = shipped_times("h100").gpu
    assert choose_target("h200", None).gpu == "NVIDIA H200"
    assert choose_target(None, "NVIDIA H200").note == ""
    assert choose_target(None, "NVIDIA H200").gpu == "NVIDIA H200"
    default = choose_target(None, None)
    note = f"decided for {h100}, since there is no GPU here (--target-gpu changes it)"
    assert (default.gpu, default.note) == (h100, note)
    assert "since the times of NVIDIA A100 are not known" in choose_target(None, "NVIDIA A100").note
    with pytest.raises(UserError, match=r"--target-gpu h300: neither the name of a GPU nor a file; .*h100 or h200, or"):
        choose_target("h300", None)
