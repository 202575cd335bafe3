"""What `twellc.vllm` does without vLLM, and with a stand-in for its registry. `tests/vllm` runs vLLM itself."""

import importlib
import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import twellc.vllm
from tests.conftest import ROOT
from tests.processes import environment
from twellc.base.errors import UserError

REGISTRY = "vllm.model_executor.models.registry"
SETTINGS = "vllm.model_executor.models.config"


class Registry:
    def __init__(self) -> None:
        self.models = dict.fromkeys(("OPTForCausalLM", "Mamba2ForCausalLM", "TransformersForCausalLM"), "vLLM's")
        self.settings: dict[str, object] = {"Mamba2ForCausalLM": object, "Other": None}

    def get_supported_archs(self) -> Iterable[str]:
        return self.models.keys()

    def register_model(self, name: str, path: str) -> None:
        assert name not in self.models
        self.models[name] = path


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        REGISTRY: {"ModelRegistry": found},
        SETTINGS: {"MODELS_CONFIG_MAP": found.settings},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_the_entry_point_registers_all_classes_once(registry: Registry, caplog: pytest.LogCaptureFixture) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"twellc": "twellc.vllm:register"}
    before, settings = dict(registry.models), dict(registry.settings)
    twellc.vllm.register()
    twellc.vllm.register()
    path = "twellc.vllm.model:TwellForCausalLM"
    own = {name: f"twellc.vllm.native:{name}" for name in ("TwellOPTForCausalLM", "TwellMamba2ForCausalLM")}
    assert registry.models == {**before, "TwellForCausalLM": path, "SparseLlamaForCausalLM": path, **own}
    assert registry.settings == {**settings, "TwellMamba2ForCausalLM": object}
    assert not caplog.records


def test_a_sparselm_is_a_relu_model_whatever_its_configuration_says(registry: Registry) -> None:
    twellc.vllm.register()
    config = transformers.AutoConfig.for_model("llama_sparse_relu")
    read = type(config).from_dict({"hidden_act": "silu", "hidden_size": 64})
    assert (read.hidden_act, read.hidden_size, read.model_type) == ("relu", 64, "llama_sparse_relu")


def test_an_untried_release_is_named(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.99.1+cu130")
    twellc.vllm.register()
    tried = ", ".join(f"{major}.{minor}" for major, minor in twellc.vllm.VLLM.tested)
    assert caplog.messages == [f"vLLM 0.99.1+cu130 was not tried with twellc; tried: {tried}"]
    assert caplog.records[0].levelno == logging.WARNING


class Linear(torch.nn.Module):
    """Stands for vLLM's `ColumnParallelLinear` of one rank."""

    prefix = "mlp.up"

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        vars(self.weight)["weight_loader"] = lambda parameter, loaded: parameter.data.copy_(loaded)


@pytest.mark.parametrize("down", [False, True])
def test_quantised_layers_take_other_weights(registry: Registry, monkeypatch: pytest.MonkeyPatch, down: bool) -> None:
    """As trainers send them while vLLM runs: they are quantised as the first ones were."""
    name = "vllm.model_executor.layers.linear"
    linear: Any = ModuleType(name)
    for each in ("ColumnParallelLinear", "LinearBase", "RowParallelLinear", "UnquantizedLinearMethod"):
        setattr(linear, each, type(each, (), {}))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers", ModuleType("vllm.model_executor.layers"))
    monkeypatch.setitem(sys.modules, name, linear)
    monkeypatch.delitem(sys.modules, "twellc.vllm.blocks", raising=False)
    blocks = importlib.import_module("twellc.vllm.blocks")
    monkeypatch.delitem(sys.modules, "twellc.vllm.blocks")
    first, second = torch.randn(2, 6, 4, dtype=torch.bfloat16)
    method = blocks.CallsOp(None, None, True) if down else blocks._PassInput(True)
    loaded, fresh = Linear(first), Linear(second)
    for layer in (loaded, fresh):
        method.process_weights_after_loading(layer)
    loaded.weight.weight_loader(loaded.weight, second)  # type: ignore[attr-defined, operator]
    assert loaded.weight_scale.shape == ((1, 4) if down else (6, 1))
    for name in ("weight", "weight_scale"):
        ours, expected = getattr(loaded, name), getattr(fresh, name)
        assert ours.stride() == expected.stride() and torch.equal(ours.float(), expected.float())


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError) as error:
        twellc.vllm.register()
    assert str(error.value) == (
        "twellc.vllm: the module vllm is not installed. Install it: pip install 'twellc[vllm]'."
    )


def test_a_vllm_that_cannot_be_imported(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == REGISTRY:
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, REGISTRY)
    monkeypatch.setattr(sys.modules[REGISTRY.rpartition(".")[0]], "__path__", [], raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(UserError, match=r"vLLM cannot be imported \(libcudart.*\)\. Install it: pip install"):
        twellc.vllm.register()


def test_importing_it_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, twellc.vllm; assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
