"""What decoding needs of whatever computes a model: a plan, or torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_STEP = 256


def places_for(places: int, longest: int) -> int:
    """Return how many places a cache gets that is made as it is needed: calls of about one size share it."""
    return min(longest, -(-places // _STEP) * _STEP)


class Backend(Protocol):
    """A causal language model with a key-value cache.

    Row i of a batch holds its tokens at the places 0, 1, … of its cache. What stands at a later place than that of a
    query does not count.

    Attributes:
        name: What computes, for people.
        longest: How many places the cache of a row has at most.
        largest_batch: How many rows it takes at most; None for any number.
        chunk: How many tokens of a row one call of `fill` takes.
        scores_prompts: Whether it gives the logits behind each token of a prompt.
        vocabulary: The number of token ids.
        chooses: Whether it computes the likeliest next tokens, int64 [batch], in the place of logits.
        device: Where tokens and logits are.
    """

    name: str
    longest: int
    largest_batch: int | None
    chunk: int
    scores_prompts: bool
    vocabulary: int
    chooses: bool
    device: torch.device

    def begin(self, batch: int, places: int) -> bool:
        """Make room for `batch` rows of `places` tokens each; return whether tensors moved since the last time."""

    def fill(self, input_ids: Tensor, start: int, every: bool = False) -> Tensor:
        """Put tokens [batch, tokens] at the places from `start` on of each row.

        Returns:
            The logits behind the last of them, [batch, vocabulary]; with `every`, for which `scores_prompts` must hold,
            behind each of them, [batch, tokens, vocabulary].
        """

    def decode(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Put one token at a place of each row, int64 [batch] both; return the logits behind it, [batch, vocabulary].

        On a GPU nothing waits for the host, so that a CUDA graph can hold the call. The logits may be overwritten by
        the next call.
        """
