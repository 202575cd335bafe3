"""Build plans on twellc's own paths, and run them."""

import copy
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.models import export
from tests.processes import TWELLC, captured
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.plan import build_plan
from twellc.export.runner import OpenPlan, open_plan, prepare
from twellc.export.shapes import ShapeProfile
from twellc.export.tensorrt_host import Host
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.passes.sizes.inputs import input_specs

# What other processes need to find: PYTHONPATH may have more than twellc.
MODULE_PATH = [folder for folder in sys.path if folder]


def twellc(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    command = [*TWELLC, *map(str, arguments)]
    return captured(command)


def compiled(model: Path, plan: Path, *options: str) -> Path:
    done = twellc("compile", model, "-o", plan, "--backend", "tensorrt", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return plan


def build(
    host: Host, module: nn.Module, folder: Path, dtype: torch.dtype, inputs: list[Tensor], dynamic: object,
    profiles: list[ShapeProfile],
) -> OpenPlan:  # fmt: skip
    """Export a module, rewrite all its blocks, build a plan in `folder` and open it; the graph is kept as `m.onnx`."""
    rewritten = run_passes(export(module, *inputs, dynamic=dynamic), PassOptions(dtype, "all"))
    assert [layer.reason for layer in rewritten.layers if layer.decision != "twell"] == []
    names = [spec.name for spec in input_specs(rewritten.program)]
    outputs = [f"y{i}" for i in range(len(rewritten.program.graph_signature.user_outputs))]
    onnx_path, plan_path = folder / "m.onnx", folder / "m.plan"
    save_onnx(export_onnx(rewritten.program, names, outputs, {}), onnx_path)
    plan = build_plan(host.name, onnx_path, plan_path, profiles, [], [], "", False, lambda phase: None)
    assert len(plan.plugin_layers) == len(rewritten.layers) > 0
    return open_plan(host, plan_path, host.version)


def run(plan: OpenPlan, inputs: dict[str, Tensor], profile: int = 0) -> list[Tensor]:
    """Run a plan in a context of its own; return its outputs on the CPU."""
    execution = prepare(plan, inputs, profile)
    execution.enqueue()
    torch.cuda.synchronize()
    return [tensor.cpu() for tensor in execution.outputs]


def yardsticks(module: nn.Module, *inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return each output of a module in its own precision and in float64, computed on the GPU by torch."""
    on_gpu = copy.deepcopy(module).cuda()
    plain = tree_leaves(on_gpu(*(tensor.cuda() for tensor in inputs)))
    truth = tree_leaves(on_gpu.double()(*(tensor.cuda().double() for tensor in inputs)))
    return [(mine.cpu(), exact.cpu()) for mine, exact in zip(plain, truth, strict=True)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of 16-bit numbers are the same bit by bit, NaN included."""
    return torch.equal(a.cpu().view(torch.int16), b.cpu().view(torch.int16))
