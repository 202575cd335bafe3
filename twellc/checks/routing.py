"""Which experts the tokens of a model are sent to, in several runs of it.

A router sends a token to the experts with the largest scores. Where two scores are nearly the same, rounding decides:
a candidate may then choose other experts than the model, both rightly, and differ from it by more than rounding. So
all runs of the model get the experts that the plain low-precision model has chosen, and further ones show what another
choice would change. docs/accuracy.md says what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from twellc.passes.graph.execution import Visit
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import PRODUCTS, operand

aten = torch.ops.aten

# How near to each other two scores are that a candidate may have in another order, in units of the largest error of the
# router's scores in low precision: both may be off by that.
_NEAR = 2.0


@dataclass(frozen=True)
class Routers:
    """Nodes of a program that decide about experts, by name.

    Attributes:
        scores: Those that choose experts, or groups of them, each with the node of the scores [..., experts].
        limits: Those that compare the place of a token among an expert's tokens, [..., tokens, experts], with how many
            it takes: each with the router, the node of the places, and this number.
    """

    scores: dict[str, str]
    limits: dict[str, tuple[str, str, int]]


def routers_of(blocks: Iterable[FfnBlock]) -> Routers:
    """Return what decides which experts of a program get a token."""
    routers, limits = dict[str, str](), dict[str, tuple[str, str, int]]()
    nodes = list(_before(block.routing.ids for block in blocks if block.routing is not None))
    for node in nodes:
        if packet(node) in (aten.topk, aten.argmax):
            scores = operand(node).meta["val"]
            count, dim = (*arguments(node), -1)[1:3] if packet(node) is aten.topk else (1, (*arguments(node), None)[1])
            if dim in (-1, scores.dim() - 1) and count < scores.shape[-1]:
                routers[node.name] = operand(node).name
    for node in nodes:
        if packet(node) is aten.le and packet(operand(node)) is aten.cumsum and isinstance(arguments(node)[1], int):
            places = operand(node)
            router = next((each.name for each in _before([places]) if each.name in routers), None)
            if router is not None and arguments(places)[1] in (-2, places.meta["val"].dim() - 2):
                limits[node.name] = router, places.name, arguments(node)[1]
    return Routers(routers, limits)


def _before(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield nodes and what they are computed from, up to products."""
    pending, visited = list(nodes), set[Node]()
    while pending:
        node = pending.pop()
        if node not in visited and packet(node) not in PRODUCTS:
            visited.add(node)
            pending.extend(node.all_input_nodes)
            yield node


# Receives the name of a router, its scores [..., experts] and the places that it chooses; returns others.
_Choose = Callable[[str, Tensor, Tensor], Tensor]
# Receives the name of a limit, the places, and which of them are within it; returns others.
_Limit = Callable[[str, Tensor, Tensor], Tensor]


def _same(name: str, value: Any) -> Any:
    return value


def _within(limit: str, places: Tensor, fits: Tensor) -> Tensor:
    return fits


def _visitor(routers: Routers, choose: _Choose, visit: Visit = _same, limit: _Limit = _within) -> Visit:
    """Return a visitor of runs that lets `choose` choose, and `limit` refuse; `visit` sees what comes of it."""
    values = dict[str, Tensor]()
    read = {*routers.scores.values(), *(places for _, places, _ in routers.limits.values())}

    def see(name: str, value: Any) -> Any:
        if name in routers.scores:
            scores = values[routers.scores[name]]
            if isinstance(value, Tensor):  # of argmax
                value = choose(name, scores, value.reshape(*scores.shape[:-1], 1)).reshape(value.shape)
            else:
                ids = choose(name, scores, value[1])
                value = scores.gather(-1, ids), ids
        if name in routers.limits:
            value = limit(name, values[routers.limits[name][1]], value)
        value = visit(name, value)
        if name in read:
            values[name] = value
        return value

    return see


class Choice:
    """The experts that the first run of a model chooses for one sample.

    Attributes:
        routers: See `routers_of`.
        errors: Of each router, how far scores of the last run were off from those of the first at most.
    """

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self.errors: dict[str, float] = {}
        self._first: dict[str, tuple[Tensor, Tensor]] = {}

    def alike(self, visit: Visit = _same) -> Visit:
        """Return a visitor for a run, which is made to choose as the first one; `visit` sees what comes of it."""

        def choose(router: str, scores: Tensor, ids: Tensor) -> Tensor:
            first, ids = self._first.setdefault(router, (scores, ids))
            errors = (scores.double() - first.double()).abs().nan_to_num(0.0)
            self.errors[router] = float(errors.max()) if errors.numel() else 0.0
            return ids

        return _visitor(self.routers, choose, visit)


def other_choices(choices: list[Choice]) -> list[Visit]:
    """Return visitors for runs in float64 that choose otherwise where rounding may; none without routers.

    Each swaps the last one that was chosen for the first that was not, in one half of the places where their scores are
    near to each other. Where experts take a limited number of tokens, there are two for each half: a token whose place
    is so near to the limit that swaps before it decide is without its expert in one of them, and has it in the other.

    Args:
        choices: Of each sample, behind a run that was made to choose alike.
    """
    routers = choices[0].routers
    near = {router: _NEAR * max(each.errors[router] for each in choices) for router in routers.scores}

    def other(half: int, kept: bool) -> Visit:
        moves = dict[str, Tensor]()  # of each router: how many tokens may come to an expert, or leave it

        def choose(router: str, scores: Tensor, ids: Tensor) -> Tensor:
            last, place = scores.gather(-1, ids).min(-1, keepdim=True)
            first, other = scores.scatter(-1, ids, -torch.inf).max(-1, keepdim=True)
            generator = torch.Generator().manual_seed(list(routers.scores).index(router))
            swaps = torch.randint(2, last.shape, generator=generator).to(last.device) == half
            unsure = last - first <= near[router]
            experts = torch.cat((ids.gather(-1, place), other), -1)
            nobody = torch.zeros(scores.shape, dtype=torch.int64, device=scores.device)
            moves[router] = nobody.scatter(-1, experts, unsure.long().expand(experts.shape)).cumsum(-2)
            return torch.where(swaps & unsure, ids.scatter(-1, place, other), ids)

        def limit(name: str, places: Tensor, fits: Tensor) -> Tensor:
            router, _, room = routers.limits[name]
            unsure = (places > room - moves[router]) & (places <= room + moves[router])
            return fits | unsure if kept else fits & ~unsure

        return _visitor(routers, choose, limit=limit)

    if not routers.scores:
        return []
    return [other(half, kept) for half in (0, 1) for kept in ((False, True) if routers.limits else (False,))]
