"""ONNX models of plain operators, made with onnx.helper, for the tests of ONNX files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

D_MODEL, D_FF, D_OUT = 16, 40, 24
TYPES = {
    "fp32": (np.dtype(np.float32), onnx.TensorProto.FLOAT),
    "fp16": (np.dtype(np.float16), onnx.TensorProto.FLOAT16),
    "bf16": (np.dtype(ml_dtypes.bfloat16), onnx.TensorProto.BFLOAT16),
}


class GraphMaker:
    """Collects nodes and initializers of one graph with the input x ["batch", "sequence", 16].

    Every method that adds a node returns the name of its output.
    """

    def __init__(self, dtype: str = "bf16", opset: int = 20, x_shape: tuple[Any, ...] = ("batch", "sequence", D_MODEL)):
        self.numpy_dtype, self.onnx_dtype = TYPES[dtype]
        self.opset, self.x_shape = opset, x_shape
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(3)

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{op.lower()}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, f"node_{len(self.nodes)}", **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, values: Any, name: str = "", dtype: Any = None) -> str:
        name = name or f"constant_{len(self.initializers)}"
        array = np.asarray(values).astype(dtype or self.numpy_dtype)
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def integers(self, *values: int) -> str:
        return self.constant(values, dtype=np.int64)

    def weight(self, name: str, *shape: int) -> str:
        """Add weights that keep the size of activations, or a bias that matters."""
        return self.constant(self._random.normal(0, (2 / shape[0]) ** 0.5 if len(shape) > 1 else 0.5, shape), name)

    def linear(self, x: str, name: str, d_in: int, d_out: int, bias: bool = False) -> str:
        y = self.node("MatMul", x, self.weight(f"{name}.weight", d_in, d_out))
        return self.node("Add", y, self.weight(f"{name}.bias", d_out)) if bias else y

    def block(
        self,
        x: str = "x",
        name: str = "mlp",
        activation: Callable[[str], str] | None = None,
        d_out: int = D_OUT,
        biases: bool = False,
    ) -> str:
        """Add fc2(activation(fc1(x))); the activation is Relu unless it is given."""
        z = self.linear(x, f"{name}.fc1", D_MODEL, D_FF, biases)
        hidden = self.node("Relu", z) if activation is None else activation(z)
        return self.linear(hidden, f"{name}.fc2", D_FF, d_out, biases)

    def gated(self, x: str = "x", of_up: str = "", gate: Callable[[str], str] | None = None, d_ff: int = D_FF,
              biases: bool = False, swap: bool = False) -> str:  # fmt: skip
        """Add down(gate(x) * up(x)) in the module `mlp`; the gate's activation is Relu unless it is given."""
        z = self.linear(x, "mlp.gate", D_MODEL, d_ff, biases)
        factors = (
            self.node("Relu", z) if gate is None else gate(z),
            self.linear(of_up or x, "mlp.up", D_MODEL, d_ff, biases),
        )
        return self.linear(self.node("Mul", *(factors[::-1] if swap else factors)), "mlp.down", d_ff, D_OUT, biases)

    def model(self, *outputs: str, rank: int = 3) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "test",
            [helper.make_tensor_value_info("x", self.onnx_dtype, self.x_shape)],
            [helper.make_tensor_value_info(name, self.onnx_dtype, [None] * rank) for name in outputs],
            self.initializers,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)


def gated(dtype: str = "bf16", biases: bool = False, d_ff: int = D_FF) -> onnx.ModelProto:
    """x + 1 -> a gated block called mlp -> y."""
    make = GraphMaker(dtype)
    x = make.node("Add", "x", make.constant(1.0))
    return make.model(make.gated(x, d_ff=d_ff, biases=biases))


def save_external(model: onnx.ModelProto, path: Path) -> Path:
    """Save a model with all of its weights in `weights.bin` beside it."""
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path
