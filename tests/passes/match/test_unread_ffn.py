"""Blocks in forms that the matcher does not read: which are reported, and what only resembles one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests import models
from tests.models import D_FF, D_MODEL, Gated, Plain, Written, blocks_of, calls, canonical, canonicalize, rewrite
from twellc.passes.decide import decide
from twellc.passes.match.find_ffn import find_ffn_blocks


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape) / D_MODEL**0.5


def heads_first(t: Tensor) -> Tensor:
    return t.view(2, 3, 4, 10).transpose(2, 3).reshape(2, 3, D_FF)


def projections(**shapes: tuple[int, int]) -> dict[str, nn.Module]:
    return {name: nn.Linear(*shape) for name, shape in shapes.items()}


def gated_by_one_einsum(s: nn.Module, x: Tensor) -> Tensor:
    gate, up = torch.einsum("btd,cfd->cbtf", x, s.up).unbind()
    return torch.einsum("btf,df->btd", torch.relu(gate) * up, s.down)


def above_statistics(t: Tensor) -> Tensor:
    """As in Gemma 3n."""
    return F.gelu(torch.relu(t - (t.mean(-1, keepdim=True) + 1.6 * t.std(-1, keepdim=True))))


def stored(form: Any, **shapes: tuple[int, ...]) -> nn.Module:
    return Written(form, **{name: drawn(*shape) for name, shape in shapes.items()})


LEFT = {"up": (D_FF, D_MODEL), "down": (D_MODEL, D_FF), "bias": (D_FF,)}
UNREAD: dict[str, tuple[nn.Module, str]] = {
    "neurons of two dimensions": (
        stored(
            lambda s, x: torch.einsum("btcf,dcf->btd", torch.relu(torch.einsum("btd,cfd->btcf", x, s.up)), s.down),
            up=(4, 10, D_MODEL),
            down=(D_MODEL, 4, 10),
        ),
        "einsum, relu, einsum",
    ),
    "neurons of two dimensions, flattened": (
        Written(
            lambda s, x: s.down(torch.relu(torch.einsum("btd,cfd->btcf", x, s.up)).flatten(2)),
            up=drawn(4, 10, D_MODEL),
            **projections(down=(D_FF, D_MODEL)),
        ),
        "einsum, relu, view, linear",
    ),
    "gate and up by one einsum": (
        stored(gated_by_one_einsum, up=(2, D_FF, D_MODEL), down=(D_MODEL, D_FF)),
        "einsum, unbind, getitem, relu, mul, einsum",
    ),
    "the weight at the left, with a bias": (
        stored(lambda s, x: s.down @ torch.relu(s.up @ x.mT + s.bias[:, None]), **LEFT),
        "matmul, add, relu, matmul",
    ),
    "another weight for each batch": (
        stored(
            lambda s, x: torch.bmm(torch.relu(torch.bmm(x, s.up)), s.down),
            up=(2, D_MODEL, D_FF),
            down=(2, D_FF, D_MODEL),
        ),
        "bmm, relu, bmm",
    ),
    "weights that are cast": (
        stored(lambda s, x: F.linear(torch.relu(F.linear(x, s.up.float())), s.down.float()), **LEFT).bfloat16(),
        "linear (its weight: _to_copy), relu, linear (its weight: _to_copy)",
    ),
    "the neurons are moved": (
        Plain(between=heads_first),
        "linear, relu, view, transpose, clone, _unsafe_view, linear",
    ),
    "the neurons of a gated block are moved": (
        Gated(between=lambda t: t.flip(-1)),
        "linear, relu, mul, flip, linear",
    ),
    "rows are mixed": (Plain(between=lambda t: t.flip(1)), "linear, relu, flip, linear"),
    "rows are chosen": (
        Written(lambda s, x: s.ffn.down(torch.relu(s.ffn.up(x))[:, 0]), ffn=Plain()),
        "linear, relu, select, linear",
    ),
    "a bounded ReLU is scaled": (Plain(lambda t: F.relu6(t) / 6), "linear, relu6, div, linear"),
    "a ReLU is cubed": (Gated(lambda t: torch.relu(t) ** 3), "linear, relu, pow, mul, linear"),
    "a norm before the activation": (
        Plain(lambda t: torch.relu(F.layer_norm(t, (D_FF,)))),
        "linear, layer_norm, relu, linear",
    ),
    "a norm behind the activation": (Plain(between=lambda t: F.rms_norm(t, (D_FF,))), "linear, relu, rms_norm, linear"),
    "dropout in training": (
        Gated(between=lambda t: F.dropout(t, 0.5, training=True)),
        "linear, relu, mul, native_dropout, getitem, linear",
    ),
    "a batch norm over the tokens behind the activation": (
        Plain(between=lambda t: F.batch_norm(t, torch.zeros(3), torch.ones(3))),
        "linear, relu, _native_batch_norm_legit_no_training, getitem, linear",
    ),
    "the rest of a row decides": (Gated(above_statistics), "linear, sub, relu, gelu, mul, linear"),
    "convolutions with a mask": (
        Written(
            lambda s, x: s.down(torch.relu(s.up(x.mT * s.mask)) * s.mask).mT,
            up=nn.Conv1d(D_MODEL, D_FF, 1),
            down=nn.Conv1d(D_FF, D_MODEL, 1),
            mask=torch.ones(3),
        ),
        "conv1d, relu, mul, conv1d",
    ),
}


@pytest.mark.parametrize("case", UNREAD)
def test_unread(case: str) -> None:
    module, operations = UNREAD[case]
    program = canonical(module)
    (block,) = find_ffn_blocks(program)
    gated = isinstance(module, Gated) or "gate and up" in case
    assert block.variant == ("gated" if gated else "plain")
    assert block.activation == ("relu6" if "relu6" in operations else "relu")
    assert (block.d_model, block.d_ff, block.d_out) == (D_MODEL, D_FF, D_MODEL)
    assert block.refusal == f"no form that twellc rewrites: {operations}"
    (layer,) = decide([block], "all")
    assert (layer.matched, layer.decision, layer.reason) == (False, "dense", block.refusal)
    assert "mlp" not in "".join(calls(rewrite(program)))


def test_experts() -> None:
    """As in Hugging Face's mixtures: each multiplies some of the rows, which torch can in bfloat16 alone."""

    def form(self: nn.Module, x: Tensor) -> Tensor:
        ends = torch.arange(2, 7, 2, dtype=torch.int32)
        gate, up = torch._grouped_mm(x, self.gate_up, offs=ends).chunk(2, -1)
        return torch._grouped_mm(torch.relu(gate) * up, self.down, offs=ends)

    module = Written(form, gate_up=drawn(3, D_MODEL, 2 * D_FF), down=drawn(3, D_FF, D_MODEL)).bfloat16()
    (block,) = blocks_of(module, torch.randn(6, D_MODEL).bfloat16())
    assert (block.variant, block.d_model, block.d_ff, block.d_out) == ("gated", D_MODEL, D_FF, D_MODEL)
    assert block.refusal.endswith("_grouped_mm, split, getitem, relu, mul, _grouped_mm")


