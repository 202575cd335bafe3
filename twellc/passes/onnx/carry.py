"""Carry into a rewritten ONNX graph what graphsurgeon does not know: nodes as they are, notes and descriptions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx

_OF_MODEL = ("domain", "model_version", "doc_string")


def carry(model: onnx.ModelProto, rewritten: onnx.ModelProto) -> None:
    """Give `rewritten`, which graphsurgeon made of `model`, all that the nodes and tensors that it keeps have there."""
    for field in _OF_MODEL:
        setattr(rewritten, field, getattr(model, field))
    given, made = model.graph, rewritten.graph
    rewritten.metadata_props.extend(model.metadata_props)
    made.metadata_props.extend(given.metadata_props)
    nodes = {tuple(node.output): node for node in given.node}
    for node in made.node:
        source = nodes.get(tuple(node.output))
        if source is not None and _says(source) == _says(node):
            node.CopyFrom(source)
    computed = {name for node in made.node for name in node.output}
    known = {value.name for value in made.value_info}
    # Of values that are no tensors it keeps nothing.
    made.value_info.extend(each for each in given.value_info if each.name in computed - known and each.HasField("type"))
    described = [*given.value_info, *given.input, *given.output, *given.initializer]
    _describe(described, [*made.value_info, *made.input, *made.output, *made.initializer])


def _says(node: onnx.NodeProto) -> tuple[Any, ...]:
    return node.op_type, node.domain, node.name, list(node.input)


def _describe(given: Iterable[Any], made: Iterable[Any]) -> None:
    """Copy texts and metadata between values or tensors of the same names."""
    sources = {(type(each), each.name): each for each in given if each.doc_string or each.metadata_props}
    for each in made:
        source = sources.get((type(each), each.name))
        if source is not None:
            each.doc_string = source.doc_string
            del each.metadata_props[:]
            each.metadata_props.extend(source.metadata_props)
