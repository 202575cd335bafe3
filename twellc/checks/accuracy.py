"""How far a result is from the truth, and how far it may be.

The truth is the same model in float64. The yardstick is the plain low-precision model: a candidate may be twice as far
from the truth as that is, plus a floor for the rounding of the output itself. This file is the only home of these
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_FACTOR = 2.0
# Floors in units of the output dtype's epsilon: for the largest error, relative to the largest true value; for the
# relative error in the Euclidean norm. One rounding of the output costs at most 0.5 and about 0.2 of them.
_FLOOR_MAX = 1.0
_FLOOR_RELATIVE = 0.1
# Floor for outputs of integers and booleans, in units of the root of their number: a model that is wrong in elements at
# random is rejected by the count of an equally accurate one in at most one of 1000 cases.
_FLOOR_DIFFERING = 2.0
# Error of the plain model, relative or as a share of elements, from which on twice as much says little.
COARSE = 0.1
# What the order of sums may change in float64, relative to the result, with room for many layers.
_REASSOCIATION = 1e-10


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
class Share:
    """A share of an error: of the largest absolute one, and of the one relative to the truth in the Euclidean norm."""

    max: float
    relative: float


@dataclass(frozen=True)
class Separation:
    """Where the error of a candidate comes from; docs/accuracy.md defines the shares.

    Attributes:
        low_precision: Error of the plain low-precision model.
        rewrite: What rewriting changes in float64.
        kernels: What the plugin nodes' own arithmetic adds; negative where it is more accurate than plain operators.
        rest: What everything else adds that the candidate does in another way: the export, and what ran it.
        rewrite_stray: Elements that rewriting makes NaN or infinite, or no longer so.
        rewrite_within: Whether rewriting changes no more than it may.
        kernels_within: Whether the kernels' arithmetic is within the candidate's tolerance.
    """

    low_precision: Share
    rewrite: Share
    kernels: Share
    rest: Share
    rewrite_stray: int
    rewrite_within: bool
    kernels_within: bool


@dataclass(frozen=True)
class TextAccuracy:
    """How well the candidate, the plain model and the model in float64 predict a text.

    Attributes:
        tokens: Number of tokens that were predicted: all but the first of each window.
        candidate_bits, plain_bits, truth_bits: Cross-entropy in bits per token.
    """

    tokens: int
    candidate_bits: float
    plain_bits: float
    truth_bits: float


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
        separation: Where the error comes from; None where that could not be found out.
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
    separation: Separation | None = None

    @property
    def within(self) -> bool:
        """Whether the candidate is within tolerance."""
        return (
            self.stray == 0
            and self.candidate.max <= self.max_tolerance
            and self.candidate.relative <= self.relative_tolerance
        )

    @property
    def coarse(self) -> bool:
        """Whether the plain model is so far from the truth that being within tolerance says little."""
        return self.plain.relative > COARSE


@dataclass(frozen=True)
class DiscreteAccuracy:
    """Accuracy of one output of integers or booleans, such as the place of the largest logit.

    A rounding error changes such an element to any other one or not at all, so that elements are counted.

    Attributes:
        name: Name of the output.
        elements: Number of its elements.
        differing: In how many of them the candidate differs from float64.
        plain_differing: The same of the plain low-precision model: the yardstick.
        tolerance: What `differing` may reach.
    """

    name: str
    elements: int
    differing: int
    plain_differing: int
    tolerance: int

    @property
    def within(self) -> bool:
        """Whether the candidate is within tolerance."""
        return self.differing <= self.tolerance

    @property
    def coarse(self) -> bool:
        """Whether the plain model is so far from the truth that being within tolerance says little."""
        return self.plain_differing > COARSE * self.elements


def measure(
    name: str,
    candidate: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    language_model: bool,
) -> OutputAccuracy:
    """Measure one output of floating-point numbers.

    Args:
        name: Name of the output.
        candidate: The candidate's output, [rows, width].
        plain: The plain low-precision model's output, of the same shape.
        truth: The output in float64.
        language_model: Whether rows are logits over a vocabulary.
    """
    epsilon = torch.finfo(plain.dtype).eps
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


def measure_discrete(name: str, candidate: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> DiscreteAccuracy:
    """Measure one output of integers or booleans; see `measure`."""
    elements, plain_differing = truth.numel(), int((plain != truth).sum())
    return DiscreteAccuracy(
        name=name,
        elements=elements,
        differing=int((candidate != truth).sum()),
        plain_differing=plain_differing,
        tolerance=int(_FACTOR * plain_differing + _FLOOR_DIFFERING * elements**0.5),
    )


def separate(
    candidate: torch.Tensor,
    spliced: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    rewritten: torch.Tensor,
    original: torch.Tensor,
    exact: bool = True,
) -> Separation:
    """Separate the error of one output; all tensors are [rows, width].

    Args:
        candidate: The candidate's output.
        spliced: The plain low-precision model's, with the candidate's plugin nodes in the place of its blocks.
        plain: The plain low-precision model's.
        truth: The model's in float64.
        rewritten: The plain model's with float64 arithmetic, with the plugin nodes in the place of its blocks.
        original: The plain model's with float64 arithmetic: its weights are rounded, nothing else is.
        exact: Whether `rewritten` may differ from `original` by the order of sums only, not by low precision as well.
    """
    same = (rewritten == original) | (rewritten.isnan() & original.isnan())
    shift = torch.where(same, 0.0, (rewritten - original).double())
    stray = int((~shift.isfinite()).sum())
    ours = spliced.double() - shift
    ok = torch.stack([each.isfinite() for each in (candidate, spliced, plain, truth, shift)]).all(0)

    def error(of: torch.Tensor) -> Share:
        found = _distance(of.double()[ok], truth[ok])
        return Share(found.max, found.relative)

    def minus(a: Share, b: Share) -> Share:
        return Share(a.max - b.max, a.relative - b.relative)

    low_precision, norm = error(plain), float(truth[ok].norm())
    changed = float(shift[ok].norm())
    rewrite = Share(
        float(shift[ok].abs().max()) if bool(ok.any()) else 0.0, changed / norm if norm else float(changed > 0)
    )
    return Separation(
        low_precision=low_precision,
        rewrite=rewrite,
        kernels=minus(error(ours), low_precision),
        rest=minus(error(candidate), error(spliced)),
        rewrite_stray=stray,
        rewrite_within=stray == 0 and rewrite.relative <= (_REASSOCIATION if exact else low_precision.relative),
        kernels_within=measure("", ours, plain, truth, language_model=False).within,
    )


def text_bits(logits: list[torch.Tensor], ids: list[torch.Tensor]) -> tuple[int, float]:
    """Return how many tokens are predicted, all but the first of each row, and the mean cross-entropy in bits.

    Args:
        logits: Of each sample, [batch, tokens, vocabulary].
        ids: Of each sample, int64 [batch, tokens].
    """
    count, total = 0, 0.0
    for sample, tokens in zip(logits, ids, strict=True):
        following = tokens[:, 1:]
        chances = sample[:, :-1].double().log_softmax(-1).gather(-1, following[..., None])
        count, total = count + following.numel(), total - float(chances.sum())
    return count, total / max(count, 1) / math.log(2)


def perplexity(bits: float) -> float:
    """Return the perplexity that belongs to a cross-entropy in bits per token."""
    return math.inf if bits >= 1024 else 2.0**bits


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
