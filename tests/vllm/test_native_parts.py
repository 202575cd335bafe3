"""Which blocks and experts are found in vLLM's own modules, and what is put in their place; without an engine."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models import D_FF, D_MODEL, Written
from twellc.plugins.block import BlockOptions
from twellc.plugins.experts_op import EXPERTS
from twellc.plugins.fp8 import Fp8

pytestmark = pytest.mark.vllm
Forward = Callable[[Any, Tensor], Any]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module, in a group of one rank, as vLLM's layers need it."""
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    from twellc.vllm import native

    with set_current_vllm_config(VllmConfig()):
        distributed.init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('group')}/0", 0, "gloo")
        distributed.initialize_model_parallel()
        yield native
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()


class Layer(Written):
    """One whose forward takes x alone, as vLLM's modules name what they take."""

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return self.function(self, x)


def layer(forward: Forward, of_up: Any = None, of_down: Any = None, **others: Any) -> Any:
    """Return a module of vLLM's layers, with a block in its forward: options of its layers, other children."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    made = {
        "up": ColumnParallelLinear(D_MODEL, D_FF, **(of_up or {})),
        "act": nn.ReLU(),
        "down": RowParallelLinear(D_FF, D_MODEL, **(of_down or {})),
    }
    module = Layer(forward, **{**made, **others})
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def block(m: Any, x: Tensor) -> Tensor:
    h, _ = m.up(x)
    y: Tensor = m.down(m.act(h))[0]
    return y


def run_by_op(native: Any, model: Any, dtype: torch.dtype = torch.float32, quantised: bool = False) -> Any:
    """Let the op run the block of a model; return what was found."""
    (candidate,) = native._candidates(model, dtype)
    found, layers = candidate.found, candidate.layers()
    options = BlockOptions(activation=found.block.activation, threshold=found.block.threshold)
    native.blocks.compute_by_op(found, layers, options, quantised)
    candidate.put(layers)
    for each in layers.values():
        each.quant_method.process_weights_after_loading(each)
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("forward", [block, lambda m, x: x + 2 * block(m, x)])
def test_a_block(native: Any, forward: Forward, bias: bool) -> None:
    model = layer(forward, {"bias": bias}, {"bias": bias})
    x, up, down = torch.randn(5, D_MODEL), model.up, model.down
    y = functional.linear(functional.linear(x, up.weight, up.bias).relu(), down.weight, down.bias)
    expected = y if forward is block else x + 2 * y
    found = run_by_op(native, model)
    assert (found.path, found.block.module, found.block.activation, found.block.refusal) == ("", "", "relu", "")
    assert torch.allclose(model(x), expected, atol=1e-4)
    assert down.weight.t().is_contiguous() and {name for name, _ in model.named_children()} == {"up", "act", "down"}


def test_layers_that_return_no_bias(native: Any) -> None:
    alone = {"return_bias": False}
    found = run_by_op(native, layer(lambda m, x: m.down(m.act(m.up(x))), alone, alone))
    assert found.block.activation == "relu"


def test_gate_and_up_in_one_layer(native: Any) -> None:
    """As of MiniCPM-S in vLLM."""
    from vllm.model_executor.layers.activation import FatreluAndMul
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    both = MergedColumnParallelLinear(D_MODEL, [D_FF, D_FF], bias=False)
    model = layer(block, of_down={"bias": False}, up=both, act=FatreluAndMul(0.5))
    x, (gate, up) = torch.randn(5, D_MODEL), both.weight.detach().clone().chunk(2)
    expected = (functional.threshold(x @ gate.T, 0.5, 0.0) * (x @ up.T)) @ model.down.weight.T
    found = run_by_op(native, model)
    assert (found.block.variant, found.block.activation, found.block.threshold) == ("gated", "fatrelu", 0.5)
    assert torch.allclose(model(x), expected, atol=1e-3)


def test_parts_of_quantised_weights_that_are_sent_later(native: Any) -> None:
    """A trainer sends gate and up, which vLLM holds as one, one after the other."""
    from vllm.model_executor.layers.activation import FatreluAndMul
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear

    both = MergedColumnParallelLinear(D_MODEL, [D_FF, D_FF], bias=False)
    run_by_op(native, layer(block, up=both, act=FatreluAndMul(0.5)), quantised=True)
    sent = torch.randn(2 * D_FF, D_MODEL)
    torch.use_deterministic_algorithms(True)  # memory is NaN until it is written
    try:
        for part, weight in enumerate(sent.chunk(2)):
            both.weight.weight_loader(both.weight, weight, part)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = Fp8.quantize(sent, "row")
    assert torch.equal(both.weight.float(), expected.values.float())
    assert torch.allclose(both.weight_scale, expected.scale, rtol=1e-6)


def test_the_block_of_nemotron(native: Any) -> None:
    """Also where vLLM would fuse its activation with what quantises it for the next layer."""
    from vllm.model_executor.models.nemotron_h import NemotronHMLP

    model: Any = NemotronHMLP(None, D_MODEL, D_FF)  # type: ignore[arg-type]
    model.down_proj._input_quant_key = object()
    (candidate,) = native._candidates(model, torch.bfloat16)
    assert candidate.found.block.activation == "relu2" and not candidate.found.block.refusal


STAY: dict[str, Forward] = {
    "its activation twice": lambda m, x: m.down(m.act(m.act(m.up(x)[0]))),
    "its activation elsewhere": lambda m, x: m.down(m.act(m.up(m.act(x))[0])),
    "squared": lambda m, x: m.down(m.act(m.up(x)[0]).square()),
    "a function": lambda m, x: m.down(torch.relu(m.up(x)[0])),
    "hidden read": lambda m, x: [h := m.act(m.up(x)[0]), m.down(h)[0] + h.mean()][1],
    "z read": lambda m, x: [z := m.up(x)[0], m.down(m.act(z))[0] + z.mean()][1],
    "its bias read": lambda m, x: [both := m.up(x), m.down(m.act(both[0]))[0] + both[1]][1],
    "its weight read": lambda m, x: m.down(m.act(m.up(x)[0]))[0] + m.up.weight.sum(),
    "not always": lambda m, x: m.down(m.act(m.up(x)[0])) if x.sum() > 0 else x,
}


@pytest.mark.parametrize("name", STAY)
def test_what_is_no_block(native: Any, name: str) -> None:
    assert not list(native._candidates(layer(STAY[name]), torch.float32))


@pytest.mark.parametrize(
    "options",
    [{"of_up": {"gather_output": True}}, {"of_up": {"skip_bias_add": True}}, {"of_down": {"input_is_parallel": False}}],
)
def test_layers_that_do_more(native: Any, options: dict[str, Any]) -> None:
    assert not list(native._candidates(layer(block, **options), torch.float32))


def test_another_activation_is_refused(native: Any) -> None:
    (candidate,) = native._candidates(layer(block, act=nn.GELU()), torch.float32)
    assert candidate.found.block.refusal.startswith("activation is gelu")


# ---- experts ----

EXPERTS_HERE, TOP, TOKENS = 3, 2, 7
ON_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def weights(scaled: bool) -> tuple[Any, dict[str, Tensor]]:
    """Return vLLM's module of experts on one rank, with two unused neurons, and what the op is to be given."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    up = torch.randn(EXPERTS_HERE, D_FF, D_MODEL, dtype=torch.bfloat16)
    down = torch.randn(EXPERTS_HERE, D_FF - 16, D_MODEL, dtype=torch.bfloat16)
    given: dict[str, Tensor] = {"up": up[:, : D_FF - 16], "down": down}
    held = {
        "w13_weight": up,
        "w2_weight": torch.cat([down.mT, torch.full((EXPERTS_HERE, D_MODEL, 16), torch.nan, dtype=down.dtype)], 2),
    }
    scales = {}
    if scaled:
        for name, ours in (("w13_weight", "up"), ("w2_weight", "down")):
            held[name] = held[name].nan_to_num().to(torch.float8_e4m3fn)
            scales[f"{name}_scale"] = torch.rand(EXPERTS_HERE, 1) if ours == "up" else torch.rand(EXPERTS_HERE)
            given[f"{ours}_scale"] = scales[f"{name}_scale"].view(-1, 1, 1)
        given["up"] = held["w13_weight"][:, : D_FF - 16]
        given["down"] = held["w2_weight"].mT[:, : D_FF - 16]
    layer = nn.Module()
    for name, tensor in (held | scales).items():
        layer.register_parameter(name, nn.Parameter(tensor.contiguous(), requires_grad=False))
    sizes = SimpleNamespace(intermediate_size_per_partition_unpadded=D_FF - 16)
    vars(layer).update(expert_map=None, moe_config=sizes, activation=MoEActivation.RELU2_NO_MUL)
    return layer, {name: tensor.clone() for name, tensor in given.items()}


