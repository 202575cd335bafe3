"""Draw blocks and inputs whose neurons fire equally often, by Zipf's law, or as those of a trained model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twellc.benchmarking.forms import Block
from twellc.decisions.times import zipf_rates
from twellc.passes.block_profile import hot_first

DISTRIBUTIONS = ("equal", "zipf", "trained")
TRAINED_LAYERS = 4
# Weights in rotation come to about this much, several times the L2 of any GPU.
_ROTATED_BYTES = 512 << 20
# So many standard deviations from zero a gate value is active, or is not, whatever else is drawn.
_CERTAIN = 30.0
_TRAINED = Path(__file__).with_name("data") / "trained_rates.npz"  # README.md beside it says where it is from
# Tokens that stand for all of a call when the neurons' offsets are worked out, and halvings of the interval.
_STANDING_FOR_ALL = 256
_HALVINGS = 40


@dataclasses.dataclass(frozen=True)
class Neurons:
    """How often the neurons of a block fire.

    Attributes:
        distribution: `equal`, `zipf` or `trained`.
        density: Share of gate activations that are not zero; of trained neurons it follows from the layer.
        layer: Of trained neurons, 0 to 3.
        heavy: So many neurons, the first, are active for the token in the middle.
        hot: So many, those that fire most often, come first, as the compiler puts them.
    """

    distribution: str = "equal"
    density: float = 0.005
    layer: int = 0
    heavy: int = 0
    hot: int = 0

    def rates(self) -> Tensor:
        """Return the trained layer's share of tokens for which each neuron fires, float32 [5632]."""
        with np.load(_TRAINED) as arrays:
            return torch.from_numpy(arrays[f"l{self.layer}"])


@dataclasses.dataclass(frozen=True)
class Weights:
    """A block for torch, and its down projection [d_ff, d_out] as the kernels read it."""

    block: Block
    down_by_neuron: Tensor


def quantile(p: Tensor) -> Tensor:
    """Where a standard normal variable is exceeded with probability p; for 0 where that never happens here."""
    value: Tensor = -torch.special.ndtri(p.double()).float()
    return value.clamp(-_CERTAIN, _CERTAIN)


def offsets(rates: Tensor, activity: Tensor) -> Tensor:
    """Return what to add to each neuron's gate values so that it fires for its share of the tokens.

    A gate value is a standard normal variable plus the neuron's offset minus `quantile` of the token's activity.

    Args:
        rates: The neurons' shares of tokens, [d_ff].
        activity: What the activity of a token comes to, as a share of neurons, [tokens].

    Returns:
        float32 [d_ff]. Neurons with a rate of 0 never fire.
    """
    shares = torch.linspace(0, 1, min(len(activity), _STANDING_FOR_ALL), device=activity.device)
    threshold = quantile(activity.sort().values[(shares * (len(activity) - 1)).round().long()])
    low, high = (torch.full_like(rates, sign * _CERTAIN) for sign in (-1, 1))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fires = torch.special.ndtr(middle[:, None] - threshold).mean(1)
        low, high = torch.where(fires < rates, middle, low), torch.where(fires < rates, high, middle)
    return torch.where(rates > 0, (low + high) / 2, -_CERTAIN)


def weight_sets(tokens: int, d_model: int, d_ff: int) -> int:
    """Return how many sets of weights rotate."""
    return 2 if tokens > 8192 else max(2, min(12, _ROTATED_BYTES // (3 * d_model * d_ff * 2)))


def make_inputs(
    tokens: int, d_model: int, d_ff: int, dtype: torch.dtype, neurons: Neurons, variant: str, device: str = "cuda"
) -> tuple[Tensor, list[Weights]]:
    """Draw x [tokens, d_model] and sets of weights.

    The first column of x carries how active a token is (log-normal, scaled to the density; at a density of 1, all is),
    the second is constant: its weights carry how active a neuron is. The third one makes the heavy neurons active for
    the token in the middle. Given how active the token is, neurons fire independently of each other.
    """

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    rates = neurons.rates().to(device) if neurons.distribution == "trained" else None
    density = float(rates.mean()) if rates is not None else neurons.density
    activity = torch.exp(0.8 * draw(tokens))
    activity = (activity / activity.mean() * density).clamp(max=0.9)
    x = draw(tokens, d_model)
    x[:, 0] = (quantile(activity) if density < 1 else -_CERTAIN) * d_model**0.5
    x[:, 1] = d_model**0.5
    if neurons.heavy > 0:
        x[:, 2] = 0
        x[tokens // 2, 2] = _CERTAIN * d_model**0.5
    sets = []
    for _ in range(weight_sets(tokens, d_model, d_ff)):
        gate = draw(d_ff, d_model) / d_model**0.5
        gate[:, 0] = -1 / d_model**0.5
        if neurons.heavy > 0:
            gate[:, 2] = 0
            gate[: neurons.heavy, 2] = 1 / d_model**0.5
        offset = torch.zeros(d_ff, device=device)
        if rates is not None:
            offset = offsets(rates, activity)
        elif neurons.distribution == "zipf":
            offset = zipf_offsets(d_ff, density, device)
        order = hot_first((offset + _CERTAIN).cpu().numpy(), neurons.hot)  # 0 where one never fires
        gate[:, 1] = offset[torch.from_numpy(order).to(device)] / d_model**0.5
        up = None if variant == "plain" else (draw(d_ff, d_model) / d_model**0.5).to(dtype)
        down = (draw(d_model, d_ff) * 0.2).to(dtype)
        sets.append(Weights(Block(gate.to(dtype), up, down), down.t().contiguous()))
    return x.to(dtype), sets


def zipf_offsets(d_ff: int, density: float, device: str = "cuda") -> Tensor:
    """Return what to add to the gate values of neurons, in random order, that fire by Zipf's law: float32 [d_ff]."""
    share = torch.from_numpy(zipf_rates(d_ff, density)).to(device)[torch.randperm(d_ff, device=device)]
    return quantile(torch.tensor(density, device=device)) - quantile(share)
