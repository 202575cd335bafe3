"""The only home of the tests' tolerances; test_tolerance.py checks that they are not loose.

`assert_same` is for float32 and float64, where a rewrite may only change the order of sums. For bfloat16 and float16
the tolerance comes from the data: `assert_as_accurate` allows twice the error of the plain low-precision result.
"""

import torch
from torch import Tensor

from twellc.checks.accuracy import measure

# Relative to the largest value.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-13}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Fail unless two tensors are equal but for the rounding of sums; NaN and infinity must be at the same places."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    finite = expected.isfinite()
    assert torch.equal(finite, actual.isfinite())
    assert torch.equal(actual.isnan(), expected.isnan())
    if not expected.dtype.is_floating_point:
        assert torch.equal(actual, expected)
        return
    if finite.any():
        largest = float(expected[finite].abs().max())
        error = float((actual - expected)[finite].abs().max())
        bound = _ROUNDING[expected.dtype] * largest
        assert error <= bound, f"error {error:.3g} is above {bound:.3g} (largest value {largest:.3g})"


def assert_as_accurate(candidate: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Fail unless `candidate` is about as close to `truth`, in float64, as the plain low-precision result is."""
    assert candidate.dtype == plain.dtype
    assert candidate.shape == plain.shape == truth.shape
    assert truth.dtype == torch.float64
    width = truth.shape[-1]
    result = measure("y", *(t.reshape(-1, width) for t in (candidate, plain, truth)), language_model=False)
    assert result.within, result
