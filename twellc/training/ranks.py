"""Sums over the processes of a training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed

from twellc.base.errors import UserError

_T = TypeVar("_T")


def in_first(action: Callable[[], _T]) -> _T | None:
    """Run an action in the first process for all, such as to begin a file; all of them have to call this.

    Returns:
        The result of the action; None in the other processes.

    Raises:
        UserError: The action has failed. All processes raise this, so that none waits for one that has ended.
    """
    result: _T | None = None
    failed: list[UserError | None] = [None]
    if not _several() or distributed.get_rank() == 0:
        try:
            result = action()
        except UserError as error:
            if not _several():
                raise
            failed = [error]
    if _several():
        distributed.broadcast_object_list(failed)
    if failed[0] is not None:
        raise failed[0]
    return result


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
