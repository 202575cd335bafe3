"""The judgement of `twellc check`: what it accepts, and what it must not."""

from __future__ import annotations

import math
from collections.abc import Callable

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
        assert result.within
        assert result.stray == 0
        assert result.candidate.cosine > 0.999


def test_accepts_a_plain_model_without_error() -> None:
    """Where the plain result happens to be exact, a candidate may still round its output once."""
    truth = torch.randn(64, 32, dtype=torch.float64).bfloat16().double()
    candidate = (truth * (1 + torch.finfo(torch.bfloat16).eps / 8)).bfloat16()
    assert judge(candidate, truth.bfloat16(), truth).within


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
    "one element wrong": lambda y: y.index_put((torch.tensor([3]), torch.tensor([5])), y.abs().max() + y[3, 5]),
    "a NaN": lambda y: y.index_put((torch.tensor([3]), torch.tensor([5])), torch.tensor(torch.nan, dtype=y.dtype)),
    "an infinity": lambda y: y.index_put(
        (torch.tensor([3]), torch.tensor([5])), torch.tensor(torch.inf, dtype=y.dtype)
    ),
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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_fault_that_the_plain_model_has_is_none_of_the_candidate(value: float) -> None:
    plain, other, truth = projected(torch.bfloat16)
    plain[3, 5] = other[3, 5] = value
    result = judge(other, plain, truth)
    assert (result.within, result.stray) == (True, 0)
    other[3, 5] = 0
    assert judge(other, plain, truth).stray == 1


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
        plain = truth > 0
        plain[:count] = False
        assert measure_discrete("y", truth > 0, plain, truth > 0).coarse == coarse


def test_discrete_outputs_of_no_elements() -> None:
    empty = torch.zeros(0, 8, dtype=torch.int64)
    assert measure_discrete("y", empty, empty, empty).within


@pytest.mark.parametrize("elements", [1, 5, 16, 300, 2000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.15, 0.5])
def test_equally_accurate_models_agree(elements: int, share: float) -> None:
    """Models that differ from the truth equally often, at random, reject each other in one of 1000 cases at most."""
    truth = torch.zeros(elements, dtype=torch.bool)
    draws = torch.rand(2000, 2, elements) < share
    rejected = sum(not measure_discrete("y", candidate, plain, truth).within for candidate, plain in draws)
    assert rejected <= 2


def test_nothing_to_compare() -> None:
    empty = torch.zeros(0, 8)
    assert judge(empty.bfloat16(), empty.bfloat16(), empty.double()).within


def test_all_zeros() -> None:
    zeros = torch.zeros(4, 8)
    assert judge(zeros.bfloat16(), zeros.bfloat16(), zeros.double()).within
    assert not judge((zeros + 1).bfloat16(), zeros.bfloat16(), zeros.double()).within


def test_figures() -> None:
    truth = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    result = judge(torch.tensor([[3.0, 4.5]]), torch.tensor([[3.0, 4.0]]), truth)
    assert result.candidate.max == 0.5
    assert result.candidate.mean == 0.25
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


# ---- separation ----


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


def test_a_fault_of_the_rewriting_is_not_the_kernels() -> None:
    fault = torch.zeros(256, 128, dtype=torch.float64)
    fault[:, 7] = 3.0
    # Multiples of a half, which bfloat16 holds beside values of this size without another rounding of note.
    good, *_ = separated()
    bad, *_ = separated(candidate=fault, spliced=fault, rewritten=fault)
    assert not bad.rewrite_within
    assert bad.kernels_within
    assert bad.rewrite.max == pytest.approx(3.0)
    assert abs(bad.kernels.relative) < bad.low_precision.relative < bad.rewrite.relative / 20
    assert good.rewrite_within


def test_a_fault_of_the_kernels_is_not_the_rewriting() -> None:
    fault = torch.zeros(256, 128, dtype=torch.float64)
    fault[:, 7] = 3.0
    bad, *_ = separated(candidate=fault, spliced=fault)
    assert bad.rewrite_within
    assert not bad.kernels_within
    assert bad.kernels.max > 2
    assert abs(bad.rest.relative) < bad.low_precision.relative


def test_a_fault_of_neither_is_the_rest() -> None:
    fault = torch.zeros(256, 128, dtype=torch.float64)
    fault[:, 7] = 3.0
    bad, *_ = separated(candidate=fault)
    assert bad.rewrite_within and bad.kernels_within
    assert bad.rest.max > 2


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rewriting_must_not_make_nan(value: float) -> None:
    plain, spliced, truth = projected(torch.bfloat16)
    rewritten = truth.clone()
    rewritten[3, 5] = value
    separation = separate(spliced, spliced, plain, truth, rewritten, truth)
    assert (separation.rewrite_stray, separation.rewrite_within) == (1, False)
    assert math.isfinite(separation.rewrite.max)
    # The same at the same place is no difference.
    both = separate(spliced, spliced, plain, truth, rewritten, rewritten)
    assert (both.rewrite_stray, both.rewrite_within) == (0, True)


def test_separation_of_nothing() -> None:
    empty = torch.zeros(0, 8, dtype=torch.float64)
    separation = separate(empty, empty, empty, empty, empty, empty)
    assert separation.rewrite_within and separation.kernels_within


def test_bits_of_text() -> None:
    """Two windows: the first token of each is given, not predicted."""
    half = torch.tensor([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.1, 0.1, 0.8]]]).log()
    ids = torch.tensor([[2, 0, 1]])
    assert text_bits([half], [ids]) == (2, pytest.approx(1.0))
    assert text_bits([half, half[:, :2]], [ids, torch.tensor([[1, 2]])]) == (3, pytest.approx((1 + 1 + 2) / 3))
    assert text_bits([half[:, :1]], [ids[:, :1]]) == (0, 0.0)


def test_perplexity() -> None:
    assert perplexity(3.0) == 8.0
    assert perplexity(5000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
