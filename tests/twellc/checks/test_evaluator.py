"""Running ONNX files with twell nodes without TensorRT."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.models import Gated, Plain, Residual, canonical, rewrite, run
from tests.tolerance import assert_as_accurate, assert_same
from tests.twellc.checks.runs import twell_nodes
from twellc.base.arrays import to_numpy, to_torch
from twellc.base.errors import UserError
from twellc.checks.evaluator import ExpertsNode, OnnxEvaluator, PluginNode, plugin_nodes
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.passes.precision import widen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_round_trip(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (2, 3)):
        tensor = (torch.randn(shape) * 3).to(dtype)
        for each in (tensor, tensor.t() if tensor.dim() == 2 else tensor):
            back = to_torch(to_numpy(each))
            assert torch.equal(back, each) and back.dtype == dtype


def evaluator_of(program: ExportedProgram, path: Path, outputs: Sequence[str] = ("y",)) -> OnnxEvaluator:
    save_onnx(export_onnx(program, ["x"], list(outputs), {}), path)
    return OnnxEvaluator(path)


class Many(nn.Module):
    """Gated and plain blocks with and without biases, over one input."""

    def __init__(self) -> None:
        super().__init__()
        gated = [Gated(biases=biases, d_ff=300) for biases in ("", "gud", "d", "gu")]
        plain = [Plain(biases=biases, d_ff=300) for biases in ("", "ud", "d", "u")]
        self.blocks = nn.ModuleList(gated + plain)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in self.blocks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    """A block alone is the torch op itself, so equal bit by bit."""
    program = rewrite(canonical(Many().to(dtype), torch.randn(4, 16).to(dtype), dynamic=({0: Dim("n")},)))
    names = [f"y{i}" for i in range(8)]
    evaluator = evaluator_of(program, tmp_path / "m.onnx", names)
    assert (evaluator.inputs, evaluator.outputs) == (["x"], names)
    for rows in (1, 4, 33):
        x = torch.randn(rows, 16).to(dtype)
        for actual, expected in zip(evaluator.run({"x": x}), run(program, x), strict=True):
            assert actual.dtype == dtype
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_products_round_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """MatMul and Gemm of the evaluator sum in float32, as torch and GPUs do."""
    module = nn.Sequential(nn.Linear(512, 64), nn.Linear(64, 512, bias=False)).to(dtype)
    x = torch.randn(16, 512).to(dtype)
    program = canonical(module, x)
    (actual,) = evaluator_of(program, tmp_path / "m.onnx").run({"x": x})
    assert_as_accurate(actual, run(program)[0], run(widen(program), x.double())[0])


def model_with(*nodes: onnx.NodeProto) -> bytes:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph(list(nodes), "g", [value], [output])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("twell", 1), helper.make_opsetid("other", 1)]
    content: bytes = helper.make_model(graph, opset_imports=imports).SerializeToString()
    return content


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_node_by_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each gives what it gives in the graph; in float64 what the block of torch gives; and how many neurons fire."""
    module = Many().to(dtype)
    program = rewrite(canonical(module, torch.randn(4, 16).to(dtype), dynamic=({0: Dim("n")},)))
    x = torch.randn(5, 16).to(dtype)
    whole = evaluator_of(program, tmp_path / "m.onnx", [f"y{i}" for i in range(8)]).run({"x": x})
    nodes = plugin_nodes(onnx.load(tmp_path / "m.onnx"))
    for node, block, y in zip(nodes, module.blocks, whole, strict=True):
        assert isinstance(node, PluginNode) and node.widths == (16, 300, 16)
        assert torch.equal(node.run(x, None), y)
        first = block.gate if isinstance(block, Gated) else block.up
        with torch.no_grad():
            assert node.active(x) == int((first(x) > 0).sum())
            assert_same(node.run(x.double(), None), copy.deepcopy(block).double()(x.double()))


