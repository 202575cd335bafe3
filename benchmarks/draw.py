"""Draw blocks and inputs whose neurons fire equally often, by Zipf's law, or as those of a trained model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twellc.benchmarking.activity import (
    CERTAIN,
    draw_activity,
    hot_neurons_first,
    quantile,
    thresholds,
    zipf_offsets,
)
from twellc.benchmarking.forms import Block
from twellc.benchmarking.timing import sets_in_rotation
from twellc.plugins.block import Operands

DISTRIBUTIONS = ("equal", "zipf", "trained")
TRAINED_LAYERS = 4
_MANY_TOKENS = 8192  # beyond it activations push weights out of L2 anyway
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

    def part(self, chosen: Tensor) -> Weights:
        """Return a block of some of the neurons, in the order of `chosen`, int64 [neurons]."""
        block, down = self.block, self.down_by_neuron[chosen]
        assert block.up is not None
        return Weights(Block(block.gate[chosen], block.up[chosen], down.t().contiguous()), down)

    def operands(self, x: Tensor) -> Operands[Tensor]:
        """Return what the op of a gated block takes."""
        assert self.block.up is not None
        return Operands(x=x, w_gate=self.block.gate, w_up=self.block.up, w_down=self.down_by_neuron)


def offsets(rates: Tensor, activity: Tensor) -> Tensor:
    """Return what to add to each neuron's gate values so that it fires for its share of the tokens.

    Args:
        rates: The neurons' shares of tokens, [d_ff].
        activity: What the activity of a token comes to, as a share of neurons, [tokens].

    Returns:
        float32 [d_ff]. Neurons with a rate of 0 never fire.
    """
    shares = torch.linspace(0, 1, min(len(activity), _STANDING_FOR_ALL), device=activity.device)
    threshold = quantile(activity.sort().values[(shares * (len(activity) - 1)).round().long()])
    low, high = (torch.full_like(rates, sign * CERTAIN) for sign in (-1, 1))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fires = torch.special.ndtr(middle[:, None] - threshold).mean(1)
        low, high = torch.where(fires < rates, middle, low), torch.where(fires < rates, high, middle)
    return torch.where(rates > 0, (low + high) / 2, -CERTAIN)


def weight_sets(tokens: int, d_model: int, d_ff: int) -> int:
    """Return how many sets of weights rotate."""
    return 2 if tokens > _MANY_TOKENS else sets_in_rotation(3 * d_model * d_ff * 2)


def make_inputs(
    tokens: int, d_model: int, d_ff: int, dtype: torch.dtype, neurons: Neurons, variant: str, device: str
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
    activity = draw_activity(tokens, density, device)
    x = draw(tokens, d_model)
    x[:, 0] = thresholds(activity, density) * d_model**0.5
    x[:, 1] = d_model**0.5
    if neurons.heavy > 0:
        x[:, 2] = 0
        x[tokens // 2, 2] = CERTAIN * d_model**0.5
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
        gate[:, 1] = hot_neurons_first(offset, neurons.hot) / d_model**0.5
        up = None if variant == "plain" else (draw(d_ff, d_model) / d_model**0.5).to(dtype)
        down = (draw(d_model, d_ff) * 0.2).to(dtype)
        sets.append(Weights(Block(gate.to(dtype), up, down), down.t().contiguous()))
    return x.to(dtype), sets
