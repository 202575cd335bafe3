"""Stored numbers that a ReLU is made of, and what must stay stored."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import Written, calls, eager, export, run
from twellc.passes.decompose import decompose
from twellc.passes.graph.program import constants_of
from twellc.passes.write_numbers import write_numbers

X = torch.randn(2, 3, 4)


def stored(tensor: Tensor, form: Any) -> nn.Module:
    """A function of x and of a buffer."""
    return Written(lambda s, x: form(x, s.stored), {"stored": tensor})


WRITTEN: dict[str, nn.Module] = {
    "a constant": Written(lambda s, x: torch.maximum(x, torch.tensor(0.5))),
    "an integer": Written(lambda s, x: torch.maximum(x, torch.tensor(0))),
    "a parameter": Written(lambda s, x: torch.where(x > s.bound, x, 0), bound=torch.tensor(0.25)),
    "a buffer": stored(torch.tensor(0.5), torch.maximum),
    "a vector of equal numbers": stored(torch.full((4,), 0.5), lambda x, v: x * (x > v)),
    "a vector at the left": stored(torch.full((1, 1, 4), 0.5), lambda x, v: torch.minimum(v, x)),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_written(case: str) -> None:
    program = write_numbers(decompose(export(WRITTEN[case], X)))
    assert list(constants_of(program)) == []
    assert calls(program)["full"] == 1
    assert torch.equal(run(program)[0], eager(WRITTEN[case], X)[0])
    assert write_numbers(program) is program


LEFT: dict[str, nn.Module] = {
    "a vector of several numbers": stored(torch.arange(4.0), lambda x, v: x * (x > v)),
    "a vector that gives the result its shape": stored(torch.zeros(5, 1, 1, 4), torch.maximum),
    "a vector of another dtype": stored(torch.full((4,), 0.1, dtype=torch.float64), torch.maximum),
    "a parameter that is a factor": Written(lambda s, x: x * s.scale, scale=torch.tensor(0.5)),
    "not a number": stored(torch.full((4,), float("nan")), lambda x, v: x > v),
    "a mask": stored(torch.tensor(True), lambda x, v: torch.where(v, x, -x)),
}


@pytest.mark.parametrize("case", LEFT)
def test_left(case: str) -> None:
    program = decompose(export(LEFT[case], X))
    assert write_numbers(program) is program
