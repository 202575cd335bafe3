from __future__ import annotations

import sys

import pytest
import torch

from tests.compilers import nvcc
from tests.plugins.seeds import draw_seed
from tests.runtimes import lean_folder

__all__ = ["lean_folder", "nvcc"]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Seed what a test draws; the seed is shown with a failure."""
    if request.node.get_closest_marker("gpu") is not None:
        seed = draw_seed(request.node.name)
        sys.stdout.write(f"torch.manual_seed({seed})\n")
        torch.manual_seed(seed)
