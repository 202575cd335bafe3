"""Hot neurons, which are active in so many rows that u of all rows is computed, on a GPU of compute capability 9.0.

Tests force chunks and the search for hot neurons, which calls as small as these would not have.
"""

from __future__ import annotations

import ctypes
import dataclasses
import statistics

import pytest
import torch

from tests.plugins import reference
from tests.plugins.calls import (
    BEST,
    GUARD_DECIDES,
    POISON,
    SM90,
    Call,
    assert_guards,
    assert_same_bits,
    needs_sm90,
    run_dense,
)
from tests.plugins.cases import BF16, FP16, HOT_BASE, Case, hot_table, make_block, unequal_block
from tests.plugins.reference import Block

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, needs_sm90]

MOST_HOT = 128  # twell::kMostHot


def make_active(block: Block, neurons: torch.Tensor, share: float) -> None:
    """Make some neurons active in such a share of the rows, about."""
    block.w_gate[neurons, 0] = -statistics.NormalDist().inv_cdf(1 - share)


def choose(d_ff: int, count: int) -> torch.Tensor:
    return torch.randperm(d_ff)[:count].sort().values


def hot_neurons(call: Call, kernels: int = SM90) -> list[int]:
    """Which neurons were hot in a call that had no dense rows."""
    function = call.lib.twell_internal_hot_neurons
    function.restype = ctypes.c_void_p
    function.argtypes = [call.lib.twell_gate.argtypes[0], ctypes.c_void_p, ctypes.c_int32]
    begin = call.workspace.data_ptr()
    place = function(call.problem, begin, kernels)
    if place is None:
        return []
    words = call.workspace[place - begin :][: 256 + 4 * MOST_HOT].view(torch.int32)
    result: list[int] = words[64 : 64 + int(words[0])].tolist()
    return result


def run(call: Call, dense_rows: int = 0) -> torch.Tensor:
    y = run_dense(call, dense_rows, SM90)
    assert_guards(call.y_buffer)
    return y


def case_id(value: object) -> str:
    return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("dense", [0.0, 0.1], ids=("none", "part"))
@pytest.mark.parametrize("case_and_count", list(hot_table()), ids=case_id)
def test_against_float64(case_and_count: tuple[Case, int], dense: float) -> None:
    case, count = case_and_count
    block = make_block(case, integers=False)
    chosen = choose(case.d_ff, count)
    make_active(block, chosen, 0.33)
    call = Call(block, case.compression)
    y = run(call, int(case.rows * dense))
    reference.assert_close(y, block)
    if dense == 0:
        hot = hot_neurons(call)
        assert hot == sorted(set(hot)) and 0 < len(hot) <= MOST_HOT
        assert set(hot) <= set(chosen.tolist()) if count > MOST_HOT else set(chosen.tolist()) <= set(hot)


def test_equal_neurons_are_not_hot() -> None:
    call = Call(make_block(dataclasses.replace(HOT_BASE, d_ff=5632, density=0.005), integers=False), 8)
    reference.assert_close(run(call), call.block)
    assert hot_neurons(call) == []


def test_hot_neurons_side_by_side() -> None:
    """Their tile overflows in every row, and they have more pairs than their chunks hold."""
    block = make_block(dataclasses.replace(HOT_BASE, d_ff=5632), integers=False)
    chosen = torch.arange(300, 420)
    make_active(block, chosen, 0.6)
    call = Call(block, 8)
    reference.assert_close(run(call), block)
    assert set(chosen.tolist()) <= set(hot_neurons(call))


def test_small_calls_do_not_look_for_them() -> None:
    block = make_block(Case(rows=4200, d_model=1024, d_ff=2816, d_out=1024, density=0.01), integers=False)
    make_active(block, choose(2816, 100), 0.4)
    call = Call(block, 8)
    y = run_dense(call, 0, BEST)
    reference.assert_close(y, block)
    assert hot_neurons(call, BEST) == []


def test_large_calls_have_them() -> None:
    block = make_block(Case(rows=16384, d_model=2048, d_ff=5632, d_out=136, density=0.003), integers=False)
    chosen = choose(5632, 100)
    make_active(block, chosen, 0.2)
    by_itself, forced = Call(block, 8), Call(block, 8)
    by_itself.mlp()
    expected = run(forced)
    assert set(chosen.tolist()) <= set(hot_neurons(by_itself, BEST))
    assert_same_bits(by_itself.y, expected)
    reference.assert_close(expected[:512], dataclasses.replace(block, x=block.x[:512]))


