"""Feed-forward blocks in ONNX graphs: which are found, which are refused and why, and that rewriting keeps results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor

from tests.onnx_graphs import D_FF, D_MODEL, D_OUT, GraphMaker, gated
from tests.tolerance import assert_as_accurate
from twellc.base.errors import UserError
from twellc.checks.evaluator import OnnxEvaluator
from twellc.passes.onnx.ffn import find_onnx_blocks, lower_onnx, rewrite_onnx
from twellc.passes.onnx.precision import widen_onnx
from twellc.passes.report import Layer
from twellc.plugins.ops import MLP

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.bfloat16}


def evaluate(model: onnx.ModelProto, x: Tensor) -> Tensor:
    return OnnxEvaluator(Path("test.onnx"), model).run({"x": x})[0]


def layers_of(model: onnx.ModelProto, layers: str = "auto") -> list[Layer]:
    return find_onnx_blocks(model, torch.bfloat16, layers).layers


def check_rewrite(model: onnx.ModelProto, dtype: str, shape: tuple[int, ...] = (2, 3, D_MODEL)) -> onnx.ModelProto:
    """Rewrite the one block of a model and compare the results; return the rewritten model."""
    found = find_onnx_blocks(model, LOW[dtype], "auto")
    assert [(layer.decision, layer.reason) for layer in found.layers] == [("twell", "matches")]
    rewritten = rewrite_onnx(found, 8)
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


# ---- activations ----


def _where(make: GraphMaker, z: str, comparison: str, threshold: float) -> str:
    condition = make.node(comparison, z, make.constant(threshold))
    zero = make.constant(0.0)
    return make.node("Where", condition, *((z, zero) if comparison.startswith("Greater") else (zero, z)))


def _masked(make: GraphMaker, z: str, threshold: float) -> str:
    mask = make.node("Cast", make.node("Greater", z, make.constant(threshold)), to=make.onnx_dtype)
    return make.node("Mul", mask, z)


def _picked(make: GraphMaker, z: str, *, inverse: bool = False) -> str:
    """Keep z where a mask of numbers is 1."""
    condition = (
        make.node("Greater", make.constant([0.0] * D_FF), z) if inverse else make.node("Less", make.constant(0.0), z)
    )
    one, zero = make.constant(1.0), make.constant(0.0)
    return make.node("Mul", z, make.node("Where", condition, *((zero, one) if inverse else (one, zero))))


def _negated(make: GraphMaker, z: str) -> str:
    condition = make.node("Not", make.node("GreaterOrEqual", z, make.constant(0.0)))
    return make.node("Where", condition, make.constant(0.0), z)


def _mean_with_abs(make: GraphMaker, z: str) -> str:
    return make.node("Mul", make.node("Add", z, make.node("Abs", z)), make.constant(0.5))


def _squared(make: GraphMaker, z: str) -> str:
    r = make.node("Relu", z)
    return make.node("Mul", r, r)


ACTIVATIONS: dict[str, tuple[str, float, Callable[[GraphMaker, str], str]]] = {
    "Relu": ("relu", 0, lambda make, z: make.node("Relu", z)),
    "Max": ("relu", 0, lambda make, z: make.node("Max", z, make.constant(0.0))),
    "Max-swapped": ("relu", 0, lambda make, z: make.node("Max", make.constant([0.0]), z)),
    "Clip": ("relu", 0, lambda make, z: make.node("Clip", z, make.constant(0.0))),
    "Clip-infinity": ("relu", 0, lambda make, z: make.node("Clip", z, make.constant(0.0), make.constant(np.inf))),
    "Where-gt": ("relu", 0, lambda make, z: _where(make, z, "Greater", 0)),
    "Where-le": ("relu", 0, lambda make, z: _where(make, z, "LessOrEqual", 0)),
    "Where-gt-t": ("fatrelu", 0.25, lambda make, z: _where(make, z, "Greater", 0.25)),
    "Where-lt-t": ("fatrelu", float(np.nextafter(np.float32(0.25), np.float32(0))),
                   lambda make, z: _where(make, z, "Less", 0.25)),
    "Mul-mask": ("relu", 0, lambda make, z: _masked(make, z, 0)),
    "Mul-mask-t": ("fatrelu", 0.25, lambda make, z: _masked(make, z, 0.25)),
    "ThresholdedRelu": ("fatrelu", 0.25, lambda make, z: make.node("ThresholdedRelu", z, alpha=0.25)),
    "Max-zeros": ("relu", 0, lambda make, z: make.node("Max", z, make.constant([0.0] * D_FF))),
    "PRelu-0": ("relu", 0, lambda make, z: make.node("PRelu", z, make.constant([0.0] * D_FF))),
    "LeakyRelu-0": ("relu", 0, lambda make, z: make.node("LeakyRelu", z, alpha=0.0)),
    "Elu-0": ("relu", 0, lambda make, z: make.node("Elu", z, alpha=0.0)),
    "Where-not": ("relu", 0, _negated),
    "Mul-where": ("relu", 0, _picked),
    "Mul-where-inverse": ("relu", 0, lambda make, z: _picked(make, z, inverse=True)),
    "Mul-CastLike": ("relu", 0, lambda make, z: make.node(
        "Mul", z, make.node("CastLike", make.node("Greater", z, make.constant(0.0)), z))),
    "Abs": ("relu", 0, _mean_with_abs),
    "Sub-Min": ("relu", 0, lambda make, z: make.node("Sub", z, make.node("Min", make.constant(0.0), z))),
    "Greater-vector": ("fatrelu", 0.25, lambda make, z: make.node(
        "Where", make.node("Greater", z, make.constant([0.25] * D_FF)), z, make.constant(0.0))),
    "Pow": ("relu2", 0, lambda make, z: make.node("Pow", make.node("Relu", z), make.constant(2.0))),
    "Mul": ("relu2", 0, _squared),
    "Mul-x": ("relu2", 0, lambda make, z: make.node("Mul", z, make.node("Relu", z))),
    "Mul-x-swapped": ("relu2", 0, lambda make, z: make.node("Mul", make.node("Relu", z), z)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str, dtype: str) -> None:
    activation, threshold, build = ACTIVATIONS[name]
    make = GraphMaker(dtype, opset=22)
    hidden = build(make, make.linear("x", "mlp.fc1", D_MODEL, D_FF, bias=True))
    rewritten = check_rewrite(make.model(make.linear(hidden, "mlp.fc2", D_FF, D_OUT, bias=True)), dtype)
    node = next(node for node in rewritten.graph.node if node.domain == "twell")
    fields = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    assert fields == {
        "activation": activation.encode(), "threshold": threshold, "compression": 8, "hot": 0, "up_bias": 1,
        "down_bias": 1, "residual": 0, "plugin_version": b"twellc-3", "plugin_namespace": b"twell",
    }  # fmt: skip


def test_a_threshold_for_each_neuron() -> None:
    make = GraphMaker()
    z = make.linear("x", "mlp.fc1", D_MODEL, D_FF)
    mask = make.node("Cast", make.node("Greater", z, make.constant(np.linspace(0.1, 1, D_FF))), to=make.onnx_dtype)
    (layer,) = layers_of(make.model(make.linear(make.node("Mul", z, mask), "mlp.fc2", D_FF, D_OUT)))
    assert (layer.module, layer.decision) == ("mlp", "dense")
    assert layer.reason == "activation is FATReLU with a threshold for each neuron; the kernels have one for all"


@pytest.mark.parametrize(
    ("op", "attributes", "name"),
    [("LeakyRelu", {}, "leaky_relu"), ("Elu", {}, "elu"), ("Gelu", {}, "gelu"), ("Softplus", {}, "softplus")],
)
def test_other_activations_are_refused(op: str, attributes: dict[str, float], name: str) -> None:
    make = GraphMaker()
    hidden = make.node(op, make.linear("x", "mlp.fc1", D_MODEL, D_FF), **attributes)
    layers = layers_of(make.model(make.linear(hidden, "mlp.fc2", D_FF, D_OUT)))
    assert [(layer.matched, layer.reason) for layer in layers] == [
        (False, f"activation is {name}; TwELL needs a ReLU family")
    ]


def test_relu6_and_silu_are_refused() -> None:
    make = GraphMaker()
    six = make.node("Clip", make.linear("x", "a.fc1", D_MODEL, D_FF), make.constant(0.0), make.constant(6.0))
    first = make.linear(six, "a.fc2", D_FF, D_MODEL)
    gate, up = make.linear(first, "b.gate", D_MODEL, D_FF), make.linear(first, "b.up", D_MODEL, D_FF)
    hidden = make.node("Mul", make.node("Mul", gate, make.node("Sigmoid", gate)), up)
    layers = layers_of(make.model(make.linear(hidden, "b.down", D_FF, D_OUT)))
    assert [(layer.module, layer.reason) for layer in layers] == [
        ("a", "activation is relu6; TwELL needs a ReLU family"),
        ("b", "gate activation is silu; TwELL needs a ReLU family"),
    ]


# ---- constants that are folded ----


def _norm(make: GraphMaker, z: str) -> str:
    """A batch norm of rows [tokens, D_FF]."""
    mean, variance = make.constant(np.linspace(-1, 1, D_FF)), make.constant(np.linspace(0.5, 2, D_FF))
    scale, bias = make.constant(np.linspace(2, -1, D_FF)), make.constant(np.linspace(-0.5, 0.5, D_FF))
    return make.node("BatchNormalization", z, scale, bias, mean, variance, epsilon=1e-3)


def _vector(make: GraphMaker) -> str:
    return make.constant(np.linspace(-1, 2, D_FF))


FOLDED: dict[str, Callable[[GraphMaker, str], str]] = {
    "a norm": lambda make, z: make.node("Relu", _norm(make, z)),
    "a norm behind": lambda make, z: _norm(make, make.node("Relu", z)),
    "a number is subtracted": lambda make, z: make.node("Relu", make.node("Sub", z, make.constant(0.5))),
    "from a number": lambda make, z: make.node("Relu", make.node("Sub", make.constant(0.5), z)),
    "from a vector": lambda make, z: make.node("Relu", make.node("Sub", _vector(make), z)),
    "a vector is subtracted": lambda make, z: make.node("Relu", make.node("Sub", z, _vector(make))),
    "scaled before": lambda make, z: make.node("Relu", make.node("Mul", make.node("Neg", z), _vector(make))),
    "scaled behind": lambda make, z: make.node("Mul", _vector(make), make.node("Relu", z)),
    "divided behind": lambda make, z: make.node("Div", make.node("Relu", z), make.constant(3.0)),
    "shifted behind": lambda make, z: make.node("Add", make.node("Relu", z), _vector(make)),
    "a gate": lambda make, z: make.node(
        "Mul", make.node("Mul", make.node("Relu", z), _vector(make)), make.linear("x", "mlp.up", D_MODEL, D_FF)
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "bf16") for name in FOLDED), ("a norm", "fp32"), ("a gate", "fp32")]
)
def test_constants_are_folded(name: str, dtype: str) -> None:
    make = GraphMaker(dtype, x_shape=("tokens", D_MODEL))
    hidden = FOLDED[name](make, make.linear("x", "mlp.fc1", D_MODEL, D_FF, bias=True))
    model = make.model(make.linear(hidden, "mlp.fc2", D_FF, D_OUT, bias=True), rank=2)
    rewritten = check_rewrite(model, dtype, (5, D_MODEL))
    assert {node.op_type for node in rewritten.graph.node} <= {"TwellMlp", "TwellGatedMlp", "Cast"}
    assert [layer.module for layer in layers_of(model)] == ["mlp"]


def test_a_stack_whose_inner_layer_is_scaled() -> None:
    """What it computes, scaled, is what the second block reads: a rewritten first block must not be scaled twice."""
    make = GraphMaker(x_shape=("tokens", D_MODEL))
    hidden = make.node("Relu", make.linear("x", "fc.1", D_MODEL, D_FF))
    scaled = make.node("Mul", make.linear(hidden, "fc.2", D_FF, D_FF), _vector(make))
    model = make.model(make.linear(make.node("Relu", scaled), "fc.3", D_FF, D_OUT), rank=2)
    found = find_onnx_blocks(model, torch.bfloat16, "auto")
    assert [layer.decision for layer in found.layers] == ["twell", "dense"]
    x = torch.randn(5, D_MODEL).bfloat16()
    truth = evaluate(widen_onnx(model), x.double())
    assert_as_accurate(evaluate(rewrite_onnx(found, 8), x), evaluate(model, x), truth)


def test_constants_of_tokens_are_not_folded() -> None:
    make = GraphMaker(x_shape=(3, D_MODEL))
    hidden = make.node("Relu", make.linear("x", "mlp.fc1", D_MODEL, D_FF))
    scaled = make.node("Mul", hidden, make.constant([[1.0], [2.0], [3.0]]))
    (layer,) = layers_of(make.model(make.linear(scaled, "mlp.fc2", D_FF, D_OUT), rank=2))
    assert layer.decision == "dense"


# ---- weights that are computed ----


def _dequantised(make: GraphMaker, kind: str, rows: int, columns: int) -> tuple[str, np.ndarray]:
    """Return a weight behind DequantizeLinear, and its values."""
    random = np.random.default_rng(rows)
    levels = random.integers(-100, 100, (rows, columns))
    shape: tuple[int, ...] = {"tensor": (), "axis 0": (rows,), "axis 1": (columns,), "blocks": (rows // 8, columns)}[
        kind
    ]
    scale, zero = random.uniform(0.5, 2, shape) / 400, random.integers(-9, 9, shape)
    attributes = {"tensor": {}, "axis 0": {"axis": 0}, "axis 1": {"axis": -1}, "blocks": {"axis": 0, "block_size": 8}}[
        kind
    ]
    operands = make.constant(levels, dtype=np.int8), make.constant(scale), make.constant(zero, dtype=np.int8)
    made: str = make.node("DequantizeLinear", *operands, **attributes)
    spread = {"axis 0": lambda v: v[:, None], "blocks": lambda v: np.repeat(v, 8, 0)}.get(kind, lambda v: v)
    return made, (levels - spread(zero)) * spread(scale.astype(make.numpy_dtype).astype(float))


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
    rewritten = rewrite_onnx(found, 8)
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
    hidden = make.node("Relu", make.linear("x", "inner.fc1", D_MODEL, D_FF))
    inner = make.linear(hidden, "inner.fc2", D_FF, D_MODEL)
    info = helper.make_tensor_value_info(inner, make.onnx_dtype, None)
    branch = helper.make_graph(make.nodes, "then", [], [info], make.initializers)
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["e"])], "other", [], [
        helper.make_tensor_value_info("e", make.onnx_dtype, None)
    ])  # fmt: skip
    make.nodes, make.initializers = [], []
    choice = make.node("If", make.constant(True, dtype=bool), then_branch=branch, else_branch=other)
    after = make.linear(make.node("Relu", make.linear(choice, "m.fc1", D_MODEL, D_FF)), "m.fc2", D_FF, D_OUT)
    found = find_onnx_blocks(make.model(after), torch.bfloat16, "auto")
    assert [(layer.module, layer.decision, layer.reason) for layer in found.layers] == [
        ("m", "twell", "matches"), ("inner", "dense", "it is in a graph of the If node_0"),
    ]  # fmt: skip
    assert [node.op_type for node in rewrite_onnx(found, 8).graph.node if node.domain == "twell"] == ["TwellMlp"]


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
    up, gate = make.linear("x", "m.up", D_MODEL, D_FF), make.node("Relu", make.linear("x", "m.gate", D_MODEL, D_FF))
    check_rewrite(make.model(make.linear(make.node("Mul", up, gate), "m.down", D_FF, D_OUT)), "bf16")


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


def test_hidden_tensor_as_output() -> None:
    make = GraphMaker()
    hidden = make.node("Relu", make.linear("x", "m.fc1", D_MODEL, D_FF))
    (layer,) = layers_of(make.model(make.linear(hidden, "m.fc2", D_FF, D_OUT), hidden))
    assert layer.reason == f"its intermediate tensor {hidden} is also read by output"


def test_hidden_tensor_read_in_a_subgraph() -> None:
    make = GraphMaker()
    hidden = make.node("Relu", make.linear("x", "m.fc1", D_MODEL, D_FF))
    y = make.linear(hidden, "m.fc2", D_FF, D_OUT)
    info = helper.make_tensor_value_info("inner", make.onnx_dtype, None)
    branch = helper.make_graph([helper.make_node("Neg", [hidden], ["inner"])], "branch", [], [info])
    condition = make.constant(True, dtype=bool)
    other = make.node("If", condition, then_branch=branch, else_branch=branch)
    (layer,) = layers_of(make.model(y, other))
    assert layer.reason == f"its intermediate tensor {hidden} is also read by {other}"


def test_gate_and_up_of_different_tensors() -> None:
    make = GraphMaker()
    gate = make.node("Relu", make.linear("x", "m.gate", D_MODEL, D_FF))
    up = make.linear(make.node("Neg", "x"), "m.up", D_MODEL, D_FF)
    (layer,) = layers_of(make.model(make.linear(make.node("Mul", gate, up), "m.down", D_FF, D_OUT)))
    assert layer.reason == "gate and up projections read different tensors"


def test_limits_of_the_kernels() -> None:
    make = GraphMaker()
    hidden = make.node("Relu", make.linear("x", "m.fc1", D_MODEL, D_FF))
    (layer,) = layers_of(make.model(make.linear(hidden, "m.fc2", D_FF, 12)))
    assert layer.reason == "the output width is 12; the kernels need a multiple of 8 (16-byte rows)"


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
def test_what_merely_resembles_a_block_is_none(change: str) -> None:
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
    rewritten = rewrite_onnx(replace(found, layers=[replace(layer, hot=40)]), 8)
    fields = {each.name: helper.get_attribute_value(each) for node in rewritten.graph.node for each in node.attribute}
    assert fields["hot"] == 40
    x = torch.randn(2, 3, D_MODEL)
    assert torch.equal(evaluate(rewritten, x), evaluate(rewrite_onnx(found, 8), x))


def test_layers_choose_blocks_by_name() -> None:
    make = GraphMaker()
    first = make.linear(make.node("Relu", make.linear("x", "a.fc1", D_MODEL, D_FF)), "a.fc2", D_FF, D_MODEL)
    second = make.linear(
        make.node("Relu", make.linear(make.node("Neg", first), "b.fc1", D_MODEL, D_FF)), "b.fc2", D_FF, D_OUT
    )
    model = make.model(second)
    found = find_onnx_blocks(model, torch.bfloat16, "^b")
    assert [layer.decision for layer in found.layers] == ["dense", "twell"]
    assert [node.op_type for node in rewrite_onnx(found, 8).graph.node] == [
        "MatMul",
        "Relu",
        "MatMul",
        "Neg",
        "TwellMlp",
    ]
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
    rewritten = rewrite_onnx(found, 8)
    assert [node.op_type for node in rewritten.graph.node] == ["Neg", "TwellMlp"] * 2
    assert len(rewritten.graph.initializer) == 2


def test_weights_that_overflow_float16() -> None:
    model = gated("fp32")
    model.graph.initializer[1].CopyFrom(
        onnx.numpy_helper.from_array(np.full((D_MODEL, D_FF), 1e6, np.float32), "mlp.gate.weight")
    )
    with pytest.raises(UserError, match=r"initializer mlp\.gate\.weight: its values overflow float16"):
        rewrite_onnx(find_onnx_blocks(model, torch.float16, "auto"), 8)


def test_the_model_itself_is_left_alone() -> None:
    model = gated("fp32", biases=True)
    before = model.SerializeToString(deterministic=True)
    found = find_onnx_blocks(model, torch.bfloat16, "auto")
    rewrite_onnx(found, 8)
    lower_onnx(found)
    widen_onnx(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_rewritten_node_computes_the_torch_op() -> None:
    make = GraphMaker("fp16")
    y = make.linear(make.node("Relu", make.linear("x", "m.fc1", D_MODEL, D_FF)), "m.fc2", D_FF, D_OUT)
    model = make.model(y)
    x = torch.randn(2, 3, D_MODEL).half()
    up, down = (torch.tensor(onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer)
    expected = MLP(x, up.t().contiguous(), None, down, None, None, "relu", 0.0, 8)
    rewritten = rewrite_onnx(find_onnx_blocks(model, torch.bfloat16, "auto"), 8)
    assert torch.equal(evaluate(rewritten, x), expected)


# ---- residuals ----


def with_residual(
    dtype: str, add: Callable[[GraphMaker, str, str], list[str]]
) -> tuple[onnx.ModelProto, onnx.NodeProto]:
    """Return a model, rewritten, whose outputs `add` makes of tanh(x) and of a block's result; and its twell node."""
    make = GraphMaker(dtype)
    other = make.node("Tanh", "x")
    hidden = make.node("Relu", make.linear(make.node("Add", "x", make.constant(1.0)), "mlp.up", D_MODEL, D_FF, True))
    y = make.linear(hidden, "mlp.down", D_FF, D_MODEL, True)
    model = make.model(*add(make, other, y))
    rewritten = check_rewrite(model, dtype)
    (node,) = (node for node in rewritten.graph.node if node.domain == "twell")
    return rewritten, node


