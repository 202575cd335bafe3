"""Advice about the blocks of a model, and how it gets into reports."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models import Gated, Residual, blocks_of, canonical
from twellc.compiling.sizes import rows_of_blocks, rows_of_inputs
from twellc.decisions.advise import Advisor, Firing, repeat, row_spread
from twellc.decisions.choose import Tokens, percent
from twellc.decisions.targets import choose_target
from twellc.decisions.times import zipf_rates
from twellc.export.profiles import program_inputs, resolve_profiles
from twellc.export.shapes import parse_profile
from twellc.passes.decide import decide
from twellc.passes.match.find_ffn import FfnBlock, find_ffn_blocks

TARGET = choose_target("h200", None)
TOKENS = [Tokens(1, 8192, 8192)]


@pytest.fixture(scope="module")
def blocks() -> list[FfnBlock]:
    """Two blocks, as wide as measured ones."""
    module = torch.nn.Sequential(Residual(Gated()), Residual(Gated())).bfloat16()
    found = blocks_of(module, torch.randn(2, 3, 16).bfloat16())
    return [replace(block, d_model=2048, d_ff=5632, d_out=2048) for block in found]


def advisor(firing: dict[str, Firing], density: float = 0.005) -> Advisor:
    return Advisor(TARGET, firing, lambda block: TOKENS, density)


def test_what_is_known_decides(blocks: list[FfnBlock]) -> None:
    advise = advisor({"0.ffn": Firing(np.full(5632, 0.11)), "1.ffn": Firing(np.full(5632, 0.003))})
    first, second = decide(blocks, "auto", advise)
    assert (first.decision, first.matched, first.residual) == ("dense", True, False)
    assert re.fullmatch(r"left dense: 11 % active, pays below (1\.\d|2) % at 8192 tokens", first.reason)
    assert second.decision == "twell"
    assert second.reason.startswith("0.3 % active, expected 1.")
    assert second.expectation is not None and not second.expectation.assumed
    assert advise.notes([first, second]) == []


def test_all_takes_what_does_not_pay(blocks: list[FfnBlock]) -> None:
    advise = advisor({"0.ffn": Firing(np.full(5632, 0.11))})
    for layers in ("all", "0"):
        layer = decide(blocks, layers, advise)[0]
        assert layer.decision == "twell"
        assert layer.reason.startswith("11 % active, pays below ")
    assert {layer.reason for layer in decide(blocks, "none", advise)} == {"--layers none"}


def test_what_is_assumed_only_informs(blocks: list[FfnBlock]) -> None:
    advise = advisor({}, density=0.3)
    layers = decide(blocks, "auto", advise)
    assert [(layer.decision, layer.reason) for layer in layers] == [("twell", "matches")] * 2
    (note,) = advise.notes(layers)
    expectation = layers[0].expectation
    assert expectation is not None and expectation.assumed
    assert note == (
        "--layers auto rewrites every match, since no profile says how often neurons fire. With 30 % of the "
        "activations not zero, in all neurons alike, blocks are expected to be "
        f"{expectation.gain:.2f} times as fast as dense ones on an NVIDIA H200; TwELL pays below "
        f"{percent(expectation.pays_below)}"
    )
    assert advise.notes([replace(layer, expectation=None) for layer in layers]) == []


def test_widths_far_from_measured_ones(blocks: list[FfnBlock]) -> None:
    advise = advisor({})
    layers = decide([replace(blocks[0], d_model=16, d_ff=40, d_out=16)], "auto", advise)
    assert advise.notes(layers)[0] == (
        "no blocks of d_model / d_ff like 16 / 40 were measured: what is expected of them is a guess"
    )


def test_a_guess_leaves_nothing_dense(blocks: list[FfnBlock]) -> None:
    far = replace(blocks[0], d_model=16, d_ff=40, d_out=16)
    (layer,) = decide([far], "auto", advisor({"0.ffn": Firing(np.full(40, 0.5))}))
    assert (layer.decision, layer.reason, layer.hot) == ("twell", "50 % active", 0)


def test_decisions_are_repeated(blocks: list[FfnBlock]) -> None:
    rates = np.random.default_rng(0).permutation(zipf_rates(5632, 0.02))
    advise = advisor({"0.ffn": Firing(np.full(5632, 0.11)), "1.ffn": Firing(rates)})
    layers = decide(blocks, "auto", advise)
    assert layers[1].hot >= 128
    again = decide(blocks, "auto", repeat(advise.decided))
    assert again == [replace(layer, expectation=None) for layer in layers]


def test_what_was_removed_is_not_counted(blocks: list[FfnBlock]) -> None:
    firing = {"0.ffn": Firing(np.full(4000, 0.3), removed=1632), "1.ffn": Firing(np.full(4000, 0.003), removed=1632)}
    first, second = decide(blocks, "auto", advisor(firing))
    assert first.reason.startswith("left dense: 30 % of the 4000 neurons left active, pays below ")
    assert second.reason.startswith("0.3 % of the 4000 neurons left active, expected ")


def test_fp16_is_not_split(blocks: list[FfnBlock]) -> None:
    """Then no neuron has to be moved, and what is expected is the time without a split."""
    rates = np.random.default_rng(0).permutation(zipf_rates(5632, 0.02))
    advise = advisor({"0.ffn": Firing(rates), "1.ffn": Firing(rates)})
    half, own = decide([replace(blocks[0], dtype=torch.float16), blocks[1]], "auto", advise)
    assert half.hot == 0 and own.hot >= 128
    assert half.expectation is not None and own.expectation is not None
    assert half.expectation.gain < own.expectation.gain


def test_refused_blocks_get_no_advice(blocks: list[FfnBlock]) -> None:
    (layer,) = decide([replace(blocks[0], refusal="no")], "auto", advisor({}))
    assert (layer.reason, layer.expectation) == ("no", None)


def test_row_spread() -> None:
    rng = np.random.default_rng(0)
    for spread in (0.0, 0.4, 0.8):
        means = 60 * np.exp(spread * rng.standard_normal(50_000))
        rows = np.bincount(np.minimum(rng.poisson(means), 5632), minlength=5633)
        assert row_spread(rows) == pytest.approx(spread, abs=0.05)
    assert row_spread(np.array([10, 0, 0])) == row_spread(np.array([0, 0, 0])) == 0.8


def test_rows_of_blocks() -> None:
    batch, sequence = torch.export.Dim("batch", max=64), torch.export.Dim("sequence", max=4096)
    module, x = Residual(Gated()).bfloat16(), torch.randn(2, 3, 16).bfloat16()
    program = canonical(module, x, dynamic=({0: batch, 1: sequence},))
    inputs = program_inputs(program)
    name = inputs.specs[0].name
    given = [parse_profile(f"{name}:1x1x16:1x8x16:2x16x16"), parse_profile(f"{name}:1x100x16:4x200x16:8x300x16")]
    profiles, _ = resolve_profiles(inputs, given, {})
    (block,) = find_ffn_blocks(program)
    expected = [Tokens(1, 8, 32), Tokens(100, 800, 2400)]
    assert rows_of_blocks(inputs, profiles)(block) == expected
    assert rows_of_inputs(inputs, profiles)(block) == expected
