"""twellc compiles transformers with sparse feed-forward layers into TensorRT engines.

docs/api.md shows the functions below; importing this imports neither torch nor anything else that is large.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from twellc.optimization import optimize, optimized_blocks, restore

_HOMES = {
    "optimization": ("optimize", "optimized_blocks", "restore"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["optimize", "optimized_blocks", "restore"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'twellc' has no attribute {name!r}")
    return getattr(importlib.import_module(f"twellc.{_HOME[name]}"), name)
