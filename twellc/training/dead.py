"""Bring neurons back that no token reaches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from twellc.base.errors import UserError
from twellc.training.counts import Fired
from twellc.training.penalty import blocks_of, refuse_other_counts


@torch.no_grad()
def reinitialise_dead(
    model: nn.Module, fired: Mapping[str, Fired], *, step: int, seed: int = 0, share: float = 0.1, std: float = 0.02
) -> Tensor:
    """Move the gate rows of dead neurons towards random ones: W <- (1 - share) W + share N(0, std^2).

    «Sparser, Faster, Lighter Transformer Language Models» (arXiv 2603.23198, C.3) does this after each step. The random
    rows depend on seed, step and block alone: they are the same in every process, also where FSDP2 shards the weights,
    and in a run from a checkpoint. Nothing waits for a GPU.

    Args:
        model: A model that `twellc.optimize(model, training=True)` has returned.
        fired: The result of `take_counts` for the step.
        step: The number of the step.
        seed: Seed of the random rows.
        share: How far the rows move, 0 to 1.
        std: The standard deviation of the random rows.

    Returns:
        How many neurons were dead, int64 [].

    Raises:
        UserError: The model has no such block, a gate weight is not where it was, `fired` is of another model, or a
            number is out of range.
    """
    if not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise UserError("share", "is out of range", got=repr(share), expected="a number from 0 to 1")
    if not isinstance(std, (int, float)) or not 0 <= std < float("inf"):
        raise UserError("std", "is out of range", got=repr(std), expected="a number from 0 on")
    refuse_other_counts(step=step, seed=seed)
    blocks = blocks_of(model)
    if not isinstance(fired, Mapping) or not blocks.keys() <= fired.keys():
        raise UserError(
            "fired", "is not of this model", got=type(fired).__name__, expected="what take_counts(model) has returned"
        )
    other = [path for path, block in blocks.items() if fired[path].counts.shape != (block.layer.d_ff,)]
    if other:
        raise UserError(
            "fired",
            f"has other neurons than layer {other[0]}",
            got=str(list(fired[other[0]].counts.shape)),
            expected=str([blocks[other[0]].layer.d_ff]),
        )
    weights = [block.gate_parameter() for block in blocks.values()]  # any fault shows before the first one moves
    dead: list[Tensor] = []
    for place, ((path, block), weight) in enumerate(zip(blocks.items(), weights, strict=True)):
        neurons = fired[path].dead.to(weight.device)
        mask = torch.zeros(weight.shape[block.gate.transposed], dtype=torch.bool, device=weight.device)
        mask[slice(*block.gate.rows) if block.gate.rows else slice(None)] = neurons
        whole = (mask[None] if block.gate.transposed else mask[:, None]).expand(weight.shape)
        noise = torch.empty(weight.shape, device=weight.device)
        noise.normal_(0, std, generator=_generator(weight.device, seed, step, place))
        _move(weight, whole, noise, share)
        dead.append(neurons.sum())
    return torch.stack([each.to(dead[0].device) for each in dead]).sum()


def _generator(device: torch.device, *numbers: int) -> torch.Generator:
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0] >> 1))


def _move(weight: Tensor, where: Tensor, noise: Tensor, share: float) -> None:
    if isinstance(weight, DTensor):
        where, noise, weight = _own(where, weight), _own(noise, weight), weight.to_local()
    weight.copy_(torch.where(where, torch.lerp(weight.float(), noise, share), weight.float()))


def _own(whole: Tensor, sharded: DTensor) -> Tensor:
    """Return this process's part of a sharded tensor, cut from the whole, which each process has: nothing is sent."""
    spread = distribute_tensor(whole.contiguous(), sharded.device_mesh, sharded.placements, src_data_rank=None)
    local: Tensor = spread.to_local()
    return local
