"""Sums over the processes of a training run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed


def is_first() -> bool:
    """Whether this is the process that writes files."""
    return not _several() or distributed.get_rank() == 0


def number_of_ranks() -> int:
    """Return how many processes train."""
    return distributed.get_world_size() if _several() else 1


def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of tensors of one dtype over all processes, by one exchange; all of them have to call this."""
    if not _several() or not tensors:
        return list(tensors)
    device = tensors[0].device
    flat = torch.cat([each.to(device).flatten() for each in tensors])
    distributed.all_reduce(flat)
    parts = torch.split(flat, [each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
