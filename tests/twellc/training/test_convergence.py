"""A small model trained by the ops and by dense torch, from one seed on the same batches: losses, weights, density.

Gates have biases that keep most of them shut, so that the blocks are sparse from the first step on.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
from twellc.eager.optimization import blocks_in_training
from twellc.training import L1Penalty, take_counts


def small_llama(d_model: int, d_ff: int, layers: int) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=d_model,
        intermediate_size=d_ff,
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_act="relu",
        mlp_bias=True,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            nn.init.normal_(layer.mlp.gate_proj.weight, std=d_model**-0.5)
            nn.init.normal_(layer.mlp.gate_proj.bias, mean=-2.0, std=0.5)
    return model.train()


def batches(count: int, batch: int, length: int, device: str) -> list[Tensor]:
    """Return sequences that count up in steps of 1 to 3, from random places on."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        first, step = (torch.randint(low, high, (batch, 1), generator=generator) for low, high in ((0, 64), (1, 4)))
        found.append(((first + step * torch.arange(length)) % 64).to(device))
    return found


class Notes:
    """Notes the L1 term and the active neurons of dense blocks."""

    def __init__(self, model: Any) -> None:
        self.terms: list[Tensor] = []
        self.active: list[Tensor] = []
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_pre_hook(
                lambda _, args: self.terms.append(args[0].abs().sum(-1, dtype=torch.float32).mean())
            )
            layer.mlp.act_fn.register_forward_hook(lambda *args: self.active.append((args[2] != 0).double().mean()))

    def take(self) -> tuple[Tensor, float]:
        term, density = torch.stack(self.terms).mean(), float(torch.stack(self.active).mean())
        self.terms, self.active = [], []
        return term, density


def trained(
    model: Any, data: list[Tensor], twell: bool, autocast: bool, rate: float = 1e-3
) -> tuple[list[float], list[float]]:
    """Train a model; return the losses and densities of all steps."""
    device = data[0].device.type
    penalty = notes = None
    if twell:
        penalty = L1Penalty(twellc.optimize(model, training=True), 1e-3)
    else:
        notes = Notes(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses, densities = [], []
    for step, ids in enumerate(data):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        if penalty is not None:
            term = penalty(step)
            fired = take_counts(model).values()
            densities.append(float(torch.stack([each.density for each in fired]).mean()))
        else:
            assert notes is not None
            value, density = notes.take()
            term = 1e-3 * value
            densities.append(density)
        (loss + term).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), densities


def test_on_a_cpu() -> None:
    """In float32 both are the same but for the order of sums."""
    dense, data = small_llama(32, 96, 2), batches(25, 4, 16, "cpu")
    model = copy.deepcopy(dense)
    expected, dense_density = trained(dense, data, twell=False, autocast=False, rate=3e-3)
    found, density = trained(model, data, twell=True, autocast=False, rate=3e-3)
    assert expected[-1] < 0.8 * expected[0]
    assert found == pytest.approx(expected, rel=2e-3)
    assert density == pytest.approx(dense_density, abs=2e-3) and 0.005 < density[0] < 0.2
    for (name, one), (_, other) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm() + 1e-3, name


def apart(one: list[float], other: list[float], width: int = 10) -> float:
    """Return how far two curves are from each other at most, each the means over so many steps."""
    means = [[sum(each[at : at + width]) / width for at in range(0, len(each), width)] for each in (one, other)]
    return max(abs(a - b) for a, b in zip(*means, strict=True))


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu() -> None:
    """In bfloat16 both go the same way, and end up as sparse.

    Training multiplies differences by rounding. So the yardstick is a second dense run with the sequences of each batch
    in reverse order, whose losses and gradients are the same but for the order of sums. Once the loss is near 0, spikes
    come at steps that differ even among dense runs, whose densities are then up to four times apart.
    """
    dense, data = small_llama(512, 2048, 4).cuda(), batches(150, 32, 128, "cuda")
    model, turned = copy.deepcopy(dense), copy.deepcopy(dense)
    expected, dense_density = trained(dense, data, twell=False, autocast=True)
    same, _ = trained(turned, [ids.flip(0) for ids in data], twell=False, autocast=True)
    found, density = trained(model, data, twell=True, autocast=True)
    assert 0.001 < density[0] < 0.1  # so the sparse kernels ran
    steps = [block.training.state(torch.device("cuda", 0)).step for block in blocks_in_training(model).values()]
    assert any(step.hot < 2048 for step in steps)
    assert found[:3] == pytest.approx(expected[:3], rel=1e-3)
    assert apart(found[:60], expected[:60]) <= 3 * apart(same[:60], expected[:60]) + 0.02 * max(expected)
    assert apart(density[:40], dense_density[:40]) <= 0.08 * min(dense_density[:40])
    assert max(expected[-1], found[-1]) < 0.5 * expected[0]
    assert sum(density[-20:]) / 20 < 0.7 * density[0]
