"""Training of models with sparse feed-forward blocks, for twellc to compile. See docs/training.md.

    from twellc.training import L1Penalty

    twellc.optimize(model, training=True)      # blocks run by the kernels, forward and backward
    penalty = L1Penalty(model, 2e-5, warm_up=1000)
    ...
    loss = loss + penalty(step)

Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twellc.training.callback import SparsityCallback
    from twellc.training.counts import FiringWindow, take_counts
    from twellc.training.dead import reinitialise_dead
    from twellc.training.log import TrainingLog
    from twellc.training.penalty import L1Penalty
    from twellc.training.relu import Blend, sparsify
    from twellc.training.trainer import SparseTrainer, SparseTrainerMixin

__all__ = [
    "Blend",
    "FiringWindow",
    "L1Penalty",
    "SparseTrainer",
    "SparseTrainerMixin",
    "SparsityCallback",
    "TrainingLog",
    "reinitialise_dead",
    "sparsify",
    "take_counts",
]

_HOMES = {
    "callback": ("SparsityCallback",),
    "counts": ("FiringWindow", "take_counts"),
    "dead": ("reinitialise_dead",),
    "log": ("TrainingLog",),
    "penalty": ("L1Penalty",),
    "relu": ("Blend", "sparsify"),
    "trainer": ("SparseTrainer", "SparseTrainerMixin"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'twellc.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"twellc.training.{_HOME[name]}"), name)
