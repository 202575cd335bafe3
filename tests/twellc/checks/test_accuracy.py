"""The judgement of `twellc check`: what it accepts, and what it must not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twellc.checks.accuracy import (
    OutputAccuracy,
    Separation,
    measure,
    measure_discrete,
    perplexity,
    separate,
    text_bits,
)

LOW = [torch.bfloat16, torch.float16]


def projected(dtype: torch.dtype, rows: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return a product in low precision, the same summed in another order, and the truth in float64."""
    x, w = torch.randn(rows, 256).to(dtype), (torch.randn(128, 256) / 16).to(dtype)
    truth = x.double() @ w.double().t()
    plain = torch.nn.functional.linear(x, w)
    half = torch.nn.functional.linear(x[:, :128].float(), w[:, :128].float())
    other = (half + torch.nn.functional.linear(x[:, 128:].float(), w[:, 128:].float())).to(dtype)
    return plain, other, truth


def judge(candidate: Tensor, plain: Tensor, truth: Tensor, language_model: bool = False) -> OutputAccuracy:
    return measure("y", candidate, plain, truth, language_model)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_accepts_what_is_as_accurate(dtype: torch.dtype) -> None:
    plain, other, truth = projected(dtype)
    for candidate in (plain, other, truth.to(dtype)):
        result = judge(candidate, plain, truth)
        assert (result.within, result.stray) == (True, 0)
        assert result.candidate.cosine > 0.999


def test_accepts_a_plain_model_without_error() -> None:
    """Where the plain result happens to be exact, a candidate may still round its output once."""
    truth = torch.randn(64, 32, dtype=torch.float64).bfloat16().double()
    candidate = (truth * (1 + torch.finfo(torch.bfloat16).eps / 8)).bfloat16()
    assert judge(candidate, truth.bfloat16(), truth).within


def put(y: Tensor, value: float | Tensor) -> Tensor:
    return y.index_put((torch.tensor([3]), torch.tensor([5])), torch.as_tensor(value, dtype=y.dtype))


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "halved": lambda y: y / 2,
    "negated": lambda y: -y,
    "scaled by 3 %": lambda y: y * 1.03,
    "rows swapped": lambda y: y.flip(0),
    "columns shifted": lambda y: y.roll(1, 1),
    "one row zeroed": lambda y: torch.cat([torch.zeros_like(y[:1]), y[1:]]),
    "one column zeroed": lambda y: torch.cat([torch.zeros_like(y[:, :1]), y[:, 1:]], 1),
    "one column doubled": lambda y: torch.cat([2 * y[:, :1], y[:, 1:]], 1),
    "one element wrong": lambda y: put(y, y.abs().max() + y[3, 5]),
    "a NaN": lambda y: put(y, torch.nan),
    "an infinity": lambda y: put(y, torch.inf),
    "all NaN": lambda y: torch.full_like(y, torch.nan),
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("damage", DAMAGES)
def test_rejects(damage: str, dtype: torch.dtype) -> None:
    plain, other, truth = projected(dtype)
    assert not judge(DAMAGES[damage](other), plain, truth).within


def test_rejects_noise_of_three_times_the_plain_error() -> None:
    plain, _, truth = projected(torch.bfloat16, rows=512)
    noisy = truth + 3 * (plain.double() - truth)
    assert not judge(noisy, plain, truth).within
    assert judge(truth + 1.5 * (plain.double() - truth), plain, truth).within


NOT_FINITE = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("where", [..., (slice(1, 3),), (3, 5), (slice(None), slice(0, 2))])
def test_a_fault_of_the_plain_model_is_one_of_the_candidate(value: float, where: Any, dtype: torch.dtype) -> None:
    """Everywhere, in whole rows, in one element, in 1 of 64 columns: what float64 can compute must be there."""
    plain, other, truth = projected(dtype)
    plain[where] = other[where] = value
    result = judge(other, plain, truth)
    count = int((~other.isfinite()).sum())
    assert (result.within, result.overflows, result.comparable) == (False, True, False)
    assert (result.stray, result.plain_stray, result.shared_stray) == (count, count, count)
    assert (result.elements, result.compared) == (truth.numel(), truth.numel() - count)
    assert math.isnan(result.candidate.max) == (where is ...)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("where", [..., (slice(1, 3),), (3, 5)])
