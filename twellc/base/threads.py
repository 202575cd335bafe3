"""A lock for state that all threads of a process share, such as filters of warnings."""

from __future__ import annotations

import threading

# Held while such state is changed for a time: if two threads did so at once, each would restore the value that the
# other has set. Loading and tracing a model hold it from beginning to end, as neither transformers' `from_pretrained`
# nor torch.export is made for several threads.
PROCESS_WIDE = threading.RLock()
