"""Keep transformers from fetching files, and from asking the package `kernels` for native code.

By what a config.json says, and for some model types in any case, transformers loads compiled kernels from a hub where
that package is installed. No file of a model is to do that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from twellc.base.threads import PROCESS_WIDE


@contextmanager
def nothing_fetched() -> Iterator[None]:
    """Import and use transformers in this context only, one thread at a time.

    Where transformers is first imported here, it takes the package `kernels` for missing until the process ends.
    """
    with PROCESS_WIDE:
        yield from _kept_from_fetching()


def _kept_from_fetching() -> Iterator[None]:
    hidden = "kernels" not in sys.modules
    if hidden:
        sys.modules["kernels"] = None  # type: ignore[assignment]  # Python's own way to say that there is none
    try:
        from huggingface_hub import constants
        from transformers.integrations import hub_kernels

        changes = [(constants, "HF_HUB_OFFLINE", True), (hub_kernels, "is_kernels_available", _unavailable)]
        before = [getattr(module, name) for module, name, _ in changes]
        for module, name, value in changes:
            setattr(module, name, value)
        try:
            yield
        finally:
            for (module, name, _), value in zip(changes, before, strict=True):
                setattr(module, name, value)
    finally:
        if hidden:
            del sys.modules["kernels"]


def _unavailable(*_: object, **__: object) -> bool:
    return False
