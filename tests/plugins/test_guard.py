"""The guard and the dense path behind it, on a GPU: rows that are too dense for the sparse kernels, and dense blocks.

Tests force a number of rows onto the dense path, or the whole block, where they have to, so that any shape reaches it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.plugins import reference
from tests.plugins.reference import Block
from tests.plugins.test_gate_kernels import GENERIC, SM90, gate, needs_sm90
from tests.plugins.test_kernels import (
    BEST,
    BF16,
    FP16,
    MANY_NEURONS,
    POISON,
    Call,
    Case,
    assert_guards,
    assert_same_bits,
    leave_out_lost_gates,
    make_block,
    with_residual,
)
from tests.plugins.test_schedule import count_without_list
from twellc.plugins import library

pytestmark = pytest.mark.gpu

# Like BEST, and from 4096 rows on with chunks, also in calls that are too small for them.
CHUNKS = SM90
FEWEST_ROWS_OF_CHUNKS = 4096

# twell_internal_dense: not a number of rows.
GUARD_DECIDES = -1
DENSE_BLOCK = -3
EARLY = -4  # all rows, as if the gate's count had told so
SPLIT = -5  # the first neurons as a dense block, the others by the two steps

COUNT_BYTES = 768  # of twell::kMostCountParts words at the end of the schedule, up to the next multiple of 256


def on_sm90(*values: object, id: str | None = None) -> object:
    return pytest.param(*values, id=id, marks=[pytest.mark.sm90, needs_sm90])


KERNELS = [pytest.param(GENERIC, id="generic"), on_sm90(BEST, id="sm90")]


def paths(**rows: float) -> list[object]:
    """Give pairs of kernels and rows, by name; only compute capability 9.0 has dense blocks and counts early."""
    return [
        *(
            pytest.param(GENERIC, count, id=f"generic-{name}")
            for name, count in rows.items()
            if count not in (DENSE_BLOCK, EARLY)
        ),
        *(on_sm90(BEST, count, id=f"sm90-{name}") for name, count in rows.items()),
    ]


def run_poisoned(call: Call, rows: int, kernels: int = BEST) -> torch.Tensor:
    """Run the two steps where nothing has been written before."""
    return call.poisoned(lambda: call.start_steps(rows, kernels))


def run_dense(call: Call, rows: int, kernels: int = BEST) -> torch.Tensor:
    """Force the heaviest rows, all, or the whole block onto the dense path; more only if they have no list."""
    y = run_poisoned(call, rows, kernels)
    tokens = call.problem.tokens
    if rows in (DENSE_BLOCK, EARLY):
        expected = tokens
    else:
        expected = max(rows, count_without_list(call.row_order()[:, 1], -(-call.problem.d_ff // library.TILE)))
        expected = expected if expected <= -(-tokens // 4) else tokens
    assert call.dense_rows_of_steps().sum() == expected
    return y


def assert_rows_stay_apart(case: Case, dense_rows: int, kernels: int, dirty_rows: tuple[int, int, int]) -> None:
    """Put NaN, infinity and -infinity into a row of x each, and look for them in all rows of y."""
    block = make_block(case, integers=False)
    x = block.x.clone()
    for row, column, value in zip(dirty_rows, (71, 5, 0), ("nan", "inf", "-inf"), strict=True):
        x[row, column] = float(value)
    dirty = dataclasses.replace(block, x=x)
    y = run_dense(Call(dirty, 8), dense_rows, kernels)
    assert torch.isnan(y[dirty_rows[0]]).all()
    reference.assert_close(y, dirty)
    clean = [row for row in range(case.rows) if row not in dirty_rows]
    assert torch.isfinite(y[clean]).all()


def without_residual() -> Iterator[Case]:
    """Cases for the dense path: d_model is a multiple of 64 wherever there is an up projection."""
    dtypes = itertools.cycle((BF16, FP16))
    base = Case(rows=300, d_model=192, d_ff=600, d_out=136)
    # Around the blocks of tokens.
    for rows in (257, 263, 264, 265, 352, 511, 513, 1000, 2049):
        yield dataclasses.replace(base, rows=rows, density=0.2, dtype=next(dtypes))
    for d_model, dtype in itertools.product((64, 128, 320, 2048), (BF16, FP16)):
        yield dataclasses.replace(base, d_model=d_model, dtype=dtype, density=0.05)
    for d_ff, dtype in itertools.product((1, 8, 255, 256, 257, 1500, 5632), (BF16, FP16)):
        yield dataclasses.replace(base, d_ff=d_ff, dtype=dtype, density=0.1)
    for d_out, dtype in itertools.product((8, 64, 128, 248, 264, 2056), (BF16, FP16)):
        yield dataclasses.replace(base, d_out=d_out, dtype=dtype, density=0.2)
    # Tiles that have been spilled, and others, of each compression.
    for density, compression in itertools.product((0.0, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0), (1, 2, 4, 8)):
        yield dataclasses.replace(base, density=density, compression=compression, dtype=next(dtypes), d_ff=1500)
    kinds = [(True, name) for name in ("relu", "relu2", "fatrelu", "drelu")]
    kinds += [(False, name) for name in ("relu", "relu2", "fatrelu")]
    for (gated, activation), dtype, biases in itertools.product(kinds, (BF16, FP16), ("", "gud")):
        biases = biases if gated else biases.replace("u", "")
        yield dataclasses.replace(
            base, gated=gated, activation=activation, dtype=dtype, biases=biases, rows=700, density=0.1
        )
    for biases in ("g", "u", "d"):
        yield dataclasses.replace(base, biases=biases, density=0.2, dtype=next(dtypes))
    yield dataclasses.replace(base, gated=False, d_model=72, density=0.2)  # no up projection: any d_model
    # Every number of tokens in a block on 132 multiprocessors, several tiles a cluster: rows by the cost of tilings
    # (matmul_sm90.h). That every tiling is reached is a test in test_routes.py.
    many: tuple[int, ...] = (257, 321, 337, 385, 449, 513, 577, 641, 705, 769, 833, 897, 961, 1057, 1089, 1201, 1217)
    many += (1297, 1345, 1441, 1489, 1537, 1601, 1665, 1729, 1793, 1857, 1921, 1985, 2500, 3557, 5000)
    for rows in many:
        yield Case(rows=rows, d_model=256, d_ff=5632, d_out=2048, density=0.2, biases="", dtype=next(dtypes))
    yield Case(rows=2048, d_model=2048, d_ff=5632, d_out=2048, density=0.9, biases="")
    yield Case(rows=600, d_model=4096, d_ff=11008, d_out=4096, density=0.05, biases="", dtype=FP16)
    yield Case(rows=2180, d_model=64, d_ff=328, d_out=8, density=0.3)


def table() -> Iterator[Case]:
    """Cases for the dense path, with and without a residual."""
    yield from without_residual()
    yield from with_residual(without_residual(), share=0.4)


def any_d_model_table() -> Iterator[Case]:
    """Cases for the generic dense path."""
    yield from table()
    dtypes = itertools.cycle((BF16, FP16))
    base = Case(rows=300, d_model=200, d_ff=600, d_out=136, density=0.2)
    for d_model in (8, 24, 40, 72, 264, 2056):
        yield dataclasses.replace(base, d_model=d_model, dtype=next(dtypes))
    # Around the blocks of tokens; one slice, as many as stages, and more.
    for rows in (383, 384, 385, 1100):
        yield dataclasses.replace(base, rows=rows, density=0.2, dtype=next(dtypes))
    for d_ff in (31, 32, 33, 128, 130):
        yield dataclasses.replace(base, d_ff=d_ff, dtype=next(dtypes))
    for d_out in (256, 512, 520):
        yield dataclasses.replace(base, d_out=d_out, dtype=next(dtypes))


def dense_cases() -> Iterator[object]:
    for case in any_d_model_table():
        yield pytest.param(case, GENERIC, id=f"generic-{case}")
    for case in table():
        yield on_sm90(case, BEST, id=f"sm90-{case}")
        if case.rows >= FEWEST_ROWS_OF_CHUNKS:
            yield on_sm90(case, CHUNKS, id=f"chunks-{case}")


@pytest.mark.parametrize("share", [1.0, 0.25, 0.0], ids=("all", "part", "none"))
@pytest.mark.parametrize(("case", "kernels"), list(dense_cases()))
def test_against_float64(case: Case, kernels: int, share: float) -> None:
    block = make_block(case, integers=False)
    call = Call(block, case.compression)
    steps = run_dense(call, 0, kernels)
    reference.assert_close(steps, block)
    same = ~call.dense_rows()
    y = run_dense(call, int(case.rows * share), kernels)
    reference.assert_close(y, block)
    assert_guards(call.y_buffer)
    if kernels != CHUNKS:
        same &= ~call.dense_rows()
        assert_same_bits(y[same], steps[same])


@pytest.mark.sm90
@needs_sm90
@pytest.mark.parametrize("case", [case for case in table() if case.d_model % 64 == 0], ids=str)
def test_early_decision_changes_no_bit(case: Case) -> None:
    """Where the gate's count tells that all rows are dense, the schedule is left out, and nothing else."""
    block = make_block(case, integers=False)
    call = Call(block, case.compression)
    late = run_dense(call, case.rows)
    assert not is_early(call)
    early = run_dense(call, EARLY)
    assert is_early(call)
    assert_same_bits(early, late)
    assert_guards(call.y_buffer)


