"""`--weights fp8`, and models with weights in E4M3: compiled, inspected and checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import twellc
from tests import models
from tests.conftest import Cli
from tests.models import SEQUENCE
from tests.twellc.test_cli import failed
from twellc.compiling.compiler import refuse_fp8
from twellc.passes.report import Layer, Linear, Weights

QUANTISED = "weights in 8 bits, quantised"


def bits(layers: list[Any]) -> list[str]:
    return [str(layer.weights) for layer in layers]


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Inputs of the archive."""
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).standard_normal((3, SEQUENCE, models.D_MODEL)))
    return tmp_path / "x.npz"


@pytest.mark.usefixtures("cli")
def test_a_block_is_quantised_and_checked(archive: Path, tmp_path: Path) -> None:
    graph, report = tmp_path / "m.onnx", tmp_path / "m.json"
    manifest = twellc.compile(archive, backend="none", onnx=graph, manifest=report, weights="fp8")
    assert bits(manifest.layers) == [QUANTISED]
    written = json.loads(report.read_text())
    assert written["settings"]["weights"] == "fp8"
    assert written["layers"][0]["weights"] == {"bits": 8, "reason": "quantised"}
    kinds = [each.data_type for each in onnx.load(graph).graph.initializer]
    assert kinds.count(onnx.TensorProto.FLOAT8E4M3FN) == 3
    result = twellc.check(archive, graph)
    assert result.within, result.causes
    (block,) = result.blocks
    assert 0.01 < (block.quantisation or 0) < 0.1
    assert 0.01 < block.accuracy.plain.relative < 0.1, "the yardstick is dense FP8"
    assert block.accuracy.separation is not None and block.accuracy.separation.rewrite.relative < 1e-12
    assert bits(twellc.inspect(graph).layers) == [QUANTISED]
    by_type = {kind: twellc.inspect(archive, weights=kind, tokens=1) for kind in ("keep", "fp8")}
    assert bits(by_type["fp8"].layers) == [QUANTISED]
    halves = [by_type[kind].cost.layers[0].sparse.bytes for kind in ("fp8", "keep")]
    assert halves[0] < 0.6 * halves[1]


@pytest.mark.usefixtures("cli")
def test_a_block_with_too_large_an_error_stays(archive: Path, tmp_path: Path, samples: Path) -> None:
    given: dict[str, Any] = {"backend": "none", "weights": "fp8", "arrays": samples, "onnx": tmp_path / "m.onnx"}
    (layer,) = twellc.compile(archive, fp8_error=1.0, **given).layers
    assert layer.weights is not None and layer.weights.bits == 8
    error = layer.weights.error
    assert error is not None and 0.01 < error < 0.1
    manifest = twellc.compile(archive, fp8_error=error / 2, overwrite=True, **given)
    assert f"16 bits, FP8 changes its output by {error:.2%}, more than --fp8-error" in manifest.layers[0].reason
    assert manifest.settings.fp8_errors == {layer.module: error}
    checked = twellc.check(archive, tmp_path / "m.onnx")
    assert checked.within and checked.blocks[0].quantisation is None


