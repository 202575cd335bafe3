"""The dense forms of a block that twellc is compared with: they compute the same, and FP8 nearly so."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from twellc.benchmarking import forms
from twellc.benchmarking.forms import (
    BASELINES,
    EAGER,
    FP8,
    LOSSY,
    PACKED,
    Block,
    Packed,
    compile_rival,
    dense_forms,
    fused_dense,
)


def block(variant: str, activation: str, biases: bool, device: str = "cpu") -> Block:
    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(torch.bfloat16).to(device)

    return Block(
        draw(96, 32),
        draw(96, 32) if variant == "gated" else None,
        draw(48, 96),
        draw(96) if biases else None,
        draw(96) if biases and variant == "gated" else None,
        draw(48) if biases else None,
        activation,
        0.1,
    )


CASES = [
    ("gated", "relu", False),
    ("gated", "relu", True),
    ("gated", "fatrelu", False),
    ("gated", "drelu", True),
    ("plain", "relu", True),
    ("plain", "relu2", False),
]


def relative(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.usefixtures("no_gpu_needed")
@pytest.mark.parametrize("shape", [(1, 32), (16, 32), (3, 7, 32)])
@pytest.mark.parametrize(("variant", "activation", "biases"), CASES)
def test_forms_compute_the_same(variant: str, activation: str, biases: bool, shape: tuple[int, ...]) -> None:
    own, x = block(variant, activation, biases), torch.randn(shape).bfloat16()
    exact = own.double().dense(x.double())
    found = dense_forms(own, x, with_compiled=False)
    assert list(found) == [EAGER, PACKED, FP8]
    for name, form in {**found, "fused": lambda rows: fused_dense(own, rows)}.items():
        y = form(x)
        assert y.shape == (*shape[:-1], 48) and y.dtype == torch.bfloat16
        assert relative(y, exact) < (0.15 if name == FP8 else 0.01), name


@pytest.mark.usefixtures("no_gpu_needed")
def test_fp8_rounds() -> None:
    """It is no other name of the packed form, and its scales fit any range of values."""
    own, x = block("gated", "relu", biases=False), torch.randn(64, 32).bfloat16()
    exact = own.double().dense(x.double())
    assert relative(dense_forms(own, x, False)[FP8](x), exact) > 0.02
    large = replace(own, down=own.down * 1e4)
    assert relative(dense_forms(large, x * 1e3, False)[FP8](x * 1e3), large.double().dense(1e3 * x.double())) < 0.15
    assert not dense_forms(own, 0 * x, False)[FP8](0 * x).any()


def test_four_bits() -> None:
    """A weight is off by half a step of its group at most, and by none where it is a multiple of the scale."""
    weight = torch.randn(16, 256).bfloat16()
    weight[0, :128] = torch.arange(-7, 8).repeat(9)[:128]
    weight[1] = 0
    q, scale = forms.quantise_int4(weight)
    steps = scale.float().repeat_interleave(128, 1)
    found = (q.float() - 8) * steps
    assert q.dtype == torch.uint8 and q.max() <= 15 and scale.shape == (16, 2)
    # A scale in bf16 may be too small for the largest one by 2^-9 of 7 steps.
    assert bool(((found - weight.float()).abs() <= steps * (0.5 + 7 / 2**9) + 1e-30).all())
    assert torch.equal(found[:2, :128], weight[:2, :128].float())


def test_many_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each width of a grid, or of a model's blocks, is compiled for: more of them than torch does for one function."""
    eager = functools.partial(compile_rival, backend="eager")
    monkeypatch.setattr(
        forms, "_compiled", functools.cache(lambda function, *_, dynamic=None: eager(function, dynamic))
    )
    widths = range(2, 4 + torch._dynamo.config.recompile_limit)
    for width in widths:
        own = Block(torch.ones(width, 8).bfloat16(), None, torch.ones(8, width).bfloat16())
        for tokens in (1, 3, 5):
            x = torch.rand(tokens, 8).bfloat16()
            for form in (Packed(own), forms.compiled_dense(own)):
                assert relative(form(x), own.double().dense(x.double())) < 0.01


def test_rivals_are_compiled_alone() -> None:
    """Sizes of one do not count for the others; of its own there may not be too many."""
    limit = torch._dynamo.config.recompile_limit
    for size in range(1, limit + 3):
        x = torch.randn(3, size)
        assert torch.equal(compile_rival(torch.relu, backend="eager")(x), torch.relu(x))
    one = compile_rival(torch.relu, backend="eager")
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for size in range(1, limit + 3):
            one(torch.randn(3, size))


def test_rivals_are_compiled_whole() -> None:
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_rival(broken, backend="eager")(torch.ones(2))


def test_active() -> None:
    own, x = block("gated", "fatrelu", biases=False), torch.randn(5, 32).bfloat16()
    gates = x.double() @ own.gate.double().t()
    assert bool((own.active(x) == (gates > 0.1)).float().mean() > 0.98)


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "activation", "biases"), CASES)
def test_on_the_gpu(variant: str, activation: str, biases: bool) -> None:
    own = block(variant, activation, biases, "cuda")
    for tokens in (1, 5, 16, 40):
        x = torch.randn(tokens, 32, device="cuda").bfloat16()
        exact = own.double().dense(x.double())
        found = dense_forms(own, x)
        assert list(found)[:3] == list(BASELINES)
        assert FP8 in found or torch.cuda.get_device_capability() < (8, 9)
        for name, form in found.items():
            assert relative(form(x), exact) < (0.15 if name == FP8 else 0.01), name


@pytest.mark.gpu
def test_lossy_forms_on_the_gpu() -> None:
    own = Block(*(torch.randn(shape, device="cuda").bfloat16() / 16 for shape in ((384, 256), (384, 256), (256, 384))))
    x = torch.randn(40, 256, device="cuda").bfloat16()
    exact = own.double().dense(x.double())
    found = dense_forms(own, x, with_compiled=False, max_autotune=True)
    errors = {name: relative(found[name](x), exact) for name in LOSSY}
    assert all(0.02 < error < 0.3 for error in errors.values()), errors


@pytest.mark.gpu
def test_fp8_leaves_odd_widths_out() -> None:
    own = block("gated", "relu", biases=False, device="cuda")
    narrow = replace(own, down=own.down[:-1])
    assert FP8 not in dense_forms(narrow, torch.randn(4, 32, device="cuda").bfloat16())