def is_early(call: Call) -> bool:
    """Say whether the last call has left the schedule out."""
    *_, early = call.schedule()[:20].view(torch.int32).tolist()  # a twell::ScheduleHeader
    return bool(early)


@pytest.mark.sm90
@needs_sm90
@pytest.mark.parametrize("density", [0.0, 0.005, 0.03, 0.1, 1.0])
@pytest.mark.parametrize(("rows", "d_ff"), [(1921, 2816), (2048, 5632), (300, 600), (17, 8)])
def test_count_of_the_gate(rows: int, d_ff: int, density: float) -> None:
    """What the gate counts for the guard: of each tile of a row eight non-zeros at most."""
    call = Call(make_block(Case(rows=rows, d_model=256, d_ff=d_ff, density=density), integers=False), 8)
    gate(call, SM90)
    counts = call.packed.view(rows, -1, 32)[:, :, 0]
    call.workspace.fill_(0)
    call.start_steps(GUARD_DECIDES)
    torch.cuda.synchronize()
    schedule_bytes = call.lib.twell_internal_schedule_bytes
    schedule_bytes.restype, schedule_bytes.argtypes = ctypes.c_size_t, call.lib.twell_packed_bytes.argtypes
    counted = call.schedule()[: schedule_bytes(call.problem)][-COUNT_BYTES:].view(torch.int32)
    assert counted.sum() == counts.clamp(max=8).sum()


