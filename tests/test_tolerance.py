"""The tolerances must notice what a broken rewrite does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tolerance import assert_as_accurate, assert_same


def zeroed(y: Tensor) -> Tensor:
    return torch.zeros_like(y)


def halved(y: Tensor) -> Tensor:
    return y / 2


def without_a_row(y: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(y[:1]), y[1:]])


def without_an_element(y: Tensor) -> Tensor:
    damaged = y.clone()
    damaged.view(-1)[y.abs().argmax()] = 0
    return damaged


def with_a_nan(y: Tensor) -> Tensor:
    damaged = y.clone()
    damaged[0, 0] = torch.nan
    return damaged


def with_an_infinity(y: Tensor) -> Tensor:
    damaged = y.clone()
    damaged[0, 0] = torch.inf
    return damaged


DAMAGES = [zeroed, halved, without_a_row, without_an_element, with_a_nan, with_an_infinity]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_notices(damage: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    y = torch.randn(12, 16, dtype=dtype)
    assert_same(y.clone(), y)
    assert_same(y * (1 + torch.finfo(dtype).eps), y)
    with pytest.raises(AssertionError):
        assert_same(damage(y), y)
    with pytest.raises(AssertionError):
        assert_same(y * 1.001, y)


def test_same_notices_dtype_and_shape() -> None:
    y = torch.randn(12, 16)
    for other in (y.double(), y[:1], y.bfloat16()):
        with pytest.raises(AssertionError):
            assert_same(other, y)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accuracy_notices(damage: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    truth = torch.randn(12, 16, dtype=torch.float64)
    plain = truth.to(dtype)
    assert_as_accurate(plain.clone(), plain, truth)
    with pytest.raises(AssertionError):
        assert_as_accurate(damage(plain), plain, truth)
