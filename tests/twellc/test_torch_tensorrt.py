"""The converters for Torch-TensorRT, with stand-ins for it and for its network; the plugins' creators are real.

`tests/tensorrt/test_torch_tensorrt.py` runs Torch-TensorRT itself, which needs a GPU to be imported.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
import twellc.torch_tensorrt
from tests.models import Gated, Plain, export
from twellc.plugins.block import BlockOptions
from twellc.plugins.ops import GATED_MLP, MLP

rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")


@dataclass
class Network:
    layers: list[tuple[list[str], Any]] = field(default_factory=list)

    def add_plugin_v3(self, inputs: list[str], shapes: list[str], plugin: Any) -> SimpleNamespace:
        assert shapes == []
        self.layers.append((inputs, plugin))
        return SimpleNamespace(get_output=lambda index: f"y{index}", name="")


@dataclass
class Support:
    converter_implementation: Callable[..., Any]
    capability_validator: Callable[..., bool]
    supports_dynamic_shapes: bool


@pytest.fixture
def converters(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, list[Support]]]:
    """A stand-in for Torch-TensorRT over the plugin registry of TensorRT-RTX; gives its registry of converters."""
    found: dict[Any, list[Support]] = {}

    def decorator(key: Any, *, capability_validator: Any, supports_dynamic_shapes: bool) -> Callable[[Any], Any]:
        def keep(converter: Any) -> Any:
            found.setdefault(key, []).append(Support(converter, capability_validator, supports_dynamic_shapes))
            return converter

        return keep

    def set_layer_name(layer: SimpleNamespace, target: Any, name: str) -> None:
        layer.name = name

    modules: dict[str, dict[str, Any]] = {
        "torch_tensorrt": {"__version__": "2.11.0"},
        "torch_tensorrt.dynamo": {},
        "torch_tensorrt.dynamo.conversion": {},
        "torch_tensorrt.dynamo.conversion._ConverterRegistry": {
            "DYNAMO_ATEN_CONVERTERS": found,
            "dynamo_tensorrt_converter": decorator,
        },
        "torch_tensorrt.dynamo.conversion.converter_utils": {
            "get_trt_tensor": lambda ctx, value, name: name,
            "set_layer_name": set_layer_name,
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "tensorrt", rtx)
    yield found


def rewritten(module: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return twellc.rewrite(export(module, x), layers="all").program


def twell_calls(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target in (GATED_MLP, MLP)]


def test_registering_twice_is_registering_once(converters: dict[Any, list[Support]]) -> None:
    twellc.torch_tensorrt.register()
    twellc.torch_tensorrt.register()
    assert {op: len(found) for op, found in converters.items()} == {GATED_MLP: 1, MLP: 1}
    assert all(found[0].supports_dynamic_shapes for found in converters.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("biases", ["", "gud"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", [Gated, Plain])
def test_each_call_becomes_a_layer(
    converters: dict[Any, list[Support]], kind: type[nn.Module], residual: bool, biases: str
) -> None:
    twellc.torch_tensorrt.register()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = kind(biases=biases, d_model=64, d_ff=320, d_out=64)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            return x + y if residual else y

    (node,) = twell_calls(rewritten(Model().bfloat16().eval(), torch.randn(4, 64).bfloat16()))
    (support,) = converters[node.target]
    assert support.capability_validator(node, None)
    network = Network()
    y = support.converter_implementation(SimpleNamespace(net=network), node.target, node.args, node.kwargs, "block")
    assert y == "y0"
    ((inputs, plugin),) = network.layers
    names = ["x", *(["w_gate", "b_gate"] if kind is Gated else []), "w_up", "b_up", "w_down", "b_down", "residual"]
    wanted = [name for name in names if (biases or not name.startswith("b_")) and (residual or name != "residual")]
    assert inputs == [f"block_{name}" for name in wanted]
    assert plugin is not None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        BlockOptions(activation="relu"),
        BlockOptions(activation="relu2", compression=2),
        BlockOptions(activation="fatrelu", threshold=0.25),
        BlockOptions(activation="drelu", hot=16, compression=4),
        BlockOptions(activation="relu", norm="rms", eps=0.5),
    ],
    ids=lambda options: f"{options.activation}-{options.norm}",
)
def test_the_plugin_gets_every_option(
    converters: dict[Any, list[Support]], monkeypatch: pytest.MonkeyPatch, options: BlockOptions, dtype: torch.dtype
) -> None:
    twellc.torch_tensorrt.register()
    fields: dict[str, Any] = {}

    class Kept(rtx.PluginField):  # type: ignore[misc, name-defined]
        def __init__(self, name: str, data: Any, kind: Any) -> None:
            super().__init__(name, data, kind)
            fields[name] = data.tobytes().decode() if kind == rtx.PluginFieldType.CHAR else data.item()

    monkeypatch.setattr(rtx, "PluginField", Kept)
    (node,) = twell_calls(
        rewritten(Gated(biases="d", d_model=64, d_ff=320, d_out=64).to(dtype), torch.randn(4, 64, dtype=dtype))
    )
    node.args = (*node.args[: -len(options.arguments())], *options.arguments())
    assert converters[GATED_MLP][0].capability_validator(node, None)
    convert = converters[GATED_MLP][0].converter_implementation
    convert(SimpleNamespace(net=Network()), node.target, node.args, node.kwargs, "block")
    flags = {"gate_bias": 0, "up_bias": 0, "down_bias": 1, "residual": 0, "scales": 0}
    flags |= {"thresholds": 0, "norm_weight": 0, "norm_bias": 0}
    assert fields == {**options.named(), **flags}


def test_what_the_plugins_do_not_take_is_left_to_torch(
    converters: dict[Any, list[Support]], caplog: pytest.LogCaptureFixture
) -> None:
    twellc.torch_tensorrt.register()
    (node,) = twell_calls(rewritten(Gated(d_model=64, d_ff=320, d_out=64).eval(), torch.randn(4, 64)))
    value = node.args[0].meta.pop("val")  # Torch-TensorRT may compute x without one
    assert converters[GATED_MLP][0].capability_validator(node, None)
    node.args[0].meta["val"] = value
    for operand in node.all_input_nodes:
        operand.meta["val"] = operand.meta["val"].float()
    with caplog.at_level(logging.WARNING, "twellc"):
        assert not converters[GATED_MLP][0].capability_validator(node, None)
        node.kwargs = {"w_gate_scale": node.args[1]}
        assert not converters[GATED_MLP][0].capability_validator(node, None)
    assert "left to torch: its tensors are float32; the plugins take bfloat16 or float16" in caplog.text
    assert "left to torch: its weights are in FP8" in caplog.text


def test_an_untried_release_is_named(
    converters: dict[Any, list[Support]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["torch_tensorrt"], "__version__", "2.99.1+cu130")
    with caplog.at_level(logging.WARNING, "twellc"):
        twellc.torch_tensorrt.register()
    assert "Torch-TensorRT 2.99.1+cu130 was not tried with twellc; tried: 2.11" in caplog.text


def test_a_release_that_fits_no_other_package(
    converters: dict[Any, list[Support]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TensorRT 10.6 its import ends with this."""

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch_tensorrt.dynamo.conversion._ConverterRegistry":
                raise AttributeError("module 'tensorrt' has no attribute 'TilingOptimizationLevel'")

    monkeypatch.delitem(sys.modules, "torch_tensorrt.dynamo.conversion._ConverterRegistry")
    monkeypatch.setattr(sys.modules["torch_tensorrt.dynamo.conversion"], "__path__", [], raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(
        twellc.UserError, match=r"Torch-TensorRT cannot be imported \(module 'tensorrt' has no attribute"
    ):
        twellc.torch_tensorrt.register()


@pytest.mark.usefixtures("converters")
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("DYNAMO_ATEN_CONVERTERS", None),
        ("dynamo_tensorrt_converter", lambda key, *, capability_validator: lambda converter: converter),
    ],
)
def test_another_release(name: str, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message, also where the release does not say which it is."""
    module = sys.modules["torch_tensorrt.dynamo.conversion._ConverterRegistry"]
    if other is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, other)
    monkeypatch.delattr(sys.modules["torch_tensorrt"], "__version__")
    with pytest.raises(
        twellc.UserError, match=r"does not take converters of twellc .*; got an unknown release; expected 2\.11\."
    ):
        twellc.torch_tensorrt.register()


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_tensorrt", None)  # which Python takes for a module that is not there
    with pytest.raises(twellc.UserError, match=r"torch_tensorrt is not installed.*pip install 'twellc\[torch-tensorrt"):
        twellc.torch_tensorrt.register()
