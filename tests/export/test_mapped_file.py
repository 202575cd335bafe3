"""The memory of a mapped file is given back, and its content stays readable."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import pytest

from twellc.export.mapped_file import pages_given_back

SIZE = 32 << 20


def resident_kilobytes(path: Path) -> int:
    """Resident memory of a file's mapping in this process."""
    of_file = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0] and not line.split(maxsplit=1)[0].endswith(":"):
            of_file = line.endswith(str(path))
        elif of_file and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError(f"{path} is not mapped")


def supports_pageout(path: Path) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                                            flags=mmap.MAP_PRIVATE) as view:  # fmt: skip
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 21)) == 0


def test_pages_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights.data"
    content = os.urandom(1 << 20) * (SIZE >> 20)
    with path.open("wb") as new:
        new.write(content)
        os.fsync(new.fileno())  # pages that wait to be written stay
    if not supports_pageout(path):
        pytest.skip("this kernel cannot page out on request")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        assert view[:] == content
        assert resident_kilobytes(path) > SIZE // 1024 // 2
        with pages_given_back(path):
            deadline = time.monotonic() + 30
            while resident_kilobytes(path) > SIZE // 1024 // 10 and time.monotonic() < deadline:
                time.sleep(0.05)
        assert resident_kilobytes(path) <= SIZE // 1024 // 10
        assert view[:] == content
