"""Which kernels compute the blocks of a model on a GPU. Importing this imports no torch, and asks no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from twellc.base.records import Record
from twellc.passes.report import Layer, reads_fp8
from twellc.plugins.block import VARIANTS, BlockOptions, compression_of, problem_of, set_scales
from twellc.plugins.library import ACTIVATIONS, GPUS, Problem, describe, load


@dataclass(frozen=True)
class BlockKernels(Record):
    """The kernels of one block.

    Attributes:
        module: Path of the module that holds its weights.
        route: The row of the table in `plugins/kernels/README.md`.
        launches: What is launched, in order: kernel, configuration, `|`, and how it is launched.
    """

    module: str
    route: str
    launches: list[str]


@dataclass(frozen=True)
class KernelTable(Record):
    """The kernels of all blocks that are rewritten.

    Attributes:
        gpu: A name of `twellc.plugins.library.GPUS`.
        tokens: Tokens in a call.
        blocks: The blocks.
    """

    gpu: str
    tokens: int
    blocks: list[BlockKernels]


def list_kernels(layers: list[Layer], tokens: int, gpu: str, compression: int | None = None) -> KernelTable:
    """Return which kernels compute the rewritten blocks; those of bf16, which fp16 has, too, but for hot neurons.

    Raises:
        UserError: The plugin library is missing.
    """
    blocks = []
    for layer in layers:
        problem = _problem_of(layer, tokens, compression)
        if problem is not None and load().twell_validate(problem) is None:
            route, *launches = describe(problem, GPUS[gpu]).splitlines()
            blocks.append(BlockKernels(layer.module, route.removeprefix("route "), launches))
    return KernelTable(gpu, tokens, blocks)


def _problem_of(layer: Layer, tokens: int, compression: int | None) -> Problem | None:
    """Return what a call computes; None where the block stays dense, or a node of another origin does not say it."""
    if layer.decision != "twell" or layer.activation not in ACTIVATIONS:
        return None
    slots = compression_of(layer.compression, compression)
    options = BlockOptions(activation=layer.activation, compression=slots, hot=layer.hot, norm=layer.norm)
    sizes = {"tokens": tokens, "d_model": layer.d_model, "d_ff": layer.kept, "d_out": layer.d_out}
    problem = problem_of(VARIANTS[layer.variant], options, "bfloat16", **sizes)
    if reads_fp8(layer.weights):
        set_scales(problem, "row", "row")  # no kernel depends on how many there are
    return problem
