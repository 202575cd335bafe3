"""Options for the type of the weights of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from twellc.base.errors import UserError
from twellc.options.option import SHARE, option

KEEP, FP8, FP8_BLOCKS = WEIGHTS = ("keep", "fp8", "fp8:blocks")


@dataclass(frozen=True, kw_only=True)
class WeightTypeOptions:
    """The type of the weights that blocks read.

    Attributes:
        weights: keep: as the model has them. fp8: blocks that are rewritten are quantised to FP8, E4M3, with a
            scale for each neuron, and so are the linear layers outside of them that twellc computes, with a scale for
            each output. fp8:blocks: blocks alone; it is that where twellc computes no linear layers.
    """

    weights: str = option(KEEP, kind=WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class WeightOptions(WeightTypeOptions):
    """The type of the weights that blocks read, and the largest error that FP8 may cause.

    Attributes:
        fp8_error: With --weights fp8 or fp8:blocks: leave a block as it is where, on the samples, FP8 changes its
            output by more than this: the norm of the difference over the norm of the output. --text or --arrays gives
            the samples. Linear layers outside of blocks are left, too.
    """

    fp8_error: float | None = option(None, "SHARE", SHARE)


def refuse_weights_of_linear(where: str, what: str, weights: str) -> None:
    """Raise `UserError` if linear layers are to be quantised where none are computed.

    Args:
        where: The argument or setting.
        what: The reason why there are none.
        weights: One of WEIGHTS.
    """
    if weights == FP8:
        fix = f"Take {FP8_BLOCKS}, which quantises the blocks."
        raise UserError(where, what, got=repr(weights), expected=" or ".join((KEEP, FP8_BLOCKS)), fix=fix)


def refuse_weight_type(options: WeightTypeOptions, target: str) -> None:
    """Raise `UserError` if weights of a model that is compiled already are to be quantised."""
    if options.weights != KEEP:
        raise UserError(
            f"--weights {options.weights}", "what is compiled keeps its weights", got=target, fix="Leave it out."
        )


def refuse_weights(options: WeightOptions) -> None:
    """Raise `UserError` if a largest error in FP8 is given and nothing is quantised."""
    if options.fp8_error is not None and options.weights == KEEP:
        what, got = "no weights are quantised", f"--weights {options.weights}"
        fix = f"Add --weights {FP8_BLOCKS}, or leave it out."
        raise UserError(f"--fp8-error {options.fp8_error}", what, got=got, fix=fix)


def refuse_samples(options: WeightOptions, samples: Mapping[str, object], only_to_measure: bool = True) -> None:
    """Raise `UserError` if the largest error in FP8 has no samples, or more than one kind.

    Args:
        options: The options.
        samples: The given samples of each kind, by the names of their options.
        only_to_measure: Whether samples have no other use; then they are refused without a largest error.
    """
    refuse_weights(options)
    given = [f"{name} {value}" for name, value in samples.items() if value is not None]
    if options.fp8_error is None:
        if given and only_to_measure:
            raise UserError(given[0], "the model is run only to measure FP8", fix="Add --fp8-error SHARE.")
    elif len(given) != 1:
        what, got = "is measured on samples", " and ".join(given) or "none"
        expected = f"{'one of ' * (len(samples) > 1)}{' and '.join(samples)}"
        raise UserError(f"--fp8-error {options.fp8_error}", what, got=got, expected=expected)
