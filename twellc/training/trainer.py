"""transformers' Trainer with the L1 term in its loss."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from twellc.base.errors import UserError
from twellc.training.callback import SparsityCallback


class SparseTrainerMixin:
    """Adds the L1 term to the loss of a Trainer: `class Mine(SparseTrainerMixin, SFTTrainer)`.

    The Trainer is given `sparsity`, a `SparsityCallback`, beside its own arguments.
    """

    def __init__(self, *arguments: Any, sparsity: SparsityCallback, **named: Any) -> None:
        """Make the Trainer.

        Raises:
            UserError: The Trainer would train on several GPUs in one process.
        """
        super().__init__(*arguments, **named)
        trainer: Any = self
        if trainer.args.n_gpu > 1:
            got, fix = f"{trainer.args.n_gpu} GPUs", "Start one process for each, with torchrun or accelerate launch."
            raise UserError("Trainer", "blocks cannot train on several GPUs in one process", got=got, fix=fix)
        self._sparsity = sparsity
        trainer.add_callback(sparsity)
        # Put before callbacks that report the log, so that these see its values.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(1, callbacks.pop(callbacks.index(sparsity)))

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        """Return the loss with the L1 term, in training mode."""
        trainer: Any = super()
        loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, **options)
        if model.training:
            scaled = self._is_scaled(options.get("num_items_in_batch"))
            share = 1 / self.current_gradient_accumulation_steps  # type: ignore[attr-defined]
            term = self._sparsity.penalty(self.state.global_step)  # type: ignore[attr-defined]
            self._sparsity.note(loss if scaled else loss.detach() * share, share)
            loss = loss + (term * share if scaled else term)
        return (loss, outputs) if return_outputs else loss

    def _is_scaled(self, items: torch.Tensor | int | None) -> bool:
        """Whether the loss of a forward is a share of the step's loss already, as `Trainer.training_step` decides."""
        trainer: Any = self
        told: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
        if told is not None:
            return told
        return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


class SparseTrainer(SparseTrainerMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer with the L1 term in its loss; see `SparseTrainerMixin`."""
