"""`twellc.optimize(weights="fp8:blocks")`: which blocks it quantises, by how much that changes them, and refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
from tests import models
from tests.models import Gated, Plain, Written
from tests.twellc.eager.test_fp8_linear import BF16, in_fp8, wide
from tests.twellc.eager.test_optimize import ops_of, packed, tokens
from twellc.base.errors import UserError
from twellc.eager.fp8_linear import Fp8Linear

WRITTEN_OUT = Written(
    lambda m, x: m.down(torch.relu(nn.functional.linear(x, m.up.weight))), up=nn.Linear(16, 40), down=nn.Linear(40, 16)
)


def bits(module: nn.Module) -> dict[str, tuple[int, str]]:
    found = {layer.module: layer.weights for layer in twellc.optimized_blocks(module)}
    return {path: (each.bits, each.reason) for path, each in found.items() if each is not None}


@pytest.mark.parametrize("name", ["llama", "opt", "packed"])
def test_quantising_a_model(name: str) -> None:
    torch.manual_seed(0)
    made = {"packed": lambda: Written(packed, both=nn.Linear(16, 80), down=nn.Linear(40, 16))}
    model = (made.get(name) or getattr(models, name))().to(BF16).eval()
    x = torch.randn(2, 3, 16).to(BF16) if name in made else tokens()
    before = copy.deepcopy(model)
    layers = [each for each in model.modules() if type(each) is nn.Linear]
    found, counts = ops_of(twellc.optimize(model, weights="fp8:blocks"), x)
    assert set(bits(model).values()) == {(8, "quantised")} and sum(counts.values()) == len(bits(model))
    assert layers == [each for each in model.modules() if isinstance(each, nn.Linear | Fp8Linear)]
    down = next(each for each in layers[::-1] if isinstance(each, Fp8Linear))
    assert down.scale.shape == (1, down.in_features) and down.weight.t().is_contiguous()
    with torch.no_grad():
        y, exact = (each if isinstance(each, Tensor) else each.logits for each in (found, before(x)))
    assert 0 < (y - exact).norm() < 0.1 * exact.norm()
    twellc.restore(model)
    assert type(down) is Fp8Linear and down.weight.is_contiguous()


def test_what_is_not_quantised() -> None:
    tied = nn.Sequential(Gated(), Gated()).eval()
    tied[1].up.weight = tied[0].up.weight
    twellc.optimize(tied, weights="fp8:blocks")
    assert bits(tied) == {
        "0": (16, "the weight of up is another layer's, too"),
        "1": (16, "the weight of up is another layer's, too"),
    }
    assert (
        twellc.optimized_blocks(tied)[0].reason
        == "matches; weights in 16 bits, the weight of up is another layer's, too"
    )
    other = twellc.optimize(copy.deepcopy(WRITTEN_OUT).eval(), weights="fp8:blocks")
    assert bits(other) == {"": (16, "up.weight is not the weight of a torch.nn.Linear that is called")}
    (reason,) = set(bits(twellc.optimize(models.t5().to(BF16).eval(), weights="fp8:blocks")).values())
    assert reason == (16, "its forward also looks at the weight of wo")
    kept = twellc.optimize(in_fp8(Gated()), weights="fp8:blocks", fp8_error=0.0, samples=[torch.randn(3, 16)])
    assert bits(kept) == {"": (8, "as the model has them")} and kept.down.scale.shape == (16, 1)


def test_a_largest_error() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()).eval(), torch.randn(50, 16)
    inner = model[0](x).detach()
    exact = model[1](inner).detach()
    twellc.optimize(model, weights="fp8:blocks", fp8_error=0.5, samples=[x[:20], (x[20:],)])
    first, second = (layer.weights for layer in twellc.optimized_blocks(model))
    assert first is not None and second is not None and first.error is not None and second.error is not None
    assert 0.01 < first.error < 0.1 and first.bits == second.bits == 8
    assert second.error == pytest.approx(float((model[1](inner) - exact).norm() / exact.norm()), rel=1e-3)
    other = nn.Sequential(Gated()).eval()
    twellc.optimize(other, weights="fp8:blocks", fp8_error=0.001, samples=[{"input": x}])
    (found,) = bits(other).values()
    assert found[0] == 16 and re.fullmatch(
        r"FP8 changes its output by \d\.\d\d%, more than --fp8-error 0.001", found[1]
    )


@pytest.mark.parametrize("samples", [[torch.full((3, 16), torch.nan)], torch.full((2, 3, 16), torch.nan)])
def test_an_error_that_is_not_finite(samples: Any) -> None:
    model = twellc.optimize(Gated().eval(), weights="fp8:blocks", fp8_error=0.5, samples=samples)
    assert bits(model) == {"": (16, "what FP8 changes could not be measured on the samples")}


def test_a_weight_that_is_not_finite_changes_no_block() -> None:
    model = nn.Sequential(Gated(), broken()).eval()
    with pytest.raises(UserError, match="layer 1: w_up: cannot be quantised"):
        twellc.optimize(model, weights="fp8:blocks")
    assert not any(isinstance(each, Fp8Linear) for each in model.modules())


def test_a_layer_of_two_blocks_is_quantised_once() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()).eval(), torch.randn(5, 16)
    model[1].down = model[0].down
    with torch.no_grad():
        exact = model(x)
    found, counts = ops_of(twellc.optimize(model, weights="fp8:blocks"), x)
    assert counts == {"gated_mlp": 2} and (found - exact).norm() < 0.1 * exact.norm()


def broken() -> nn.Module:
    block = Gated()
    block.up.weight.data[0, 0] = float("nan")
    return block


WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no such type": (
        Gated,
        {"weights": "int4"},
        "--weights: no such choice; got 'int4'; expected keep or fp8 or fp8:blocks",
    ),
    "an error alone": (Gated, {"fp8_error": 0.1}, "--fp8-error 0.1: no weights are quantised"),
    "no samples": (Gated, {"weights": "fp8:blocks", "fp8_error": 0.1}, "fp8_error: there is nothing to measure it on"),
    "training": (Gated, {"weights": "fp8:blocks", "training": True}, "FP8 weights are not trained"),
    "running": (lambda: twellc.optimize(Gated().eval()), {"weights": "fp8:blocks"}, "Call twellc.restore"),
    "meta": (
        lambda: Gated().to("meta"),
        {"weights": "fp8:blocks"},
        "layer the model itself: w_gate: cannot be quantised: it is on the meta device",
    ),
    "NaN": (
        broken,
        {"weights": "fp8:blocks"},
        "layer the model itself: w_up: cannot be quantised: 1 of 640 weights are NaN",
    ),
    "linear layers, too": (Gated, {"weights": "fp8"}, "computes no linear layers outside of blocks; got 'fp8'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name: str) -> None:
    make, options, message = WRONG[name]
    with pytest.raises(UserError, match=re.escape(message)):
        twellc.optimize(make(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8, 300])
@pytest.mark.parametrize("make", [Gated, Plain])
def test_on_a_gpu(make: Any, count: int) -> None:
    torch.manual_seed(0)
    block = make(d_model=128, d_ff=640).to("cuda", BF16).eval()
    twellc.optimize(block, weights="fp8:blocks")
    x = torch.randn(count, 128).to("cuda", BF16)
    found, counts = ops_of(block, x)
    assert sum(counts.values()) == 1
    dense = twellc.restore(copy.deepcopy(block))
    truth = wide(dense)(x.double())
    # What dense FP8 may be off: rows of x and of h are rounded to three bits of mantissa.
    assert (found - truth).norm() <= 2**-4 * truth.norm()
    with torch.no_grad():
        assert (dense(x) - truth).norm() <= 2**-6 * truth.norm()
