"""A block in training: what is counted, and how the next steps compute it.

    state = TrainingState(d_ff, device)
    y, l1 = train_block(operands, options, state)

Which neurons are computed densely follows from how often each was active in calls before. A block begins dense. Now
and then a few small kernels choose anew on the device; the host reads what they chose `_DELAY` calls later, when it has
long been there, so that nothing waits, and so that the same run chooses the same at the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.gradients.call import Step
from twellc.plugins.gradients.ops import train_forward

# What a step costs, in the time that the dense products of a training step take for a neuron and a token: measured on
# an H100 (benchmarks/train.py), and much alike elsewhere, as products and gathers grow with the same widths.
_PAIR_COST = 77.0
_GATE_COST = 0.11
# A block is computed sparsely from so many tokens on, and if that takes at most this part of the dense time.
_FEWEST_TOKENS = 2048
_MOST_COST = 0.95
# Hot neurons come in whole tiles of a product.
_TILE = 128
# Place for pairs, against what calls before have needed: a text may be denser than the one before.
_SPARE_FACTOR, _SPARE_PAIRS = 2, 16
# Calls at which to choose: these, then every _INTERVAL-th.
_FIRST_CALLS = (1, 2, 4, 8)
_INTERVAL = 16
_DELAY = 2


@dataclass(frozen=True)
class _Choice:
    """A choice that is on its way to the host.

    Attributes:
        call: The number of the call that made it.
        order: int32 [d_ff], on the device.
        numbers: int64 [2], on the host once the event has passed: hot neurons, and places for pairs a token.
        event: What tells that; None where the device is the host.
    """

    call: int
    order: Tensor
    numbers: Tensor
    event: torch.cuda.Event | None


def choose(counts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return all neurons, those first that are active most often, and how many of them are hot, with pairs a token.

    Args:
        counts: int64 [d_ff]: for how many tokens each was active.
        tokens: int64: of how many.

    Returns:
        The order, int32 [d_ff], and int64 [2], both on the device of `counts`.
    """
    d_ff = counts.shape[0]
    rates, order = torch.sort(counts.double() / tokens.clamp(min=1), descending=True, stable=True)
    pairs = torch.cat([rates.sum().view(1), rates.sum() - rates.cumsum(0)]).clamp(min=0)[:d_ff:_TILE]
    hot = torch.arange(0, d_ff, _TILE, device=counts.device)
    cost = hot + _GATE_COST * (d_ff - hot) + _PAIR_COST * pairs
    least, place = cost.min(0, keepdim=True)
    is_sparse = least <= _MOST_COST * d_ff
    spare = (_SPARE_FACTOR * pairs.gather(0, place) + _SPARE_PAIRS).ceil().long()
    numbers = (torch.where(is_sparse, hot.gather(0, place), d_ff), torch.where(is_sparse, spare, 0))
    return order.int(), torch.cat(numbers)


class TrainingState:
    """What a block in training has counted, and how it is computed.

    Attributes:
        counts: int64 [d_ff], on the device: for how many tokens each neuron was active since `reset`. Where a forward
            runs twice, as with activation checkpointing, its tokens count twice.
        tokens: int64, on the device: the tokens since `reset`.
        step: How the last call has computed the block: what is computed again, as for activation checkpointing, must
            be computed likewise.
    """

    def __init__(self, d_ff: int, device: torch.device) -> None:
        """Make one for a block with so many neurons."""
        self.counts = torch.zeros(d_ff, dtype=torch.int64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.step = self._chosen = self._dense = Step(hot=d_ff, pairs=0)
        self._recent = torch.zeros_like(self.counts)
        self._recent_tokens = torch.zeros_like(self.tokens)
        self._calls = 0
        self._choice: _Choice | None = None

    def reset(self) -> None:
        """Count from 0 again; how the block is computed stays."""
        self.counts.zero_()
        self.tokens.zero_()

    def begin(self, tokens: int) -> Step:
        """Begin a call of so many tokens, and return how it computes the block."""
        capturing = self.counts.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self._calls += 1
            if self._choice is not None and self._calls > self._choice.call + _DELAY:
                self._take(self._choice)
        self.step = self._dense if self.counts.is_cuda and tokens < _FEWEST_TOKENS else self._chosen
        return self.step

    def count(self, counts: Tensor, tokens: int) -> None:
        """Count what the call has found, and now and then choose anew."""
        for all_counts, all_tokens in ((self.counts, self.tokens), (self._recent, self._recent_tokens)):
            all_counts += counts
            all_tokens += tokens
        capturing = counts.is_cuda and torch.cuda.is_current_stream_capturing()
        due = self._calls in _FIRST_CALLS or self._calls % _INTERVAL == 0
        if due and self._choice is None and not capturing:
            self._choose()

    def _choose(self) -> None:
        order, numbers = choose(self._recent, self._recent_tokens)
        event = None
        if numbers.is_cuda:
            on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            on_host.copy_(numbers, non_blocking=True)
            numbers, event = on_host, torch.cuda.Event()
            event.record()
        self._choice = _Choice(self._calls, order, numbers, event)
        self._recent.zero_()
        self._recent_tokens.zero_()

    def _take(self, choice: _Choice) -> None:
        if choice.event is not None:
            choice.event.synchronize()  # passed long ago, unless the host is calls ahead
        hot, pairs = choice.numbers.tolist()
        self._chosen, self._choice = Step(order=choice.order, hot=hot, pairs=pairs), None


def train_block(operands: Operands[Tensor], options: BlockOptions, state: TrainingState) -> tuple[Tensor, Tensor]:
    """Compute a block whose gradients are wanted.

    Args:
        operands: Its tensors, as `torch.ops.twell.gated_mlp` and `mlp` take them.
        options: Its activation and threshold; `hot` is not looked at.
        state: Its own, where neurons that fire are counted.

    Returns:
        y [..., d_out], and the L1 term: the sum over neurons of |h|, mean over tokens, float32. Both are
        differentiable.
    """
    tokens = operands.x.numel() // operands.x.shape[-1]
    y, l1, counts = train_forward(operands, options, state.begin(tokens))
    with torch.no_grad():
        state.count(counts, tokens)
    return y, l1
