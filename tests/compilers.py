"""The CUDA compiler, as a fixture."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runtimes import install


@pytest.fixture(scope="session")
def nvcc(request: pytest.FixtureRequest) -> Path:
    """An nvcc: $CUDACXX, the one that the build in build/ uses, an installed one, or the one that a build installs.

    `pip install .` builds in a folder that it deletes, so the wheels are installed once more, into pytest's cache.
    """
    for found in (os.environ.get("CUDACXX"), _of_the_build(), shutil.which("nvcc")):
        if found and Path(found).is_file():
            return Path(found)
    wheels = wheels_of_the_build()
    version = wheels[0].rpartition("==")[2]
    return install(request, f"nvcc-{version}", *wheels) / "nvidia" / "cu13" / "bin" / "nvcc"


def wheels_of_the_build() -> list[str]:
    """Return the requirements that plugins/cmake/TwellCuda.cmake names."""
    text = (ROOT / "plugins" / "cmake" / "TwellCuda.cmake").read_text()
    found = re.search(r"set\(TWELL_CUDA_WHEELS\s+([^)]*)\)", text)
    assert found is not None
    return found[1].split()


def _of_the_build() -> str | None:
    cache = ROOT / "build" / "CMakeCache.txt"
    found = re.search(r"^CMAKE_CUDA_COMPILER:\w+=(.+)$", cache.read_text(), re.MULTILINE) if cache.is_file() else None
    return found[1] if found else None
