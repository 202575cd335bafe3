"""State that all threads of a process share, such as filters of warnings: a lock for it, and garbage collection."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Held while such state is changed for a time: if two threads did so at once, each would restore the value that the
# other has set. Loading and tracing a model hold it from beginning to end, as neither transformers' `from_pretrained`
# nor torch.export is made for several threads.
PROCESS_WIDE = threading.RLock()


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage meanwhile: a fifth of the time goes into looking for it among the many objects of a graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
