"""Build plans from torch modules on twellc's own path, and run them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from tests.models import export
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.plan import build_plan
from twellc.export.profiles import input_specs
from twellc.export.runner import OpenPlan, open_plan, prepare
from twellc.export.shapes import Profile
from twellc.export.tensorrt_host import Host
from twellc.passes.pipeline import run_passes

def build(
    host: Host, module: nn.Module, folder: Path, dtype: torch.dtype, inputs: list[Tensor], dynamic: object,
    profiles: list[Profile],
) -> OpenPlan:  # fmt: skip
    """Export a module, rewrite all its blocks, build a plan in `folder` and open it; the graph is kept as `m.onnx`."""
    rewritten = run_passes(export(module, *inputs, dynamic=dynamic), dtype, "all", 8)
    assert [layer.reason for layer in rewritten.layers if layer.decision != "twell"] == []
    names = [spec.name for spec in input_specs(rewritten.program)]
    outputs = [f"y{i}" for i in range(len(rewritten.program.graph_signature.user_outputs))]
    onnx_path, plan_path = folder / "m.onnx", folder / "m.plan"
    save_onnx(export_onnx(rewritten.program, names, outputs, {}), onnx_path)
    plan = build_plan(host.name, onnx_path, plan_path, profiles, False, lambda phase: None)
    assert len(plan.plugin_layers) == len(rewritten.layers) > 0
    return open_plan(host, plan_path, host.version)


def run(plan: OpenPlan, inputs: dict[str, Tensor], profile: int = 0) -> list[Tensor]:
    """Run a plan in a context of its own; return its outputs on the CPU."""
    execution = prepare(plan, inputs, profile)
    execution.enqueue()
    torch.cuda.synchronize()
    return [tensor.cpu() for tensor in execution.outputs]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of 16-bit numbers are the same bit by bit, NaN included."""
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))