@pytest.mark.sm90
@needs_sm90
def test_early_decision_is_taken() -> None:
    """A dense call is decided early, a sparse one is not, nor is one with some full rows."""
    for full, density, expected in ((0.0, 0.3, True), (1.0, 0.5, True), (0.0, 0.005, False), (0.2, 0.005, False)):
        call = Call(unequal_block(4096, full, density), 8)
        rows = heavy_rows(call, BEST)
        assert is_early(call) == expected
        assert (rows == 4096) == expected
        reference.assert_close(call.y, call.block)


def block_table() -> Iterator[Case]:
    """Cases for dense blocks, whose d_model need not be a multiple of 64."""
    yield from table()
    dtypes = itertools.cycle((BF16, FP16))
    for d_model in (8, 72, 200, 264):
        for gated in (True, False):
            yield Case(rows=300, d_model=d_model, d_ff=600, gated=gated, density=0.2, dtype=next(dtypes))
    # The same, where clusters share tokens or weights, and of two or four parts of sums.
    base = Case(rows=1, d_model=200, d_ff=5632, d_out=1000, density=0.3, biases="")
    few = (1, 25, 33, 41, 49, 65, 97, 113, 129, 145, 161, 193, 225)
    many = (177, 513, 625, 721, 1281, 1585, 1729, 1825, 1921, 2049, 2177, 2305, 2433, 2561, 2689)
    for rows in (*few, *many, 2817, 2945, 3073, 3201, 3329):
        yield dataclasses.replace(base, rows=rows, dtype=next(dtypes))
    more = (81, 137, 153, 185, 209, 513, 577, 641, 705, 1585, 1665, 1801, 1945, 2049, 2177, 2305, 2433, 2561, 2689)
    for rows in (*few, *more, 2817, 2977, 3073, 3201, 3329):
        yield dataclasses.replace(base, rows=rows, dtype=next(dtypes), gated=False)
    for rows, d_model, d_ff, d_out in ((257, 200, 4096, 264), (1000, 1032, 1500, 264), (3100, 200, 600, 2056)):
        yield Case(rows, d_model, d_ff, d_out, density=0.3, biases="", dtype=next(dtypes))
    for rows, d_out in ((33, 264), (256, 264), (257, 264), (700, 2056), (800, 2056), (900, 4096), (1000, 4096)):
        d_model = 1032 if d_out == 4096 else 200
        yield Case(rows, d_model, 600, d_out, density=0.3, biases="", gated=False, dtype=next(dtypes))
    yield Case(2800, 200, 600, 4096, density=0.3, biases="", dtype=next(dtypes))
    # Tall tiles of every number of neurons, by the cost of tilings; d_ff is no multiple of any.
    for d_ff in (2185, 4405, 5293, 6033, 6958, 8475, 8993, 9511, 10066, 10621):
        for biases in ("", "gud"):
            yield Case(250, 200, d_ff, 264, density=0.3, biases=biases, dtype=next(dtypes))
    for rows, d_ff in ((193, 10621), (500, 1038), (513, 6033)):
        yield Case(rows, 200, d_ff, 264, density=0.3, dtype=next(dtypes))
        yield Case(rows, 200, d_ff, 264, density=0.3, dtype=next(dtypes), residual=True)
    # The smallest blocks of tokens of a wide down projection; two matrices with 96 tokens a block.
    for rows, d_out in ((1, 8464), (36, 9136), (43, 9576), (51, 10944), (65, 8736)):
        yield Case(rows, 192, 16, d_out, density=0.3, dtype=next(dtypes))
    yield Case(95, 64, 3385, 16, density=0.3)
    # Parts of sums, with a residual.
    for rows, gated in itertools.product((1, 25, 41, 65, 97, 129, 161, 225, 513, 1585), (True, False)):
        yield Case(rows, 200, 5632, 1000, density=0.3, biases="d", dtype=next(dtypes), gated=gated, residual=True)


