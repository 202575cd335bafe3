"""`twellc.optimize` on mixtures of experts of transformers."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
from tests import models
from tests.twellc.eager.test_optimize import Ops, ops_of, tokens
from twellc.eager import changes, experts

LATENT = {"layers_block_type": ["attention", "moe"], "num_hidden_layers": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "mamba": models.nemotron_h,
    "latent": lambda: models.nemotron_h(**LATENT, moe_latent_size=16),
    "gated": models.mixtral,
}
ON_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GREEDY = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def by_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the op run on a CPU, too."""
    monkeypatch.setattr(experts, "DEVICES", frozenset({"cpu", "cuda"}))


def rows(model: nn.Module) -> list[str]:
    return [layer.module.rpartition(".")[2] for layer in twellc.optimized_blocks(model)]


def state(model: nn.Module) -> dict[str, Any]:
    held: dict[str, Any] = {name: (each.clone(), each.stride()) for name, each in model.state_dict().items()}
    configs = {f"{path} config": id(vars(each).get("config")) for path, each in model.named_modules()}
    return held | configs | {f"{path} names": sorted(vars(each)) for path, each in model.named_modules()}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a[0], b[0]) and a[1] == b[1] if isinstance(a, tuple) else a == b

    return first.keys() == second.keys() and all(equal(value, second[name]) for name, value in first.items())


