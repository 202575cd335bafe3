"""The callback of transformers' Trainer for sparsity: it logs, and brings dead neurons back."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from twellc.base.errors import UserError
from twellc.loaders.loaded import fingerprint
from twellc.training.counts import Fired, FiringWindow, take_counts
from twellc.training.dead import reinitialise_dead
from twellc.training.log import LoggedBlock, LoggedStep, LogWriter
from twellc.training.penalty import L1Penalty, blocks_of, refuse_other_counts
from twellc.training.ranks import in_first, number_of_ranks, summed
from twellc.training.relu import Blend


class SparsityCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Logs loss, density and dead neurons of each block; see `SparseTrainer`, which adds the L1 term to the loss.

    Another Trainer must add `penalty(step)` to its loss, unless `l1` is 0.

    Counts are summed over all processes. The means over blocks, `density`, `dead` and `l1`, go into the Trainer's own
    log, too. Where loss or weights are no longer finite, the Trainer stops with a `UserError` before it saves anything.

    Attributes:
        penalty: The L1 term.
        window: Counts for a profile in the last steps; None before these steps.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        l1: float = 2e-5,
        l1_warm_up: int = 0,
        blend: Blend | None = None,
        reinitialise: bool = False,
        profile_steps: int = 0,
        log: str | os.PathLike[str] | None = None,
        began_with: str | os.PathLike[str] | None = None,
        seed: int = 0,
        overwrite: bool = False,
    ) -> None:
        """Prepare a model that `twellc.optimize(model, training=True)` has returned.

        Args:
            model: The model.
            l1: The coefficient of the L1 term.
            l1_warm_up: Steps over which the coefficient grows to `l1`.
            blend: The result of `sparsify`, to move on with each step.
            reinitialise: Whether to call `reinitialise_dead` after each step.
            profile_steps: The number of last steps to count for a profile.
            log: The log file.
            began_with: The folder of the model that training began with: a resumed run must have the same one.
            seed: Seed of the random rows that dead neurons move towards.
            overwrite: Whether a run from the beginning replaces the log of another run. Else the run fails as it
                begins. A file that is not a log is never replaced; a run from a checkpoint goes on with its log.

        Raises:
            UserError: The model has no block in training, or a number is out of range.
        """
        refuse_other_counts(profile_steps=profile_steps)
        self.window: FiringWindow | None = None
        self._model = model
        self._blocks = blocks_of(model)
        self._blend, self._reinitialise, self._seed = blend, reinitialise, seed
        self._profile_steps = profile_steps
        self._log, self._overwrite = None if log is None else Path(log), overwrite
        self._began_with = None if began_with is None else Path(began_with)
        self._writer: LogWriter | None = None
        self._fired: dict[str, Fired] | None = None
        self._moved: Tensor | None = None
        self._losses: list[Tensor] = []
        self._l1: list[Tensor] = []
        self._pending: LoggedStep | None = None
        self._last = 0
        self.penalty = L1Penalty(model, l1, warm_up=l1_warm_up)  # comes last: from here on the blocks note their terms

    def note(self, loss: Tensor, share: float) -> None:
        """Note the loss of a forward without the L1 term, and the share of the step's loss that its L1 term is."""
        assert self.penalty.value is not None
        self._losses.append(loss.detach().float())
        self._l1.append(self.penalty.value * share)

    # ---- called by the Trainer ----

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin the log or go on with it, and set the activations for this step."""
        take_counts(self._model)  # earlier counts belong to no step
        self.window = None
        self._fired, self._moved, self._losses, self._l1 = None, None, [], []
        self._last = state.global_step
        self._writer = self._pending = None
        if self._log is not None:
            self._writer = in_first(lambda: self._begin_log(state.global_step))
        self._move(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count for a profile at the first of the last steps."""
        self._write()
        if self.window is None and state.global_step >= state.max_steps - self._profile_steps:
            self.window = FiringWindow(self._model)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make sure that the loss has taken the terms that the blocks noted."""
        if self.penalty.value is not None:
            return
        if self.penalty.coefficient(state.max_steps) > 0:
            fix = "Train by twellc.training.SparseTrainer, mix SparseTrainerMixin into the Trainer, or give l1=0."
            raise UserError("SparsityCallback", "the loss has no L1 term", fix=fix)
        self.penalty.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Bring dead neurons back, move the activations on, and fail before NaN is saved."""
        self.on_substep_end(args, state, control)
        if self._reinitialise:
            moved = reinitialise_dead(self._model, self._take(), step=state.global_step, seed=self._seed)
            self._moved = moved if self._moved is None else self._moved + moved
        self._move(state.global_step)  # so that the measured or saved model is the one that training goes on with
        self._look(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Fail before NaN is saved: the Trainer may save after each epoch."""
        self._look(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Add the loss on held-out data to the record of the step."""
        found = (metrics or {}).get("eval_loss")
        if self._pending is not None and self._pending.step == state.global_step:
            self._pending = replace(self._pending, eval_loss=found)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write a record of the steps since the last one, also to the Trainer's log."""
        if logs is None or "loss" not in logs or self._fired is None:
            return
        steps = max(state.global_step - self._last, 1)
        record = self._record(state.global_step, steps, logs["loss"])
        means = {"l1": record.l1, "density": _mean(record.density), "dead": _mean(record.dead)}
        logs |= means
        if state.log_history:
            state.log_history[-1] |= means
        self._write()
        self._pending = record
        self._fired, self._moved, self._losses, self._l1 = None, None, [], []
        self._last = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the log up to the step of the checkpoint."""
        self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Finish the log, and stop counting for a profile."""
        self._write()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._move(state.best_global_step)  # the Trainer has loaded the weights of that step
        if self.window is not None:
            self.window.close()

    # ----

    def _begin_log(self, step: int) -> LogWriter:
        assert self._log is not None
        sha256 = fingerprint(self._began_with) if self._began_with is not None else ""
        name = self._began_with.name if self._began_with is not None else type(self._model).__name__
        blocks = [LoggedBlock(path, block.layer.d_ff) for path, block in self._blocks.items()]
        return LogWriter(self._log, name, sha256, blocks, step, self._overwrite)

    def _move(self, step: int) -> None:
        if self._blend is not None:
            self._blend.set_step(step)

    def _take(self) -> dict[str, Fired]:
        """Return how often neurons fired since the last call, and add it to the counts of the next record."""
        fired, before = take_counts(self._model), self._fired
        self._fired = fired if before is None else {path: before[path].plus(each) for path, each in fired.items()}
        return fired

    def _look(self, state: Any, control: Any) -> None:
        """Take the counts where logging, measuring or saving comes next, and fail on NaN."""
        saves = control.should_save or control.should_evaluate or control.should_training_stop
        if self._log is not None and saves:
            control.should_log = True  # a record for the loss on held-out data, for a resume, and for the last steps
        if control.should_log or saves:
            fired = self._take()
            self._refuse_nan(state.global_step, saves, next(iter(fired.values())).counts.device)

    def _write(self) -> None:
        """Write the pending record, which waited for its step's loss on held-out data."""
        if self._pending is not None and self._writer is not None:
            self._writer.add(self._pending)
        self._pending = None

    def _record(self, step: int, steps: int, loss: float) -> LoggedStep:
        assert self._fired is not None
        fired = list(self._fired.values())
        numbers = torch.stack([part for each in fired for part in (each.density, each.dead.double().mean())])
        values = numbers.tolist()
        l1 = 0.0
        if self._losses:
            sums = torch.stack([torch.stack(self._losses).sum(), torch.stack(self._l1).sum()])
            loss, l1 = (summed([sums])[0] / (steps * number_of_ranks())).tolist()
        return LoggedStep(
            step=step,
            loss=loss,
            l1=l1,
            coefficient=self.penalty.coefficient(step - 1),
            tokens=max(int(each.tokens) for each in fired),
            density=values[::2],
            dead=values[1::2],
            relu=1.0 if self._blend is None else self._blend.share(step - 1),
            reinitialised=0 if self._moved is None else int(self._moved),
        )

    def _refuse_nan(self, step: int, saves: bool, device: torch.device) -> None:
        """Fail, in all processes, if a loss, or a weight that may be saved next, is NaN or infinite.

        Raises:
            UserError: One is.
        """
        bad = torch.zeros(2, dtype=torch.int64, device=device)
        if self._losses:
            bad[0] = (~torch.stack(self._losses).isfinite()).sum()
        if saves:
            for parameter in self._model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                bad[1] += (~local.detach().isfinite().all()).to(device)
        of_loss, of_weights = summed([bad])[0].tolist()
        if of_loss or of_weights:
            what = "the loss is" if of_loss else "weights are"
            raise UserError(
                f"step {step}",
                f"{what} NaN or infinite",
                fix="The last checkpoint is as it was: go on from it with a smaller learning rate, a smaller L1 "
                "coefficient or a longer warm-up.",
            )


def _mean(shares: list[float]) -> float:
    return math.fsum(shares) / len(shares)