@pytest.mark.sm90
@needs_sm90
@pytest.mark.parametrize("case", list(block_table()), ids=str)
def test_dense_block_against_float64(case: Case) -> None:
    block = make_block(case, integers=False)
    call = Call(block, case.compression)
    reference.assert_close(run_dense(call, DENSE_BLOCK), block)
    assert_guards(call.y_buffer)


@pytest.mark.sm90
@needs_sm90
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu", "drelu"])
def test_tall_tiles(activation: str, dtype: torch.dtype) -> None:
    """Of them there is but one kernel for all activations; NaN and infinity stay in their rows."""
    case = Case(250, 200, 2185, 264, density=0.3, activation=activation, dtype=dtype)
    assert_rows_stay_apart(case, DENSE_BLOCK, BEST, dirty_rows=(3, 130, 249))


@pytest.mark.sm90
@needs_sm90
def test_small_calls_are_dense_blocks() -> None:
    """What mlp() does with few rows, or with narrow ones, is the dense block, bit by bit; large calls are none.

    But for few rows with many neurons, if they are sparse: see below.
    """
    gated = ((129, 256, 600), (257, 256, 600), (300, 2048, 5632), (2048, 64, 600), (65, 64, 6400), (6000, 1024, 4096))
    plain = ((65, 256, 600), (65, 64, 6400), (128, 1024, 4096), (3000, 1536, 6144))
    cases = [Case(rows, d_model, d_ff, density=0.01) for rows, d_model, d_ff in gated]
    cases += [Case(rows, d_model, d_ff, density=0.01, gated=False) for rows, d_model, d_ff in plain]
    for case in cases:
        block = make_block(case, integers=False)
        call = Call(block, 8)
        assert_same_bits(call.run(), run_dense(call, DENSE_BLOCK))
    for is_gated, d_model in ((True, 1088), (False, 1600)):
        large = Call(make_block(Case(9000, d_model, 2816, density=0.001, gated=is_gated), integers=False), 8)
        large.mlp()
        assert large.dense_rows().sum() == 0