def test_a_candidate_that_is_right_where_the_plain_model_is_not(value: float, where: Any, dtype: torch.dtype) -> None:
    plain, other, truth = projected(dtype)
    count = plain[where].numel()
    plain[where] = value
    result = judge(other, plain, truth)
    assert (result.within, result.stray, result.plain_stray, result.compared) == (True, 0, count, truth.numel())
    assert result.relative_tolerance < 5 * torch.finfo(dtype).eps
    for damage in ("halved", "one row zeroed", "one column doubled", "one element wrong", "a NaN", "all NaN"):
        assert not judge(DAMAGES[damage](other), plain, truth).within, damage
    other[where] = value
    assert not judge(other, plain, truth).within


def test_one_fault_of_the_plain_model_allows_one_no_other() -> None:
    """NaN at one place of the plain model excuses nothing at another, and its place must still be right."""
    plain, other, truth = projected(torch.float16)
    plain[3, 5] = torch.nan
    wrong = other.clone()
    wrong[3, 5] += 10
    assert not judge(wrong, plain, truth).within
    wrong = other.clone()
    wrong[3, 6] = torch.nan
    result = judge(wrong, plain, truth)
    assert (result.within, result.overflows, result.stray, result.shared_stray) == (False, False, 1, 0)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_what_float64_has_is_required(value: float) -> None:
    plain, other, truth = projected(torch.bfloat16)
    truth[2] = value
    assert judge(other, plain, truth).stray == 128
    other[2] = value
    result = judge(other, plain, truth)
    assert (result.within, result.stray, result.plain_stray, result.not_finite) == (True, 0, 128, 128)
    for another in {0.0, *NOT_FINITE} - {value}:
        other[2, 7] = another
        assert judge(other, plain, truth).stray == 1


def test_nothing_that_is_finite_in_float64() -> None:
    """The same NaN everywhere shows nothing: the check must not pass."""
    nothing = torch.full((4, 8), torch.nan)
    result = judge(nothing.bfloat16(), nothing.bfloat16(), nothing.double())
    assert (result.compared, result.stray, result.within, result.overflows) == (0, 0, False, False)
    plain, other, truth = (torch.full((4, 8), value) for value in (math.inf, math.inf, 1e6))
    result = judge(other.half(), plain.half(), truth.double())
    assert (result.compared, result.extreme, result.stray, result.within) == (0, 32, 0, False)


@pytest.mark.parametrize("value", [70000.0, -70000.0, 65515.0])
def test_beyond_the_range_of_float16(value: float) -> None:
    """There an infinity is the right rounding, or as near as the rest is; elsewhere it is not."""
    plain, other, truth = projected(torch.float16)
    truth[3, 5] = value
    largest = math.copysign(65504, value)
    for right in (math.copysign(math.inf, value), largest):
        plain[3, 5] = other[3, 5] = right
        result = judge(other, plain, truth)
        assert (result.within, result.stray, result.extreme, result.compared) == (True, 0, 1, truth.numel() - 1)
    for wrong in (0.0, math.nan, -math.inf * value, 0.9 * largest):
        other[3, 5] = wrong
        assert judge(other, plain, truth).stray == 1
    other[3, 5], truth[3, 5] = math.copysign(math.inf, value), math.copysign(20000, value)
    assert judge(other, plain, truth).stray == 1


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_masks_do_not_outweigh_the_rest(dtype: torch.dtype) -> None:
    """The least number of a dtype, as in masked logits, would make every other error small."""
    plain, other, truth = projected(dtype)
    least = torch.finfo(dtype).min
    for each in (plain, other, truth):
        each[:, -1] = least
    assert judge(other, plain, truth).within
    assert not judge(other * torch.tensor([0.5] * 127 + [1.0]).to(dtype), plain, truth).within
    other[0, -1] = -1.0
    assert not judge(other, plain, truth).within


