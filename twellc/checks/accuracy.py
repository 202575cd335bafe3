"""How far a result is from the truth, and how far it may be.

The truth is the same model in float64. The yardstick is the plain low-precision model: a candidate may be twice as far
from the truth as that is, plus a floor for the rounding of the output itself. NaN and infinity have no distance:
the truth alone says where that is right. docs/accuracy.md has the rules; this file is the only home of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

_FACTOR = 2.0
# Floors in units of the output dtype's epsilon: for the largest error, relative to the largest true value; for the
# relative error in the Euclidean norm. One rounding of the output costs at most 0.5 and about 0.2 of them.
_FLOOR_MAX = 1.0
_FLOOR_RELATIVE = 0.1
# Floor for outputs of integers and booleans, in units of the root of their number: a model that is wrong in elements at
# random is rejected by the count of an equally accurate one in at most one of 1000 cases.
_FLOOR_DIFFERING = 2.0
# What the error of the plain model is taken as at least, in units of epsilon, where some of it is NaN or infinite and
# the truth is not: that much low precision costs a model of a few layers.
_UNKNOWN = 2.0
# The share of integers or booleans that a candidate may have wrong at most, and the same where the plain model has more
# than that share wrong and cannot be a reference: booleans that are all false are right in half of the elements.
_MOST_DIFFERING = 0.5
_MOST_DIFFERING_ALONE = 0.25
# Error of the plain model, relative or as a share of elements, from which on twice as much says little.
COARSE = 0.1
# What the order of sums may change in float64, relative to the result, with room for many layers.
_REASSOCIATION = 1e-10


@dataclass(frozen=True)
class Error:
    """Distance between two tensors: largest and mean absolute difference, and the difference relative to the second.

    `relative` is ||a - b|| / ||b|| in the Euclidean norm; `cosine` the cosine of the angle between them. All are NaN
    where there is no element to compare.
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
        elements: Number of its elements.
        compared: How many of them are finite, and not extreme in float64; errors are over these alone.
        candidate: Candidate against float64.
        plain: Plain low-precision model against float64, where it is finite: the yardstick.
        difference: Candidate against the plain low-precision model.
        stray: Elements that are NaN or infinite where float64 is not, not in the same way, or the other way round.
        plain_stray: The same of the plain low-precision model.
        shared_stray: Those of `stray` that the plain low-precision model has as well.
        not_finite: Elements that are NaN or infinite in float64 itself.
        extreme: Elements that are finite in float64, and beyond half of the range of the output's own dtype. Each is
            judged by itself.
        top1: Share of positions whose largest logit is at the same place as in float64; language models only.
        kl: Mean Kullback-Leibler divergence from the float64 distribution, in nats; language models only.
        plain_top1, plain_kl: The same of the plain low-precision model.
        max_tolerance, relative_tolerance: What `candidate` may reach.
        separation: Where the error comes from; None where that could not be found out.
    """

    name: str
    elements: int
    compared: int
    candidate: Error
    plain: Error
    difference: Error
    stray: int
    plain_stray: int
    shared_stray: int
    not_finite: int
    extreme: int
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
        return self.comparable and self._near

    @property
    def comparable(self) -> bool:
        """Whether no element strays and there is something to compare, or no element at all."""
        return self.stray == 0 and (self.compared > 0 or self.elements == 0)

    @property
    def overflows(self) -> bool:
        """Whether the candidate strays, and low precision alone is the cause: the plain model does wherever it does."""
        return self.stray > 0 and self.excusable

    @property
    def excusable(self) -> bool:
        """Whether nothing is wrong with the candidate, or only what is wrong with the plain model, too."""
        return self.stray == self.shared_stray and self._near

    @property
    def coarse(self) -> bool:
        """Whether the plain model is so far from the truth that being within tolerance says little."""
        return self.plain.relative > COARSE

    @property
    def _near(self) -> bool:
        """Whether nothing that was compared is further off than it may be."""
        return not (self.candidate.max > self.max_tolerance or self.candidate.relative > self.relative_tolerance)


@dataclass(frozen=True)
class DiscreteAccuracy:
    """Accuracy of one output of integers or booleans, such as the place of the largest logit.

    A rounding error changes such an element to any other one or not at all, so that elements are counted.

    Attributes:
        name: Name of the output.
        elements: Number of its elements.
        differing: In how many of them the candidate differs from float64.
        plain_differing: The same of the plain low-precision model, or of float64 with other experts: the yardstick.
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

    @property
    def lacks_yardstick(self) -> bool:
        """Whether the plain model is wrong so often that the candidate is judged without it."""
        return self.plain_differing > _MOST_DIFFERING_ALONE * self.elements


