"""By how much FP8 weights change the outputs of a model's blocks on samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from twellc.base.devices import choose_device
from twellc.base.dtypes import torch_dtype
from twellc.base.errors import UserError
from twellc.loaders.loaded import LoadedModel
from twellc.options.commands import CompileOptions
from twellc.options.weights import FP8, KEEP, WeightOptions
from twellc.passes.decide import options_of
from twellc.passes.fp8 import QUANTISED, Change, Wish, both_forms
from twellc.passes.graph.execution import Runner
from twellc.passes.graph.program import editable, tensor_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.pipeline import PassOptions, Stage, run_until
from twellc.passes.sizes.inputs import program_inputs
from twellc.plugins.block import BlockOptions, WeightOperands
from twellc.plugins.ops import run_block
from twellc.samples.samples import Limits, Sample, read_arrays, read_text


def read_samples(options: CompileOptions, model: LoadedModel) -> list[Sample]:
    """Return what the errors in FP8 are measured on.

    Raises:
        UserError: It cannot be read, or is no input of the model.
    """
    limits = Limits(program_inputs(model.program), None, model.vocabulary)
    if options.arrays is not None:
        return [read_arrays(options.arrays, limits)]
    assert options.text is not None
    return read_text(options.text, options.model, model.language_model, limits).samples


def wish_of(options: WeightOptions, errors: Mapping[str, float] | None = None) -> Wish:
    """Return what the passes are to do about weights."""
    return Wish(options.weights != KEEP, options.fp8_error, errors or {}, options.weights == FP8)


def measure_errors(
    model: LoadedModel, dtype: str, samples: Iterable[Sample], progress: Callable[[str], None]
) -> dict[str, float]:
    """Return by how much FP8 changes the output of each block that can be rewritten, by module; if it is finite.

    It is ||y8 - y|| / ||y|| over all samples, y by weights of 16 bits, without what the block is added to. Blocks get
    the x that they have with weights of 16 bits; those that the model has in FP8 are left out. The model runs on
    the GPU, its blocks by the kernels, where torch sees one.

    Args:
        model: The model.
        dtype: `bf16` or `fp16`: its precision.
        samples: Inputs of the model.
        progress: Receives the name of each step.

    Raises:
        UserError: The memory of the GPU ran out.
    """
    progress("measuring what FP8 changes")
    found = run_until(model.program, PassOptions(torch_dtype(dtype), layers="all", weights=Wish(True)), Stage.DECIDE)
    chosen = [each for each in found.chosen if each[1].weights is not None and each[1].weights.reason == QUANTISED]
    device = choose_device("auto")
    program = found.program if device.type == "cpu" else move_to_device_pass(editable(found.program), device)
    by_x: dict[str, list[tuple[FfnBlock, BlockOptions, list[WeightOperands[torch.Tensor]]]]] = defaultdict(list)
    for block, layer in chosen:
        by_x[block.x.name].append((block, options_of(block, layer, None), []))
    changes: dict[str, Change] = defaultdict(Change)

    def tensor(weight: Any) -> torch.Tensor:
        return tensor_of(program, weight.name).detach()

    def visit(name: str, value: Any) -> Any:
        for block, options, forms in by_x.get(name, ()):
            if not forms:
                forms += both_forms(block, lambda _: None, tensor)
            changes[block.module].add(*(run_block(each.of(value), options) for each in forms))
        return value

    runner = Runner(program)
    try:
        with torch.no_grad():
            for sample in samples:
                runner(sample, visit)
    except torch.OutOfMemoryError as error:
        raise UserError(
            "--fp8-error", "the GPU's memory ran out", fix="Hide it by CUDA_VISIBLE_DEVICES= to measure on the CPU."
        ) from error
    return {module: each.error for module, each in changes.items() if math.isfinite(each.error)}
