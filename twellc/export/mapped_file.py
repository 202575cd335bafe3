"""Give back the memory of a file that a library has mapped."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECONDS_BETWEEN = 0.2
_MADV_PAGEOUT = 21  # Linux 5.4; absent from the mmap module of Python 3.11


@contextmanager
def pages_given_back(path: Path) -> Iterator[None]:
    """While the context lasts, take the pages of a mapped file out of this process's memory again and again.

    TensorRT maps the weights of an ONNX file and touches all of them while it holds its own copy. The kernel would drop
    these pages when memory runs short, but until then they count as used. They are read again when they are needed, so
    no result changes. Where the kernel cannot do this, nothing happens.
    """
    done = threading.Event()
    libc = ctypes.CDLL(None)
    path = path.resolve()

    def give_back() -> None:
        while not done.wait(_SECONDS_BETWEEN):
            for start, length in _mappings(path):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_PAGEOUT)

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _mappings(path: Path) -> list[tuple[int, int]]:
    """Return start and length of each mapping of a file in this process."""
    found = []
    for line in os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name == str(path):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end - start))
    return found
