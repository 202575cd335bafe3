"""Count which neurons of a block fire, from what its activation is applied to."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from twellc.base.arrays import to_numpy
from twellc.base.errors import UserError
from twellc.passes.block_profile import POSITION_BINS, BlockProfile, shapes
from twellc.plugins.library import TILE
from twellc.plugins.meaning import activate


class FiringCounter:
    """Counts which neurons of one block fire. Nothing here waits for a GPU but `profile`."""

    def __init__(
        self, module: str, variant: str, activation: str, threshold: float | Tensor, d_ff: int, device: torch.device
    ) -> None:
        self.module, self._variant = module, variant
        self._activation, self._threshold = activation, threshold
        self._d_ff = d_ff
        self.counts = {
            name: torch.zeros(shape, dtype=torch.int64, device=device) for name, shape in shapes(d_ff).items()
        }
        self.nan = torch.zeros((), dtype=torch.bool, device=device)

    def add(self, z: Tensor, bins: Tensor | None) -> None:
        """Count tokens.

        Args:
            z: What the activation is applied to, [tokens, d_ff].
            bins: The bin of each token's position, int64 [tokens]; None where positions are not known.
        """
        counts = self.counts
        self.nan |= z.isnan().any()
        fired = activate(z, self._activation, self._threshold) != 0
        counts["firing"] += fired.sum(0)
        whole = torch.nn.functional.pad(fired, (0, -self._d_ff % TILE))
        tiles = whole.reshape(len(z), whole.shape[1] // TILE, TILE).sum(2)
        active = tiles.sum(1)
        ones = torch.ones_like(tiles)
        counts["tiles"].index_add_(0, tiles.flatten(), ones.flatten())
        counts["rows"].index_add_(0, active, ones[:, 0])
        if bins is not None:
            counts["positions"].index_add_(0, bins, torch.stack([ones[:, 0], active], 1))

    @property
    def tokens(self) -> Tensor:
        """How many tokens were seen, int64 []."""
        return self.counts["rows"].sum()

    def profile(self, counts: Mapping[str, Tensor] | None = None) -> BlockProfile:
        """Return what was counted, or `counts` in its place, such as those of several counters together."""
        arrays = {name: to_numpy(tensor).copy() for name, tensor in (counts or self.counts).items()}
        return BlockProfile(self.module, self._variant, self._activation, **arrays)


def refuse_nan(counters: Collection[FiringCounter], where: str) -> None:
    """Raise `UserError` if one of some blocks has counted a NaN, in data that messages call `where`."""
    for each, is_nan in zip(counters, torch.stack([each.nan for each in counters]).tolist(), strict=True):
        if is_nan:
            fix = "Check the data and the model's weights; where float16 overflows, --dtype bf16 helps."
            raise UserError(f"layer {each.module}", f"its activations are NaN for {where}", fix=fix)


def position_bins(positions: Tensor) -> Tensor:
    """Return the bin of each position: 0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on."""
    return torch.frexp(positions.double()).exponent.long().clamp(max=POSITION_BINS - 1)
