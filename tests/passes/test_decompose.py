"""Operations that change are traced one by one: the program is as if torch had traced all of it again."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from twellc.passes import decompose as passes_decompose
from twellc.passes.decompose import decompose


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.dropout(x.transpose(0, 1), 0.1, False)
        flat = y.reshape(x.shape[0] * x.shape[1], -1)
        left, right = x.detach().chunk(2, -1)
        normed = nn.functional.batch_norm(x, torch.ones(5), torch.ones(5))
        return flat.to(torch.bfloat16), x.to(torch.float32), y.flatten(), left * right, normed, y.contiguous()


class Sized(nn.Module):
    """Reads what is made of a size alone, by an operation that could return a view of a tensor that is left out."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ops.twellc_tests.twos(None, x.shape[0])[:, None] + torch.ops.twellc_tests.twos(None, 4)


class Written(nn.Module):
    """Writes to tensors that have no other names."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weights, places = torch.softmax(x, -1).topk(2)
        weights /= weights.sum(-1, keepdim=True)
        mask = torch.zeros_like(x).scatter_(1, places, 1.0)
        mask[x > 0.5] = 2.0
        wide = x.to(torch.float64).mul_(weights[:, :1])
        return weights, mask, wide, weights[:, 1:] + 1


class WrittenElsewhere(nn.Module):
    """Writes to a tensor that has another name, or that is of another dtype."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        if self.case == "a view":
            y[:, 1:].mul_(2)
        elif self.case == "a view of it":
            view = y[:, 1:]
            y.mul_(2)
            return y, view
        else:
            y = y.to(torch.bfloat16) * 1
            y.mul_(x)
        return y, y


def operations(program: ExportedProgram) -> set[tuple[str, str]]:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return {(str(node.target), f"{node.meta['val']}") for node in nodes}


@pytest.fixture(scope="module")
def twos() -> Iterator[None]:
    with torch.library._scoped_library("twellc_tests", "DEF") as library:
        library.define("twos(Tensor(a)? like, SymInt size) -> Tensor(a)")
        library.impl("twos", lambda like, size: torch.ones(size) + 1, "CompositeImplicitAutograd")
        yield


@pytest.mark.parametrize(("module", "shape"), [(Views(), (3, 5, 4)), (Sized(), (3, 4)), (Written(), (3, 4))])
def test_as_traced_again(
    module: nn.Module, shape: tuple[int, ...], twos: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: Dim("b")},))
    again = passes_decompose._traced_again
    monkeypatch.setattr(passes_decompose, "_traced_again", None)  # not called
    found = decompose(program)
    monkeypatch.setattr(passes_decompose, "_traced_again", again)
    monkeypatch.setattr(passes_decompose, "_node_by_node", lambda traced: None)
    assert operations(found) == operations(decompose(program))
    for ours, truth in zip(pytree.tree_leaves(found.module()(x)), pytree.tree_leaves(module(x)), strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("case", ["a view", "a view of it", "a dtype"])
def test_writes_that_show_elsewhere(case: str) -> None:
    x = torch.randn(3, 5)
    program = decompose(torch.export.export(WrittenElsewhere(case), (x,)))
    for ours, truth in zip(program.module()(x), WrittenElsewhere(case)(x), strict=True):
        assert torch.equal(ours, truth)
