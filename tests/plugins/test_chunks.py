"""The up projection of many tokens by chunks, on a GPU of compute capability 9.0.

Tests force chunks, which blocks as small as these would not have.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.plugins import reference
from tests.plugins.calls import (
    BEST,
    POISON,
    SM90,
    Call,
    assert_guards,
    assert_same_bits,
    gate,
    level,
    needs_sm90,
    run_dense,
)
from tests.plugins.cases import BF16, FP16, Case, chunk_table, make_block, unequal_block, with_residual
from tests.plugins.reference import Block

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, needs_sm90]


def run(block: Block, compression: int = 8, dense_rows: int = 0) -> torch.Tensor:
    call = Call(block, compression)
    y = run_dense(call, dense_rows, SM90)
    assert_guards(call.y_buffer)
    return y


@pytest.mark.parametrize("dense", [0.0, 0.1], ids=("none", "part"))
@pytest.mark.parametrize("case", [*chunk_table(), *with_residual(chunk_table(), share=0.3)], ids=str)
def test_against_float64(case: Case, dense: float) -> None:
    block = make_block(case, integers=False)
    reference.assert_close(run(block, case.compression, int(case.rows * dense)), block)


@pytest.mark.parametrize("full", [0.0, 0.03])
@pytest.mark.parametrize("density", [0.002, 0.01, 0.05])
def test_unequal_rows(full: float, density: float) -> None:
    block = unequal_block(4500, full, density)
    reference.assert_close(run(block), block)


def test_small_blocks_have_chunks_only_if_forced() -> None:
    block = make_block(Case(rows=4200, d_model=1024, d_ff=2816, d_out=1024, density=0.01, dtype=FP16), integers=False)
    forced = run(block)
    without = run_dense(Call(block, 8), 0, BEST)
    assert not torch.equal(forced, without)  # another order of sums
    reference.assert_close(forced, block)
    reference.assert_close(without, block)


@pytest.mark.parametrize("dense", [0, 300])
def test_large_blocks_have_chunks(dense: int) -> None:
    block = make_block(Case(rows=4096, d_model=2048, d_ff=5632, d_out=512, density=0.005, dtype=FP16), integers=False)
    by_itself, forced = Call(block, 8), Call(block, 8)
    y = run_dense(by_itself, dense, BEST)
    expected = run_dense(forced, dense, SM90)
    assert_guards(by_itself.y_buffer)
    assert_guards(forced.y_buffer)
    # A forced number of heavy rows may part those of one bucket, which are in no order.
    same = by_itself.dense_rows() == forced.dense_rows()
    gate(forced, SM90)
    counts = forced.packed.view(4096, -1, 32)[:, :, 0].sum(dim=1)
    assert len(level(counts)[~same].unique()) <= 1
    assert_same_bits(y[same], expected[same])


def test_rows_keep_their_bits_at_another_place() -> None:
    block = make_block(Case(rows=4500, d_model=256, d_ff=5632, density=0.005), integers=False)
    expected = run(block)
    shuffled = torch.randperm(4500, device="cuda")
    block.x.copy_(block.x[shuffled].clone())
    assert_same_bits(run(block), expected[shuffled])


@pytest.mark.parametrize("activation", ["relu", "drelu"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
def test_nan_and_infinity_stay_in_their_rows(activation: str, dtype: torch.dtype) -> None:
    case = Case(rows=4100, d_model=128, d_ff=1600, density=0.02, dtype=dtype, activation=activation)
    block = make_block(case, integers=False)
    dirty_rows = (0, 633, 4099)
    for row, value in zip(dirty_rows, (float("nan"), float("inf"), -float("inf")), strict=True):
        block.x[row, row % 128] = value
    y = run(block)
    assert torch.isnan(y[0]).all()
    reference.assert_close(y, block)
    assert torch.isfinite(y[[row for row in range(4100) if row not in dirty_rows]]).all()


@pytest.mark.parametrize("where", ["w_up", "b_up"])
def test_nan_in_one_neuron(where: str) -> None:
    block = make_block(Case(rows=4100, d_model=128, d_ff=600, density=0.05), integers=False)
    getattr(block, where)[300] = float("nan")
    y = run(block)
    reference.assert_close(y, block)
    active = reference.gate_values(block)[:, 300] != 0
    assert active.any() and not active.all()
    assert torch.isnan(y[active]).all() and torch.isfinite(y[~active]).all()


def test_inactive_neurons_add_nothing() -> None:
    """Where a dense block computes 0 * inf = NaN, the contract is 0."""
    block = make_block(Case(rows=4100, d_model=128, d_ff=600, density=0.05), integers=False)
    assert block.b_gate is not None and block.w_up is not None
    inactive = [0, 255, 256, 599]
    block.w_gate[inactive] = 0
    block.b_gate[inactive] = -1
    block.w_up[inactive] = float("inf")
    block.w_down[inactive] = float("nan")
    y = run(block)
    assert torch.isfinite(y).all()
    reference.assert_close(y, block)


def test_fp16_does_not_overflow_between() -> None:
    """A dense fp16 block stores u and g * u, which do not fit here; y does."""
    block = make_block(Case(rows=4100, d_model=128, dtype=FP16, density=0.05, biases=""), integers=False)
    assert block.w_up is not None
    large = dataclasses.replace(
        block, w_gate=block.w_gate * 64, w_up=block.w_up * 32768, w_down=block.w_down * 2.0**-13
    )
    assert not torch.isfinite(reference.plain(large)).all()
    y = run(large)
    assert torch.isfinite(y).all()
    reference.assert_close(y, large)


@pytest.mark.parametrize(("full", "density"), [(0.0, 0.005), (0.04, 0.01), (0.0, 0.05)])
def test_bitwise_repeatable(full: float, density: float) -> None:
    """Also where the chunks do not hold all rows."""
    block = unequal_block(4096, full, density)
    block.x[7, 3] = float("nan")
    call = Call(block, 8)
    first = run_dense(call, 0, SM90)
    for _ in range(100):
        call.y.view(torch.int16).fill_(POISON)
        call.workspace.fill_(0xFF)
        call.start_steps(0, SM90)
        assert_same_bits(call.y, first)


def test_blocks_of_neurons_without_pairs() -> None:
    """CTAs whose first weights, loaded before it is known, multiply nothing, and others afterwards do."""
    block = make_block(Case(rows=4096, d_model=4096, d_ff=7000, d_out=8, density=0.01), integers=False)
    assert block.b_gate is not None
    first = slice(0, 1400)  # of five blocks
    block.w_gate[first] = 0
    block.b_gate[first] = -1
    reference.assert_close(run(block), block)


def test_weights_that_the_call_before_writes() -> None:
    """Wu is loaded before the kernel ahead has ended, but never before the call ahead has."""
    writer = Call(make_block(Case(rows=1600, d_model=256, d_ff=600, d_out=128, density=0.3), integers=False), 8)
    writer.mlp()
    block = make_block(Case(rows=4100, d_model=128, d_ff=1600, d_out=136, density=0.02), integers=False)
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
    call = Call(block.to("cuda"), case.compression, poison=False)
    # The packed matrix is read 16 bytes at a time: words that the gate leaves alone come along, and are not used.
    call.workspace[: call.lib.twell_packed_bytes(call.problem)].zero_()
    call.start_steps(dense, SM90)
    torch.cuda.synchronize()
    reference.assert_close(call.y.cpu(), block)
