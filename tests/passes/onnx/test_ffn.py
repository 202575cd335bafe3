"""Feed-forward blocks in ONNX graphs: which are found, which are refused and why, and that rewriting keeps results."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch
from onnx import helper
from torch import Tensor

from tests.onnx_graphs import D_FF, D_MODEL, D_OUT, GraphMaker, gated
from tests.tolerance import assert_as_accurate
from twellc.base.errors import UserError
from twellc.checks.evaluator import OnnxEvaluator
from twellc.passes.onnx.ffn import OnnxBlocks, find_onnx_blocks, lower_onnx, rewrite_onnx
from twellc.passes.onnx.precision import widen_onnx
from twellc.passes.report import Layer
from twellc.plugins.ops import MLP

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.bfloat16}


def evaluate(model: onnx.ModelProto, x: Tensor) -> Tensor:
    return OnnxEvaluator(Path("test.onnx"), model).run({"x": x})[0]


def layers_of(model: onnx.ModelProto, layers: str = "auto") -> list[Layer]:
    return find_onnx_blocks(model, torch.bfloat16, layers).layers


def rewrite(found: OnnxBlocks, compression: int | None = None) -> onnx.ModelProto:
    return onnx_ir.serde.serialize_model(rewrite_onnx(found, compression))


def check_rewrite(model: onnx.ModelProto, dtype: str, shape: tuple[int, ...] = (2, 3, D_MODEL)) -> onnx.ModelProto:
    """Rewrite the one block of a model and compare the results; return the rewritten model."""
    found = find_onnx_blocks(model, LOW[dtype], "auto")
    assert [(layer.decision, layer.reason) for layer in found.layers] == [("twell", "matches")]
    rewritten = rewrite(found, 8)
    assert sum(node.domain == "twell" for node in rewritten.graph.node) == 1
    onnx.checker.check_model(rewritten)
    x = torch.randn(shape).to(torch.float32 if dtype == "fp32" else LOW[dtype])
    plain = evaluate(lower_onnx(found), x)
    truth = evaluate(widen_onnx(model), x.double())
    assert float(truth.abs().max()) > 0.5  # else nothing is compared
    if dtype == "fp32":
        # The rest of the graph is in float32, so the error must be looked at in the precision of the blocks.
        assert_as_accurate(evaluate(rewritten, x).bfloat16(), plain.bfloat16(), truth)
    else:
        assert_as_accurate(evaluate(rewritten, x), plain, truth)
    return rewritten


def fields_of(rewritten: onnx.ModelProto) -> dict[str, Any]:
    """Return the attributes of the only twell node."""
    (node,) = (node for node in rewritten.graph.node if node.domain == "twell")
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


# ---- activations ----


# Adds to a graph, by its methods `node` and `constant`, what is computed of z.
Build = Callable[[Callable[..., str], Callable[[Any], str], str], str]
ROW = [0.0] * D_FF
EACH = np.linspace(0.1, 1, D_FF)
BELOW = float(np.nextafter(np.float32(0.25), np.float32(0)))
ACTIVATIONS: dict[str, tuple[str, float, Build]] = {
    "Relu": ("relu", 0, lambda op, c, z: op("Relu", z)),
    "Max": ("relu", 0, lambda op, c, z: op("Max", z, c(0.0))),
    "Max-swapped": ("relu", 0, lambda op, c, z: op("Max", c([0.0]), z)),
    "Clip": ("relu", 0, lambda op, c, z: op("Clip", z, c(0.0))),
    "Clip-infinity": ("relu", 0, lambda op, c, z: op("Clip", z, c(0.0), c(np.inf))),
    "Where-gt": ("relu", 0, lambda op, c, z: op("Where", op("Greater", z, c(0.0)), z, c(0.0))),
    "Where-le": ("relu", 0, lambda op, c, z: op("Where", op("LessOrEqual", z, c(0.0)), c(0.0), z)),
    "Where-gt-t": ("fatrelu", 0.25, lambda op, c, z: op("Where", op("Greater", z, c(0.25)), z, c(0.0))),
    "Where-lt-t": ("fatrelu", BELOW, lambda op, c, z: op("Where", op("Less", z, c(0.25)), c(0.0), z)),
    "Mul-mask": ("relu", 0, lambda op, c, z: op("Mul", op("CastLike", op("Greater", z, c(0.0)), z), z)),
    "Mul-mask-t": ("fatrelu", 0.25, lambda op, c, z: op("Mul", z, op("CastLike", op("Greater", z, c(0.25)), z))),
    "ThresholdedRelu": ("fatrelu", 0.25, lambda op, c, z: op("ThresholdedRelu", z, alpha=0.25)),
    "Max-zeros": ("relu", 0, lambda op, c, z: op("Max", z, c(ROW))),
    "PRelu-0": ("relu", 0, lambda op, c, z: op("PRelu", z, c(ROW))),
    "LeakyRelu-0": ("relu", 0, lambda op, c, z: op("LeakyRelu", z, alpha=0.0)),
    "Elu-0": ("relu", 0, lambda op, c, z: op("Elu", z, alpha=0.0)),
    "Where-not": ("relu", 0, lambda op, c, z: op("Where", op("Not", op("GreaterOrEqual", z, c(0.0))), c(0.0), z)),
    "Mul-where": ("relu", 0, lambda op, c, z: op("Mul", z, op("Where", op("Less", c(0.0), z), c(1.0), c(0.0)))),
    "Mul-where-inverse": (
        "relu", 0, lambda op, c, z: op("Mul", z, op("Where", op("Greater", c(ROW), z), c(0.0), c(1.0)))),
    "Abs": ("relu", 0, lambda op, c, z: op("Mul", op("Add", z, op("Abs", z)), c(0.5))),
    "Sub-Min": ("relu", 0, lambda op, c, z: op("Sub", z, op("Min", c(0.0), z))),
    "Greater-vector": ("fatrelu", 0.25, lambda op, c, z: op("Where", op("Greater", z, c([0.25] * D_FF)), z, c(0.0))),
    "Greater-each": ("fatrelu", 0, lambda op, c, z: op("Where", op("Greater", z, c(EACH)), z, c(0.0))),
    "Relu-mask-each": (
        "fatrelu", 0, lambda op, c, z: op("Mul", op("Relu", z), op("CastLike", op("Less", c(EACH), z), z))),
    "Pow": ("relu2", 0, lambda op, c, z: op("Pow", op("Relu", z), c(2.0))),
    "Mul": ("relu2", 0, lambda op, c, z: op("Mul", r := op("Relu", z), r)),
    "Mul-x": ("relu2", 0, lambda op, c, z: op("Mul", z, op("Relu", z))),
    "Mul-x-swapped": ("relu2", 0, lambda op, c, z: op("Mul", op("Relu", z), z)),
}  # fmt: skip


@pytest.mark.sampled(32)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, dtype: str) -> None:
    activation, threshold, build = ACTIVATIONS[name]
    make = GraphMaker(dtype, opset=22)
    y = make.block(activation=lambda z: build(make.node, make.constant, z), biases=True)
    rewritten = check_rewrite(make.model(y), dtype)
    assert fields_of(rewritten) == {
        "activation": activation.encode(), "threshold": threshold, "compression": 8, "hot": 0, "up_bias": 1,
        "down_bias": 1, "residual": 0, "scales": 0, "thresholds": int("each" in name),
        "norm": b"none", "eps": 0.0, "norm_weight": 0, "norm_bias": 0,
        "plugin_version": b"twellc-3", "plugin_namespace": b"twell",
    }  # fmt: skip


# ---- constants that are folded ----


VECTOR = np.linspace(-1, 2, D_FF)
# Scale, bias, mean and variance of a batch norm of rows [tokens, D_FF].
NORM = [np.linspace(first, last, D_FF) for first, last in ((2, -1), (-0.5, 0.5), (-1, 1), (0.5, 2))]
FOLDED: dict[str, Build] = {
    "a norm": lambda op, c, z: op("Relu", op("BatchNormalization", z, *map(c, NORM), epsilon=1e-3)),
    "a norm behind": lambda op, c, z: op("BatchNormalization", op("Relu", z), *map(c, NORM), epsilon=1e-3),
    "a number is subtracted": lambda op, c, z: op("Relu", op("Sub", z, c(0.5))),
    "from a number": lambda op, c, z: op("Relu", op("Sub", c(0.5), z)),
    "from a vector": lambda op, c, z: op("Relu", op("Sub", c(VECTOR), z)),
    "a vector is subtracted": lambda op, c, z: op("Relu", op("Sub", z, c(VECTOR))),
    "scaled before": lambda op, c, z: op("Relu", op("Mul", op("Neg", z), c(VECTOR))),
    "scaled behind": lambda op, c, z: op("Mul", c(VECTOR), op("Relu", z)),
    "divided behind": lambda op, c, z: op("Div", op("Relu", z), c(3.0)),
    "shifted behind": lambda op, c, z: op("Add", op("Relu", z), c(VECTOR)),
    "a gate": lambda op, c, z: op("Mul", op("Relu", z), c(VECTOR)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bf16") for name in FOLDED), ("a norm", "fp32"), ("a gate", "fp32")]
)
def test_constants_are_folded(name: str, dtype: str) -> None:
    make = GraphMaker(dtype, x_shape=("tokens", D_MODEL))

    def folded(z: str) -> str:
        return FOLDED[name](make.node, make.constant, z)

    y = make.gated(gate=folded, biases=True) if name == "a gate" else make.block(activation=folded, biases=True)
    model = make.model(y, rank=2)
    rewritten = check_rewrite(model, dtype, (5, D_MODEL))
    assert {node.op_type for node in rewritten.graph.node} <= {"TwellMlp", "TwellGatedMlp", "Cast"}
    assert [layer.module for layer in layers_of(model)] == ["mlp"]


def test_a_stack_whose_inner_layer_is_scaled() -> None:
    """What it computes, scaled, is what the second block reads: a rewritten first block must not be scaled twice."""
    make = GraphMaker(x_shape=("tokens", D_MODEL))
    hidden = make.node("Relu", make.linear("x", "fc.1", D_MODEL, D_FF))
    scaled = make.node("Mul", make.linear(hidden, "fc.2", D_FF, D_FF), make.constant(VECTOR))
    model = make.model(make.linear(make.node("Relu", scaled), "fc.3", D_FF, D_OUT), rank=2)
    found = find_onnx_blocks(model, torch.bfloat16, "auto")
    assert [layer.decision for layer in found.layers] == ["twell", "dense"]
    x = torch.randn(5, D_MODEL).bfloat16()
    truth = evaluate(widen_onnx(model), x.double())
    assert_as_accurate(evaluate(rewrite(found, 8), x), evaluate(model, x), truth)


def test_constants_of_tokens_are_not_folded() -> None:
    make = GraphMaker(x_shape=(3, D_MODEL))
    y = make.block(activation=lambda z: make.node("Mul", make.node("Relu", z), make.constant([[1.0], [2.0], [3.0]])))
    assert [layer.decision for layer in layers_of(make.model(y, rank=2))] == ["dense"]


# ---- weights that are computed ----


def _dequantised(make: GraphMaker, kind: str, rows: int, columns: int) -> tuple[str, np.ndarray]:
    """Return a weight behind DequantizeLinear, and its values."""
    random = np.random.default_rng(rows)
    levels = random.integers(-100, 100, (rows, columns))
    forms: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
        "tensor": ((), {}), "axis 0": ((rows,), {"axis": 0}), "axis 1": ((columns,), {"axis": -1}),
        "blocks": ((rows // 8, columns), {"axis": 0, "block_size": 8}),
    }  # fmt: skip
    shape, attributes = forms[kind]
    scale, zero = random.uniform(0.5, 2, shape) / 400, random.integers(-9, 9, shape)
    operands = make.constant(levels, dtype=np.int8), make.constant(scale), make.constant(zero, dtype=np.int8)
    made: str = make.node("DequantizeLinear", *operands, **attributes)
    spread = {"axis 0": lambda v: v[:, None], "blocks": lambda v: np.repeat(v, 8, 0)}.get(kind, lambda v: v)
    return made, (levels - spread(zero)) * spread(scale.astype(make.numpy_dtype).astype(float))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_block_reads_another(dtype: str) -> None:
    """Both are rewritten; the second one adds the first one's result, which the graph returns, too."""
    make = GraphMaker(dtype)
    first = make.block("x", "first", d_out=D_MODEL)
    model = make.model(first, make.node("Add", first, make.block(first, "second", d_out=D_MODEL)))
    rewritten = rewrite(find_onnx_blocks(model, torch.bfloat16, "all"), 8)
    assert sum(node.domain == "twell" for node in rewritten.graph.node) == 2
    onnx.checker.check_model(rewritten)
    x = torch.randn(2, 3, D_MODEL).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    truth = OnnxEvaluator(Path("test.onnx"), widen_onnx(model)).run({"x": x.double()})
    for made, exact in zip(OnnxEvaluator(Path("test.onnx"), rewritten).run({"x": x}), truth, strict=True):
        assert float((made.double() - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", ["tensor", "axis 0", "axis 1", "blocks"])
def test_dequantised_weights(kind: str, dtype: str) -> None:
    make = GraphMaker(dtype, opset=21)
    (up, up_values), (down, down_values) = (
        _dequantised(make, kind, *sizes) for sizes in ((D_MODEL, D_FF), (D_FF, D_OUT))
    )
    y = make.node("MatMul", make.node("Relu", make.node("MatMul", "x", up)), down)
    found = find_onnx_blocks(make.model(y), torch.float16, "auto")
    assert [(layer.decision, layer.d_ff) for layer in found.layers] == [("twell", D_FF)]
    rewritten = rewrite(found, 8)
    assert "DequantizeLinear" not in {node.op_type for node in rewritten.graph.node}
    x = torch.randn(2, 3, D_MODEL).to(torch.float32 if dtype == "fp32" else torch.float16)
    expected = torch.relu(x.double() @ torch.tensor(up_values)) @ torch.tensor(down_values)
    plain = torch.relu(x.half() @ torch.tensor(up_values).half()) @ torch.tensor(down_values).half()
    assert_as_accurate(evaluate(rewritten, x).half(), plain, expected)


def test_weights_that_constants_give() -> None:
    make = GraphMaker()
    scaled = make.node("Mul", make.weight("fc1", D_FF, D_MODEL), make.constant(np.linspace(0.5, 2, D_FF)[:, None]))
    hidden = make.node("Relu", make.node("MatMul", "x", make.node("Transpose", scaled, perm=[1, 0])))
    check_rewrite(make.model(make.linear(hidden, "fc2", D_FF, D_OUT)), "bf16")


# ---- graphs in nodes ----


def test_a_block_in_a_branch_is_listed() -> None:
    make = GraphMaker("fp32")
    inner = make.block(name="inner", d_out=D_MODEL)
    info = helper.make_tensor_value_info(inner, make.onnx_dtype, None)
    branch = helper.make_graph(make.nodes, "then", [], [info], make.initializers)
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["e"])], "other", [], [
        helper.make_tensor_value_info("e", make.onnx_dtype, None)
    ])  # fmt: skip
    make.nodes, make.initializers = [], []
    choice = make.node("If", make.constant(True, dtype=bool), then_branch=branch, else_branch=other)
    found = find_onnx_blocks(make.model(make.block(choice, "m")), torch.bfloat16, "auto")
    assert [(layer.module, layer.decision, layer.reason) for layer in found.layers] == [
        ("m", "twell", "matches"), ("inner", "dense", "it is in a graph of the If node_0"),
    ]  # fmt: skip
    assert [node.op_type for node in rewrite(found, 8).graph.node if node.domain == "twell"] == ["TwellMlp"]


