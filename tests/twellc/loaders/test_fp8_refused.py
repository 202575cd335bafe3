"""Hugging Face directories with FP8 weights that are refused, each with what helps."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import models
from tests.twellc.loaders.test_fp8 import COMPRESSED, GATE, WEIGHTS, edit, write
from twellc.base.errors import UserError
from twellc.loaders.huggingface import open_directory


def settings(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, quantization_config=COMPRESSED | changes)


def weights(**changes: Any) -> Callable[[Path], None]:
    return settings(config_groups={"g": {"weights": WEIGHTS | changes}})


def storing(**changes: Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors: dict[str, Any] = load_file(folder / "model.safetensors")
        tensors |= {f"{GATE}.{name}": tensor for name, tensor in changes.items()}
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(present, folder / "model.safetensors")

    return change


NOT_READ = "this form of quantised weights is not read; got "
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "int4": (
        settings(format="pack-quantized"),
        f"{NOT_READ}quantization_config of compressed-tensors with format pack",
    ),
    "no name of a method": (
        lambda folder: edit(folder, quantization_config={"quant_method": ["fp8"]}),
        f"{NOT_READ}quantization_config of ['fp8']; expected",
    ),
    "the command that helps": (settings(format="nvfp4-pack-quantized"), "t.CompressedTensorsConfig(dequantize=True)"),
    "int8": (weights(type="int"), "with weights of 8 bits, int"),
    "groups": (weights(strategy="group"), "with strategy group"),
    "zero points": (weights(symmetric=False), "with zero points"),
    "act-order": (weights(actorder="static"), "with actorder static"),
    "transforms": (settings(transform_config={"config_groups": {}}), "with transform_config"),
    "sparse": (settings(sparsity_config={"format": "sparse-24-bitmask"}), "with sparsity_config of sparse-24-bitmask"),
    "small blocks": (
        lambda folder: edit(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}),
        "of fp8 with weight_block_size [64, 64]",
    ),
    "ModelOpt's NVFP4": (
        lambda folder: (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}'),
        f"hf_quant_config.json: {NOT_READ}quantization of modelopt with quant_algo NVFP4; expected",
    ),
    "smoothing": (storing(pre_quant_scale=torch.ones(32)), f"{NOT_READ}{GATE}.pre_quant_scale of float32"),
    "SVD": (storing(svdquant_lora_a=torch.ones(4, 4)), f"{NOT_READ}{GATE}.svdquant_lora_a"),
    "e5m2": (storing(weight=torch.zeros(320, 32).to(torch.float8_e5m2)), f"{NOT_READ}{GATE}.weight of float8_e5m2"),
    "fnuz": (storing(weight=torch.zeros(320, 32).to(torch.float8_e4m3fnuz)), f"{GATE}.weight of float8_e4m3fnuz"),
    "no scale": (storing(weight_scale=None), f"{GATE}.weight: is a weight in E4M3 that needs one scale; got none"),
    "two scales": (
        storing(weight_scale_inv=torch.ones(())),
        "got " + f"{GATE}.weight_scale and {GATE}.weight_scale_inv",
    ),
    "no weight": (
        storing(weight=None),
        f"{GATE}.weight_scale: is a scale without a quantised weight; got no {GATE}.weight",
    ),
    "a zero scale": (
        storing(weight_scale=torch.zeros(320, 1)),
        "320 of 320 scales are not finite and positive; got 0.0",
    ),
    "an infinite scale": (
        storing(weight_scale=torch.tensor([float("inf")])),
        "1 of 1 scales are not finite and positive",
    ),
    "NaN": (
        storing(weight=torch.full((320, 32), torch.nan).to(torch.float8_e4m3fn)),
        f"{GATE}.weight: 10240 of 10240 weights in E4M3 are NaN",
    ),
    "another shape": (
        storing(weight_scale=torch.ones(32)),
        "got [32] for a weight [320, 32]; expected [], [320], [320, 1], [1, 32] or, for blocks of 128 x 128, [3, 1]",
    ),
    "experts": (
        storing(weight=torch.zeros(2, 320, 32).to(torch.float8_e4m3fn)),
        f"{GATE}.weight_scale: is a scale of several matrices; got a weight [2, 320, 32]; expected [out, in]",
    ),
    "another dtype": (
        storing(weight_scale=torch.ones(320, 1).double()),
        "got float64; expected float32 or bfloat16 or",
    ),
}


@pytest.mark.parametrize("state", REFUSED)
def test_refused(state: str, quantised: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quantised, tmp_path / "model"))
    change, message = REFUSED[state]
    change(folder)
    with pytest.raises(UserError) as refusal:
        open_directory(folder)
    assert str(refusal.value).startswith(str(folder)) and message in str(refusal.value)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised") / "model"
    models.llama(hidden_size=32, intermediate_size=320).bfloat16().save_pretrained(folder)
    write(folder, "FP8_DYNAMIC")
    return folder
