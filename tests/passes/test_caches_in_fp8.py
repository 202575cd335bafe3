"""Key-value caches in FP8: the pass gives both ops scales, and refuses other readers."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.models import export, functionalize
from tests.tolerance import assert_same
from twellc import UserError
from twellc.passes.caches_in_fp8 import caches_in_fp8
from twellc.passes.graph.execution import Runner
from twellc.passes.graph.program import user_inputs
from twellc.passes.rotate_in_caches import rotate_in_caches
from twellc.plugins.cache_op import APPEND, CACHED_ATTENTION

NAMES = ("q", "k", "v", "keys", "values", "cosines", "sines", "starts", "counts")
SCALES = (0.02, 0.3)
BY_CACHE = dict(zip(("keys", "values"), SCALES, strict=True))
E4M3 = torch.float8_e4m3fn


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x[..., :8], x[..., 8:]
    return x * cosines + torch.cat([-second, first], -1) * sines


class _Attention(nn.Module):
    def __init__(self, reads_more: bool) -> None:
        super().__init__()
        self.reads_more = reads_more

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor,
        starts: Tensor, counts: Tensor,
    ) -> list[Tensor]:  # fmt: skip
        q, k = (rotated(x.transpose(1, 2), cosines[:, None], sines[:, None]).transpose(1, 2) for x in (q, k))
        keys, values = APPEND(keys, values, k, v, starts, counts)
        y = CACHED_ATTENTION(q, torch.tanh(keys) if self.reads_more else keys, values, counts, starts + counts, 0.3)
        return [y, keys, values]


def inputs() -> list[Tensor]:
    shapes = (3, 4, 4, 16), *[(3, 4, 2, 16)] * 2, *[(3, 2, 9, 16)] * 2, *[(3, 4, 16)] * 2
    counts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([5, 0, 3], [4, 2, 1]))
    return [*(torch.randn(shape).to(torch.bfloat16) for shape in shapes), *counts]


def traced(given: list[Tensor], reads_more: bool = False) -> ExportedProgram:
    batch, tokens = Dim("batch", min=1, max=64), Dim("tokens", min=1, max=9)
    row, cache = {0: batch, 1: tokens}, {0: batch}
    dynamic = row, row, row, cache, cache, row, row, cache, cache
    return functionalize(export(_Attention(reads_more), *given, dynamic=dynamic, deferred=True))


def test_both_ops_get_the_scales() -> None:
    """So they do where they rotate by themselves; nothing else of the program changes its type."""
    given = inputs()
    given[3:5] = [(each.float() / scale).to(E4M3) for each, scale in zip(given[3:5], SCALES, strict=True)]
    program = traced([each.bfloat16() if each.dtype == E4M3 else each for each in given])
    rewritten = rotate_in_caches(caches_in_fp8(program, BY_CACHE))
    assert [node.name for node in user_inputs(rewritten) if node.meta["val"].dtype == E4M3] == ["keys", "values"]
    found = Runner(rewritten)(dict(zip(NAMES, given, strict=True)))
    q, k, v, keys, values, *angles, starts, counts = given
    held = APPEND(keys, values, k, v, starts, counts, *angles, *SCALES)
    y = CACHED_ATTENTION(q, *held, counts, starts + counts, 0.3, *angles, *SCALES)
    for ours, expected in zip(found, (y, *held), strict=True):
        assert ours.dtype == expected.dtype
        assert_same(ours.float(), expected.float())


def test_another_reader_is_refused() -> None:
    with pytest.raises(UserError, match=r"is read only by attention over the places .*; got a reason"):
        caches_in_fp8(traced(inputs(), reads_more=True), BY_CACHE, "a reason")