# ---- gated blocks, in all forms of products ----


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("biases", [False, True])
def test_gated(dtype: str, biases: bool) -> None:
    model = gated(dtype, biases)
    rewritten = check_rewrite(model, dtype)
    (layer,) = layers_of(model)
    assert (layer.module, layer.variant, layer.activation) == ("mlp", "gated", "relu")
    assert (layer.d_model, layer.d_ff, layer.d_out) == (D_MODEL, D_FF, D_OUT)
    operators = [node.op_type for node in rewritten.graph.node]
    assert operators == (["Add", "Cast", "TwellGatedMlp", "Cast"] if dtype == "fp32" else ["Add", "TwellGatedMlp"])
    node = next(node for node in rewritten.graph.node if node.domain == "twell")
    shapes = {tensor.name: list(tensor.dims) for tensor in rewritten.graph.initializer}
    weights = [shapes[name] for name in node.input if len(shapes.get(name, ())) == 2]
    assert weights == [[D_FF, D_MODEL], [D_FF, D_MODEL], [D_FF, D_OUT]]


def test_drelu_and_swapped_factors() -> None:
    make = GraphMaker()
    gate, up = (make.node("Relu", make.linear("x", name, D_MODEL, D_FF)) for name in ("m.gate", "m.up"))
    model = make.model(make.linear(make.node("Mul", gate, up), "m.down", D_FF, D_OUT))
    check_rewrite(model, "bf16")
    assert layers_of(model)[0].activation == "drelu"
    make = GraphMaker()
    check_rewrite(make.model(make.gated(swap=True)), "bf16")


