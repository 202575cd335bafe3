"""Options for the decisions about the blocks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twellc.base.errors import UserError
from twellc.options.option import option
from twellc.plugins.library import COMPRESSIONS

LINEARS = ("auto", "twell", "tensorrt")


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """The options of the decisions.

    Attributes:
        layers: Which matching blocks to rewrite; REGEX is searched in their module paths.
        compression: TwELL compression factor: a tile of 256 neurons keeps 256/N - 1 activations of a token; a tile with
            more is kept separately. It changes speed and memory, never results. Default: 8, or with --firing-profile
            the largest with which few tiles have more.
        firing_profile: How often the model's neurons fire, from `twellc profile`. It decides the form of each block,
            and which neurons are hot: these are moved to the front, which is exact.
        prune_dead: Approximate: remove the neurons that never fired in the profile. Other inputs may need them; check
            measures the effect.
        prune_check: A second profile, of other data: report the removed neurons' share of the non-zeros in it.
        linear: Linear layers outside of the blocks: tensorrt leaves them as they are, twell computes each with the norm
            before it and the sum behind it, and those of one input at once; blocks take the norm before them, too.
            auto: twell where a profile has up to 16 tokens a call, or in FP8 each has 512 or more.
        target_gpu: The GPU that speed is expected and decided for: h100, h200, or a data file of twellc bench
            --measure-gpu. Default: the GPU at hand, if its times are known, else h100.
    """

    layers: str = option("auto", "auto|all|none|REGEX")
    compression: int | None = option(None, kind=COMPRESSIONS)
    firing_profile: Path | None = option(None, "PROFILE", Path)
    prune_dead: bool = option(False)
    prune_check: Path | None = option(None, "PROFILE", Path)
    linear: str = option("auto", kind=LINEARS)
    target_gpu: str | None = option(None, "GPU|FILE")


def refuse_pruning(options: DecisionOptions) -> None:
    """Raise `UserError` if pruning is asked for without a profile."""
    why = "needs a profile of the model, which says which neurons never fired"
    for name, given in (("--prune-dead", options.prune_dead), ("--prune-check", options.prune_check)):
        if given:
            raise UserError(name, why, fix="Add --firing-profile PROFILE.")


def refuse_calibration(options: DecisionOptions, target: str) -> None:
    """Raise `UserError` if a firing profile is given for a target that has no use for one."""
    refuse_pruning(options)
    if options.firing_profile is not None:
        where, what = f"--firing-profile {options.firing_profile}", "only a model that twellc traces can be calibrated"
        expected = "a torch.export archive, a Hugging Face directory, a pickled module or a sparse autoencoder"
        raise UserError(where, what, got=target, expected=expected, fix="Leave it out.")


def refuse_decisions(options: DecisionOptions, target: str) -> None:
    """Raise `UserError` if options decide about blocks of a model that is compiled already."""
    refuse_calibration(options, target)
    asked = {
        "--layers": options.layers != "auto",
        "--compression": options.compression is not None,
        "--linear": options.linear != "auto",
    }
    for name, given in asked.items():
        if given:
            raise UserError(name, "what becomes of the blocks is decided already", got=target, fix="Leave it out.")


def refuse_linear(options: DecisionOptions, target: str) -> None:
    """Raise `UserError` if linear layers of an ONNX file are to be rewritten."""
    if options.linear == "twell":
        expected = "a torch.export archive, a Hugging Face directory or a pickled module"
        what = "linear layers outside of blocks stay as they are in an ONNX file"
        raise UserError("--linear twell", what, got=target, expected=expected, fix="Leave it out.")
