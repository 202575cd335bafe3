"""Cut the part of an ONNX graph that computes one tensor from others.

a ─ … ─ x ─ MatMul ─ Relu ─ MatMul ─ y ─ … ─ b        ->        x ─ MatMul ─ Relu ─ MatMul ─ y
"""

from __future__ import annotations

import onnx


def part_of(model: onnx.ModelProto, inputs: list[str], y: str) -> onnx.ModelProto:
    """Return a model with the output `y` and the inputs `inputs` and those of `model` that `y` needs besides.

    It is for onnx's reference evaluator: its inputs and outputs have no shapes. Weights are shared with `model` only as
    far as protobuf shares them.
    """
    producers = {name: node for node in model.graph.node for name in node.output if name}
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    graph = onnx.GraphProto(name="part")
    needed, pending = set(inputs), [y]
    nodes = set()
    while pending:
        name = pending.pop()
        if name in needed or not name:
            continue
        needed.add(name)
        if name in weights:
            graph.initializer.append(weights[name])
        elif name in producers:
            node = producers[name]
            nodes.add(node.output[0])
            pending += [*node.input, *_captured(node)]
    graph.node.extend(node for node in model.graph.node if node.output and node.output[0] in nodes)
    given = [value for value in model.graph.input if value.name in needed - set(inputs) and value.name not in weights]
    graph.input.extend([*(onnx.ValueInfoProto(name=name) for name in inputs), *given])
    graph.output.append(onnx.ValueInfoProto(name=y))
    part = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
    part.opset_import.extend(model.opset_import)
    return part


def _captured(node: onnx.NodeProto) -> list[str]:
    """Return the tensors that the graphs in a node read; some may be their own."""
    graphs = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    return [name for graph in graphs for inner in graph.node for name in (*inner.input, *_captured(inner))]
