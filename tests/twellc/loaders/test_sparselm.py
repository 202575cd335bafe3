"""SparseLM checkpoints, in both of their layouts, against the same weights as a Llama."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from twellc.base.errors import UserError
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner


def sparselm(llama: Path, folder: Path, bare_weights: bool) -> Path:
    """Write a Llama's weights as a SparseLM checkpoint."""
    folder.mkdir()
    config = json.loads((llama / "config.json").read_text())
    config |= {"model_type": "llama_sparse_relu", "architectures": ["SparseLlamaForCausalLM"], "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(llama / "model.safetensors").items():
        if bare_weights and ".mlp." in name:
            for projection in ("gate", "up", "down"):
                name = name.replace(f"{projection}_proj.weight", f"{projection}_weight")
            tensor = tensor if "up_weight" in name else tensor.t()
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    tensors["model.layers.0.mlp.tracker.count"] = torch.zeros(3)
    tensors["metrics_accumulator.total"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("bare_weights", [False, True])
def test_layouts(llama: Path, tmp_path: Path, bare_weights: bool) -> None:
    ids = torch.randint(0, 90, (2, 9))
    inputs = {"input_ids": ids}
    loaded = load_model(TracingOptions(sparselm(llama, tmp_path / "sparselm", bare_weights)))
    expected = Runner(load_model(TracingOptions(llama)).program)(inputs)[0]
    assert torch.equal(Runner(loaded.program)(inputs)[0], expected)
    assert loaded.declared_activation == "silu"


def test_unexpected_shape(llama: Path, tmp_path: Path) -> None:
    folder = sparselm(llama, tmp_path / "sparselm", bare_weights=True)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_weight"
    tensors[name] = tensors[name].t().contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"weight {name}: has an unexpected shape"):
        load_model(TracingOptions(folder))


def test_missing_layer(llama: Path, tmp_path: Path) -> None:
    folder = sparselm(llama, tmp_path / "sparselm", bare_weights=True)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"1 weights are missing; got model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(TracingOptions(folder))
