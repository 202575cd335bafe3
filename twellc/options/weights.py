"""Options that say in which type the weights of blocks are read."""

from __future__ import annotations

from dataclasses import dataclass

from twellc.base.errors import UserError
from twellc.options.option import SHARE, option

KEEP, FP8, FP8_BLOCKS = WEIGHTS = ("keep", "fp8", "fp8:blocks")


@dataclass(frozen=True, kw_only=True)
class WeightTypeOptions:
    """In which type the weights of blocks are read.

    Attributes:
        weights: keep: as the model has them. fp8: blocks that are rewritten are quantised to eight bits, E4M3, with a
            scale for each neuron; so are linear layers outside of them that are, with a scale for each output.
            fp8:blocks: blocks alone.
    """

    weights: str = option(KEEP, kind=WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class WeightOptions(WeightTypeOptions):
    """In which type the weights of blocks are read, and by how much that may change them.

    Attributes:
        fp8_error: With --weights fp8: leave a block as it is where, on the samples, eight bits change its output by
            more than this: the norm of the difference over the norm of the output. Linear layers outside of blocks
            are left, too.
    """

    fp8_error: float | None = option(None, "SHARE", SHARE)


def refuse_weight_type(options: WeightTypeOptions, target: str) -> None:
    """Raise `UserError` if weights are to be quantised of a model that is compiled already."""
    if options.weights != KEEP:
        raise UserError(
            f"--weights {options.weights}", "what is compiled keeps its weights", got=target, fix="Leave it out."
        )


def refuse_weights(options: WeightOptions) -> None:
    """Raise `UserError` if a largest error of eight bits is given and nothing is quantised."""
    if options.fp8_error is not None and options.weights == KEEP:
        what, got = "no weights are quantised", f"--weights {options.weights}"
        raise UserError(f"--fp8-error {options.fp8_error}", what, got=got, fix=f"Add --weights {FP8}, or leave it out.")
