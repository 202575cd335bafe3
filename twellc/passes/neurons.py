"""Decide which neurons of a block are kept, and in which order. Sums do not care about their order.

    before   neuron      0   1   2   3   4   5         the profile: how many tokens each fired for
             fired for   3   0   1   9   0   8
    after, 2 are hot     3   5 | 0   2 | 1   4         the hot ones first; those that never fired last, or removed

**Moving** them changes no term of any sum, so it is exact. A neuron's parts in w_gate, w_up, their biases and w_down
move together. Only blocks with some hot neurons are touched, since the kernels take the first ones as hot. All
others keep the order of the model: wholly sorted, the first tiles would hold most of the non-zeros, and overflow. A
block whose weights are also read elsewhere keeps its order: it would need a copy of them. So does one in FP8 where 128
neurons have scales together; none of its neurons is removed either.

**Removing neurons that cannot fire** is exact, too, and needs no profile. A neuron cannot fire if its row of w_gate (of
a plain block, w_up) is all zero and its bias, if any, is not above the threshold. For every finite x it then adds
exactly 0. For an x with NaN or infinity its activation is 0 * NaN = NaN, which reaches all of y. So the first such
neuron of a block stays, and sees to that for all of them. A zero row of w_up, or a zero column of w_down, proves less:
where the gate overflows to infinity the neuron adds inf * 0 = NaN. Such neurons stay.

**Removing neurons that never fired** in a profile is approximate, and done only if asked for: they may fire for another
input. The number of neurons becomes a multiple of 8, so that rows of the hidden tensor stay aligned; some of those that
could go fill up.

`staying` says what stays, before it is decided whether TwELL runs a block: the decision is about those neurons. `order`
says afterwards in which order they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.base.arrays import to_numpy
from twellc.base.errors import UserError
from twellc.passes.block_profile import BlockProfile, Calibration, Counts, hot_first, rate_bound
from twellc.passes.graph.program import tensor_of
from twellc.passes.match.activations import packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import VIEWS, Weight
from twellc.passes.match.shared_axis import Part
from twellc.passes.report import KEPT_WITH_BLOCKS, Layer, Neurons
from twellc.passes.rewrite_ffn import arranged_view
from twellc.plugins.fp8 import BLOCK
from twellc.plugins.meaning import activate

# Rows of the hidden tensor, 2 bytes an element, start at multiples of 16 bytes.
_ALIGNMENT = 8


@dataclass(frozen=True, eq=False)
class Staying:
    """Which neurons of a block stay if TwELL runs it, and facts about them.

    Attributes:
        kept: Those that stay, in the order of the model, int64 [kept].
        rates: How often each of them fires, as a share of the tokens, float64 [kept]; None where nothing is known.
        rows: How many tokens had 0, 1, 2, … neurons firing, int64; None likewise.
        movable: Whether they may change places.
        report: The report on them; None without one.
    """

    kept: Counts
    rates: NDArray[np.float64] | None = None
    rows: Counts | None = None
    movable: bool = True
    report: Neurons | None = None

    def dealt(self, ranks: int) -> Counts:
        """Return the rank that has each neuron, int64 [kept]: the hottest are dealt out to and fro, one for each."""
        count = len(self.kept)
        unit = _ALIGNMENT if count >= _ALIGNMENT * ranks else 1
        sizes = np.full(ranks, count // unit // ranks)
        sizes[: count // unit % ranks] += 1
        sizes *= unit
        sizes[-1] += count % unit
        rounds = np.tile(np.arange(ranks), (sizes.min(), 1))
        rounds[1::2] = rounds[1::2, ::-1]
        order = np.concatenate([rounds.ravel(), np.repeat(np.arange(ranks), sizes - sizes.min())])
        dealt = np.empty(count, np.int64)
        dealt[np.argsort(np.zeros(count) if self.rates is None else -self.rates, kind="stable")] = order
        return dealt


def all_of(block: FfnBlock) -> Staying:
    """Return that all neurons of a block stay."""
    return Staying(np.arange(block.d_ff))


def staying(program: ExportedProgram, blocks: Sequence[FfnBlock], calibration: Calibration | None) -> list[Staying]:
    """Return which neurons of each block stay if TwELL runs it.

    Args:
        program: A canonical program.
        blocks: All blocks found in it; of experts all neurons stay.
        calibration: What is known of how often neurons fire; None if nothing is.
    """
    return [
        all_of(block) if block.refusal or block.routing else _staying(program, block, calibration) for block in blocks
    ]


def order(
    blocks: Sequence[FfnBlock], neurons: Sequence[Staying], layers: Sequence[Layer]
) -> tuple[dict[str, torch.Tensor], list[Layer]]:
    """Return the neurons of blocks in their new order, by module, and the layers with what became of them.

    Args:
        blocks: The blocks.
        neurons: Which neurons of each stay.
        layers: What was decided of each. Hot are none where nothing says which, or they must not be moved; and no more
            than are kept.

    Returns:
        Neurons to keep in their new order, int64 [kept]; without an entry all stay where they are.
    """
    orders: dict[str, torch.Tensor] = {}
    reported = []
    for block, known, layer in zip(blocks, neurons, layers, strict=True):
        if layer.decision != "twell":
            reported.append(replace(layer, hot=0))
            continue
        hot = 0 if known.rates is None or not known.movable else min(layer.hot, len(known.kept))
        kept = known.kept if known.rates is None else known.kept[hot_first(known.rates, hot)]
        if not np.array_equal(kept, np.arange(block.d_ff)):
            orders[block.module] = torch.from_numpy(kept)
        said = str(known.report) if known.report is not None else ""
        reason = f"{layer.reason}; {said}" if said else layer.reason
        reported.append(replace(layer, reason=reason, hot=hot, neurons=known.report))
    return orders, reported


def share(
    blocks: Sequence[FfnBlock], neurons: Sequence[Staying], layers: Sequence[Layer], part: Part
) -> dict[str, torch.Tensor]:
    """Return the neurons that one of several ranks has of each block that TwELL runs, in their order, by module.

    The hottest are dealt out first, so that ranks have equally many of them, and about equal activity. Numbers are
    multiples of 8 where they can be. Where nothing is known of the neurons, those that follow each other are on
    different ranks.

    Raises:
        UserError: A block has fewer neurons than there are ranks.
    """
    shared = {}
    for block, known, layer in zip(blocks, neurons, layers, strict=True):
        if layer.decision != "twell" or block.routing is not None:
            continue
        if len(known.kept) < part.ranks:
            raise UserError(
                f"--tensor-parallel {part.ranks}", f"the block {block.module} has {len(known.kept)} neurons",
                expected="one for each rank at least", fix="Share the model among fewer.",
            )  # fmt: skip
        own = np.flatnonzero(known.dealt(part.ranks) == part.rank)
        if known.rates is not None:
            own = own[hot_first(known.rates[own], layer.hot)]
        shared[block.module] = torch.from_numpy(known.kept[own])
    return shared


def of_a_rank(known: Staying, ranks: int) -> Staying:
    """Return the neurons of the rank that has the fewest; others have much the same.

    Where there are fewer neurons than ranks, which `share` refuses, these are all neurons.
    """
    if len(known.kept) < ranks:
        return known
    dealt = known.dealt(ranks)
    own = np.flatnonzero(dealt == np.bincount(dealt, minlength=ranks).argmin())
    rows = known.rows
    if rows is not None:
        rows = np.bincount(np.arange(len(rows)) // ranks, weights=rows, minlength=len(own) + 1).astype(np.int64)
    return Staying(known.kept[own], None if known.rates is None else known.rates[own], rows, known.movable)


def _staying(program: ExportedProgram, block: FfnBlock, calibration: Calibration | None) -> Staying:
    shared = _shared(block)
    if block.weights == KEPT_WITH_BLOCKS:
        shared = f"blocks of {BLOCK} of its neurons have scales"
    profile = None if calibration is None else calibration.blocks.get(block.module)
    if profile is not None and (profile.d_ff, profile.variant) != (block.d_ff, block.variant):
        profile = None
    unable, dead = np.zeros(block.d_ff, bool), np.zeros(block.d_ff, bool)
    if not shared:
        cannot = np.flatnonzero(_cannot_fire(program, block))
        unable[cannot[1:]] = True
        if profile is not None and calibration is not None and calibration.prune_dead:
            dead = profile.never & ~unable
            dead[cannot[:1]] = False
    kept = without(unable | dead)
    gone = np.setdiff1d(np.arange(block.d_ff), kept)
    report = Neurons(len(kept), unable=int(unable[gone].sum()), dead=int(dead[gone].sum()))
    if calibration is not None:
        unknown = "" if profile is not None else "the profile does not know the block"
        report = replace(_with_profile(report, block, profile, kept, calibration), reason=shared or unknown)
    elif not len(gone):
        return Staying(kept, movable=not shared)
    if profile is None:
        return Staying(kept, movable=not shared, report=report)
    return Staying(kept, profile.rates[kept], profile.rows, not shared, report)


def _with_profile(
    report: Neurons, block: FfnBlock, profile: BlockProfile | None, kept: Counts, calibration: Calibration
) -> Neurons:
    """Add what profiles say of a block."""
    unseen = None if calibration.unseen is None else calibration.unseen.get(block.module)
    if profile is not None:
        report = replace(
            report,
            never=int(profile.never.sum()),
            tokens=profile.tokens,
            rate_bound=rate_bound(profile.tokens),
            density=int(profile.firing[kept].sum()) / (profile.tokens * len(kept)),
        )
    if unseen is not None:
        lost = float((unseen.nonzeros - unseen.firing[kept].sum()) / max(unseen.nonzeros, 1))
        report = replace(report, lost=lost, lost_of=unseen.tokens)
    return report


def without(removed: NDArray[np.bool_]) -> Counts:
    """Return the neurons that stay when some are removed, bool [d_ff]: int64 [kept], a multiple of 8 of them if it can.

    They keep their order, as do the first of those to be removed, which fill up.
    """
    places = np.flatnonzero(removed)
    alive = len(removed) - len(places)
    spared = -alive % _ALIGNMENT or (0 if alive else _ALIGNMENT)
    return np.delete(np.arange(len(removed)), places[spared:])


def _cannot_fire(program: ExportedProgram, block: FfnBlock) -> NDArray[np.bool_]:
    """Return which neurons' weights prove that they cannot fire for a finite x, bool [d_ff]."""

    def values(weight: Weight) -> torch.Tensor:
        return arranged_view(tensor_of(program, weight.name).detach(), weight, in_out=False)[1]

    part = block.gate or block.up
    assert part is not None
    weight = values(part.weight)
    cannot = ~weight[:, :64].any(1)  # of most rows that shows already that they are not all zero
    cannot[cannot.clone()] = ~weight[cannot].any(1)
    if part.bias is not None and cannot.any():
        threshold = block.threshold if block.thresholds is None else values(block.thresholds).float()
        cannot &= activate(values(part.bias), block.activation, threshold) == 0
    found: NDArray[np.bool_] = to_numpy(cannot)
    return found


def _shared(block: FfnBlock) -> str:
    """Say which constant in which a neuron has a place something else reads, too; an empty text if nothing does."""
    parts = [part for part in (block.gate, block.up) if part is not None]
    inside = {node for part in (*parts, block.down) for node in part.nodes}
    constants = [block.down.weight, *(each for part in parts for each in (part.weight, part.bias) if each is not None)]
    for weight in constants:
        if not inside.issuperset(_readers(weight.node)):
            return f"its weight {weight.name} is also read elsewhere"
    return ""


def _readers(constant: Node) -> Iterator[Node]:
    """Yield what computes with a constant, seen through views."""
    for user in constant.users:
        if packet(user) in VIEWS | {torch.ops.aten.expand}:
            yield from _readers(user)
        else:
            yield user
