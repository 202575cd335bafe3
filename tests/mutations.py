"""Hypothesis strategies that damage files: as bytes, as zip archives, as JSON and as protobuf messages."""

import copy
import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import onnx
from google.protobuf.message import Message
from hypothesis import strategies as st

Draw = Callable[..., Any]


@st.composite
def damaged_bytes(draw: Draw, content: bytes) -> bytes:
    """Flip, overwrite, cut, repeat or insert at a few places."""
    for _ in range(draw(st.integers(1, 3))):
        if not content:
            return draw(st.binary(max_size=64))
        # The ends hold headers and directories.
        near = st.one_of(
            st.integers(0, min(200, len(content)) - 1), st.integers(max(0, len(content) - 200), len(content) - 1)
        )
        start = draw(st.one_of(near, st.integers(0, len(content) - 1)))
        stop = min(len(content), start + draw(st.sampled_from((1, 2, 4, 8, 64, 512, 1 << 20))))
        bit, fill = draw(st.integers(0, 7)), draw(st.sampled_from((b"\xff", b"\x7f", b"\x80", b"\0")))
        # What comes in the place of what, by its end.
        changes = {
            "flip": (bytes([content[start] ^ 1 << bit]), start + 1),
            "set": (fill * (stop - start), stop),
            "zero": (bytes(stop - start), stop),
            "cut": (b"", stop),
            "end": (b"", len(content)),
            "repeat": (content[start:stop], start),
            "insert": (draw(st.binary(min_size=1, max_size=16)), start),
        }
        new, end = changes[draw(st.sampled_from(tuple(changes)))]
        content = content[:start] + new + content[end:]
    return content


DEEP = "DEEP"
STRANGE: dict[str, tuple[Any, ...]] = {
    "number": (-1, 0, 1, 2, 7, 255, 65537, 2**31, -(2**31) - 1, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30),
    "float": (0.5, -1e308, 1e-320, float("inf"), float("nan")),
    "constant": (None, True, False),
    "text": ("", "\0", "../x", "a" * 70000, "\ud800", "1", "é", "%s{}", "[bold]", "\n"),
    "container": ([], {}, [None], [[]], {"": ""}, {"a": 1}, [0, -1]),
    "deep": (DEEP,),
}


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container with every key of it."""
    found, pending = [], [value]
    while pending:
        value = pending.pop()
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            found.append((value, key))
            pending.append(item)
    return found


@st.composite
def damaged_json(draw: Draw, text: bytes) -> bytes:
    """Replace, remove, rename or repeat values anywhere in a document."""
    document = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        places = _places(document)
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename", "repeat")))
        if kind == "replace":
            values = [places[i][0][places[i][1]] for i in range(0, len(places), 1 + len(places) // 50)]
            # A copy: a value inside of itself would have no end.
            strange = {**STRANGE, "other": values}
            container[key] = copy.deepcopy(draw(st.sampled_from(strange[draw(st.sampled_from(tuple(strange)))])))
        elif kind == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif kind == "rename":
            container[draw(st.sampled_from(("", "x", "__enum__", f"{key}2", str(key).upper())))] = container.pop(key)
    depth = 100_000
    return json.dumps(document).replace(f'"{DEEP}"', "[" * depth + "]" * depth).encode(errors="surrogatepass")


@st.composite
def damaged_lines(draw: Draw, content: bytes) -> bytes:
    """Damage the values of a line of JSON, or the bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(content))
    lines = content.splitlines()
    index = draw(st.integers(0, len(lines) - 1))
    lines[index] = draw(damaged_json(lines[index]))
    return b"\n".join(lines)


@st.composite
def damaged_safetensors(draw: Draw, content: bytes) -> bytes:
    """Damage the header's values, or the bytes."""
    if draw(st.booleans()):
        return draw(damaged_bytes(content))
    (length,) = struct.unpack("<Q", content[:8])
    header = draw(damaged_json(content[8 : 8 + length]))
    return (
        struct.pack("<Q", draw(st.sampled_from((len(header), len(header), len(header), 1 << 62, 0))))
        + header
        + content[8 + length :]
    )


