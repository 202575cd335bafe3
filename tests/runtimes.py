"""TensorRTs and the host program in C++, as fixtures.

TensorRTs that can be registered in without a GPU are the lean runtimes of 10 and 11, from PyPI into pytest's cache.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.processes import captured
from twellc.export.tensorrt_host import Host, load_host

LEAN_VERSIONS = {"lean10": "10.16.1.11", "lean11": "11.4.0.106"}


def install(request: pytest.FixtureRequest, name: str, *packages: str) -> Path:
    """Install wheels, without what they need, into a folder of pytest's cache, once; skip the test if that fails."""
    folder = Path(request.config.cache.mkdir(name))  # type: ignore[union-attr]
    stamp = folder / "complete"
    # Several test processes may want it at once.
    with FileLock(folder.with_suffix(".lock")):
        if stamp.exists():
            return folder
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--upgrade", "--target", str(folder), *packages], capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = f"cannot install {' '.join(packages)}: {done.stderr.strip().splitlines()[-1]}"
            if os.environ.get("TWELLC_REQUIRE_LEAN") == "1":
                pytest.fail(reason)
            pytest.skip(reason)
        stamp.touch()
    return folder


@pytest.fixture(scope="session")
def lean_folder(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return a function that installs a lean runtime once and returns its folder."""

    @functools.cache
    def folder(name: str) -> Path:
        version = LEAN_VERSIONS[name]
        packages = [f"tensorrt-lean-cu13-{part}=={version}" for part in ("libs", "bindings")]
        return install(request, f"tensorrt-lean-{version}", *packages)

    return folder


@pytest.fixture(scope="session")
def tensorrt() -> Host:
    return load_host("tensorrt")


@pytest.fixture(scope="session")
def cpp_host(request: pytest.FixtureRequest) -> Path:
    """The C++ host, built as its README says; in pytest's cache, so that it is built once.

    TWELLC_CPP_HOST names one that was built elsewhere, for machines without a compiler.
    """
    if built := os.environ.get("TWELLC_CPP_HOST"):
        return Path(built)
    if importlib.util.find_spec("cmake") is None and shutil.which("cmake") is None:
        pytest.skip("no cmake")
    source = Path(__file__).resolve().parents[1] / "examples" / "hosts" / "cpp"
    folder = Path(request.config.cache.mkdir("hosts-cpp"))  # type: ignore[union-attr]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    for command in (["cmake", "-S", source, "-B", folder, *generator], ["cmake", "--build", folder]):
        done = captured(command)
        if "Could not install" in done.stdout + done.stderr:
            pytest.skip("no TensorRT headers, no CUDA, and no package index")
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run_plan"
