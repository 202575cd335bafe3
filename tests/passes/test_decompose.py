"""Operations that change are traced one by one: the program is as if torch had traced all of it again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from twellc.passes import decompose as passes_decompose
from twellc.passes.decompose import decompose


class Views(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.dropout(x.transpose(0, 1), 0.1, False)
        flat = y.reshape(x.shape[0] * x.shape[1], -1)
        left, right = x.detach().chunk(2, -1)
        normed = nn.functional.batch_norm(x, torch.ones(5), torch.ones(5))
        return flat.to(torch.bfloat16), x.to(torch.float32), y.flatten(), left * right, normed, y.contiguous()


def operations(program: ExportedProgram) -> set[tuple[str, str]]:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return {(str(node.target), f"{node.meta['val']}") for node in nodes}


def test_as_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 5, 4)
    program = torch.export.export(Views(), (x,), dynamic_shapes=({0: Dim("b")},))
    again = passes_decompose._traced_again
    monkeypatch.setattr(passes_decompose, "_traced_again", None)  # not called
    found = decompose(program)
    monkeypatch.setattr(passes_decompose, "_traced_again", again)
    monkeypatch.setattr(passes_decompose, "_node_by_node", lambda traced: None)
    assert operations(found) == operations(decompose(program))
    for ours, truth in zip(found.module()(x), Views()(x), strict=True):
        assert torch.equal(ours, truth)
