"""Gradients of the twell ops on a GPU: against float64, at every density, and under what training does to them."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.plugins.training_blocks import KINDS, Problem, problem
from twellc.plugins.block import GATED, PLAIN, BlockOptions, Operands, Variant
from twellc.plugins.gradients_call import KEPT_DTYPES, Call, Kept, Step
from twellc.plugins.gradients_hybrid import from_hybrid, to_hybrid
from twellc.plugins.gradients_ops import TRAIN_FORWARD, train_forward
from twellc.plugins.meaning import hidden_of
from twellc.plugins.ops import run_block
from twellc.plugins.training import TrainingState, train_block

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
# tokens, d_model, d_ff, d_out: the smallest, uneven ones, more than a slab of columns, more than a range of neurons.
SHAPES = (
    (1, 8, 1, 8),
    (5, 16, 40, 24),
    (300, 256, 520, 256),
    (130, 2056, 1000, 264),
    (64, 264, 300, 2304),
    (70, 64, 9000, 64),
)
DENSITIES = (0.0, 0.005, 0.05, 0.5, 1.0)
# Relative error of a result, in the Frobenius norm, that rounding of products, u and h may cause.
TOLERANCES = {torch.bfloat16: 0.012, torch.float16: 0.003}


def assert_right(case: Problem, dtype: torch.dtype, step: Step) -> None:
    found, again = case.run("cuda", dtype, step), case.run("cuda", dtype, step)
    for name in found:
        assert torch.equal(found[name], again[name]), f"{name} is not repeatable"
    assert_near(found, case, dtype)


def assert_near(found: dict[str, Tensor], case: Problem, dtype: torch.dtype) -> None:
    """Compare with float64, within four times the error of the meaning in low precision."""
    truth = case.run("cpu", torch.float64, Step())
    plain = case.run("cpu", dtype, Step())
    for name, expected in truth.items():
        value, size = found[name].double().cpu(), expected.double().norm().clamp(min=1e-30)
        if name == "counts":  # a z beside the threshold may be rounded to either side
            assert (value - expected).abs().max() <= max(2, 0.01 * len(case.dy))
            continue
        error = float((value - expected).norm() / size)
        low = float((plain[name].double() - expected).norm() / size)
        assert error <= max(4 * low, TOLERANCES[dtype]), f"{name}: {error:.2e}, in low precision {low:.2e}"


CASES = list(itertools.product(KINDS, SHAPES, DENSITIES))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_against_float64(number: int) -> None:
    (variant, activation), (tokens, d_model, d_ff, d_out), density = CASES[number]
    dtype = DTYPES[number % 2]
    case = problem(
        variant,
        activation,
        tokens=tokens,
        d_model=d_model,
        d_ff=d_ff,
        d_out=d_out,
        density=density,
        extras=number % 4 < 2,
        dtype=dtype,
        seed=number,
    )
    hot, pairs = (0, d_ff // 24 * 8, d_ff)[number % 3], (128, 16, 3, 0)[number // 3 % 4]
    order = torch.randperm(d_ff, generator=torch.Generator().manual_seed(number)).int().cuda()
    assert_right(case, dtype, Step(hot=hot, pairs=pairs, order=order if number // 2 % 2 else None))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("hot", [0, 32, 96])
@pytest.mark.parametrize("pairs", [128, 0])
def test_what_is_not_finite_reaches_the_gradients(value: float, hot: int, pairs: int) -> None:
    case = problem(tokens=40, density=0.3)
    case.tensors["x"][7, 3] = value
    found = case.run("cuda", torch.bfloat16, Step(hot=hot, pairs=pairs))
    others = [token for token in range(40) if token != 7]
    assert not found["y"][7].isfinite().any() and found["y"][others].isfinite().all()
    assert not found["l1"].isfinite()
    assert found["dx"][others].isfinite().all()
    _, g, _, _ = hidden_of(Operands(**case.tensors), case.options)
    fires = g[7] != 0
    assert fires.any() and (value != value or not fires.all())
    for name in ("dw_gate", "dw_up", "dw_down"):
        is_finite = found[name].isfinite().all(1).cpu()
        assert not is_finite[fires].any()
        # Dense products cannot leave out what does not fire: 0 * inf is NaN.
        assert is_finite[hot:][~fires[hot:]].all()


def test_a_hundred_repeats_give_the_same_bits() -> None:
    case = problem(tokens=3000, d_model=512, d_ff=2048, d_out=512, density=0.02)
    for step in (Step(), Step(hot=256), Step(pairs=20), Step(hot=2048)):
        first = case.run("cuda", torch.bfloat16, step)
        for _ in range(33):
            again = case.run("cuda", torch.bfloat16, step)
            assert all(torch.equal(first[name], again[name]) for name in first), step


def test_more_rows_than_a_chunk_and_than_blocks_of_rows() -> None:
    """The gate's results are in memory for 16 384 tokens at a time; a sort has at most 1024 blocks of rows."""
    assert_right(problem(tokens=40_000, density=0.05, seed=3), torch.bfloat16, Step())


