"""The guard and the dense path behind it, on a GPU: rows that are too dense for the sparse kernels, and dense blocks.

Tests force a number of rows onto the dense path, or the whole block, where they have to, so that any shape reaches it.
"""

import ctypes
import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests.plugins import calls, cases, reference
from tests.plugins.calls import BEST, GENERIC, SM90, Call, assert_guards, assert_same_bits, run_dense, run_poisoned
from tests.plugins.cases import FP16, MANY_NEURONS, Case, block_table, guard_table, make_block, unequal_block
from twellc.plugins import library

pytestmark = pytest.mark.gpu

FEWEST_ROWS_OF_CHUNKS = 4096


COUNT_BYTES = 768  # of twell::kMostCountParts words at the end of the schedule, up to the next multiple of 256


def dense_cases() -> Iterator[object]:
    for case in cases.generic_guard_table():
        yield pytest.param(case, GENERIC, id=f"generic-{case}")
    for case in guard_table():
        yield calls.on_sm90(case, BEST, id=f"sm90-{case}")
        if case.rows >= FEWEST_ROWS_OF_CHUNKS:
            yield calls.on_sm90(case, calls.CHUNKS, id=f"chunks-{case}")


@pytest.mark.parametrize("share", [1.0, 0.25, 0.0], ids=("all", "part", "none"))
@pytest.mark.parametrize(("case", "kernels"), list(dense_cases()))
def test_against_float64(case: Case, kernels: int, share: float) -> None:
    block = make_block(case)
    call = Call(block, case.compression)
    steps = run_dense(call, 0, kernels)
    reference.assert_close(steps, block)
    same = ~call.dense_rows()
    y = run_dense(call, int(case.rows * share), kernels)
    reference.assert_close(y, block)
    assert_guards(call.y_buffer)
    if kernels != calls.CHUNKS:
        same &= ~call.dense_rows()
        assert_same_bits(y[same], steps[same])


@pytest.mark.sm90
@calls.needs_sm90
@pytest.mark.parametrize("case", [case for case in guard_table() if case.d_model % 64 == 0], ids=str)
def test_early_decision_changes_no_bit(case: Case) -> None:
    """Where the calls.gate's count tells that all rows are dense, the schedule is left out, and nothing else."""
    block = make_block(case)
    call = Call(block, case.compression)
    late = run_dense(call, case.rows)
    assert not calls.is_early(call)
    early = run_dense(call, calls.EARLY)
    assert calls.is_early(call)
    assert_same_bits(early, late)
    assert_guards(call.y_buffer)


@pytest.mark.sm90
@calls.needs_sm90
@pytest.mark.parametrize("density", [0.0, 0.005, 0.03, 0.1, 1.0])
@pytest.mark.parametrize(("rows", "d_ff"), [(1921, 2816), (2048, 5632), (300, 600), (17, 8)])
def test_count_of_the_gate(rows: int, d_ff: int, density: float) -> None:
    """What the calls.gate counts for the guard: of each tile of a row eight non-zeros at most."""
    call = Call(make_block(Case(rows=rows, d_model=256, d_ff=d_ff, density=density)), 8)
    calls.gate(call, SM90)
    counts = call.packed.view(rows, -1, 32)[:, :, 0]
    call.workspace.fill_(0)
    call.start_steps(calls.GUARD_DECIDES)
    torch.cuda.synchronize()
    schedule_bytes = call.lib.twell_internal_schedule_bytes
    schedule_bytes.restype, schedule_bytes.argtypes = ctypes.c_size_t, call.lib.twell_packed_bytes.argtypes
    counted = call.schedule()[: schedule_bytes(call.problem)][-COUNT_BYTES:].view(torch.int32)
    assert counted.sum() == counts.clamp(max=8).sum()


