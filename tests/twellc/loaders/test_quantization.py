"""A method of quantisation is added: a class, and its place in the list, are all that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import models
from tests.twellc.loaders.test_fp8 import edit
from twellc.base.errors import UserError
from twellc.loaders import quantization
from twellc.loaders.huggingface import open_directory
from twellc.loaders.method import Method


@dataclass(frozen=True)
class Int8:
    """A matrix of integers, with a scale for each output."""

    values: Tensor
    scale: Tensor
    kind = "INT8"

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.values.float() * self.scale).to(dtype)


class Int8Method(Method):
    name, reads = "int8", "INT8 by output"

    def fault(self, settings: Mapping[str, Any]) -> str:
        return "zero points" if settings.get("zero_points") else ""

    def take(self, path: Path, tensors: dict[str, Tensor]) -> Mapping[str, Int8]:
        names = [name for name, each in tensors.items() if each.dtype == torch.int8]
        return {name: Int8(tensors.pop(name), tensors.pop(f"{name}_scale")) for name in names}


def test_a_method_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.llama().bfloat16().save_pretrained(tmp_path)
    file, expected = tmp_path / "model.safetensors", dict[str, Tensor]()
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        values, scale = (
            torch.randint(-127, 128, tensors[name].shape, dtype=torch.int8),
            torch.rand(len(tensors[name]), 1),
        )
        tensors |= {name: values, f"{name}_scale": scale}
        expected[name] = (values.float() * scale).bfloat16()
    save_file(tensors, file)
    edit(tmp_path, quantization_config={"quant_method": "int8"})
    with pytest.raises(
        UserError, match="of int8; expected 16 or 32 bits, or float-quantized of compressed-tensors, fp8"
    ):
        open_directory(tmp_path)
    monkeypatch.setattr(quantization, "METHODS", [*quantization.METHODS, Int8Method()])
    model, _, notes = open_directory(tmp_path)
    assert len(expected) == 14 and all(torch.equal(model.state_dict()[name], each) for name, each in expected.items())
    assert [note.split(":")[0] for note in notes] == ["14 matrices in INT8 are dequantised to bfloat16"]
    edit(tmp_path, quantization_config={"quant_method": "int8", "zero_points": True})
    with pytest.raises(UserError, match=r"of int8 with zero points; expected .*, FP8 of ModelOpt, INT8 by output\."):
        open_directory(tmp_path)
