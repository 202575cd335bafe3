"""What all threads of a process share, changed by one thread at a time."""

from __future__ import annotations

import threading

# Held while something is changed for a while that all threads share, such as filters of warnings: of two threads that
# did so at once, each would restore what the other has set. Loading and tracing a model hold it from beginning to end,
# as neither transformers' `from_pretrained` nor torch.export is made for several threads.
PROCESS_WIDE = threading.RLock()