@pytest.mark.sm90
@needs_sm90
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
    block = make_block(Case(rows, 128, d_ff, 264, density=density, gated=gated, biases=""), integers=False)
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
    dense = run_dense(call, DENSE_BLOCK)
    call.y.view(torch.int16).fill_(POISON)
    call.workspace.fill_(0xFF)
    call.mlp()
    torch.cuda.synchronize()
    assert torch.isfinite(call.y).all()
    assert torch.equal(call.y, dense) != skips


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 63])
def test_few_dense_rows(rows: int, kernels: int) -> None:
    block = make_block(Case(rows=300, d_model=128, density=0.1), integers=False)
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
SMALL += with_residual(SMALL)


@pytest.mark.parametrize(("kernels", "share"), paths(all=1.0, part=0.25, none=0.0, block=DENSE_BLOCK, early=EARLY))
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sanitize(case: Case, kernels: int, share: float) -> None:
    """What sanitize.py runs."""
    block = make_block(case, integers=True, device="cpu")
    call = Call(block.to("cuda"), case.compression, poison=False)
    # The packed matrix is read 16 bytes at a time: words that the gate leaves alone come along, and are not used.
    call.workspace[: call.lib.twell_packed_bytes(call.problem)].zero_()
    call.start_steps(int(share) if share < 0 else int(case.rows * share), kernels)
    torch.cuda.synchronize()
    reference.assert_close(call.y.cpu(), block)


def unequal_block(rows: int, full: float, density: float, dtype: torch.dtype = BF16) -> Block:
    """Draw a block some of whose rows are full, at random places."""
    block = make_block(Case(rows=rows, d_model=1024, d_ff=2816, d_out=1024, biases="", dtype=dtype), integers=False)
    chosen = torch.rand(rows, device="cuda") < full
    shift = block.w_gate[:, :1].abs().float().mean()
    want = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(density))
    block.x[:, 0] = (-want / shift).to(dtype)
    block.w_gate[:, 0] = -shift.to(dtype)
    block.x[chosen, 0] = (-6.0 / shift).to(dtype)
    return block


def heavy_rows(call: Call, kernels: int) -> int:
    call.workspace.fill_(0xFF)
    call.start_steps(GUARD_DECIDES, kernels)
    torch.cuda.synchronize()
    return int(call.dense_rows().sum())


@pytest.mark.parametrize("kernels", [*KERNELS, on_sm90(CHUNKS, id="chunks")])
def test_decision(kernels: int) -> None:
    """No row of a sparse call is dense, all of a dense one are, and of a mixed one a part with all that are full."""
    assert heavy_rows(Call(unequal_block(2048, 0.0, 0.001), 8), kernels) == 0
    assert heavy_rows(Call(unequal_block(2048, 0.0, 0.5), 8), kernels) == 2048
    assert heavy_rows(Call(unequal_block(2048, 1.0, 0.5), 8), kernels) == 2048
    mixed = unequal_block(8192, 0.04, 0.001)
    call = Call(mixed, 8)
    call.start_steps(GUARD_DECIDES, kernels)
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
    heavy_rows(call, GENERIC)
    reference.assert_close(call.y, block)


