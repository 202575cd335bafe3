"""How often the neurons of a block fire: what a profile knows of it. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twellc.plugins.library import TILE

Counts = NDArray[np.int64]

# Positions in a sequence are counted in bins: 0, 1, 2-3, 4-7, 8-15 and so on, as long as sequences can be.
POSITION_BINS = 32
# A claim of confidence is wrong in one case of twenty.
_DOUBT = 0.05


@dataclass(frozen=True, eq=False)
class BlockProfile:
    """How a block's neurons fired while a model ran on some tokens. A neuron fires where its activation is not zero.

    Attributes:
        module: Path of the module that holds the block's weights.
        variant: `gated` or `plain`.
        activation: relu, relu2, fatrelu or drelu: of the gate, or of the one projection of a plain block.
        firing: How many tokens each neuron fired for, int64 [d_ff], in the order of the model.
        rows: How many tokens had 0, 1, 2, … neurons firing, int64 [d_ff + 1].
        tiles: How many tiles of a token had 0, 1, 2, … neurons firing, int64 [257]. A tile is 256 neurons that follow
            each other in the order of the model.
        positions: Tokens, and neurons firing for them, by position in the sequence, int64 [32, 2]: positions 0, 1, 2-3,
            4-7, 8-15 and so on. Tokens whose position is not known are left out.
        experts: Of experts, how many tokens were sent to each, and how many neurons fired there for all of them, int64
            [experts, 2]. A token counts once for each of its experts, and the neurons at one place in all experts are
            one in the other counts. None of other blocks.
    """

    module: str
    variant: str
    activation: str
    firing: Counts
    rows: Counts
    tiles: Counts
    positions: Counts
    experts: Counts | None = None

    @property
    def d_ff(self) -> int:
        """The number of neurons."""
        return len(self.firing)

    @property
    def tokens(self) -> int:
        """How many tokens were seen."""
        return int(self.rows.sum())

    @property
    def nonzeros(self) -> int:
        """How many activations were not zero, over all tokens and neurons."""
        return int(self.firing.sum())

    @property
    def rates(self) -> NDArray[np.float64]:
        """The share of the tokens that each neuron fired for, float64 [d_ff]."""
        rates: NDArray[np.float64] = self.firing / self.tokens
        return rates

    @property
    def density(self) -> float:
        """The share of the activations that were not zero."""
        return self.nonzeros / (self.tokens * self.d_ff)

    @property
    def mean(self) -> float:
        """Neurons that fire for a token, on average."""
        return self.nonzeros / self.tokens

    @property
    def largest(self) -> int:
        """The largest number of neurons that fired for one token."""
        return int(np.flatnonzero(self.rows)[-1])

    def percentile(self, share: float) -> int:
        """Return how many neurons fire at most for a token, in this share (0 to 1) of the tokens."""
        return int(np.searchsorted(np.cumsum(self.rows), share * self.tokens))

    def tiles_over(self, slots: int) -> float:
        """Return the share of the tiles of tokens in which more than `slots` neurons fired."""
        return float(self.tiles[slots + 1 :].sum() / self.tiles.sum())

    @property
    def order(self) -> Counts:
        """The neurons, the hottest first and those that never fired last, int64 [d_ff]; equal ones keep their order."""
        return np.argsort(-self.firing, kind="stable")

    def carried_by(self, hottest: int) -> float:
        """Return the share of the non-zeros that the `hottest` most active neurons have."""
        return float(self.firing[self.order[:hottest]].sum() / max(self.nonzeros, 1))

    @property
    def never(self) -> NDArray[np.bool_]:
        """Which neurons never fired, bool [d_ff]."""
        never: NDArray[np.bool_] = self.firing == 0
        return never

    def density_by_position(self) -> list[tuple[int, int, float]]:
        """Return first and last position, and the density there, of each bin of positions that has tokens."""
        found = []
        for index, (tokens, nonzeros) in enumerate(self.positions.tolist()):
            if tokens:
                first = 1 << (index - 1) if index else 0
                found.append((first, max(2 * first - 1, 0), nonzeros / (tokens * self.d_ff)))
        return found

    def gain_of_experts(self, sequences: int, sent: int) -> float:
        """Return how many times fewer bytes of weights a step reads if it reads only rows of neurons that fire.

        Without a gate all rows of up are read and of down those that any token of the expert needs; with one all rows
        of the gate, and of up and down those. Tokens and neurons are taken to be independent, as in a step over so
        many sequences: an expert that a share s of the tokens is sent to, and of whose neurons a share a fires, is
        read with the probability 1 - (1 - s)^n, and a row of it with 1 - (1 - s a)^n.

        Args:
            sequences: Tokens of a step, n.
            sent: How many tokens the experts saw; each was sent to several of them.
        """
        assert self.experts is not None
        tokens, fired = self.experts.T.astype(np.float64)
        share, active = tokens / sent, fired / np.maximum(tokens * self.d_ff, 1)
        read = 1 - (1 - share) ** sequences
        rows = 1 - (1 - share * active) ** sequences
        skipped = 2 if self.variant == "gated" else 1
        return float((1 + skipped) * read.sum() / (read.sum() + skipped * rows.sum()))

    def plus(self, other: BlockProfile) -> BlockProfile:
        """Return the profile over the tokens of both."""
        arrays: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in ARRAYS}
        if self.experts is not None and other.experts is not None:
            arrays["experts"] = self.experts + other.experts
        return BlockProfile(self.module, self.variant, self.activation, **arrays)


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a compilation knows of how often neurons fire, and may do with it.

    Attributes:
        blocks: What a profile knows of each block, by module.
        prune_dead: Whether neurons that never fired are removed.
        unseen: A second profile, to count what that loses; None without one.
    """

    blocks: Mapping[str, BlockProfile]
    prune_dead: bool = False
    unseen: Mapping[str, BlockProfile] | None = None


ARRAYS = ("firing", "rows", "tiles", "positions")


def shapes(d_ff: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of a block with `d_ff` neurons."""
    return {"firing": (d_ff,), "rows": (d_ff + 1,), "tiles": (TILE + 1,), "positions": (POSITION_BINS, 2)}


def hot_first(firing: NDArray[np.float64] | Counts, hot: int) -> Counts:
    """Return the order that neurons are put in: the hottest, then the others, then those that never fire.

    Within each part they keep their order; without hot ones all do.

    Args:
        firing: How often each neuron fires, [d_ff].
        hot: How many are hot.
    """
    if not hot:
        return np.arange(len(firing))
    place = np.where(firing > 0, 1, 2)
    place[np.argsort(-firing, kind="stable")[:hot]] = 0
    return np.argsort(place, kind="stable")


def rate_bound(tokens: int) -> float:
    """Return how often, at most, a neuron fires that did not in `tokens` tokens, with a confidence of 95 %.

    The bound is the rate p at which not firing has a probability of 5 %: (1 - p)^tokens = 0.05. For many tokens this is
    3 / tokens («rule of three»). Tokens are taken to be independent; those of one text are less telling.
    """
    return float(-np.expm1(np.log(_DOUBT) / tokens)) if tokens else 1.0
