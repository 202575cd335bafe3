"""Blocks that are written out in a larger module, in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import twellc
from tests import models
from tests.twellc.eager.test_optimize import Ops, tokens
from tests.twellc.eager.test_written_out import FAMILIES
from tests.twellc.training.test_optimize import assert_same_gradients, gradients, steps, steps_under_autocast
from twellc.base.errors import UserError
from twellc.eager.optimization import blocks_in_training
from twellc.training import L1Penalty, take_counts


def pair() -> tuple[Any, Any]:
    """Return a model for training, and the same without the ops."""
    dense = models.opt(dropout=0.0).train()
    return twellc.optimize(copy.deepcopy(dense), training=True), dense


def hidden_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return what the activations give, by module."""
    found: dict[str, Tensor] = {}
    for place, layer in enumerate(model.model.decoder.layers):
        path = f"model.decoder.layers.{place}"
        layer.activation_fn.register_forward_hook(lambda *args, at=path: found.update({at: args[2]}))
    model(input_ids=ids)
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
def test_penalty_counts_and_gradients(checkpointed: bool) -> None:
    model, dense = pair()
    penalty = L1Penalty(model, 1.0)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    h = hidden_of(dense, tokens())
    terms = torch.stack([each.abs().sum(-1).mean() for each in h.values()]).mean()
    (model(input_ids=tokens(), labels=tokens(), use_cache=False).loss + penalty(0)).backward()
    (dense(input_ids=tokens(), labels=tokens()).loss + terms).backward()
    torch.testing.assert_close(penalty.value, terms.detach())
    assert_same_gradients(model, dense)
    counts = take_counts(model)
    assert list(counts) == ["model.decoder.layers.0", "model.decoder.layers.1"]
    for path, fired in counts.items():
        assert torch.equal(fired.counts, (h[path] != 0).flatten(0, -2).sum(0)) and int(fired.tokens) == 10


def test_autocast() -> None:
    model, dense = pair()
    steps_under_autocast(model, dense)
    for name, gradient in gradients(dense).items():
        if name.endswith("k_proj.bias"):
            continue  # 0 but for rounding
        assert (gradients(model)[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, name


def test_compiled_model() -> None:
    model, dense = pair()
    penalty = L1Penalty(model, 1.0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        loss = compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss + 0 * penalty(0)
    loss.backward()
    steps(dense, tokens())
    assert_same_gradients(model, dense)
    assert all(int(fired.tokens) == 30 for fired in take_counts(compiled).values())


def test_what_is_trained_is_what_the_last_call_says() -> None:
    model, _ = pair()
    with Ops() as ops, torch.no_grad():
        model.eval()(tokens())
    assert not ops.counts
    twellc.optimize(model)
    assert not blocks_in_training(model) and len(twellc.optimized_blocks(model)) == 2
    twellc.optimize(model, training=True)
    assert len(blocks_in_training(model)) == 2
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_dropout_inside_of_the_block() -> None:
    """Behind the activation, as BART has it; behind the block it does not matter."""
    model = FAMILIES["bart"]()[0]
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.activation_dropout = 0.1
    with pytest.warns(UserWarning, match=r"no submodule.*dropout inside of it is switched on"):
        twellc.optimize(model, training=True)
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        layer.activation_dropout = 0.0
    twellc.optimize(model, training=True)
    penalty = L1Penalty(model.train(), 1.0)
    inputs = FAMILIES["bart"]()[1]
    with Ops() as ops:
        model(**inputs)
    assert ops.counts["train_forward"] == 3
    penalty(0)
    model.model.encoder.layers[0].activation_dropout = 0.1
    with Ops() as ops:
        model(**inputs)
    assert ops.counts["train_forward"] == 2
    with pytest.raises(UserError, match=r"model\.encoder\.layers\.0.*ran its original forward"):
        penalty(0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_checkpoints_its_block_alone(reentrant: bool) -> None:
    """What is computed again is outside of the layer's forward, where its projections are what they were."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 40), nn.Linear(40, 16)

        def block(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc2(torch.relu(self.fc1(x)))
            return y

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            checkpoints = self.training and not torch.compiler.is_compiling()
            y: Tensor = checkpoint(self.block, x, use_reentrant=reentrant) if checkpoints else self.block(x)
            return x + y

    dense = Layer().train()
    layer = twellc.optimize(copy.deepcopy(dense), training=True)
    assert len(twellc.optimized_blocks(layer)) == 1
    penalty, x = L1Penalty(layer, 1.0), torch.randn(2, 3, 16)
    for each in (layer, dense):
        each(x).square().sum().backward()
    assert_same_gradients(layer, dense)
    with pytest.raises(UserError, match="ran its original forward"):
        penalty(0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_between_the_projections(reentrant: bool) -> None:
    """Its gradients could not be right."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(16, 40), nn.Linear(40, 16)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.fc1(x)
            if not self.training or torch.compiler.is_compiling():
                y: Tensor = x + self.fc2(torch.relu(hidden))
                return y
            down: Tensor = checkpoint(lambda h: self.fc2(torch.relu(h)), hidden, use_reentrant=reentrant)
            return x + down

    layer = twellc.optimize(Layer().train(), training=True)
    assert len(twellc.optimized_blocks(layer)) == 1
    with pytest.raises(UserError, match="its down projection runs in a checkpoint, and its up projection outside"):
        layer(torch.randn(2, 3, 16, requires_grad=True))
