from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.models import Written, export, functionalize
from twellc.passes.match.causal_mask import positions_kept

Mask = Callable[[Tensor, Tensor], Tensor]
LOW = torch.finfo(torch.float32).min


def _read(mask: Mask) -> str | None:
    """Read the mask of an attention, which is made of the sizes of its operands."""
    tokens = torch.export.Dim("tokens", min=2, max=64)
    q = torch.randn(2, 3, 8, 16)
    attend = Written(lambda _, q, k: nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask(q, k)))
    program = export(attend, q, q, dynamic=(({2: tokens}, {2: tokens}),))
    attention = torch.ops.aten.scaled_dot_product_attention.default
    (node,) = functionalize(program).graph.find_nodes(op="call_function", target=attention)
    return positions_kept(node.args[3])


def _rows(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2])[:, None]


def _columns(k: Tensor) -> Tensor:
    return torch.arange(k.shape[2])[None, :]


def _whole(q: Tensor, k: Tensor, value: float | bool) -> Tensor:
    return torch.full((q.shape[2], k.shape[2]), value)


def _unpacked(q: Tensor, k: Tensor) -> Tensor:
    """Causal as transformers writes it: with a search for packed sequences in positions that are never packed."""
    positions = torch.arange(q.shape[2])[None].expand(q.shape[0], -1)
    sequence = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(q.shape[0])[:, None, None, None]
    rows, columns = torch.arange(q.shape[2])[None, None, :, None], torch.arange(k.shape[2])[None, None, None, :]
    causal = positions[batch, columns] <= positions[batch, rows]
    return torch.ones((), dtype=torch.bool) & causal & (sequence[batch, rows] == sequence[batch, columns])


CAUSAL: dict[str, Mask] = {
    "<=": lambda q, k: _columns(k) <= _rows(q),
    ">=": lambda q, k: _rows(q) >= _columns(k),
    "< one more": lambda q, k: _columns(k) < _rows(q) + 1,
    "not >": lambda q, k: ~(_columns(k) > _rows(q)),
    "shifted alike": lambda q, k: _columns(k) + 5 <= _rows(q) + 5,
    "twice": lambda q, k: (_columns(k) <= _rows(q)) & (_columns(k) < _rows(q) + 1),
    "four dimensions": lambda q, k: (_columns(k) <= _rows(q))[None, None].expand(q.shape[0], 1, -1, -1),
    "tril": lambda q, k: _whole(q, k, True).tril(),
    "not triu": lambda q, k: ~_whole(q, k, True).triu(1),
    "triu of -inf": lambda q, k: _whole(q, k, float("-inf")).triu(1),
    "where": lambda q, k: torch.where(_columns(k) <= _rows(q), 0.0, float("-inf")),
    "where not": lambda q, k: torch.where(_columns(k) > _rows(q), LOW, 0.0),
    "masked_fill": lambda q, k: _whole(q, k, 0.0).masked_fill(_columns(k) > _rows(q), LOW),
    "unpacked": _unpacked,
}
OTHER: dict[str, Mask] = {
    "strictly": lambda q, k: _columns(k) < _rows(q),
    "one more": lambda q, k: _columns(k) <= _rows(q) + 1,
    "backwards": lambda q, k: _columns(k) >= _rows(q),
    "window": lambda q, k: (_columns(k) <= _rows(q)) & (_columns(k) > _rows(q) - 5),
    "every second": lambda q, k: 2 * _columns(k) <= _rows(q),
    "triu(2)": lambda q, k: _whole(q, k, float("-inf")).triu(2),
    "tril(1)": lambda q, k: _whole(q, k, True).tril(1),
    "not so low": lambda q, k: torch.where(_columns(k) <= _rows(q), 0.0, -10000.0),
    "slope": lambda q, k: (_columns(k) - _rows(q)).float(),
    "of data": lambda q, k: (_columns(k) <= _rows(q)) & (k[:, :1, :, 0] > 0)[:, :, None],
    "nothing": lambda q, k: _whole(q, k, False),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks_are_recognised(name: str) -> None:
    assert _read(CAUSAL[name]) == "causal"


@pytest.mark.parametrize("name", OTHER)
def test_other_masks_are_not(name: str) -> None:
    assert _read(OTHER[name]) is None


@pytest.mark.parametrize(
    "mask",
    [lambda q, k: _whole(q, k, True), lambda q, k: _columns(k) >= 0, lambda q, k: _whole(q, k, True)[None]],
)
def test_a_mask_that_keeps_all(mask: Mask) -> None:
    assert _read(mask) == "all"


@pytest.mark.parametrize("masks", [CAUSAL, OTHER])
def test_the_examples_are_what_they_are_called(masks: dict[str, Mask]) -> None:
    q = torch.randn(2, 3, 9, 16)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    for name, mask in masks.items():
        made = mask(q, q)
        kept = made if made.dtype == torch.bool else made == 0
        hides = made.dtype == torch.bool or bool(made.min() <= LOW)
        assert (masks is CAUSAL) == (bool((kept == causal).all()) and hides), name