@pytest.mark.parametrize("trans_b", [0, 1])
def test_gemm_with_reshapes(trans_b: int) -> None:
    make = GraphMaker()

    def gemm(x: str, name: str, d_in: int, d_out: int) -> str:
        shape = (d_out, d_in) if trans_b else (d_in, d_out)
        weight, bias = make.weight(f"{name}.weight", *shape), make.weight(f"{name}.bias", d_out)
        return make.node("Gemm", x, weight, bias, transB=trans_b)

    rows = make.node("Reshape", "x", make.integers(-1, D_MODEL))
    hidden = make.node("Dropout", make.node("Relu", gemm(rows, "fc1", D_MODEL, D_FF)))
    y = gemm(make.node("Identity", hidden), "fc2", D_FF, D_OUT)
    check_rewrite(make.model(make.node("Reshape", y, make.integers(2, 3, D_OUT))), "bf16")


def test_transposed_weights_and_row_vectors() -> None:
    make = GraphMaker()
    turned = make.node("Transpose", make.weight("m.fc1.weight", D_FF, D_MODEL), perm=[1, 0])
    z = make.node("Add", make.constant(np.linspace(-1, 1, D_FF).reshape(1, 1, D_FF)), make.node("MatMul", "x", turned))
    y = make.linear(make.node("Relu", z), "m.fc2", D_FF, D_OUT)
    check_rewrite(make.model(y), "bf16")


