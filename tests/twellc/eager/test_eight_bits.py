"""Layers with weights in eight bits: what they compute, what survives, and that their blocks run by the ops."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
from tests import models
from tests.models import Gated, Plain, Written
from tests.twellc.eager.test_optimize import ops_of, packed, tokens
from twellc.base.errors import UserError
from twellc.eager.eight_bits import EightBitLinear
from twellc.plugins.meaning import EIGHT_BITS
from twellc.plugins.quantise import quantise

BF16 = torch.bfloat16


def in_eight_bits(module: nn.Module, kind: str = "neuron", names: str = "") -> Any:
    """Put layers in eight bits in the place of linear ones; `kind` is that of their weights [out, in]."""
    for path, each in list(module.named_modules()):
        if type(each) is nn.Linear and each.weight.shape[0] != each.weight.shape[1] and names in path:
            weight, scale = quantise(each.weight, kind)
            module.set_submodule(path, EightBitLinear(weight, scale, each.bias))
    return module.eval()


def wide(module: Any) -> Any:
    """Return a copy in float64 of what the weights are worth."""
    module = copy.deepcopy(module)
    for path, each in list(module.named_modules()):
        if isinstance(each, EightBitLinear):
            linear = nn.Linear(each.in_features, each.out_features, bias=each.bias is not None)
            linear.weight = nn.Parameter(each.weight.double() * each.scale.double())
            linear.register_parameter("bias", each.bias)
            module.set_submodule(path, linear)
    return module.double()


def test_what_a_layer_computes() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(16, 24).to(BF16), torch.randn(3, 16).to(BF16)
    for kind, shape in (("neuron", (24, 1)), ("output", (1, 16)), ("tensor", ())):
        weight, scale = quantise(linear.weight, kind)
        layer = EightBitLinear(weight, scale, linear.bias)
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
    module = in_eight_bits(Gated(biases="gud").to(BF16))
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
    "gated": (Gated, "neuron"),
    "gated with biases": (lambda: Gated(biases="gud", d_out=24), "tensor"),
    "plain": (lambda: Plain(biases="ud"), "neuron"),
    "packed": (lambda: Written(packed, both=nn.Linear(16, 80), down=nn.Linear(40, 16)), "neuron"),
    "packed with one scale": (lambda: Written(packed, both=nn.Linear(16, 80), down=nn.Linear(40, 16)), "tensor"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_run_by_the_op(name: str) -> None:
    make, kind = BLOCKS[name]
    torch.manual_seed(0)
    block, x = in_eight_bits(make().to(BF16), kind), torch.randn(2, 3, 16).to(BF16)
    truth, size = wide(block)(x.double()), sum(each.nbytes for each in block.parameters())
    with torch.no_grad():
        plain = block(x)
    found, counts = ops_of(twellc.optimize(block), x)
    assert sum(counts.values()) == 1
    assert (found - truth).norm() <= (plain - truth).norm()
    assert sum(each.nbytes for each in block.parameters()) == size
    assert torch.equal(twellc.restore(block)(x), plain)


def test_a_block_of_neurons_scales() -> None:
    block = in_eight_bits(in_eight_bits(Gated().to(BF16), "output", "down"))
    assert block.down.scale.shape == (1, 40)
    x = torch.randn(5, 16).to(BF16)
    found, counts = ops_of(twellc.optimize(block), x)
    assert counts == {"gated_mlp": 1}
    assert torch.allclose(found.double(), wide(block)(x.double()), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("name", "op"), [("llama", "gated_mlp"), ("opt", "mlp")])
def test_models(name: str, op: str) -> None:
    model, ids = getattr(models, name)().to(BF16), tokens()
    in_eight_bits(model, names="fc" if name == "opt" else "mlp.")
    with torch.no_grad():
        expected = model(ids).logits
    logits, counts = ops_of(twellc.optimize(model), ids)
    assert counts == {op: 2}
    assert torch.allclose(logits.logits, expected, rtol=0.05, atol=0.05)


def test_what_is_not_taken() -> None:
    with pytest.warns(UserWarning, match="some of its weights are in eight bits, and others not"):
        twellc.optimize(in_eight_bits(Gated(), names="up"))
    with pytest.warns(UserWarning, match="gate has a scale for each input"):
        twellc.optimize(in_eight_bits(Gated(), "output"))
    with pytest.warns(UserWarning, match="its weights are in eight bits, which are not trained"):
        twellc.optimize(in_eight_bits(Gated()), training=True)
    block = in_eight_bits(Gated())
    block.up.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="no submodule is a feed-forward block"):
        twellc.optimize(block)


# ---- quantising ----

WRITTEN_OUT = Written(
    lambda m, x: m.down(torch.relu(nn.functional.linear(x, m.up.weight))), up=nn.Linear(16, 40), down=nn.Linear(40, 16)
)


def bits(module: nn.Module) -> dict[str, tuple[int, str]]:
    found = {layer.module: layer.weights for layer in twellc.optimized_blocks(module)}
    return {path: (each.bits, each.reason) for path, each in found.items() if each is not None}


@pytest.mark.parametrize("name", ["llama", "opt", "packed"])
def test_quantising_a_model(name: str) -> None:
    torch.manual_seed(0)
    make: Callable[[], Any] = BLOCKS[name][0] if name in BLOCKS else getattr(models, name)
    model = make().to(BF16).eval()
    x = torch.randn(2, 3, 16).to(BF16) if name in BLOCKS else tokens()
    before = copy.deepcopy(model)
    layers = [each for each in model.modules() if type(each) is nn.Linear]
    found, counts = ops_of(twellc.optimize(model, weights="fp8"), x)
    assert set(bits(model).values()) == {(8, "quantised")} and sum(counts.values()) == len(bits(model))
    assert layers == [each for each in model.modules() if isinstance(each, nn.Linear | EightBitLinear)]
    down = next(each for each in layers[::-1] if isinstance(each, EightBitLinear))
    assert down.scale.shape == (1, down.in_features) and down.weight.t().is_contiguous()
    with torch.no_grad():
        y, exact = (each if isinstance(each, Tensor) else each.logits for each in (found, before(x)))
    assert 0 < (y - exact).norm() < 0.1 * exact.norm()
    twellc.restore(model)
    assert type(down) is EightBitLinear and down.weight.is_contiguous()


def test_what_is_not_quantised() -> None:
    tied = nn.Sequential(Gated(), Gated()).eval()
    tied[1].up.weight = tied[0].up.weight
    twellc.optimize(tied, weights="fp8")
    assert bits(tied) == {
        "0": (16, "the weight of up is another layer's, too"),
        "1": (16, "the weight of up is another layer's, too"),
    }
    assert (
        twellc.optimized_blocks(tied)[0].reason
        == "matches; weights in 16 bits, the weight of up is another layer's, too"
    )
    other = twellc.optimize(copy.deepcopy(WRITTEN_OUT).eval(), weights="fp8")
    assert bits(other) == {"": (16, "up.weight is not the weight of a torch.nn.Linear that is called")}
    kept = twellc.optimize(in_eight_bits(Gated()), weights="fp8", fp8_error=0.0, samples=[torch.randn(3, 16)])
    assert bits(kept) == {"": (8, "as the model has them")} and kept.down.scale.shape == (16, 1)


def test_a_largest_error() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()).eval(), torch.randn(50, 16)
    inner = model[0](x).detach()
    exact = model[1](inner).detach()
    twellc.optimize(model, weights="fp8", fp8_error=0.5, samples=[x[:20], (x[20:],)])
    first, second = (layer.weights for layer in twellc.optimized_blocks(model))
    assert first is not None and second is not None and first.error is not None and second.error is not None
    assert 0.01 < first.error < 0.1 and first.bits == second.bits == 8
    assert second.error == pytest.approx(float((model[1](inner) - exact).norm() / exact.norm()), rel=1e-3)
    other = nn.Sequential(Gated()).eval()
    twellc.optimize(other, weights="fp8", fp8_error=0.001, samples=[{"input": x}])
    (found,) = bits(other).values()
    assert found[0] == 16 and re.fullmatch(
        r"eight bits change its output by \d\.\d\d%, more than --fp8-error 0.001", found[1]
    )


def broken() -> nn.Module:
    block = Gated()
    block.up.weight.data[0, 0] = float("nan")
    return block


WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no such type": (Gated, {"weights": "int4"}, "--weights: no such choice; got 'int4'; expected keep or fp8"),
    "an error alone": (Gated, {"fp8_error": 0.1}, "--fp8-error 0.1: no weights are quantised"),
    "no samples": (Gated, {"weights": "fp8", "fp8_error": 0.1}, "fp8_error: there is nothing to measure it on"),
    "training": (Gated, {"weights": "fp8", "training": True}, "weights in eight bits are not trained"),
    "running": (lambda: twellc.optimize(Gated().eval()), {"weights": "fp8"}, "Call twellc.restore"),
    "NaN": (broken, {"weights": "fp8"}, "layer the model itself: w_up: cannot be quantised: 1 of 640 weights are NaN"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    make, options, message = WRONG[name]
    with pytest.raises(UserError, match=re.escape(message)):
        twellc.optimize(make(), **options)


def test_the_original_runs_for_gradients() -> None:
    block = twellc.optimize(in_eight_bits(Gated()))
    x: Tensor = torch.randn(2, 16, requires_grad=True)
    block(x).sum().backward()
    assert x.grad is not None and block.gate.weight.dtype == EIGHT_BITS


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8, 300])
@pytest.mark.parametrize("make", [Gated, Plain])
def test_on_a_gpu(make: Any, count: int) -> None:
    torch.manual_seed(0)
    block = make(d_model=128, d_ff=640).to("cuda", BF16).eval()
    twellc.optimize(block, weights="fp8")
    x = torch.randn(count, 128).to("cuda", BF16)
    found, counts = ops_of(block, x)
    assert sum(counts.values()) == 1
    dense = twellc.restore(copy.deepcopy(block))
    truth = wide(dense)(x.double())
    # What dense FP8 may be off: rows of x and of h are rounded to three bits of mantissa.
    assert (found - truth).norm() <= 2**-4 * truth.norm()
    with torch.no_grad():
        assert (dense(x) - truth).norm() <= 2**-6 * truth.norm()
