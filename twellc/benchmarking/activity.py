"""Draw how active the tokens and the neurons of a synthetic block are.

A gate value is a standard normal variable plus the offset of its neuron minus the `quantile` of its token's activity.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twellc.base.arrays import to_numpy
from twellc.decisions.times import zipf_rates
from twellc.passes.block_profile import hot_first

# A gate value this many standard deviations from zero is surely active, or surely not.
CERTAIN = 30.0
_SPREAD = 0.8  # of the tokens' activity, log-normal
_MOST_ACTIVE = 0.9  # share of neurons


def quantile(p: Tensor) -> Tensor:
    """Return the value that a standard normal variable exceeds with probability p; for p = 0 one out of its reach."""
    value: Tensor = -torch.special.ndtri(p.double()).float()
    return value.clamp(-CERTAIN, CERTAIN)


def draw_activity(tokens: int, density: float, device: str) -> Tensor:
    """Draw for each token the share of neurons that fire, float32 [tokens]: log-normal, with `density` as its mean."""
    activity = torch.exp(_SPREAD * torch.randn(tokens, device=device))
    return (activity / activity.mean() * density).clamp(max=_MOST_ACTIVE)


def thresholds(activity: Tensor, density: float) -> Tensor:
    """Return the value to subtract from the gate values of each token; at a density of 1 all neurons fire."""
    return quantile(activity) if density < 1 else torch.full_like(activity, -CERTAIN)


def zipf_offsets(d_ff: int, density: float, device: str) -> Tensor:
    """Return offsets with which neurons, in random order, fire by Zipf's law: float32 [d_ff]."""
    share = torch.from_numpy(zipf_rates(d_ff, density)).to(device)[torch.randperm(d_ff, device=device)]
    return quantile(torch.tensor(density, device=device)) - quantile(share)


def hot_neurons_first(offsets: Tensor, hot: int) -> Tensor:
    """Put the `hot` neurons that fire most often first, as the compiler does: [d_ff]."""
    active: NDArray[np.float64] = to_numpy(offsets.double() + CERTAIN)  # 0 where one never fires
    return offsets[torch.from_numpy(hot_first(active, hot)).to(offsets.device)]
