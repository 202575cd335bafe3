"""Running ONNX files with twell nodes without TensorRT."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim

from tests.models import Gated, Plain, Residual, canonical, canonicalize, rewrite, run
from tests.tolerance import assert_as_accurate, assert_same
from twellc.base.arrays import to_numpy, to_torch
from twellc.base.errors import UserError
from twellc.checks.evaluator import OnnxEvaluator, plugin_nodes
from twellc.compiling.translate_torch import translate
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.loaders.loaded import LoadedModel
from twellc.options.commands import CompileOptions
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner
from twellc.passes.precision import widen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert torch.equal(to_torch(to_numpy(tensor)), tensor)
    assert to_torch(to_numpy(tensor)).dtype == dtype
    if len(shape) == 2:
        assert torch.equal(to_torch(to_numpy(tensor.t())), tensor.t())


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
    save_onnx(export_onnx(program, ["x"], names, {}), tmp_path / "m.onnx")
    evaluator = OnnxEvaluator(tmp_path / "m.onnx")
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
    save_onnx(export_onnx(program, ["x"], ["y"], {}), tmp_path / "m.onnx")
    (actual,) = OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})
    assert_as_accurate(actual, run(program)[0], run(widen(program), x.double())[0])


def test_float32_program(tmp_path: Path) -> None:
    module, x = nn.Sequential(Residual(Gated()), nn.LayerNorm(16), nn.Linear(16, 8)), torch.randn(5, 16)
    program = rewrite(canonical(module, x))
    save_onnx(export_onnx(program, ["x"], ["y"], {}), tmp_path / "m.onnx")
    assert_same(OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})[0], run(program)[0])


@pytest.mark.usefixtures("remembered_models")
def test_language_model_with_padding(llama: Path, load_once: Callable[..., LoadedModel], tmp_path: Path) -> None:
    """Real tokens get the logits that torch gives; places of padding are not compared."""
    translation = translate(CompileOptions(model=llama, backend="none", padding="mask"), lambda step: None)
    save_onnx(translation.graph, tmp_path / "m.onnx")
    evaluator = OnnxEvaluator(tmp_path / "m.onnx")
    assert sorted(evaluator.inputs) == ["attention_mask", "input_ids"]
    assert evaluator.outputs == ["logits"]
    program = canonicalize(load_once(TracingOptions(llama, padding="mask")).program)
    truth = widen(program)
    ids = torch.randint(2, 96, (3, 11))
    for side in ("left", "right", "none"):
        mask = torch.ones_like(ids)
        if side != "none":
            mask[0, slice(None, 4) if side == "left" else slice(-4, None)] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        results = [
            evaluator.run(inputs)[0],
            Runner(program)(inputs)[0],
            Runner(truth)(inputs)[0],
        ]
        candidate, plain, true = (result[mask == 1] for result in results)
        assert_as_accurate(candidate.bfloat16(), plain.bfloat16(), true)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements(axis: int, tmp_path: Path) -> None:
    """Of data that is larger than the indices, as in BERT's token types, and with indices from the end."""
    data = torch.randn(40, 70)
    indices = torch.randint(-40, 40, (3, 5))
    node = helper.make_node("GatherElements", ["data", "indices"], ["y"], axis=axis)
    values = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (("data", 1, [40, 70]), ("indices", 7, [3, 5]), ("y", 1, [3, 5]))
    ]
    model = helper.make_model(
        helper.make_graph([node], "g", values[:2], values[2:]), opset_imports=[helper.make_opsetid("", 20)]
    )
    (y,) = OnnxEvaluator(tmp_path / "m.onnx", model).run({"data": data, "indices": indices})
    for row, column in itertools.product(range(3), range(5)):
        at = int(indices[row, column])
        assert y[row, column] == (data[at, column] if axis == 0 else data[row, at])


