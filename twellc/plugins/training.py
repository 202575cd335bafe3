"""A block in training: its counts, and how the next steps compute it.

    state = TrainingState(d_ff, device)
    y, l1 = train_block(operands, options, state)

A block begins dense. Then the counts of active tokens decide which neurons are computed densely. Now and then a few
small kernels choose anew on the device; the host reads their choice `_DELAY` calls later, long after it is there, so
that nothing waits, and so that the same run makes the same choice at the same step. After a call with more pairs than
there is room for, which is slow, the block is dense for a while, longer each time. The form of the tensors that calls
keep for the backward changes only while no call waits for its backward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.gradients_call import Call, Step
from twellc.plugins.gradients_ops import TRAIN_FORWARD

# Costs of a pair, and of the gate for a neuron and a token, in units of the dense products of a training step for a
# neuron and a token: measured on an H100 (benchmarks/LOG.md). Other GPUs are taken to be alike, as products and gathers
# grow with the same widths.
_PAIR_COST = 77.0
_GATE_COST = 0.11
# Further costs of a call: as much as the dense products for this number of tokens.
_CALL_TOKENS = 700
# A call is computed sparsely if that takes at most this part of the dense time.
_MOST_COST = 0.95
# Hot neurons come in whole tiles of a product.
_TILE = 128
# Room for pairs, as a multiple of the need of earlier calls and an addend: a text may be denser than the one before.
_SPARE_FACTOR, _SPARE_PAIRS = 3, 64
# Calls at which to look at the counts: these, then every _INTERVAL-th. The first look only prepares the second.
_FIRST_CALLS = (2, 4, 8)
_INTERVAL = 16
_DELAY = 2
# Calls for which a block is dense after one with too little room: at first, and at most; the number doubles each time.
_REST, _MOST_REST = 32, 1024


class _Reading:
    """Numbers on their way from the device to the host.

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
        """Return the numbers; once later calls have begun, this does not wait."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._numbers.tolist()
        return found


def choose(rates: Tensor) -> tuple[Tensor, Tensor]:
    """Return all neurons, those first that are active most often, and how many of them are hot.

    Args:
        rates: float64 [d_ff]: for which share of the tokens each is active.

    Returns:
        The order, int32 [d_ff], and int64 [3], both on the device of `rates`: the hot neurons, the pairs, and the cost
        of this choice for each token, in thousandths of the dense cost.
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
    """The counts of a block in training, and the way it is computed.

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
        self._cost = 1.0  # of the present choice, for each token
        self._recent = torch.zeros_like(self.counts)
        self._recent_tokens = torch.zeros_like(self.tokens)
        self._rates: Tensor | None = None  # at the last look
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
            # Activation checkpointing computes calls a second time, and must keep tensors of the same form as before.
            if not self._unfinished:
                self._change()
        self.step = self.step_of(tokens)
        return self.step

    def step_of(self, tokens: int) -> Step:
        """Return how a call computes the block: the same until the backward of all calls has run."""
        pays = (_MOST_COST - self._cost) * tokens >= _CALL_TOKENS or not self.counts.is_cuda
        return self._chosen if pays and not self._is_resting else self._dense

    def began(self, node: Any) -> None:
        """Note the node of autograd that keeps the tensors for the backward of a call; None without one."""
        if node is not None:
            self._unfinished.append(weakref.ref(node))

    def _read(self) -> None:
        """Read whether calls had room for all pairs; if not, be dense for a while from the next change on."""
        while self._listed and self._is_due(self._listed[0][0]):
            reading, expected = self._listed.pop(0)
            if reading.take()[0] < expected:
                self._rest_until, self._rest = self._calls + self._rest, min(2 * self._rest, _MOST_REST)
                self._listed.clear()

    def _change(self) -> None:
        """Adopt the latest choice."""
        if self._choice is not None and self._is_due(self._choice[0]):
            (hot, pairs, cost), order = self._choice[0].take(), self._choice[1]
            self._chosen, self._cost, self._choice = Step(order=order, hot=hot, pairs=pairs), cost / 1000, None
        self._is_resting = self._calls < self._rest_until

    def _is_due(self, reading: _Reading) -> bool:
        return self._calls > reading.call + _DELAY

    def count(self, counts: Tensor, tokens: int, row_begin: Tensor) -> None:
        """Add the counts of a call, and now and then choose anew.

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
                # Neurons with varying activity count with the larger of the last two rates.
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
    """Compute a block for which gradients are wanted.

    Args:
        operands: Its tensors, as `torch.ops.twell.gated_mlp` and `mlp` take them.
        options: Its activation and threshold; `hot` is ignored.
        state: The state of this block, which counts the neurons that fire.

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
