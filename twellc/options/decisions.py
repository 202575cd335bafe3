"""Options that decide what becomes of the blocks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twellc.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """What decides about blocks.

    Attributes:
        layers: Which matches to rewrite: `auto`, `all`, `none` or a regular expression over module paths.
        compression: The TwELL compression factor; None takes the default, or with a profile what suits each block.
        target_gpu: The GPU to decide for: a name that twellc knows, or a data file of measured times; None takes the
            GPU at hand where its times are known, else an H100.
        calibration: A profile of the model, see `twellc profile`.
        prune_dead: Whether neurons that never fired in the profile are removed, which is approximate.
        prune_check: A second profile, to count what that loses.
    """

    layers: str = "auto"
    compression: int | None = None
    target_gpu: str | None = None
    calibration: Path | None = None
    prune_dead: bool = False
    prune_check: Path | None = None


def refuse_pruning(options: DecisionOptions) -> None:
    """Fail if pruning is asked for without a profile.

    Raises:
        UserError: It is.
    """
    for option, given in (("--prune-dead", options.prune_dead), ("--prune-check", options.prune_check)):
        if given:
            raise UserError(option, "needs a profile of the model", fix="Add --calibration PROFILE.")


def refuse_calibration(options: DecisionOptions, target: str) -> None:
    """Fail if a calibration is given for something that has no use for one.

    Raises:
        UserError: It is.
    """
    refuse_pruning(options)
    if options.calibration is not None:
        raise UserError(
            f"--calibration {options.calibration}", "only a model that twellc traces can be calibrated", got=target,
            expected="a torch.export archive, a Hugging Face directory or a pickled module", fix="Leave it out.",
        )  # fmt: skip


def refuse_decisions(options: DecisionOptions, target: str) -> None:
    """Fail if something is asked for that decides about blocks, of a model that is compiled already.

    Raises:
        UserError: It is.
    """
    refuse_calibration(options, target)
    for option, given in (("--layers", options.layers != "auto"), ("--compression", options.compression is not None)):
        if given:
            raise UserError(option, "what becomes of the blocks is decided already", got=target, fix="Leave it out.")
