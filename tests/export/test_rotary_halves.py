"""Rotary positions in front of a sum are written by halves, and not a bit of a result changes."""

from __future__ import annotations

import collections
from pathlib import Path

import onnx
import onnx_ir
import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Cli
from tests.models import Rotated, canonical, export
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.rotary_halves import RotaryHalves
from twellc.passes.pipeline import PassOptions, run_passes


def exported(
    module: nn.Module, x: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch | None = None
) -> onnx.ModelProto:
    """Return the graph of a module; with `monkeypatch` without the pass."""
    if monkeypatch is not None:
        unchanged = lambda self, model: onnx_ir.passes.PassResult(model, modified=False)  # noqa: E731
        monkeypatch.setattr(RotaryHalves, "call", unchanged)
    save_onnx(export_onnx(canonical(module, x), ["x"], ["y"], {}), path)
    if monkeypatch is not None:
        monkeypatch.undo()
    return onnx.load(path)


def turned(model: onnx.ModelProto) -> int:
    """Count the tensors of two halves of which one is negated."""
    negated = {node.output[0] for node in model.graph.node if node.op_type == "Neg"}
    return sum(node.op_type == "Concat" and bool(negated & set(node.input)) for node in model.graph.node)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize(("then", "count"), [("norm", 1), ("softmax", 2)])
@pytest.mark.parametrize("form", ["slices", "chunks", "other sign", "wide", "wide x"])
def test_in_front_of_a_sum(
    form: str, then: str, count: int, part: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Rotated(form, then, part).to(dtype), torch.randn(2, 5, 128).to(dtype)
    before = exported(module, x, tmp_path / "before.onnx", monkeypatch)
    after = exported(module, x, tmp_path / "after.onnx")
    assert (turned(before), turned(after)) == (count, 0)
    counts = [collections.Counter(node.op_type for node in model.graph.node) for model in (before, after)]
    # Of each rotation two products and a sum more, cos and sin in two halves each, and nothing that is of no use.
    assert {kind: counts[1][kind] - counts[0][kind] for kind in ("Add", "Concat", "Mul", "Neg", "Slice")} == {
        "Add": count, "Concat": 0, "Mul": 2 * count, "Neg": 0, "Slice": 4,
    }  # fmt: skip
    results = [OnnxEvaluator(tmp_path / f"{name}.onnx").run({"x": x})[0] for name in ("before", "after")]
    assert torch.equal(*results)


def test_what_no_sum_follows_stays(tmp_path: Path) -> None:
    """What follows is the plugin of a block, whose products are its own business."""
    x = torch.randn(2, 5, 128).bfloat16()
    rewritten = run_passes(export(Rotated("slices", "nothing").bfloat16(), x), PassOptions(layers="all"))
    save_onnx(export_onnx(rewritten.program, ["x"], ["y"], {}), tmp_path / "m.onnx")
    assert turned(onnx.load(tmp_path / "m.onnx")) == 1


class Unlike(nn.Module):
    """Sums that look like rotary positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        parts = {"same order": (first, -second), "quarters": (-x[..., 2:6], x[..., :4])}.get(
            self.kind, (-second, first)
        )
        cos, sin = x.cos(), x.sin()
        if self.kind == "one factor":
            sin = sin[..., :1]
        other = torch.tanh(x) if self.kind == "other x" else x
        return (other * cos + torch.cat(parts, -1) * sin).sum(-1)


@pytest.mark.parametrize("kind", ["same order", "quarters", "one factor", "other x"])
def test_what_is_none_stays(kind: str, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    model = exported(Unlike(kind), x, tmp_path / "m.onnx")
    assert turned(model) == 1
    torch.testing.assert_close(OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})[0], Unlike(kind)(x))


def test_of_an_onnx_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Rotated("slices", "norm").bfloat16(), torch.randn(2, 5, 128).bfloat16()
    before = exported(module, x, tmp_path / "m.onnx", monkeypatch)
    done = cli(
        "compile", tmp_path / "m.onnx", "--backend", "none", "--onnx", tmp_path / "after.onnx", "--layers", "all"
    )
    assert done.exit_code == 0, done.output
    after = onnx.load(tmp_path / "after.onnx")
    assert (turned(before), turned(after)) == (1, 0)
    assert any(node.op_type == "TwellGatedMlp" for node in after.graph.node)
    assert cli("check", tmp_path / "m.onnx", tmp_path / "after.onnx").exit_code == 0
