"""Rows that the up projection takes without waiting for the schedule, on a GPU of compute capability 9.0.

Up to a number of non-zeros a row is such a one; with more, its rest is computed in units. x is one-hot in its first
columns, so that the weights of the gate say which neurons are active.
"""

import itertools

import pytest
import torch

from tests.plugins import calls, reference
from tests.plugins.calls import BEST, GENERIC, Call, assert_guards, assert_same_bits, gate, run_dense, run_poisoned
from tests.plugins.cases import BF16, FP16, Case, make_block, unequal_block
from tests.plugins.reference import Block

pytestmark = [pytest.mark.gpu, pytest.mark.sm90, calls.needs_sm90]

D_MODEL = 192
KINDS = 64  # of rows

# Around units of 32, direct rows (below 64 or 128), and rows that need no list of words (below 512 or 1024), and of
# more non-zeros than a row's list holds.
COUNTS = [0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513]
COUNTS += [600, 1023, 1024, 1025, 1407, 1408, 1409, 2000]


def patterned_block(d_ff: int, rows: int, dtype: torch.dtype, *, spread: bool, device: str = "cuda") -> Block:
    """Draw a block with rows of each number of non-zeros, either anywhere or side by side."""
    case = Case(rows=rows, d_model=D_MODEL, d_ff=d_ff, d_out=136, biases="ud", dtype=dtype)
    block = make_block(case, device=device)
    active = torch.zeros((d_ff, KINDS), dtype=torch.bool, device=device)
    for kind in range(KINDS):
        count = min(COUNTS[kind % len(COUNTS)], d_ff)
        begin = int(torch.randint(0, d_ff - count + 1, ()))
        neurons = torch.randperm(d_ff)[:count] if spread else torch.arange(begin, begin + count)
        active[neurons, kind] = True
    size = 0.5 + torch.rand((d_ff, KINDS), device=device)
    block.w_gate.zero_()
    block.w_gate[:, :KINDS] = torch.where(active, size, -size).to(dtype)
    block.x[:, :KINDS] = torch.nn.functional.one_hot(torch.arange(rows, device=device) % KINDS, KINDS).to(dtype)
    return block


def run_guarded(call: Call) -> torch.Tensor:
    y = run_poisoned(call, calls.GUARD_DECIDES)
    assert_guards(call.y_buffer)
    return y


@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("spread", [True, False], ids=("spread", "together"))
@pytest.mark.parametrize(
    ("d_ff", "rows"),
    [
        *itertools.product((5632,), (257, 1000, 2049, 4095)),
        *itertools.product((8, 256, 257, 600, 2816, 8448, 11008, 23560), (300,)),
    ],
)
def test_rows_of_any_number_of_nonzeros(d_ff: int, rows: int, spread: bool, compression: int) -> None:
    block = patterned_block(d_ff, rows, (BF16, FP16)[rows % 2], spread=spread)
    call = Call(block, compression)
    steps = run_dense(call, 0, GENERIC)  # without direct rows; the gate's sums are exact
    sparse = ~call.dense_rows()
    for share in (0.0, 0.1):
        y = run_dense(call, int(rows * share))
        reference.assert_close(y, block)
        same = sparse & ~call.dense_rows()
        # With few neurons, over a quarter of the rows have more than a list holds: then all rows are dense.
        assert same.any() == (d_ff not in (256, 257, 600))
        assert_same_bits(y[same], steps[same])
    for y in (run_dense(call, rows), run_guarded(call)):
        reference.assert_close(y, block)


@pytest.mark.parametrize("tokens", [257, 2048, 4095])
def test_every_row_once_heaviest_first(tokens: int) -> None:
    call = Call(patterned_block(5632, tokens, BF16, spread=True), 8)
    gate(call, BEST)
    counts = call.packed.view(tokens, -1, 32)[:, :, 0] & 0xFFFF
    run_dense(call, 0)
    rows, order_counts = call.row_order().T
    assert torch.equal(rows.sort().values, torch.arange(tokens, device="cuda"))
    totals = counts.sum(dim=1)
    key = calls.level(totals)[rows]
    assert (key[1:] <= key[:-1]).all(), "a heavier row comes after a lighter one"
    assert torch.equal(order_counts, totals[rows].long())


def test_columns_in_several_launches() -> None:
    """Where w_up is larger than the L2 cache, a list holds the sums of the launches before."""
    case = Case(rows=300, d_model=8192, d_ff=8192, d_out=64, density=0.01, biases="u")
    block = make_block(case)
    call = Call(block, 8)
    steps = run_dense(call, 0)
    assert not call.dense_rows().any()
    reference.assert_close(steps, block)
    y = run_dense(call, 30)
    reference.assert_close(y, block)
    same = ~call.dense_rows()
    assert_same_bits(y[same], steps[same])


def test_every_decision() -> None:
    """Rows may be direct, or have to wait for a decision, for none, a part or all, or all are dense at once."""
    seen = set()
    for full, density in itertools.product((0.0, 0.05, 0.2), (0.002, 0.01, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.3)):
        block = unequal_block(2048, full, density)
        call = Call(block, 8)
        heavy = calls.heavy_rows(call, BEST)
        seen.add("early" if calls.is_early(call) else "none" if heavy == 0 else "all" if heavy == 2048 else "part")
        y = call.y.clone()
        reference.assert_close(y, block)
        assert_same_bits(run_guarded(call), y)
    assert seen == {"early", "none", "part", "all"}


def test_bitwise_repeatable() -> None:
    call = Call(patterned_block(5632, 2000, BF16, spread=True), 8)
    first = run_dense(call, 0)
    part = run_dense(call, 200)
    rows_that_stay = ~call.dense_rows()
    for _ in range(100):
        call.y.view(torch.int16).fill_(calls.POISON)
        call.start_steps(0)
        assert_same_bits(call.y, first)
    for _ in range(20):
        # Which of a bucket's rows are dense differs, as the number has been forced.
        again = run_dense(call, 200)
        rows_that_stay &= ~call.dense_rows()
        assert_same_bits(again[rows_that_stay], part[rows_that_stay])


def test_workspace_of_another_call() -> None:
    """What a call has left there says nothing to the next one, also within a graph."""
    sparse, dense = unequal_block(2048, 0.0, 0.005), unequal_block(2048, 0.0, 0.4)
    several = [Call(block, 8) for block in (sparse, dense)]
    several[1].workspace = several[0].workspace
    expected = [run_guarded(call) for call in several]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (*several, *several):
            call.start_steps(calls.GUARD_DECIDES)
    for _ in range(10):
        for call in several:
            call.y.view(torch.int16).fill_(calls.POISON)
        graph.replay()
        torch.cuda.synchronize()
        for call, y in zip(several, expected, strict=True):
            assert_same_bits(call.y, y)


def test_nan_stays_in_its_row() -> None:
    block = patterned_block(5632, 1000, BF16, spread=True)
    rows = (3, 10, 40)
    for row in rows:
        block.x[row, 100] = float("nan")
    y = run_dense(Call(block, 8), 0)
    reference.assert_close(y, block)
    assert torch.isfinite(y[[row for row in range(1000) if row not in rows]]).all()


@pytest.mark.parametrize("dense_rows", [0, 20, calls.GUARD_DECIDES])
@pytest.mark.parametrize("spread", [True, False], ids=("spread", "together"))
def test_sanitize(spread: bool, dense_rows: int | calls.Run) -> None:
    """What sanitize.py runs."""
    block = patterned_block(2816, 90, BF16, spread=spread, device="cpu")
    calls.run_plain_buffers(block, lambda call: call.start_steps(dense_rows))