def test_minus_infinity_in_all_three() -> None:
    """Masked logits are -inf in every precision."""
    plain, other, truth = projected(torch.bfloat16)
    for tensor in (plain, other, truth):
        tensor[:, -1] = -torch.inf
    result = judge(other, plain, truth, language_model=True)
    assert result.within
    other[0, -1] = torch.inf
    assert not judge(other, plain, truth).within


DISCRETE: dict[str, Callable[[Tensor], Tensor]] = {
    "argmax": lambda y: y.argmax(-1, keepdim=True),
    "comparisons": lambda y: y > 0.5,
}


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("of", DISCRETE)
def test_discrete_outputs(of: str, dtype: torch.dtype) -> None:
    plain, other, truth = (DISCRETE[of](each) for each in projected(dtype, rows=4096))
    result = measure_discrete("y", other, plain, truth)
    assert 0 < result.plain_differing == int((plain != truth).sum()) < truth.numel() / 50
    assert 0 < result.differing == int((other != truth).sum()) <= result.tolerance < truth.numel() / 15
    assert result.within
    assert measure_discrete("y", truth, plain, truth).differing == 0
    wrong = (torch.zeros_like(other), other.flip(0), other.roll(1, 0))
    assert not any(measure_discrete("y", each, plain, truth).within for each in wrong)


def test_figures_of_a_discrete_output() -> None:
    """Twice the plain model's count and twice the root of the number: 2 * 3 + 2 * 10."""
    truth = torch.arange(100)
    plain, candidate = truth.clone(), truth.clone()
    plain[:3] += 50
    candidate[10:36] -= 1
    result = measure_discrete("y", candidate, plain, truth)
    assert (result.elements, result.plain_differing, result.differing, result.tolerance) == (100, 3, 26, 26)
    assert result.within
    candidate[40] = 0
    assert not measure_discrete("y", candidate, plain, truth).within


def test_coarse() -> None:
    """More than 10 % off by low precision alone; the candidate has no part in it."""
    truth = torch.ones(100, 1, dtype=torch.float64)
    for plain, coarse in ((1.09, False), (1.11, True)):
        result = judge(truth * 3, truth.float() * plain, truth)
        assert (result.coarse, result.within) == (coarse, False)
    for count, coarse in ((10, False), (11, True)):
        positive = truth > 0
        positive[:count] = False
        assert measure_discrete("y", truth > 0, positive, truth > 0).coarse == coarse


@pytest.mark.parametrize(
    ("elements", "share"), [(1, 0.0), (5, 0.01), (16, 0.01), (300, 0.01), (2000, 0.01), (300, 0.15), (2000, 0.15)]
)
def test_equally_accurate_models_agree(elements: int, share: float) -> None:
    """Models that differ from the truth equally often, at random, reject each other in one of 1000 cases at most."""
    truth = torch.zeros(elements, dtype=torch.bool)
    draws = torch.rand(2000, 2, elements) < share
    rejected = sum(not measure_discrete("y", candidate, plain, truth).within for candidate, plain in draws)
    assert rejected <= 2


