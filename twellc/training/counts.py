"""Counts of the neurons that fire in training: each call counts, and requests read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from twellc.base.dtypes import dtype_name, option_of
from twellc.base.errors import UserError
from twellc.base.version import __version__
from twellc.firing.counter import FiringCounter, position_bins
from twellc.firing.profile import DataSource, FiringProfile, ProfiledModel
from twellc.loaders.loaded import fingerprint
from twellc.training.penalty import blocks_of
from twellc.training.ranks import summed


@dataclass(frozen=True, eq=False)
class Fired:
    """How often the neurons of a block fired; on the block's device.

    Attributes:
        counts: For how many tokens each neuron fired, int64 [d_ff].
        tokens: The number of tokens, int64 [].
    """

    counts: Tensor
    tokens: Tensor

    @property
    def density(self) -> Tensor:
        """The share of the activations that were not zero, float64 []."""
        return self.counts.sum() / (self.tokens * len(self.counts)).clamp(min=1).double()

    @property
    def dead(self) -> Tensor:
        """The neurons that never fired, bool [d_ff]; none without tokens."""
        return (self.counts == 0) & (self.tokens > 0)

    def plus(self, other: Fired) -> Fired:
        """Return the counts over the tokens of both."""
        return Fired(self.counts + other.counts, self.tokens + other.tokens)


def take_counts(model: nn.Module) -> dict[str, Fired]:
    """Return how often neurons of each block fired since the last call, over all processes, and count from 0 again.

    Nothing waits for a GPU. With several processes all of them have to call this.

    Args:
        model: A model that `twellc.optimize(model, training=True)` has returned.

    Returns:
        The counts by path of the block, in the order of the model.

    Raises:
        UserError: It has no such block.
    """
    blocks = blocks_of(model)
    states = [each.training.state(each.device) for each in blocks.values()]
    taken = summed([each for state in states for each in (state.counts, state.tokens)])
    found = {path: Fired(taken[2 * i].clone(), taken[2 * i + 1].clone()) for i, path in enumerate(blocks)}
    for state in states:
        state.reset()
    return found


class FiringWindow:
    """Counts all data of a profile, tiles and tokens too, while a model trains, until `close`.

    This takes one more product with the gate weight in each call. Padding counts. For blocks that read rows of tokens,
    as OPT's, sequences and positions are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        """Begin to count.

        Raises:
            UserError: The model has no block in training.
        """
        self._blocks = blocks_of(model)
        self._counters: dict[str, FiringCounter] = {}
        self._sequences = 0
        self._dtype = ""
        for path, block in self._blocks.items():
            block.training.observer = self._observer(path)

    def _observer(self, path: str) -> Callable[[Tensor], None]:
        first = path == next(iter(self._blocks))

        def observe(z: Tensor) -> None:
            counter = self._counter(path, z.device)
            self._dtype = dtype_name(z.dtype)
            bins = None
            if z.dim() > 2:  # the sequence is the last axis but the features'
                positions = torch.arange(z.shape[-2], device=z.device)
                bins = position_bins(positions).expand(z.shape[:-1]).flatten()
                self._sequences += z.shape[:-2].numel() if first else 0
            counter.add(z.reshape(-1, z.shape[-1]), bins)

        return observe

    def _counter(self, path: str, device: torch.device) -> FiringCounter:
        if path not in self._counters:
            layer, threshold = self._blocks[path].layer, self._blocks[path].training.options.threshold
            self._counters[path] = FiringCounter(path, layer.variant, layer.activation, threshold, layer.d_ff, device)
        return self._counters[path]

    def close(self) -> None:
        """Stop counting."""
        for block in self._blocks.values():
            block.training.observer = None

    def profile(self, directory: str | os.PathLike[str], data: str) -> FiringProfile:
        """Return the profile over all processes; all of them have to call this.

        The weights moved during the counts: keep the window to the last steps. A block that no token reached, as may
        happen to an expert, is left out.

        Args:
            directory: The folder of the saved model; the profile belongs to these files.
            data: A name for the data.

        Raises:
            UserError: Nothing was counted, or activations were NaN.
        """
        folder = Path(directory)
        # All blocks, in the same order in all processes: each process may have reached other experts.
        counters = [self._counter(path, block.device) for path, block in self._blocks.items()]
        parts = [tensor for counter in counters for tensor in counter.counts.values()]
        wholes = iter(summed(parts))
        nan = summed([counter.nan.long() for counter in counters])
        bad = [path for path, each in zip(self._blocks, nan, strict=True) if each]
        if bad:
            raise UserError(f"layer {bad[0]}", "its activations were NaN in training")
        profiles = [counter.profile({name: next(wholes) for name in counter.counts}) for counter in counters]
        blocks = {each.module: each for each in profiles if each.tokens}
        if not blocks:
            raise UserError("profile", "no step was counted", fix="Begin the window before the last steps.")
        (sequences,) = summed([torch.tensor(self._sequences, device=parts[0].device)])
        tokens = min(block.tokens for block in blocks.values())
        return FiringProfile(
            ProfiledModel(folder.name, "Hugging Face directory", fingerprint(folder), option_of(self._dtype)),
            [DataSource(data, "training steps", int(sequences), tokens)],
            datetime.now(UTC).isoformat(timespec="seconds"),
            __version__,
            ["counted in training, while the weights moved; `twellc profile` counts the finished model"],
            blocks,
        )
