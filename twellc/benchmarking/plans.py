"""Plans of full TensorRT as contestants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from twellc.base.errors import UserError
from twellc.benchmarking.contest import Contest
from twellc.compiling.compiler import compile_model
from twellc.export.runner import OpenPlan, open_plan, prepare
from twellc.export.shapes import ShapeRange
from twellc.export.tensorrt_host import load_host, python_module
from twellc.options.commands import BenchOptions, CompileOptions
from twellc.options.decisions import DecisionOptions
from twellc.options.source import TracingOptions
from twellc.options.weights import WeightOptions
from twellc.passes.report import Earlier
from twellc.passes.sizes.inputs import ModelInputs
from twellc.samples.samples import Sample

TENSORRT = "tensorrt"
PLAN_DENSE, PLAN_TWELL = "plan dense", "plan twell"


def refuse_without_tensorrt() -> None:
    """Fail where no plan can be built.

    Raises:
        UserError: Full TensorRT is not installed.
    """
    if python_module(TENSORRT) is None:
        what = "full TensorRT (the module tensorrt), which builds the plans, is not installed"
        raise UserError("--tensorrt", what, fix="Install it, or leave the option out.")


def profiles_of(inputs: ModelInputs, samples: list[Sample]) -> list[tuple[str, ShapeRange]]:
    """Return an optimization profile for each sample, as `CompileOptions` has them; none for a fixed model."""
    dynamic = [spec.name for spec in inputs.specs if not all(isinstance(dim, int) for dim in spec.shape)]
    return [(name, ShapeRange(*[tuple(sample[name].shape)] * 3)) for sample in samples for name in dynamic]


def build_plans(
    options: BenchOptions,
    profiles: list[tuple[str, ShapeRange]],
    errors: dict[str, float] | None,
    folder: Path,
    progress: Callable[[str], None],
) -> tuple[dict[str, OpenPlan], dict[str, str]]:
    """Build a dense plan and a rewritten one, and open them.

    Args:
        options: See `BenchOptions`.
        profiles: See `profiles_of`.
        errors: The relative changes of blocks' outputs by FP8, by module; None where they were not measured.
        folder: The folder for the plans.
        progress: Receives the name of each step.

    Returns:
        The plans by the contestants' names, and the reasons why others could not be built.
    """
    plans, failed = {}, {}
    kinds = (TracingOptions, DecisionOptions, WeightOptions)
    shared = {field.name: getattr(options, field.name) for kind in kinds for field in fields(kind)}
    dense = {"layers": "none", "linear": "tensorrt"}
    for label, own in ((PLAN_DENSE, dense), (PLAN_TWELL, {})):
        progress(f"building plans: {label}")
        path = folder / f"{label.replace(' ', '-')}.plan"
        given = shared | {"output": path, "backend": TENSORRT, "optimization_profiles": tuple(profiles)} | own
        given["earlier"] = Earlier(fp8_errors=errors)
        try:
            compile_model(CompileOptions(**given), lambda step: None)
            host = load_host(TENSORRT)
            plans[label] = open_plan(host, path, host.version)
        except UserError as error:
            failed[label] = str(error)
    return plans, failed


def add_plan(
    contest: Contest, label: str, plan: OpenPlan, inputs: dict[str, torch.Tensor], profile: int, lossy: bool
) -> None:
    """Add a plan to a contest, for inputs by name and the optimization profile that takes their shapes."""
    try:
        execution = prepare(plan, inputs, profile)
    except (UserError, KeyError) as error:
        contest.failed[label] = str(error)
        return

    def call() -> list[torch.Tensor]:
        execution.enqueue()
        return execution.outputs

    contest.add(label, call, execution, lossy=lossy)
