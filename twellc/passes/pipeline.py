"""The passes in their order: `compile`, `inspect`, `profile`, `check` and `optimize` each run a part of this one list.

Each stage has its steps, in `STEPS`; a step is added there, and every command that comes to its stage runs it.

    FUNCTIONAL   what a model computes, in one form
    ARRANGING    blocks as the matcher looks for them
    PRECISION    the whole program in bfloat16 or float16
    FIND         feed-forward blocks are found; nothing changes
    STAY         which neurons of each stay if TwELL runs it
    DECIDE       what becomes of each, by how often those neurons fire
    ORDER        in which order they come
    SHARE        which of them one of several ranks has, if the program is to be that of a rank
    FFN          blocks as `twell` ops
    SPLIT        the program of that rank
    ATTENTION    attention in a form that the host can fuse, and key-value caches in FP8
    FIND_LINEAR  linear layers outside of the blocks are found, and what becomes of them is decided
    LINEAR       these layers as `twell` ops

`compile`, `bench` and `rewrite` run all of them. `inspect` leaves FFN and LINEAR out, which copy weights. `profile`
stops behind DECIDE and `optimize` behind FIND. `check` stops behind DECIDE, too, or finds the linear layers that were
rewritten; it compares with a program that has left ARRANGING out, since such passes could be wrong about a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, auto
from typing import Protocol

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.base.errors import first_few
from twellc.base.records import Json, as_json
from twellc.base.threads import PROCESS_WIDE, uncollected
from twellc.passes import neurons
from twellc.passes.attention import CUDNN, rewrite_attention
from twellc.passes.block_profile import Calibration
from twellc.passes.caches_in_fp8 import caches_in_fp8
from twellc.passes.decide import Advise, decide, decide_linear, left_alone, options_of, repeat
from twellc.passes.decompose import decompose
from twellc.passes.dump import NOWHERE, GraphDump
from twellc.passes.feature_last import feature_last
from twellc.passes.fold_constants import fold_constants
from twellc.passes.fold_weights import fold_weights
from twellc.passes.fp8 import (
    QUANTISED,
    Wish,
    dequantize,
    folded_in_fp8,
    fp8_of,
    judge,
    judge_linear,
    linear_in_fp8,
    notes_on,
)
from twellc.passes.graph.constants import fixed_nodes
from twellc.passes.graph.program import constants_of, tensor_of
from twellc.passes.match.find_ffn import FfnBlock, find_ffn_blocks, with_norm
from twellc.passes.match.find_linear import FoundLinear, find_linear
from twellc.passes.match.linear import Weight
from twellc.passes.match.shared_axis import WHOLE, Part
from twellc.passes.merge_views import merge_views
from twellc.passes.name_casts import name_casts
from twellc.passes.name_relus import name_relus
from twellc.passes.neurons import Staying
from twellc.passes.precision import in_precision
from twellc.passes.report import Attention, Earlier, Layer, Linear, Weights, reads_fp8
from twellc.passes.rewrite_experts import rewrite_experts
from twellc.passes.rewrite_ffn import rewrite_ffn
from twellc.passes.rewrite_linear import rewrite_linear
from twellc.passes.rotate_in_caches import rotate_in_caches
from twellc.passes.tensor_parallel import rank_program
from twellc.passes.write_numbers import write_numbers
from twellc.plugins.fp8 import Fp8
from twellc.plugins.ops import VARIANT_OF


class Stage(IntEnum):
    """How far a program has come."""

    TRACED = auto()
    FUNCTIONAL = auto()
    ARRANGING = auto()
    PRECISION = auto()
    FIND = auto()
    STAY = auto()
    DECIDE = auto()
    ORDER = auto()
    SHARE = auto()
    FFN = auto()
    SPLIT = auto()
    ATTENTION = auto()
    FIND_LINEAR = auto()
    LINEAR = auto()


@dataclass(frozen=True)
class PassOptions:
    """What the passes are to do.

    Attributes:
        dtype: bfloat16 or float16; None keeps the precision of the program.
        layers: Which blocks to rewrite: see `decide`.
        compression: The TwELL compression factor where `advise` names none: 1, 2, 4 or 8; None takes the default.
        attention: The forms to write attention in, see `rewrite_attention`; none leaves it as it is.
        calibration: How often neurons fire, and what may be done with that; None if nothing is known.
        advise: See `decide`.
        weights: Which blocks are to be computed with FP8 weights that the model has in others.
        part: Which of several ranks the program is for, and how many there are.
        linear: Which linear layers outside of the blocks to rewrite, see `decide_linear`, and whether blocks take the
            norms before them.
        experts: Whether mixtures of experts are looked for.
        cache_scales: The scales of key-value caches that are to be in FP8, see `caches_in_fp8`; None leaves caches as
            they are.
        earlier: What an earlier run has decided of blocks and linear layers, to do it again.
        device: Where copies of weights are put, as the program is moved there afterwards; no second copy is
            made elsewhere then. Until it is moved, the graph says of them that they are where the others are. None
            leaves them there.
        calls: Returns the most rows of a tensor in a call of each optimization profile.
        dump: Receives the graph as traced, and after each pass.
        progress: Receives before each step how many are done, and of how many.
    """

    dtype: torch.dtype | None = None
    layers: str = "auto"
    compression: int | None = None
    attention: tuple[str, ...] = ()
    calibration: Calibration | None = None
    advise: Advise | None = None
    weights: Wish = Wish()  # noqa: RUF009
    part: Part = WHOLE
    linear: str = "auto"
    experts: bool = True
    cache_scales: Mapping[str, float] | None = None
    earlier: Earlier = Earlier()  # noqa: RUF009
    device: torch.device | None = None
    calls: Callable[[Node], Sequence[int]] = lambda x: ()
    dump: GraphDump = NOWHERE
    progress: Callable[[int, int], None] = lambda done, steps: None


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A program on its way through the passes, or behind them, and what was found out about it.

    Attributes:
        program: The program; behind LINEAR with `twell` ops, that of a rank if there are several.
        dense: From FFN on, the program before its blocks were rewritten; until then the traced one.
        stage: The last stage that it has passed.
        fp8: The weights that the model has in FP8, by the names of the constants that they became.
        folded: Its other FP8 weights, which are dequantised.
        blocks: Its feed-forward blocks, from FIND on.
        staying: Which neurons of each stay if TwELL runs it, from STAY on.
        layers: What becomes of each, from DECIDE on; hot neurons are those of a rank, all else is of all ranks.
        orders: The neurons of blocks in their new order, by module, from ORDER on; others stay where they are.
        attention: What became of each attention block, with the heads of a rank; empty where none was to be rewritten.
        linears: The linear layers outside of its blocks, from FIND_LINEAR on.
        linear: What becomes of each.
        notes: What every rank computes whole, and why; behind LINEAR also which FP8 weights are dequantised.
    """

    program: ExportedProgram
    dense: ExportedProgram
    stage: Stage = Stage.TRACED
    fp8: Mapping[str, Fp8] = field(default_factory=dict)
    folded: Sequence[str] = ()
    blocks: Sequence[FfnBlock] = ()
    staying: Sequence[Staying] = ()
    layers: list[Layer] = field(default_factory=list)
    orders: Mapping[str, torch.Tensor] = field(default_factory=dict)
    attention: list[Attention] = field(default_factory=list)
    linears: Sequence[FoundLinear] = ()
    linear: list[Linear] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def chosen(self) -> list[tuple[FfnBlock, Layer]]:
        """The blocks that TwELL is to run, and what was decided of them."""
        pairs = zip(self.blocks, self.layers, strict=True)
        return [(block, layer) for block, layer in pairs if layer.decision == "twell"]

    @property
    def fp8_linears(self) -> dict[FoundLinear, Weights]:
        """The linear layers that TwELL is to run with FP8 weights, and why these are."""
        pairs = zip(self.linears, self.linear, strict=True)
        return {each: row.weights for each, row in pairs if row.weights is not None and reads_fp8(row.weights)}

    def in_fp8(self, layer: FoundLinear) -> Fp8 | None:
        """Return the weight [out, in] of linear layers that are to be read in FP8; None of others."""
        weights = self.fp8_linears.get(layer)
        if weights is None:
            return None
        known = self.fp8 if weights.reason != QUANTISED else {}
        return linear_in_fp8(layer, lambda each: known.get(each.name), lambda each: tensor_of(self.program, each.name))

    @property
    def taken(self) -> list[str]:
        """The linear layers that TwELL runs, and the blocks that take the norms before them; see `Earlier`."""
        pairs = zip(self.linears, self.linear, strict=True)
        linears = [found.site for found, row in pairs if row.decision == "twell"]
        return linears + [layer.module for layer in self.layers if layer.norm != "none"]

    @property
    def dequantised(self) -> list[str]:
        """What the user should know of FP8 weights that are dequantised."""
        return notes_on(self.fp8, self.folded, [block for block, _ in self.chosen], self.fp8_linears)

    def to_json(self) -> dict[str, Json]:
        """Return what became of the blocks as JSON types, without the programs."""
        return {name: as_json(getattr(self, name)) for name in ("layers", "attention", "linear")}


