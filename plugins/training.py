"""A block in training: what is counted, and how the next step computes it.

    state = TrainingState(d_ff, device)
    y, l1 = train_block(operands, options, state)

Which neurons are hot, and whether the block is computed densely, is decided on the host from the counts of steps
before: they are copied while the GPU goes on, and looked at once they are there. So nothing waits. A block begins
dense. Under CUDA-graph capture the last decision stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.gradients.call import Step
from twellc.plugins.gradients.ops import train_forward


class TrainingState:
    """What a block in training has counted.

    Attributes:
        counts: int64 [d_ff], on the device: for how many tokens each neuron was active since `reset`.
        tokens: int64, on the device: the tokens since `reset`.
    """

    def __init__(self, d_ff: int, device: torch.device) -> None:
        """Make one for a block with so many neurons."""
        self.counts = torch.zeros(d_ff, dtype=torch.int64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.step = Step(hot=d_ff)

    def reset(self) -> None:
        """Count from 0 again; how the block is computed stays."""
        self.counts.zero_()
        self.tokens.zero_()


def train_block(operands: Operands[Tensor], options: BlockOptions, state: TrainingState) -> tuple[Tensor, Tensor]:
    """Compute a block whose gradients are wanted.

    Args:
        operands: Its tensors, as `torch.ops.twell.gated_mlp` and `mlp` take them.
        options: Its activation and threshold; `hot` is not looked at.
        state: Its own, where neurons that fire are counted.

    Returns:
        y [..., d_out], and the L1 term: the sum over neurons of |h|, mean over tokens, float32. Both are differentiable.
    """
    y, l1, counts = train_forward(operands, options, state.step)
    state.counts += counts
    state.tokens += operands.x.numel() // operands.x.shape[-1]
    return y, l1