class Thresholds(torch.nn.Module):
    """A plain block with a threshold for each neuron, as a parameter in the precision of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.block = models.Plain(biases="ud")
        self.threshold = torch.nn.Parameter(torch.rand(self.block.up.out_features) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.block.up(x)
        return x + self.block.down(torch.where(z > self.threshold, z, 0))


@pytest.mark.usefixtures("cli")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_thresholds_are_read_in_float32(dtype: torch.dtype, tmp_path: Path, samples: Path) -> None:
    x = torch.randn(3, SEQUENCE, models.D_MODEL).to(dtype)
    torch.export.save(models.export(Thresholds().to(dtype), x), tmp_path / "m.pt2")
    given: dict[str, Any] = {"backend": "none", "weights": "fp8", "arrays": samples, "layers": "all"}
    (layer,) = twellc.compile(tmp_path / "m.pt2", onnx=tmp_path / "m.onnx", fp8_error=1.0, **given).layers
    assert layer.weights is not None and layer.weights.bits == 8 and 0 < (layer.weights.error or 0) < 0.1
    result = twellc.check(tmp_path / "m.pt2", tmp_path / "m.onnx")
    assert result.within and (result.blocks[0].quantisation or 0) > 0.001, result.causes


@pytest.mark.usefixtures("cli")
def test_a_block_that_fires_in_fp8_alone(tmp_path: Path) -> None:
    """Its output is zero on the samples, and no share of that is an error."""
    block = models.Plain(d_model=8, d_ff=1)
    block.up.weight.data[0] = torch.tensor([1.0, 1.0625, 0, 0, 0, 0, 0, 0])  # 1 is rounded down
    x = torch.tensor([[-1.0625, 1.0, 0, 0, 0, 0, 0, 0]])
    np.savez(tmp_path / "x.npz", x=x.numpy())
    torch.export.save(models.export(block.bfloat16(), x.bfloat16()), tmp_path / "m.pt2")
    given: dict[str, Any] = {"backend": "none", "weights": "fp8", "arrays": tmp_path / "x.npz"}
    manifest = twellc.compile(tmp_path / "m.pt2", onnx=tmp_path / "m.onnx", layers="all", fp8_error=1.0, **given)
    assert bits(manifest.layers) == ["weights in 16 bits, what FP8 changes could not be measured on the samples"]


@pytest.mark.slow
@pytest.mark.usefixtures("cli")
def test_a_llama_with_a_cache(llama: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    manifest = twellc.compile(llama, backend="none", onnx=graph, weights="fp8", kv_cache=32)
    assert set(bits(manifest.layers)) == {QUANTISED}
    result = twellc.check(llama, graph)
    assert result.within, result.causes
    assert all((block.quantisation or 0) > 0.01 for block in result.blocks)


@pytest.mark.usefixtures("cli")
def test_a_damaged_scale_is_found(archive: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    twellc.compile(archive, backend="none", onnx=graph, weights="fp8")
    model = onnx.load(graph)
    (scale,) = [each for each in model.graph.initializer if each.name.endswith("up.weight_scale")]
    values = onnx.numpy_helper.to_array(scale).copy()
    values[7] *= 2
    scale.CopyFrom(onnx.numpy_helper.from_array(values, scale.name))
    onnx.save(model, graph)
    result = twellc.check(archive, graph)
    assert not result.within and "rewrite" in result.causes


def test_a_gpu_without_fp8_is_named() -> None:
    layer = Layer("mlp", "plain", "relu", 8, 8, 8, True, "twell", "matches", False, weights=Weights(8, "quantised"))
    for layers, capability in (([layer], (8, 9)), ([layer], None), ([replace(layer, weights=None)], (8, 0))):
        refuse_fp8(layers, [], capability)
    with pytest.raises(
        twellc.UserError, match=r"layer mlp: TensorRT takes no .*; got compute capability 8.6; expected 8.9"
    ):
        refuse_fp8([layer], [], (8, 6))
    weights = Weights(8, "quantised")
    linear = Linear(["q"], 8, [8], "none", False, True, "twell", "matches", weights=weights)
    with pytest.raises(twellc.UserError, match="layer q: TensorRT takes no FP8 weights"):
        refuse_fp8([], [linear], (8, 6))


REFUSED = [
    (("--fp8-error", "0.1"), "--fp8-error 0.1: no weights are quantised; got --weights keep. Add --weights fp8"),
    (("--weights", "fp8", "--fp8-error", "0.1"), "is measured on samples; got none; expected one of --arrays"),
    (("--weights", "fp8", "--arrays", "x.npz"), "--arrays x.npz: the model is run only to measure FP8"),
    (("--weights", "int4"), "'int4' is not one of 'keep', 'fp8', 'fp8:blocks'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_bad_options_are_refused(
    options: tuple[str, ...], message: str, cli: Cli, archive: Path, tmp_path: Path
) -> None:
    failed(cli("compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx", *options), message)
