"""The passes in their order, from a traced program to one with `twell` ops."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.export import ExportedProgram

from twellc.base.files import writing
from twellc.base.records import Json, as_json
from twellc.passes.attention import rewrite_attention
from twellc.passes.canonicalize import canonicalize
from twellc.passes.decide import decide
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.precision import in_precision
from twellc.passes.report import Attention, Layer
from twellc.passes.rewrite_ffn import rewrite_ffn


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


def run_passes(
    program: ExportedProgram,
    dtype: torch.dtype,
    layers: str,
    compression: int,
    dump: Path | None = None,
    attention: tuple[str, ...] = (),
) -> Rewritten:
    """Run every pass.

    Args:
        program: A traced program.
        dtype: bfloat16 or float16.
        layers: See `decide`.
        compression: The TwELL compression factor: 1, 2, 4 or 8.
        dump: A folder that receives the graph after each pass.
        attention: The forms to write attention in, see `rewrite_attention`; none leaves it as it is.

    Raises:
        UserError: See `lower` and `decide`.
    """

    def keep(step: str, result: ExportedProgram) -> ExportedProgram:
        if dump is not None:
            with writing(dump / f"{step}.txt"):
                dump.mkdir(parents=True, exist_ok=True)
                text = f"{result.graph_module.print_readable(print_output=False)}\n"
                (dump / f"{step}.txt").write_text(text, encoding="utf-8")
        return result

    dense = keep("1-canonical", canonicalize(program))
    lowered = in_precision(dense, dtype)
    if lowered is not dense:
        dense = keep("2-lowered", lowered)
    blocks = find_ffn_blocks(dense)
    decisions = decide(blocks, layers)
    chosen = [block for block, layer in zip(blocks, decisions, strict=True) if layer.decision == "twell"]
    rewritten = keep("3-rewritten", rewrite_ffn(dense, chosen, compression))
    found: list[Attention] = []
    if attention:
        rewritten, found = rewrite_attention(rewritten, attention)
    if found:
        keep("4-attention", rewritten)
    return Rewritten(dense, rewritten, decisions, found)
