"""Attention over a key-value cache: its mask is none where a form goes by lengths, and comparisons elsewhere."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests.models import calls, export, functionalize
from tests.tolerance import assert_same
from twellc.passes.attention import AS_WRITTEN, CUDNN, MATMUL, OPERATOR, rewrite_attention
from twellc.passes.graph.execution import Runner
from twellc.plugins.cache_op import CACHE_MASK, CACHED_ATTENTION

LENGTH, HEADS, KV_HEADS, WIDTH = 9, 4, 2, 16
STARTS, COUNTS = [5, 0, 3], [4, 2, 0]


class _Two(nn.Module):
    """Two attention blocks over one pair of caches, by the same mask."""

    def __init__(self, softcap: bool) -> None:
        super().__init__()
        self.softcap = softcap

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        if not self.softcap:
            return nn.functional.scaled_dot_product_attention(q, keys, values, mask, scale=0.3, enable_gqa=True)
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (keys, values))
        scores = torch.tanh(q @ keys.transpose(2, 3) * 0.3)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        mask = CACHE_MASK(starts, counts, q.shape[1], LENGTH)
        y = self.attend(q.transpose(1, 2), keys, values, mask)
        y = self.attend(torch.sin(y), keys, values, mask)
        return y.transpose(1, 2)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    shapes = (3, 4, HEADS, WIDTH), *[(3, KV_HEADS, LENGTH, WIDTH)] * 2
    counts = (torch.tensor(numbers, dtype=torch.int32) for numbers in (STARTS, COUNTS))
    return [*(torch.randn(shape).to(dtype) for shape in shapes), *counts]


def traced(given: list[Tensor], softcap: bool = False) -> ExportedProgram:
    batch, tokens = Dim("batch", min=1, max=64), Dim("tokens", min=1, max=LENGTH)
    dynamic = {0: batch, 1: tokens}, {0: batch}, {0: batch}, {0: batch}, {0: batch}
    return functionalize(export(_Two(softcap), *given, dynamic=dynamic, deferred=True))


def run(program: ExportedProgram, given: list[Tensor]) -> list[Tensor]:
    names = ("q", "keys", "values", "starts", "counts")
    (y,) = Runner(program)(dict(zip(names, given, strict=True)))
    return [y[row, :count] for row, count in enumerate(COUNTS)]  # the rest has no meaning


@pytest.mark.parametrize(
    ("forms", "dtype", "form"),
    [
        ((CUDNN, MATMUL), torch.bfloat16, CUDNN), ((CUDNN, MATMUL), torch.float32, MATMUL),
        ((OPERATOR,), torch.float32, OPERATOR), ((MATMUL,), torch.float32, MATMUL),
    ],
)  # fmt: skip
def test_forms(forms: tuple[str, ...], dtype: torch.dtype, form: str) -> None:
    given = inputs(dtype)
    program = traced(given)
    rewritten, found = rewrite_attention(program, forms)
    assert [(block.form, block.mask, block.heads, block.kv_heads) for block in found] == [(form, "causal", 4, 2)] * 2
    assert calls(rewritten)["cache_mask"] == 0
    if dtype == torch.float32:
        for ours, expected in zip(run(rewritten, given), run(program, given), strict=True):
            assert_same(ours, expected)


def test_lengths_are_made_once() -> None:
    given = inputs(torch.bfloat16)
    rewritten, _ = rewrite_attention(traced(given), (CUDNN, MATMUL))
    counted: Any = calls(rewritten)
    assert counted["cached_attention"] == 2
    assert (counted["maximum"], counted["minimum"], counted["le"]) == (2, 1, 0)


def test_attention_that_stays_gets_comparisons() -> None:
    given = inputs(torch.float32)
    program = traced(given, softcap=True)
    rewritten, found = rewrite_attention(program, (CUDNN, MATMUL))
    assert [block.form for block in found] == [AS_WRITTEN] * 2
    assert (calls(rewritten)["cache_mask"], calls(rewritten)["le"]) == (0, 1)
    for ours, expected in zip(run(rewritten, given), run(program, given), strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize(("starts", "counts"), [([0], [4]), ([8], [1]), ([9], [0]), ([0], [0])])
def test_ends_of_a_cache(starts: list[int], counts: list[int]) -> None:
    """Counts that cuDNN is given lie within the cache, whatever the host says."""
    given = inputs(torch.bfloat16)
    rewritten, _ = rewrite_attention(traced(given), (CUDNN,))
    (node, *_) = rewritten.graph.find_nodes(op="call_function", target=CACHED_ATTENTION)
    seen: dict[str, Any] = {}

    def visit(name: str, value: Any) -> Any:
        seen[name] = value
        return value

    numbers = [torch.tensor(each, dtype=torch.int32) for each in (starts, counts)]
    one = [*(each[:1] for each in given[:3]), *numbers]
    Runner(rewritten)(dict(zip(("q", "keys", "values", "starts", "counts"), one, strict=True)), visit)
    queries, known = (seen[each.name].tolist() for each in node.args[3:5])
    assert queries == [max(counts[0], 1)]
    assert known == [min(max(starts[0] + counts[0], 1), LENGTH)]