@pytest.mark.parametrize("by", ["Split", "Slice"])
@pytest.mark.parametrize("gate_first", [True, False])
def test_packed_gate_and_up(by: str, gate_first: bool) -> None:
    make = GraphMaker()
    both = make.linear("x", "m.gate_up", D_MODEL, 2 * D_FF, bias=True)
    if by == "Split":
        parts = make.node("Split", both, make.integers(D_FF, D_FF), outputs=2, axis=-1)
    else:
        ends = ((0, D_FF), (D_FF, 2**63 - 1))
        parts = [make.node("Slice", both, *(make.integers(n) for n in (*bounds, -1))) for bounds in ends]
    gate, up = parts if gate_first else parts[::-1]
    hidden = make.node("Mul", make.node("Relu", gate), up)
    check_rewrite(make.model(make.linear(hidden, "m.down", D_FF, D_OUT)), "bf16")


def test_numbered_initializers_take_the_names_of_their_nodes() -> None:
    make = GraphMaker()
    hidden = make.node("Relu", make.node("MatMul", "x", make.weight("onnx::MatMul_7", D_MODEL, D_FF)))
    y = make.node("MatMul", hidden, make.weight("onnx::MatMul_8", D_FF, D_OUT))
    make.nodes[0].name, make.nodes[2].name = "/layers.3/ffn/fc1/MatMul", "/layers.3/ffn/fc2/MatMul"
    assert [layer.module for layer in layers_of(make.model(y))] == ["layers.3.ffn"]


