"""Which kernels compute the blocks of a model on a GPU. Importing this imports no torch, and asks no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from twellc.base.records import Record
from twellc.passes.report import KEPT_WITH_BLOCKS, Layer, reads_fp8
from twellc.plugins.block import VARIANTS, BlockOptions, compression_of, problem_of, set_scales
from twellc.plugins.library import (
    ACTIVATIONS,
    DTYPES,
    GPUS,
    ExpertsProblem,
    ExpertStrides,
    Problem,
    describe,
    fault_of,
)
from twellc.plugins.library import VARIANTS as VARIANT_CODES


@dataclass(frozen=True)
class BlockKernels(Record):
    """The kernels of one block.

    Attributes:
        module: Path of the module that holds its weights.
        route: The row of the table in `plugins/kernels/README.md`; of experts, which have none, `experts`.
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
        problem = _experts_of(layer, tokens) if layer.experts else _problem_of(layer, tokens, compression)
        if problem is not None and not fault_of(problem):
            launches = describe(problem, GPUS[gpu]).splitlines()
            route = "experts" if layer.experts else launches.pop(0).removeprefix("route ")
            blocks.append(BlockKernels(layer.module, route, launches))
    return KernelTable(gpu, tokens, blocks)


def _experts_of(layer: Layer, tokens: int) -> ExpertsProblem | None:
    """Return what a call of experts computes; None where they stay dense."""
    if layer.decision != "twell":
        return None
    rows = {"up": layer.d_model, "down": layer.d_out}
    rows |= {"gate": layer.d_model} if layer.variant == "gated" else {}
    return ExpertsProblem(
        tokens=tokens,
        top=layer.top,
        experts=layer.experts,
        d_model=layer.d_model,
        d_ff=layer.d_ff,
        d_out=layer.d_out,
        dtype=DTYPES["bfloat16"],
        weight_dtype=DTYPES["bfloat16"],
        variant=VARIANT_CODES[layer.variant],
        activation=ACTIVATIONS[layer.activation],
        id_bytes=8,
        **{name: ExpertStrides(layer.d_ff * row, row) for name, row in rows.items()},
    )


def _problem_of(layer: Layer, tokens: int, compression: int | None) -> Problem | None:
    """Return what a call computes; None where the block stays dense, or a node of another origin does not say it."""
    if layer.decision != "twell" or layer.activation not in ACTIVATIONS:
        return None
    slots = compression_of(layer.compression, compression)
    options = BlockOptions(activation=layer.activation, compression=slots, hot=layer.hot, norm=layer.norm)
    sizes = {"tokens": tokens, "d_model": layer.d_model, "d_ff": layer.kept, "d_out": layer.d_out}
    problem = problem_of(VARIANTS[layer.variant], options, "bfloat16", **sizes)
    if reads_fp8(layer.weights):
        form = "block" if layer.weights == KEPT_WITH_BLOCKS else "row"  # which stands for all others
        set_scales(problem, form, form)
    return problem