@pytest.mark.sm90
@calls.needs_sm90
def test_early_decision_is_taken() -> None:
    """A dense call is decided early, a sparse one is not, nor is one with some full rows."""
    for full, density, expected in ((0.0, 0.3, True), (1.0, 0.5, True), (0.0, 0.005, False), (0.2, 0.005, False)):
        call = Call(unequal_block(4096, full, density), 8)
        rows = calls.heavy_rows(call, BEST)
        assert calls.is_early(call) == expected
        assert (rows == 4096) == expected
        reference.assert_close(call.y, call.block)


@pytest.mark.sm90
@calls.needs_sm90
@pytest.mark.parametrize("case", list(block_table()), ids=str)
def test_dense_block_against_float64(case: Case) -> None:
    block = make_block(case)
    call = Call(block, case.compression)
    reference.assert_close(run_dense(call, calls.DENSE_BLOCK), block)
    assert_guards(call.y_buffer)


@pytest.mark.sm90
@calls.needs_sm90
def test_small_calls_are_dense_blocks() -> None:
    """What mlp() does with few rows, or with narrow ones, is the dense block, bit by bit; large calls are none.

    But for few rows with many neurons, if they are sparse: see below.
    """
    gated = ((129, 256, 600), (257, 256, 600), (300, 2048, 5632), (2048, 64, 600), (65, 64, 6400), (6000, 1024, 4096))
    plain = ((65, 256, 600), (65, 64, 6400), (128, 1024, 4096), (3000, 1536, 6144))
    chosen = [Case(rows, d_model, d_ff, density=0.01) for rows, d_model, d_ff in gated]
    chosen += [Case(rows, d_model, d_ff, density=0.01, gated=False) for rows, d_model, d_ff in plain]
    for case in chosen:
        block = make_block(case)
        call = Call(block, 8)
        assert_same_bits(call.run(), run_dense(call, calls.DENSE_BLOCK))
    for is_gated, d_model in ((True, 1088), (False, 1600)):
        large = Call(make_block(Case(9000, d_model, 2816, density=0.001, gated=is_gated)), 8)
        large.mlp()
        assert large.dense_rows().sum() == 0


@pytest.mark.sm90
@calls.needs_sm90
@pytest.mark.parametrize("gated", [True, False], ids=("gated", "plain"))
@pytest.mark.parametrize(
    ("rows", "d_ff", "density", "heavy", "skips"),
    [
        (17, MANY_NEURONS, 0.004, 0, True),
        (33, MANY_NEURONS, 0.004, 0, True),
        (50, 16384, 0.005, 0, True),
        (64, MANY_NEURONS, 0.004, 0, True),
        (64, MANY_NEURONS, 0.05, 0, False),
        (64, MANY_NEURONS, 0.001, 2000, False),
        (65, MANY_NEURONS, 0.001, 0, False),
    ],
)
def test_down_projection_of_a_dense_block_skips_inactive_neurons(
    rows: int, d_ff: int, density: float, heavy: int, skips: bool, gated: bool
) -> None:
    """Which one is taken shows in the last bits, since two large terms that cancel make the order of sums matter."""
    block = make_block(Case(rows, 128, d_ff, 264, density=density, gated=gated, biases=""))
    block.x[:, 7] = 0
    block.x[rows // 2, 7] = 8
    block.w_gate[:heavy, 7] = 1
    one, other = 100, 5000
    block.w_gate[one] = 0
    block.w_gate[one, 0] = 4
    for weights in (block.w_gate, block.w_up):
        if weights is not None:
            weights[other] = weights[one]
    block.w_down[one] = 1000
    block.w_down[other] = -1000
    call = Call(block, 8)
    dense = run_dense(call, calls.DENSE_BLOCK)
    call.y.view(torch.int16).fill_(calls.POISON)
    call.workspace.fill_(0xFF)
    call.mlp()
    torch.cuda.synchronize()
    assert torch.isfinite(call.y).all()
    assert torch.equal(call.y, dense) != skips


@pytest.mark.parametrize("kernels", calls.KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 63])
def test_few_dense_rows(rows: int, kernels: int) -> None:
    block = make_block(Case(rows=300, d_model=128, density=0.1))
    reference.assert_close(run_dense(Call(block, 8), rows, kernels), block)


