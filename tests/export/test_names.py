"""Names of inputs and outputs: the model's, or said to be others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import twellc

pytestmark = pytest.mark.usefixtures("compiles_here")


class Returning(nn.Module):
    """Returns what `form` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.up, self.down, self.form = nn.Linear(16, 64), nn.Linear(64, 16), form
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        y = x + self.down(torch.relu(self.up(x)))
        return {
            "input": lambda: {"y": y, "mask": mask},
            "cast": lambda: (y, mask.to(torch.float32)),
            "state": lambda: {"x": y},
            "twice": lambda: {"y": y, "z": y},
            "constant": lambda: {"y": y, "table": self.table},
            "weight": lambda: {"y": y, "w": self.up.weight},
            "nodes": lambda: {"relu": y, "up.weight": mask + 1, "linear": y * 2},
            "nested": lambda: {"y": {"a": y, "b": [y + 1]}, "y.a": mask + 1},
            "unnamed": lambda: {"": y, "b": mask + 1},
            "unicode": lambda: {"ü/β x": y},
        }[self.form]()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("form", "outputs", "renamed"),
    [
        ("input", ["y", "mask_out"], ["output mask is called mask_out, since an input has its name"]),
        ("cast", ["output_0", "output_1"], []),
        ("state", ["x_out"], ["output x is called x_out, since an input has its name"]),
        ("twice", ["y", "z"], []),
        ("constant", ["y", "table"], []),
        ("weight", ["y", "w"], []),
        ("nodes", ["relu", "up.weight", "linear"], []),
        ("nested", ["y.a", "y.b.0", "y.a_out"], ["output y.a is called y.a_out, since another output has its name"]),
        ("unnamed", ["output_0", "b"], []),
        ("unicode", ["ü/β x"], []),
    ],
)
def test_names_of_a_module(tmp_path: Path, form: str, outputs: list[str], renamed: list[str]) -> None:
    model, path = Returning(form).eval(), tmp_path / "m.onnx"
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


def test_dataclasses(tmp_path: Path) -> None:
    from torch.export import register_dataclass

    from tests.models import Pair

    register_dataclass(Pair)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Pair:
            return Pair(self.down(torch.relu(self.up(x))), x + 1)

    twellc.compile(Model().eval(), tmp_path / "m.onnx", args=(torch.randn(4, 16),), backend="none")
    assert [value.name for value in onnx.load(tmp_path / "m.onnx").graph.output] == ["hidden", "other"]


def test_a_number_that_varies_is_refused() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: int) -> Tensor:
            return x * scale

    dynamic: Any = ({}, torch.export.Dim.DYNAMIC)
    with pytest.raises(twellc.UserError, match="input scale is a number that varies"):
        twellc.inspect(Scaled().eval(), args=(torch.randn(4, 16), 3), dynamic_shapes=dynamic)
