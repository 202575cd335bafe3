"""A block in training: what is counted, and how the next steps compute it.

    state = TrainingState(d_ff, device)
    y, l1 = train_block(operands, options, state)

Which neurons are computed densely follows from how often each was active in calls before. A block begins dense. Now
and then a few small kernels choose anew on the device; the host reads what they chose `_DELAY` calls later, when it has
long been there, so that nothing waits, and so that the same run chooses the same at the same step. Where a call finds
more pairs than there is place for, which is slow, the block is dense for a while, longer each time. What calls keep for
their backward changes only where none of them waits for it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.gradients_call import Call, Step
from twellc.plugins.gradients_ops import TRAIN_FORWARD

# What a step costs, in the time that the dense products of a training step take for a neuron and a token: measured on
# an H100 (benchmarks/LOG.md). Other GPUs are taken to be alike, as products and gathers grow with the same widths.
_PAIR_COST = 77.0
_GATE_COST = 0.11
# What a call costs beside that: as much as the dense products take for this number of tokens.
_CALL_TOKENS = 700
# A call is computed sparsely if that takes at most this part of the dense time.
_MOST_COST = 0.95
# Hot neurons come in whole tiles of a product.
_TILE = 128
# Place for pairs, against what calls before have needed: a text may be denser than the one before.
_SPARE_FACTOR, _SPARE_PAIRS = 3, 64
# Calls at which to look at what was counted: these, then every _INTERVAL-th. The first look is for the second one.
_FIRST_CALLS = (2, 4, 8)
_INTERVAL = 16
_DELAY = 2
# Calls for which a block is dense after one that found too little place: at first, and at most; it doubles each time.
_REST, _MOST_REST = 32, 1024


class _Reading:
    """Numbers that are on their way from the device to the host.

    Attributes:
        call: The number of the call that sent them.
    """

    def __init__(self, call: int, numbers: Tensor) -> None:
        """Send int64 numbers."""
        self.call, self._numbers, self._event = call, numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def take(self) -> list[int]:
        """Return them; where calls after have begun, this does not wait."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._numbers.tolist()
        return found