@pytest.mark.parametrize("elements", [1, 3, 7, 1000])
def test_a_plain_model_that_is_wrong_excuses_nothing(elements: int) -> None:
    """The argmax of NaN is the first place, and NaN > 0.5 is false: as wrong as the plain model is not enough."""
    truth = 1 + torch.arange(elements)
    zeros = torch.zeros_like(truth)
    result = measure_discrete("y", zeros, zeros, truth)
    assert (result.within, result.lacks_yardstick, result.tolerance) == (False, True, elements // 4)
    assert measure_discrete("y", truth, zeros, truth).within
    half = truth % 2 == 0 if elements > 1 else truth > 0
    result = measure_discrete("y", half & False, half & False, half)
    assert (result.within, result.lacks_yardstick) == (False, True)


def test_few_elements_decide_something() -> None:
    for elements, tolerance in ((1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (16, 8), (100, 20)):
        truth = torch.arange(elements)
        assert measure_discrete("y", truth, truth, truth).tolerance == tolerance
        assert not measure_discrete("y", truth - 1, truth, truth).within


def test_nothing_to_compare() -> None:
    empty = torch.zeros(0, 8)
    assert judge(empty.bfloat16(), empty.bfloat16(), empty.double()).within
    assert measure_discrete("y", empty.long(), empty.long(), empty.long()).within
    separation = separate(*[empty.double()] * 6)
    assert separation.rewrite_within and separation.kernels_within
    zeros = torch.zeros(4, 8)
    assert judge(zeros.bfloat16(), zeros.bfloat16(), zeros.double()).within
    assert not judge((zeros + 1).bfloat16(), zeros.bfloat16(), zeros.double()).within


def test_figures() -> None:
    truth = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    result = judge(torch.tensor([[3.0, 4.5]]), torch.tensor([[3.0, 4.0]]), truth)
    assert (result.candidate.max, result.candidate.mean) == (0.5, 0.25)
    assert result.candidate.relative == pytest.approx(0.1)
    assert result.candidate.cosine == pytest.approx((9 + 18) / (5 * (9 + 20.25) ** 0.5))
    assert (result.plain.max, result.difference.max) == (0.0, 0.5)


def test_language_model_figures() -> None:
    truth = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64))
    candidate = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]))
    result = judge(candidate, truth.float(), truth, language_model=True)
    assert (result.top1, result.plain_top1) == (0.5, 1.0)
    kl = 0.5 * torch.log(torch.tensor(0.5 / 0.25)) + 0.25 * torch.log(torch.tensor(0.25 / 0.5))
    assert result.kl == pytest.approx(float(kl) / 2, rel=1e-5)
    assert result.plain_kl == pytest.approx(0, abs=1e-7)
    other = judge(candidate, truth.float(), truth)
    assert (other.top1, other.kl) == (None, None)


def separated(**changes: Tensor) -> tuple[Separation, Tensor, Tensor]:
    """Separate a candidate that is right but for `changes`, which are added to what they name.

    Returns the separation, the error of the candidate and the truth.
    """
    plain, spliced, truth = projected(torch.bfloat16, rows=256)
    noise = 1e-3 * torch.randn(truth.shape, dtype=torch.float64)
    tensors = {"candidate": spliced.double() + noise, "spliced": spliced, "plain": plain, "truth": truth}
    tensors |= {"rewritten": truth * (1 + 1e-15), "original": truth}
    tensors |= {name: tensors[name].double() + change for name, change in changes.items()}
    # As in a check, all but the two in float64 are results in low precision.
    tensors |= {name: tensors[name].bfloat16() for name in ("candidate", "spliced", "plain")}
    return separate(**tensors), tensors["candidate"].double() - truth, truth


def test_shares_add_up_to_the_error() -> None:
    separation, error, truth = separated()
    parts = (separation.low_precision, separation.rewrite, separation.kernels, separation.rest)
    assert sum(part.max for part in parts) == pytest.approx(float(error.abs().max()), rel=1e-6)
    assert sum(part.relative for part in parts) == pytest.approx(float(error.norm() / truth.norm()), rel=1e-6)
    assert separation.rewrite_within and separation.kernels_within


# Multiples of a half, which bfloat16 holds beside values of this size without another rounding of note.
FAULT = torch.zeros(256, 128, dtype=torch.float64)
FAULT[:, 7] = 3.0