def measure(
    name: str,
    candidate: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    language_model: bool,
    precision: torch.dtype | None = None,
    others: Sequence[torch.Tensor] = (),
) -> OutputAccuracy:
    """Measure one output of floating-point numbers.

    Args:
        name: Name of the output.
        candidate: The candidate's output, [rows, width].
        plain: The plain low-precision model's output, of the same shape.
        truth: The output in float64.
        language_model: Whether rows are logits over a vocabulary.
        precision: What the model computes in, where that is lower than the dtype of the output.
        others: Outputs that are as right as the truth: the yardstick is the largest distance from it.
    """
    epsilon = torch.finfo(plain.dtype).eps
    unknown = _UNKNOWN * torch.finfo(precision or plain.dtype).eps
    ours, theirs = candidate.double(), plain.double()
    in_range = _in_range(truth, plain.dtype)
    ok, usable = in_range & ours.isfinite(), in_range & theirs.isfinite()
    both = ok & usable
    ours_error, plain_error = _distance(ours[ok], truth[ok]), _distance(theirs[usable], truth[usable])
    largest = float(truth[ok].abs().max()) if bool(ok.any()) else 0.0
    distances = [plain_error, *(_distance(each[ok], truth[ok]) for each in others)]
    yardstick, relative_yardstick = (max(getattr(each, key) for each in distances) for key in ("max", "relative"))
    if not bool(usable[in_range].all()):
        yardstick = _at_least(unknown * largest, yardstick)
        relative_yardstick = _at_least(unknown, relative_yardstick)
    max_tolerance = _at_least(0.0, _FACTOR * yardstick + _FLOOR_MAX * epsilon * largest)
    share = max_tolerance / largest if largest else epsilon
    stray, plain_stray = (_stray(each, truth, plain.dtype, share) for each in (ours, theirs))
    top1, kl = _language(ours, truth) if language_model else (None, None)
    plain_top1, plain_kl = _language(theirs, truth) if language_model else (None, None)
    return OutputAccuracy(
        name=name,
        elements=truth.numel(),
        compared=int(ok.sum()),
        candidate=ours_error,
        plain=plain_error,
        difference=_distance(ours[both], theirs[both]),
        stray=int(stray.sum()),
        plain_stray=int(plain_stray.sum()),
        shared_stray=int((stray & plain_stray).sum()),
        not_finite=int((~truth.isfinite()).sum()),
        extreme=int((truth.isfinite() & ~in_range).sum()),
        top1=top1,
        kl=kl,
        plain_top1=plain_top1,
        plain_kl=plain_kl,
        max_tolerance=max_tolerance,
        relative_tolerance=_at_least(0.0, _FACTOR * relative_yardstick + _FLOOR_RELATIVE * epsilon),
    )


def _at_least(least: float, value: float) -> float:
    """Return the larger one; `least` where the value is NaN, that of an error of nothing."""
    return value if value > least else least


