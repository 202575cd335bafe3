"""Fixtures for tests in real, full TensorRT on a GPU; every test here needs both."""

from pathlib import Path

import pytest
import torch

from tests.runtimes import cpp_host, tensorrt
from tests.tensorrt.plans import twellc
from twellc.export.tensorrt_host import Host

__all__ = ["cpp_host", "tensorrt"]


@pytest.fixture(autouse=True)
def _real_tensorrt(tensorrt: Host) -> None:
    """Skip or fail where TensorRT is missing, also for tests that do not ask for it by name."""


@pytest.fixture(autouse=True)
def _sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch's products on the GPU, which are the yardstick, from adding parts of sums in low precision."""
    for dtype in ("bf16", "fp16"):
        monkeypatch.setattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False)


@pytest.fixture(scope="session")
def answering(tensorrt: Host, bytelm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of bytelm with a key-value cache, whose prompts go in pieces of 16 tokens."""
    plan = tmp_path_factory.mktemp("hosts") / "bytelm.plan"
    done = twellc("compile", bytelm, "-o", plan, "--kv-cache", "256", "--prefill-chunk", "16", "--max-batch-size", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    return plan
