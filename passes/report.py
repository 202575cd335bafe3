"""Rows of every report: what became of each block. Importing this imports no torch: a report is also read."""

from __future__ import annotations

from dataclasses import dataclass

from twellc.base.records import Record


@dataclass(frozen=True)
class Layer(Record):
    """What became of a feed-forward block: a row of every report.

    Attributes:
        module: Path of the module that holds its weights.
        variant: `gated` or `plain`.
        activation: relu, relu2, fatrelu or drelu; of a refused block any other name.
        d_model, d_ff, d_out: Widths of input, hidden tensor and output.
        matched: Whether it can be rewritten exactly.
        decision: `twell` or `dense`.
        reason: Why.
        residual: Whether it also adds its result to what this was added to, if TwELL runs it.
        hot: How many of its neurons, the first ones, calls with many tokens compute densely, if TwELL runs it.
    """

    module: str
    variant: str
    activation: str
    d_model: int
    d_ff: int
    d_out: int
    matched: bool
    decision: str
    reason: str
    residual: bool
    hot: int = 0


@dataclass(frozen=True)
class Attention(Record):
    """What became of an attention block: a row of every report.

    Attributes:
        module: Path of the module that computes it.
        heads, kv_heads: Heads of the queries, and of keys and values; 0 where it is left as it is.
        width: Width of a head; 0 likewise.
        mask: `none`, `causal`, or `tensor` for one that the model computes.
        form: `cudnn`, `operator`, `matmul` or `as written`.
        reason: Why it has no better form; empty where it has the first that was asked for.
    """

    module: str
    heads: int
    kv_heads: int
    width: int
    mask: str
    form: str
    reason: str
