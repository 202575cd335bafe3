"""Let what appends to a key-value cache, and attention over it, rotate by itself.

    x [batch, tokens, heads, width] ─ rotation ─ twell.append_caches, as new keys, or twell.cached_attention, as queries

becomes

    x, cosines, sines [batch, tokens, width] ─ twell.append_caches, twell.cached_attention

A rotation is x * cos + cat(-x2, x1) * sin, where x1 and x2 are the halves of the width. TensorRT computes it in kernels
of its own, which take longer than the rest of attention over a short cache.

Left as it is: a rotation of a part of the width or of neighbours, as in GPT-NeoX and GPT-J; in float32, as in Olmo2;
with a norm behind it, as in NanoChat; none, as in OPT; of a width that is not a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.passes.graph.program import editable, finish
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.linear import same_sizes
from twellc.plugins.cache_op import APPEND, CACHED_ATTENTION

aten = torch.ops.aten

_WIDTHS, _VALUES = 16, 8  # the kernels take their multiples, as widths of rotated parts and of values


@dataclass(frozen=True)
class _Rotation:
    """x, [batch, tokens, heads, width], before a rotation by cosines and sines, [batch, tokens, width]."""

    x: Node
    cosines: Node
    sines: Node


def rotate_in_caches(program: ExportedProgram) -> ExportedProgram:
    """Return the program with the rotations in the ops that read them."""
    program = editable(program)
    for op, which in ((APPEND, 2), (CACHED_ATTENTION, 0)):
        for node in program.graph.find_nodes(op="call_function", target=op):
            operands = arguments(node)
            found = _rotation(operands[which])
            if found is not None and operands[which + 1].meta["val"].shape[3] % _VALUES == 0:
                node.args = (*operands[:which], found.x, *operands[which + 1 :], found.cosines, found.sines)
    return finish(program)


def _rotation(node: Node) -> _Rotation | None:
    """Read [batch, tokens, heads, width] as the result of a rotation."""
    total = _exchanged(node)
    if total is None or packet(total) is not aten.add or len(arguments(total)) != 2:
        return None
    for straight, crossed in (arguments(total), arguments(total)[::-1]):
        for x, cosines in _factors(straight):
            for joined, sines in _factors(crossed):
                raw = _exchanged(x)
                if raw is not None and _is_crossed(joined, x):
                    cosine, sine = _angle(cosines, raw), _angle(sines, raw)
                    if cosine is not None and sine is not None:
                        return _Rotation(raw, cosine, sine)
    return None


def _exchanged(node: object) -> Node | None:
    """Return the tensor that is transposed to [.., 2, 1, ..]; None without one."""
    if not isinstance(node, Node) or packet(node) is not aten.transpose:
        return None
    source: Node = arguments(node)[0]
    return source if {axis % 4 for axis in arguments(node)[1:]} == {1, 2} else None


def _factors(node: object) -> list[tuple[Any, Any]]:
    if not isinstance(node, Node) or packet(node) is not aten.mul or len(arguments(node)) != 2:
        return []
    return [arguments(node), arguments(node)[::-1]]


def _is_crossed(joined: object, x: Node) -> bool:
    """Whether this is cat(-x2, x1) over the width."""
    if not isinstance(joined, Node) or packet(joined) is not aten.cat or arguments(joined)[1:] not in ((-1,), (3,)):
        return False
    parts, width = arguments(joined)[0], x.meta["val"].shape[3]
    if len(parts) != 2 or packet(parts[0]) is not aten.neg or width % _WIDTHS:
        return False
    return _is_half(arguments(parts[0])[0], x, width, 1) and _is_half(parts[1], x, width, 0)


def _is_half(part: Node, x: Node, width: int, which: int) -> bool:
    if packet(part) is not aten.slice or arguments(part)[0] is not x or part.kwargs:
        return False
    axis, start, end, step = (arguments(part)[1:] + (0, 0, width, 1)[len(arguments(part)) - 1 :])[:4]
    half = which * width // 2, (which + 1) * width // 2
    return axis % 4 == 3 and step == 1 and (start or 0, min(end, width)) == half


def _angle(node: object, raw: Node) -> Node | None:
    """Return cosines or sines [batch, tokens, width] of those that stand beside [batch, heads, tokens, width]."""
    if not isinstance(node, Node) or packet(node) is not aten.unsqueeze or arguments(node)[1] not in (1, -3):
        return None
    angle: Node = arguments(node)[0]
    found, value = angle.meta["val"], raw.meta["val"]
    shape = (*value.shape[:2], value.shape[3])
    return angle if found.dtype == value.dtype and same_sizes(found.shape, shape) else None
