"""Rotary positions in front of sums, in plans whose shapes are all known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import Rotated
from tests.tensorrt.plans import build, run, yardsticks
from tests.tolerance import assert_as_accurate
from twellc.export.tensorrt_host import Host

pytestmark = pytest.mark.tensorrt


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 40)])
@pytest.mark.parametrize(
    ("form", "then", "part"),
    [
        ("slices", "norm", 1.0),
        ("slices", "norm", 0.5),
        ("other sign", "norm", 1.0),
        ("chunks", "softmax", 1.0),
        ("wide", "norm", 1.0),
        ("wide x", "softmax", 1.0),
    ],
)
def test_rotary(tensorrt: Host, tmp_path: Path, form: str, then: str, part: float, shape: tuple[int, int]) -> None:
    module, x = Rotated(form, then, part).bfloat16(), torch.randn(*shape, 128).bfloat16()
    plan = build(tensorrt, module, tmp_path, torch.bfloat16, [x], None, [])
    ((plain, truth),) = yardsticks(module, x)
    assert_as_accurate(run(plan, {plan.names("INPUT")[0]: x})[0], plain, truth)
