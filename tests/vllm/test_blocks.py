"""Which blocks of a model are found, and what is put in their place; without an engine."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.models import D_FF, D_MODEL, Gated, Plain, Residual, Written, gpt2, opt, scale_weights
from twellc.plugins.block import BlockOptions
from twellc.plugins.fp8 import E4M3, Fp8

pytestmark = pytest.mark.vllm


@pytest.fixture
def blocks() -> Any:
    from twellc.vllm import blocks

    return blocks


class Share(nn.Linear):
    """Stands for vLLM's parallel layers."""

    quant_method: Any
    prefix = "a layer"

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x, self.bias)


class ScaledShare(Share):
    """Stands for those that vLLM quantises to E4M3: with a scale for each output, or one in a vector."""

    scales = ""
    SHAPES: ClassVar = {"by output": (-1, 1), "by output, a vector": (-1,), "by tensor": (1,)}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        weight, scale = Fp8.quantize(state["weight"], "tensor" if self.scales == "by tensor" else "row")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale = nn.Parameter(scale.reshape(self.SHAPES[self.scales]), requires_grad=False)
        return super().load_state_dict({**state, **self.state_dict(), "bias": state["bias"]})


def replace(blocks: Any, model: nn.Module, kind: type[Share] = Share, quantised: bool = False) -> list[Any]:
    """Replace all blocks of a model that are not refused; return all that were found."""
    found = list(blocks.find(model))
    for each in found:
        if each.block.refusal:
            continue
        layers = {}
        for operand in each.weights.named().values():
            linear = each.module.get_submodule(operand.layer)
            layers[operand.layer] = kind(linear.in_features, linear.out_features, linear.bias is not None)
            layers[operand.layer].load_state_dict(linear.state_dict())
        blocks.compute_by_op(each, layers, BlockOptions(activation=each.block.activation), quantised)
        blocks.put(model, each, layers)
        for layer in layers.values():
            layer.quant_method.process_weights_after_loading(layer)
    return found


def written_out(function: Callable[[Any, Tensor], Tensor], **members: nn.Module) -> nn.Module:
    """Return a layer that computes a block besides other things."""
    linears = {"fc1": nn.Linear(D_MODEL, D_FF), "fc2": nn.Linear(D_FF, D_MODEL), "act": nn.ReLU()}
    layer = Written(function, **{**linears, "norm": nn.LayerNorm(D_MODEL), **members})
    scale_weights(layer)
    return layer


def plain(layer: Any, x: Tensor) -> Tensor:
    rows = layer.norm(x).reshape(-1, D_MODEL)
    y: Tensor = x + nn.functional.dropout(layer.fc2(layer.act(layer.fc1(rows))), training=layer.training).view(x.shape)
    return y


class Model(nn.Module):
    """Layers in a row."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def same(blocks: Any, model: nn.Module, x: Tensor) -> list[Any]:
    """Replace a model's blocks and see that it computes the same."""
    model.eval().requires_grad_(False)
    expected = model(x)
    found = replace(blocks, model)
    assert torch.allclose(model(x), expected, atol=1e-5)
    return found


@pytest.mark.parametrize("biases", ["", "gud"])
@pytest.mark.parametrize("kind", [Gated, Plain])
def test_modules(blocks: Any, kind: type[nn.Module], biases: str) -> None:
    model = Model(Residual(kind(biases=biases)), Residual(kind(biases=biases)))
    names = set(model.state_dict())
    found = same(blocks, model, torch.randn(1, 5, D_MODEL))
    assert [each.path for each in found] == ["layers.0.ffn", "layers.1.ffn"]
    assert all(type(layer.ffn).__name__ == "TwellBlock" for layer in model.layers)
    assert set(model.state_dict()) == names
    down = model.layers[0].ffn.down
    assert down.weight.shape == (D_MODEL, D_FF) and down.weight.t().is_contiguous()


def packed(layer: Any, x: Tensor) -> Tensor:
    up, gate = layer.gate_up(x).chunk(2, dim=-1)
    y: Tensor = layer.down(torch.relu(gate) * up)
    return y


def test_gate_and_up_in_one_layer(blocks: Any) -> None:
    block = Written(packed, gate_up=nn.Linear(D_MODEL, 2 * D_FF), down=nn.Linear(D_FF, D_MODEL))
    scale_weights(block)
    (found,) = same(blocks, Model(Residual(block)), torch.randn(1, 5, D_MODEL))
    assert found.weights.w_gate.rows == (D_FF, 2 * D_FF, 1) and not found.block.refusal


