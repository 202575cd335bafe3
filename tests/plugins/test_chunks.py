"""The up projection of many tokens by chunks, and hot neurons beside them, on a GPU of compute capability 9.0.

Tests force chunks, which blocks as small as these would not have.
"""

import dataclasses

import pytest
import torch

from tests.plugins import calls, cases, reference
from tests.plugins.calls import BEST, SM90, Call, assert_guards, assert_same_bits, run_dense, run_poisoned
from tests.plugins.cases import (
    FP16,
    HOT_BASE,
    Case,
    choose_neurons,
    chunk_table,
    hot_table,
    make_active,
    make_block,
    unequal_block,
)
from tests.plugins.reference import Block

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, calls.needs_sm90]


def run(block: Block, compression: int = 8, dense_rows: int = 0) -> torch.Tensor:
    return run_call(Call(block, compression), dense_rows)


@pytest.mark.parametrize("dense", [0.0, 0.1], ids=("none", "part"))
@pytest.mark.parametrize("case", [*chunk_table(), *cases.with_residual(chunk_table(), share=0.3)], ids=str)
def test_against_float64(case: Case, dense: float) -> None:
    block = make_block(case)
    reference.assert_close(run(block, case.compression, int(case.rows * dense)), block)


@pytest.mark.parametrize("full", [0.0, 0.03])
@pytest.mark.parametrize("density", [0.002, 0.01, 0.05])
def test_unequal_rows(full: float, density: float) -> None:
    block = unequal_block(4500, full, density)
    reference.assert_close(run(block), block)


def test_small_blocks_have_chunks_only_if_forced() -> None:
    block = make_block(Case(rows=4200, d_model=1024, d_ff=2816, d_out=1024, density=0.01, dtype=FP16))
    forced = run(block)
    without = run_dense(Call(block, 8), 0, BEST)
    assert not torch.equal(forced, without)  # another order of sums
    reference.assert_close(forced, block)
    reference.assert_close(without, block)


@pytest.mark.parametrize("dense", [0, 300])
def test_large_blocks_have_chunks(dense: int) -> None:
    block = make_block(Case(rows=4096, d_model=2048, d_ff=5632, d_out=512, density=0.005, dtype=FP16))
    by_itself, forced = Call(block, 8), Call(block, 8)
    y = run_dense(by_itself, dense, BEST)
    expected = run_dense(forced, dense, SM90)
    assert_guards(by_itself.y_buffer)
    assert_guards(forced.y_buffer)
    # A forced number of heavy rows may part those of one bucket, which are in no order.
    same = by_itself.dense_rows() == forced.dense_rows()
    calls.gate(forced, SM90)
    counts = forced.packed.view(4096, -1, 32)[:, :, 0].sum(dim=1)
    assert len(calls.level(counts)[~same].unique()) <= 1
    assert_same_bits(y[same], expected[same])


def test_rows_keep_their_bits_at_another_place() -> None:
    block = make_block(Case(rows=4500, d_model=256, d_ff=5632, density=0.005))
    expected = run(block)
    shuffled = torch.randperm(4500, device="cuda")
    block.x.copy_(block.x[shuffled].clone())
    assert_same_bits(run(block), expected[shuffled])


def test_blocks_of_neurons_without_pairs() -> None:
    """CTAs whose first weights, loaded before it is known, multiply nothing, and others afterwards do."""
    block = make_block(Case(rows=4096, d_model=4096, d_ff=7000, d_out=8, density=0.01))
    assert block.b_gate is not None
    first = slice(0, 1400)  # of five blocks
    block.w_gate[first] = 0
    block.b_gate[first] = -1
    reference.assert_close(run(block), block)