# Few launches for compute-sanitizer.
SMALL = [
    Case(rows=90, d_model=64, d_ff=300, d_out=136, density=0.02),
    Case(rows=90, d_model=64, d_ff=300, d_out=136, density=0.3, dtype=FP16, biases=""),
    Case(rows=70, d_model=72, d_ff=600, d_out=264, density=0.05, gated=False),
    Case(rows=150, d_model=128, d_ff=130, d_out=8, density=0.5, activation="drelu"),
    # Four parts of sums.
    Case(rows=70, d_model=64, d_ff=5632, d_out=136, density=0.2, biases=""),
    # Tall tiles.
    Case(rows=200, d_model=192, d_ff=2185, d_out=72, density=0.2),
]
SMALL += cases.with_residual(SMALL)


@pytest.mark.parametrize(
    ("kernels", "share"), calls.paths(all=1.0, part=0.25, none=0.0, block=calls.DENSE_BLOCK, early=calls.EARLY)
)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sanitize(case: Case, kernels: int, share: float | calls.Run) -> None:
    """What sanitize.py runs."""
    rows = share if isinstance(share, calls.Run) else int(case.rows * share)
    block = make_block(case, integers=True, device="cpu")
    calls.run_plain_buffers(block, lambda call: call.start_steps(rows, kernels), case.compression)


@pytest.mark.parametrize("kernels", [*calls.KERNELS, calls.on_sm90(calls.CHUNKS, id="chunks")])
def test_decision(kernels: int) -> None:
    """No row of a sparse call is dense, all of a dense one are, and of a mixed one a part with all that are full."""
    assert calls.heavy_rows(Call(unequal_block(2048, 0.0, 0.001), 8), kernels) == 0
    assert calls.heavy_rows(Call(unequal_block(2048, 0.0, 0.5), 8), kernels) == 2048
    assert calls.heavy_rows(Call(unequal_block(2048, 1.0, 0.5), 8), kernels) == 2048
    mixed = unequal_block(8192, 0.04, 0.001)
    call = Call(mixed, 8)
    call.start_steps(calls.GUARD_DECIDES, kernels)
    torch.cuda.synchronize()
    y = call.y.clone()
    full = (reference.gate_values(mixed) != 0).sum(dim=1) > 1000
    assert 0 < full.sum() < 8192 // 4
    assert call.dense_rows()[full].all()
    assert call.dense_rows().sum() <= 8192 // 4
    reference.assert_close(y, mixed)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("full", [0.0, 0.05, 0.5])
def test_any_density(density: float, full: float) -> None:
    block = unequal_block(700, full, min(max(density, 1e-6), 1 - 1e-6))
    reference.assert_close(Call(block, 8).run(), block)
    call = Call(block, 8)
    calls.heavy_rows(call, GENERIC)
    reference.assert_close(call.y, block)