@pytest.mark.parametrize(
    ("places", "rewrite_within", "kernels_within", "share"),
    [
        (("candidate", "spliced", "rewritten"), False, True, "rewrite"),
        (("candidate", "spliced"), True, False, "kernels"),
        (("candidate",), True, True, "rest"),
    ],
)
def test_a_fault_is_of_one_share(
    places: tuple[str, ...], rewrite_within: bool, kernels_within: bool, share: str
) -> None:
    bad, *_ = separated(**dict.fromkeys(places, FAULT))
    assert (bad.rewrite_within, bad.kernels_within) == (rewrite_within, kernels_within)
    assert getattr(bad, share).max > 2
    others = {"rewrite": bad.kernels, "kernels": bad.rest}
    assert share not in others or abs(others[share].relative) < bad.low_precision.relative
    if share == "rewrite":
        assert bad.rewrite.max == pytest.approx(3.0) and bad.low_precision.relative < bad.rewrite.relative / 20


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rewriting_must_not_make_nan(value: float) -> None:
    plain, spliced, truth = projected(torch.bfloat16)
    rewritten = truth.clone()
    rewritten[3, 5] = value
    separation = separate(spliced, spliced, plain, truth, rewritten, truth)
    assert (separation.rewrite_stray, separation.rewrite_within) == (1, False)
    assert math.isfinite(separation.rewrite.max)
    # The same at the same place is not a difference.
    both = separate(spliced, spliced, plain, truth, rewritten, rewritten)
    assert (both.rewrite_stray, both.rewrite_within) == (0, True)


def test_separation_where_low_precision_overflows() -> None:
    """Neither the kernels nor the rewriting are the cause, and a fault of the rewriting is still found."""
    plain, spliced, truth = projected(torch.float16)
    plain[:], spliced[:] = torch.nan, torch.inf
    separation = separate(spliced, spliced, plain, truth, truth * (1 + 1e-15), truth)
    assert separation.rewrite_within and separation.kernels_within
    assert 0 < separation.rewrite.relative < 1e-14
    assert math.isnan(separation.low_precision.relative) and math.isnan(separation.kernels.relative)
    assert not separate(spliced, spliced, plain, truth, truth * 1.01, truth).rewrite_within
    assert not separate(spliced, spliced, plain, truth, truth * 1.01, truth, exact=False).rewrite_within
    good, right, truth = projected(torch.float16)
    right[:] = torch.nan
    assert not separate(right, right, good, truth, truth, truth).kernels_within


def test_language_model_figures_of_what_is_not_finite() -> None:
    """NaN agrees with nothing, though its argmax is the first place; what has no chance adds nothing to KL."""
    truth = torch.tensor([[3.0, 1.0, -torch.inf], [3.0, 1.0, 0.0]], dtype=torch.float64)
    candidate = truth.float()
    result = judge(candidate, truth.float(), truth, language_model=True)
    assert (result.top1, result.kl) == (1.0, pytest.approx(0.0, abs=1e-7))
    candidate[1] = torch.nan
    result = judge(candidate, truth.float(), truth, language_model=True)
    assert result.top1 == 0.5 and result.kl is not None and math.isnan(result.kl)


def test_bits_of_text() -> None:
    """Two windows: the first token of each is given, not predicted."""
    half = torch.tensor([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]]).log()
    ids = torch.tensor([[2, 0, 1]])
    assert text_bits([half], [ids]) == (2, pytest.approx(1.0))
    assert text_bits([half, half[:, :2]], [ids, torch.tensor([[1, 2]])]) == (3, pytest.approx((1 + 1 + 2) / 3))
    assert text_bits([half[:, :1]], [ids[:, :1]]) == (0, 0.0)
    assert math.isnan(text_bits([half * torch.nan], [ids])[1])


def test_perplexity() -> None:
    assert perplexity(3.0) == 8.0
    assert perplexity(5000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
