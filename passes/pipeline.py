"""The passes in their order: the one list, from which `compile`, `inspect`, `check` and `optimize` take theirs.

    FUNCTIONAL     decompose, write_numbers, merge_views, name_relus     what a model computes, in one form
    ARRANGING      fold_weights, feature_last                            blocks as the matcher looks for them
    in_precision   the whole program in bfloat16 or float16
    find           blocks are found and decided upon; changes nothing
    rewrite_ffn    blocks as `twell` ops
    rewrite_attention

`inspect` runs them up to `find`, and asks `rewrite_attention` what it would do. `check` compares with the program
behind FUNCTIONAL, which no pass has touched that could be wrong about a weight. `optimize` needs the first two groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.export import ExportedProgram

from twellc.base.records import Json, as_json
from twellc.passes.attention import rewrite_attention
from twellc.passes.block_profile import Calibration
from twellc.passes.decide import Advise, decide
from twellc.passes.decompose import decompose
from twellc.passes.dump import NOWHERE, GraphDump
from twellc.passes.feature_last import feature_last
from twellc.passes.fold_weights import fold_weights
from twellc.passes.match.find_ffn import FfnBlock, find_ffn_blocks
from twellc.passes.merge_views import merge_views
from twellc.passes.name_relus import name_relus
from twellc.passes.neurons import arrange_neurons
from twellc.passes.precision import in_precision
from twellc.passes.report import Attention, Layer
from twellc.passes.rewrite_ffn import rewrite_ffn
from twellc.passes.write_numbers import write_numbers


class Pass(Protocol):
    """A pass over a program, of which it makes a new one, or gives back what it finds nothing to do in."""

    __name__: str

    def __call__(self, program: ExportedProgram, /) -> ExportedProgram:
        """Run it."""


FUNCTIONAL: tuple[Pass, ...] = (decompose, write_numbers, merge_views, name_relus)
ARRANGING: tuple[Pass, ...] = (fold_weights, feature_last)


@dataclass(frozen=True)
class Found:
    """The feed-forward blocks of a program.

    Attributes:
        blocks: The blocks.
        layers: What becomes of each.
    """

    blocks: list[FfnBlock]
    layers: list[Layer]

    @property
    def chosen(self) -> list[tuple[FfnBlock, Layer]]:
        """Those that TwELL is to run."""
        pairs = zip(self.blocks, self.layers, strict=True)
        return [(block, layer) for block, layer in pairs if layer.decision == "twell"]


@dataclass(frozen=True)
class Rewritten:
    """What the pipeline made.

    Attributes:
        dense: The canonical program in the target dtype, not rewritten.
        program: The same with `twell` ops.
        layers: What became of each feed-forward block.
        attention: What became of each attention block; empty where none was to be rewritten.
    """

    dense: ExportedProgram
    program: ExportedProgram
    layers: list[Layer]
    attention: list[Attention]

    def to_json(self) -> dict[str, Json]:
        """Return what became of the blocks as JSON types, without the programs."""
        return {"layers": as_json(self.layers), "attention": as_json(self.attention)}


def functionalize(program: ExportedProgram, dump: GraphDump = NOWHERE) -> ExportedProgram:
    """Return a traced program in one form; its values are those of the model.

    Raises:
        UserError: See `decompose`.
    """
    return _run(FUNCTIONAL, program, dump)


def arrange(program: ExportedProgram, dump: GraphDump = NOWHERE) -> ExportedProgram:
    """Return a functionalised program with its weights folded and features last; itself where that changes nothing."""
    return _run(ARRANGING, program, dump)


def canonicalize(program: ExportedProgram, dump: GraphDump = NOWHERE) -> ExportedProgram:
    """Return a traced program as the matcher reads it, in the precision that it has.

    Raises:
        UserError: See `decompose`.
    """
    return arrange(functionalize(program, dump), dump)


def prepare(program: ExportedProgram, dtype: torch.dtype, dump: GraphDump = NOWHERE) -> ExportedProgram:
    """Return a traced program as the matcher reads it, in bfloat16 or float16.

    Raises:
        UserError: See `decompose` and `lower`.
    """
    dense = in_precision(canonicalize(program, dump), dtype)
    dump.program("in_precision", dense)
    return dense


def find(program: ExportedProgram, layers: str, advise: Advise | None = None) -> Found:
    """Find the blocks of a prepared program, and decide what becomes of each.

    Args:
        program: The program.
        layers: See `decide`.
        advise: Likewise.

    Raises:
        UserError: See `decide`.
    """
    blocks = find_ffn_blocks(program)
    return Found(blocks, decide(blocks, layers, advise))


def run_passes(
    program: ExportedProgram,
    dtype: torch.dtype,
    layers: str,
    compression: int,
    attention: tuple[str, ...] = (),
    dump: GraphDump = NOWHERE,
    calibration: Calibration | None = None,
    advise: Advise | None = None,
) -> Rewritten:
    """Run every pass.

    Args:
        program: A traced program.
        dtype: bfloat16 or float16.
        layers: See `decide`.
        compression: The TwELL compression factor where `advise` says nothing: 1, 2, 4 or 8.
        attention: The forms to write attention in, see `rewrite_attention`; none leaves it as it is.
        dump: Receives the graph as traced, and after each pass.
        calibration: How often neurons fire, and what may be done with that; None if nothing is known.
        advise: See `decide`.

    Raises:
        UserError: See `prepare` and `find`.
    """
    dump.program("traced", program)
    dense = prepare(program, dtype, dump)
    found = find(dense, layers, advise)
    arrangements, decisions = arrange_neurons(dense, found.blocks, found.layers, calibration)
    orders = {module: each.order for module, each in arrangements.items() if each.changes}
    chosen = Found(found.blocks, decisions).chosen
    blocks, hot = [block for block, _ in chosen], [layer.hot for _, layer in chosen]
    rewritten = rewrite_ffn(dense, blocks, [layer.compression or compression for _, layer in chosen], hot, orders)
    dump.program("rewrite_ffn", rewritten)
    attended: list[Attention] = []
    if attention:
        rewritten, attended = rewrite_attention(rewritten, attention)
        dump.program("rewrite_attention", rewritten)
    return Rewritten(dense, rewritten, decisions, attended)


def _run(passes: tuple[Pass, ...], program: ExportedProgram, dump: GraphDump) -> ExportedProgram:
    for each in passes:
        program = each(program)
        dump.program(each.__name__, program)
    return program