def choose(rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return all neurons, those first that are active most often, and how many of them are hot.

    Args:
        rates: float64 [d_ff]: for which share of the tokens each is active.

    Returns:
        The order, int32 [d_ff], and int64 [3], both on the device of `rates`: the hot neurons, the pairs, and what that
        costs for each token, in thousandths of the dense cost.
    """
    d_ff = rates.shape[0]
    rates, order = torch.sort(rates, descending=True, stable=True)
    pairs = torch.cat([rates.sum().view(1), rates.sum() - rates.cumsum(0)]).clamp(min=0)[:d_ff:_TILE]
    hot = torch.arange(0, d_ff, _TILE, device=rates.device)
    cost = hot + _GATE_COST * (d_ff - hot) + _PAIR_COST * pairs
    least, place = cost.min(0, keepdim=True)
    is_sparse = least <= _MOST_COST * d_ff
    spare = (_SPARE_FACTOR * pairs.gather(0, place) + _SPARE_PAIRS).ceil().long()
    numbers = (torch.where(is_sparse, hot.gather(0, place), d_ff), torch.where(is_sparse, spare, 0))
    return order.int(), torch.cat([*numbers, (1000 / d_ff * least).ceil().long()])


class TrainingState:
    """What a block in training has counted, and how it is computed.

    Attributes:
        counts: int64 [d_ff], on the device: for how many tokens each neuron was active since `reset`.
        tokens: int64, on the device: the tokens since `reset`.
        step: How the last call has computed the block.
    """

    def __init__(self, d_ff: int, device: torch.device) -> None:
        """Make one for a block with `d_ff` neurons."""
        self.counts = torch.zeros(d_ff, dtype=torch.int64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.step = self._chosen = self._dense = Step(hot=d_ff, pairs=0)
        self._cost = 1.0  # of what is chosen, for each token
        self._recent = torch.zeros_like(self.counts)
        self._recent_tokens = torch.zeros_like(self.tokens)
        self._rates: Tensor | None = None  # when it was last looked
        self._calls = 0
        self._choice: tuple[_Reading, Tensor] | None = None
        self._listed: list[tuple[_Reading, int]] = []
        self._rest, self._rest_until, self._is_resting = _REST, 0, False
        self._unfinished: list[weakref.ref[Any]] = []

    def reset(self) -> None:
        """Count from 0 again; how the block is computed stays."""
        self.counts.zero_()
        self.tokens.zero_()

    def begin(self, tokens: int) -> Step:
        """Begin a call, and return how it computes the block."""
        if not _is_captured(self.counts):
            self._calls += 1
            self._read()
            self._unfinished = [each for each in self._unfinished if (node := each()) and not node.is_done]
            # Activation checkpointing computes calls a second time, which has to keep what the first one kept.
            if not self._unfinished:
                self._change()
        self.step = self.step_of(tokens)
        return self.step

    def step_of(self, tokens: int) -> Step:
        """Return how a call computes the block: the same until the backward of all calls has run."""
        pays = (_MOST_COST - self._cost) * tokens >= _CALL_TOKENS or not self.counts.is_cuda
        return self._chosen if pays and not self._is_resting else self._dense

    def began(self, node: Any) -> None:
        """Note the node of autograd that has kept what the backward of a call needs; None where there is none."""
        if node is not None:
            self._unfinished.append(weakref.ref(node))

    def _read(self) -> None:
        """Read whether calls found place for all pairs: be dense for a while from the next change on if not."""
        while self._listed and self._is_due(self._listed[0][0]):
            reading, expected = self._listed.pop(0)
            if reading.take()[0] < expected:
                self._rest_until, self._rest = self._calls + self._rest, min(2 * self._rest, _MOST_REST)
                self._listed.clear()

    def _change(self) -> None:
        """Do as was chosen."""
        if self._choice is not None and self._is_due(self._choice[0]):
            (hot, pairs, cost), order = self._choice[0].take(), self._choice[1]
            self._chosen, self._cost, self._choice = Step(order=order, hot=hot, pairs=pairs), cost / 1000, None
        self._is_resting = self._calls < self._rest_until

    def _is_due(self, reading: _Reading) -> bool:
        return self._calls > reading.call + _DELAY

    def count(self, counts: Tensor, tokens: int, row_begin: Tensor) -> None:
        """Count what the call has found, and now and then choose anew.

        Args:
            counts: int32 [d_ff]: for how many tokens each neuron was active.
            tokens: The tokens of the call.
            row_begin: See `Kept`.
        """
        for all_counts, all_tokens in ((self.counts, self.tokens), (self._recent, self._recent_tokens)):
            all_counts += counts
            all_tokens += tokens
        if _is_captured(counts):
            return
        if row_begin.numel() and self.step.pairs:
            self._listed.append((_Reading(self._calls, row_begin[-1:]), tokens))
        if self._choice is None and (self._calls in _FIRST_CALLS or self._calls % _INTERVAL == 0):
            rates = self._recent.double() / self._recent_tokens.clamp(min=1)
            if self._rates is not None:
                # Neurons that come and go are as active as they were when they were most.
                order, numbers = choose(torch.maximum(rates, self._rates))
                self._choice = _Reading(self._calls, numbers), order
            self._rates = rates
            self._recent.zero_()
            self._recent_tokens.zero_()


def _is_captured(tensor: Tensor) -> bool:
    if not tensor.is_cuda:
        return False
    with torch.cuda.device(tensor.device):
        return torch.cuda.is_current_stream_capturing()


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
    call = Call(operands=operands, options=options, step=state.begin(tokens))
    y, l1, counts, row_begin, *_ = TRAIN_FORWARD(*call.arguments())
    state.began(l1.grad_fn)
    with torch.no_grad():
        state.count(counts, tokens, row_begin)
    return y, l1
