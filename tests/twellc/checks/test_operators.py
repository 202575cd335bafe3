"""Operators of ONNX as the evaluator computes them, compared with torch, in the versions in which they differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from onnx import TensorProto, helper
from torch import Tensor

from twellc.base.arrays import to_numpy
from twellc.checks.evaluator import OnnxEvaluator
from twellc.passes.onnx.precision import widen_onnx


def evaluate(op: str, opset: int, *operands: Tensor | None, **attributes: Any) -> Tensor:
    names = ["" if each is None else f"x{index}" for index, each in enumerate(operands)]
    given = {name: each for name, each in zip(names, operands, strict=True) if each is not None}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(to_numpy(each).dtype), None)
        for name, each in given.items()
    ]
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attributes)], "g", inputs, [onnx.ValueInfoProto()])
    graph.output[0].name = "y"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    (y,) = OnnxEvaluator(Path("m.onnx"), model).run(given)
    return y


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def integers(*values: int) -> Tensor:
    return torch.tensor(values)


X, IMAGE, KERNEL = numbers(2, 5, 7), numbers(2, 4, 9, 8), numbers(4, 3, 3, 3)
NAN = X.clone()
NAN[0, 0, 0] = torch.nan
ONE, ZERO, MEAN, VARIANCE = torch.ones(4), torch.zeros(4), numbers(4), numbers(4).square() + 0.5
BYTES = (X * 10).to(torch.int8)
SCALES = torch.tensor([0.1, 0.2, 0.4, 0.3, 0.5])


def rows(of: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Of a tensor as a matrix with that many rows."""
    return of(X.reshape(count, -1)).reshape(X.shape)


def largest(x: Tensor) -> Tensor:
    return F.one_hot(x.argmax(-1), x.shape[-1]).float()


# Operator, version, operands, attributes, and what comes out.
Case = tuple[str, int, tuple[Tensor | None, ...], dict[str, Any], Tensor]
PADDED = F.pad(F.pad(X, (-2, 1), value=2.5), (0, 0, 0, 0, 3, 0), value=2.5)
GRID, HOT = torch.tanh(numbers(2, 3, 3, 2)), F.one_hot(torch.tensor([[1, 3]]), 4).float()
PICKED = torch.tensor([[3, -1], [5, 0]])


def quantised(opset: int) -> list[Case]:
    one, plane = torch.tensor(1, dtype=torch.int8), BYTES[:, :, 0]
    made = ((X * 4).round() + 1).clamp(-128, 127).to(torch.int8)
    by_channel = (BYTES.float() - BYTES[0, :, :1]) * SCALES[:, None]
    axes = () if opset < 13 else (1, -2)
    operator = "DequantizeLinear"
    return [
        (operator, opset, (plane, torch.tensor(0.5), one), {}, (plane.float() - 1) / 2),
        (operator, opset, (BYTES, torch.tensor(0.5)), {}, BYTES.float() / 2),
        *((operator, opset, (BYTES, SCALES, BYTES[0, :, 0]), {"axis": axis}, by_channel) for axis in axes),
        ("QuantizeLinear", opset, (X, torch.tensor(0.25), one), {}, made),
    ]


