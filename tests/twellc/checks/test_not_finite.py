"""`twellc check` of models that are NaN or infinite in low precision, in float64, or for the inputs at hand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.export import Dim

from tests.conftest import Cli
from tests.models import export
from tests.twellc.checks.runs import graph_of, run_check
from twellc.checks.accuracy import DiscreteAccuracy, OutputAccuracy
from twellc.compiling.result import METADATA_KEY
from twellc.compiling.settings import UNKNOWN


class Squared(nn.Module):
    """A squared-ReLU block whose hidden values, of about the scale squared, are finite in float32 alone."""

    def __init__(self, scale: float = 800.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        with torch.no_grad():
            self.up.weight.mul_(scale)
            self.down.weight.mul_(scale**-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


class Ends(nn.Module):
    """Squared, with outputs of other kinds."""

    def __init__(self, ends: str) -> None:
        super().__init__()
        self.block, self.ends = Squared(), ends

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.block(x)
        ends = {"argmax": (y.argmax(-1),), "beside": (y, x * 2), "empty": (x * 2, x[:, :0]), "one row": (y[:1], x * 2)}
        return ends[self.ends]


def save(module: nn.Module, path: Path) -> Path:
    program = export(module.eval(), torch.randn(4, 64), dynamic=({0: Dim("n", min=1, max=64)},))
    torch.export.save(program, path)
    return path


def compiled(model: Path, dtype: str | None = None, layers: str = "auto") -> Path:
    return graph_of(model, model.with_suffix(f".{dtype}.onnx"), dtype=dtype, layers=layers)


def squared_graph(up: Tensor, down: Tensor, kind: int, output: str = "y") -> onnx.ModelProto:
    weights = {"up": up, "down": down}
    constants = [numpy_helper.from_array(weight.detach().t().numpy(), name) for name, weight in weights.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "up"], ["z"]),
        helper.make_node("Relu", ["z"], ["a"]),
        helper.make_node("Mul", ["a", "a"], ["h"]),
        helper.make_node("MatMul", ["h", "down"], [output]),
    ]
    values = [helper.make_tensor_value_info(name, kind, ["n", 64]) for name in ("x", output)]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_that_overflows(tmp_path: Path, cli: Cli) -> None:
    """NaN for NaN is not agreement; another dtype is named, and is within tolerance."""
    model = save(Squared(), tmp_path / "m.pt2")
    result = run_check(model, compiled(model, "fp16"))
    (output,), (block,) = result.outputs, result.blocks
    assert isinstance(output, OutputAccuracy)
    assert (result.within, result.causes, result.first_divergence) == (False, ["low_precision"], "down")
    assert (output.stray, output.plain_stray, output.compared) == (output.elements, output.elements, 0)
    assert (block.accuracy.stray, block.accuracy.compared) == (output.elements, 0)
    assert output.separation is not None and output.separation.rewrite.relative < 1e-12, "the rewriting is still judged"
    assert any("overflows float16; compile it with --dtype bf16" in note for note in result.notes)
    printed = cli("check", model, compiled(model, "fp16"))
    assert printed.exit_code == 1
    assert f"{output.elements} of {output.elements}" in printed.stdout
    assert "OUTSIDE TOLERANCE; first block that diverges: down; cause: low precision" in printed.stdout
    found = json.loads(cli("check", model, compiled(model, "fp16"), "--json").stdout)
    assert (found["within"], found["outputs"][0]["candidate"]["relative"]) == (False, None)
    assert found["outputs"][0]["stray"] == output.elements
    good = cli("check", model, compiled(model, "bf16"))
    assert (good.exit_code, "NaN or infinite in" in good.stdout) == (0, False)


def test_an_onnx_file_that_overflows(tmp_path: Path) -> None:
    block, model = Squared(), tmp_path / "m.onnx"
    onnx.save(squared_graph(block.up.weight.half(), block.down.weight.half(), TensorProto.FLOAT16), model)
    result = run_check(model, compiled(model))
    (output,) = result.outputs
    assert isinstance(output, OutputAccuracy)
    assert (result.within, result.causes, output.compared) == (False, ["low_precision"], 0)


@pytest.mark.parametrize("ends", ["beside", "one row"])
def test_one_output_that_overflows(ends: str, tmp_path: Path) -> None:
    """Others that are right excuse nothing."""
    model = save(Ends(ends), tmp_path / "m.pt2")
    result = run_check(model, compiled(model, "fp16"))
    y, other = result.outputs
    assert (result.within, y.within, other.within) == (False, False, True)
    assert run_check(model, compiled(model, "bf16")).within


def test_a_candidate_that_is_right_where_the_plain_model_is_not(tmp_path: Path) -> None:
    """A graph in float32 that says it is of float16: the plain model is NaN, the candidate is right."""
    module = Squared()
    model = save(module, tmp_path / "m.pt2")
    settings = json.dumps({"settings": replace(UNKNOWN, dtype="fp16").to_json()})
    for scale, within in ((1.0, True), (1.02, False)):
        candidate = squared_graph(module.up.weight, module.down.weight * scale, TensorProto.FLOAT, "output")
        helper.set_model_props(candidate, {METADATA_KEY: settings})
        onnx.save(candidate, tmp_path / "c.onnx")
        result = run_check(model, tmp_path / "c.onnx")
        (output,) = result.outputs
        assert isinstance(output, OutputAccuracy)
        assert (result.within, output.stray, output.plain_stray) == (within, 0, output.elements)
        assert any("in the plain model in float16 alone" in note for note in result.notes)


def test_a_discrete_output_of_what_overflows(tmp_path: Path) -> None:
    """The argmax of NaN is the first place, in the candidate and in the plain model."""
    model = save(Ends("argmax"), tmp_path / "m.pt2")
    result = run_check(model, compiled(model, "fp16"))
    (output,) = result.outputs
    assert isinstance(output, DiscreteAccuracy) and output.lacks_yardstick
    assert not output.within and not result.within
    assert any("cannot be used as a reference" in note for note in result.notes)
    assert run_check(model, compiled(model, "bf16")).within


def test_an_output_without_elements(tmp_path: Path) -> None:
    model = save(Ends("empty"), tmp_path / "m.pt2")
    result = run_check(model, compiled(model, layers="none"))
    assert result.within
    assert result.outputs[1].elements == 0
    assert any("has no elements for these inputs" in note for note in result.notes)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_inputs_that_are_not_finite(value: float, tmp_path: Path) -> None:
    """What float64 makes of them is required; where it is all there is, nothing was compared."""
    model = save(Squared(1.0), tmp_path / "m.pt2")
    graph = compiled(model, "bf16")
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    x[1, 5] = value
    np.savez(tmp_path / "some.npz", x=x)
    result = run_check(model, graph, arrays=tmp_path / "some.npz")
    (output,) = result.outputs
    assert isinstance(output, OutputAccuracy)
    assert (result.within, output.not_finite, output.compared, output.stray) == (True, 64, 128, 0)
    np.savez(tmp_path / "all.npz", x=np.full_like(x, np.nan))
    result = run_check(model, graph, arrays=tmp_path / "all.npz")
    (output,) = result.outputs
    assert isinstance(output, OutputAccuracy)
    assert (result.within, output.compared, result.causes) == (False, 0, [])
    assert any("no element of output could be compared" in note for note in result.notes)