def _in_range(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return which elements are finite, and not beyond half of a dtype's range.

    The others, such as the least number of a dtype as a mask, would outweigh all else in a norm.
    """
    return truth.abs() <= torch.finfo(dtype).max / 2


def _stray(values: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype, share: float) -> torch.Tensor:
    """Return which elements are NaN or infinite where they must not be, or are not where they must be.

    Where the truth is beyond half of the dtype's range, what is beyond the range, and an infinity, count as the largest
    number; an element may be off by that share of itself. So 65 500 may be infinite in float16, and 1 may not.
    """
    largest = torch.finfo(dtype).max
    limited = truth.clamp(-largest, largest)
    near = (values.clamp(-largest, largest) - limited).abs() <= share * limited.abs()
    same = (values == truth) | (values.isnan() & truth.isnan())
    right = torch.where(_in_range(truth, dtype), values.isfinite(), torch.where(truth.isfinite(), near, same))
    return ~right


def measure_discrete(
    name: str,
    candidate: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    others: Sequence[torch.Tensor] = (),
) -> DiscreteAccuracy:
    """Measure one output of integers or booleans; see `measure`."""
    elements, plain_differing = truth.numel(), max(int((each != truth).sum()) for each in (plain, *others))
    allowed = _FACTOR * plain_differing + _FLOOR_DIFFERING * elements**0.5
    result = DiscreteAccuracy(name, elements, int((candidate != truth).sum()), plain_differing, tolerance=0)
    most = (_MOST_DIFFERING_ALONE if result.lacks_yardstick else _MOST_DIFFERING) * elements
    return replace(result, tolerance=int(min(allowed, most)))


def rows_near_ties(truth: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return which rows are not the same in other outputs that are as right as the truth, all [rows, width]."""
    near = torch.zeros(len(truth), dtype=torch.bool)
    for each in others:
        shift, size = (values.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1) for values in (each - truth, truth))
        near |= shift > _REASSOCIATION * size
    return near


def separate(
    candidate: torch.Tensor,
    spliced: torch.Tensor,
    plain: torch.Tensor,
    truth: torch.Tensor,
    rewritten: torch.Tensor,
    original: torch.Tensor,
    exact: bool = True,
    precision: torch.dtype | None = None,
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
        precision: See `measure`.
    """
    same = (rewritten == original) | (rewritten.isnan() & original.isnan())
    shift = torch.where(same, 0.0, (rewritten - original).double())
    stray = int((~shift.isfinite()).sum())
    ours = spliced.double() - shift
    compared = _in_range(truth, plain.dtype) & shift.isfinite()
    ok = torch.stack([compared, *(each.isfinite() for each in (candidate, spliced, plain))]).all(0)

    def error(of: torch.Tensor) -> Share:
        return _share(of.double()[ok] - truth[ok], truth[ok])

    def minus(a: Share, b: Share) -> Share:
        return Share(a.max - b.max, a.relative - b.relative)

    low_precision = error(plain)
    rewrite = _share(shift[compared], truth[compared])
    most = (
        _REASSOCIATION
        if exact
        else _at_least(_UNKNOWN * torch.finfo(precision or plain.dtype).eps, low_precision.relative)
    )
    return Separation(
        low_precision=low_precision,
        rewrite=rewrite,
        kernels=minus(error(ours), low_precision),
        rest=minus(error(candidate), error(spliced)),
        rewrite_stray=stray,
        rewrite_within=stray == 0 and not rewrite.relative > most,
        kernels_within=measure("", ours, plain, truth, False, precision).excusable,
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
        return Error(math.nan, math.nan, math.nan, math.nan)
    difference = a - b
    share = _share(difference, b)
    scale = float(a.norm()) * float(b.norm())
    cosine = float((a * b).sum()) / scale if scale else float(torch.equal(a, b))
    return Error(share.max, float(difference.abs().mean()), share.relative, cosine)


def _share(difference: torch.Tensor, of: torch.Tensor) -> Share:
    if difference.numel() == 0:
        return Share(math.nan, math.nan)
    size, norm = float(difference.norm()), float(of.norm())
    return Share(float(difference.abs().max()), size / norm if norm else float(size > 0))


def _language(logits: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Return top-1 agreement and the mean KL divergence of softmax(logits) from softmax(truth), over [..., vocab]."""
    agreement = (logits.argmax(-1) == truth.argmax(-1)) & ~logits.isnan().any(-1)
    ours, theirs = logits.log_softmax(-1), truth.log_softmax(-1)
    # What has no chance adds nothing, whatever it is divided by.
    divergence = torch.where(theirs == -math.inf, 0.0, theirs.exp() * (theirs - ours))
    return float(agreement.double().mean()), float(divergence.sum(-1).mean())
