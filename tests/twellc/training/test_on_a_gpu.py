"""Blocks in training on a GPU: by the kernels, or densely where these take nothing; nothing waits for the GPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twellc
from tests import models
from tests.models import Gated
from tests.tolerance import assert_as_accurate
from tests.twellc.eager.test_optimize import Ops
from twellc.eager.optimization import blocks_in_training
from twellc.training import L1Penalty, reinitialise_dead, take_counts

pytestmark = pytest.mark.gpu

TOKENS, D_MODEL, D_FF = 4096, 256, 2048
# By then the first choice of hot neurons has come.
STEPS = 12


def sparse_block(dtype: torch.dtype = torch.bfloat16) -> Any:
    block = Gated(biases="gud", d_model=D_MODEL, d_ff=D_FF)
    with torch.no_grad():
        nn.init.normal_(block.gate.weight, std=D_MODEL**-0.5)
        nn.init.normal_(block.gate.bias, mean=-2.5, std=0.5)
    return block.cuda().to(dtype).train()


def draw(dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, D_MODEL, device="cuda").to(dtype)


def is_sparse(model: nn.Module) -> bool:
    states = [block.training.counted for block in blocks_in_training(model).values()]
    return any(state is not None and state.step.hot < D_FF for state in states)


def gradients(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    y = block(x)
    (y * torch.linspace(-1, 1, y.shape[-1], device="cuda").to(y.dtype)).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | {
        name: parameter.grad.clone() for name, parameter in block.named_parameters() if parameter.grad is not None
    }


def test_gradients_are_as_accurate_as_dense_ones() -> None:
    dense = sparse_block()
    block = twellc.optimize(copy.deepcopy(dense), training=True)
    for _ in range(STEPS):
        block(draw())
    x = draw()
    with Ops() as ops:
        found = gradients(block, x)
    assert ops.counts == {"train_forward": 1, "train_backward": 1} and is_sparse(block)
    plain, truth = gradients(dense, x), gradients(copy.deepcopy(dense).double(), x.double())
    assert found.keys() == truth.keys()
    for name in truth:
        assert_as_accurate(found[name], plain[name], truth[name])


def test_penalty_and_counts() -> None:
    block = twellc.optimize(sparse_block(), training=True)
    penalty = L1Penalty(block, 1.0)
    for _ in range(STEPS):
        block(draw()), penalty(0)
    take_counts(block)
    x = draw()
    block(x)
    g = torch.relu(block.gate(x))
    penalty(0)
    (fired,) = take_counts(block).values()
    assert is_sparse(block) and int(fired.tokens) == TOKENS
    assert torch.equal(fired.counts, (g != 0).sum(0)) or (fired.counts - (g != 0).sum(0)).abs().sum() < 0.001 * TOKENS
    h = g.double() * block.up(x).double()
    torch.testing.assert_close(penalty.value.double(), h.abs().sum(-1).mean(), rtol=1e-2, atol=0)


def test_float32_without_autocast_is_dense_and_counted() -> None:
    dense = sparse_block(torch.float32)
    block = twellc.optimize(copy.deepcopy(dense), training=True)
    x = draw(torch.float32)
    with Ops() as ops:
        found = gradients(block, x)
    assert not ops.counts
    for name, gradient in gradients(dense, x).items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)
    (fired,) = take_counts(block).values()
    assert 0.001 < float(fired.density) < 0.1 and int(fired.tokens) == TOKENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_of_float32_weights(dtype: torch.dtype) -> None:
    dense = sparse_block(torch.float32)
    block = twellc.optimize(copy.deepcopy(dense), training=True)
    x = draw(torch.float32)
    with torch.autocast("cuda", dtype=dtype), Ops() as ops:
        found = gradients(block, x)
        plain = gradients(dense, x)
    assert ops.counts["train_forward"] == 1 and found["up.weight"].dtype == torch.float32
    for name, truth in gradients(dense, x).items():
        error, allowed = ((each[name].double() - truth).norm() for each in (found, plain))
        assert error <= 2 * allowed + 1e-6, name


def test_activation_checkpointing_while_what_is_hot_changes() -> None:
    block = twellc.optimize(sparse_block(), training=True)
    other = twellc.optimize(copy.deepcopy(block), training=True)
    for _ in range(2 * STEPS):
        x = draw()
        block.zero_grad()
        other.zero_grad()
        checkpoint(block, x, use_reentrant=False).sum().backward()
        other(x).sum().backward()
        for (name, one), two in zip(block.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad), name
    assert is_sparse(block)
    assert [int(fired.tokens) for fired in take_counts(block).values()] == [2 * STEPS * TOKENS]


def test_nothing_waits() -> None:
    block = twellc.optimize(sparse_block(), training=True)
    penalty = L1Penalty(block, 1e-3)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-4, fused=True)
    batches = [draw() for _ in range(3)]
    torch.cuda.synchronize()
    for step in range(2 * STEPS):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            (block(batches[step % 3]).float().square().mean() + penalty(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            reinitialise_dead(block, take_counts(block), step=step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert is_sparse(block)


@pytest.mark.slow
def test_compiled() -> None:
    model = nn.Sequential(nn.Linear(D_MODEL, D_MODEL), sparse_block(torch.float32), nn.LayerNorm(D_MODEL))
    model = model.cuda().to(torch.bfloat16).train()
    twellc.optimize(model, training=True)
    penalty = L1Penalty(model, 0.0)
    compiled: Any = torch.compile(copy.deepcopy(model), dynamic=False)
    for _ in range(STEPS):
        x = draw()
        model.zero_grad()
        compiled.zero_grad()
        (model(x).float().square().mean() + penalty(0)).backward()
        compiled(x).float().square().mean().backward()
    for (name, one), other in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert (one.grad.float() - other.grad.float()).norm() <= 0.02 * one.grad.float().norm() + 1e-6, name
    assert is_sparse(model) and is_sparse(compiled)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_that_are_written_out(compiled: bool) -> None:
    dense = models.opt(hidden_size=D_MODEL, word_embed_proj_dim=D_MODEL, ffn_dim=D_FF, dropout=0.0).train()
    with torch.no_grad():
        for layer in dense.model.decoder.layers:
            layer.fc1.bias.fill_(-2.5)
    dense.cuda().bfloat16()
    model = twellc.optimize(copy.deepcopy(dense), training=True)
    penalty = L1Penalty(model, 1e-3)
    run: Any = torch.compile(model, dynamic=False) if compiled else model
    ids = torch.randint(3, 96, (64, 64), device="cuda")
    for _ in range(STEPS):
        model.zero_grad()
        (run(input_ids=ids, labels=ids, use_cache=False).loss + 0 * penalty(0)).backward()
    assert is_sparse(model)
    dense(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    wide = copy.deepcopy(dense).double()
    wide.zero_grad()
    wide(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, one), other, truth in zip(model.named_parameters(), dense.parameters(), wide.parameters(), strict=True):
        found, plain = ((each.grad.double() - truth.grad).norm() for each in (one, other))
        if not name.endswith("k_proj.bias"):  # 0 but for rounding
            assert found <= 2 * plain + 1e-3 * truth.grad.norm(), name
    assert all(int(fired.tokens) == 64 * 64 * STEPS for fired in take_counts(model).values())
