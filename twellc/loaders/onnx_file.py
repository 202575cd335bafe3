"""Load an ONNX file, with its external data from the same folder and from nowhere else.

External data is checked as a whole before any of it is read: every location is a plain relative path to a regular file
in the model's folder, without links on the way, and every range lies in its file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

import onnx
import onnx.inliner
from google.protobuf.message import DecodeError

from twellc.base.bounds import refuse_unfolding
from twellc.base.errors import UserError, first_line
from twellc.loaders.onnx_content import check_size, make_dense, refuse_many_calls, refuse_unread, tensors_in
from twellc.passes.onnx.ffn import skeleton

_KEYS = ("location", "offset", "length", "checksum")
# Protobuf ends at 2 GiB a message.
_LARGEST_MESSAGE = 2**31 - 1


def load_onnx(path: Path) -> onnx.ModelProto:
    """Load a model with all of its weights in memory, without functions.

    Raises:
        UserError: It is damaged, no valid ONNX, or its external data lies elsewhere.
    """
    if path.stat().st_size > _LARGEST_MESSAGE:
        what = "is larger than an ONNX file can be"
        fix = "Save the weights as external data."
        raise UserError(str(path), what, got=f"{path.stat().st_size} bytes", expected="at most 2 GiB", fix=fix)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise UserError(str(path), "is a truncated or damaged ONNX file") from error
    external = _check_external(path, model)
    stored = {data.file: data.file.stat().st_size for _, data in external}
    size = sum(data.length for _, data in external)
    refuse_unfolding(str(path), "the external data of its tensors", size, sum(stored.values()))
    for tensor, data in external:
        check_size(path, tensor, data.length)
    for tensor, data in external:
        _read_external(tensor, data, path)
    refuse_unread(path, model)
    make_dense(path, model)
    for each in tensors_in(model):
        check_size(path, each)
    if model.functions:
        refuse_many_calls(path, model)
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        # Weights are constants, also where a caller could replace them.
        weights = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in weights]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = max(model.ir_version, onnx.IR_VERSION_2019_1_22)  # the first in which they are not inputs
        if not model.graph.output:
            raise ValueError("it has no outputs")
        model.graph.name = model.graph.name or "graph"  # some tools write none, and the checker asks for one
        onnx.checker.check_model(skeleton(model))
    except Exception as error:  # the checker's own errors, and what C++ throws at a damaged model
        raise UserError(str(path), f"is not a valid ONNX model ({first_line(error)})") from error
    return model


def external_files(path: Path) -> list[Path]:
    """Return the files with external data of a model that was loaded before."""
    model = onnx.ModelProto()
    model.ParseFromString(path.read_bytes())
    return sorted({data.file for _, data in _check_external(path, model)})


class _External:
    """A range of a file in the model's folder."""

    def __init__(self, file: Path, offset: int, length: int) -> None:
        self.file, self.offset, self.length = file, offset, length


def _check_external(path: Path, model: onnx.ModelProto) -> list[tuple[onnx.TensorProto, _External]]:
    external = []
    for tensor in tensors_in(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            external.append((tensor, _external(path, tensor)))
    return external


def _external(path: Path, tensor: onnx.TensorProto) -> _External:
    entries = [(entry.key, entry.value) for entry in tensor.external_data]
    keys, fields = [key for key, _ in entries], dict(entries)
    location = fields.get("location", "")

    def refuse(what: str, got: str) -> UserError:
        return UserError(
            str(path),
            f"the external data of tensor {tensor.name!r} {what}",
            got=got,
            expected="a range of a regular file in the model's folder, without links on the way",
            fix="twellc reads nothing else; save the model with its data in one folder.",
        )

    if len(set(keys)) != len(keys) or not set(keys) <= set(_KEYS):
        raise refuse("has unknown or repeated fields", ", ".join(keys))
    parts = PurePosixPath(location).parts
    plain = parts and not PurePosixPath(location).is_absolute() and ".." not in parts and "\0" not in location
    if not plain or "\\" in location or ":" in location:
        raise refuse("does not have a plain relative location", repr(location))
    file = path.parent
    for index, part in enumerate(parts):
        file = file / part
        try:
            status = file.lstat()
        except OSError as error:
            raise refuse(f"cannot be found ({error.strerror})", repr(location)) from error
        last = index == len(parts) - 1
        if not (stat.S_ISREG(status.st_mode) if last else stat.S_ISDIR(status.st_mode)):
            raise refuse("is not a regular file", f"{location!r}, where {part!r} is {_kind(status.st_mode)}")
        if last and status.st_nlink > 1:
            raise refuse("is a file with several names (hard links)", repr(location))
    numbers = [fields.get(key, "") for key in ("offset", "length")]
    if not all(number.isascii() and (number.isdigit() or not number) for number in numbers):
        raise refuse("has an offset or length that is not a number", " and ".join(map(repr, numbers)))
    offset = int(numbers[0] or 0)
    length = int(numbers[1]) if numbers[1] else status.st_size - offset
    if offset > status.st_size or length < 0 or offset + length > status.st_size:
        raise refuse("ends behind its file", f"bytes {offset} to {offset + length} of {status.st_size}")
    return _External(file, offset, length)


def _kind(mode: int) -> str:
    return "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "no regular file"


def _read_external(tensor: onnx.TensorProto, data: _External, path: Path) -> None:
    # The file was checked by name: neither follow a link nor wait at a pipe that has taken its place since.
    descriptor = os.open(data.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(str(path), f"the external data of tensor {tensor.name!r} is not a regular file")
        stream.seek(data.offset)
        tensor.raw_data = stream.read(data.length)
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT
