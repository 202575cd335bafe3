"""Rows of every report: what became of each block. Importing this imports no torch: a report is also read."""

from __future__ import annotations

from dataclasses import dataclass, field

from twellc.base.records import OPTIONAL, Record


@dataclass(frozen=True)
class ExpectedTime(Record):
    """What a block is expected to take in a call of so many tokens, in microseconds."""

    tokens: int
    dense_us: float
    twell_us: float

    @property
    def gain(self) -> float:
        """How many times as fast TwELL is."""
        return self.dense_us / self.twell_us


@dataclass(frozen=True)
class Expectation(Record):
    """What measured times of a GPU let expect of a block.

    Attributes:
        gpu: The GPU.
        assumed: Whether the density is assumed, with neurons that fire equally often, as nothing was measured.
        density: Share of gate activations that are not zero.
        gain: How many times as fast as dense TwELL is: the geometric mean over the sizes that profiles are tuned for.
        pays_below: The density below which TwELL pays, if neurons differ as these do: 1 where it always does, 0 where
            it never does.
        times: Times of TwELL and of the dense block, at the sizes that profiles begin with, are tuned for and end with.
    """

    gpu: str
    assumed: bool
    density: float
    gain: float
    pays_below: float
    times: list[ExpectedTime]


@dataclass(frozen=True)
class Choice:
    """What is best for a block.

    Attributes:
        decision: `twell` or `dense`.
        facts: Why, in words.
        hot: How many neurons, the most active ones, are a dense product; 0 where it is dense.
        compression: The TwELL compression factor.
        expectation: What is expected of it.
    """

    decision: str
    facts: str
    hot: int
    compression: int
    expectation: Expectation


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
        expectation: What measured times let expect of it; None where nobody asked, or it cannot be rewritten.
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
    expectation: Expectation | None = field(default=None, metadata=OPTIONAL)


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
