"""A threshold for each neuron, as of JumpReLU autoencoders, on its way through the passes, and in optimize."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import twellc
from tests import models
from tests.models import block_profile, calls, canonical, eager, export, run
from tests.passes.test_tensor_parallel import assert_right, split
from tests.tolerance import assert_as_accurate, assert_same
from twellc.eager.module_blocks import find_blocks
from twellc.firing.measure import ProgramObserver
from twellc.passes.block_profile import Calibration
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.passes.precision import in_precision
from twellc.passes.report import Choice

D_MODEL, D_SAE = 16, 64
CANNOT, MAY = (0, *range(8, 24)), (40, 41)  # neurons without weights whose bias is at their threshold, or above


class Sae(nn.Module):
    """An autoencoder as sae-lens computes it, of x or of x less a bias."""

    def __init__(self, centred: bool = True) -> None:
        super().__init__()
        self.centred = centred
        made = torch.Generator().manual_seed(1)
        self.W_enc = nn.Parameter(torch.randn(D_MODEL, D_SAE, generator=made) / D_MODEL**0.5)
        self.b_enc = nn.Parameter(torch.randn(D_SAE, generator=made) * 0.1)
        self.W_dec = nn.Parameter(torch.randn(D_SAE, D_MODEL, generator=made))
        self.b_dec = nn.Parameter(torch.randn(D_MODEL, generator=made))
        self.threshold = nn.Parameter(torch.rand(D_SAE, generator=made) + 0.25)
        with torch.no_grad():
            self.W_enc[:, [*CANNOT, *MAY]] = 0
            self.b_enc[[*CANNOT]] = self.threshold[[*CANNOT]] = 0.5
            self.b_enc[[*MAY]] = self.threshold[[*MAY]] + 0.5
            self.threshold[60:] = -1

    def forward(self, x: Tensor) -> Tensor:
        z = (x - self.b_dec if self.centred else x) @ self.W_enc + self.b_enc
        return torch.relu(z) * (z > self.threshold).to(z.dtype) @ self.W_dec + self.b_dec


def sample(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, 3, D_MODEL, generator=torch.Generator().manual_seed(0)).to(dtype)


def compare(actual: Tensor, module: nn.Module, x: Tensor) -> None:
    """Fail unless something is as accurate as the module in its own precision."""
    (truth,) = eager(copy.deepcopy(module).double(), x.double())
    assert_as_accurate(actual, eager(module, x)[0], truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_lowered(dtype: torch.dtype) -> None:
    """Neurons that cannot fire go, those that are hot come first, and each has its threshold."""
    module = Sae()
    firing = np.arange(D_SAE) * 37 % 97 + 1
    known = Calibration({"W_dec": block_profile("W_dec", firing, {1: 97}, "plain")})
    options = PassOptions(dtype, "all", calibration=known, advise=lambda *_: Choice("twell", "matches", 8, 8, None))
    found = run_passes(export(module, sample(torch.float32)), options)
    (layer,) = found.layers
    assert layer.neurons is not None and layer.activation == "fatrelu"
    assert (layer.neurons.unable, layer.neurons.kept, layer.hot) == (len(CANNOT) - 1, D_SAE - len(CANNOT) + 1, 8)
    assert calls(found.program)["mlp"] == 1
    compare(run(found.program, sample(torch.float32))[0].to(dtype), module.to(dtype), sample(dtype))


class Edge(nn.Module):
    """Thresholds just below z of x = 1.0078125, which is above all of them; in bfloat16 they would be z."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor], thresholds: Tensor) -> None:
        super().__init__()
        self.up, self.down, self.form = nn.Linear(D_MODEL, D_SAE), nn.Linear(D_SAE, D_MODEL), form
        self.bounds = nn.Parameter(thresholds)
        with torch.no_grad():
            self.up.weight.fill_(1 / D_MODEL)
            self.up.bias.zero_()
            self.down.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.form(self.up(x), self.bounds))
        return down