def test_experts_by_themselves() -> None:
    """Numbers below 0 count from the last expert, and one behind the last one adds nothing, and is not counted."""
    up, down, x = (torch.randn(3, rows, 8).bfloat16() for rows in (16, 16, 4))
    matrices = {"up": up, "down": down}
    node = ExpertsNode({name: numpy_helper.from_array(to_numpy(each)) for name, each in matrices.items()}, "relu", 0.0)
    x, ids, weights = x[0], torch.tensor([[0, -1], [2, 1], [3, 1], [-3, 3]]), torch.rand(4, 2)
    y, active = torch.zeros(4, 8, dtype=torch.float64), 0
    for token, expert, weight in ((0, 0, 0), (0, 2, 1), (1, 2, 0), (1, 1, 1), (2, 1, 1), (3, 0, 0)):
        hidden = (up[expert].double() @ x[token].double()).relu()
        y[token] += weights[token, weight] * (hidden @ down[expert].double())
        active += int(hidden.count_nonzero())
    assert_same(node.run(x.double(), ids.flatten(), weights.flatten()), y)
    assert node.active(x, ids.flatten(), weights) == active


@pytest.mark.parametrize("build", [Gated, Plain])
def test_a_node_with_a_residual(build: Any, tmp_path: Path) -> None:
    module = Residual(build(biases="gud" if build is Gated else "ud")).bfloat16()
    program = rewrite(canonical(module, torch.randn(4, 16).bfloat16(), dynamic=({0: Dim("n")},)))
    x = torch.randn(5, 16).bfloat16()
    (whole,) = evaluator_of(program, tmp_path / "m.onnx").run({"x": x})
    graph = onnx.load(tmp_path / "m.onnx")
    assert [node.op_type for node in graph.graph.node].count("Add") == 1, "x + 1"
    (node,) = plugin_nodes(graph)
    assert isinstance(node, PluginNode) and node.residual
    assert torch.equal(node.run(x + 1, x), whole)
    with torch.no_grad():
        wide, block = x.double(), copy.deepcopy(module.ffn).double()
        assert_same(node.run(wide + 1, wide), wide + block(wide + 1))


def test_nodes_that_are_none_of_ours(tmp_path: Path) -> None:
    save_onnx(export_onnx(rewrite(canonical(Gated(biases="d"))), ["x"], ["y"], {}), tmp_path / "m.onnx")

    def refused(message: str, change: Callable[[onnx.NodeProto, onnx.GraphProto], Any]) -> None:
        model = onnx.load(tmp_path / "m.onnx")
        (node,) = twell_nodes(model)
        change(node, model.graph)
        with pytest.raises(ValueError, match=message):
            plugin_nodes(model)

    def compute(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
        graph.node.insert(0, helper.make_node("Neg", [node.input[1]], ["negated"]))
        node.input[1] = "negated"

    def drop(name: str) -> Callable[[onnx.NodeProto, onnx.GraphProto], Any]:
        return lambda node, _: node.attribute.remove(next(each for each in node.attribute if each.name == name))

    for change in (*map(drop, ("down_bias", "activation", "residual", "hot")), lambda node, _: node.input.pop()):
        refused("has not the fields and inputs of one", change)
    refused(r"negated, a weight of the plugin node .* is not a constant", compute)
    assert plugin_nodes(onnx.load_model_from_string(model_with(helper.make_node("Relu", ["x"], ["y"])))) == []


BAD: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello world, this is no model",
    "zip": b"PK\3\4" + b"\0" * 40,
    "no nodes": model_with(),
    "unknown twell node": model_with(helper.make_node("TwellNorm", ["x"], ["y"], domain="twell")),
    "unknown operator": model_with(helper.make_node("Whatever", ["x"], ["y"])),
    "unknown domain": model_with(helper.make_node("Relu", ["x"], ["y"], domain="other")),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(BAD[kind])
    with pytest.raises(UserError, match="is not an ONNX model that can be evaluated"):
        OnnxEvaluator(path)


def test_external_data_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twellc.export.onnx_export._LARGEST_SINGLE_FILE", 0)
    path, data = save_onnx(export_onnx(rewrite(canonical(Gated())), ["x"], ["y"], {}), tmp_path / "m.onnx")
    OnnxEvaluator(path)
    data.unlink()
    with pytest.raises(UserError, match="is not an ONNX model that can be evaluated"):
        OnnxEvaluator(path)


def test_bfloat16_is_ml_dtypes() -> None:
    """The arrays that onnx's evaluator works with."""
    array: Any = to_numpy(torch.tensor([1.5], dtype=torch.bfloat16))
    assert array.dtype == np.dtype(ml_dtypes.bfloat16)
