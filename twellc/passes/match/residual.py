"""Find the residual of a feed-forward block: what its result is added to and goes nowhere else.

    before   x ─ block ─ y ─ add ─ sum              y, other and sum: [..., d_out], of one dtype
             other ───────────┘
    after    x ─ block with the residual `other` ─ sum

A `twell` op adds its residual in float32, before the one rounding, so the Add needs no kernel. Between y and
the Add there may be operations that change no value. The other operand may be computed after y, as attention is that
runs beside the block: the op then takes the place of the Add.

A broadcast operand, one of another dtype, a constant, or y itself is not a residual; y must have no other reader, nor
be an output. A float32 sum, in an ONNX graph whose blocks alone compute in low precision, keeps its precision and
stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from twellc.passes.match.linear import Linear, same_sizes, source_with_sizes, step, width

aten = torch.ops.aten


@dataclass(frozen=True)
class Residual:
    """A sum that a block can compute.

    Attributes:
        other: What the block's result is added to.
        sum: The Add.
        x: The node to read the block's x from, with the same leading dimensions as the sum.
    """

    other: Node
    sum: Node
    x: Node


def find_residual(x: Node, down: Linear, constants: dict[Node, str]) -> Residual | None:
    """Return the residual of a block that reads `x` and ends with `down`, or None."""
    y = down.node
    while len(y.users) == 1 and step(next(iter(y.users))) is y:
        y = next(iter(y.users))
    if len(y.users) != 1:
        return None
    (reader,) = y.users
    if reader.target is not aten.add.Tensor or len(reader.args) != 2 or reader.kwargs.get("alpha", 1) != 1:
        return None
    other = reader.args[1] if reader.args[0] is y else reader.args[0]
    if not isinstance(other, Node) or other is y or other in constants:
        return None
    values = [node.meta.get("val") for node in (reader, y, other)]
    total = values[0]
    dtype = down.node.meta["val"].dtype
    if not all(isinstance(value, torch.Tensor) and value.dtype == dtype for value in values):
        return None
    if dtype == torch.float32:
        return None  # of an ONNX graph; other float32 blocks are not rewritten
    assert total is not None
    if not all(same_sizes(value.shape, total.shape) for value in values if value is not None):
        return None
    source = source_with_sizes(x, (*total.shape[:-1], width(x)))
    return None if source is None or width(reader) != width(down.node) else Residual(other, reader, source)