def test_weights_that_the_call_before_writes() -> None:
    """Wu is loaded before the kernel ahead has ended, but never before the call ahead has."""
    writer = Call(make_block(Case(rows=1600, d_model=256, d_ff=600, d_out=128, density=0.3)), 8)
    writer.mlp()
    block = make_block(Case(rows=4100, d_model=128, d_ff=1600, d_out=136, density=0.02))
    call = Call(dataclasses.replace(block, w_up=writer.y), 8)
    expected = run_dense(call, 0, SM90)
    assert torch.isfinite(expected).all()
    for _ in range(20):
        writer.y.fill_(float("nan"))
        writer.mlp()
        call.start_steps(0, SM90)
        assert_same_bits(call.y, expected)


# Few launches for compute-sanitizer: with and without rows that the chunks do not hold, several blocks of neurons, more
# rows than a block of the schedule takes at once.
SMALL = [
    Case(rows=4100, d_model=64, d_ff=300, d_out=136, density=0.02),
    Case(rows=4100, d_model=128, d_ff=300, d_out=72, density=0.2, dtype=FP16, activation="drelu"),
    Case(rows=4096, d_model=64, d_ff=3000, d_out=8, density=0.01, biases=""),
    Case(rows=33000, d_model=64, d_ff=40, d_out=8, density=0.03, biases=""),
    Case(rows=4100, d_model=64, d_ff=300, d_out=136, density=0.02, residual=True),
]


@pytest.mark.parametrize("dense", [0, 100])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sanitize(case: Case, dense: int) -> None:
    """What sanitize.py runs."""
    block = make_block(case, integers=True, device="cpu")
    calls.run_plain_buffers(block, lambda call: call.start_steps(dense, SM90), case.compression)


def run_call(call: Call, dense_rows: int = 0) -> torch.Tensor:
    y = run_dense(call, dense_rows, SM90)
    assert_guards(call.y_buffer)
    return y


def case_id(value: object) -> str:
    return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("dense", [0.0, 0.1], ids=("none", "part"))
@pytest.mark.parametrize("case_and_count", list(hot_table()), ids=case_id)
def test_hot_neurons_against_float64(case_and_count: tuple[Case, int], dense: float) -> None:
    case, count = case_and_count
    block = make_block(case)
    chosen = choose_neurons(case.d_ff, count)
    make_active(block, chosen, 0.33)
    call = Call(block, case.compression)
    y = run_call(call, int(case.rows * dense))
    reference.assert_close(y, block)
    if dense == 0:
        hot = calls.hot_neurons(call)
        assert hot == sorted(set(hot)) and 0 < len(hot) <= calls.MOST_HOT
        assert set(hot) <= set(chosen.tolist()) if count > calls.MOST_HOT else set(chosen.tolist()) <= set(hot)


def test_equal_neurons_are_not_hot() -> None:
    call = Call(make_block(dataclasses.replace(HOT_BASE, d_ff=5632, density=0.005)), 8)
    reference.assert_close(run_call(call), call.block)
    assert calls.hot_neurons(call) == []


def test_hot_neurons_side_by_side() -> None:
    """Their tile overflows in every row, and they have more pairs than their chunks hold."""
    block = make_block(dataclasses.replace(HOT_BASE, d_ff=5632))
    chosen = torch.arange(300, 420)
    make_active(block, chosen, 0.6)
    call = Call(block, 8)
    reference.assert_close(run_call(call), block)
    assert set(chosen.tolist()) <= set(calls.hot_neurons(call))


def test_small_calls_do_not_look_for_hot_neurons() -> None:
    block = make_block(Case(rows=4200, d_model=1024, d_ff=2816, d_out=1024, density=0.01))
    make_active(block, choose_neurons(2816, 100), 0.4)
    call = Call(block, 8)
    y = run_dense(call, 0, BEST)
    reference.assert_close(y, block)
    assert calls.hot_neurons(call, BEST) == []


