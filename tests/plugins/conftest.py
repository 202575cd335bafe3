import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.compilers import nvcc
from tests.plugins.seeds import draw_seed
from tests.runtimes import lean_folder

__all__ = ["lean_folder", "nvcc"]

# Files of tests that all need a GPU have thousands of cases: without one they are not read.
collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if not torch.cuda.is_available()
    and os.environ.get("TWELLC_REQUIRE_GPU") != "1"
    and re.search(r"^pytestmark = \[?pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
]


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None:
        seed = draw_seed(request.node.name)
        sys.stdout.write(f"torch.manual_seed({seed})\n")
        torch.manual_seed(seed)
