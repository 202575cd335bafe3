"""The state of a block in training: it notes its L1 term, and counts which neurons fire.

Its activation may be on the way from another one to ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from twellc.base.changes import Changed
from twellc.base.dtypes import kernel_dtypes
from twellc.base.torch_private import current_graph_task_id
from twellc.eager.hidden import Blended, Hidden
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.gradients_ops import train_forward
from twellc.plugins.meaning import combined, rectified
from twellc.plugins.training import TrainingState, train_block

_KERNEL_DTYPES = kernel_dtypes()


class BlendedActivation(nn.Module):
    """An activation that becomes a ReLU: (1 - share) * original(z) + share * relu(z).

    Attributes:
        original: The original activation.
        share: The share of ReLU, 0 to 1.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.share = 0.0

    def forward(self, z: Tensor) -> Tensor:
        """Activate z of any shape."""
        if self.share >= 1:
            return torch.relu(z)
        if isinstance(z, Hidden):
            deferred: Tensor = z.blended(self)
            return deferred
        if self.share <= 0:  # for infinite z the sum below would be NaN
            original: Tensor = self.original(z)
            return original
        blended: Tensor = torch.lerp(self.original(z), torch.relu(z), self.share)
        return blended


def blended_of(modules: Iterable[nn.Module]) -> BlendedActivation | None:
    """Return the activation among the modules of a block that is still on its way to ReLU; None if none is."""
    found = (each for each in modules if isinstance(each, BlendedActivation))
    return next((each for each in found if each.share < 1), None)


def as_relu(module: nn.Module) -> Changed:
    """Let blended activations be ReLU within this context."""
    return Changed(*((each, "share", 1.0) for each in module.modules() if isinstance(each, BlendedActivation)))


@dataclass(frozen=True)
class Term:
    """The L1 term of one call: the sum over neurons of |h|, mean over its tokens."""

    l1: Tensor
    tokens: int


class BlockInTraining:
    """The notes and counts of a block. A copy, by deepcopy or pickle, begins without any.

    Attributes:
        options: The options of the op.
        terms: The L1 terms of calls since they were last taken; None where they are not wanted.
        misses: Calls since then that ran the original forward, which notes nothing.
        without_gradients: Calls since then without gradients, as in reentrant activation checkpointing.
        observer: Receives the pre-activations z [..., d_ff] of each call; None for none.
    """

    def __init__(self, options: BlockOptions, d_ff: int) -> None:
        self.options = options
        self.terms: list[Term] | None = None
        self.misses = self.without_gradients = 0
        self.observer: Callable[[Tensor], None] | None = None
        self._d_ff = d_ff
        self._state: TrainingState | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.options, self._d_ff)

    def state(self, device: torch.device) -> TrainingState:
        """Return the counts, on the present device of the block."""
        if self._state is None or self._state.counts.device != device:
            with torch.inference_mode(False):  # a tensor of inference mode cannot be changed later
                before, self._state = self._state, TrainingState(self._d_ff, device)
            if before is not None:
                self._state.counts += before.counts.to(device)
                self._state.tokens += before.tokens.to(device)
        return self._state

    @property
    def counted(self) -> TrainingState | None:
        """The counts, on their present device; None before the first call."""
        return self._state

    def listen(self, asked: bool = True) -> None:
        """Forget the notes, and begin to note the L1 terms of calls, or stop."""
        self.terms, self.misses, self.without_gradients = [] if asked else None, 0, 0

    def missed(self) -> None:
        """Note that the original forward runs."""
        self.misses += 1

    def run(self, operands: Operands[Tensor], blended: Blended | None) -> Tensor:
        """Compute the block, note and count.

        Where activation checkpointing computes again, nothing is noted or counted a second time, and the tensors that
        the kernels keep have the same shapes as before.

        Args:
            operands: The tensors of the block.
            blended: An activation on its way to ReLU, which is computed densely.
        """
        x, tokens = operands.x, operands.x.numel() // operands.x.shape[-1]
        state, again = self.state(x.device), _is_backward()
        if blended is not None or not _is_for_kernels(operands):
            y, l1, counts = self._dense(operands, blended)
            if not again:
                state.counts += counts
                state.tokens += tokens
        elif again:
            y, l1, _ = train_forward(operands, self.options, state.step_of(tokens))
        else:
            y, l1 = train_block(operands, self.options, state)
        if not again:
            if not torch.is_grad_enabled():
                self.without_gradients += 1
            elif self.terms is not None:
                self.terms.append(Term(l1, tokens))
            if self.observer is not None:
                with torch.no_grad():
                    self.observer(functional.linear(x, *operands.first))
        return y

    def _dense(self, operands: Operands[Tensor], blended: Blended | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the block by torch's own operations."""
        z = functional.linear(operands.x, *operands.first)
        up = None if operands.w_gate is None else functional.linear(operands.x, operands.w_up, operands.b_up)
        if blended is None:
            g, _, h = combined(z, up, self.options)
        else:
            g = blended(z)
            h = g if up is None else g * rectified(up, self.options)
        y = functional.linear(h, operands.w_down.t(), operands.b_down)
        l1 = h.abs().sum(dtype=torch.float32) / max(operands.x.numel() // operands.x.shape[-1], 1)
        return y, l1, (g != 0).sum(tuple(range(g.dim() - 1)))


def _is_backward() -> bool:
    """Whether this runs within a backward, where activation checkpointing computes a forward again."""
    return bool(current_graph_task_id() != -1)


def _is_for_kernels(operands: Operands[Tensor]) -> bool:
    """Whether the ops take these tensors: all of one type, as after autocast, and on a GPU of a type of the kernels."""
    kind = operands.x.device.type
    if torch.is_autocast_enabled(kind):
        return kind == "cpu" or torch.get_autocast_dtype(kind) in _KERNEL_DTYPES
    dtypes = {each.dtype for each in operands.named().values()}
    return len(dtypes) == 1 and (kind == "cpu" or dtypes <= set(_KERNEL_DTYPES))