def test_names_and_order() -> None:
    module = nn.Sequential(Plain(), Plain(between=lambda t: t.flip(-1)), Gated(), Gated(between=lambda t: t.flip(-1)))
    assert [(block.module, bool(block.refusal)) for block in blocks_of(module)] == [
        ("0", False), ("1", True), ("2", False), ("3", True),
    ]  # fmt: skip


def test_a_block_is_reported_once() -> None:
    """Its ReLU feeds a product in a form that is read, or several that are not."""

    def read(self: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.relu(self.ffn.up(x))
        return self.ffn.down(hidden) + self.ffn.down(hidden.flip(-1))

    def unread(self: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.relu(self.ffn.up(x)).flip(-1)
        return self.ffn.down(hidden) + F.linear(hidden, self.ffn.down.weight)

    for form, reason in ((read, "is also read by"), (unread, "no form that twellc rewrites")):
        (block,) = blocks_of(Written(form, ffn=Plain()))
        assert reason in block.refusal


def test_dynamic_dimensions() -> None:
    """Widths are known whichever dimensions are dynamic, and stay what they are."""
    module = stored(lambda s, x: (s.down @ torch.relu(s.up @ x.mT + s.bias[:, None])).mT, **LEFT)
    dynamic = (({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")},),)
    program = canonical(module, torch.randn(2, 3, D_MODEL), dynamic=dynamic)
    (block,) = find_ffn_blocks(program)
    assert (block.d_model, block.d_ff, block.d_out) == (D_MODEL, D_FF, D_MODEL)
    sizes = next(iter(program.graph.find_nodes(op="output"))).args[0][0].meta["val"].shape
    assert [isinstance(size, torch.SymInt) for size in sizes] == [True, True, False]


@pytest.mark.parametrize("case", ["padding", "a view before the activation", "a view behind it", "a factor"])
def test_sizes_that_are_computed(case: str) -> None:
    """A number that depends on the input's sizes, but not on its values, is an operand of one of the operations."""

    def form(self: nn.Module, x: Tensor) -> Tensor:
        if case == "padding":
            x = F.conv1d(x.mT, self.mix, padding=x.shape[1] // 2).mT
        hidden = self.up(x)
        if case == "a view before the activation":
            hidden = hidden.view(*x.shape[:2], 4, 10).transpose(2, 3)
        hidden = torch.relu(hidden)
        if case == "a view behind it":
            hidden = hidden.view(*x.shape[:2], 4, 10).transpose(2, 3)
        if case == "a factor":
            hidden = hidden * x.shape[1]
        return self.down(hidden.flatten(2).flip(-1))

    module = Written(form, mix=drawn(D_MODEL, D_MODEL, 3), **projections(up=(D_MODEL, D_FF), down=(D_FF, D_MODEL)))
    dynamic = (({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", min=4, max=64)},),)
    (block,) = find_ffn_blocks(canonical(module, torch.randn(2, 6, D_MODEL), dynamic=dynamic))
    assert (block.variant, block.d_model, block.d_ff, block.d_out) == ("plain", D_MODEL, D_FF, D_MODEL)
    assert block.refusal.startswith("no form that twellc rewrites: linear, ")


def test_a_square_projection() -> None:
    module = Written(lambda s, x: s.down @ torch.relu(s.up @ x.mT).flip(0), up=drawn(16, 16), down=drawn(16, 16))
    (block,) = blocks_of(module, torch.randn(16, 16))
    assert (block.d_model, block.d_ff, block.d_out) == (16, 16, 16)


QKVO = projections(q=(16, 16), k=(16, 16), v=(16, 16), o=(16, 16))
UNLISTED: dict[str, nn.Module] = {
    "attention by ReLU": Written(lambda s, x: s.o(torch.relu(s.q(x) @ s.k(x).mT) @ s.v(x)), **QKVO),
    "linear attention": Written(lambda s, x: s.o(torch.relu(s.q(x)) @ (torch.relu(s.k(x)).mT @ s.v(x))), **QKVO),
    "attention before a ReLU": Written(
        lambda s, x: s.o(torch.relu(F.scaled_dot_product_attention(s.q(x), s.k(x), s.v(x)))), **QKVO
    ),
    "a pooled head": Written(lambda s, x: s.o(torch.relu(s.q(x)).mean(1)), **QKVO),
    "a pooled head, by an operator for pooling": Written(
        lambda s, x: s.o(F.adaptive_avg_pool1d(torch.relu(s.q(x)).mT, 1).flatten(1)), **QKVO
    ),
    "a residual behind the activation": Written(lambda s, x: s.o(x + torch.relu(s.q(x))), **QKVO),
    "a convolution net": nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 3, 1)
    ),
    "no ReLU": Plain(torch.tanh, between=heads_first),
}


@pytest.mark.parametrize("case", UNLISTED)
def test_unlisted(case: str) -> None:
    assert blocks_of(UNLISTED[case], torch.randn(2, 3, 16)) == []


def test_residual_convolutions_are_not_blocks() -> None:
    """A bottleneck's convolutions of size 1 meet in the residual."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], return_dict=False)
    exported = models.export(transformers.ResNetModel(config), torch.randn(1, 3, 64, 64))
    program = canonicalize(exported)
    assert calls(program)["relu"] > 8
    assert find_ffn_blocks(program) == []
