"""Rows of every report: what became of each block. Importing this imports no torch: a report is also read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from twellc.base.records import OPTIONAL, Amount, Count, OneOf, Record, Share, Size, Time
from twellc.plugins.library import ATTENTION_FORMS, COMPRESSIONS, NORMS, SCALE_BLOCK_SIZE

Decision = Annotated[str, OneOf(("twell", "dense"))]
Compression = Annotated[int, OneOf(COMPRESSIONS)]


@dataclass(frozen=True)
class ExpectedTime(Record):
    """What a block is expected to take in a call of `tokens` tokens, in microseconds."""

    tokens: Size
    dense_us: Time
    twell_us: Time

    @property
    def gain(self) -> float:
        """How many times as fast TwELL is."""
        return self.dense_us / self.twell_us


@dataclass(frozen=True)
class Expectation(Record):
    """What measured times of a GPU let expect of a block.

    Attributes:
        gpu: The GPU.
        assumed: Whether no profile says the density: it is that of a short run, or an assumed one, of neurons that fire
            equally often.
        density: Share of gate activations that are not zero.
        gain: How many times as fast as dense TwELL is: the geometric mean over the sizes that profiles are tuned for.
        pays_below: The density below which TwELL pays, if neurons differ as these do: 1 where it always does, 0 where
            it never does.
        times: Times of TwELL and of the dense block, at the sizes that profiles begin with, are tuned for and end with.
    """

    gpu: str
    assumed: bool
    density: Share
    gain: Amount
    pays_below: Share
    times: list[ExpectedTime]


@dataclass(frozen=True)
class ShortRun(Record):
    """How many neurons of a block were active in a short run of the model, which decides nothing.

    Attributes:
        density: Share of the gate activations that were not zero.
        tokens: How many tokens the block saw.
        inputs: What the model ran on: a sample text, random tokens or random numbers.
    """

    density: Share
    tokens: Count
    inputs: Annotated[str, OneOf(("a sample text", "random tokens", "random numbers"))]


@dataclass(frozen=True)
class Choice:
    """What is best for a block.

    Attributes:
        decision: `twell` or `dense`.
        facts: Why, in words.
        hot: How many neurons, the most active ones, are a dense product; 0 where it is dense.
        compression: The TwELL compression factor; None leaves it to the options of the compilation.
        expectation: What is expected of it; None where an earlier decision is repeated, the density is not known, or
            nothing like the block was measured on the GPU.
        short_run: How many of its neurons were active in a short run; None without one.
    """

    decision: str
    facts: str
    hot: int
    compression: int | None
    expectation: Expectation | None
    short_run: ShortRun | None = None


@dataclass(frozen=True)
class Repeated(Record):
    """What another compilation needs of a `Choice` to choose the same."""

    decision: Decision
    facts: str
    hot: Count
    compression: Compression


@dataclass(frozen=True, kw_only=True)
class Earlier(Record):
    """What an earlier compilation decided about a model, so that another one makes the same graph.

    Each is None until it was decided. Blocks and linear layers go by their modules; of a second call it is `mlp#2`.

    Attributes:
        attention_forms: The forms that attention is written in, see `twellc/passes/attention.py`.
        calibration: The SHA-256 of the profile that said how often neurons fire.
        decided: What becomes of blocks; others are rewritten.
        linear_taken: The linear layers that were rewritten, by the first module of each, and the blocks that took the
            norms before them.
        fp8_errors: By how much FP8 changes the outputs of blocks on samples.
        cache_scales: Of caches in FP8 the scale of each, by its input.
    """

    attention_forms: list[Annotated[str, OneOf(ATTENTION_FORMS)]] | None = field(default=None, metadata=OPTIONAL)
    calibration: str | None = field(default=None, metadata=OPTIONAL)
    decided: dict[str, Repeated] | None = field(default=None, metadata=OPTIONAL)
    linear_taken: list[str] | None = field(default=None, metadata=OPTIONAL)
    fp8_errors: dict[str, Amount] | None = field(default=None, metadata=OPTIONAL)
    cache_scales: dict[str, Time] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Neurons(Record):
    """What became of the neurons of a block that TwELL runs.

    Attributes:
        kept: How many it has left.
        unable: How many were removed since their weights prove that they cannot fire.
        dead: How many were removed since they never fired, which is approximate.
        never: How many never fired in the profile.
        tokens: How many tokens the profile has seen.
        rate_bound: How often, at most, a neuron fires that never did, with a confidence of 95 %.
        density: Share of the activations of those that are left that were not zero in the profile.
        lost: The share of a second profile's non-zeros that the removed neurons have.
        lost_of: How many tokens the second profile has seen.
        reason: Why nothing was done; empty where something was.
    """

    kept: Count
    unable: Count
    dead: Count
    never: Count | None = field(default=None, metadata=OPTIONAL)
    tokens: Count | None = field(default=None, metadata=OPTIONAL)
    rate_bound: Share | None = field(default=None, metadata=OPTIONAL)
    density: Share | None = field(default=None, metadata=OPTIONAL)
    lost: Share | None = field(default=None, metadata=OPTIONAL)
    lost_of: Count | None = field(default=None, metadata=OPTIONAL)
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"neurons as they are, since {self.reason}"
        said = [f"{self.unable} that cannot fire removed"] if self.unable else []
        if self.dead:
            said.append(f"{self.dead} of {self.never} that never fired removed (approximate)")
        elif self.never:
            said.append(f"{self.never} never fired")
        return ", ".join(said)


@dataclass(frozen=True)
class Weights(Record):
    """In how many bits the weights of a block are read that TwELL runs, and why.

    Attributes:
        bits: 8, E4M3 with scales, or 16.
        reason: Why.
        error: By how much FP8 changes the output of the block on samples: the norm of the difference over the
            norm of the output; None where that was not measured.
    """

    bits: Annotated[int, OneOf((8, 16))]
    reason: str
    error: Amount | None = field(default=None, metadata=OPTIONAL)

    def __str__(self) -> str:
        changed = "" if self.error is None or self.bits > 8 else f", which changes its output by {self.error:.2%}"
        return f"weights in {self.bits} bits, {self.reason}{changed}"


KEPT_WITH_BLOCKS = Weights(
    8, f"as the model has them, with scales for blocks of {SCALE_BLOCK_SIZE} x {SCALE_BLOCK_SIZE}"
)


def reads_fp8(weights: Weights | None) -> bool:
    """Whether weights are read in FP8."""
    return weights is not None and weights.bits == 8


@dataclass(frozen=True)
class Layer(Record):
    """What became of a feed-forward block, or of the experts of a layer: a row of every report.

    Attributes:
        module: Path of the module that holds its weights.
        variant: `gated` or `plain`.
        activation: relu, relu2, fatrelu or drelu; of a refused block any other name.
        d_model, d_ff, d_out: Widths of input, hidden tensor and output; d_ff is that of one expert.
        experts: How many experts there are; 0 of a block that all tokens go through.
        top: To how many of them each token is sent.
        matched: Whether it can be rewritten exactly.
        decision: `twell` or `dense`.
        reason: Why.
        residual: Whether it also adds its result to what this was added to, if TwELL runs it.
        hot: How many of its neurons, the first ones, calls with many tokens compute densely, if TwELL runs it.
        norm: Which norm of its input it computes, too, if TwELL runs it: `none`, `rms` or `layer`.
        neurons: What became of its neurons; None where nothing did, or TwELL does not run it.
        weights: In how many bits its weights are read; None where in those of its dtype, or TwELL does not run it.
        compression: The TwELL compression factor that a profile suggests; None where there is none.
        expectation: What measured times let expect of it; None where its density is not known, nothing like it was
            measured on the GPU, or it cannot be rewritten.
        short_run: How many of its neurons were active in a short run; None where there was none.
    """

    module: str
    variant: str
    activation: str
    d_model: Count
    d_ff: Count
    d_out: Count
    matched: bool
    decision: Decision
    reason: str
    residual: bool
    experts: Count = 0
    top: Count = 0
    hot: Count = 0
    compression: Compression | None = field(default=None, metadata=OPTIONAL)
    expectation: Expectation | None = field(default=None, metadata=OPTIONAL)
    short_run: ShortRun | None = field(default=None, metadata=OPTIONAL)
    neurons: Neurons | None = field(default=None, metadata=OPTIONAL)
    weights: Weights | None = field(default=None, metadata=OPTIONAL)
    norm: Annotated[str, OneOf(tuple(NORMS))] = "none"

    @property
    def kept(self) -> int:
        """How many neurons are left."""
        return self.d_ff if self.neurons is None else self.neurons.kept

    @property
    def density(self) -> float | None:
        """The share of its gate activations that were not zero, by a profile or else a short run; None if unknown."""
        profiled = None if self.neurons is None else self.neurons.density
        return self.short_run.density if profiled is None and self.short_run is not None else profiled


def missing_blocks(layers: Sequence[Layer], widths: Mapping[str, int]) -> list[str]:
    """Return those modules of `widths`, d_ff by module, that have no layer with that d_ff."""
    own = {layer.module: layer.d_ff for layer in layers}
    return [module for module, d_ff in widths.items() if own.get(module) != d_ff]


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
    heads: Count
    kv_heads: Count
    width: Count
    mask: str
    form: str
    reason: str


@dataclass(frozen=True)
class Linear(Record):
    """What became of linear layers outside of feed-forward blocks that read one tensor: a row of every report.

    Attributes:
        modules: Paths of the modules that hold the weights.
        d_in: Width of the input.
        widths: Widths of the outputs.
        norm: Which norm of the input they compute, too, if TwELL runs them: `none`, `rms` or `layer`.
        residual: Whether they also add the result to what this was added to, if TwELL runs them.
        choose: Whether they compute of the result only which element is the largest, if TwELL runs them.
        matched: Whether TwELL can run them.
        decision: `twell` or `tensorrt`.
        reason: Why.
        weights: In how many bits the weights are read; None where in those of their dtype, or TwELL does not run them.
    """

    modules: list[str]
    d_in: Count
    widths: list[Count]
    norm: Annotated[str, OneOf(tuple(NORMS))]
    residual: bool
    matched: bool
    decision: Annotated[str, OneOf(("twell", "tensorrt"))]
    reason: str
    choose: bool = False
    weights: Weights | None = field(default=None, metadata=OPTIONAL)
