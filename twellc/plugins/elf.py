"""Facts about a shared library without opening it: a truncated one ends the process that opens it, with SIGBUS."""

from __future__ import annotations

import struct
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER_SIZE = 64
_FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
_MACHINE_CODE = 2


def expected_size(path: Path) -> int | None:
    """Return the size that an ELF file needs for its segments and tables; None for a file of another kind."""
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


def machine_code(path: Path) -> set[tuple[int, int]]:
    """Return the compute capabilities with machine code, not only PTX, in a library, from CUDA's fat binaries.

    A fat binary has a header, with its own length and that of the rest, and parts of a header and machine code or PTX.
    """
    data, found, start = path.read_bytes(), set(), -1
    while (start := data.find(_FATBIN_MAGIC, start + 1)) >= 0:
        header, length = struct.unpack_from("<6xHQ", data, start)
        part, end = start + header, start + header + length
        while part < end:
            kind, header, length, architecture = struct.unpack_from("<H2xIQ12xI", data, part)
            if kind == _MACHINE_CODE:
                found.add(divmod(architecture, 10))
            part += header + length
    return found