def operands_of(case: Problem, dtype: torch.dtype = torch.bfloat16) -> Operands[Tensor]:
    return Operands(**{name: value.to("cuda", dtype).requires_grad_() for name, value in case.tensors.items()})


def test_nothing_waits_and_a_graph_replays() -> None:
    case = problem(tokens=4096, d_model=256, d_ff=1024, d_out=256, density=0.004)
    operands, dy, options = operands_of(case), case.dy.cuda(), BlockOptions(activation="relu")
    state = TrainingState(1024, torch.device("cuda"))

    def step() -> Tensor:
        for tensor in operands.named().values():
            tensor.grad = None
        y, l1 = train_block(operands, options, state)
        ((y * dy).sum() + l1).backward()
        return y

    for _ in range(8):
        step()
    assert state.step.order is not None and state.step.hot < 1024
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [tensor.grad.clone() for tensor in operands.named().values() if tensor.grad is not None]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for _ in range(3):
        y.zero_()
        graph.replay()
    found = [tensor.grad for tensor in operands.named().values()]
    for gradient, reference in zip(found, expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, reference, rtol=0.02, atol=0.02 * float(reference.abs().max()))
    torch.testing.assert_close(y, run_block(operands, options), rtol=0.02, atol=0.05)


def test_several_streams() -> None:
    cases = [problem(tokens=2000, d_model=256, d_ff=1024, d_out=256, density=0.03, seed=seed) for seed in range(4)]
    expected = [case.run("cuda", torch.bfloat16, Step()) for case in cases]
    torch.cuda.synchronize()
    found: list[dict[str, Tensor]] = []
    streams = [torch.cuda.Stream() for _ in cases]
    for case, stream in zip(cases, streams, strict=True):
        with torch.cuda.stream(stream):
            found.append(case.run("cuda", torch.bfloat16, Step()))
    torch.cuda.synchronize()
    for each, reference in zip(found, expected, strict=True):
        assert all(torch.equal(each[name], reference[name]) for name in reference)


def test_checkpointed_and_compiled() -> None:
    case = problem(tokens=600, d_model=256, d_ff=1024, d_out=256, density=0.03, extras=True)
    options = BlockOptions(activation="relu")

    def gradients(kind: str) -> list[Tensor]:
        operands = operands_of(case)
        names = list(operands.named())

        def block(*tensors: Tensor) -> Tensor:
            return run_block(Operands(**dict(zip(names, tensors, strict=True))), options)

        tensors = tuple(operands.named().values())
        if kind == "checkpoint":
            y = checkpoint(block, *tensors, use_reentrant=False)
        else:
            y = (torch.compile(block, fullgraph=True) if kind == "compile" else block)(*tensors)
        (y * case.dy.cuda()).sum().backward()
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    expected = gradients("plain")
    assert len(expected) == 8
    for kind in ("checkpoint", "compile"):
        for found, reference in zip(gradients(kind), expected, strict=True):
            assert torch.equal(found, reference), kind