# ---- refusals ----


def _each_neuron(make: GraphMaker, z: str) -> str:
    mask = make.node("GreaterOrEqual", z, make.constant(EACH))
    return make.node("Mul", z, make.node("Cast", mask, to=make.onnx_dtype))


def _read_by(make: GraphMaker, reader: Callable[[str], str | None]) -> tuple[str, ...]:
    """Return the outputs of a graph with a reader of the hidden tensor besides the block."""
    hidden = make.node("Relu", make.linear("x", "m.fc1", D_MODEL, D_FF))
    return make.linear(hidden, "m.fc2", D_FF, D_OUT), reader(hidden) or hidden


def _branch(make: GraphMaker, hidden: str) -> str:
    info = helper.make_tensor_value_info("inner", make.onnx_dtype, None)
    branch = helper.make_graph([helper.make_node("Neg", [hidden], ["inner"])], "branch", [], [info])
    result: str = make.node("If", make.constant(True, dtype=bool), then_branch=branch, else_branch=branch)
    return result


def _activated(op: str) -> Callable[[GraphMaker], str]:
    return lambda make: make.block(activation=lambda z: make.node(op, z))


FAMILY = "activation is {}; TwELL needs a ReLU family"
REFUSED: dict[str, tuple[Callable[[GraphMaker], str | tuple[str, ...]], str]] = {
    "LeakyRelu": (_activated("LeakyRelu"), FAMILY.format("leaky_relu")),
    "Elu": (_activated("Elu"), FAMILY.format("elu")),
    "Gelu": (_activated("Gelu"), FAMILY.format("gelu")),
    "Softplus": (_activated("Softplus"), FAMILY.format("softplus")),
    "Clip to 6": (
        lambda make: make.block(activation=lambda z: make.node("Clip", z, make.constant(0.0), make.constant(6.0))),
        FAMILY.format("relu6"),
    ),
    "SiLU": (
        lambda make: make.gated(gate=lambda z: make.node("Mul", z, make.node("Sigmoid", z))),
        f"gate {FAMILY.format('silu')}",
    ),
    "a threshold for each neuron": (
        lambda make: make.block(activation=lambda z: _each_neuron(make, z)),
        "activation is FATReLU with a threshold for each neuron; x > a stored vector is needed",
    ),
    "the hidden tensor is an output": (
        lambda make: _read_by(make, lambda hidden: None),
        "its intermediate tensor relu_1_0 is also read by output",
    ),
    "the hidden tensor is read in a graph of a node": (
        lambda make: _read_by(make, lambda hidden: _branch(make, hidden)),
        "its intermediate tensor relu_1_0 is also read by if_3_0",
    ),
    "gate and up of different tensors": (
        lambda make: make.gated(of_up=make.node("Neg", "x")),
        "gate and up projections read different tensors",
    ),
    "limits of the kernels": (
        lambda make: make.block(d_out=12),
        "the output width is 12; the kernels need a multiple of 8 (16-byte rows)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    build, reason = REFUSED[case]
    make = GraphMaker()
    outputs = build(make)
    (layer,) = layers_of(make.model(*([outputs] if isinstance(outputs, str) else outputs)))
    assert (layer.decision, layer.matched, layer.reason) == ("dense", False, reason)


def _resembling(change: str) -> onnx.ModelProto:
    make = GraphMaker(x_shape=(D_MODEL, D_MODEL))
    options = {"alpha": {"alpha": 2.0}, "transA": {"transA": 1}}.get(change, {})
    weight = make.weight("fc1", D_MODEL, D_FF)
    z = make.node("Gemm", "x", make.node("Tanh", weight) if change == "weight" else weight, **options)
    hidden = make.node("Relu", z)
    if change == "domain":
        make.nodes[-1].domain = "com.example"
    if change == "training":
        hidden = make.node("Dropout", hidden, make.constant(0.5), make.constant(True, dtype=bool))
    model = make.model(make.node("Gemm", hidden, make.weight("fc2", D_FF, D_OUT)), rank=2)
    if change == "domain":
        model.opset_import.append(helper.make_opsetid("com.example", 1))
    return model


@pytest.mark.parametrize("change", ["alpha", "transA", "domain"])
def test_what_merely_resembles_a_block_is_not_one(change: str) -> None:
    assert layers_of(_resembling(change)) == []


@pytest.mark.parametrize(
    ("change", "form"),
    [("weight", "mm (its weight: tanh_0_0), relu, mm"), ("training", "mm, relu, dropout_2_0, mm")],
)
def test_a_form_that_is_not_read_is_reported(change: str, form: str) -> None:
    (layer,) = layers_of(_resembling(change))
    assert (layer.decision, layer.reason) == ("dense", f"no form that twellc rewrites: {form}")
    assert (layer.d_model, layer.d_ff, layer.d_out) == (D_MODEL, D_FF, D_OUT)


# ---- the graph around ----


def test_the_decision_says_how_many_neurons_are_hot() -> None:
    found = find_onnx_blocks(gated(), torch.bfloat16, "auto")
    (layer,) = found.layers
    rewritten = rewrite(replace(found, layers=[replace(layer, hot=40)]), 8)
    assert fields_of(rewritten)["hot"] == 40
    x = torch.randn(2, 3, D_MODEL)
    assert torch.equal(evaluate(rewritten, x), evaluate(rewrite(found, 8), x))


def test_layers_choose_blocks_by_name() -> None:
    make = GraphMaker()
    model = make.model(make.block(make.node("Neg", make.block(name="a", d_out=D_MODEL)), "b"))
    found = find_onnx_blocks(model, torch.bfloat16, "^b")
    assert [layer.decision for layer in found.layers] == ["dense", "twell"]
    operators = [node.op_type for node in rewrite(found, 8).graph.node]
    assert operators == ["MatMul", "Relu", "MatMul", "Neg", "TwellMlp"]
    assert [layer.reason for layer in layers_of(model, "none")] == ["--layers none"] * 2
    with pytest.raises(UserError, match="matches no feed-forward block"):
        layers_of(model, "nowhere")


def test_a_stack_shares_no_projection() -> None:
    make = GraphMaker()
    hidden = make.node("Relu", make.linear("x", "fc.1", D_MODEL, D_FF))
    hidden = make.node("Relu", make.linear(hidden, "fc.2", D_FF, D_FF))
    layers = layers_of(make.model(make.linear(hidden, "fc.3", D_FF, D_OUT)))
    assert [layer.decision for layer in layers] == ["twell", "dense"]
    assert layers[1].reason.startswith("it shares a projection with the block")


def test_blocks_that_share_their_weights() -> None:
    make = GraphMaker()
    weights = make.weight("fc1", D_MODEL, D_FF), make.weight("fc2", D_FF, D_MODEL)
    y = "x"
    for _ in range(2):
        y = make.node("MatMul", make.node("Relu", make.node("MatMul", make.node("Neg", y), weights[0])), weights[1])
    found = find_onnx_blocks(make.model(y), torch.bfloat16, "auto")
    rewritten = rewrite(found, 8)
    assert [node.op_type for node in rewritten.graph.node] == ["Neg", "TwellMlp"] * 2
    assert len(rewritten.graph.initializer) == 2


def test_weights_that_overflow_float16() -> None:
    model = gated("fp32")
    model.graph.initializer[1].CopyFrom(
        onnx.numpy_helper.from_array(np.full((D_MODEL, D_FF), 1e6, np.float32), "mlp.gate.weight")
    )
    with pytest.raises(UserError, match=r"initializer mlp\.gate\.weight: its values overflow float16"):
        rewrite(find_onnx_blocks(model, torch.float16, "auto"), 8)


def test_the_model_itself_is_left_alone() -> None:
    model = gated("fp32", biases=True)
    before = model.SerializeToString(deterministic=True)
    found = find_onnx_blocks(model, torch.bfloat16, "auto")
    rewrite(found, 8)
    lower_onnx(found)
    widen_onnx(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_rewritten_node_computes_the_torch_op() -> None:
    make = GraphMaker("fp16")
    model = make.model(make.block())
    x = torch.randn(2, 3, D_MODEL).half()
    up, down = (torch.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer)
    expected = MLP(x, up.t().contiguous(), None, down, None, None, "relu", 0.0, 8)
    rewritten = rewrite(find_onnx_blocks(model, torch.bfloat16, "auto"), 8)
    assert torch.equal(evaluate(rewritten, x), expected)


# ---- residuals ----


def with_residual(dtype: str, add: Callable[[GraphMaker, str, str], list[str]]) -> onnx.ModelProto:
    """Return a model, rewritten, whose outputs `add` makes of tanh(x) and of a block's result."""
    make = GraphMaker(dtype)
    other = make.node("Tanh", "x")
    y = make.block(make.node("Add", "x", make.constant(1.0)), d_out=D_MODEL, biases=True)
    model = make.model(*add(make, other, y))
    return check_rewrite(model, dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("swap", [False, True])
def test_residual_is_taken_in(dtype: str, swap: bool) -> None:
    model = with_residual(dtype, lambda make, other, y: [make.node("Add", *((y, other) if swap else (other, y)))])
    assert fields_of(model)["residual"] == 1
    (node,) = (each for each in model.graph.node if each.domain == "twell")
    (tanh,) = (each for each in model.graph.node if each.op_type == "Tanh")
    assert node.input[-1] == tanh.output[0]
    assert node.output[0] == model.graph.output[0].name
    assert [each.op_type for each in model.graph.node].count("Add") == 1


def test_residual_that_is_computed_after_the_block() -> None:
    """Nodes must stay in an order in which they can run; check_rewrite runs onnx's checker."""

    def add(make: GraphMaker, other: str, y: str) -> list[str]:
        return [make.node("Add", make.node("Sigmoid", other), y)]

    assert fields_of(with_residual("bf16", add))["residual"] == 1


@pytest.mark.parametrize(
    "add",
    [
        pytest.param(lambda make, other, y: [make.node("Add", other, y), y], id="y is an output"),
        pytest.param(
            lambda make, other, y: [make.node("Add", make.node("Add", other, y), make.node("Neg", y))], id="two"
        ),
        pytest.param(lambda make, other, y: [make.node("Sub", other, y)], id="difference"),
        pytest.param(lambda make, other, y: [make.node("Add", y, y)], id="y itself"),
        pytest.param(
            lambda make, other, y: [make.node("Add", make.node("ReduceMean", other, make.integers(1)), y)],
            id="broadcast",
        ),
    ],
)
def test_residual_is_left(add: Callable[[GraphMaker, str, str], list[str]]) -> None:
    assert fields_of(with_residual("bf16", add))["residual"] == 0


def test_sum_of_a_float32_graph_keeps_its_precision() -> None:
    model = with_residual("fp32", lambda make, other, y: [make.node("Add", other, y)])
    assert fields_of(model)["residual"] == 0
    assert model.graph.node[-1].op_type == "Add"


def assert_lowered(model: onnx.ModelProto) -> tuple[OnnxBlocks, onnx.ModelProto]:
    """Check the results of a model whose one block folds constants, rewritten, and written as plain operators again."""
    found = find_onnx_blocks(model, torch.bfloat16, "auto")
    assert found.folds
    lowered, x = lower_onnx(found), torch.randn(2, 3, D_MODEL).bfloat16()
    truth = evaluate(widen_onnx(model), x.double())
    for made in (lowered, rewrite(found)):
        assert_as_accurate(evaluate(made, x), evaluate(model, x), truth)
    return found, lowered


def test_lowering_writes_folded_blocks() -> None:
    """So that `check` can tell what folding rounds from what the kernels do, also behind a residual."""
    make = GraphMaker("bf16")
    hidden = make.node("Relu", make.linear(make.node("Neg", "x"), "mlp.up", D_MODEL, D_FF, True))
    scaled = make.node("Mul", hidden, make.constant(np.linspace(0.5, 2, D_FF)))
    found, lowered = assert_lowered(make.model(make.node("Add", "x", make.linear(scaled, "mlp.down", D_FF, D_MODEL))))
    assert not found.casts and found.layers[0].residual
    operators = sorted(node.op_type for node in lowered.graph.node)
    assert operators == ["Add", "Add", "MatMul", "MatMul", "Neg", "Relu", "Transpose"]
    assert not find_onnx_blocks(gated(), torch.bfloat16, "auto").folds


def test_lowering_writes_both_factors_of_drelu() -> None:
    make = GraphMaker("bf16")
    gate, up = (make.node("Relu", make.linear("x", name, D_MODEL, D_FF)) for name in ("m.gate", "m.up"))
    scaled = make.node("Mul", make.node("Mul", gate, up), make.constant(np.linspace(0.5, 2, D_FF)))
    found, _ = assert_lowered(make.model(make.linear(scaled, "m.down", D_FF, D_OUT)))
    assert found.layers[0].activation == "drelu"
