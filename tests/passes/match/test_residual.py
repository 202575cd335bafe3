"""The residual of a block: which Add a twell op takes in, which not, and that values stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from tests.models import Gated, Plain, Residual, Written, assert_rewrites, calls, canonical, eager, rewrite, run
from tests.tolerance import assert_same
from twellc.passes.decide import decide
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.plugins.ops import GATED_MLP, MLP

DTYPE = torch.float64  # exact enough that results are the same


def inputs() -> Tensor:
    return torch.randn(2, 3, 16, dtype=DTYPE)


def ops_in(program: Any) -> list[Node]:
    return [node for node in program.graph.nodes if node.target in (GATED_MLP, MLP)]


def residual_of(op: Node) -> Node | None:
    """The operand before the options."""
    residual = op.args[-7]
    assert residual is None or isinstance(residual, Node)
    return residual


def written(function: Callable[..., Any], **members: nn.Module | Tensor) -> Written:
    module = Written(function, **members)
    return module.to(DTYPE)


TAKEN: dict[str, Callable[[], Written]] = {
    "in place": lambda: written(lambda m, x: m.ffn(x + 1).add_(x), ffn=Gated()),
    "alpha 1": lambda: written(lambda m, x: torch.add(x, m.ffn(x + 1), alpha=1), ffn=Gated()),
    "post-norm: the residual is x": lambda: written(lambda m, x: torch.tanh(x + m.ffn(x)), ffn=Gated()),
    "dropout": lambda: written(
        lambda m, x: x + nn.functional.dropout(m.ffn(x + 1), 0.5, m.training), ffn=Gated(biases="d")
    ),
    "clone": lambda: written(lambda m, x: x + m.ffn(x + 1).clone().contiguous(), ffn=Gated()),
    "flattened block": lambda: written(lambda m, x: x + m.ffn((x + 1).view(-1, 16)).view(2, 3, 16), ffn=Gated()),
    "all of it flattened": lambda: written(
        lambda m, x: (x.view(-1, 16) + m.ffn((x + 1).view(-1, 16))).view(2, 3, 16), ffn=Plain()
    ),
    "other width": lambda: written(lambda m, x: m.skip(x) + m.ffn(x + 1), ffn=Gated(d_out=24), skip=nn.Linear(16, 24)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_sum_belongs_to_the_block(name: str) -> None:
    module, x = TAKEN[name](), inputs()
    before, _, after = assert_rewrites(module, x)
    (op,) = ops_in(after)
    assert residual_of(op) is not None
    assert calls(after)["add"] == calls(before)["add"] - 1
    assert op.meta["val"].shape == residual_of(op).meta["val"].shape
    assert_same(run(after, 2 * x)[0], eager(module, 2 * x)[0])


BIG = torch.randn(2, 3, 16)
LEFT: dict[str, Callable[[], Written]] = {
    "y has a second reader": lambda: written(lambda m, x: (y := m.ffn(x + 1), x + y, torch.tanh(y))[1:], ffn=Gated()),
    "y is an output": lambda: written(lambda m, x: (y := m.ffn(x + 1), x + y), ffn=Gated()),
    "a view of y has a second reader": lambda: written(
        lambda m, x: (y := m.ffn(x + 1).view(6, 16), x.view(6, 16) + y, y * 2)[1:], ffn=Gated()
    ),
    "the residual is broadcast": lambda: written(lambda m, x: x[:1] + m.ffn(x + 1), ffn=Gated()),
    "the residual is a row": lambda: written(lambda m, x: x[0, 0] + m.ffn(x + 1), ffn=Gated()),
    "y is broadcast": lambda: written(lambda m, x: x + m.ffn(x[:1] + 1), ffn=Gated()),
    "alpha 2": lambda: written(lambda m, x: torch.add(x, m.ffn(x + 1), alpha=2), ffn=Gated()),
    "a number": lambda: written(lambda m, x: m.ffn(x + 1) + 3, ffn=Gated()),
    "a difference": lambda: written(lambda m, x: x - m.ffn(x + 1), ffn=Gated()),
    "y itself": lambda: written(lambda m, x: (lambda y: y + y)(m.ffn(x + 1)), ffn=Gated()),
    "another dtype": lambda: written(lambda m, x: x.float() + m.ffn(x + 1), ffn=Gated()),
    "a wider sum": lambda: written(lambda m, x: x.float() + m.ffn(x.half() + 1).float(), ffn=Gated()).half(),
    "a constant": lambda: written(lambda m, x: m.big + m.ffn(x + 1), ffn=Gated(), big=BIG),
    "scaled before": lambda: written(lambda m, x: x + 0.5 * m.ffn(x + 1), ffn=Gated()),
    "transposed": lambda: written(lambda m, x: x.mT + m.ffn(x + 1).mT, ffn=Gated()),
}


@pytest.mark.parametrize("name", LEFT)
def test_the_sum_stays(name: str) -> None:
    module = LEFT[name]()
    x = inputs().to(module.ffn.down.weight.dtype)
    before = canonical(module, x)
    after = rewrite(before)
    (op,) = ops_in(after)
    assert residual_of(op) is None
    assert calls(after)["add"] == calls(before)["add"]
    if x.dtype == DTYPE:
        for actual, expected in zip(run(after), eager(module, x), strict=True):
            assert_same(actual, expected)


def test_blocks_in_sequence() -> None:
    module = nn.Sequential(Residual(Gated(biases="gud")), Residual(Plain()), Residual(Gated())).to(DTYPE)
    _, _, after = assert_rewrites(module, inputs())
    assert calls(after) == {"gated_mlp": 2, "mlp": 1, "add": 3}
    first, second, third = ops_in(after)
    assert (residual_of(second), residual_of(third)) == (first, second)


def test_residual_that_is_computed_after_the_block() -> None:
    """As where attention and feed-forward network run side by side: the op then stands where the Add was."""
    module = written(
        lambda m, x: (y := m.ffn(x + 1), x + (torch.softmax(m.query(x) @ x.mT, -1) @ x + y))[1],
        ffn=Gated(biases="d"), query=nn.Linear(16, 16),
    )  # fmt: skip
    _, _, after = assert_rewrites(module, inputs())
    (op,) = ops_in(after)
    order = list(after.graph.nodes)
    assert residual_of(op) is not None
    assert order.index(residual_of(op)) < order.index(op)
    assert calls(after)["add"] == 2, "x + 1, and the second of the two sums"


def test_sum_of_two_blocks_belongs_to_one() -> None:
    module = written(lambda m, x: m.first(x + 1) + m.second(x + 2), first=Gated(), second=Plain(biases="ud"))
    _, _, after = assert_rewrites(module, inputs())
    assert calls(after) == {"gated_mlp": 1, "mlp": 1, "add": 2}
    assert sorted(residual_of(op) is not None for op in ops_in(after)) == [False, True]


def test_sum_of_a_block_that_is_left_dense_stays() -> None:
    module = written(lambda m, x: x + m.ffn(x + 1), ffn=Gated(nn.functional.silu))
    (block,) = find_ffn_blocks(canonical(module, inputs()))
    assert block.refusal
    assert block.residual is None


@pytest.mark.parametrize("layers", ["auto", "none"])
def test_layers_say_which_blocks_take_in_their_residual(layers: str) -> None:
    module = nn.Sequential(Residual(Gated()), Plain()).bfloat16()
    blocks = find_ffn_blocks(canonical(module, torch.randn(4, 16).bfloat16()))
    assert [layer.residual for layer in decide(blocks, layers)] == [layers == "auto", False]


def test_dynamic_sizes() -> None:
    dynamic = (({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")},),)
    module = written(lambda m, x: x + m.ffn((x + 1).flatten(0, 1)).view(x.shape[0], x.shape[1], 16), ffn=Gated())
    at = (torch.randn(5, 7, 16, dtype=DTYPE),)
    (op,) = ops_in(assert_rewrites(module, inputs(), dynamic=dynamic, at=at).after)
    assert residual_of(op) is not None