@st.composite
def damaged_zip(draw: Draw, content: bytes) -> bytes:
    """Damage the bytes; or take records out, swap, repeat, rename or damage them and write a sound archive."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(content))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    for _ in range(draw(st.integers(1, 2))):
        index, other = (draw(st.integers(0, len(records) - 1)) for _ in range(2))
        name, record = records[index]
        kind = draw(st.sampled_from(("json", "json", "json", "bytes", "swap", "drop", "repeat", "rename")))
        if kind == "json":
            candidates = [i for i, (found, _) in enumerate(records) if found.endswith(".json")]
            if candidates:
                index = draw(st.sampled_from(candidates))
                try:
                    records[index] = records[index][0], draw(damaged_json(records[index][1]))
                except (ValueError, RecursionError):
                    continue  # damaged before
        elif kind == "bytes":
            records[index] = name, draw(damaged_bytes(record))
        elif kind == "swap":
            records[index], records[other] = (name, records[other][1]), (records[other][0], record)
        elif kind == "drop" and len(records) > 1:
            del records[index]
        elif kind == "repeat":
            records.append(records[index])
        else:
            renamed = draw(st.sampled_from(("../x", "", "a" * 300, name.upper(), name + "\0", "é", records[other][0])))
            records[index] = renamed, record
    buffer = io.BytesIO()
    method = draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")  # a name that is there twice
        for name, record in records:
            archive.writestr(zipfile.ZipInfo(name), record, method)
    return buffer.getvalue()


def _fields(message: Message) -> list[tuple[Message, Any]]:
    found, pending = [], [message]
    while pending:
        message = pending.pop()
        for descriptor, value in message.ListFields():
            found.append((message, descriptor))
            if descriptor.message_type is not None:
                pending.extend(value if hasattr(value, "__len__") else [value])
    return found


@st.composite
def damaged_onnx(draw: Draw, content: bytes) -> bytes:
    """Damage the bytes, or replace, clear and repeat fields of the message."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(content))
    model = onnx.ModelProto()
    model.ParseFromString(content)
    for _ in range(draw(st.integers(1, 2))):
        fields = _fields(model)
        if not fields:
            break
        message, descriptor = fields[draw(st.integers(0, len(fields) - 1))]
        name, value = descriptor.name, getattr(message, descriptor.name)
        several = hasattr(value, "add") or hasattr(value, "append")
        index = draw(st.integers(0, max(0, len(value) - 1))) if several else 0
        kind = draw(st.sampled_from(("replace", "replace", "clear", "repeat")))
        if kind == "clear" and several and len(value):
            del value[index]
        elif kind == "clear":
            message.ClearField(name)
        elif descriptor.message_type is not None:
            if several:
                value.add().CopyFrom(value[index])
        else:
            strange = _strange_scalar(draw, descriptor, value[index] if several and len(value) else value)
            if strange is None:
                continue
            if several and kind == "replace" and len(value):
                value[index] = strange
            elif several:
                value.append(strange)
            else:
                setattr(message, name, strange)
    return model.SerializeToString()


_SIZES = (-1, 0, 1, 2, 3, 17, 2**31, 2**40, 2**62, 2**63 - 1)
_FLOATS = (0.0, -1.0, float("nan"), float("inf"), 1e30)
_NAMES = ("", "x", "Relu", "MatMul", "If", "Loop", "Scan", "Reshape", "a" * 3000, "é", "\0", "../x", "[bold]")


def _strange_scalar(draw: Draw, descriptor: Any, value: Any) -> Any:
    kinds = type(descriptor)
    if descriptor.cpp_type == kinds.CPPTYPE_STRING and isinstance(value, bytes):
        return draw(damaged_bytes(value))
    if descriptor.cpp_type == kinds.CPPTYPE_ENUM:
        return draw(st.sampled_from([each.number for each in descriptor.enum_type.values]))
    strange: dict[int, tuple[Any, ...]] = {
        kinds.CPPTYPE_INT64: _SIZES,
        kinds.CPPTYPE_UINT64: _SIZES[1:],
        kinds.CPPTYPE_INT32: (-1, 0, 1, 2, 3, 8, 16, 22, 99, 2**31 - 1),
        kinds.CPPTYPE_FLOAT: _FLOATS,
        kinds.CPPTYPE_DOUBLE: _FLOATS,
        kinds.CPPTYPE_STRING: _NAMES,
    }
    return draw(st.sampled_from(strange[descriptor.cpp_type])) if descriptor.cpp_type in strange else None
