"""ONNX models whose blocks are read in FP8: DequantizeLinear of E4M3, and `--weights fp8`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

import twellc
from tests.conftest import Cli
from tests.onnx_graphs import D_FF, D_MODEL, D_OUT, GraphMaker, gated
from tests.twellc.test_cli import failed
from twellc.base.arrays import to_numpy, to_torch
from twellc.checks.evaluator import OnnxEvaluator
from twellc.passes.onnx.ffn import find_onnx_blocks
from twellc.plugins.fp8 import Fp8


def with_dequantised_weights(
    dtype: str, down: str, transposed: bool = False, opset: int = 21
) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a gated block of DequantizeLinear of E4M3, and its weights, dequantized, [in, out]."""
    make, dequantized = GraphMaker(dtype, opset=opset), {}

    def weight(name: str, d_in: int, d_out: int, kind: str) -> str:
        q, scale = Fp8.quantize(torch.randn(d_in, d_out) * d_in**-0.5, "tensor" if kind == "groups" else kind)
        scale = scale.to(torch.bfloat16 if dtype == "bf16" and not transposed else torch.float32)
        dequantized[name] = q.double() * scale.double()
        axis = {"axis": 0 if kind == "row" else 1} if kind != "tensor" else {}
        if transposed:
            q, axis = q.t(), {name: 1 - value for name, value in axis.items()}
        stored = scale.flatten() if scale.dim() else scale
        if kind == "groups":
            stored, axis = scale.expand(d_in // 8, d_out), {"axis": 0, "block_size": 8}
        inputs = (
            make.constant(to_numpy(q), f"{name}.q", dtype=to_numpy(q).dtype),
            make.constant(to_numpy(stored), f"{name}.s", dtype=to_numpy(scale).dtype),
        )
        narrows = scale.dtype == torch.float32 and dtype == "bf16"
        names = {"output_dtype": onnx.TensorProto.BFLOAT16} if narrows and opset > 22 else {}
        found = make.node("DequantizeLinear", *inputs, **axis, **names)
        if narrows and not names:
            found = make.node("Cast", found, to=onnx.TensorProto.BFLOAT16)
        return str(make.node("Transpose", found, perm=[1, 0]) if transposed else found)

    gate, up = (make.node("MatMul", "x", weight(name, D_MODEL, D_FF, "column")) for name in ("gate", "up"))
    hidden = make.node("Mul", make.node("Relu", gate), up)
    return make.model(make.node("MatMul", hidden, weight("down", D_FF, D_OUT, down))), dequantized


@pytest.mark.usefixtures("cli")
@pytest.mark.parametrize(
    ("dtype", "down", "transposed", "opset"),
    [
        ("bf16", "column", False, 21),
        ("fp32", "row", True, 21),
        ("bf16", "tensor", True, 21),
        ("bf16", "row", True, 23),
    ],
)
def test_dequantised_products_of_onnx_are_matched(
    dtype: str, down: str, transposed: bool, opset: int, tmp_path: Path
) -> None:
    """From version 23 on DequantizeLinear itself may name the type of what it gives."""
    model, dequantized = with_dequantised_weights(dtype, down, transposed, opset)
    onnx.save(model, tmp_path / "m.onnx")
    manifest = twellc.compile(tmp_path / "m.onnx", backend="none", onnx=tmp_path / "o.onnx")
    assert str(manifest.layers[0].weights) == "weights in 8 bits, as the model has them"
    x = torch.randn(2, 3, D_MODEL).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    (y,) = OnnxEvaluator(tmp_path / "o.onnx").run({"x": x})
    low = x.bfloat16().double()
    hidden = torch.relu((low @ dequantized["gate"]).bfloat16().double()) * (low @ dequantized["up"])
    assert torch.allclose(y.double(), hidden @ dequantized["down"], rtol=2**-7, atol=1e-3)
    assert twellc.check(tmp_path / "m.onnx", tmp_path / "o.onnx").within


@pytest.mark.usefixtures("cli")
def test_scales_of_groups_are_dequantised_and_said(tmp_path: Path) -> None:
    onnx.save(with_dequantised_weights("bf16", "groups")[0], tmp_path / "m.onnx")
    manifest = twellc.compile(tmp_path / "m.onnx", backend="none", onnx=tmp_path / "o.onnx")
    said = "3 weights that the model has in FP8 are dequantised: gate.q, up.q, down.q"
    assert said in manifest.notes and said in twellc.inspect(tmp_path / "m.onnx").description.notes
    assert twellc.check(tmp_path / "m.onnx", tmp_path / "o.onnx").within


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.float8_e5m2])
def test_weights_of_other_types_are_dequantised(kind: Any) -> None:
    make, numbers = GraphMaker("bf16", opset=21), np.random.default_rng(0)

    def weight(name: str, d_in: int, d_out: int) -> str:
        levels = make.constant(numbers.integers(-7, 8, (d_in, d_out)), name, dtype=kind)
        return str(make.node("DequantizeLinear", levels, make.constant(0.1, f"{name}.s")))

    gate, up = (make.node("MatMul", "x", weight(name, D_MODEL, D_FF)) for name in ("gate", "up"))
    hidden = make.node("Mul", make.node("Relu", gate), up)
    found = find_onnx_blocks(
        make.model(make.node("MatMul", hidden, weight("down", D_FF, D_OUT))), torch.bfloat16, "all"
    )
    assert [layer.reason for layer in found.layers] == ["matches"]


@pytest.mark.usefixtures("cli")
def test_an_onnx_model_is_quantised(tmp_path: Path) -> None:
    onnx.save(gated("fp32", biases=True), tmp_path / "m.onnx")
    manifest = twellc.compile(tmp_path / "m.onnx", backend="none", onnx=tmp_path / "o.onnx", weights="fp8")
    assert str(manifest.layers[0].weights) == "weights in 8 bits, quantised"
    written = onnx.load(tmp_path / "o.onnx")
    named = {each.name: onnx.numpy_helper.to_array(each) for each in written.graph.initializer}
    (up,) = [each for each in onnx.load(tmp_path / "m.onnx").graph.initializer if each.name == "mlp.up.weight"]
    q, scale = Fp8.quantize(to_torch(onnx.numpy_helper.to_array(up)).t(), "row")
    assert torch.equal(to_torch(named["mlp.up.weight_e4m3"]).float(), q.float())
    assert torch.equal(to_torch(named["mlp.up.weight_scale"]), scale)
    result = twellc.check(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert result.within and (result.blocks[0].quantisation or 0) > 0.01


def test_weights_that_are_not_finite_are_refused(cli: Cli, tmp_path: Path) -> None:
    model = gated("fp32")
    (down,) = [each for each in model.graph.initializer if each.name == "mlp.down.weight"]
    values = onnx.numpy_helper.to_array(down).copy()
    values[3, 5] = np.inf
    down.CopyFrom(onnx.numpy_helper.from_array(values, down.name))
    onnx.save(model, tmp_path / "m.onnx")
    given = ("compile", tmp_path / "m.onnx", "--backend", "none", "--onnx", tmp_path / "o.onnx")
    message = "w_down: cannot be quantised: 1 of 960 weights are NaN, or infinite in float32"
    failed(cli(*given, "--weights", "fp8"), message)
    assert not (tmp_path / "o.onnx").exists()
    result = cli(
        *given[:2],
        "--backend",
        "none",
        "--onnx",
        tmp_path / "o.onnx",
        "--weights",
        "fp8",
        "--fp8-error",
        "0.1",
        "--text",
        tmp_path / "m.onnx",
    )
    assert "an ONNX file is not run" in result.output
