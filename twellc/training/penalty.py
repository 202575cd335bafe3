"""The L1 term, which makes a model sparse."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from twellc.base.errors import UserError, first_few
from twellc.eager.optimization import (
    TrainedBlock,
    blocks_for_training,
    blocks_in_training,
    refuse_other_than_modules,
)

_REENTRY = (
    "Run the model in training mode, with gradients, and checkpoint activations without use_reentrant: "
    'gradient_checkpointing_kwargs={"use_reentrant": False}. Put modules that are not trained into eval mode.'
)
_FIX_REFUSED = "Mend that, then call twellc.optimize(model, training=True); twellc.training.sparsify makes ReLU blocks."
_FIX = "Call twellc.optimize(model, training=True) first; twellc.training.sparsify makes ReLU blocks."


class L1Penalty:
    """The term to add to the loss: a coefficient times the mean over layers of the sum over neurons of |h|.

    h is the input of the down projection. The sum is a mean over the tokens that a block has seen since the last call,
    padding included. Blocks without tokens, as experts may be, are left out. The coefficient grows from 0 to its full
    value over the steps of the warm-up.

    Attributes:
        value: The mean over layers without the coefficient, from the last call; on the device, without a gradient.
    """

    def __init__(self, model: nn.Module, coefficient: float, *, warm_up: int = 0) -> None:
        """Let the blocks of a model note their terms from now on.

        Args:
            model: A model that `twellc.optimize(model, training=True)` has returned, before or after DDP or FSDP
                wraps it.
            coefficient: The full coefficient; a good one for a sum over 5632 neurons is 2e-5.
            warm_up: Steps until the coefficient is full.

        Raises:
            UserError: The model has no such block, or a number is out of range.
        """
        if not isinstance(coefficient, (int, float)) or not 0 <= coefficient < float("inf"):
            raise UserError("coefficient", "is out of range", got=repr(coefficient), expected="a number from 0 on")
        refuse_other_counts(warm_up=warm_up)
        self._coefficient, self._warm_up = coefficient, warm_up
        self._blocks = blocks_of(model)
        self.value: Tensor | None = None
        self._is_closed = False
        for block in self._blocks.values():
            block.training.listen()

    def close(self) -> None:
        """Stop the blocks from noting terms."""
        self._is_closed = True
        for block in self._blocks.values():
            block.training.listen(asked=False)

    def coefficient(self, step: int) -> float:
        """Return the coefficient of a step, from 0 on.

        Raises:
            UserError: The step is not an integer from 0 on.
        """
        refuse_other_counts(step=step)
        return self._coefficient * min(1.0, (step + 1) / (self._warm_up + 1))

    def __call__(self, step: int) -> Tensor:
        """Return the term for a loss, and forget the noted values. Call it once after each forward.

        Args:
            step: The step of the optimizer, from 0 on.

        Returns:
            A float32 scalar; a float64 one for blocks in float64.

        Raises:
            UserError: A block ran its original forward, or only without gradients, or no block has noted a term.
        """
        coefficient = self.coefficient(step)
        if self._is_closed:
            raise UserError("L1 term", "was closed", fix="Make a new L1Penalty.")
        if not any(block.is_current for block in self._blocks.values()):
            what = "its blocks are no longer those of the model: it was restored, or optimized again"
            raise UserError("L1 term", what, fix="Make a new L1Penalty after twellc.optimize(model, training=True).")
        missed = [path for path, block in self._blocks.items() if block.training.misses]
        noted = [terms for block in self._blocks.values() if (terms := block.training.terms)]
        silent = [
            path
            for path, block in self._blocks.items()
            if block.training.without_gradients and not block.training.terms
        ]
        for block in self._blocks.values():
            block.training.listen()
        if missed:
            raise UserError(
                f"layer {missed[0]}",
                "ran its original forward, which notes no L1 term",
                fix="Inside of the block there must be no dropout that is switched on, no hook, and nothing that was "
                "replaced since twellc.optimize, such as by an adapter. Checkpoint activations of whole layers.",
            )
        if not noted:
            raise UserError("L1 term", "no block has noted one since the last call", fix=_REENTRY)
        if silent:
            raise UserError(f"layer {silent[0]}", "ran without gradients, and has noted no L1 term", fix=_REENTRY)
        reached = [terms for terms in noted if any(term.tokens for term in terms)]
        means = []
        for terms in reached or noted:
            tokens = sum(term.tokens for term in terms)
            means.append(torch.stack([term.l1 * (term.tokens / max(tokens, 1)) for term in terms]).sum())
        mean = torch.stack([each.to(means[0].device) for each in means]).mean()
        self.value = mean.detach()
        return coefficient * mean


def refuse_other_counts(**counts: object) -> None:
    """Raise a UserError if one of these is not an integer from 0 on."""
    for name, count in counts.items():
        if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or count < 0:
            raise UserError(name, "is out of range", got=repr(count), expected="an integer from 0 on")


def blocks_of(model: nn.Module) -> dict[str, TrainedBlock]:
    """Return the blocks in training.

    Raises:
        UserError: There are none.
    """
    refuse_other_than_modules("training", model)
    found = blocks_in_training(model)
    if not found:
        looked_at = blocks_for_training(model)
        refused = [f"{each.module or 'the model itself'}: {each.reason}" for each in looked_at if not each.matched]
        all_refused = bool(refused) and len(refused) == len(looked_at)
        why = f" ({first_few(refused, '; ')})" if all_refused else ""
        fix = _FIX_REFUSED if all_refused else _FIX
        raise UserError(type(model).__name__, f"has no feed-forward block in training{why}", fix=fix)
    return found
