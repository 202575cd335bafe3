"""The tolerances must notice what a broken rewrite does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.tolerance import assert_as_accurate, assert_same


def first(value: float) -> Callable[[Tensor], Tensor]:
    """Return the damage of one element."""
    return lambda y: torch.cat([y.new_tensor([value]), y.flatten()[1:]]).view_as(y)


DAMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeroed": torch.zeros_like,
    "halved": lambda y: y / 2,
    "without a row": lambda y: torch.cat([torch.zeros_like(y[:1]), y[1:]]),
    "without an element": lambda y: y.where(y.abs() < y.abs().max(), 0),
    "NaN": first(torch.nan),
    "infinity": first(torch.inf),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_notices(damage: str, dtype: torch.dtype) -> None:
    y = torch.randn(12, 16, dtype=dtype)
    assert_same(y.clone(), y)
    assert_same(y * (1 + torch.finfo(dtype).eps), y)
    for other in (DAMAGES[damage](y), y * 1.001, y[:1], y.bfloat16()):
        with pytest.raises(AssertionError):
            assert_same(other, y)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_accuracy_notices(damage: str, dtype: torch.dtype) -> None:
    truth = torch.randn(12, 16, dtype=torch.float64)
    plain = truth.to(dtype)
    assert_as_accurate(plain.clone(), plain, truth)
    with pytest.raises(AssertionError):
        assert_as_accurate(DAMAGES[damage](plain), plain, truth)
