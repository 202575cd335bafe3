"""Layers with FP8 weights: what they compute, what survives, and that their blocks run by the ops."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
from tests.models import Gated, Plain, Written
from tests.twellc.eager.test_optimize import ops_of, packed
from twellc.eager.fp8_linear import Fp8Linear
from twellc.plugins.fp8 import E4M3, Fp8

BF16 = torch.bfloat16


def in_fp8(module: nn.Module, kind: str = "row", names: str = "") -> Any:
    """Put layers in FP8 in the place of linear ones; `kind` is that of their weights [out, in]."""
    for path, each in list(module.named_modules()):
        if type(each) is nn.Linear and each.weight.shape[0] != each.weight.shape[1] and names in path:
            module.set_submodule(path, Fp8Linear(Fp8.quantize(each.weight, kind), each.bias))
    return module.eval()


def wide(module: Any) -> Any:
    """Return a copy in float64, with FP8 weights dequantized."""
    module = copy.deepcopy(module)
    for path, each in list(module.named_modules()):
        if isinstance(each, Fp8Linear):
            linear = nn.Linear(each.in_features, each.out_features, bias=each.bias is not None)
            linear.weight = nn.Parameter(each.weight.double() * each.scale.double())
            linear.register_parameter("bias", each.bias)
            module.set_submodule(path, linear)
    return module.double()


def test_what_a_layer_computes() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(16, 24).to(BF16), torch.randn(3, 16).to(BF16)
    for kind, shape in (("row", (24, 1)), ("column", (1, 16)), ("tensor", ())):
        weight, scale = matrix = Fp8.quantize(linear.weight, kind)
        layer = Fp8Linear(matrix, linear.bias)
        assert layer.scale.shape == shape and (layer.in_features, layer.out_features) == (16, 24)
        expected = nn.functional.linear(x, (weight.float() * scale).to(BF16), linear.bias)
        assert torch.equal(layer(x), expected)


def pickled(module: Any) -> Any:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def loaded(module: Any) -> Any:
    other = copy.deepcopy(module)
    for each in other.parameters():
        each.data = torch.zeros_like(each)
    other.load_state_dict(module.state_dict())
    return other


CHANGES: dict[str, tuple[Callable[[Any], Any], torch.dtype]] = {
    "half": (lambda module: module.half(), torch.float16),
    "float": (lambda module: module.to(torch.float32), torch.float32),
    "type": (lambda module: module.type(torch.float64), torch.float64),
    "deepcopy": (copy.deepcopy, BF16),
    "pickle": (pickled, BF16),
    "state": (loaded, BF16),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimized", [False, True])
def test_bytes_and_scales_survive(change: str, optimized: bool) -> None:
    module = in_fp8(Gated(biases="gud").to(BF16))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    if optimized:
        twellc.optimize(module)
    make, dtype = CHANGES[change]
    after = make(module)
    for name, each in after.state_dict().items():
        kept = name.endswith(("weight", "scale"))
        assert each.dtype == (before[name].dtype if kept else dtype)
        assert torch.equal(each.float(), before[name].float()) or (not kept and dtype == torch.float16)
    if optimized:
        assert ops_of(after, torch.randn(2, 3, 16).to(dtype))[1] == {"gated_mlp": 1}


BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gated": (Gated, "row"),
    "gated with biases": (lambda: Gated(biases="gud", d_out=24), "tensor"),
    "plain": (lambda: Plain(biases="ud"), "row"),
    "packed": (lambda: Written(packed, both=nn.Linear(16, 80), down=nn.Linear(40, 16)), "row"),
    "packed with one scale": (lambda: Written(packed, both=nn.Linear(16, 80), down=nn.Linear(40, 16)), "tensor"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_run_by_the_op(name: str) -> None:
    make, kind = BLOCKS[name]
    torch.manual_seed(0)
    block, x = in_fp8(make().to(BF16), kind), torch.randn(2, 3, 16).to(BF16)
    truth, size = wide(block)(x.double()), sum(each.nbytes for each in block.parameters())
    with torch.no_grad():
        plain = block(x)
    found, counts = ops_of(twellc.optimize(block), x)
    assert sum(counts.values()) == 1
    assert (found - truth).norm() <= (plain - truth).norm()
    assert sum(each.nbytes for each in block.parameters()) == size
    assert torch.equal(twellc.restore(block)(x), plain)


def test_a_block_of_neurons_scales() -> None:
    block = in_fp8(in_fp8(Gated().to(BF16), "column", "down"))
    assert block.down.scale.shape == (1, 40)
    x = torch.randn(5, 16).to(BF16)
    found, counts = ops_of(twellc.optimize(block), x)
    assert counts == {"gated_mlp": 1}
    assert torch.allclose(found.double(), wide(block)(x.double()), rtol=0.02, atol=0.02)


def test_what_is_not_taken() -> None:
    said = "1 layers in E4M3 that no block by the op reads compute in 16 bits, dequantised in each call: up"
    with (
        pytest.warns(UserWarning, match=said),
        pytest.warns(UserWarning, match="some of its weights are in FP8, and others not"),
    ):
        twellc.optimize(in_fp8(Gated(), names="up"))
    with pytest.warns(UserWarning, match="gate has a scale for each input"):
        twellc.optimize(in_fp8(Gated(), "column"))
    with pytest.warns(UserWarning, match="its weights are in FP8, which are not trained"):
        twellc.optimize(in_fp8(Gated()), training=True)
    block = in_fp8(Gated())
    block.up.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="no submodule is a feed-forward block"):
        twellc.optimize(block)


def test_the_original_runs_for_gradients() -> None:
    block = twellc.optimize(in_fp8(Gated()))
    x: Tensor = torch.randn(2, 16, requires_grad=True)
    block(x).sum().backward()
    assert x.grad is not None and block.gate.weight.dtype == E4M3