@pytest.mark.parametrize("device", ON_DEVICES)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_experts_where_vllm_holds_them(scaled: bool, mapped: bool, device: str) -> None:
    """Turned in their own memory, without neurons that pad them; experts of other ranks take no part.

    Shared experts run behind them.
    """
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder

    from twellc.vllm.experts import TwellExpertsMethod, TwellModelOptExpertsMethod

    layer, given = weights(scaled)
    layer.to(device)
    held = layer.w2_weight.data_ptr()
    method = (TwellModelOptExpertsMethod if scaled else TwellExpertsMethod)(SimpleNamespace(moe=None))  # type: ignore
    for _ in range(2):  # as after other weights were loaded
        method.process_weights_after_loading(layer)
    assert layer.w2_weight.data_ptr() == held and layer.w2_weight.mT.is_contiguous()
    x = torch.randn(TOKENS, D_MODEL, dtype=torch.bfloat16)
    ids, factors = torch.randint(0, EXPERTS_HERE, (TOKENS, TOP)), torch.rand(TOKENS, TOP)
    up, down = given.pop("up"), given.pop("down")
    expected = EXPERTS(x, up, None, down, ids, factors, "relu2", **given)
    if mapped:  # of six experts the odd ones are here
        layer.expert_map = torch.tensor([-1, 0, -1, 1, -1, 2], dtype=torch.int32, device=device)
        ids = 2 * ids + 1
        ids[0] = 4
        expected[0] = 0
    shared: list[Any] = []
    ours = (x.to(device), factors.to(device), ids.to(device, torch.int32))
    y = method.apply(layer, *ours, lambda *given: shared.append(given), x).cpu()
    assert method.mk_can_overlap_shared_experts and shared == [(x, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)]
    assert torch.equal(y, expected) if device == "cpu" else torch.allclose(y, expected, rtol=0.05, atol=0.5)