@pytest.mark.parametrize("kernels", [*calls.KERNELS, calls.on_sm90(calls.CHUNKS, id="chunks")])
@pytest.mark.parametrize("many", [False, True], ids=("few", "many"))
@pytest.mark.parametrize("d_ff", [8, 63, 64, 65, 100, 256, 600, 5632])
def test_rows_without_a_list(d_ff: int, many: bool, kernels: int) -> None:
    """Rows of any density are right also if none is dense that need not be, on both sides of what a list holds."""
    most = 64 * -(-d_ff // library.TILE)
    counts = [0, 1, 2, *(min(count, d_ff) for count in (most - 1, most, most + 1, most * 9 // 8 + 1, d_ff))]
    case = Case(rows=4200, d_model=192, d_ff=d_ff, d_out=136, biases="ud")
    block = make_block(case)
    active = torch.stack([torch.randperm(d_ff, device="cuda") < count for count in counts], dim=1)
    size = 0.5 + torch.rand(active.shape, device="cuda")
    kind = torch.arange(case.rows, device="cuda") % len(counts)
    if not many:
        kind[torch.arange(case.rows, device="cuda") % 50 != 0] = 1
    block.w_gate.zero_()
    block.w_gate[:, : len(counts)] = torch.where(active, size, -size).to(case.dtype)
    block.x[:, : len(counts)] = torch.nn.functional.one_hot(kind, len(counts)).to(case.dtype)
    call = Call(block, 8)
    for rows in (0, calls.GUARD_DECIDES):
        y = run_dense(call, 0, kernels) if rows == 0 else run_poisoned(call, rows, kernels)
        reference.assert_close(y, block)
        assert_guards(call.y_buffer)


def test_any_d_model_is_guarded() -> None:
    """mlp() has a dense path for a d_model that the kernels of compute capability 9.0 do not take."""
    block = make_block(Case(rows=9000, d_model=1096, d_ff=2816, d_out=72, density=0.5))
    call = Call(block, 8)
    reference.assert_close(call.run(), block)
    assert call.dense_rows().all()


@pytest.mark.parametrize(
    ("kernels", "dense_rows"),
    [
        *calls.paths(guard=calls.GUARD_DECIDES, block=calls.DENSE_BLOCK),
        calls.on_sm90(calls.CHUNKS, calls.GUARD_DECIDES, id="chunks"),
    ],
)
@pytest.mark.parametrize(("full", "density"), [(0.04, 0.002), (0.0, 0.3), (0.0, 0.02)])
def test_bitwise_repeatable(full: float, density: float, kernels: int, dense_rows: int | calls.Run) -> None:
    block = unequal_block(4096, full, density)
    block.x[7, 3] = float("nan")
    call = Call(block, 8)
    first = run_poisoned(call, dense_rows, kernels)
    dense = call.dense_rows()
    assert dense.any()
    for _ in range(100):
        assert_same_bits(run_poisoned(call, dense_rows, kernels), first)
        assert torch.equal(call.dense_rows(), dense)


@pytest.mark.parametrize("kernels", calls.KERNELS)
def test_cuda_graph_decides_at_each_replay(kernels: int) -> None:
    blocks = [unequal_block(2048, full, density) for full, density in ((0.0, 0.001), (0.0, 0.5), (0.04, 0.001))]
    call = Call(dataclasses.replace(blocks[0], x=blocks[0].x.clone()), 8)
    replay = calls.replays(call, lambda: call.start_steps(calls.GUARD_DECIDES, kernels))
    counts = set()
    for block in [*blocks, *reversed(blocks)]:
        call.block.x.copy_(block.x)
        call.block.w_gate.copy_(block.w_gate)
        reference.assert_close(replay(), call.block)
        counts.add(int(call.dense_rows().sum()))
    assert {0, 2048} <= counts


@pytest.mark.parametrize(("kernels", "dense_rows"), calls.paths(guard=calls.GUARD_DECIDES, block=calls.DENSE_BLOCK))
def test_streams_at_once(kernels: int, dense_rows: int | calls.Run) -> None:
    several = [Call(unequal_block(1500, full, density), 8) for full, density in ((0.0, 0.3), (0.05, 0.002), (0.0, 0.6))]
    calls.assert_streams_agree(several, lambda call: call.start_steps(dense_rows, kernels))


@pytest.mark.parametrize("kernels", calls.KERNELS)
def test_rows_keep_their_bits_at_another_place(kernels: int) -> None:
    """A dense row's result depends on nothing but the row."""
    block = unequal_block(2048, 0.0, 0.5)
    expected = run_dense(Call(block, 8), 2048, kernels)
    shuffled = torch.randperm(2048, device="cuda")
    block.x.copy_(block.x[shuffled].clone())
    assert_same_bits(run_dense(Call(block, 8), 2048, kernels), expected[shuffled])