# ---- steps ----


class Pass(Protocol):
    """A pass over a program: returns a new one, or the same if it finds nothing to do."""

    __name__: str

    def __call__(self, program: ExportedProgram, /) -> ExportedProgram:
        """Run it."""


@dataclass(frozen=True)
class Step:
    """A step of the list.

    Attributes:
        name: Its name, which dumped graphs bear.
        run: What it does.
        edits: Whether it is a pass over the program, whose graph is dumped behind it.
    """

    name: str
    run: Callable[[Rewritten, PassOptions], Rewritten]
    edits: bool = True


def step(each: Pass) -> Step:
    """Return a pass that needs nothing but the program as a step."""
    return Step(each.__name__, lambda passed, options: replace(passed, program=each(passed.program)))


def _in_precision(passed: Rewritten, options: PassOptions) -> Rewritten:
    if options.dtype is None:
        return passed
    return replace(passed, program=in_precision(passed.program, options.dtype))


def _dequantize(passed: Rewritten, options: PassOptions) -> Rewritten:
    program, fp8 = dequantize(passed.program)
    return replace(passed, program=program, fp8=fp8, folded=folded_in_fp8(program))


def _find(passed: Rewritten, options: PassOptions) -> Rewritten:
    blocks = [each for each in find_ffn_blocks(passed.program) if options.experts or each.routing is None]
    ranks = options.part.ranks
    return replace(
        passed, blocks=[replace(each, weights=judge(each, _stored(passed), options.weights, ranks)) for each in blocks]
    )


