"""Tell a shared library that is cut off from a whole one: opening the former ends the process with SIGBUS."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER_SIZE = 64


def expected_size(path: Path) -> int | None:
    """Return how long an ELF file must be to hold its segments and tables; None for a file of another kind."""
    with path.open("rb") as stream:
        header = stream.read(_HEADER_SIZE)
        if len(header) < _HEADER_SIZE or not header.startswith(_MAGIC):
            return None
        segments, sections = struct.unpack_from("<2Q", header, 32)
        segment_size, segment_count, section_size, section_count = struct.unpack_from("<4H", header, 54)
        ends = [segments + segment_size * segment_count, sections + section_size * section_count]
        if ends[0] > path.stat().st_size:
            return int(max(ends))
        stream.seek(segments)
        table = stream.read(segment_size * segment_count)
    for start in range(0, len(table), segment_size):
        offset, length = struct.unpack_from("<Q16xQ", table, start + 8)
        ends.append(offset + length)
    return int(max(ends))