def field(node: onnx.NodeProto, name: str) -> int:
    (found,) = (each for each in node.attribute if each.name == name)
    return found.i


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("swap", [False, True])
def test_residual_is_taken_in(dtype: str, swap: bool) -> None:
    model, node = with_residual(dtype, lambda make, other, y: [make.node("Add", *((y, other) if swap else (other, y)))])
    assert field(node, "residual") == 1
    (tanh,) = (each for each in model.graph.node if each.op_type == "Tanh")
    assert node.input[-1] == tanh.output[0]
    assert node.output[0] == model.graph.output[0].name
    assert [each.op_type for each in model.graph.node].count("Add") == 1


def test_residual_that_is_computed_after_the_block() -> None:
    """Nodes must stay in an order in which they can run; check_rewrite runs onnx's checker."""

    def add(make: GraphMaker, other: str, y: str) -> list[str]:
        return [make.node("Add", make.node("Sigmoid", other), y)]

    _, node = with_residual("bf16", add)
    assert field(node, "residual") == 1


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
    _, node = with_residual("bf16", add)
    assert field(node, "residual") == 0


def test_sum_of_a_float32_graph_keeps_its_precision() -> None:
    model, node = with_residual("fp32", lambda make, other, y: [make.node("Add", other, y)])
    assert field(node, "residual") == 0
    assert model.graph.node[-1].op_type == "Add"