BOUNDS = torch.linspace(1.005, 1.0051, D_SAE)
EDGES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "relu times mask": (lambda z, t: z.relu() * (z > t), BOUNDS),
    "mask cast": (lambda z, t: z.relu() * (z > t).to(z.dtype), BOUNDS),
    "mask of z widened": (lambda z, t: z.relu() * (z.float() > t), BOUNDS),
    "where": (lambda z, t: torch.where(z > t, z, 0.0), BOUNDS),
    "one number, stored": (lambda z, t: z.masked_fill(z <= t, 0.0), torch.full((D_SAE,), 1.005)),
    "float64": (lambda z, t: z.relu() * (t < z), BOUNDS.double()),
    "computed": (lambda z, t: z.relu() * (z > t.exp()), BOUNDS.log()),  # which leaves the block dense
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("edge", EDGES)
def test_thresholds_are_not_rounded(edge: str, dtype: torch.dtype) -> None:
    """Whether the model is lowered or its matrices are in bfloat16 already, as a block or dense."""
    module, x = Edge(*EDGES[edge]), torch.full((2, 3, D_MODEL), 1.0078125, dtype=dtype)
    module.up.to(dtype), module.down.to(dtype)
    program = export(module, x)
    for layers in ("all", "none"):
        found = run_passes(program, PassOptions(torch.bfloat16, layers))
        assert calls(found.program)["mlp"] == (layers == "all" and edge != "computed")
        assert (run(found.program, x)[0] > 60).all()


FILLED: dict[str, Callable[[Tensor], Tensor]] = {
    "like z": lambda z: torch.full_like(z, 0.1),
    "a vector": lambda z: torch.full((1,), 0.1),
}


@pytest.mark.parametrize("filled", FILLED)
def test_numbers_that_fill_tensors(filled: str) -> None:
    """Torch compares bfloat16 in float32 with a vector of that, and rounds 0.1 where it fills one in bfloat16."""
    block, x = models.Plain(lambda z: torch.where(z > FILLED[filled](z), z, 0)), torch.randn(2, 3, D_MODEL)
    (lowered,) = find_ffn_blocks(in_precision(canonical(block, x), torch.bfloat16))
    assert (lowered.refusal, lowered.threshold) == ("", float(np.float32(0.1)))
    (narrow,) = find_ffn_blocks(canonical(block.bfloat16(), x.bfloat16()))
    assert (narrow.refusal, narrow.threshold) == ("", 0.10009765625 if filled == "like z" else float(np.float32(0.1)))


@pytest.mark.parametrize("edge", ["relu times mask", "mask cast", "mask of z widened", "float64"])
def test_optimize_does_not_round(edge: str) -> None:
    """Neither where matrices alone are in bfloat16, nor where the model is cast afterwards."""
    x = torch.full((3, D_MODEL), 1.0078125, dtype=torch.bfloat16)
    mixed, cast = (Edge(*EDGES[edge]).requires_grad_(False).eval() for _ in range(2))
    mixed.up.bfloat16(), mixed.down.bfloat16()
    twellc.optimize(mixed, layers="all")
    twellc.optimize(cast, layers="all").bfloat16()
    for module in (mixed, cast, copy.deepcopy(cast)):
        assert len(twellc.optimized_blocks(module)) == 1 and torch.equal(module.bounds, EDGES[edge][1])
        assert (module(x) > 60).all()
        assert (twellc.restore(module)(x) > 60).all()


def test_ranks() -> None:
    module = Sae().bfloat16()
    _, found = split(module, sample(), ranks=2)
    assert [calls(each.program)["mlp"] for each in found] == [1, 1]
    assert_right(module, found, sample())


def test_firing_is_counted_by_each_threshold() -> None:
    module, x = Sae(), torch.randn(50, D_MODEL)
    program = canonical(module, x)
    observer = ProgramObserver(program, find_ffn_blocks(program), torch.device("cpu"))
    observer.run({next(iter(models.example_inputs(program))): x}, {}, "the sample")
    (profile,) = observer.profiles()
    z = (x - module.b_dec) @ module.W_enc + module.b_enc
    expected = ((z > module.threshold) & (z > 0)).sum(0)
    assert profile.firing.tolist() == expected.tolist()


def test_optimize() -> None:
    """Thresholds are read at each call."""
    module, x = Sae(centred=False).requires_grad_(False).eval(), sample(torch.float32)
    expected = module(x)
    twellc.optimize(module, layers="all")
    assert [layer.activation for layer in twellc.optimized_blocks(module)] == ["fatrelu"]
    assert_same(module(x), expected)
    module.threshold.fill_(100.0)
    assert_same(module(x), module.b_dec.expand_as(x).contiguous())


def test_blocks_that_optimize_leaves() -> None:
    """What autograd records; and without a ReLU, since thresholds may come to be below 0."""
    (block,) = find_blocks(Sae(centred=False), training=True)
    assert block.block.refusal == "a threshold for each neuron has no gradients"
    form = models.Plain(models.Written(lambda s, z: z * (z > s.stored), {"stored": torch.linspace(0.1, 0.5, 40)}))
    (block,) = find_blocks(form)
    assert block.block.refusal == "a threshold may come to be below 0: write relu(x) * (x > threshold)"
