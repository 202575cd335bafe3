"""Checkpoints in E4M3 as compressed-tensors and ModelOpt write them: dequantized as these libraries say."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests import models
from twellc.base.errors import UserError
from twellc.eager.fp8_linear import Fp8Linear
from twellc.loaders.huggingface import open_directory

pytestmark = pytest.mark.slow  # to import these libraries takes long
Dequantized = dict[str, torch.Tensor]


def relu_llama(**changes: Any) -> Any:
    model = models.llama(**changes).bfloat16()
    model.config.architectures = ["LlamaForCausalLM"]
    return model


def by_compressed_tensors(preset: str, folder: Path, **changes: Any) -> None:
    """Write a model as llm-compressor does, with scales from the largest weights."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = relu_llama(**changes)
    groups = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        scale = getattr(module, "weight_scale", None)
        if scale is not None:
            largest = module.weight.float().abs()
            shared = largest.amax(1, keepdim=True) if scale.shape == (len(largest), 1) else largest.amax()
            scale.data.copy_((shared / 448).expand(scale.shape))
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.05)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


def undone(folder: Path) -> Any:
    """Do what a refusal advises."""
    config = transformers.CompressedTensorsConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def dequantized(model: Any) -> Dequantized:
    """Return the parameters of a model, and FP8 layers dequantized."""
    layers = {path: each for path, each in model.named_modules() if isinstance(each, Fp8Linear)}
    assert len(layers) == 14
    found = {f"{path}.weight": each.matrix.dequantize(torch.bfloat16) for path, each in layers.items()}
    return {**{name: each for name, each in model.state_dict().items() if not name.endswith("scale")}, **found}


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("FP8_DYNAMIC", {}),
        ("FP8", {}),
        ("FP8_BLOCK", {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 2}),
    ],
)
def test_compressed_tensors(preset: str, sizes: dict[str, int], tmp_path: Path) -> None:
    by_compressed_tensors(preset, tmp_path, **sizes)
    model, _, _ = open_directory(tmp_path)
    found, expected = dequantized(model), undone(tmp_path).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize("preset", ["W4A16", "INT8", "NVFP4A16", "MXFP8"])
def test_what_a_refusal_advises(preset: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    by_compressed_tensors(preset, tmp_path / "old", **sizes)
    with pytest.raises(UserError, match=r"with format .*CompressedTensorsConfig\(dequantize=True\)"):
        open_directory(tmp_path / "old")
    undone(tmp_path / "old").save_pretrained(tmp_path / "new")
    _, _, notes = open_directory(tmp_path / "new")
    assert notes == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", ["FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG"])
def test_modelopt(settings: str, tmp_path: Path) -> None:
    quantization: Any = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.export.quant_utils import from_quantized_weight

    model = relu_llama()
    original = {name: each.clone() for name, each in model.state_dict().items()}
    forward = functools.partial(torch.nn.Module.__call__, input_ids=torch.randint(3, 96, (2, 7)))
    model = quantization.quantize(model, getattr(quantization, settings), forward)
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=tmp_path)
    model, _, _ = open_directory(tmp_path)
    found, stored = dequantized(model), load_file(tmp_path / "model.safetensors")
    for name, tensor in original.items():
        scale = stored.get(f"{name}_scale")
        if scale is not None and scale.dim() == 0:
            tensor = from_quantized_weight(stored[name], scale, "fp8", torch.float32).bfloat16()
        if scale is not None and scale.dim() == 1:  # which the library does not undo
            assert (found[name].float() - tensor.float()).norm() < 0.04 * tensor.float().norm()
        else:
            assert torch.equal(found[name], tensor)