def test_large_calls_have_hot_neurons() -> None:
    block = make_block(Case(rows=16384, d_model=2048, d_ff=5632, d_out=136, density=0.003))
    chosen = choose_neurons(5632, 100)
    make_active(block, chosen, 0.2)
    by_itself, forced = Call(block, 8), Call(block, 8)
    by_itself.mlp()
    expected = run_call(forced)
    assert set(chosen.tolist()) <= set(calls.hot_neurons(by_itself, BEST))
    assert_same_bits(by_itself.y, expected)
    reference.assert_close(expected[:512], dataclasses.replace(block, x=block.x[:512]))


@pytest.mark.parametrize("step", [1, 100], ids=("all", "part"))
def test_rows_that_are_dense_by_the_guard(step: int) -> None:
    """All rows, where nothing is to be multiplied, and a part of them."""
    block = unequal_block(8192, 0.0, 0.001)
    chosen = choose_neurons(2816, 100)
    make_active(block, chosen, 0.3)
    sparse = Call(block, 8)
    run_call(sparse)  # before any row is dense: dense ones take the memory of hot neurons
    assert set(chosen.tolist()) <= set(calls.hot_neurons(sparse))
    block.x[::step, 0] *= -2  # their gates, about -3 each, are about 6
    call = Call(block, 8)
    call.start_steps(calls.GUARD_DECIDES, SM90)
    torch.cuda.synchronize()
    dense = call.dense_rows()
    assert dense[::step].all() and (dense.all() if step == 1 else dense.sum() < 8192)
    reference.assert_close(call.y, block)


def test_hot_neurons_are_repeatable() -> None:
    block = make_block(dataclasses.replace(HOT_BASE, d_ff=5632, d_model=512))
    make_active(block, choose_neurons(5632, 100), 0.4)
    block.x[7, 3] = float("nan")
    call = Call(block, 8)
    calls.assert_repeatable(lambda: run_poisoned(call, 0, SM90))
    assert calls.hot_neurons(call)


def test_replays_choose_hot_neurons_again() -> None:
    """A CUDA graph whose weights, and with them the hot neurons, change between calls.replays."""
    block = make_block(HOT_BASE)
    call = Call(block, 8)
    run_call(call)
    replay = calls.replays(call, lambda: call.start_steps(0, SM90))
    w_gate = block.w_gate.clone()
    for count in (60, 0, 90):
        chosen = choose_neurons(1600, count)
        block.w_gate.copy_(w_gate)
        make_active(block, chosen, 0.4)
        reference.assert_close(replay(), block)
        assert set(chosen.tolist()) <= set(calls.hot_neurons(call))
        assert (count == 0) == (calls.hot_neurons(call) == [])


def test_hot_neurons_on_streams_at_once() -> None:
    blocks = [make_block(dataclasses.replace(HOT_BASE, d_ff=3000)) for _ in range(3)]
    for block in blocks:
        make_active(block, choose_neurons(3000, 80), 0.3)
    calls.assert_streams_agree([Call(block, 8) for block in blocks], lambda call: call.start_steps(0, SM90), runs=1)


# For compute-sanitizer: a third of all rows or none at all have hot neurons, one block of neurons or several.
SMALL_HOT = [
    (Case(rows=4100, d_model=64, d_ff=300, d_out=136, density=0.005), 60),
    (Case(rows=4096, d_model=128, d_ff=3000, d_out=8, density=0.001, dtype=FP16, activation="drelu"), 200),
]


@pytest.mark.parametrize("dense", [0, 100])
@pytest.mark.parametrize("case_and_count", SMALL_HOT, ids=case_id)
def test_sanitize_hot_neurons(case_and_count: tuple[Case, int], dense: int) -> None:
    """What sanitize.py runs."""
    case, count = case_and_count
    block = make_block(case, integers=True, device="cpu")
    block.w_gate[choose_neurons(case.d_ff, count), 0] = -1
    call = calls.run_plain_buffers(block, lambda call: call.start_steps(dense, SM90), case.compression)
    assert dense > 0 or calls.hot_neurons(call)
