"""Names of inputs and outputs: the model's, or said to be others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.export import register_dataclass

import twellc
from tests.models import Pair

register_dataclass(Pair)
pytestmark = pytest.mark.usefixtures("compiles_here")


Form = Callable[[Any, Tensor, Tensor], Any]


class Returning(nn.Module):
    """Returns what `form` makes of itself, of a block's result and of the mask."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.up, self.down, self.form = nn.Linear(16, 64), nn.Linear(64, 16), form
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.form(self, x + self.down(torch.relu(self.up(x))), mask)


RENAMED = "output {} is called {}_out, since {} has its name"
# What a module returns, the names of the outputs, and notes on them.
RETURNED: dict[str, tuple[Form, list[str], list[str]]] = {
    "an input": (
        lambda s, y, mask: {"y": y, "mask": mask}, ["y", "mask_out"], [RENAMED.format("mask", "mask", "an input")]
    ),
    "a cast": (lambda s, y, mask: (y, mask.to(torch.float32)), ["output_0", "output_1"], []),
    "a state": (lambda s, y, mask: {"x": y}, ["x_out"], [RENAMED.format("x", "x", "an input")]),
    "twice": (lambda s, y, mask: {"y": y, "z": y}, ["y", "z"], []),
    "a constant": (lambda s, y, mask: {"y": y, "table": s.table}, ["y", "table"], []),
    "a weight": (lambda s, y, mask: {"y": y, "w": s.up.weight}, ["y", "w"], []),
    "names of nodes": (
        lambda s, y, mask: {"relu": y, "up.weight": mask + 1, "linear": y * 2}, ["relu", "up.weight", "linear"], []
    ),
    "nested": (
        lambda s, y, mask: {"y": {"a": y, "b": [y + 1]}, "y.a": mask + 1},
        ["y.a", "y.b.0", "y.a_out"],
        [RENAMED.format("y.a", "y.a", "another output")],
    ),
    "unnamed": (lambda s, y, mask: {"": y, "b": mask + 1}, ["output_0", "b"], []),
    "unicode": (lambda s, y, mask: {"ü/β x": y}, ["ü/β x"], []),
    "a dataclass": (lambda s, y, mask: Pair(y, mask + 1), ["hidden", "other"], []),
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", RETURNED)
def test_names_of_a_module(tmp_path: Path, form: str) -> None:
    function, outputs, renamed = RETURNED[form]
    model, path = Returning(function).eval(), tmp_path / "m.onnx"
    example: Any = {"args": (torch.randn(4, 16), torch.ones(4))}
    manifest = twellc.compile(model, path, backend="none", **example)
    graph = onnx.load(path).graph
    onnx.checker.check_model(path, full_check=True)
    assert [value.name for value in graph.input] == ["x", "mask"]
    assert [value.name for value in graph.output] == outputs
    assert [note for note in manifest.notes if "is called" in note] == renamed
    assert twellc.check(model, path, **example).within


def onnx_file(path: Path, outputs: list[str], x: str = "x", y: str = "y") -> Path:
    weights = {"W1": torch.randn(16, 64).numpy(), "W2": torch.randn(64, 16).numpy()}
    shapes = {x: ["n", 16], y: ["n", 16], "mask": ["n"], "W1": [16, 64]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    nodes = [("MatMul", [x, "W1"], "h"), ("Relu", ["h"], "a"), ("MatMul", ["a", "W2"], y)]
    graph = helper.make_graph(
        [helper.make_node(kind, read, [written]) for kind, read, written in nodes], "g",
        [values[x], values["mask"]], [values[name] for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("given", "outputs"),
    [
        (["y", "mask"], ["y", "mask_out"]),
        (["mask", "y", "mask"], ["mask_out", "y", "mask_out_2"]),
        (["y", "y"], ["y", "y_out"]),
        (["y", "W1"], ["y", "W1"]),
    ],
)
def test_names_of_an_onnx_file(tmp_path: Path, given: list[str], outputs: list[str]) -> None:
    model, path = onnx_file(tmp_path / "model.onnx", given), tmp_path / "m.onnx"
    manifest = twellc.compile(model, path, backend="none")
    graph = onnx.load(path).graph
    onnx.checker.check_model(path, full_check=True)
    assert [value.name for value in graph.input] == ["x", "mask"]
    assert [value.name for value in graph.output] == outputs
    assert sum("is called" in note for note in manifest.notes) == len(set(enumerate(outputs)) - set(enumerate(given)))
    assert twellc.check(model, path).within


def test_a_plan_returns_an_input(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    model = onnx_file(tmp_path / "model.onnx", ["out y/1", "mask"], "ü/in x", "out y/1")
    manifest = twellc.compile(model, tmp_path / "m.plan", backend="tensorrt-rtx")
    assert manifest.plan is not None
    assert [tensor.name for tensor in manifest.plan.inputs] == ["ü/in x", "mask"]
    assert [tensor.name for tensor in manifest.plan.outputs] == ["out y/1", "mask_out"]


def test_a_number_that_varies_is_refused() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: int) -> Tensor:
            return x * scale

    dynamic: Any = ({}, torch.export.Dim.DYNAMIC)
    with pytest.raises(twellc.UserError, match="input scale is a number that varies"):
        twellc.inspect(Scaled().eval(), args=(torch.randn(4, 16), 3), dynamic_shapes=dynamic)
