"""How far a result is from the truth, and how far it may be.

The truth is the same model in float64. The yardstick is the plain low-precision model: a candidate may be twice as far
from the truth as that is, plus a floor for the rounding of the output itself. This file is the only home of these
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FACTOR = 2.0
# Floors in units of the output dtype's epsilon: for the largest error, relative to the largest true value; for the
# relative error in the Euclidean norm. One rounding of the output costs at most 0.5 and about 0.2 of them.
_FLOOR_MAX = 1.0
_FLOOR_RELATIVE = 0.1


@dataclass(frozen=True)
class Error:
    """Distance between two tensors: largest and mean absolute difference, and the difference relative to the second.

    `relative` is ||a - b|| / ||b|| in the Euclidean norm; `cosine` the cosine of the angle between them.
    """

    max: float
    mean: float
    relative: float
    cosine: float


@dataclass(frozen=True)
class OutputAccuracy:
    """Accuracy of one output.

    Attributes:
        name: Name of the output.
        candidate: Candidate against float64.
        plain: Plain low-precision model against float64: the yardstick.
        difference: Candidate against the plain low-precision model.
        stray: Elements that are NaN or infinite where the plain model's are not, not in the same way, or the other way
            round.
        top1: Share of positions whose largest logit is at the same place as in float64; language models only.
        kl: Mean Kullback-Leibler divergence from the float64 distribution, in nats; language models only.
        plain_top1, plain_kl: The same of the plain low-precision model.
        max_tolerance, relative_tolerance: What `candidate` may reach.
    """

    name: str
    candidate: Error
    plain: Error
    difference: Error
    stray: int
    top1: float | None
    kl: float | None
    plain_top1: float | None
    plain_kl: float | None
    max_tolerance: float
    relative_tolerance: float

    @property
    def within(self) -> bool:
        """Whether the candidate is within tolerance."""
        return (
            self.stray == 0
            and self.candidate.max <= self.max_tolerance
            and self.candidate.relative <= self.relative_tolerance
        )


def measure(
    name: str,
    candidate: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    language_model: bool,
) -> OutputAccuracy:
    """Measure one output.

    Args:
        name: Name of the output.
        candidate: The candidate's output, [rows, width].
        plain: The plain low-precision model's output, of the same shape.
        truth: The output in float64.
        language_model: Whether rows are logits over a vocabulary.
    """
    epsilon = torch.finfo(plain.dtype).eps if plain.dtype.is_floating_point else 0.0
    ours, theirs = candidate.double(), plain.double()
    usable = theirs.isfinite() & truth.isfinite()
    alike = (ours.isfinite() & theirs.isfinite()) | (ours == theirs) | (ours.isnan() & theirs.isnan())
    stray = int((~alike).sum())
    ok = usable & ours.isfinite()
    ours_error, plain_error = _distance(ours[ok], truth[ok]), _distance(theirs[ok], truth[ok])
    largest = float(truth[ok].abs().max()) if bool(ok.any()) else 0.0
    top1, kl = _language(ours, truth) if language_model else (None, None)
    plain_top1, plain_kl = _language(theirs, truth) if language_model else (None, None)
    return OutputAccuracy(
        name=name,
        candidate=ours_error,
        plain=plain_error,
        difference=_distance(ours[ok], theirs[ok]),
        stray=stray,
        top1=top1,
        kl=kl,
        plain_top1=plain_top1,
        plain_kl=plain_kl,
        max_tolerance=_FACTOR * plain_error.max + _FLOOR_MAX * epsilon * largest,
        relative_tolerance=_FACTOR * plain_error.relative + _FLOOR_RELATIVE * epsilon,
    )


def _distance(a: torch.Tensor, b: torch.Tensor) -> Error:
    if a.numel() == 0:
        return Error(0.0, 0.0, 0.0, 1.0)
    difference, norm = (a - b).abs(), float(b.norm())
    relative = float(difference.norm()) / norm if norm else float(difference.norm() > 0)
    scale = float(a.norm()) * norm
    cosine = float((a * b).sum()) / scale if scale else float(torch.equal(a, b))
    return Error(float(difference.max()), float(difference.mean()), relative, cosine)


def _language(logits: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Return top-1 agreement and the mean KL divergence of softmax(logits) from softmax(truth), over [..., vocab]."""
    agreement = float((logits.argmax(-1) == truth.argmax(-1)).double().mean())
    ours, theirs = logits.log_softmax(-1), truth.log_softmax(-1)
    return agreement, float((theirs.exp() * (theirs - ours)).sum(-1).mean())
