"""One of two processes that train a tiny model together, by DDP or FSDP2 over gloo; prints what came out as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import twellc
from tests import models
from twellc.training import FiringWindow, L1Penalty, reinitialise_dead, take_counts

STEPS = 3


def train(name: str, how: str, rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Train on this process's part of each batch; return what all processes must agree on."""
    model: Any = models.llama() if name == "llama" else models.opt(dropout=0.0)
    layers = model.model.layers if name == "llama" else model.model.decoder.layers
    twellc.optimize(model, training=True).train()
    with torch.no_grad():  # dead from the beginning
        if name == "llama":
            layers[1].mlp.gate_proj.weight[:7] = 0
        else:
            layers[1].fc1.weight[:7] = 0
            layers[1].fc1.bias[:7] = -1
    wrapped: Any = model
    if how == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            if name == "llama":
                fully_shard(layer.mlp)
            fully_shard(layer)
        fully_shard(model)
    penalty = L1Penalty(wrapped, 1e-2)
    window = FiringWindow(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    generator, found = torch.Generator().manual_seed(3), []
    for step in range(STEPS):
        ids = torch.randint(3, 96, (4, 6), generator=generator)[rank::ranks]
        loss = wrapped(input_ids=ids, labels=ids).loss + penalty(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        fired = take_counts(wrapped)
        dead = reinitialise_dead(wrapped, fired, step=step)
        found.append([int(dead), *([int(each.tokens), int(each.counts.sum())] for each in fired.values())])
    window.close()
    profile = window.profile(Path(folder), "data")
    weights = {}
    for path, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        weights[path] = whole.detach().double()
    return {
        "steps": found,
        "sums": {path: float(weight.sum()) for path, weight in weights.items()},
        "squares": {path: float(weight.square().sum()) for path, weight in weights.items()},
        "profile": [[block.tokens, block.nonzeros] for block in profile.blocks.values()],
        "sequences": profile.data[0].sequences,
    }


def train_experts(rank: int, folder: str) -> dict[str, Any]:
    """Let each process reach other experts, and one none of them; return what was counted."""
    experts = twellc.optimize(nn.ModuleList([models.Gated() for _ in range(4)]).train(), training=True)
    window = FiringWindow(experts)
    for expert, tokens in ((0, 5), (rank + 1, 3)):  # experts 0 and 1, or 0 and 2
        experts[expert](torch.randn(tokens, 16))
    profile = window.profile(Path(folder), "data")
    fired = take_counts(experts)
    return {
        "tokens": [int(each.tokens) for each in fired.values()],
        "profile": {module: block.tokens for module, block in profile.blocks.items()},
        "firing": {
            module: int(block.firing.sum()) == int(fired[module].counts.sum())
            for module, block in profile.blocks.items()
        },
    }


if __name__ == "__main__":
    name, how, rank, ranks, store, folder = *sys.argv[1:3], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]
    torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = train_experts(rank, folder) if name == "experts" else train(name, how, rank, ranks, folder)
    sys.stdout.write(json.dumps(found) + "\n")
    if ranks > 1:
        distributed.destroy_process_group()
