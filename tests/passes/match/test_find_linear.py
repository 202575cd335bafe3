"""Which linear layers are found outside of feed-forward blocks, and what belongs to them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from tests.models import Written, canonical
from twellc.passes.match.find_linear import FoundLinear, find_linear

D = 16


def found_in(function: Callable[[Any, Tensor], Any], **members: nn.Module | Tensor) -> list[FoundLinear]:
    """Return what is found in a function of weights q, k, v [16 or 8, 16], a norm's weight w [16], and x [2, 3, 16]."""
    weights: dict[str, nn.Module | Tensor] = {"q": torch.randn(16, D), "k": torch.randn(8, D), "v": torch.randn(8, D)}
    module = Written(function, **{**weights, "w": torch.randn(D), **members}).bfloat16()
    return find_linear(canonical(module, torch.randn(2, 3, D).bfloat16()))


def shown(layers: list[FoundLinear]) -> list[tuple[str, list[int], str, bool]]:
    """Return the weights, widths, norm and residual of each."""
    return [
        (
            " ".join(each.weight.name for each in layer.linears),
            layer.widths,
            "" if layer.norm is None else layer.norm.kind,
            layer.residual is not None,
        )
        for layer in layers
    ]


def norm(m: Any, x: Tensor) -> Tensor:
    return rms_norm(x, (D,), m.w, 1e-5)


def qkv(m: Any, x: Tensor) -> list[Tensor]:
    return [linear(x, weight) for weight in (m.q, m.k, m.v)]


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], list[tuple[str, list[int], str, bool]]]] = {
    "three of one norm": (lambda m, x: qkv(m, norm(m, x)), [("q k v", [16, 8, 8], "rms", False)]),
    "of x itself": (lambda m, x: qkv(m, x), [("q k v", [16, 8, 8], "", False)]),
    "the norm is an output, too": (lambda m, x: [y := norm(m, x), *qkv(m, y)], [("q k v", [16, 8, 8], "", False)]),
    "the norm has another reader": (
        lambda m, x: [torch.tanh(y := norm(m, x)), *qkv(m, y)],
        [("q k v", [16, 8, 8], "", False)],
    ),
    "each with a norm of its own": (
        lambda m, x: [linear(norm(m, x), m.q), linear(norm(m, x + 1), m.k)],
        [("q", [16], "rms", False), ("k", [8], "rms", False)],
    ),
    "a residual": (lambda m, x: x + linear(torch.tanh(x), m.q), [("q", [16], "", True)]),
    "a norm and a residual": (lambda m, x: linear(norm(m, x), m.q) + x, [("q", [16], "rms", True)]),
    "two that are added": (
        lambda m, x: linear(x, m.q) + linear(torch.tanh(x), m.q),
        [("q", [16], "", False), ("q", [16], "", True)],
    ),
    "parts of one": (
        lambda m, x: [torch.tanh(part) for part in linear(x, m.q).split([8, 8], -1)],
        [("q", [8, 8], "", False)],
    ),
    "parts, and the whole": (lambda m, x: [(y := linear(x, m.q))[..., :8], y], [("q", [16], "", False)]),
    "parts of odd widths": (
        lambda m, x: [torch.tanh(part) for part in linear(x, m.q).split([4, 12], -1)],
        [("q", [16], "", False)],
    ),
    "one of an odd width": (
        lambda m, x: [y := norm(m, x), *(linear(y, weight) for weight in (m.q, m.k[:4], m.v))][1:],
        [("q v", [16, 8], "rms", False), ("k_folded", [4], "rms", False)],
    ),
    "a part that is taken twice": (
        lambda m, x: [torch.tanh((y := linear(x, m.q))[..., :8]), torch.sin(y[..., :8] + 1), y[..., 8:]],
        [("q", [16], "", False)],
    ),
    "a bias that is added": (lambda m, x: norm(m, x) @ m.q + m.w, [("q", [16], "rms", False)]),
    "some parts": (lambda m, x: linear(x, m.q)[..., :8], [("q", [16], "", False)]),
    "parts that overlap": (lambda m, x: [(y := linear(x, m.q))[..., :8], y[..., 4:]], [("q", [16], "", False)]),
    "rows behind the norm": (lambda m, x: linear(norm(m, x)[:, -1:], m.q), [("q", [16], "rms", False)]),
    "rows by index": (
        lambda m, x: linear(norm(m, x)[torch.arange(2), torch.tensor([2, 0])], m.q),
        [("q", [16], "rms", False)],
    ),
    "rows by gather": (
        lambda m, x: linear(norm(m, x).gather(1, torch.tensor([[[2]], [[0]]]).expand(-1, 1, D)), m.q),
        [("q", [16], "rms", False)],
    ),
    "elements by gather": (
        lambda m, x: linear(norm(m, x).gather(1, torch.tensor([0, 1, 2, 0] * 4).expand(2, 1, D)), m.q),
        [("q", [16], "", False)],
    ),
    "features behind the norm": (
        lambda m, x: linear(rms_norm(torch.cat([x, x], -1), (2 * D,))[..., :D], m.q), [("q", [16], "", False)],
    ),
    "more than a node has outputs": (
        lambda m, x: [*qkv(m, x), *(linear(x, m.k + i) for i in (1, 2))],
        [("q k v k_folded", [16, 8, 8, 8], "", False), ("k_folded_2", [8], "", False)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str) -> None:
    function, expected = CASES[name]
    assert shown(found_in(function)) == expected
