"""The residual in every route of the kernels, on a GPU: added once, in fp32, before the one rounding.

The tables of the other files have cases with a residual, too; here each case takes all ways to y that it has.
"""

import dataclasses
import itertools
import math

import pytest
import torch

from tests.plugins import reference
from tests.plugins.calls import (
    KERNELS,
    Call,
    assert_chain_agrees,
    assert_guards,
    assert_same_bits,
    chain,
    run_dense,
    ways,
)
from tests.plugins.cases import BF16, FP16, MANY_NEURONS, Case, make_block
from tests.plugins.reference import Block

pytestmark = pytest.mark.gpu

# Rows, d_model, d_ff and d_out of each route: see the table in kernels/README.md.
SHAPES = {
    "one token, contributions": (1, 256, 1500, 264),
    "two tokens, contributions": (2, 256, 1500, 264),
    "one token, shared out": (1, 264, 8192, 136),
    "few tokens": (3, 264, 8192, 136),
    "16 tokens": (16, 264, 2816, 264),
    "narrow few tokens": (20, 64, 600, 24),
    "17 tokens": (17, 264, 2816, 264),
    "64 tokens": (64, 264, 5632, 520),
    "128 tokens": (128, 264, 2816, 264),
    "skipping": (40, 264, MANY_NEURONS, 264),
    "parts of sums": (150, 200, 5632, 1000),
    "dense block": (300, 256, 2816, 264),
    "both paths": (2100, 1088, 2816, 264),
    "chunks": (4200, 1088, 2816, 136),
}
CASES = [
    pytest.param(
        Case(*shape, density=density, dtype=dtype, gated=gated, biases="gud" if gated else "gd", residual=True),
        id=f"{name}-{density}-{'gated' if gated else 'plain'}",
    )
    for (name, shape), (density, gated, dtype) in itertools.product(
        SHAPES.items(), ((0.004, True, BF16), (0.3, True, FP16), (0.004, False, FP16), (0.3, False, BF16))
    )
]


@pytest.mark.parametrize("case", CASES)
def test_all_ways_against_float64(case: Case) -> None:
    block = make_block(case)
    call = Call(block, case.compression)
    for run in ways(call).values():
        y = run()
        reference.assert_close(y, block)
        assert_same_bits(run(), y)
        assert_guards(call.y_buffer)


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_reaches_its_place_of_y(case: Case) -> None:
    block = make_block(case)
    assert block.residual is not None
    places = {(0, 0): math.nan, (case.rows // 2, 9): math.inf, (case.rows - 1, case.d_out - 1): -math.inf}
    for place, value in places.items():
        block.residual[place] = value
    expected = torch.ones((case.rows, case.d_out), dtype=torch.bool, device="cuda")
    for place in places:
        expected[place] = False
    for run in ways(Call(block, case.compression)).values():
        y = run()
        assert torch.equal(torch.isfinite(y), expected)
        reference.assert_close(y, block)


def constant_block(rows: int, d_ff: int, active: int, *, gated: bool) -> Block:
    """Return a float16 block with this number of active neurons in each row; each adds 512 to every value of y."""
    d_model, d_out = 128, 264
    x = torch.zeros((rows, d_model), dtype=FP16, device="cuda")
    x[:, 0] = 1
    w_gate = torch.zeros((d_ff, d_model), dtype=FP16, device="cuda")
    w_gate[:, 0] = -1
    w_gate[torch.randperm(d_ff, device="cuda")[:active], 0] = 8
    w_up = torch.zeros_like(w_gate)
    w_up[:, 0] = 1
    w_down = torch.full((d_ff, d_out), 64.0, dtype=FP16, device="cuda")
    residual = torch.full((rows, d_out), 56800.0 - 512 * active, dtype=FP16, device="cuda")
    return Block(x, w_gate, w_up if gated else None, w_down, residual=residual)


@pytest.mark.parametrize("gated", [True, False], ids=("gated", "plain"))
@pytest.mark.parametrize("d_ff", [150, 2816, MANY_NEURONS])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 64, 100, 200, 300, 2100, 4200])
def test_only_the_sum_must_fit(rows: int, d_ff: int, gated: bool) -> None:
    """76 800 is too large for float16; 76 800 - 20 000 is not, and every sum is exact."""
    block = constant_block(rows, d_ff, 150, gated=gated)
    for run in ways(Call(block, 8)).values():
        y = run()
        assert (y == 56800).all()
        reference.assert_close(y, block)


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_of_either_path_get_their_own(kernels: int) -> None:
    """Integers that tell rows and columns: dense rows are moved together, and sparse ones sorted."""
    case = Case(rows=600, d_model=128, d_ff=600, d_out=136, density=0.05, biases="", residual=True)
    block = make_block(case)
    block.w_down.zero_()
    rows, columns = torch.arange(600, device="cuda")[:, None], torch.arange(136, device="cuda")
    block = dataclasses.replace(block, residual=((rows * 31 + columns * 7) % 251).to(BF16))
    for dense_rows in (0, 1, 150, 600):
        assert block.residual is not None
        assert_same_bits(run_dense(Call(block, 8), dense_rows, kernels), block.residual)


@pytest.mark.parametrize("rows", [1, 5, 40, 200, 2100])
def test_residual_may_be_x(rows: int) -> None:
    block = make_block(Case(rows=rows, d_model=264, d_out=264))
    block = dataclasses.replace(block, residual=block.x)
    reference.assert_close(Call(block, 8).run(), block)


@pytest.mark.parametrize("rows", [1, 7, 40, 100])
def test_residual_that_the_call_before_writes(rows: int) -> None:
    block = make_block(Case(rows=rows, d_model=512, d_ff=2000, d_out=512, density=0.1, biases=""))
    assert_chain_agrees(chain(block, reads="residual"), Call.mlp)