def test_lowering_writes_folded_blocks() -> None:
    """So that `check` can tell what folding rounds from what the kernels do, also behind a residual."""
    make = GraphMaker("bf16")
    hidden = make.node("Relu", make.linear(make.node("Neg", "x"), "mlp.up", D_MODEL, D_FF, True))
    scaled = make.node("Mul", hidden, make.constant(np.linspace(0.5, 2, D_FF)))
    model = make.model(make.node("Add", "x", make.linear(scaled, "mlp.down", D_FF, D_MODEL)))
    found = find_onnx_blocks(model, torch.bfloat16, "auto")
    assert (found.casts, found.folds, found.layers[0].residual) == (False, True, True)
    lowered = lower_onnx(found)
    assert sorted(node.op_type for node in lowered.graph.node) == [
        "Add", "Add", "MatMul", "MatMul", "Neg", "Relu", "Transpose",
    ]  # fmt: skip
    x = torch.randn(2, 3, D_MODEL).bfloat16()
    truth = evaluate(widen_onnx(model), x.double())
    assert_as_accurate(evaluate(lowered, x), evaluate(model, x), truth)
    assert_as_accurate(evaluate(rewrite_onnx(found), x), evaluate(model, x), truth)
    assert not find_onnx_blocks(gated(), torch.bfloat16, "auto").folds
