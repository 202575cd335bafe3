"""What `twellc inspect` shows of a model or a plan. Importing this imports no torch, and a plan needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from twellc.base.files import uninterrupted
from twellc.compiling.manifest import is_plan, read_manifest
from twellc.inspection.description import Description, Inspection
from twellc.inspection.flops import count_costs
from twellc.inspection.kernels import list_kernels
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.options.commands import DEFAULT_GPU, InspectOptions
from twellc.options.decisions import refuse_decisions
from twellc.options.declared_inputs import refuse_inputs
from twellc.options.source import refuse_missing, refuse_tracing
from twellc.options.weights import refuse_weight_type
from twellc.plugins.library import gpu_named


def inspect_model(options: InspectOptions, progress: Callable[[str], None]) -> Inspection:
    """Return what is known of a model or a plan, and what its blocks cost.

    Args:
        options: See `InspectOptions`.
        progress: Receives the name of each step.

    Raises:
        UserError: It is neither a model nor a plan, or not one that `dtype` or `inputs` are for; or the plugin library
            is missing.
    """
    found = _describe(options, progress)
    if options.in_memory:
        found = replace(found, kind=options.in_memory)
    gpu, note = _gpu(options, found)
    found = replace(found, notes=[*found.notes, *note])
    cost = count_costs(found.layers, options.tokens, options.density)
    compiled = found.manifest
    compression = options.compression if compiled is None else compiled.settings.compression
    return Inspection(found, cost, list_kernels(found.layers, options.tokens, gpu, compression))


def _gpu(options: InspectOptions, found: Description) -> tuple[str, list[str]]:
    """Return the GPU whose kernels to name, of `GPUS`, and what the user should know of that."""
    if options.gpu is not None:
        return options.gpu, []
    if options.target_gpu is not None or (found.manifest is None and found.nodes is None):
        from twellc.decisions.targets import choose_target, gpu_at_hand  # not needed of a plan, and imports numpy

        target = choose_target(options.target_gpu, None if options.target_gpu else gpu_at_hand()).gpu
    else:
        target = next((layer.expectation.gpu for layer in found.layers if layer.expectation is not None), DEFAULT_GPU)
    gpu = gpu_named(target)
    if gpu is not None:
        return gpu, []
    return DEFAULT_GPU, [f"the kernels are those of an {DEFAULT_GPU}, since {target} is not known (--gpu changes it)"]


def _describe(options: InspectOptions, progress: Callable[[str], None]) -> Description:
    target = options.model
    refuse_missing(target, "a model or a plan")
    if not looks_like_onnx(target) and is_plan(target):
        refuse_inputs(options.input_specs, f"{target}, a plan")
        refuse_tracing(options, f"{target}, a plan")
        refuse_decisions(options, f"{target}, a plan")
        refuse_weight_type(options, f"{target}, a plan")
        progress("reading the manifest")
        manifest = read_manifest(target)
        return Description(
            "plan",
            manifest.layers,
            manifest.notes,
            attention=manifest.attention,
            linear=manifest.linear,
            manifest=manifest,
        )
    with uninterrupted():  # native modules do not survive an interrupt while they are imported
        from twellc.inspection.models import describe_model

    return describe_model(options, progress)
