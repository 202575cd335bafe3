"""Nodes that TensorRT's ONNX parser does not take, and what to do about them. Importing this imports no onnx."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twellc.base.errors import first_few
from twellc.plugins.library import PLUGIN_NAMESPACE

if TYPE_CHECKING:
    import onnx

# TensorRT knows tensors alone: no sequences, no values that may be absent, no texts.
_NOT_OF_TENSORS = re.compile(r".*(Sequence|Optional|String).*|StringNormalizer|TfIdfVectorizer")
_STANDARD = ("", "ai.onnx")
_OF_ONNX_RUNTIME = "com.microsoft"
# TensorRT's own operator between GPUs, and the domain that we give it: the parser goes by the operator alone.
COLLECTIVE, TENSORRT_DOMAIN = "DistCollective", "trt"


@dataclass(frozen=True)
class RefusedNode:
    """A node of a graph, by its operator and that one's domain."""

    name: str
    operator: str
    domain: str = ""


def describe(nodes: list[RefusedNode]) -> str:
    """Return the operators of some nodes, with the names of nodes: in our graphs these begin with a module's path."""
    operators = list(dict.fromkeys(f"{node.domain}.{node.operator}" if _is_foreign(node) else node.operator
                                   for node in nodes))  # fmt: skip
    names = [node.name for node in nodes if node.name]
    return first_few(operators) + (f" (node {first_few(names)})" if names else "")


def cure(nodes: list[RefusedNode]) -> str:
    """Return what to do about some nodes."""
    if any(node.domain == _OF_ONNX_RUNTIME for node in nodes):
        return (
            f"{_OF_ONNX_RUNTIME} is ONNX Runtime's domain: save the graph without its extended optimisations, at the "
            "level of basic ones at most."
        )
    if any(node.operator == COLLECTIVE for node in nodes):
        return "Plans for several GPUs need TensorRT 10.16 or newer, or TensorRT-RTX 1.7."
    if any(map(_is_foreign, nodes)):
        return "If they are plugins of other people, name their library with --plugin-library."
    if any("embedding_bag" in node.name for node in nodes):
        return "Compute torch.nn.EmbeddingBag as torch.nn.Embedding and a sum over its bags."
    return "Write the module with other operators, or compile a part of the model."


def refused_nodes(model: onnx.ModelProto) -> list[RefusedNode]:
    """Return the nodes that no version of the parser takes, as far as that can be told without one."""
    nodes = (
        RefusedNode(node.name, node.op_type, node.domain)
        for node in nodes_of(model.graph)
        if not any(attribute.name == "plugin_version" for attribute in node.attribute)
    )
    return [node for node in nodes if _is_foreign(node) or _NOT_OF_TENSORS.fullmatch(node.operator)]


def nodes_of(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """Yield the nodes of a graph and of the graphs within it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from nodes_of(inner)


def _is_foreign(node: RefusedNode) -> bool:
    return node.domain not in (*_STANDARD, PLUGIN_NAMESPACE, TENSORRT_DOMAIN)
