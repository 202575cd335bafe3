"""What needs no GPU of running a plan: the types of its tensors, and what is said of a plan that TensorRT refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twellc.base.errors import UserError
from twellc.export import triton
from twellc.export.runner import _TORCH_DTYPES, run_plan
from twellc.export.tensorrt_host import has_gpu, load_host


def test_what_can_be_served_can_be_run() -> None:
    """Both tables name the element types that inputs and outputs of a plan can have."""
    assert {name.lower() for name in _TORCH_DTYPES} == set(triton._TYPES)


@pytest.mark.skipif(has_gpu(), reason="a GPU may be one that opens the plan")
def test_refused_plan(tmp_path: Path) -> None:
    """Without a GPU, TensorRT-RTX refuses every plan: that stands for the wrong one."""
    plan = tmp_path / "m.plan"
    plan.write_bytes(b"of another version")
    host = load_host("tensorrt-rtx")
    with pytest.raises(UserError) as refusal:
        run_plan(host, plan, "1.2.3", {"x": torch.zeros(1)})
    message = str(refusal.value)
    assert message.startswith(f"{plan}: the plan cannot be opened (")
    assert f"got tensorrt-rtx {host.version}; expected tensorrt-rtx 1.2.3, which built it, on a GPU" in message
    assert "Compile the model again" in message
