"""Fixtures for tests in real, full TensorRT on a GPU; every test here needs both."""

from __future__ import annotations

import pytest

from tests.runtimes import cpp_host, tensorrt
from twellc.export.tensorrt_host import Host

__all__ = ["cpp_host", "tensorrt"]


@pytest.fixture(autouse=True)
def _real_tensorrt(tensorrt: Host) -> None:
    """Skip or fail where TensorRT is missing, also for tests that do not ask for it by name."""
