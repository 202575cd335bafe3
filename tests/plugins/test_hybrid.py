"""Pairs in the hybrid format of the reference, and back."""

import pytest
import torch
from torch import Tensor

from twellc.plugins.gradients_call import Kept
from twellc.plugins.gradients_hybrid import WIDTH, from_hybrid, to_hybrid

D_FF = 1000


def kept_of(g: Tensor, u: Tensor | None, capacity: int) -> Kept:
    """Return what a forward keeps of g and u [tokens, d_ff], as docs/format.md says it."""
    row, column = (g.view(torch.int16) != 0).nonzero().unbind(1)
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(row, minlength=len(g)).cumsum(0)])
    pairs = torch.zeros(capacity, dtype=torch.int32)
    pairs[: len(row)] = column.int() | g[row, column].view(torch.int16).int() << 16
    ups = torch.zeros(0 if u is None else capacity, dtype=torch.int16)
    if u is not None:
        ups[: len(row)] = u[row, column].view(torch.int16)
    row_begin = torch.cat([begin, torch.tensor([len(g)])])
    return Kept(row_begin, pairs, ups, torch.empty(len(g), 0, dtype=torch.int16))


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return g and u: tokens with no pair, few, exactly the width, more, and all, and odd values."""
    g = torch.zeros(6, D_FF)
    for token, count in enumerate((0, 7, WIDTH, WIDTH + 1, D_FF, 3)):
        g[token, torch.randperm(D_FF)[:count]] = torch.rand(count) + 0.1
    u = torch.randn(6, D_FF)
    g, u = g.to(dtype), u.to(dtype)
    g[5, :3] = torch.tensor([torch.nan, torch.inf, torch.finfo(dtype).smallest_normal])
    u[4, :4] = torch.tensor([0.0, -0.0, torch.nan, -torch.inf])
    return g, u


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
def test_there_and_back_changes_no_bit(dtype: torch.dtype, gated: bool) -> None:
    g, u = draw(dtype)
    kept = kept_of(g, u if gated else None, 3000)
    hybrid = to_hybrid(kept, dtype, D_FF)
    assert hybrid.counts.tolist() == (g != 0).sum(1).tolist()
    assert hybrid.row_of_tail.tolist() == [3, 4]
    assert hybrid.tail_of_row.tolist() == [-1, -1, -1, 0, 1, -1]
    assert torch.equal(hybrid.tail_g.view(torch.int16), g[3:5].view(torch.int16))
    row = hybrid.columns[1, :7].long()
    assert torch.equal(hybrid.g[1, :7], g[1, row]) and row.diff().min() > 0
    for found, expected in zip(from_hybrid(hybrid, 3000), kept, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("counts", [(0, 0), (WIDTH,), (WIDTH + 1,), (D_FF, D_FF), (0, D_FF, 0), ()], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_odd_rows(counts: tuple[int, ...], gated: bool) -> None:
    g = torch.zeros(len(counts), D_FF, dtype=torch.bfloat16)
    for token, count in enumerate(counts):
        g[token, D_FF - count :] = 1 + torch.arange(count) % 7
    capacity = sum(counts)
    for places in (capacity, capacity + 5):
        kept = kept_of(g, torch.randn(len(g), D_FF).bfloat16() if gated else None, places)
        hybrid = to_hybrid(kept, torch.bfloat16, D_FF)
        assert hybrid.counts.tolist() == list(counts)
        assert hybrid.row_of_tail.tolist() == [token for token, count in enumerate(counts) if count > WIDTH]
        for found, expected in zip(from_hybrid(hybrid, places), kept, strict=True):
            assert torch.equal(found, expected)


def test_the_largest_column() -> None:
    """16 bits, of which the first is not a sign."""
    g = torch.zeros(2, 65536, dtype=torch.float16)
    g[0, [0, 32767, 32768, 65535]] = torch.tensor([1.0, 2.0, 3.0, 4.0]).half()
    g[1, -WIDTH - 1 :] = 1
    kept = kept_of(g, -g, 200)
    hybrid = to_hybrid(kept, torch.float16, 65536)
    assert hybrid.columns[0, :4].tolist() == [0, 32767, 32768, 65535]
    for found, expected in zip(from_hybrid(hybrid, 200), kept, strict=True):
        assert torch.equal(found, expected)


def test_what_is_not_kept_is_refused() -> None:
    g, u = draw(torch.bfloat16)
    kept = kept_of(g, u, 3000)
    row_begin = kept.row_begin.clone()
    row_begin[-1] = 4
    with pytest.raises(ValueError, match="2 of 6 tokens have found no place"):
        to_hybrid(kept._replace(row_begin=row_begin), torch.bfloat16, D_FF)
    with pytest.raises(ValueError, match=r"pairs, more than 100"):
        from_hybrid(to_hybrid(kept, torch.bfloat16, D_FF), 100)
    with pytest.raises(ValueError, match="no pairs were kept"):
        to_hybrid(Kept(*(each[:0] for each in kept)), torch.bfloat16, D_FF)
