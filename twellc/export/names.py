"""Names of a graph's inputs and outputs: those of the model, wherever ONNX and TensorRT allow it."""

from __future__ import annotations

import onnx_ir

from twellc.passes.graph.program import free_name


def distinct_outputs(inputs: list[str], outputs: list[str]) -> tuple[list[str], list[str]]:
    """Return names for outputs that no input and no other output has, and notes on those that had to change.

    A model may return a state under the name of the input that it came by; ONNX and TensorRT do not allow that.
    """
    taken = set(inputs) | set(outputs)
    used = set(inputs)
    names, notes = [], []
    for name in outputs:
        chosen = name if name not in used else free_name(f"{name}_out", taken)
        if chosen != name:
            owner = "an input" if name in inputs else "another output"
            notes.append(f"output {name} is called {chosen}, since {owner} has its name")
        names.append(chosen)
        used.add(chosen)
        taken.add(chosen)
    return names, notes


def name_ends(graph: onnx_ir.Graph, inputs: list[str], outputs: list[str]) -> None:
    """Name a graph's inputs and outputs, in place; a value inside of it that has one of these names gets a new one.

    An output that is an input, a constant, or another output again gets a node Identity.

    Args:
        graph: The graph.
        inputs: The names of its inputs, in order.
        outputs: Those of its outputs; none of them is another's or an input's.
    """
    ends = [*inputs, *outputs]
    assert len(set(ends)) == len(ends), "see distinct_outputs"
    _own_values(graph)
    named = {*graph.inputs, *graph.outputs}
    given = (value for each in (graph, *graph.subgraphs()) for value in (*each.inputs, *each.initializers.values()))
    computed = (value for node in graph.all_nodes() for value in node.outputs)
    values = list(dict.fromkeys([*given, *computed]))
    taken = {value.name for value in values if value.name} | set(ends)
    for value in values:
        if value not in named and value.name in ends:
            value.name = free_name(value.name, taken)
            taken.add(value.name)
    for index, value in enumerate(named):
        value.name = free_name(f"__end_{index}", taken)  # so that no two share a name on the way
    for value, name in zip([*graph.inputs, *graph.outputs], ends, strict=True):
        value.name = name


def _own_values(graph: onnx_ir.Graph) -> None:
    """Give each output a value of its own that a node computes."""
    seen: set[onnx_ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value in seen or value.producer() is None:
            node = onnx_ir.node("Identity", [value])
            (copy,) = node.outputs
            copy.name, copy.type, copy.shape = f"{value.name}_out", value.type, value.shape
            graph.append(node)
            graph.outputs[index] = copy
        seen.add(value)