@pytest.mark.parametrize("activation", ["relu", "drelu"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
def test_nan_and_infinity_stay_in_their_rows(activation: str, dtype: torch.dtype) -> None:
    block = make_block(dataclasses.replace(HOT_BASE, dtype=dtype, activation=activation), integers=False)
    make_active(block, choose(1600, 60), 0.4)
    clean = Call(block, 8)
    run(clean)
    assert hot_neurons(clean)  # below, dense rows may take their memory
    dirty_rows = (0, 633, 4099)
    for row, value in zip(dirty_rows, (float("nan"), float("inf"), -float("inf")), strict=True):
        block.x[row, row % 128] = value
    y = run(Call(block, 8))
    assert torch.isnan(y[0]).all()
    reference.assert_close(y, block)
    assert torch.isfinite(y[[row for row in range(4100) if row not in dirty_rows]]).all()


@pytest.mark.parametrize("where", ["w_up", "b_up"])
def test_nan_in_one_hot_neuron(where: str) -> None:
    """A row in which it is not active does not see it."""
    block = make_block(HOT_BASE, integers=False)
    chosen = choose(1600, 60)
    make_active(block, chosen, 0.4)
    neuron = int(chosen[7])
    getattr(block, where)[neuron] = float("nan")
    call = Call(block, 8)
    y = run(call)
    assert neuron in hot_neurons(call)
    reference.assert_close(y, block)
    active = reference.gate_values(block)[:, neuron] != 0
    assert torch.isnan(y[active]).all() and torch.isfinite(y[~active]).all()


def test_fp16_does_not_overflow_between() -> None:
    """A dense fp16 block stores u and g * u, which do not fit here; y does."""
    block = make_block(dataclasses.replace(HOT_BASE, dtype=FP16, biases=""), integers=False)
    make_active(block, choose(1600, 60), 0.4)
    assert block.w_up is not None
    large = dataclasses.replace(
        block, w_gate=block.w_gate * 64, w_up=block.w_up * 32768, w_down=block.w_down * 2.0**-13
    )
    assert not torch.isfinite(reference.plain(large)).all()
    call = Call(large, 8)
    y = run(call)
    assert hot_neurons(call)
    reference.assert_close(y, large)


@pytest.mark.parametrize("step", [1, 100], ids=("all", "part"))
def test_rows_that_are_dense_by_the_guard(step: int) -> None:
    """All rows, where nothing is to be multiplied, and a part of them."""
    block = unequal_block(8192, 0.0, 0.001)
    chosen = choose(2816, 100)
    make_active(block, chosen, 0.3)
    sparse = Call(block, 8)
    run(sparse)  # before any row is dense: dense ones take the memory of hot neurons
    assert set(chosen.tolist()) <= set(hot_neurons(sparse))
    block.x[::step, 0] *= -2  # their gates, about -3 each, are about 6
    call = Call(block, 8)
    call.start_steps(GUARD_DECIDES, SM90)
    torch.cuda.synchronize()
    dense = call.dense_rows()
    assert dense[::step].all() and (dense.all() if step == 1 else dense.sum() < 8192)
    reference.assert_close(call.y, block)


def test_bitwise_repeatable() -> None:
    block = make_block(dataclasses.replace(HOT_BASE, d_ff=5632, d_model=512), integers=False)
    make_active(block, choose(5632, 100), 0.4)
    block.x[7, 3] = float("nan")
    call = Call(block, 8)
    first = run(call)
    assert hot_neurons(call)
    for _ in range(100):
        call.y.view(torch.int16).fill_(POISON)
        call.workspace.fill_(0xFF)
        call.start_steps(0, SM90)
        assert_same_bits(call.y, first)


def test_replays_choose_again() -> None:
    """A CUDA graph whose weights, and with them the hot neurons, change between replays."""
    block = make_block(HOT_BASE, integers=False)
    call = Call(block, 8)
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.start_steps(0, SM90)
    w_gate = block.w_gate.clone()
    for count in (60, 0, 90):
        chosen = choose(1600, count)
        block.w_gate.copy_(w_gate)
        make_active(block, chosen, 0.4)
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_close(call.y, block)
        assert set(chosen.tolist()) <= set(hot_neurons(call))
        assert (count == 0) == (hot_neurons(call) == [])


def test_streams_at_once() -> None:
    blocks = [make_block(dataclasses.replace(HOT_BASE, d_ff=3000), integers=False) for _ in range(3)]
    for block in blocks:
        make_active(block, choose(3000, 80), 0.3)
    calls = [Call(block, 8) for block in blocks]
    expected = [run(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(20):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                call.start_steps(0, SM90)
    torch.cuda.synchronize()
    for call, y in zip(calls, expected, strict=True):
        assert_same_bits(call.y, y)


# For compute-sanitizer: a third of all rows or none at all have hot neurons, one block of neurons or several.
SMALL = [
    (Case(rows=4100, d_model=64, d_ff=300, d_out=136, density=0.005), 60),
    (Case(rows=4096, d_model=128, d_ff=3000, d_out=8, density=0.001, dtype=FP16, activation="drelu"), 200),
]


@pytest.mark.parametrize("dense", [0, 100])
@pytest.mark.parametrize("case_and_count", SMALL, ids=case_id)
def test_sanitize(case_and_count: tuple[Case, int], dense: int) -> None:
    """What sanitize.py runs."""
    case, count = case_and_count
    block = make_block(case, integers=True, device="cpu")
    block.w_gate[choose(case.d_ff, count), 0] = -1
    call = Call(block.to("cuda"), case.compression, poison=False)
    # The packed matrix is read 16 bytes at a time: words that the gate leaves alone come along, and are not used.
    call.workspace[: call.lib.twell_packed_bytes(call.problem)].zero_()
    call.start_steps(dense, SM90)
    torch.cuda.synchronize()
    reference.assert_close(call.y.cpu(), block)
    assert dense > 0 or hot_neurons(call)
