"""The arguments and the results of the two ops of a training step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twellc.plugins.block import OPTIONS, TENSORS, BlockOptions, Operands

# By default, room for this many pairs of each token, on average: the width of the reference's format.
DEFAULT_PAIRS = 128


class Kept(NamedTuple):
    """The tensors that a forward keeps for the backward, see docs/format.md; empty on a CPU, which computes again.

    Attributes:
        row_begin: int64 [tokens + 2]: where each token's pairs begin, counted as if there were no limit; the last one
            is the number of leading tokens with room for all their pairs.
        pairs: int32 [tokens * pairs]: the neuron and the bits of g of each pair, a word of TwELL.
        ups: int16 [tokens * pairs]: the bits of each pair's u, for dReLU after the ReLU; empty in a plain block.
        hot: int16 [tokens, hot or 2 hot]: the bits of z of the hot neurons, then those of u in a gated block; where all
            neurons are hot, z of all tokens, then u of all tokens.
    """

    row_begin: Tensor
    pairs: Tensor
    ups: Tensor
    hot: Tensor


KEPT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int16)


class Gradients(NamedTuple):
    """The results of a backward; those that are not wanted are empty."""

    x: Tensor
    w_gate: Tensor
    b_gate: Tensor
    w_up: Tensor
    b_up: Tensor
    w_down: Tensor
    b_down: Tensor


@dataclass(frozen=True, kw_only=True)
class Step:
    """How a training step computes a block; it changes speed and memory, and results only by rounding.

    Attributes:
        order: int32 [d_ff], all neurons, those first that are active most often; None keeps their order.
        hot: How many of the first ones are computed and kept densely: d_ff, or a multiple of 8 below it.
        pairs: Room for pairs of a token and another active neuron, for each token on average. Tokens without room are
            computed anew, one by one, which takes long: give enough.
    """

    order: Tensor | None = None
    hot: int = 0
    pairs: int = DEFAULT_PAIRS

    def arguments(self) -> list[Any]:
        """Return them as arguments of the ops."""
        return [getattr(self, each.name) for each in fields(self)]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of one of the ops: the block, and how it is computed."""

    operands: Operands[Tensor]
    options: BlockOptions
    step: Step

    @property
    def tokens(self) -> int:
        """How many rows x has."""
        return self.operands.x.numel() // self.operands.x.shape[-1]

    @property
    def d_ff(self) -> int:
        """How many neurons the block has."""
        return self.operands.w_up.shape[0]

    def arguments(self) -> list[Any]:
        """Return the arguments of the op, from which `call_of` makes the same call again."""
        tensors, options = self.operands.named(), self.options.named()
        return [
            *(tensors.get(each.name) for each in TENSORS),
            *(options[each.name] for each in _OPTIONS),
            *self.step.arguments(),
        ]


# `hot` is in the step, and the norm is computed before it.
_OPTIONS = tuple(each for each in OPTIONS if each.name not in {*(each.name for each in fields(Step)), "norm", "eps"})


def call_of(arguments: Sequence[Any]) -> Call:
    """Return the call with these arguments."""
    names = [[each.name for each in rows] for rows in (TENSORS, _OPTIONS, fields(Step))]
    values = iter(arguments)
    tensors, options, step = (dict(zip(each, itertools.islice(values, len(each)), strict=True)) for each in names)
    return Call(operands=Operands(**tensors), options=BlockOptions(**options), step=Step(**step))


def schemas() -> tuple[str, str]:
    """Return the schemas of both ops, as `torch.library` reads them."""
    optional = {each.name for each in TENSORS if each.flag} | {"w_gate"}
    tensors = [f"Tensor{'?' if each.name in optional else ''} {each.name}" for each in TENSORS]
    options = [f"{each.kind.__name__} {each.name}" for each in _OPTIONS]
    given = ", ".join([*tensors, *options, "Tensor? order", "int hot", "int pairs"])
    kept = ", ".join(f"Tensor kept_{name}" for name in Kept._fields)
    outputs = ", ".join(["Tensor"] * (3 + len(Kept._fields)))
    gradients = ", ".join(["Tensor"] * len(Gradients._fields))
    return (
        f"train_forward({given}) -> ({outputs})",
        f"train_backward(Tensor dy, Tensor dl1, {kept}, bool for_x, bool for_weights, {given}) -> ({gradients})",
    )
