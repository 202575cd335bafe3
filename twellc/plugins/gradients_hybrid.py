"""Convert pairs to the hybrid format of the reference, and back, bit by bit.

The reference (SakanaAI/sparser-faster-llms, «Sparser, Faster, Lighter Transformer Language Models», arXiv 2603.23198)
keeps ELLPACK rows of a fixed width, and rows with more non-zeros densely beside them. docs/format.md compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twellc.plugins.gradients_call import Kept

WIDTH = 128


@dataclass(frozen=True)
class Hybrid:
    """The pairs of a block in the hybrid format. Places that hold no pair are 0.

    Attributes:
        columns: int32 [tokens, width]: the neurons of each token in ascending order.
        g: [tokens, width], in the element type: their activated gates.
        u: Likewise, in a gated block: their up values.
        counts: int32 [tokens]: how many pairs a token has, also if more than `width`.
        tail_of_row: int32 [tokens]: the row of the tail for a token with more, else -1.
        row_of_tail: int32 [tail]: the token of each row of the tail.
        tail_g: [tail, d_ff].
        tail_u: Likewise, in a gated block.
    """

    columns: Tensor
    g: Tensor
    u: Tensor | None
    counts: Tensor
    tail_of_row: Tensor
    row_of_tail: Tensor
    tail_g: Tensor
    tail_u: Tensor | None


def to_hybrid(kept: Kept, dtype: torch.dtype, d_ff: int, width: int = WIDTH) -> Hybrid:
    """Return the pairs that a forward has kept in the hybrid format.

    Args:
        kept: The kept tensors; hot neurons are not pairs, and are left out.
        dtype: The element type.
        d_ff: The number of neurons with pairs: those of the block that are not hot.
        width: Pairs of a token outside of the tail.

    Raises:
        ValueError: Nothing is kept as pairs, or some tokens had no room for their pairs.
    """
    if not kept.row_begin.numel():
        raise ValueError("twell: no pairs were kept: all neurons are hot, or this is a CPU")
    tokens = kept.row_begin.numel() - 2
    listed = int(kept.row_begin[-1])
    if listed != tokens:
        raise ValueError(f"twell: {tokens - listed} of {tokens} tokens have found no place for their pairs")
    begin, total = kept.row_begin[:-1], int(kept.row_begin[tokens])
    counts = begin.diff()
    row = torch.repeat_interleave(torch.arange(tokens, device=begin.device), counts)
    place = torch.arange(total, device=begin.device) - begin[row]
    words = kept.pairs[:total]
    column = words.bitwise_and(0xFFFF)
    g = words.bitwise_right_shift(16).to(torch.int16).view(dtype)
    u = kept.ups[:total].view(dtype) if kept.ups.numel() else None
    in_tail = counts > width
    tail_of_row = torch.where(in_tail, in_tail.cumsum(0) - 1, -1).int()
    row_of_tail = in_tail.nonzero()[:, 0].int()
    is_tail = in_tail[row]

    def fill(values: Tensor) -> tuple[Tensor, Tensor]:
        ell = values.new_zeros(tokens, width)
        ell[row[~is_tail], place[~is_tail]] = values[~is_tail]
        tail = values.new_zeros(len(row_of_tail), d_ff)
        tail[tail_of_row[row[is_tail]].long(), column[is_tail].long()] = values[is_tail]
        return ell, tail

    columns, _ = fill(column)
    ell_g, tail_g = fill(g)
    ell_u, tail_u = (None, None) if u is None else fill(u)
    return Hybrid(columns, ell_g, ell_u, counts.int(), tail_of_row, row_of_tail, tail_g, tail_u)


def from_hybrid(hybrid: Hybrid, capacity: int) -> Kept:
    """Return the pairs of the hybrid format as a forward keeps them, with room for `capacity` of them.

    Raises:
        ValueError: There are more.
    """
    device = hybrid.g.device
    tokens, width = hybrid.columns.shape
    counts = hybrid.counts.long()
    total = int(counts.sum())
    if total > capacity:
        raise ValueError(f"twell: there are {total} pairs, more than {capacity}")
    begin = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    pairs = torch.zeros(capacity, dtype=torch.int32, device=device)
    ups = torch.zeros(capacity if hybrid.u is not None else 0, dtype=torch.int16, device=device)

    def store(place: Tensor, column: Tensor, g: Tensor, u: Tensor | None) -> None:
        pairs[place] = column.int() | g.view(torch.int16).int() << 16
        if u is not None:
            ups[place] = u.view(torch.int16)

    row, slot = (
        ((torch.arange(width, device=device) < counts[:, None]) & (counts <= width)[:, None]).nonzero().unbind(1)
    )
    u = None if hybrid.u is None else hybrid.u[row, slot]
    store(begin[row] + slot, hybrid.columns[row, slot], hybrid.g[row, slot], u)
    # Values other than +0 are pairs. Bits are compared, so that NaN is a pair, too; activations never give -0.
    is_pair = hybrid.tail_g.view(torch.int16) != 0
    row, column = is_pair.nonzero().unbind(1)
    slot = (is_pair.cumsum(1) - 1)[row, column]
    u = None if hybrid.tail_u is None else hybrid.tail_u[row, column]
    store(begin[hybrid.row_of_tail[row].long()] + slot, column, hybrid.tail_g[row, column], u)
    row_begin = torch.cat([begin, begin.new_full((1,), tokens)])
    return Kept(row_begin, pairs, ups, torch.empty(tokens, 0, dtype=torch.int16, device=device))