def test_nan_in_x(tmp_path: Path) -> None:
    program = rewrite(canonical(Gated().bfloat16(), torch.randn(4, 16).bfloat16()))
    save_onnx(export_onnx(program, ["x"], ["y"], {}), tmp_path / "m.onnx")
    x = torch.randn(4, 16).bfloat16()
    x[2, 3] = torch.nan
    (y,) = OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})
    assert y[2].isnan().all()
    assert y[[0, 1, 3]].isfinite().all()


# ---- what is not a model ----


def model_with(*nodes: onnx.NodeProto) -> bytes:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    graph = helper.make_graph(list(nodes), "g", [value], [output])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("twell", 1), helper.make_opsetid("other", 1)]
    content: bytes = helper.make_model(graph, opset_imports=imports).SerializeToString()
    return content


# ---- plugin nodes by themselves ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_node_by_itself(dtype: torch.dtype, tmp_path: Path) -> None:
    """Each gives what it gives in the graph; in float64 what the block of torch gives; and how many neurons fire."""
    module = Many().to(dtype)
    program = rewrite(canonical(module, torch.randn(4, 16).to(dtype), dynamic=({0: Dim("n")},)))
    save_onnx(export_onnx(program, ["x"], [f"y{i}" for i in range(8)], {}), tmp_path / "m.onnx")
    nodes = plugin_nodes(onnx.load(tmp_path / "m.onnx"))
    x = torch.randn(5, 16).to(dtype)
    whole = OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})
    for node, block, y in zip(nodes, module.blocks, whole, strict=True):
        assert (node.dtype, node.widths) == (dtype, (16, 300, 16))
        assert torch.equal(node.run(x, None), y)
        first = block.gate if isinstance(block, Gated) else block.up
        with torch.no_grad():
            assert node.active(x) == int((first(x) > 0).sum())
            assert_same(node.run(x.double(), None), copy.deepcopy(block).double()(x.double()))


@pytest.mark.parametrize("build", [Gated, Plain])
def test_a_node_with_a_residual(build: Any, tmp_path: Path) -> None:
    module = Residual(build(biases="gud" if build is Gated else "ud")).bfloat16()
    program = rewrite(canonical(module, torch.randn(4, 16).bfloat16(), dynamic=({0: Dim("n")},)))
    save_onnx(export_onnx(program, ["x"], ["y"], {}), tmp_path / "m.onnx")
    graph = onnx.load(tmp_path / "m.onnx")
    assert [node.op_type for node in graph.graph.node].count("Add") == 1, "x + 1"
    (node,) = plugin_nodes(graph)
    assert node.residual
    x = torch.randn(5, 16).bfloat16()
    (whole,) = OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})
    assert torch.equal(node.run(x + 1, x), whole)
    with torch.no_grad():
        assert_same(
            node.run((x + 1).double(), x.double()), x.double() + copy.deepcopy(module.ffn).double()((x + 1).double())
        )


def test_nodes_that_are_none_of_ours(tmp_path: Path) -> None:
    save_onnx(export_onnx(rewrite(canonical(Gated(biases="d"))), ["x"], ["y"], {}), tmp_path / "m.onnx")

    def changed(change: Callable[[onnx.NodeProto, onnx.GraphProto], Any]) -> onnx.ModelProto:
        model = onnx.load(tmp_path / "m.onnx")
        (node,) = (node for node in model.graph.node if node.domain == "twell")
        change(node, model.graph)
        return model

    def compute(node: onnx.NodeProto, graph: onnx.GraphProto) -> None:
        graph.node.insert(0, helper.make_node("Neg", [node.input[1]], ["negated"]))
        node.input[1] = "negated"

    def drop(name: str) -> Callable[[onnx.NodeProto, onnx.GraphProto], Any]:
        return lambda node, _: node.attribute.remove(next(each for each in node.attribute if each.name == name))

    for change in (
        drop("down_bias"),
        drop("activation"),
        drop("residual"),
        drop("hot"),
        lambda node, _: node.input.pop(),
    ):
        with pytest.raises(ValueError, match="has not the fields and inputs of one"):
            plugin_nodes(changed(change))
    with pytest.raises(ValueError, match=r"negated, a weight of the plugin node .* is not a constant"):
        plugin_nodes(changed(compute))
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