@pytest.mark.parametrize("kernels", [*KERNELS, on_sm90(CHUNKS, id="chunks")])
@pytest.mark.parametrize("many", [False, True], ids=("few", "many"))
@pytest.mark.parametrize("d_ff", [8, 63, 64, 65, 100, 256, 600, 5632])
def test_rows_without_a_list(d_ff: int, many: bool, kernels: int) -> None:
    """Rows of any density are right also if none is dense that need not be, on both sides of what a list holds."""
    most = 64 * -(-d_ff // library.TILE)
    counts = [0, 1, 2, *(min(count, d_ff) for count in (most - 1, most, most + 1, most * 9 // 8 + 1, d_ff))]
    case = Case(rows=4200, d_model=192, d_ff=d_ff, d_out=136, biases="ud")
    block = make_block(case, integers=False)
    active = torch.stack([torch.randperm(d_ff, device="cuda") < count for count in counts], dim=1)
    size = 0.5 + torch.rand(active.shape, device="cuda")
    kind = torch.arange(case.rows, device="cuda") % len(counts)
    if not many:
        kind[torch.arange(case.rows, device="cuda") % 50 != 0] = 1
    block.w_gate.zero_()
    block.w_gate[:, : len(counts)] = torch.where(active, size, -size).to(case.dtype)
    block.x[:, : len(counts)] = torch.nn.functional.one_hot(kind, len(counts)).to(case.dtype)
    call = Call(block, 8)
    for rows in (0, GUARD_DECIDES):
        y = run_dense(call, 0, kernels) if rows == 0 else run_poisoned(call, rows, kernels)
        reference.assert_close(y, block)
        assert_guards(call.y_buffer)


def test_any_d_model_is_guarded() -> None:
    """mlp() has a dense path for a d_model that the kernels of compute capability 9.0 do not take."""
    block = make_block(Case(rows=9000, d_model=1096, d_ff=2816, d_out=72, density=0.5), integers=False)
    call = Call(block, 8)
    reference.assert_close(call.run(), block)
    assert call.dense_rows().all()


@pytest.mark.parametrize(("kernels", "dense_rows"), paths(all=300, part=75, block=DENSE_BLOCK, early=EARLY))
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
@pytest.mark.parametrize(("gated", "activation"), [(True, "relu"), (True, "drelu"), (False, "relu2")])
def test_nan_and_infinity_stay_in_their_rows(
    gated: bool, activation: str, dtype: torch.dtype, kernels: int, dense_rows: int
) -> None:
    case = Case(rows=300, d_model=128, d_ff=600, d_out=136, dtype=dtype, gated=gated, activation=activation)
    assert_rows_stay_apart(case, dense_rows, kernels, dirty_rows=(0, 133, 299))


@pytest.mark.parametrize(("kernels", "dense_rows"), paths(all=300, part=75, block=DENSE_BLOCK, early=EARLY))
@pytest.mark.parametrize("where", ["w_gate", "b_gate", "w_up", "b_up", "w_down"])
def test_nan_in_one_neuron(where: str, kernels: int, dense_rows: int) -> None:
    block = make_block(Case(rows=300, d_model=128, density=0.2), integers=False)
    getattr(block, where)[300] = float("nan")
    y = run_dense(Call(block, 4), dense_rows, kernels)
    reference.assert_close(y, block)
    active = reference.gate_values(block)[:, 300] != 0
    assert torch.isnan(y[active]).all() and torch.isfinite(y[~active]).all()
    assert active.any() and (where in ("w_gate", "b_gate") or not active.all())


@pytest.mark.parametrize(("kernels", "dense_rows"), paths(all=300, part=75, block=DENSE_BLOCK, early=EARLY))
def test_inactive_neurons_add_nothing(kernels: int, dense_rows: int) -> None:
    """Where a dense block computes 0 * inf = NaN, the contract is 0, also on the dense path."""
    block = make_block(Case(rows=300, d_model=128, density=0.2), integers=False)
    assert block.b_gate is not None and block.w_up is not None
    inactive = [0, 255, 256, 599]
    block.w_gate[inactive] = 0
    block.b_gate[inactive] = -1
    block.w_up[inactive] = float("inf")
    block.w_down[inactive] = float("nan")
    y = run_dense(Call(block, 8), dense_rows, kernels)
    assert torch.isfinite(y).all()
    reference.assert_close(y, block)


@pytest.mark.parametrize(("kernels", "dense_rows"), paths(all=300, part=75, block=DENSE_BLOCK, early=EARLY))
def test_fp16_does_not_overflow_between(kernels: int, dense_rows: int) -> None:
    """A dense fp16 block stores u and g * u, which do not fit here; y does."""
    block = make_block(Case(rows=300, d_model=128, dtype=FP16, density=0.2, biases=""), integers=False)
    assert block.w_up is not None
    large = dataclasses.replace(
        block, w_gate=block.w_gate * 64, w_up=block.w_up * 32768, w_down=block.w_down * 2.0**-13
    )
    assert not torch.isfinite(reference.plain(large)).all()
    y = run_dense(Call(large, 8), dense_rows, kernels)
    assert torch.isfinite(y).all()
    reference.assert_close(y, large)


@pytest.mark.parametrize(("kernels", "dense_rows"), paths(all=300, part=75, block=DENSE_BLOCK, early=EARLY))
def test_active_neuron_whose_h_is_too_small_for_fp16(kernels: int, dense_rows: int) -> None:
    """Its infinite weights reach y, though the dense path rounds its h to 0 as if it were inactive."""
    block = make_block(Case(rows=300, d_model=128, dtype=FP16, density=0.2, biases=""), integers=False)
    assert block.w_up is not None
    block.w_gate[300] *= 2.0**-14
    block.w_up[300] *= 2.0**-14
    block.w_down[300, 5:] = float("inf")
    leave_out_lost_gates(block)
    y = run_dense(Call(block, 8), dense_rows, kernels)
    active = reference.gate_values(block)[:, 300] != 0
    assert active.any() and not active.all()
    assert torch.isinf(y[active, 5:]).all() and torch.isfinite(y[active, :5]).all()
    reference.assert_close(y, block)


@pytest.mark.parametrize(
    ("kernels", "dense_rows"),
    [*paths(guard=GUARD_DECIDES, block=DENSE_BLOCK), on_sm90(CHUNKS, GUARD_DECIDES, id="chunks")],
)
@pytest.mark.parametrize(("full", "density"), [(0.04, 0.002), (0.0, 0.3), (0.0, 0.02)])
def test_bitwise_repeatable(full: float, density: float, kernels: int, dense_rows: int) -> None:
    block = unequal_block(4096, full, density)
    block.x[7, 3] = float("nan")
    call = Call(block, 8)
    call.start_steps(dense_rows, kernels)
    torch.cuda.synchronize()
    first, dense = call.y.clone(), call.dense_rows()
    assert dense.any()
    for _ in range(100):
        call.y.view(torch.int16).fill_(POISON)
        call.workspace.fill_(0xFF)
        call.start_steps(dense_rows, kernels)
        assert_same_bits(call.y, first)
        assert torch.equal(call.dense_rows(), dense)


@pytest.mark.parametrize("kernels", KERNELS)
def test_cuda_graph_decides_at_each_replay(kernels: int) -> None:
    blocks = [unequal_block(2048, full, density) for full, density in ((0.0, 0.001), (0.0, 0.5), (0.04, 0.001))]
    call = Call(dataclasses.replace(blocks[0], x=blocks[0].x.clone()), 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.start_steps(GUARD_DECIDES, kernels)
    counts = set()
    for block in [*blocks, *reversed(blocks)]:
        call.block.x.copy_(block.x)
        call.block.w_gate.copy_(block.w_gate)
        call.y.view(torch.int16).fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_close(call.y, call.block)
        counts.add(int(call.dense_rows().sum()))
    assert {0, 2048} <= counts


@pytest.mark.parametrize(("kernels", "dense_rows"), paths(guard=GUARD_DECIDES, block=DENSE_BLOCK))
def test_streams_at_once(kernels: int, dense_rows: int) -> None:
    calls = [Call(unequal_block(1500, full, density), 8) for full, density in ((0.0, 0.3), (0.05, 0.002), (0.0, 0.6))]
    expected = []
    for call in calls:
        call.start_steps(dense_rows, kernels)
        torch.cuda.synchronize()
        expected.append(call.y.clone())
    streams = [torch.cuda.Stream() for _ in calls]  # type: ignore[no-untyped-call]
    for _ in range(20):
        for call in calls:
            call.y.view(torch.int16).fill_(POISON)
        torch.cuda.synchronize()
        for _ in range(3):
            for call, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    call.start_steps(dense_rows, kernels)
        torch.cuda.synchronize()
        for call, y in zip(calls, expected, strict=True):
            assert_same_bits(call.y, y)


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_keep_their_bits_at_another_place(kernels: int) -> None:
    """A dense row's result depends on nothing but the row."""
    block = unequal_block(2048, 0.0, 0.5)
    expected = run_dense(Call(block, 8), 2048, kernels)
    shuffled = torch.randperm(2048, device="cuda")
    block.x.copy_(block.x[shuffled].clone())
    assert_same_bits(run_dense(Call(block, 8), 2048, kernels), expected[shuffled])
