"""Weights that the graph computes from constants alone."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models import (
    Gated,
    Plain,
    Written,
    assert_rewrites,
    blocks_of,
    calls,
    canonical,
    canonicalize,
    eager,
    export,
    of,
    run,
)
from twellc.base.errors import UserError
from twellc.passes.graph.program import constants_of


def weight_norm() -> nn.Module:
    block = Gated()
    for name in ("gate", "up", "down"):
        parametrizations.weight_norm(getattr(block, name))
    return block


def made_of_another() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        up = self.weight * 2
        return torch.relu(F.linear(x, up)) @ (up + 1)

    return Written(forward, weight=torch.randn(40, 16) / 9)


def stored_as_integers() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        up, down = (w.to(torch.float32) * s for w, s in ((self.up_q, self.up_s), (self.down_q, self.down_s)))
        return F.linear(torch.relu(F.linear(x, up)), down)

    shapes = {"up_q": (40, 16), "down_q": (16, 40)}
    stored = {name: torch.randint(-8, 8, shape, dtype=torch.int8) for name, shape in shapes.items()}
    return Written(forward, stored, up_s=torch.rand(40, 1) / 30, down_s=torch.rand(16, 1) / 50)


class Groups(nn.Linear):
    """A linear layer whose weights are stored as 4 bits, two in a byte, with a scale for each group of 8."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out)
        grouped = self.weight.detach().view(d_out, -1, 8)
        scale = grouped.abs().amax(-1, keepdim=True) / 7
        levels = ((grouped / scale).round() + 8).to(torch.uint8).view(d_out, d_in)
        self.register_buffer("packed", levels[:, ::2] | (levels[:, 1::2] << 4))
        self.register_buffer("scale", scale)
        del self.weight

    def forward(self, x: Tensor) -> Tensor:
        low, high = (self.packed & 15).to(torch.int8) - 8, (self.packed >> 4).to(torch.int8) - 8
        levels = torch.stack([low, high], -1).view(len(self.packed), -1, 8)
        return F.linear(x, (levels.to(x.dtype) * self.scale.to(x.dtype)).view(len(self.packed), -1), self.bias)


def groups_of_4_bits() -> nn.Module:
    return nn.Sequential(Groups(16, 40), nn.ReLU(), Groups(40, 16))


CASES: dict[str, Callable[[], nn.Module]] = {
    "a scale": lambda: of(lambda f, x: f.down(torch.relu(F.linear(x, f.up.weight * 0.5))), Plain()),
    "a scale and a transposition": lambda: of(
        lambda f, x: torch.relu(x @ (f.up.weight / 3).t()) @ (f.down.weight * 2).t(), Plain()
    ),
    "a sum of two": lambda: Written(
        lambda self, x: self.ffn.down(torch.relu(F.linear(x, self.ffn.up.weight + self.delta))),
        ffn=Plain(),
        delta=torch.randn(40, 16) / 9,
    ),
    "a product of two, one of them computed": lambda: Written(
        lambda self, x: self.ffn.down(torch.relu(F.linear(x, self.ffn.up.weight + self.b * 0.5 @ self.a))),
        ffn=Plain(),
        a=torch.randn(4, 16) / 4,
        b=torch.randn(40, 4) / 4,
    ),
    "one made of another": made_of_another,
    "weight normalisation": weight_norm,
    "integers": stored_as_integers,
    "groups of 4 bits": groups_of_4_bits,
    "a constant of three dimensions": lambda: Written(
        lambda self, x: F.linear(torch.relu(F.linear(x, self.up.view(40, 16))), self.down.flatten(1)),
        up=torch.randn(5, 8, 16) / 4,
        down=torch.randn(16, 5, 8) / 6,
    ),
    "chunks of a packed weight": lambda: Written(
        lambda self, x: self.ffn.down(torch.relu(F.linear(x, self.packed.chunk(2)[1]))),
        ffn=Plain(),
        packed=torch.randn(80, 16) / 4,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_computed_weights(case: str) -> None:
    module, x = CASES[case](), torch.randn(5, 16)
    program, _, result = assert_rewrites(module, x)
    assert sum(calls(result).values()) == 1, "nothing but the block is left"
    assert torch.equal(run(program)[0], eager(module, x)[0]), "folding changes no bit"


def test_parameters_make_parameters_and_buffers_make_buffers() -> None:
    buffers = {"scale": torch.rand(40, 1), "table": torch.randn(40, 8)}
    module = Written(
        lambda self, x: F.linear(x, self.up.weight * self.scale) @ (self.table / 3), buffers, up=nn.Linear(16, 40)
    )
    signature = canonical(module, torch.randn(5, 16)).graph_signature
    assert list(signature.parameters) == ["up.weight_folded"]
    assert list(signature.buffers) == ["table_folded"]


def test_what_depends_on_the_input_is_not_folded() -> None:
    assert blocks_of(of(lambda f, x: f.down(torch.relu(F.linear(x, f.up.weight * x.mean()))), Plain())) == []


def test_random_weights_are_not_folded() -> None:
    drawn = of(lambda f, x: f.down(torch.relu(F.linear(x, f.up.weight.sigmoid().bernoulli()))), Plain())
    (block,) = blocks_of(drawn)
    assert block.refusal == "no form that twellc rewrites: linear (its weight: bernoulli), relu, linear"


def test_a_plain_constant_stays_in_place() -> None:
    """Transposed, viewed or tied constants are not computed: nothing is copied."""
    module = Written(
        lambda self, x: torch.relu(x @ self.w.t()) @ self.w.view(40, 16), w=nn.Parameter(torch.randn(40, 16))
    )
    program = canonical(module, torch.randn(5, 16))
    assert list(constants_of(program).values()) == ["w"]


def test_fake_quantised_weights_are_named() -> None:
    """Torch cannot run them on shapes once the program comes from an archive."""

    class Fake(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero = self.weight.detach().abs().amax(1) / 127, torch.zeros(self.out_features, dtype=torch.int32)
            weight = torch.fake_quantize_per_channel_affine(self.weight, scale, zero, 0, -128, 127)
            return F.linear(x, weight, self.bias)

    archive = io.BytesIO()
    torch.export.save(export(nn.Sequential(Fake(16, 40), nn.ReLU(), Fake(40, 16)), torch.randn(5, 16)), archive)
    archive.seek(0)
    with pytest.raises(UserError) as raised:
        canonicalize(torch.export.load(archive))
    assert "its numbers are fake-quantised, as for training (fake_quantize_per_channel_affine" in str(raised.value)
    assert "Convert the model first" in str(raised.value)


def test_parameters_that_the_program_changes_are_not_constants() -> None:
    def rescaling(ffn: Any, x: Tensor) -> Any:
        with torch.no_grad():
            ffn.up.weight.mul_(0.5)
        return ffn(x)

    assert blocks_of(of(rescaling, Plain())) == []
