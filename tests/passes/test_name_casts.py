"""Casts in every spelling are one operator."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.models import D_FF, D_MODEL, Function, Plain, Written, assert_rewrites, calls, eager, export, run
from twellc.passes.decompose import decompose
from twellc.passes.name_casts import name_casts

CASTS: dict[str, Function] = {
    "type_as": lambda t: torch.sin(t).type_as(torch.ones(1, dtype=torch.float64)),
    "prims": lambda t: torch.ops.prims.convert_element_type(torch.sin(t), torch.float64),
    "to": lambda t: torch.sin(t).to(torch.float64),
    "double": lambda t: torch.sin(t).double(),
}


@pytest.mark.parametrize("spelling", CASTS)
def test_spelling(spelling: str) -> None:
    module, x = Written(lambda s, x: CASTS[spelling](x) * 2), torch.randn(2, 3)
    program = name_casts(decompose(export(module, x)))
    assert calls(program) == {"sin": 1, "_to_copy": 1, "mul": 1}
    assert torch.equal(run(program)[0], eager(module, x)[0])
    assert name_casts(program) is program


def test_a_cast_that_changes_nothing_goes() -> None:
    module, x = Written(lambda s, x: torch.sin(x).type_as(x)), torch.randn(2, 3)
    program = name_casts(decompose(export(module, x)))
    assert calls(program) == {"sin": 1}
    assert torch.equal(run(program)[0], eager(module, x)[0])


def cast_weights(s: Any, x: Tensor) -> Tensor:
    """As CastedLinear does, which many copy."""
    return F.linear(F.relu(F.linear(x, s.up.type_as(x))).square(), s.down.type_as(x))


def cast_mask(s: Any, x: Tensor) -> Tensor:
    hidden = F.linear(x, s.up)
    return F.linear(hidden * (hidden > 0).type_as(hidden), s.down)


def cast_activation(s: Any, x: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, s.up).double()).type_as(x), s.down)


@pytest.mark.parametrize("form", [cast_weights, cast_mask, cast_activation])
def test_no_cast_hides_a_block(form: Any) -> None:
    module = Written(form, up=torch.randn(D_FF, D_MODEL) / 4, down=torch.randn(D_MODEL, D_FF) / 6)
    _, (block,), result = assert_rewrites(module, torch.randn(5, 16))
    assert block.module == "down" and calls(result) == {"mlp": 1}


def test_programs_without_such_casts_are_left() -> None:
    program = decompose(export(nn.Sequential(Plain(), Plain())))
    assert name_casts(program) is program