def transposed(groups: int) -> Case:
    bias, options = numbers(3 * groups), {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": groups}
    return (
        *("ConvTranspose", 11, (IMAGE, KERNEL, bias), options),
        F.conv_transpose2d(IMAGE, KERNEL, bias, 2, 1, groups=groups),
    )


NORMAL = F.batch_norm(IMAGE, MEAN, VARIANCE, MEAN, ONE)
RESIZED = F.interpolate(IMAGE, size=(12, 5), mode="bilinear")
NEAREST = F.grid_sample(IMAGE, GRID, mode="nearest", align_corners=False)
GATHERED = numbers(40, 70)[:2].gather(1, torch.tensor([[3, 69], [5, 0]]))
CASES: list[Case] = [
    # Pads that cut off
    ("Pad", 17, (X, integers(0, 1, -1, 0, -1, 2)), {}, F.pad(X, (-1, 2, 1, -1))),
    ("Pad", 17, (X, integers(-1, 0, 0, 0, -5, 0)), {}, X[1:, :0]),
    ("Pad", 17, (X[:, :1], integers(0, 1, 0, 0, -1, 0)), {}, torch.zeros(2, 1, 7)),
    ("Pad", 18, (X, integers(-2, 3), None, integers(-1)), {}, F.pad(X, (-2, 3))),
    ("Pad", 21, (X, integers(-2, 3, 1, 0), torch.tensor(2.5), integers(2, 0)), {}, PADDED),
    ("Pad", 11, (X, integers(0, 1, 0, 0, 0, -2), torch.tensor([2.5])), {}, F.pad(X, (0, -2, 1, 0), value=2.5)),
    ("Pad", 10, (X,), {"pads": [0, 1, 0, 0, 0, -2], "value": 2.5}, F.pad(X, (0, -2, 1, 0), value=2.5)),
    ("Pad", 17, (X, integers(0, 0, 3, 0, 0, -2)), {"mode": "edge"}, F.pad(X, (3, -2), mode="replicate")),
    ("Pad", 17, (X, integers(0, 0, 3, 0, 0, 2)), {"mode": "reflect"}, F.pad(X, (3, 2), mode="reflect")),
    ("Pad", 19, (X, integers(0, 0, 3, 0, 0, 2)), {"mode": "wrap"}, F.pad(X, (3, 2), mode="circular")),
    # Over all dimensions from an axis on, and over one
    ("Softmax", 11, (X,), {}, rows(lambda x: x.softmax(-1), 2)),
    ("Softmax", 12, (X,), {"axis": -1}, X.softmax(-1)),
    ("Softmax", 11, (X,), {"axis": 0}, rows(lambda x: x.softmax(-1), 1)),
    ("Softmax", 13, (X,), {}, X.softmax(-1)),
    ("Softmax", 13, (X,), {"axis": 1}, X.softmax(1)),
    ("Softmax", 11, (X[:0],), {}, X[:0]),
    ("LogSoftmax", 11, (X,), {}, rows(lambda x: x.log_softmax(-1), 2)),
    ("LogSoftmax", 13, (X,), {}, X.log_softmax(-1)),
    ("Hardmax", 11, (X,), {}, rows(largest, 2)),
    ("Hardmax", 13, (X,), {}, largest(X)),
    # Quantised
    *(case for opset in (10, 13, 17, 19, 21) for case in quantised(opset)),
    # Of versions whose attributes are others than the newest ones
    ("ReduceMean", 13, (X,), {"axes": [-1, 1], "keepdims": 0}, X.mean((1, 2))),
    ("ReduceMax", 13, (NAN,), {"axes": [-1]}, NAN.amax(-1, keepdim=True)),
    ("ReduceSum", 11, (X,), {"axes": [1]}, X.sum(1, keepdim=True)),
    ("ReduceSum", 13, (X, integers(-1)), {}, X.sum(-1, keepdim=True)),
    ("ReduceL2", 17, (X,), {"axes": [1]}, X.norm(dim=1, keepdim=True)),
    ("Reshape", 13, (X, integers(0, -1)), {}, X.reshape(2, 35)),
    ("Squeeze", 11, (X[:1],), {"axes": [0]}, X[0]),
    ("Unsqueeze", 11, (X,), {"axes": [0, -1]}, X[None, ..., None]),
    ("Dropout", 10, (X,), {"ratio": 0.5}, X),
    ("Clip", 6, (NAN,), {"min": -1.0, "max": 1.0}, NAN.clamp(-1, 1)),
    ("AveragePool", 11, (IMAGE,), {"kernel_shape": [3, 3], "strides": [2, 2]}, F.avg_pool2d(IMAGE, 3, 2)),
    ("Gemm", 9, (X[0], X[1], SCALES), {"transB": 1}, X[0] @ X[1].t() + SCALES),
    ("Resize", 13, (IMAGE, None, None, integers(2, 4, 12, 5)), {"mode": "linear"}, RESIZED),
    ("GridSample", 16, (IMAGE, GRID), {}, F.grid_sample(IMAGE, GRID, align_corners=False)),
    ("GridSample", 16, (IMAGE, GRID), {"mode": "nearest"}, NEAREST),
    # Others
    *(("BatchNormalization", opset, (IMAGE, MEAN, ONE, MEAN, VARIANCE), {}, NORMAL) for opset in (7, 9, 13, 14, 15)),
    ("OneHot", 11, (torch.tensor([[1, -1]]), integers(4), torch.tensor([0.0, 1.0])), {}, HOT),
    (
        *("OneHot", 11, (torch.tensor([[1, -1]]), torch.tensor(4), torch.tensor([2.0, 1.0])), {"axis": 0}),
        2 - HOT.permute(2, 0, 1),
    ),
    *map(transposed, (1, 2, 4)),
    ("LRN", 13, (IMAGE,), {"size": 3, "alpha": 0.5}, F.local_response_norm(IMAGE, 3, 0.5, 0.75, 1.0)),
    ("GatherElements", 13, (numbers(40, 70), PICKED), {"axis": 1}, GATHERED),
    ("GatherElements", 20, (numbers(40, 70), PICKED), {"axis": 0}, numbers(40, 70).gather(0, PICKED % 40)),
    ("Gelu", 20, (X,), {"approximate": "tanh"}, F.gelu(X, approximate="tanh")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_equals_torch(case: Case) -> None:
    op, opset, operands, attributes, expected = case
    y = evaluate(op, opset, *operands, **attributes)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    """Computed in float32, rounded once."""
    x = X.to(dtype)
    assert torch.equal(evaluate("Pad", 17, x, integers(0, 1, 0, 0, -1, 0)), F.pad(x, (0, 0, 1, -1)))
    wide = x.float().reshape(2, -1).softmax(-1).reshape(X.shape)
    assert torch.equal(evaluate("Softmax", 11, x), wide.to(dtype))


def test_quantised_in_float64() -> None:
    """The reference has scales in float64: what is quantised stays so, what comes of it is not rounded again."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [0.1]),
        helper.make_tensor("zero", TensorProto.INT8, [], [3]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 5, 7]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    (y,) = OnnxEvaluator(Path("m.onnx"), widen_onnx(model)).run({"x": X.double()})
    scale = float(np.float32(0.1))
    assert y.dtype == torch.float64
    assert torch.equal(y, (X.double() / scale).round().clamp(-131, 124) * scale)


def test_in_a_branch() -> None:
    """Operators in the graph of another are the same ones."""
    pad = helper.make_node("Pad", ["x", "pads"], ["t"])
    same = helper.make_node("Identity", ["x"], ["e"])
    branches = {
        f"{name}_branch": helper.make_graph([node], name, [], [helper.make_tensor_value_info(node.output[0], 1, None)])
        for name, node in (("then", pad), ("else", same))
    }
    inputs = [
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 5, 7]),
    ]
    node, output = helper.make_node("If", ["c"], ["y"], **branches), helper.make_tensor_value_info("y", 1, None)
    pads = helper.make_tensor("pads", TensorProto.INT64, [6], [0, 1, 0, 0, -1, 0])
    graph = helper.make_graph([node], "g", inputs, [output], [pads])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    for choice, expected in ((True, F.pad(X, (0, 0, 1, -1))), (False, X)):
        (y,) = OnnxEvaluator(Path("m.onnx"), model).run({"c": torch.tensor(choice), "x": X})
        assert torch.equal(y, expected)
