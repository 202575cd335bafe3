"""Tell an ONNX file by its first bytes. Importing this imports no onnx."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

# Field numbers of ModelProto: version, producer strings, graph, opsets, metadata, training, functions, configurations.
_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}


def looks_like_onnx(path: Path) -> bool:
    """Whether a file starts as an ONNX model does: with fields of its message, among them a graph or opsets."""
    if not path.is_file():
        return False
    size, seen = path.stat().st_size, set()
    with path.open("rb") as stream:
        while stream.tell() < size:
            field, wire = divmod(_varint(stream), 8)
            if _FIELDS.get(field) != wire:
                return False
            seen.add(field)
            value = _varint(stream)
            if value < 0:
                break
            if wire == 2:
                stream.seek(min(value, size), os.SEEK_CUR)
    return bool(seen & {7, 8})


def _varint(stream: BinaryIO) -> int:
    value = shift = 0
    while shift < 64 and (byte := stream.read(1)):
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if byte[0] < 0x80:
            return value
    return -1
