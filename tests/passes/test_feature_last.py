"""Blocks whose neurons are not the last dimension."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.models import Written, assert_rewrites, calls, canonical, eager, run
from tests.tolerance import assert_same
from twellc.passes.match.find_ffn import find_ffn_blocks

CHANNELS, HIDDEN = 16, 40


def channels(form: Callable[[Any, Tensor], Any], conv: type[nn.Module] = nn.Conv1d) -> nn.Module:
    """Weights of convolutions with a kernel of size 1, and the same as matrices."""
    sizes = {"gate": (HIDDEN, CHANNELS), "up": (HIDDEN, CHANNELS), "down": (CHANNELS, HIDDEN)}
    matrices = {f"w_{name}": torch.randn(shape) / shape[1] ** 0.5 for name, shape in sizes.items()}
    return Written(form, **{name: conv(d_in, d_out, 1) for name, (d_out, d_in) in sizes.items()}, **matrices)


def einsum_inside(m: Any, x: Tensor) -> Tensor:
    """Tokens are the last dimension of the hidden tensor, but not of x and y."""
    hidden = torch.relu(torch.einsum("btd,fd->bft", x, m.w_gate)) * torch.einsum("btd,fd->bft", x, m.w_up)
    return torch.einsum("bft,df->btd", hidden, m.w_down)


FORMS: dict[str, tuple[str, tuple[int, ...], Callable[[Any, Tensor], Tensor]]] = {
    "gated": ("gated", (2, CHANNELS, 5), lambda m, x: m.down(torch.relu(m.gate(x)) * m.up(x))),
    "plain": ("plain", (2, CHANNELS, 5), lambda m, x: m.down(torch.relu(m.up(x)))),
    "squared": ("plain", (2, CHANNELS, 5), lambda m, x: m.down(torch.relu(m.up(x)).square())),
    "a residual": ("plain", (2, CHANNELS, 5), lambda m, x: x + m.down(F.dropout(torch.relu(m.up(x)), training=False))),
    "transposed around": (
        "plain",
        (2, 5, CHANNELS),
        lambda m, x: m.down(torch.relu(m.up(x.transpose(1, 2)))).transpose(1, 2),
    ),
    "no batch": ("plain", (CHANNELS, 5), lambda m, x: m.down(torch.relu(m.up(x)))),
    "same padding": (
        "plain",
        (2, CHANNELS, 5),
        lambda m, x: F.conv1d(torch.relu(F.conv1d(x, m.w_up[:, :, None], padding="same")), m.w_down[:, :, None]),
    ),
    "matmul": ("gated", (2, CHANNELS, 5), lambda m, x: m.w_down @ (torch.relu(m.w_gate @ x) * (m.w_up @ x))),
    "mm": ("plain", (CHANNELS, 5), lambda m, x: m.w_down.mm(torch.relu(m.w_up.mm(x)))),
    "einsum": (
        "plain",
        (2, 5, CHANNELS),
        lambda m, x: torch.einsum("fbt,df->dbt", torch.relu(torch.einsum("btd,fd->fbt", x, m.w_up)), m.w_down),
    ),
    "einsum, y as x": ("gated", (2, 5, CHANNELS), einsum_inside),
    "tensordot": (
        "plain",
        (CHANNELS, 5),
        lambda m, x: torch.tensordot(m.w_down, torch.relu(torch.tensordot(m.w_up, x, 1)), 1),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    variant, shape, function = FORMS[form]
    _, (block,), result = assert_rewrites(channels(function), torch.randn(shape))
    assert (block.variant, block.d_model, block.d_ff) == (variant, CHANNELS, HIDDEN)
    left = calls(result)
    assert left.pop("gated_mlp" if variant == "gated" else "mlp") == 1
    assert set(left) <= {"permute", "transpose", "add"}


def test_images() -> None:
    assert_rewrites(channels(lambda m, x: m.down(torch.relu(m.up(x))), nn.Conv2d), torch.randn(2, CHANNELS, 3, 4))


def test_dynamic_dimensions() -> None:
    module = channels(lambda m, x: m.down(torch.relu(m.gate(x)) * m.up(x)))
    dynamic = (({0: torch.export.Dim("batch"), 2: torch.export.Dim("length")},),)
    assert_rewrites(module, torch.randn(2, CHANNELS, 5), dynamic=dynamic, at=(torch.randn(3, CHANNELS, 7),))


def test_a_view_of_the_result() -> None:
    """What was contiguous is permuted now."""
    module, x = channels(lambda m, x: m.down(torch.relu(m.up(x))).view(2, -1)), torch.randn(2, CHANNELS, 5)
    assert_same(run(assert_rewrites(module, x).before)[0], eager(module, x)[0])


def test_weights_that_differ_between_batches_stay() -> None:
    module = Written(lambda m, x: m.down @ torch.relu(m.up @ x), up=torch.randn(6, 1, CHANNELS), down=torch.randn(8, 1))
    x = torch.randn(6, CHANNELS, 5)
    program = canonical(module, x)
    (block,) = find_ffn_blocks(program)
    assert block.refusal == "no form that twellc rewrites: matmul, relu, matmul"
    assert_same(run(program)[0], eager(module, x)[0])


def test_what_is_read_elsewhere_stays_right() -> None:
    """The hidden tensor has another reader: no block, and both results as before."""
    module, x = channels(lambda m, x: m.down(h := torch.relu(m.up(x))).sum(1) + h.mean(1)), torch.randn(2, CHANNELS, 5)
    program = canonical(module, x)
    assert ["is also read by" in block.refusal for block in find_ffn_blocks(program)] == [True]
    assert_same(run(program)[0], eager(module, x)[0])


def test_other_convolutions_stay() -> None:
    """A convolution of size 1 that feeds no other is none of our business."""
    module = nn.Sequential(
        nn.Conv1d(CHANNELS, HIDDEN, 1), nn.ReLU(), nn.Conv1d(HIDDEN, CHANNELS, 3), nn.Conv1d(16, 8, 1)
    )
    assert calls(canonical(module, torch.randn(2, CHANNELS, 5))) == {"conv1d": 3, "relu": 1}


def test_an_output_of_the_model_keeps_its_name() -> None:
    assert_rewrites(channels(lambda m, x: (m.down(torch.relu(m.up(x))), x + 1)), torch.randn(2, CHANNELS, 5))
