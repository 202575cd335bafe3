"""What an ONNX file may hold: all of it is carried into the rewritten graph, or the file is refused.

Sparse tensors become dense ones where they stand, as initializers, of graphs in nodes too, and in Constant nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import AttributeProto

from twellc.base.bounds import refuse_unfolding
from twellc.base.errors import UserError, first_few, first_line

# A weight with one non-zero in a hundred takes about this part of its bytes.
_MOST_OF_SPARSE = 32
_MOST_CALLS, _DEEPEST_CALLS = 100_000, 64
_ATTRIBUTES = {
    *(AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.STRING, AttributeProto.TENSOR, AttributeProto.GRAPH),
    *(AttributeProto.FLOATS, AttributeProto.INTS, AttributeProto.STRINGS, AttributeProto.TENSORS),
    *(AttributeProto.TYPE_PROTO, AttributeProto.TYPE_PROTOS),
}
_LARGEST = 2**62
_Key = tuple[str, str, str]  # of a function: domain, name, overload


def messages_in(message: Message) -> Iterator[Message]:
    """Yield a message and all that it holds."""
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for each in value if hasattr(value, "__len__") else [value]:
                yield from messages_in(each)


def tensors_in(message: Message) -> Iterator[onnx.TensorProto]:
    """Yield every tensor in a message, wherever it is."""
    return (each for each in messages_in(message) if isinstance(each, onnx.TensorProto))


def refuse_unread(path: Path, model: onnx.ModelProto) -> None:
    """Fail if a model holds what the rewritten one would not.

    Raises:
        UserError: It does; the message names it.
    """
    found = next(_unread_in(model), None)
    if found is not None:
        what = "holds what twellc does not carry into a rewritten graph"
        raise UserError(str(path), what, got=found, fix="Export the model without it.")


def _unread_in(model: onnx.ModelProto) -> Iterator[str]:
    if model.training_info:
        yield "training information (training_info)"
    if model.configuration:
        yield f"a device configuration ({model.configuration[0].name!r})"
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.WhichOneof("value")
        if kind not in ("tensor_type", None):
            yield f"{value.name!r}, which is no tensor but of kind {kind.removesuffix('_type')}"
    for message in messages_in(model):
        unknown = UnknownFieldSet(message)
        if len(unknown):
            kind = message.DESCRIPTOR.name
            yield f"field {unknown[0].field_number} of a {kind}, which onnx {onnx.__version__} does not know"
        if isinstance(message, onnx.GraphProto):
            if message.quantization_annotation:
                yield f"a quantisation annotation of {message.quantization_annotation[0].tensor_name!r}"
            given = [*(each.name for each in message.initializer), *(e.values.name for e in message.sparse_initializer)]
            computed = [name for node in message.node for name in node.output if name]
            twice = [name for name, times in Counter([*given, *computed]).items() if times > 1]
            if twice:
                yield f"several tensors of one name: {first_few(twice)}"
        elif isinstance(message, onnx.NodeProto):
            where = f"of the {message.op_type} {message.name or first_few(list(message.output))}"
            if message.device_configurations:
                yield f"a device configuration {where}"
            for each in message.attribute:
                if each.name == "num_outputs" and each.i != len(message.output):  # shape inference makes as many
                    yield f"{each.i} outputs {where}, which has {len(message.output)}"
                constant = message.op_type == "Constant" and each.name == "sparse_value"
                if each.type not in _ATTRIBUTES and not (constant and each.type == AttributeProto.SPARSE_TENSOR):
                    kind = AttributeProto.AttributeType.Name(each.type)
                    yield f"the attribute {each.name!r} of kind {kind} {where}"


# ---- sparse tensors ----


def make_dense(path: Path, model: onnx.ModelProto) -> None:
    """Put dense tensors in the place of sparse ones, in a model whose external data is loaded.

    Raises:
        UserError: One is damaged, or they would take far more memory than the file has bytes.
    """
    sparse = [each for each in messages_in(model) if isinstance(each, onnx.SparseTensorProto)]
    for each in sparse:
        check_size(path, each.values)
        check_size(path, each.indices)
        _refuse_shape(path, each.values.name, list(each.dims))
    size = sum(math.prod(each.dims) * max(bits_of(each.values.data_type), 8) // 8 for each in sparse)
    stored = sum(each.ByteSize() for each in sparse)
    refuse_unfolding(str(path), "its sparse tensors", size, stored, most=_MOST_OF_SPARSE)
    for message in list(messages_in(model)) if sparse else ():
        if isinstance(message, onnx.GraphProto) and message.sparse_initializer:
            message.initializer.extend(_dense(path, each) for each in message.sparse_initializer)
            del message.sparse_initializer[:]
        elif isinstance(message, AttributeProto) and message.type == AttributeProto.SPARSE_TENSOR:
            tensor = _dense(path, message.sparse_tensor)
            message.ClearField("sparse_tensor")
            message.name, message.type = "value", AttributeProto.TENSOR
            message.t.CopyFrom(tensor)


def _dense(path: Path, sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name, dims = sparse.values.name, tuple(sparse.dims)
    try:
        values, indices = map(onnx.numpy_helper.to_array, (sparse.values, sparse.indices))
        if indices.ndim == 2 and len(indices):
            outside = (indices < 0) | (indices >= np.array(dims))
            indices = np.full(len(indices), -1) if outside.any() else np.ravel_multi_index(tuple(indices.T), dims)
        indices = indices.reshape(-1)
        fits = values.shape == indices.shape and sparse.indices.data_type == onnx.TensorProto.INT64
        if not fits or (len(indices) and (indices[0] < 0 or indices[-1] >= math.prod(dims))):
            raise ValueError("its indices do not fit its values and its shape")
        if (np.diff(indices) <= 0).any():
            raise ValueError("its indices do not ascend")
        dense = np.zeros(math.prod(dims), values.dtype)
        dense[indices] = values
        tensor = onnx.numpy_helper.from_array(dense.reshape(dims), name)
    except Exception as error:  # numpy and onnx raise what they like for a damaged tensor
        raise UserError(str(path), f"the sparse tensor {name!r} is damaged ({first_line(error)})") from error
    tensor.doc_string = sparse.values.doc_string
    tensor.metadata_props.extend(sparse.values.metadata_props)
    return tensor


# ---- sizes ----


def check_size(path: Path, tensor: onnx.TensorProto, stored: int | None = None) -> None:
    """Check that a tensor holds as many bytes as its shape says, before anything takes the shape at its word.

    Args:
        path: The model's file.
        tensor: The tensor.
        stored: How many bytes it has outside of the file; None of one that is in it.

    Raises:
        UserError: It does not, or the type of its elements is unknown.
    """
    _refuse_shape(path, tensor.name, list(tensor.dims))
    if tensor.data_type not in onnx.TensorProto.DataType.values():
        what = f"is not a valid ONNX model (tensor {tensor.name!r} has elements of an unknown type)"
        raise UserError(str(path), what, got=str(tensor.data_type))
    elements, bits = math.prod(tensor.dims), bits_of(tensor.data_type)
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
    if stored is not None or tensor.HasField("raw_data"):
        held = len(tensor.raw_data) if stored is None else stored
        needed, unit = -(-elements * bits // 8), "bytes"
    else:
        held, unit = sum(len(getattr(tensor, each)) for each in fields), "numbers"
        complex_ = tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128)
        needed = 2 * elements if complex_ else -(-elements * bits // 8) if bits < 8 else elements
    if held != needed:
        what = f"is not a valid ONNX model (tensor {tensor.name!r} holds {held} {unit} where its shape needs {needed})"
        raise UserError(str(path), what)


def _refuse_shape(path: Path, name: str, dims: list[int]) -> None:
    if any(dim < 0 for dim in dims) or math.prod(max(dim, 1) for dim in dims) > _LARGEST or len(dims) > 64:
        what = f"is not a valid ONNX model (tensor {name!r} has an impossible shape)"
        raise UserError(str(path), what, got="x".join(map(str, dims[:8])))


def bits_of(data_type: int) -> int:
    """Return how many bits an element has; those of a string are counted elsewhere."""
    if data_type in (onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED):
        return 8
    name = onnx.TensorProto.DataType.Name(data_type)
    four = name in ("INT4", "UINT4", "FLOAT4E2M1")
    two = name in ("INT2", "UINT2")
    return 4 if four else 2 if two else onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize * 8


def refuse_many_calls(path: Path, model: onnx.ModelProto) -> None:
    """Fail if a model's functions call each other so often, or so deeply, that they cannot be inlined.

    Raises:
        UserError: They do, or one calls itself.
    """
    functions = {_key(each): each for each in model.functions}
    calls = {key: [_called(node) for node in _nodes_of(each)] for key, each in functions.items()}
    bytes_of = {key: each.ByteSize() for key, each in functions.items()}
    nodes, sizes, depths = dict[_Key, int](), dict[_Key, int](), dict[_Key, int]()
    while len(nodes) < len(functions):
        ready = [
            key for key in functions
            if key not in nodes and all(called in nodes for called in calls[key] if called in functions)
        ]  # fmt: skip
        if not ready or (len(depths) and max(depths.values()) > _DEEPEST_CALLS):
            what = "its functions call themselves" if not ready else "its functions call each other too deeply"
            raise UserError(str(path), what, fix="Export the model without functions.")
        for key in ready:
            inner = [called for called in calls[key] if called in functions]
            nodes[key] = len(calls[key]) + sum(nodes[called] for called in inner)
            sizes[key] = bytes_of[key] + sum(sizes[called] for called in inner)
            depths[key] = 1 + max((depths[called] for called in inner), default=0)
    inner = [key for key in map(_called, _nodes_of(model.graph)) if key in functions]
    count, size = sum(nodes[key] for key in inner), sum(sizes[key] for key in inner)
    if count > _MOST_CALLS:
        what = "its functions become too many nodes in the graph"
        raise UserError(str(path), what, expected=f"at most {_MOST_CALLS}", fix="Export the model without functions.")
    refuse_unfolding(str(path), "its functions", size, model.ByteSize())


def _key(function: onnx.FunctionProto) -> _Key:
    return function.domain, function.name, function.overload


def _called(node: onnx.NodeProto) -> _Key:
    return node.domain, node.op_type, node.overload


def _nodes_of(message: Message) -> list[onnx.NodeProto]:
    return [each for each in messages_in(message) if isinstance(each, onnx.NodeProto)]
