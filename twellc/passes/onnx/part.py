"""Cut the part of an ONNX graph that computes one tensor from others.

a ─ … ─ x ─ MatMul ─ Relu ─ MatMul ─ y ─ … ─ b        ->        x ─ MatMul ─ Relu ─ MatMul ─ y
"""

from __future__ import annotations

import onnx
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass


def part_of(model: onnx.ModelProto, inputs: list[str], y: str) -> onnx.ModelProto:
    """Return a model with the output `y` and the inputs `inputs` and those of `model` that `y` needs besides.

    It is for onnx's reference evaluator: its inputs and outputs have no shapes. Weights are shared with `model` only as
    far as protobuf shares them.
    """
    part = onnx_ir.serde.deserialize_model(model)
    graph = part.graph
    own = {value.name: value for value in graph.inputs}
    values = {value.name: value for node in graph for value in node.outputs}
    graph.outputs[:] = [values[y]]
    given = [own.get(name) or onnx_ir.val(name) for name in inputs]
    for each in given:
        if each.name in values:
            onnx_ir.convenience.replace_all_uses_with(values[each.name], each)
            values[each.name].name = f"{each.name}/whole"  # a node may stay for another of its outputs
    RemoveUnusedNodesPass()(part)
    graph.inputs[:] = dict.fromkeys([*given, *(each for each in graph.inputs if each.uses())])
    return onnx_ir.serde.serialize_model(part)
