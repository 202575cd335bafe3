"""The hot split of the kernels, on a GPU: the first neurons as a dense block, the others by the two steps.

Tests force it, so that any shape reaches it; the C API itself takes it where the two steps would run.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from tests.plugins import calls, reference
from tests.plugins.calls import BEST, GENERIC, KERNELS, SPLIT, Call, assert_guards, assert_same_bits, run_poisoned
from tests.plugins.cases import FP16, KINDS, SPLIT_BASE, Case, make_block, split_block, with_residual

pytestmark = pytest.mark.gpu

BASE = SPLIT_BASE
# With this number of products the two steps run on Hopper, too.
LARGE = Case(rows=9000, d_model=1088, d_ff=2816, d_out=264, hot=512)


def without_residual() -> Iterator[Case]:
    for gated, activation in KINDS:
        yield dataclasses.replace(BASE, gated=gated, activation=activation)
    # 500 is rounded down to 496; 900 are all.
    for hot, gated, biases in itertools.product((128, 500, 512, 899, 900), (True, False), ("", "gud", "d")):
        yield dataclasses.replace(BASE, hot=hot, gated=gated, biases=biases)
    # What is left may be a single neuron; all of fewer than a tile are a dense block.
    for d_ff, hot in ((257, 256), (511, 300), (513, 512), (1501, 1500), (2816, 1024), (100, 100), (1, 1), (8, 8)):
        yield dataclasses.replace(BASE, d_ff=d_ff, hot=hot)
    # No multiple of 64, one for which only the generic kernels have a dense block, and y of any width.
    for d_model in (8, 72, 128, 264):
        yield dataclasses.replace(BASE, d_model=d_model)
    yield dataclasses.replace(BASE, rows=60, d_model=16448, d_ff=600, hot=256, density=0.02)
    for d_out in (8, 264, 2056, 4104, 8200):
        yield dataclasses.replace(BASE, d_out=d_out)
    for rows in (1, 2, 16, 17, 64, 129, 257, 1000, 2100):
        yield dataclasses.replace(BASE, rows=rows)
    for compression in (1, 2, 4):
        yield dataclasses.replace(BASE, compression=compression)
    # Chunks, and neurons that are hot beside them.
    yield Case(rows=4200, d_model=1088, d_ff=2816, d_out=136, hot=512)
    yield Case(rows=20000, d_model=2048, d_ff=6400, d_out=64, hot=768, density=0.005)


CASES = [*without_residual(), *with_residual(without_residual())]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case, kernels: int) -> None:
    block = split_block(case, hot_density=0.3)
    call = Call(block, case.compression, hot=case.hot)
    y = run_poisoned(call, SPLIT, kernels)
    reference.assert_close(y, block, split=case.hot)
    assert_guards(call.y_buffer)
    assert_same_bits(run_poisoned(call, SPLIT, kernels), y)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("density", [0.0, 0.002, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("hot_density", [0.0, 0.002, 0.3, 1.0])
def test_densities_of_either_part(hot_density: float, density: float, kernels: int) -> None:
    """Of the rest the guard sends some rows, or all, down the dense path."""
    case = dataclasses.replace(BASE, rows=600, d_model=256, d_ff=1500, density=density, residual=True)
    block = split_block(case, hot_density)
    call = Call(block, case.compression, hot=case.hot)
    reference.assert_close(run_poisoned(call, SPLIT, kernels), block, split=case.hot)
    assert_guards(call.y_buffer)


@pytest.mark.parametrize("residual", [True, False], ids=("residual", "none"))
@pytest.mark.parametrize("hot", [128, 500, 512, 1024, 2816])
def test_large_calls_are_split(hot: int, residual: bool) -> None:
    """Through the C API, and without the hint."""
    case = dataclasses.replace(LARGE, hot=hot, residual=residual, density=0.005)
    block = split_block(case, hot_density=0.2)
    call = Call(block, case.compression, hot=hot)
    y = call.poisoned(call.mlp)
    reference.assert_close(y, block, split=case.hot)
    assert_same_bits(y, run_poisoned(call, SPLIT, BEST))
    whole = Call(block, case.compression)
    whole_y = whole.poisoned(whole.mlp)
    reference.assert_close(whole_y, block)
    if hot < case.d_ff:  # else both may be one dense block
        assert not torch.equal(y, whole_y)  # else nothing was split: sums have another order


def of_rows(rows: int, d_model: int = 264, gated: bool = True) -> Case:
    return Case(rows=rows, d_model=d_model, d_ff=2816, d_out=264, gated=gated)


@pytest.mark.parametrize(
    ("case", "hints"),
    [
        # Too few hot neurons.
        *((LARGE, (hot,)) for hot in (0, 8, 127)),
        # Few tokens.
        *((of_rows(rows, gated=gated), (512, 2816)) for rows in (1, 2, 3, 16, 17, 64) for gated in (True, False)),
        # Dense blocks.
        *(calls.on_sm90(of_rows(rows, 256), (512,)) for rows in (300, 1280, 6000)),
        # Sums over the hot neurons alone may be out of the range of fp16.
        (dataclasses.replace(LARGE, dtype=FP16), (512,)),
    ],
    ids=str,
)
def test_hints_that_are_ignored(case: Case, hints: tuple[int, ...]) -> None:
    block = make_block(case)
    first, *others = (call.poisoned(call.mlp) for call in [Call(block, 8, hot=hot) for hot in (0, *hints)])
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("density", [0.005, 0.1])
@pytest.mark.parametrize("case", [dataclasses.replace(BASE, rows=2100, residual=True), LARGE], ids=str)
def test_bitwise_repeatable(case: Case, density: float) -> None:
    call = Call(split_block(dataclasses.replace(case, density=density), hot_density=0.3), 8, hot=case.hot)
    calls.assert_repeatable(lambda: run_poisoned(call, SPLIT), times=50)


@pytest.mark.parametrize("kernels", KERNELS)
def test_calls_that_follow_one_another(kernels: int) -> None:
    case = dataclasses.replace(BASE, rows=700, d_model=256, d_ff=1500, density=0.02)
    several = calls.chain(split_block(case, hot_density=0.3), reads="residual", hot=case.hot)
    calls.assert_chain_agrees(several, lambda call: call.start_steps(SPLIT, kernels), split=case.hot)


def test_cuda_graph() -> None:
    case = dataclasses.replace(LARGE, residual=True)
    call = Call(split_block(case, hot_density=0.3), 8, hot=case.hot)
    replay = calls.replays(call, call.mlp)
    for _ in range(3):
        call.block.x.copy_(make_block(case).x)
        replayed = replay().clone()
        reference.assert_close(replayed, call.block, split=case.hot)
        assert_same_bits(call.poisoned(call.mlp), replayed)


@pytest.mark.parametrize("gated", [True, False], ids=("gated", "plain"))
def test_the_torch_op_passes_it_on(gated: bool) -> None:
    from twellc.plugins.ops import GATED_MLP, MLP

    case = dataclasses.replace(LARGE, d_model=1600, gated=gated, biases="gud" if gated else "gd", residual=True)
    block = split_block(case, hot_density=0.3)
    up = [block.w_up, block.b_up] if gated else []
    operands = [block.x, block.w_gate, block.b_gate, *up, block.w_down, block.b_down, block.residual]
    y = (GATED_MLP if gated else MLP)(*operands, "relu", 0.0, 8, case.hot)
    call = Call(block, 8, hot=case.hot)
    assert_same_bits(y, call.poisoned(call.mlp))
    reference.assert_close(y, block, split=case.hot)


SMALL = [
    dataclasses.replace(BASE, rows=270, d_model=72, d_ff=300, d_out=136, hot=hot, gated=gated, density=0.1)
    for hot, gated in ((256, True), (260, True), (256, False), (300, False))
]
SMALL += with_residual(SMALL)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sanitize(case: Case) -> None:
    """What sanitize.py runs."""
    block = make_block(case, integers=True, device="cpu")
    call = Call(block.to("cuda"), case.compression, hot=case.hot, poison=False)
    for kernels in (GENERIC, BEST) if calls.ON_SM90 else (GENERIC,):
        call.start_steps(SPLIT, kernels)
        torch.cuda.synchronize()
        reference.assert_close(call.y.cpu(), block, split=case.hot)
