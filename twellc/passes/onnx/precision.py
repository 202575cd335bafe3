"""Turn every float of an ONNX model, inputs and outputs included, into float64: the reference of `twellc check`."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
# Attributes that hold an element type: of casts and generators. The inner precision of normalisations, stash_type,
# stays: the reference evaluator knows one value only, and computes in the dtype of the operands.
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype")


def widen_onnx(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in float64 throughout; it is for onnx's reference evaluator, not for other runtimes."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen_graph(wide.graph)
    return wide


def _widen_graph(graph: onnx.GraphProto) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _FLOATS:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    del graph.value_info[:]
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _widen_graph(attribute.g)
            elif attribute.name in _TYPE_ATTRIBUTES and attribute.i in _FLOATS:
                attribute.i = onnx.TensorProto.DOUBLE
            elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                _widen_numbers(attribute)


def _widen_numbers(attribute: onnx.AttributeProto) -> None:
    number = attribute.f if attribute.name == "value_float" else list(attribute.floats)
    tensor = numpy_helper.from_array(np.asarray(number, np.float64))
    attribute.Clear()
    attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
    attribute.t.CopyFrom(tensor)


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