@pytest.mark.parametrize("scales", [*ScaledShare.SHAPES, "quantised here"])
@pytest.mark.parametrize("name", ["gated", "packed", "written out"])
def test_weights_in_fp8(blocks: Any, name: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has bytes and scales as vLLM loads them, or as they are quantised then; the op reads them."""
    quantised = scales == "quantised here"
    monkeypatch.setattr(ScaledShare, "scales", scales)
    both = {"gate_up": nn.Linear(D_MODEL, 2 * D_FF), "down": nn.Linear(D_FF, D_MODEL)}
    block = {"gated": lambda: Residual(Gated(biases="gud")), "packed": lambda: Residual(Written(packed, **both))}.get(
        name
    )
    model = Model(block() if block else written_out(plain)).eval().requires_grad_(False)
    scale_weights(model)
    x = torch.randn(1, 5, D_MODEL)
    expected = model(x)
    (found,) = replace(blocks, model, Share if quantised else ScaledShare, quantised)
    layers = [each for each in model.modules() if isinstance(each, Share)]
    assert len(layers) == len({each.layer for each in found.weights.named().values()})
    assert {each.weight.dtype for each in layers} == {E4M3} and not blocks.in_fp8(Share(4, 4))
    assert quantised or all(map(blocks.in_fp8, layers))
    with torch.no_grad():
        assert 0 < (model(x) - expected).norm() < 0.1 * expected.norm()


def test_a_module_in_two_places(blocks: Any) -> None:
    shared, alone = Gated(), Plain()
    model = Model(Residual(shared), Residual(shared), alone, alone)
    assert len(same(blocks, model, torch.randn(1, 5, D_MODEL))) == 2
    assert model.layers[0].ffn is model.layers[1].ffn and model.layers[2] is model.layers[3] is not alone


def test_a_written_out_block(blocks: Any) -> None:
    model = Model(written_out(plain))
    (found,) = same(blocks, model, torch.randn(1, 5, D_MODEL))
    assert (found.path, found.block.refusal) == ("layers.0", "")
    assert isinstance(model.layers[0].act, nn.Identity)


def other_reader(layer: Any, x: Tensor) -> Tensor:
    hidden = layer.fc1(layer.norm(x))
    y: Tensor = x + layer.fc2(layer.act(hidden)) + hidden.mean(-1, keepdim=True)
    return y


def changed(m: Any, x: Tensor) -> Tensor:
    rows = m.norm(x)
    hidden = m.fc1(rows)
    rows.add_(1)
    y: Tensor = rows + m.fc2(m.act(hidden))
    return y


STAY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "its activation twice": lambda m, x: x + m.fc2(m.act(m.fc1(m.act(m.norm(x))))),
    "squared": lambda m, x: x + m.fc2(m.act(m.fc1(m.norm(x))).square()),
    "a function": lambda m, x: x + m.fc2(torch.relu(m.fc1(m.norm(x)))),
    "another call": lambda m, x: [r := m.norm(x), x + m.fc2(m.act(m.fc1(r))) + m.fc1(r + 1).mean(-1, keepdim=True)][1],
    "gated": lambda m, x: [r := m.norm(x), x + m.fc2(m.act(m.fc1(r)) * m.fc3(r))][1],
    "changed in place": changed,
}


@pytest.mark.parametrize("name", STAY)
def test_written_out_blocks_that_stay(blocks: Any, name: str) -> None:
    """No module alone computes what is between their projections, or one of these is called for something else, too."""
    model = Model(written_out(STAY[name], fc3=nn.Linear(D_MODEL, D_FF)))
    (found,) = same(blocks, model, torch.randn(1, 5, D_MODEL))
    assert found.block.refusal == "it is written out in a larger module, without a module for its activation"


def test_a_written_out_block_that_is_refused(blocks: Any) -> None:
    (found,) = same(blocks, Model(written_out(plain, act=nn.GELU())), torch.randn(1, 5, D_MODEL))
    assert found.block.refusal.startswith("activation is gelu")


def test_a_value_in_a_written_out_block_with_another_reader(blocks: Any) -> None:
    same(blocks, Model(written_out(other_reader)), torch.randn(1, 5, D_MODEL))


def test_opt(blocks: Any) -> None:
    model = opt().model
    model.config._attn_implementation = "vllm"
    found = list(blocks.find(model.to("meta")))
    assert [(each.path, blocks.activation_of(each), each.block.refusal) for each in found] == [
        (f"decoder.layers.{index}", "activation_fn", "") for index in range(2)
    ]


def test_projections_of_another_kind(blocks: Any) -> None:
    (found,) = blocks.find(gpt2())
    assert found.block.refusal == "c_fc is a Conv1D, not a torch.nn.Linear"
