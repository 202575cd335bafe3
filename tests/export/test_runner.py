"""What needs no GPU of running a plan: what is said of one that TensorRT refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from twellc.base.errors import UserError
from twellc.export.runner import run_plan
from twellc.export.tensorrt_host import has_gpu, load_host


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