def asked(**changes: Any) -> Any:
    """Return vLLM's module of experts, as far as it is asked whether the op can compute them."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    parallel = SimpleNamespace(enable_eplb=False, dp_size=1)
    config: dict[str, Any] = {"moe_parallel_config": parallel, "has_bias": False, "in_dtype": torch.bfloat16}
    config |= {"hidden_dim": 64, "intermediate_size_per_partition_unpadded": 48}
    module: dict[str, Any] = {"activation": MoEActivation.RELU2_NO_MUL, "apply_router_weight_on_input": False}
    module |= {"quant_method": object.__new__(UnquantizedFusedMoEMethod), "local_num_experts": 128, "top_k": 6}
    module["w13_weight"] = torch.empty(0, dtype=changes.pop("weights", torch.bfloat16))
    for name, value in changes.items():
        owner = next((each for each in (vars(parallel), config, module) if name in each), module)
        owner[name] = value
    return SimpleNamespace(**module, moe_config=SimpleNamespace(**config))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "eplb": ({"enable_eplb": True}, "load balancing across experts is switched on"),
    "data parallel": ({"dp_size": 2}, "data parallel ranks exchange tokens"),
    "biases": ({"has_bias": True}, "experts with biases"),
    "on the input": ({"apply_router_weight_on_input": True}, "the router's weights are multiplied with the input"),
    "float32": ({"in_dtype": torch.float32}, "they compute in float32"),
    "widths": ({"hidden_dim": 60}, "a width is 60; the kernels need multiples of 8"),
    "widths in FP8": (
        {"weights": torch.float8_e4m3fn, "hidden_dim": 72},
        "a width is 72; the kernels need multiples of 16",
    ),
    "many experts": ({"local_num_experts": 1025}, "there are 1025 experts; the kernels take at most 1024"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_that_stay(name: str) -> None:
    from twellc.vllm.experts import refusal_of_experts

    changes, reason = REFUSED[name]
    assert reason in refusal_of_experts(asked(**changes)) and not refusal_of_experts(asked())


def test_experts_in_nvfp4_stay() -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE

    from twellc.vllm.experts import refusal_of_experts

    module = asked(quant_method=object.__new__(ModelOptNvFp4FusedMoE))
    assert refusal_of_experts(module).startswith("ModelOptNvFp4FusedMoE keeps their weights; they need 16 bits")