def _stored(passed: Rewritten) -> Callable[[Weight], Fp8 | None]:
    return lambda weight: passed.fp8.get(weight.name)


def _stay(passed: Rewritten, options: PassOptions) -> Rewritten:
    return replace(passed, staying=neurons.staying(passed.program, passed.blocks, options.calibration))


def _decide(passed: Rewritten, options: PassOptions) -> Rewritten:
    ranks = options.part.ranks
    staying = passed.staying if ranks == 1 else [neurons.of_a_rank(known, ranks) for known in passed.staying]
    fixed = fixed_nodes(passed.program.graph, constants_of(passed.program))
    blocks = [with_norm(each, fixed) if _takes_norm(each, options) else each for each in passed.blocks]
    decided = options.earlier.decided
    advise = options.advise if decided is None else repeat(decided)
    return replace(passed, blocks=blocks, layers=decide(blocks, options.layers, advise, staying, calls=options.calls))


def _takes_norm(block: FfnBlock, options: PassOptions) -> bool:
    """Whether a block is to take the norm before it, as linear layers do."""
    calls = options.calls(block.x)
    return not left_alone(block.module, options.linear, calls, options.part.ranks, options.earlier.linear_taken)


def _order(passed: Rewritten, options: PassOptions) -> Rewritten:
    orders, layers = neurons.order(passed.blocks, passed.staying, passed.layers)
    return replace(passed, orders=orders, layers=layers)