def test_autocast_from_float32() -> None:
    case = problem(tokens=300, d_model=256, d_ff=512, d_out=256, density=0.05)
    operands = operands_of(case, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        y = run_block(operands, BlockOptions(activation="relu"))
    assert y.dtype == torch.bfloat16
    (y * case.dy.cuda()).sum().backward()
    expected = case.run("cpu", torch.float64, Step(), l1_factor=0.0)
    for name in ("w_gate", "w_up", "w_down"):
        gradient = operands.named()[name].grad
        assert gradient is not None and gradient.dtype == torch.float32
        error = (gradient.double().cpu() - expected[f"d{name}"]).norm() / expected[f"d{name}"].norm()
        assert error <= TOLERANCES[torch.bfloat16]


def kept_bytes(run: object) -> int:
    """Return what is allocated while the graph of a forward lives, less what was before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = run()  # type: ignore[operator]
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    del y
    return after - before


def test_a_tenth_of_the_memory_is_kept() -> None:
    """29 of 5632 neurons a token, by torch's statistics; y, which both have, is left out."""
    case = problem(tokens=4096, d_model=2048, d_ff=5632, d_out=2048, density=29 / 5632)
    operands, options = operands_of(case), BlockOptions(activation="relu")
    y_bytes = 4096 * 2048 * 2

    def dense() -> Tensor:
        g = functional.relu(functional.linear(operands.x, operands.first[0], operands.first[1]))
        return functional.linear(g * functional.linear(operands.x, operands.w_up), operands.w_down.t())

    expected = kept_bytes(dense) - y_bytes
    assert expected >= 3 * 4096 * 5632 * 2
    assert kept_bytes(lambda: train_forward(operands, options, Step())[:2]) - y_bytes <= expected / 10


@pytest.mark.parametrize("variant", [each for each, name in KINDS if name == "relu"])
def test_what_is_kept_is_the_hybrid_format_of_the_reference(variant: Variant) -> None:
    case = problem(variant, tokens=500, d_model=256, d_ff=3000, d_out=64, density=0.03)
    case.tensors["x"][11] *= 0  # only its bias is left: no neuron fires
    case.tensors["x"][12] *= 30  # about half of them: a row of the tail
    call = Call(operands=operands_of(case), options=case.options, step=Step(pairs=128))
    with torch.no_grad():
        kept = Kept(*TRAIN_FORWARD(*call.arguments())[3:])
    assert tuple(each.dtype for each in kept) == KEPT_DTYPES
    total = int(kept.row_begin[500])
    hybrid = to_hybrid(kept, torch.bfloat16, 3000)
    assert hybrid.counts[11] == 0 and 12 in hybrid.row_of_tail.tolist() and hybrid.counts.sum() == total
    back = from_hybrid(hybrid, kept.pairs.numel())
    assert torch.equal(back.row_begin, kept.row_begin)
    assert torch.equal(back.pairs[:total], kept.pairs[:total])
    assert torch.equal(back.ups[:total], kept.ups[:total])


def test_a_block_learns_what_is_hot() -> None:
    torch.manual_seed(0)
    case = problem(GATED, tokens=4096, d_model=256, d_ff=2048, d_out=256, density=0.004)
    case.tensors["b_gate"][torch.randperm(2048)[:200]] = 0.5
    operands, state = operands_of(case), TrainingState(2048, torch.device("cuda"))
    steps = []
    for _ in range(8):
        train_block(operands, case.options, state)
        steps.append(state.step)
    assert steps[0].hot == 2048  # dense at first
    assert steps[-1].hot == 256 and steps[-1].order is not None
    assert set(steps[-1].order[:200].tolist()) == set((case.tensors["b_gate"] == 0.5).nonzero()[:, 0].tolist())
    assert state.step_of(256).hot == 2048  # for few tokens, a call costs too much
    assert_right(case, torch.bfloat16, steps[-1])


def test_a_block_is_dense_for_a_while_where_there_is_too_little_place() -> None:
    case = problem(tokens=2048, d_model=64, d_ff=1024, d_out=64, density=0.004)
    operands, state = operands_of(case), TrainingState(1024, torch.device("cuda"))
    for _ in range(8):
        train_block(operands, case.options, state)
    assert state.step.hot == 0
    b_gate = operands.b_gate
    assert b_gate is not None
    with torch.no_grad():
        b_gate += 2.5  # now about half of the neurons fire
    steps = []
    for _ in range(40):
        train_block(operands, case.options, state)
        steps.append(state.step.hot)
    assert steps[:3] == [0] * 3 and steps[3:] == [1024] * 37  # the next look has found it, too


# Activation, share of active neurons, how many are hot, places for pairs.
SMALL = [
    ("relu", 0.1, 0, 128),
    ("relu", 0.1, 96, 128),
    ("relu2", 0.3, 96, 8),  # less place than some tokens need
    ("fatrelu", 0.3, 0, 0),  # none at all
    ("relu", 0.5, 300, 0),  # all are hot
    ("relu2", 0.0, 8, 3),
    ("drelu", 0.3, 96, 8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=("bf16", "fp16"))
@pytest.mark.parametrize(
    ("variant", "activation", "density", "hot", "pairs"),
    [(variant, *each) for each in SMALL for variant in (GATED, PLAIN) if each[0] in variant.activations],
)
def test_sanitize(variant: Variant, activation: str, density: float, hot: int, pairs: int, dtype: torch.dtype) -> None:
    """What sanitize.py runs."""
    case = problem(
        variant, activation, tokens=70, d_model=72, d_ff=300, d_out=136, density=density, extras=pairs > 3, dtype=dtype
    )
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1)).int().cuda() if hot == 96 else None
    found = case.run("cuda", dtype, Step(hot=hot, pairs=pairs, order=order))
    torch.cuda.synchronize()
    assert_near(found, case, dtype)
