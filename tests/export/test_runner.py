"""What needs no GPU of running a plan: what is said of one that TensorRT refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch

from twellc.base.errors import UserError
from twellc.export import runner
from twellc.export.runner import OpenPlan, PlanRunner, open_plan
from twellc.export.tensorrt_host import has_gpu, load_host


@pytest.mark.skipif(has_gpu(), reason="a GPU may be one that opens the plan")
def test_refused_plan(tmp_path: Path) -> None:
    """Without a GPU, TensorRT-RTX refuses every plan: that stands for the wrong one."""
    plan = tmp_path / "m.plan"
    plan.write_bytes(b"of another version")
    host = load_host("tensorrt-rtx")
    with pytest.raises(UserError) as refusal:
        open_plan(host, plan, "1.2.3")
    message = str(refusal.value)
    assert message.startswith(f"{plan}: the plan cannot be opened (")
    assert f"got tensorrt-rtx {host.version}; expected tensorrt-rtx 1.2.3, which built it, on a GPU" in message
    assert "Compile the model again" in message


class Doubles:
    """Stands for an execution of a plan with one input and one output."""

    def __init__(self, x: torch.Tensor) -> None:
        self.tensors = {"x": x.clone()}
        self.outputs: list[torch.Tensor] = []

    def enqueue(self) -> None:
        self.outputs = [2 * self.tensors["x"]]


def test_prepared_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[tuple[int, ...]] = []

    def prepare(plan: Any, inputs: dict[str, torch.Tensor]) -> Any:
        prepared.append(tuple(inputs["x"].shape))
        return Doubles(inputs["x"])

    class Plan(OpenPlan):
        def names(self, mode: str) -> list[str]:
            return ["x"]

    monkeypatch.setattr(runner, "prepare", prepare)
    run = PlanRunner(Plan(None, Path("m.plan"), None, [], torch.device("cuda")))  # type: ignore[arg-type]
    inputs = [torch.randn(size) for size in (3, 3, 4, 3)]
    results = [run({"x": x})[0] for x in inputs]
    assert prepared == [(3,), (4,), (3,)]
    assert all(torch.equal(y, 2 * x) for x, y in zip(inputs, results, strict=True))
