"""Which experts the tokens of a model are sent to, in several runs of it.

A router sends a token to the experts with the largest scores. Where two scores are nearly the same, rounding decides:
a candidate may then choose other experts than the model, both rightly, and differ from it by more than rounding. So
all runs of the model get the experts that the plain low-precision model has chosen, and further ones show what another
choice would change. docs/accuracy.md says what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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


def routers_of(blocks: Iterable[FfnBlock]) -> dict[str, str]:
    """Return the nodes that choose experts, or groups of them, and for each the node of the scores, by names."""
    pending = [block.routing.ids for block in blocks if block.routing is not None]
    routers, visited = dict[str, str](), set[Node]()
    while pending:
        node = pending.pop()
        if node in visited or packet(node) in PRODUCTS:
            continue
        visited.add(node)
        pending.extend(node.all_input_nodes)
        if packet(node) in (aten.topk, aten.argmax):
            scores = operand(node).meta["val"]
            count, dim = (*arguments(node), -1)[1:3] if packet(node) is aten.topk else (1, (*arguments(node), None)[1])
            if dim in (-1, scores.dim() - 1) and count < scores.shape[-1]:
                routers[node.name] = operand(node).name
    return routers


# Receives the name of a router, its scores [..., experts] and the places that it chooses; returns others.
_Choose = Callable[[str, Tensor, Tensor], Tensor]


def _same(name: str, value: Any) -> Any:
    return value


def _visitor(routers: Mapping[str, str], choose: _Choose, visit: Visit = _same) -> Visit:
    """Return a visitor of runs that lets `choose` choose; `visit` sees what comes of it."""
    read, values = set(routers.values()), dict[str, Tensor]()

    def see(name: str, value: Any) -> Any:
        if name in routers:
            scores = values[routers[name]]
            if isinstance(value, Tensor):  # of argmax
                value = choose(name, scores, value.reshape(*scores.shape[:-1], 1)).reshape(value.shape)
            else:
                ids = choose(name, scores, value[1])
                value = scores.gather(-1, ids), ids
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

    def __init__(self, routers: Mapping[str, str]) -> None:
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
    near to each other.

    Args:
        choices: Of each sample, behind a run that was made to choose alike.
    """
    routers = choices[0].routers
    near = {router: _NEAR * max(each.errors[router] for each in choices) for router in routers}

    def choose_in(half: int) -> _Choose:
        def choose(router: str, scores: Tensor, ids: Tensor) -> Tensor:
            last, place = scores.gather(-1, ids).min(-1, keepdim=True)
            first, other = scores.scatter(-1, ids, -torch.inf).max(-1, keepdim=True)
            generator = torch.Generator().manual_seed(list(routers).index(router))
            swaps = torch.randint(2, last.shape, generator=generator).to(last.device) == half
            return torch.where(swaps & (last - first <= near[router]), ids.scatter(-1, place, other), ids)

        return choose

    return [_visitor(routers, choose_in(half)) for half in (0, 1) if routers]
