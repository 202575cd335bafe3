"""Cutting a part out of an ONNX graph, against the whole."""

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import helper

from tests.onnx_graphs import D_FF, D_MODEL, GraphMaker, gated
from twellc.checks.evaluator import OnnxEvaluator
from twellc.passes.onnx.part import part_of


def evaluate(model: onnx.ModelProto, **inputs: torch.Tensor) -> list[torch.Tensor]:
    return OnnxEvaluator(Path("part.onnx"), model).run(inputs)


def test_the_part_computes_what_the_whole_does() -> None:
    model = gated("bf16", biases=True)
    x = torch.linspace(-2, 2, 2 * D_MODEL).reshape(1, 2, D_MODEL).bfloat16()
    (add, *_), y = model.graph.node, model.graph.output[0].name
    whole = OnnxEvaluator(Path("whole.onnx"), model).run_to({"x": x}, [add.output[0], y])
    part = part_of(model, [add.output[0]], y)
    assert torch.equal(evaluate(part, **{add.output[0]: whole[add.output[0]]})[0], whole[y])
    assert len(part.graph.node) == len(model.graph.node) - 1
    assert {tensor.name for tensor in part.graph.initializer} == {
        tensor.name for tensor in model.graph.initializer if tensor.name.startswith("mlp")
    }


def test_several_tensors_are_given() -> None:
    model = gated("bf16", biases=True)
    products = [node.output[0] for node in model.graph.node if node.op_type in ("Relu", "Mul")]
    y = model.graph.output[0].name
    x = torch.linspace(-2, 2, 2 * D_MODEL).reshape(1, 2, D_MODEL).bfloat16()
    whole = OnnxEvaluator(Path("whole.onnx"), model).run_to({"x": x}, [*products, y])
    part = part_of(model, products, y)
    assert [value.name for value in part.graph.input] == products
    assert torch.equal(evaluate(part, **{name: whole[name] for name in products})[0], whole[y])
    assert [node.op_type for node in part.graph.node] == ["MatMul", "Add"]


def test_other_inputs_and_nested_graphs() -> None:
    """A branch reads a tensor of the outer graph, which depends on the model's input."""
    make = GraphMaker("fp32")
    doubled = make.node("Add", "x", "x")
    hidden = make.node("Relu", make.linear(doubled, "fc", D_MODEL, D_FF))
    condition = make.constant(True, dtype=np.bool_)
    branches = {
        name: helper.make_graph(
            [helper.make_node(op, [doubled], [f"{name}_out"])], name, [],
            [helper.make_tensor_value_info(f"{name}_out", make.onnx_dtype, None)],
        )
        for name, op in (("then_branch", "Neg"), ("else_branch", "Abs"))
    }  # fmt: skip
    chosen = make.node("If", condition, **branches)
    total = make.node("ReduceSum", chosen, make.integers(2), keepdims=1)
    model = make.model(make.node("Add", hidden, total))
    x = torch.linspace(-1, 1, D_MODEL).reshape(1, 1, D_MODEL)
    y = model.graph.output[0].name
    whole = OnnxEvaluator(Path("whole.onnx"), model).run_to({"x": x}, [hidden, y])
    part = part_of(model, [hidden], y)
    assert [value.name for value in part.graph.input] == [hidden, "x"]
    assert torch.equal(evaluate(part, x=x, **{hidden: whole[hidden]})[0], whole[y])
    assert "MatMul" not in [node.op_type for node in part.graph.node]
