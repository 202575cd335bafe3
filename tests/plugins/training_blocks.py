"""Blocks in training for tests: random tensors whose neurons fire as often as asked for, and their gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributions import Normal

from twellc.plugins.block import GATED, PLAIN, BlockOptions, Operands, Variant
from twellc.plugins.gradients_call import Step
from twellc.plugins.gradients_ops import train_forward

L1_FACTOR = 0.3
THRESHOLDS = {"fatrelu": 0.25}
KINDS = [(variant, name) for variant in (GATED, PLAIN) for name in variant.activations]


@dataclass(frozen=True)
class Problem:
    tensors: dict[str, Tensor]
    dy: Tensor
    options: BlockOptions

    def run(self, device: str, dtype: torch.dtype, step: Step, l1_factor: float = L1_FACTOR) -> dict[str, Tensor]:
        """Return y, the L1 term, the counts, and the gradients of y * dy + l1_factor * the L1 term."""
        tensors = {name: value.detach().clone().to(device, dtype) for name, value in self.tensors.items()}
        for value in tensors.values():
            value.requires_grad_()
        y, l1, counts = train_forward(Operands(**tensors), self.options, step)
        ((y * self.dy.to(device, dtype)).sum() + l1.to(dtype) * l1_factor).backward()
        gradients = {f"d{name}": value.grad for name, value in tensors.items()}
        assert all(each is not None for each in gradients.values())
        return {"y": y.detach(), "l1": l1.detach(), "counts": counts, **gradients}  # type: ignore[dict-item]


def problem(
    variant: Variant = GATED,
    activation: str = "relu",
    *,
    tokens: int = 40,
    d_model: int = 64,
    d_ff: int = 96,
    d_out: int = 64,
    density: float = 0.1,
    extras: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Problem:
    """Return a block of which about `density` of the pairs are active; `extras`: with all biases and a residual."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=source) * scale).to(dtype)

    tensors = {"x": draw(tokens, d_model), "w_up": draw(d_ff, d_model, scale=d_model**-0.5)}
    if variant is GATED:
        tensors["w_gate"] = draw(d_ff, d_model, scale=d_model**-0.5)
    tensors["w_down"] = draw(d_ff, d_out, scale=d_ff**-0.5)
    shift = float(Normal(0.0, 1.0).icdf(torch.tensor(min(max(density, 1e-6), 1 - 1e-6))))
    tensors["b_gate" if variant is GATED else "b_up"] = torch.full((d_ff,), shift).to(dtype)
    if extras:
        tensors["b_down"], tensors["residual"] = draw(d_out), draw(tokens, d_out)
        if variant is GATED:
            tensors["b_up"] = draw(d_ff)
    options = BlockOptions(activation=activation, threshold=THRESHOLDS.get(activation, 0.0))
    return Problem(tensors, draw(tokens, d_out), options)