@pytest.mark.usefixtures("by_the_op")
@pytest.mark.parametrize("device", ON_DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_generates_the_same_tokens(name: str, device: str) -> None:
    model, ids = MODELS[name]().to(device), tokens().to(device)
    if device == "cuda":
        model.bfloat16()
    before = state(model)
    wide = copy.deepcopy(model).double()
    expected = model.generate(ids, **GREEDY)
    twellc.optimize(model)
    assert "experts" in rows(model)
    with Ops() as ops:
        found = model.generate(ids, **GREEDY)
    assert ops.counts["experts"] >= 6
    for old, new in zip(expected.tolist(), found.tolist(), strict=True):
        if old != new:
            place = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
            with torch.no_grad():
                logits = wide(torch.tensor([old[:place]], device=device), use_cache=False).logits[0, -1]
            assert device == "cuda" and (logits[old[place]] - logits[new[place]]).abs() < 0.02 * logits.abs().max()
    twellc.restore(model)
    assert same(state(model), before)


@pytest.mark.usefixtures("by_the_op")
@pytest.mark.parametrize("device", ON_DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_no_worse_than_before(name: str, device: str) -> None:
    """One layer of experts beside float64; an id that is not one of an expert takes no part."""
    model = MODELS[name]().bfloat16().to(device)
    (layer,) = [each for each in model.modules() if hasattr(each, "is_concatenated")][:1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, experts.up_of(layer).shape[2], generator=generator).bfloat16().to(device)
    ids = torch.stack([torch.randperm(layer.num_experts, generator=generator)[:2] for _ in range(9)]).to(device)
    weights = torch.rand(9, 2, generator=generator).to(device)
    wide = copy.deepcopy(layer).double()
    wide.config = copy.copy(wide.config)
    wide.config._experts_implementation = "eager"
    with torch.no_grad():
        expected, plain = wide(x.double(), ids, weights.double()), layer(x, ids, weights)
    twellc.optimize(model)
    found, counts = ops_of(layer, x, ids, weights)
    assert counts == {"experts": 1} and found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 1.1 * (plain - expected).norm()


def test_cpu_computes_as_before() -> None:
    """What transformers has for a CPU is faster than the op's meaning."""
    model = models.mixtral()
    before = state(model)
    with pytest.warns(UserWarning, match="they are on cpu, not on a GPU"):
        twellc.optimize(model)
    assert same(state(model), before)


@pytest.mark.usefixtures("by_the_op")
def test_other_devices_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is moved from a GPU to a CPU."""
    model, x = models.mixtral(), tokens()
    expected, _ = ops_of(model, x, use_cache=False)
    twellc.optimize(model)
    monkeypatch.setattr(experts, "DEVICES", frozenset({"cuda"}))
    found, counts = ops_of(model, x, use_cache=False)
    assert not counts and (found.logits - expected.logits).abs().max() < 1e-5


@pytest.mark.usefixtures("by_the_op")
def test_saves_copies_and_compiles(tmp_path: Path) -> None:
    model, x = models.mixtral(), tokens()
    expected, _ = ops_of(model, x, use_cache=False)
    model.save_pretrained(tmp_path / "before")
    twellc.optimize(model)
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in model.parameters())
    model.save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes(), path.name
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double().float()]
    others.append(torch.compile(model, backend="aot_eager"))
    for other in others:
        found, counts = ops_of(other, x, use_cache=False)
        assert counts == {"experts": 2}
        assert (found.logits - expected.logits).abs().max() < 1e-5
    state_dict = {name: each.clone().contiguous() for name, each in model.state_dict().items()}
    model.load_state_dict(state_dict, assign=True)  # the strides are lost
    assert ops_of(model, x, use_cache=False)[1] == {}


@pytest.mark.usefixtures("by_the_op")
def test_trains_as_before() -> None:
    """Autograd records: transformers computes."""
    plain, x = models.mixtral(), tokens()
    model = twellc.optimize(copy.deepcopy(plain))
    for each in (plain, model):
        with Ops() as ops:
            each(x, labels=x, use_cache=False).loss.backward()
        assert not ops.counts
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        assert (expected.grad - found.grad).abs().max() < 1e-5
    with pytest.warns(UserWarning, match="experts run by the op for inference alone"):
        twellc.optimize(model, training=True)
    assert not rows(model)


def _biased(layer: Any) -> None:
    layer.has_bias = True


def _normed(layer: Any) -> None:
    layer.has_post_expert_norm = True


def _spread(layer: Any) -> None:
    layer._is_expert_parallel = True


def _hooked(layer: Any) -> None:
    layer.act_fn.register_forward_hook(lambda *_: None)


def _in_fp8(layer: Any) -> None:
    layer.down_proj.data = layer.down_proj.data.to(torch.float8_e4m3fn)


class _Subclass(nn.Parameter):
    pass


def _quantised(layer: Any) -> None:
    layer.down_proj = _Subclass(layer.down_proj.data)


def _silu(layer: Any) -> None:
    layer.act_fn = nn.SiLU()


@pytest.mark.usefixtures("by_the_op")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_biased, "experts with biases"),
        (_normed, "a norm follows each expert"),
        (_spread, "they are spread over ranks"),
        (_hooked, "something looks into their forward"),
        (_in_fp8, "experts: "),
        (_quantised, "their weights are quantised"),
        (_silu, "activation is silu"),
    ],
)
def test_others_are_left(change: Callable[[Any], None], reason: str) -> None:
    model = models.mixtral(num_hidden_layers=1)
    layer = model.model.layers[0].mlp.experts
    change(layer)
    before = layer.down_proj.stride()
    with pytest.warns(UserWarning, match=f"experts: .*{reason}" if reason != "experts: " else reason):
        twellc.optimize(model)
    assert not rows(model) and layer.down_proj.stride() == before and layer.config is model.config


@pytest.mark.usefixtures("by_the_op")
def test_sizes_of_no_kernel_are_left() -> None:
    for size, reason in ((100, "a width is 100; the kernels need multiples of 8"), (32776, "at most 32768")):
        with pytest.warns(UserWarning, match=reason):
            twellc.optimize(models.mixtral(num_hidden_layers=1, intermediate_size=size))


@pytest.mark.usefixtures("by_the_op")
def test_layers_choose_and_failures_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.mixtral()
    before = state(model)
    twellc.optimize(model, layers=r"layers\.1")
    assert [layer.module for layer in twellc.optimized_blocks(model)] == ["model.layers.1.mlp.experts"]
    twellc.optimize(model)
    assert rows(model) == ["experts", "experts"]
    store, calls = changes.store, []

    def fail(*arguments: Tensor, **named: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError
        store(*arguments, **named)

    taken = state(model)
    monkeypatch.setattr(experts, "store", fail)
    with pytest.raises(MemoryError):
        twellc.restore(model)
    taken_after = state(model)
    assert same(taken, taken_after) and rows(model) == ["experts", "experts"]
    monkeypatch.setattr(experts, "store", store)
    assert same(state(twellc.restore(model)), before)
