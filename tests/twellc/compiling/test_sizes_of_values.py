"""Blocks with as many rows as values of the input say: masks, routed tokens, values that occur once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
from tests.models import D_MODEL, Gated, Residual, canonicalize, functionalize
from twellc.compiling.translate_torch import rows_of
from twellc.decisions.choose import Tokens
from twellc.export.profiles import resolve_profiles
from twellc.export.shapes import parse_profile
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.sizes.inputs import program_inputs

MASK = torch.tensor([1, 0, 1, 1, 0, 0], dtype=torch.bool)
COUNTS = torch.tensor([2, 1, 0, 1, 3, 0])


class Rows(nn.Module):
    """A block behind a norm, of the rows that `take` gives."""

    def __init__(
        self, take: Callable[[nn.Module, Tensor, Tensor], Tensor], residual: bool = False, norm: Any = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.norm, self.ffn = norm(D_MODEL), Residual(Gated()) if residual else Gated()
        self.take = take

    def forward(self, x: Tensor, values: Tensor) -> Tensor:
        return self.take(nn.Sequential(self.norm, self.ffn), x, values)


def routed(block: nn.Module, x: Tensor, values: Tensor) -> Tensor:
    rows = values.nonzero().squeeze(-1)
    return torch.zeros_like(x).index_add(0, rows, block(x.index_select(0, rows)))


def masked(block: nn.Module, x: Tensor, values: Tensor) -> Tensor:
    return block(torch.cat([x[values], x[~values]]))


def unique(block: nn.Module, x: Tensor, values: Tensor) -> Tensor:
    found, places = torch.unique(values, return_inverse=True)
    return block(x[found])[places]


def repeated(block: nn.Module, x: Tensor, values: Tensor) -> Tensor:
    return block(x.repeat_interleave(values, dim=0))


def traced(
    module: nn.Module, values: Tensor, dynamic: bool, dtype: torch.dtype = torch.bfloat16
) -> torch.export.ExportedProgram:
    sizes = {0: torch.export.Dim("rows")} if dynamic else {}
    x = torch.randn(len(values), D_MODEL).to(dtype)
    return torch.export.export(module.to(dtype).eval(), (x, values), dynamic_shapes=(sizes, sizes))


@pytest.mark.usefixtures("cli")
@pytest.mark.parametrize(
    ("take", "values", "dynamic", "options"),
    [
        (routed, MASK, False, {}),
        (masked, MASK, True, {"weights": "fp8", "linear": "twell"}),
        pytest.param(unique, COUNTS, False, {"weights": "fp8:blocks"}, marks=pytest.mark.slow),
        (repeated, COUNTS, True, {}),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_blocks_of_such_rows(take: Any, values: Tensor, dynamic: bool, options: Any, tmp_path: Path) -> None:
    path, graph = tmp_path / "m.pt2", tmp_path / "m.onnx"
    torch.export.save(traced(Rows(take, residual=take is masked), values, dynamic), path)
    manifest = twellc.compile(path, backend="none", onnx=graph, layers="all", **options)
    assert [layer.decision for layer in manifest.layers] == ["twell"]
    result = twellc.check(path, graph)
    assert result.within and len(result.blocks) == 1, result.causes


@pytest.mark.usefixtures("cli")
def test_a_model_that_is_lowered(tmp_path: Path) -> None:
    """The sizes keep their names, which torch asks for where it takes the norm apart."""
    path, graph = tmp_path / "m.pt2", tmp_path / "m.onnx"
    torch.export.save(traced(Rows(masked, norm=nn.RMSNorm), MASK, True, torch.float32), path)
    manifest = twellc.compile(path, backend="none", onnx=graph, layers="all", dtype="bf16")
    assert [layer.decision for layer in manifest.layers] == ["twell"]
    result = twellc.check(path, graph)
    assert result.within, result.causes


@pytest.mark.parametrize(
    ("take", "values", "rows"),
    [(routed, MASK, Tokens(2, 8, 16)), (repeated, COUNTS, Tokens(2, 8, 16)), (masked, MASK, Tokens(2, 8, 16))],
)
def test_rows_to_expect(take: Any, values: Tensor, rows: Tokens) -> None:
    """As many as the inputs have places, in each optimization profile, where there is no other bound."""
    program = canonicalize(functionalize(traced(Rows(take), values, dynamic=True)))
    inputs = program_inputs(program)
    name = inputs.specs[0].name
    profiles, _ = resolve_profiles(inputs, [parse_profile(f"{name}:2x{D_MODEL}:8x{D_MODEL}:16x{D_MODEL}")], {})
    (block,) = find_ffn_blocks(program)
    assert rows_of(inputs, profiles)(block.x) == [rows]


def test_rows_with_a_bound() -> None:
    """Of six rows not more than six are left, and of values of an input no more than torch knows of."""
    program = canonicalize(functionalize(traced(Rows(routed), MASK, dynamic=False)))
    inputs = program_inputs(program)
    (block,) = find_ffn_blocks(program)
    assert rows_of(inputs, resolve_profiles(inputs, [], {})[0])(block.x) == [Tokens(6, 6, 6)]
