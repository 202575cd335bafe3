"""What every path through the kernels must do, on a GPU: what is not finite, or out of range, stays where it is.

A path is what the routes choose, a forced number of dense rows, a dense block, chunks, hot neurons, or a split. Large
several choose the latter; tests force them, so that blocks as small as these reach them.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from tests.plugins import calls, cases, reference
from tests.plugins.calls import DENSE_BLOCK, SM90, Call, assert_guards, assert_same_bits, run_dense, run_poisoned
from tests.plugins.cases import (
    BF16,
    FP16,
    HOT_BASE,
    MANY_NEURONS,
    SPLIT_BASE,
    Case,
    choose_neurons,
    make_block,
    split_block,
)
from tests.plugins.reference import Block

pytestmark = pytest.mark.gpu

NEURON = 300  # the one that tests change


@dataclasses.dataclass(frozen=True)
class Path:
    """How calls of a path are run, and blocks for them are drawn."""

    run: Callable[[Call], torch.Tensor]
    draw: Callable[[Case], Block] = make_block

    def check(self, case: Case, block: Block) -> torch.Tensor:
        """Run a block and compare it with float64; return y."""
        call = Call(block, case.compression, hot=case.hot)
        y = self.run(call)
        reference.assert_close(y, block, split=case.hot)
        assert_guards(call.y_buffer)
        assert_guards(call.packed_buffer)
        return y


def draw_hot(case: Case) -> Block:
    """Draw a block with hot neurons, of which NEURON is one."""
    block = make_block(case)
    chosen = torch.cat([choose_neurons(case.d_ff, 60), torch.tensor([NEURON])])
    cases.make_active(block, chosen, 0.4)
    call = Call(block, 8)
    run_dense(call, 0, SM90)
    assert set(chosen.tolist()) <= set(calls.hot_neurons(call))
    return block


ROUTES = Path(Call.run)
CHUNKS = Path(partial(run_dense, rows=0, kernels=SM90))
HOT = dataclasses.replace(CHUNKS, draw=draw_hot)


def on_routes(*chosen: Case) -> list[object]:
    return [pytest.param(case, ROUTES, id=f"routes-{case}") for case in chosen]


def on_ways(name: str, chosen: Iterable[Case], ways: list[Any], path_of: Callable[..., Path]) -> list[object]:
    return [
        pytest.param(case, path_of(*way.values), id=f"{name}{way.id}-{case}", marks=way.marks)
        for case in chosen
        for way in ways
    ]


def on_dense_paths(*chosen: Case) -> list[object]:
    """Cases of 300 rows, of which all or a part are dense, or which are dense blocks."""
    ways = calls.paths(all=300, part=75, block=DENSE_BLOCK, early=calls.EARLY)
    return on_ways("", chosen, ways, lambda kernels, rows: Path(partial(run_dense, rows=rows, kernels=kernels)))


def on_chunks(*chosen: Case, path: Path = CHUNKS) -> list[object]:
    return [calls.on_sm90(case, path, id=f"{'hot' if path is HOT else 'chunks'}-{case}") for case in chosen]


def draw_split(case: Case) -> Block:
    return split_block(case, hot_density=max(0.3, case.density))


def on_splits(*chosen: Case) -> list[object]:
    return on_ways(
        "split-",
        chosen,
        calls.KERNELS,
        lambda kernels: Path(partial(run_poisoned, rows=calls.SPLIT, kernels=kernels), draw_split),
    )


FEW = Case(rows=300, d_model=128, density=0.2)
MANY = Case(rows=4100, d_model=128, d_ff=600, density=0.05)
SHAPES = [Case(rows=rows, density=density) for rows in (10, 40, 65, 200) for density in (0.03, 1.0)]
SKIPPING = Case(rows=50, d_ff=MANY_NEURONS, density=0.005)


def each(case: Case, **values: list[Any]) -> list[Case]:
    """Return a case with every combination of values."""
    return [
        dataclasses.replace(case, **dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]


def kinds(case: Case, **values: list[Any]) -> list[Case]:
    return [
        dataclasses.replace(case, gated=gated, activation=name)
        for case in each(case, **values)
        for gated, name in cases.KINDS
    ]


DTYPES = [BF16, FP16]
STEPS = [case for case in kinds(Case(), rows=[70, 34], dtype=DTYPES) if case.activation != "drelu"]


@pytest.mark.parametrize(
    ("case", "path"),
    [
        *on_routes(*STEPS),
        *on_dense_paths(
            *each(Case(rows=300, d_model=128), dtype=DTYPES, activation=["relu", "drelu"]),
            *each(Case(rows=300, d_model=128, gated=False, activation="relu2"), dtype=DTYPES),
        ),
        *(
            calls.on_sm90(case, Path(partial(run_dense, rows=DENSE_BLOCK)), id=f"tall-{case}")
            for case in each(
                Case(250, 200, 2185, 264, density=0.3), activation=["relu", "relu2", "fatrelu", "drelu"], dtype=DTYPES
            )
        ),
        *on_chunks(
            *each(Case(rows=4100, d_model=128, d_ff=1600, density=0.02), dtype=DTYPES, activation=["relu", "drelu"])
        ),
        *on_chunks(*each(HOT_BASE, dtype=DTYPES, activation=["relu", "drelu"]), path=HOT),
        *on_splits(*kinds(dataclasses.replace(SPLIT_BASE, residual=True))),
    ],
)
def test_nan_and_infinity_stay_in_their_rows(case: Case, path: Path) -> None:
    block = path.draw(case)
    dirty = {0: ("nan", 71), case.rows // 3: ("inf", 5), case.rows - 2: ("-inf", 0)}
    for row, (value, column) in dirty.items():
        block.x[row, column] = float(value)
    rows = [*dirty]
    if block.residual is not None:
        block.residual[7, 9] = float("inf")
        rows.append(7)
    y = path.check(case, block)
    assert torch.isnan(y[0]).all()
    assert torch.isfinite(y[[row for row in range(case.rows) if row not in rows]]).all()


@pytest.mark.parametrize("where", ["w_gate", "b_gate", "w_up", "b_up", "w_down"])
@pytest.mark.parametrize(
    ("case", "path"),
    [
        *on_routes(
            *each(Case(density=0.3, compression=4), rows=[20, 65]),
            *each(Case(rows=60, density=0.005, compression=4), d_ff=[11008, MANY_NEURONS]),
        ),
        *on_dense_paths(dataclasses.replace(FEW, compression=4)),
    ],
)
def test_nan_in_one_neuron(case: Case, path: Path, where: str) -> None:
    assert_nan_of_a_neuron(case, path, where)


@pytest.mark.parametrize("where", ["w_up", "b_up"])
@pytest.mark.parametrize(("case", "path"), [*on_chunks(MANY), *on_chunks(HOT_BASE, path=HOT)])
def test_nan_in_one_neuron_of_chunks(case: Case, path: Path, where: str) -> None:
    assert_nan_of_a_neuron(case, path, where)


def assert_nan_of_a_neuron(case: Case, path: Path, where: str) -> None:
    """Check that only rows in which a neuron is active see its NaN."""
    block = path.draw(case)
    assert block.b_gate is not None
    if case.density < 0.01 and path is ROUTES:
        block.b_gate[NEURON] += 2  # active in some rows
    getattr(block, where)[NEURON] = float("nan")
    y = path.check(case, block)
    active = reference.gate_values(block)[:, NEURON] != 0
    assert torch.isnan(y[active]).all() and torch.isfinite(y[~active]).all()
    assert active.any() and (where in ("w_gate", "b_gate") or not active.all())


@pytest.mark.parametrize(
    ("case", "path"),
    [
        *on_routes(
            *each(Case(), rows=[10, 40, 65, 200], density=[0.005, 0.3]),  # without and with tiles that overflow
            *each(SKIPPING, density=[0.005, 0.3]),
        ),
        *on_dense_paths(FEW),
        *on_chunks(MANY),
    ],
)
def test_inactive_neurons_add_nothing(case: Case, path: Path) -> None:
    """Where a dense block computes 0 * inf = NaN, the contract is 0, also on a dense path."""
    block = path.draw(case)
    assert block.b_gate is not None and block.w_up is not None
    inactive = [0, 255, 256, 599]
    block.w_gate[inactive] = 0
    block.b_gate[inactive] = -1
    expected = path.check(case, block)
    block.w_up[inactive] = float("inf")
    block.w_down[inactive] = float("nan")
    y = path.check(case, block)
    assert torch.isfinite(y).all()
    if (
        path is ROUTES and case.density < 0.1 and case.rows <= calls.FEW_TOKENS
    ):  # a dense path sums again, in another order
        assert_same_bits(y, expected)


@pytest.mark.parametrize(
    ("case", "path"),
    [
        *on_routes(*(dataclasses.replace(case, dtype=FP16, biases="") for case in (*SHAPES, SKIPPING))),
        *on_dense_paths(
            dataclasses.replace(FEW, dtype=FP16, biases=""),
            dataclasses.replace(FEW, dtype=FP16, biases="", density=0.5, residual=True),
        ),
        *on_chunks(Case(rows=4100, d_model=128, dtype=FP16, density=0.05, biases="")),
        *on_chunks(dataclasses.replace(HOT_BASE, dtype=FP16, biases=""), path=HOT),
        *on_splits(dataclasses.replace(SPLIT_BASE, d_model=128, density=0.5, biases="", residual=True)),
    ],
)
def test_hidden_values_may_be_out_of_range(case: Case, path: Path) -> None:
    """A dense fp16 block stores u and g * u, which do not fit here; y does, also with a residual."""
    block = path.draw(case)
    assert block.w_up is not None
    large = dataclasses.replace(
        block,
        w_gate=block.w_gate * 64,
        w_up=block.w_up * 32768,
        w_down=block.w_down * 2.0**-13,
        residual=None if block.residual is None else block.residual * 64,
    )
    assert case.dtype == BF16 or not torch.isfinite(reference.plain(large)).all()
    assert torch.isfinite(path.check(case, large)).all()


@pytest.mark.parametrize(
    ("case", "path"),
    [
        *on_routes(*each(Case(dtype=FP16, biases=""), rows=[1, 10, 40, 65, 200], density=[0.02, 0.3])),
        *on_routes(dataclasses.replace(SKIPPING, dtype=FP16, biases="")),
        *on_dense_paths(dataclasses.replace(FEW, dtype=FP16, biases="")),
    ],
)
def test_active_neuron_whose_h_is_too_small_for_fp16(case: Case, path: Path) -> None:
    """Its infinite weights reach y, also where h is rounded to 0 as if it were inactive."""
    block = path.draw(case)
    assert block.w_up is not None
    block.w_gate[NEURON] = block.x[-1].sign() * 2.0**-18
    block.w_up[NEURON] *= 2.0**-14
    block.w_down[NEURON, 5:] = float("inf")
    cases.leave_out_lost_gates(block)
    y = path.check(case, block)
    active = reference.gate_values(block)[:, NEURON] != 0
    assert active[-1]
    assert torch.isinf(y[active, 5:]).all() and torch.isfinite(y[active, :5]).all() and torch.isfinite(y[~active]).all()


@pytest.mark.parametrize("kernels", calls.KERNELS)
def test_weights_that_are_not_finite_of_a_split(kernels: int) -> None:
    """Inactive neurons add nothing, hot or not; an active one adds what it adds."""
    case = dataclasses.replace(SPLIT_BASE, density=0.1, biases="")
    block = split_block(case, hot_density=0.1)
    for neuron, value in ((5, "inf"), (511, "nan"), (512, "inf"), (899, "-inf")):
        block.w_down[neuron, neuron % 64 :: 64] = float(value)
    cases.leave_out_lost_gates(block)
    y = Path(partial(run_poisoned, rows=calls.SPLIT, kernels=kernels)).check(case, block)
    assert torch.isfinite(y).any() and not torch.isfinite(y).all()


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_steps_of_other_rows_keep_their_bits(case: Case) -> None:
    """Beside rows that are not finite, in which a NaN is a non-zero and columns past d_ff are not counted."""
    block = make_block(case)
    clean = Call(block, 8).steps()
    dirty = [0, 33, case.rows - 2]
    for row, column, value in zip(dirty, (71, 5, 0), ("nan", "inf", "-inf"), strict=True):
        block.x[row, column] = float(value)
    call = Call(block, 8)
    others = [row for row in range(case.rows) if row not in dirty]
    assert_same_bits(call.steps()[others], clean[others])
    assert call.decoded().counts[0].tolist() == [256, 256, 88]
