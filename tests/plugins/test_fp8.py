"""Weights are quantised to E4M3: scales, what becomes of zeros and of tiny and large weights, what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from twellc.base.errors import UserError
from twellc.plugins.fp8 import E4M3, LARGEST, Fp8, stacked_scales

STEP = 2.0**-4  # half of the distance of neighbours of E4M3 with three bits of mantissa, relative to them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "shape"), [("row", (24, 1)), ("column", (1, 40)), ("tensor", ())])
def test_weights_are_close_and_none_is_beyond(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = (torch.randn(24, 40) * torch.logspace(-3, 3, 24)[:, None]).to(dtype)
    q, scale = Fp8.quantize(weight, kind)
    assert (q.dtype, scale.dtype, q.shape, tuple(scale.shape)) == (E4M3, torch.float32, weight.shape, shape)
    dequantized, wide = q.double() * scale.double(), weight.double()
    least = scale.double() * 2.0**-10  # half of E4M3's least number
    assert ((dequantized - wide).abs() <= (wide.abs() * STEP).maximum(least) * (1 + 1e-6)).all()
    assert q.float().abs().amax() == LARGEST


def test_zeros_have_the_scale_one_and_tiny_rows_are_finite() -> None:
    weight = torch.tensor([[0.0, -0.0], [1e-44, 0.0], [3e38, -3e38], [1e-30, 1e-36]])
    q, scale = Fp8.quantize(weight, "row")
    assert scale[0] == 1 and (q[0].float() == 0).all()
    assert scale.isfinite().all() and (scale >= torch.finfo(torch.float32).tiny).all()
    assert q.float().isfinite().all()
    assert q[2].float().tolist() == [LARGEST, -LARGEST]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(4, 8)
    weight[1, 2] = value
    with pytest.raises(UserError, match=r"layer 3: w_up: cannot be quantised: 1 of 32 weights are NaN, or infinite"):
        Fp8.quantize(weight, "row", "layer 3: w_up")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["tensor", "row", "column", "block"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 300), (300, 1), (130, 300), (256, 128)])
def test_dequantize(rows: int, columns: int, form: str, dtype: torch.dtype) -> None:
    """Element by element, in float64 exactly; the transpose likewise."""
    sizes = {"tensor": (rows, columns), "row": (1, columns), "column": (rows, 1), "block": (128, 128)}
    height, width = sizes[form]
    shape = () if form == "tensor" else (math.ceil(rows / height), math.ceil(columns / width))
    matrix = Fp8(torch.randn(rows, columns).to(E4M3), torch.rand(shape) + 0.5)
    scale = matrix.scale.reshape(math.ceil(rows / height), -1).double()
    exact = torch.stack([scale[i // height, torch.arange(columns) // width] for i in range(rows)])
    exact = exact * matrix.values.double()
    expected = exact if dtype == torch.float64 else exact.float().to(dtype)
    assert torch.equal(matrix.dequantize(dtype), expected)
    assert torch.equal(matrix.t().dequantize(dtype), expected.t())
    assert Fp8(matrix.values, torch.rand(rows + 1, 1)).form is None


def test_scales_of_stacked_matrices() -> None:
    """They are the scales of the rows of the whole, or None."""

    def drawn(rows: int, form: str) -> Fp8:
        shape = {"tensor": (), "row": (rows, 1), "block": (math.ceil(rows / 128), 3)}[form]
        return Fp8(torch.randn(rows, 300).to(E4M3), torch.rand(shape) + 0.5)

    for good in (("tensor", 40, "row", 8), ("block", 256, "tensor", 128, "block", 72), ("block", 8), ("tensor", 8)):
        matrices = [drawn(rows, form) for form, rows in zip(good[::2], good[1::2], strict=True)]
        scale = stacked_scales(matrices)
        assert scale is not None and scale.is_contiguous()
        whole = Fp8(torch.cat([each.values.view(torch.uint8) for each in matrices]).view(E4M3), scale)
        assert whole.form == ("block" if "block" in good else "row")
        parts = [each.dequantize(torch.float64) for each in matrices]
        assert torch.equal(whole.dequantize(torch.float64), torch.cat(parts))
    for forms in (("block", 128, "row", 128), ("row", 128, "block", 128), ("block", 72, "block", 128)):
        assert stacked_scales([drawn(rows, form) for form, rows in zip(forms[::2], forms[1::2], strict=True)]) is None


KINDS_AND_ORDERS = pytest.mark.parametrize(("kind", "transposed"), [("row", False), ("column", True), ("tensor", True)])


@KINDS_AND_ORDERS
def test_memory_beside_the_matrix(kind: str, transposed: bool) -> None:
    """The result takes half of it, and no part in float32 is large."""
    weight = torch.randn(1500, 700).bfloat16()
    weight = weight.t() if transposed else weight
    Fp8.quantize(weight, kind)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        q, scale = Fp8.quantize(weight, kind)
    assert profiled.profiler is not None
    events: list[Any] = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    assert sum(sizes) >= q.nbytes + scale.nbytes
    assert max(itertools.accumulate(sizes)) <= 1.3 * weight.nbytes


@pytest.mark.gpu
@KINDS_AND_ORDERS
def test_memory_on_a_gpu(kind: str, transposed: bool) -> None:
    weight = torch.empty(1 << 15, 1 << 12, dtype=torch.bfloat16, device="cuda").normal_()
    weight = weight.t() if transposed else weight
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    q, scale = Fp8.quantize(weight, kind)
    assert torch.cuda.max_memory_allocated() - before <= 1.3 * weight.nbytes
    rows = torch.randint(len(weight), (64,), device="cuda")
    some = scale[rows] if kind == "row" else scale
    assert torch.equal((weight[rows].float() / some).to(E4M3).view(torch.uint8), q.view(torch.uint8)[rows])
