"""Rotations that the ops over a key-value cache compute by themselves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from tests.models import export, functionalize
from tests.tolerance import assert_as_accurate
from twellc.passes.graph.execution import Runner
from twellc.passes.rotate_in_caches import rotate_in_caches
from twellc.plugins.cache_op import APPEND, CACHED_ATTENTION

LENGTH, HEADS, KV_HEADS = 9, 4, 2
NAMES = ("q", "k", "v", "keys", "values", "cosines", "sines", "starts", "counts")


def half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([-second, first], -1)


def forwards(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return x * cosines + half(x) * sines


def swapped(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return sines * half(x) + cosines * x


def backwards(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return x * cosines + -half(x) * sines


def in_float32(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    return forwards(x.float(), cosines.float(), sines.float()).to(x.dtype)


def of_a_part(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    part = x.shape[-1] // 2
    return torch.cat([forwards(x[..., :part], cosines[..., :part], sines[..., :part]), x[..., part:]], -1)


def of_other_halves(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x[..., :8], x[..., 8:]
    return x * cosines + torch.cat([first, -second], -1) * sines


class _Attention(nn.Module):
    def __init__(self, rotate: Any, read: Any = lambda keys: keys) -> None:
        super().__init__()
        self.rotate, self.read = rotate, read

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor,
        starts: Tensor, counts: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        q, k = (self.rotate(x.transpose(1, 2), cosines[:, None], sines[:, None]).transpose(1, 2) for x in (q, k))
        keys, values = APPEND(keys, values, k, v, starts, counts)
        y = CACHED_ATTENTION(q, self.read(keys), values, counts, starts + counts, 0.3)
        return [y, keys, values]


def inputs(width: int = 16) -> list[Tensor]:
    rows = [(3, 4, heads, width) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes = *rows, *[(3, KV_HEADS, LENGTH, width)] * 2, *[(3, 4, width)] * 2
    counts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([5, 0, 3], [4, 2, 1]))
    return [*(torch.randn(shape).to(torch.bfloat16) for shape in shapes), *counts]


def traced(rotate: Any, given: list[Tensor], *read: Any) -> ExportedProgram:
    batch, tokens = Dim("batch", min=1, max=64), Dim("tokens", min=1, max=LENGTH)
    row, cache = {0: batch, 1: tokens}, {0: batch}
    dynamic = row, row, row, cache, cache, row, row, cache, cache
    return functionalize(export(_Attention(rotate, *read), *given, dynamic=dynamic, deferred=True))


def rotations(program: ExportedProgram) -> dict[str, list[Node]]:
    """Return the cosines and sines of both ops, where they have some."""
    ops = {"append": (APPEND, 6), "attention": (CACHED_ATTENTION, 6)}
    return {
        name: list(node.args[first:])
        for name, (op, first) in ops.items()
        for node in program.graph.find_nodes(op="call_function", target=op)
    }


@pytest.mark.parametrize("rotate", [forwards, swapped])
def test_rotations_go_into_the_ops(rotate: Any) -> None:
    given = inputs()
    program = traced(rotate, given)
    rewritten = rotate_in_caches(program)
    for angles in rotations(rewritten).values():
        assert [angle.name for angle in angles] == ["cosines", "sines"]
    assert not any("cat" in node.name or "neg" in node.name for node in rewritten.graph.nodes)
    wide = [each.double() if each.is_floating_point() else each for each in given]
    truth = _Attention(rotate)(*wide)
    named = dict(zip(NAMES, given, strict=True))
    for ours, plain, right in zip(Runner(rewritten)(named), Runner(program)(named), truth, strict=True):
        assert_as_accurate(ours, plain, right)


@pytest.mark.parametrize(
    ("rotate", "width"),
    [(backwards, 16), (in_float32, 16), (of_a_part, 16), (of_other_halves, 16), (forwards, 24)],
)
def test_others_stay(rotate: Any, width: int) -> None:
    rewritten = rotate_in_caches(traced(rotate, inputs(width)))
    assert rotations(rewritten) == {"append": [], "attention": []}
