"""Gradients of the twell ops on a CPU: against finite differences, and whatever torch does to an op that is trained."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.plugins.training_blocks import KINDS, THRESHOLDS, problem
from twellc.plugins.block import GATED, PLAIN, BlockOptions, Operands, Variant
from twellc.plugins.gradients_call import Call, Step
from twellc.plugins.gradients_ops import TRAIN_FORWARD, train_forward
from twellc.plugins.ops import OPS, run_block
from twellc.plugins.training import TrainingState, choose, train_block


def leaves(variant: Variant, dtype: torch.dtype = torch.float64, **sizes: int) -> Operands[Tensor]:
    """Return all tensors that a block may have, each of which wants a gradient."""
    shape = {"tokens": 5, "d_model": 8, "d_ff": 24, "d_out": 16, **sizes}
    tensors = problem(variant, density=0.5, extras=True, **shape).tensors
    return Operands(**{name: value.to(dtype).requires_grad_() for name, value in tensors.items()})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("variant", "activation"), KINDS)
def test_gradients_are_those_of_finite_differences(variant: Variant, activation: str) -> None:
    operands = leaves(variant)
    names = list(operands.named())
    options = BlockOptions(activation=activation, threshold=THRESHOLDS.get(activation, 0.0))

    def y_and_l1(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return train_forward(Operands(**dict(zip(names, tensors, strict=True))), options, Step())[:2]

    def y(*tensors: Tensor) -> Tensor:
        return run_block(Operands(**dict(zip(names, tensors, strict=True))), options)

    assert torch.autograd.gradcheck(y_and_l1, tuple(operands.named().values()))
    assert torch.autograd.gradcheck(y, tuple(operands.named().values()), fast_mode=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("variant", "activation"), KINDS)
def test_torch_takes_the_ops(variant: Variant, activation: str) -> None:
    operands, options = leaves(variant), BlockOptions(activation=activation)
    torch.library.opcheck(TRAIN_FORWARD, tuple(Call(operands=operands, options=options, step=Step()).arguments()))
    torch.library.opcheck(OPS[variant], (*operands.arguments(), *options.arguments()))


def test_the_l1_term_is_the_mean_over_tokens_of_the_sum_over_neurons() -> None:
    operands, options = leaves(GATED), BlockOptions(activation="relu")
    _, l1, counts = train_forward(operands, options, Step())
    assert operands.w_gate is not None and operands.b_gate is not None and operands.b_up is not None
    g = torch.relu(operands.x @ operands.w_gate.t() + operands.b_gate)
    h = g * (operands.x @ operands.w_up.t() + operands.b_up)
    torch.testing.assert_close(l1, h.abs().sum(1).mean())
    assert counts.tolist() == (g != 0).sum(0).tolist() and counts.dtype == torch.int32


def test_only_what_is_wanted_is_computed() -> None:
    operands = leaves(GATED)
    for name, tensor in operands.named().items():
        tensor.requires_grad_(name == "x")
    run_block(operands, BlockOptions(activation="relu")).sum().backward()
    assert [name for name, tensor in operands.named().items() if tensor.grad is not None] == ["x"]


def test_gradients_are_added_to_those_that_are_there() -> None:
    operands, options = leaves(GATED), BlockOptions(activation="relu2")
    run_block(operands, options).sum().backward()
    once = {name: tensor.grad.clone() for name, tensor in operands.named().items() if tensor.grad is not None}
    run_block(operands, options).sum().backward()
    for name, tensor in operands.named().items():
        torch.testing.assert_close(tensor.grad, 2 * once[name])


def test_a_second_derivative_is_refused() -> None:
    operands = leaves(GATED)
    (gradient,) = torch.autograd.grad(
        run_block(operands, BlockOptions(activation="relu2")).sum(), operands.x, create_graph=True
    )
    with pytest.raises(NotImplementedError, match=r"no second derivative.*twellc\.restore"):
        gradient.sum().backward()


@pytest.mark.parametrize("variant", [GATED, PLAIN])
def test_derivatives_that_there_are_not_are_refused(variant: Variant) -> None:
    operands, options = leaves(variant), BlockOptions(activation="relu")

    def y(x: Tensor) -> Tensor:
        return run_block(Operands(**{**operands.named(), "x": x}), options)

    x = operands.x.detach()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"no derivative in forward mode.*twellc\.restore"):
            torch.func.jvp(y, (x,), (x,))
        for tensor in operands.named().values():
            tensor.requires_grad_(False)  # then nothing is recorded, and a tangent must not be lost
    with pytest.raises(NotImplementedError, match=r"not differentiable by torch\.func.*twellc\.restore"):
        torch.func.grad(lambda x: y(x).sum())(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        operands = leaves(GATED, torch.float32, d_out=8)
        for name, tensor in operands.weights.named().items():
            setattr(self, name, nn.Parameter(tensor.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.named_parameters())
        return run_block(Operands(x=x, residual=x, **weights), BlockOptions(activation="relu"))


def gradients_of(run: Any, block: Block, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    run(x).float().square().mean().backward()
    return [parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None]


def test_compiled_and_checkpointed_blocks_have_the_same_gradients() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 5, 8)
    expected = gradients_of(block, block, x)
    assert len(expected) == 6
    for run in (
        torch.compile(block, fullgraph=True, backend="aot_eager"),
        lambda x: checkpoint(block, x, use_reentrant=False),
        lambda x: checkpoint(block, x.requires_grad_(), use_reentrant=True),
    ):
        for found, gradient in zip(gradients_of(run, block, x), expected, strict=True):
            torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_and_gradients_have_the_dtype_of_parameters(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(5, 8)
    expected = gradients_of(block, block, x)
    with torch.autocast("cpu", dtype):
        y = block(x)
        found = gradients_of(block, block, x)
    assert y.dtype == torch.float32  # as the residual
    for gradient, reference in zip(found, expected, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, reference, rtol=0.05, atol=0.02)
    with torch.autocast("cpu", dtype):
        assert torch.ops.twell.mlp(x, block.w_up, None, block.w_down, None, None, "relu").dtype == dtype


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(hot=12), "hot must be d_ff = 24 or a multiple of 8 below it, got 12"),
        (Step(hot=32), "hot must be d_ff = 24"),
        (Step(pairs=-1), "pairs must be at least 0, got -1"),
        (Step(order=torch.arange(24)), r"order must be int32 \[24\]"),
    ],
)
def test_a_step_that_cannot_be_is_refused(step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_forward(leaves(GATED), BlockOptions(activation="relu"), step)


def test_no_tokens_give_zeros() -> None:
    operands = leaves(GATED)
    empty = Operands(**{**operands.named(), "x": operands.x.detach()[:0], "residual": None})
    y, l1, counts = train_forward(empty, BlockOptions(activation="relu"), Step())
    (y.sum() + l1).backward()
    assert y.shape == (0, 16) and l1 == 0 and counts.sum() == 0
    assert operands.w_up.grad is not None and operands.w_up.grad.abs().sum() == 0


def rates(d_ff: int, hot: int, rate: float, rest: float) -> Tensor:
    """Return counts of a million tokens: `hot` neurons, the last ones, fire at `rate`, the others at `rest`."""
    return (torch.tensor([rest] * (d_ff - hot) + [rate] * hot) * 1e6).long()


@pytest.mark.parametrize(
    ("counts", "hot"),
    [
        (rates(5632, 0, 0.0, 29 / 5632), 0),
        (rates(5632, 500, 0.2, 0.001), 512),
        (rates(5632, 0, 0.0, 0.5), 5632),
        (rates(100, 0, 0.0, 0.001), 0),
        (rates(5632, 0, 0.0, 0.0), 0),
    ],
)
def test_neurons_are_hot_where_that_takes_less_time(counts: Tensor, hot: int) -> None:
    order, numbers = choose(counts / 1e6)
    found, pairs, cost = numbers.tolist()
    assert found == hot
    assert sorted(order.tolist()) == list(range(len(counts)))
    assert counts[order.long()].diff().max() <= 0  # those that fire most often first
    cold = counts[order.long()][found:].sum() / 1e6
    assert found == len(counts) or (pairs >= 2 * cold and cost <= 950)  # place for twice as many


def test_a_block_in_training_counts_and_chooses_later() -> None:
    operands, options = leaves(GATED, torch.float32), BlockOptions(activation="relu")
    state, expected = TrainingState(24, torch.device("cpu")), torch.zeros(24, dtype=torch.int64)
    steps = []
    for _ in range(8):
        y, l1 = train_block(operands, options, state)
        steps.append(state.step)
        expected += train_forward(operands, options, Step())[2]
        (y.sum() + l1).backward()
    assert state.counts.tolist() == expected.tolist() and state.tokens == 8 * 5
    # The fourth call compares with what the second has seen, and the seventh is the first that may do as it has chosen.
    assert [step.order is None for step in steps] == [True] * 6 + [False] * 2
    state.reset()
    assert state.counts.sum() == 0 and state.tokens == 0 and state.step is steps[-1]


def test_nothing_changes_while_calls_wait_for_their_backward() -> None:
    operands, options = leaves(GATED, torch.float32), BlockOptions(activation="relu")
    state = TrainingState(24, torch.device("cpu"))
    waiting = [train_block(operands, options, state)[0] for _ in range(12)]
    assert state.step.order is None  # the seventh might have changed
    waiting.pop(0).sum().backward()
    train_block(operands, options, state)
    assert state.step.order is None
    waiting.clear()
    train_block(operands, options, state)
    assert state.step.order is not None