def _share(passed: Rewritten, options: PassOptions) -> Rewritten:
    return replace(passed, orders=neurons.share(passed.blocks, passed.staying, passed.layers, options.part))


def _rewrite_ffn(passed: Rewritten, options: PassOptions) -> Rewritten:
    chosen = [(block, layer) for block, layer in passed.chosen if block.routing is None]
    rewrites = [(block, options_of(block, layer, options.compression)) for block, layer in chosen]

    def quantised(block: FfnBlock, order: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return fp8_of(block, _stored(passed), lambda each: tensor_of(passed.program, each.name), order)

    program = rewrite_ffn(passed.program, rewrites, passed.orders, quantised, options.device)
    return replace(passed, dense=passed.program, program=program)


def _rewrite_experts(passed: Rewritten, options: PassOptions) -> Rewritten:
    experts = [block for block, _ in passed.chosen if block.routing is not None]
    return replace(passed, program=rewrite_experts(passed.program, experts))


def _split(passed: Rewritten, options: PassOptions) -> Rewritten:
    before = {node.name for node in passed.dense.graph.nodes}
    ops = [node.name for node in passed.program.graph.nodes if node.target in VARIANT_OF and node.name not in before]
    pairs = zip(passed.blocks, passed.layers, strict=True)
    dense = [block for block, layer in pairs if layer.decision != "twell" or block.routing is not None]
    program, notes = rank_program(passed.program, ops, dense, options.part)
    return replace(passed, program=program, notes=notes)


def _rewrite_attention(passed: Rewritten, options: PassOptions) -> Rewritten:
    if not options.attention:
        return passed
    program, attention = rewrite_attention(passed.program, options.attention)
    return replace(passed, program=program, attention=attention)


def _caches_in_fp8(passed: Rewritten, options: PassOptions) -> Rewritten:
    if options.cache_scales is None:
        return passed
    others = [f"{each.module}: {each.reason}" for each in passed.attention if each.form != CUDNN]
    return replace(passed, program=caches_in_fp8(passed.program, options.cache_scales, first_few(others)))


def _find_linear(passed: Rewritten, options: PassOptions) -> Rewritten:
    of_blocks = [part for each in passed.blocks for part in (each.gate, each.up, each.down) if part is not None]
    without = {node.name for part in of_blocks for node in part.nodes}
    without |= {block.residual.sum.name for block, _ in passed.chosen if block.residual is not None}
    found = find_linear(passed.program, without)

    def weights(layer: FoundLinear) -> Weights | None:
        return judge_linear(layer, _stored(passed), options.weights)

    decided = decide_linear(
        found, options.linear, options.calls, options.part.ranks, options.earlier.linear_taken, weights
    )
    return replace(passed, linears=found, linear=decided)


def _rewrite_linear(passed: Rewritten, options: PassOptions) -> Rewritten:
    pairs = zip(passed.linears, passed.linear, strict=True)
    chosen = [found for found, decided in pairs if decided.decision == "twell"]
    return replace(passed, program=rewrite_linear(passed.program, chosen, passed.in_fp8, options.device))


def _rotate_in_caches(passed: Rewritten, options: PassOptions) -> Rewritten:
    """Rotate in the ops over caches where linear layers are rewritten, too."""
    if all(each.decision != "twell" for each in passed.linear):
        return passed
    return replace(passed, program=rotate_in_caches(passed.program))


STEPS: dict[Stage, tuple[Step, ...]] = {
    Stage.FUNCTIONAL: (
        step(decompose),
        step(name_casts),
        Step("dequantize", _dequantize),
        step(write_numbers),
        step(merge_views),
        step(name_relus),
    ),
    Stage.ARRANGING: (step(fold_weights), step(fold_constants), step(feature_last)),
    Stage.PRECISION: (Step("in_precision", _in_precision),),
    Stage.FIND: (Step("find", _find, edits=False),),
    Stage.STAY: (Step("stay", _stay, edits=False),),
    Stage.DECIDE: (Step("decide", _decide, edits=False),),
    Stage.ORDER: (Step("order", _order, edits=False),),
    Stage.SHARE: (Step("share", _share, edits=False),),
    Stage.FFN: (Step("rewrite_ffn", _rewrite_ffn), Step("rewrite_experts", _rewrite_experts)),
    Stage.SPLIT: (Step("tensor_parallel", _split),),
    Stage.ATTENTION: (Step("rewrite_attention", _rewrite_attention), Step("caches_in_fp8", _caches_in_fp8)),
    Stage.FIND_LINEAR: (Step("find_linear", _find_linear, edits=False),),
    Stage.LINEAR: (Step("rewrite_linear", _rewrite_linear), Step("rotate_in_caches", _rotate_in_caches)),
}


# What only the program of one of several ranks passes.
_OF_RANKS = (Stage.SHARE, Stage.SPLIT)


# ---- runs ----


def run_until(
    start: ExportedProgram | Rewritten, options: PassOptions, until: Stage, without: Collection[Stage] = ()
) -> Rewritten:
    """Run the stages behind `start` up to `until`.

    Args:
        start: A traced program, or what an earlier call has returned.
        options: What the passes are to do.
        until: The last stage to run.
        without: Stages to leave out.

    Raises:
        UserError: See `decompose`, `lower` and `decide`.
    """
    passed = start if isinstance(start, Rewritten) else Rewritten(start, start)
    if passed.stage == Stage.TRACED:
        options.dump.program("traced", passed.program)
    left_out = {*without, *(_OF_RANKS if options.part.ranks == 1 else ())}
    stages = [stage for stage in STEPS if passed.stage < stage <= until and stage not in left_out]
    steps = [each for stage in stages for each in STEPS[stage]]
    with PROCESS_WIDE, uncollected():  # shapes of nodes are found out by torch, which traces in one thread at a time
        for done, each in enumerate(steps):
            options.progress(done, len(steps))
            passed = each.run(passed, options)
            if each.edits:
                options.dump.program(each.name, passed.program)
    return replace(passed, stage=max(passed.stage, until))


def run_passes(program: ExportedProgram, options: PassOptions) -> Rewritten:
    """Run every pass over a traced program.

    Raises:
        UserError: See `run_until` and `rank_program`.
    """
    return _finish(run_until(program, options, Stage.ORDER), options)


def run_for_ranks(start: ExportedProgram | Rewritten, options: PassOptions) -> Iterator[Rewritten]:
    """Yield the result of `run_passes` for each rank; `options.part` says how many there are. See `run_until`.

    Graphs are dumped for the first one.

    Raises:
        UserError: See `run_passes`.
    """
    passed = run_until(start, options, Stage.ORDER)
    for rank in range(options.part.ranks):
        own = replace(options, part=replace(options.part, rank=rank), dump=options.dump if rank == 0 else NOWHERE)
        yield _finish(passed, own)


def _finish(ordered: Rewritten, options: PassOptions) -> Rewritten:
    passed = run_until(ordered, options, Stage.LINEAR)
    notes = [*passed.dequantised, *passed.notes]
    if options.linear == "twell" and options.part.ranks > 1:
        notes.append("linear layers outside of feed-forward blocks stay as they are: ranks share the model")
    return replace(passed, notes=notes)
