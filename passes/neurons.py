"""Decide which neurons of a block are kept, and in which order. Sums do not care about their order.

    before   neuron      0   1   2   3   4   5         the profile: how many tokens each fired for
             fired for   3   0   1   9   0   8
    after, 2 are hot     3   5 | 0   2 | 1   4         the hot ones first; those that never fired last, or removed

**Moving** them changes no term of any sum, so it is exact. What a neuron is in w_gate, w_up, their biases and w_down
moves together. Only a block of which some neurons are hot is touched, since the kernels take the first ones as hot. All
others keep the order of the model: wholly sorted, the first tiles would hold most of the non-zeros, and overflow. A
block whose weights are also read elsewhere keeps its order: it would need a copy of them.

**Removing neurons that cannot fire** is exact, too, and needs no profile. A neuron cannot fire if its row of w_gate (of
a plain block, w_up) is all zero and its bias, if any, is not above the threshold. For every finite x it then adds
exactly 0. For an x with NaN or infinity its activation is 0 * NaN = NaN, which reaches all of y. So the first such
neuron of a block stays, and sees to that for all of them. A zero row of w_up, or a zero column of w_down, proves less:
where the gate overflows to infinity the neuron adds inf * 0 = NaN. Such neurons stay.

**Removing neurons that never fired** in a profile is approximate, and done only if asked for: they may fire for another
input. The number of neurons becomes a multiple of 8, so that rows of the hidden tensor stay aligned; some of those that
could go fill up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.block_profile import Calibration, Counts, hot_first, rate_bound
from twellc.passes.graph.program import tensor_of
from twellc.passes.match.activations import packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import VIEWS, Weight
from twellc.passes.report import Layer, Neurons
from twellc.passes.rewrite_ffn import arranged_view
from twellc.plugins.ops import activate

# Rows of the hidden tensor, 2 bytes an element, start at multiples of 16 bytes.
_ALIGNMENT = 8


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What becomes of the neurons of a block.

    Attributes:
        order: Those that are kept, in their new order, int64 [kept].
        hot: How many of them, the first ones, are hot.
        report: What is said of them.
        changes: Whether any is moved or removed.
    """

    order: torch.Tensor
    hot: int
    report: Neurons
    changes: bool


def arrange_neurons(
    program: ExportedProgram, blocks: list[FfnBlock], layers: list[Layer], calibration: Calibration | None
) -> tuple[dict[str, Arrangement], list[Layer]]:
    """Return what becomes of the neurons of blocks, by module, and the layers with it; without an entry all stays.

    Args:
        program: A canonical program.
        blocks: All blocks found in it.
        layers: What was decided of each.
        calibration: What is known of how often neurons fire; None if nothing is.
    """
    found: dict[str, Arrangement] = {}
    reported = []
    for block, layer in zip(blocks, layers, strict=True):
        arrangement = _arrange(program, block, calibration, layer.hot) if layer.decision == "twell" else None
        if arrangement is None:
            reported.append(replace(layer, hot=0))  # the first neurons are not the hottest
            continue
        found[block.module] = arrangement
        said = str(arrangement.report)
        reason = f"{layer.reason}; {said}" if said else layer.reason
        reported.append(replace(layer, reason=reason, hot=arrangement.hot, neurons=arrangement.report))
    return found, reported


def _arrange(
    program: ExportedProgram, block: FfnBlock, calibration: Calibration | None, hot: int
) -> Arrangement | None:
    """Return what becomes of the neurons of a block of which so many are to be hot; None where there is nothing to say.

    Hot are none where nothing says which, or they must not be moved; and no more than are kept.
    """
    shared = _shared(block)
    profile = None if calibration is None else calibration.blocks.get(block.module)
    if profile is not None and (profile.d_ff, profile.variant) != (block.d_ff, block.variant):
        profile = None
    reason = shared or ("" if profile is not None or calibration is None else "the profile does not know the block")
    unable, dead = np.zeros(block.d_ff, bool), np.zeros(block.d_ff, bool)
    if not shared:
        cannot = np.flatnonzero(_cannot_fire(program, block))
        unable[cannot[1:]] = True
        if profile is not None and calibration is not None and calibration.prune_dead:
            dead = profile.never & ~unable
            dead[cannot[:1]] = False
    kept = without(unable | dead)
    gone = np.setdiff1d(np.arange(block.d_ff), kept)
    if calibration is None and not len(gone):
        return None
    hot = 0 if profile is None or shared else min(hot, len(kept))
    if profile is not None:
        kept = kept[hot_first(profile.firing[kept], hot)]
    unseen = None if calibration is None or calibration.unseen is None else calibration.unseen.get(block.module)
    report = Neurons(
        kept=len(kept),
        unable=int(unable[gone].sum()),
        dead=int(dead[gone].sum()),
        never=None if profile is None else int(profile.never.sum()),
        tokens=None if profile is None else profile.tokens,
        rate_bound=None if profile is None else rate_bound(profile.tokens),
        density=None if profile is None else int(profile.firing[kept].sum()) / (profile.tokens * len(kept)),
        lost=None if unseen is None else float(unseen.firing[gone].sum() / max(unseen.nonzeros, 1)),
        lost_of=None if unseen is None else unseen.tokens,
        reason=reason,
    )
    return Arrangement(torch.from_numpy(kept), hot, report, not np.array_equal(kept, np.arange(block.d_ff)))


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
    part = block.gate or block.up
    assert part is not None

    def values(weight: Weight) -> torch.Tensor:
        return arranged_view(tensor_of(program, weight.name).detach(), weight, in_out=False)[1]

    cannot = ~values(part.weight).any(1)
    if part.bias is not None and cannot.any():
        cannot &= activate(values(part.bias), block.activation, block.threshold) == 0
    found: NDArray[np.bool_] = cannot.numpy()
    return found


def _weights(block: FfnBlock) -> list[Weight]:
    """Return the constants in which a neuron has a place."""
    parts = [part for part in (block.gate, block.up) if part is not None]
    return [block.down.weight, *(each for part in parts for each in (part.weight, part.bias) if each is not None)]


def _shared(block: FfnBlock) -> str:
    """Say which constant of a block something else reads, too; an empty text if nothing does."""
    inside = {node for part in (block.gate, block.up, block.down) if part is not None for node in part.nodes}
    for weight in _weights(block):
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
