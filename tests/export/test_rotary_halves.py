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
from tests.models import Gated, canonical, export, scale_weights
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.rotary_halves import RotaryHalves
from twellc.passes.pipeline import PassOptions, run_passes


class Rotated(nn.Module):
    """Heads of x [batch, tokens, d_model] with rotary positions, then a norm of each or attention, then a block.

    Args:
        form: How halves are taken and turned: `slices` as in Llama, `chunks`, `other sign` as in NanoChat, `wide`
            with cos and sin in float32 as in Olmo2, `wide x` with x in float32, too.
        then: `norm`, `softmax` of products with keys, or `nothing`.
        part: The share of a head that is rotated.
    """

    def __init__(self, form: str, then: str, part: float = 1.0, d_model: int = 128, head: int = 32) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(d_model, d_model, bias=False) for _ in range(2))
        self.block = Gated(d_model=d_model, d_ff=320)
        self.form, self.then, self.head, self.rotated = form, then, head, int(part * head)
        scale_weights(self)

    def turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = x.chunk(2, -1) if self.form == "chunks" else (x[..., :half], x[..., half:])
        return torch.cat((second, -first) if self.form == "other sign" else (-second, first), -1)

    def rotate(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.head)).transpose(1, 2)
        places = torch.arange(3, 3 + x.shape[2], dtype=torch.float32, device=x.device)
        angles = places[:, None] * 0.3 ** torch.arange(0, self.rotated, 2, device=x.device)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        if not self.form.startswith("wide"):
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        rotated, rest = x[..., : self.rotated], x[..., self.rotated :]
        rotated = rotated.to(cos.dtype) if self.form == "wide x" else rotated
        return torch.cat(((rotated * cos + self.turned(rotated) * sin).to(x.dtype), rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.rotate(self.query(x)), self.rotate(self.key(x))
        if self.then == "norm":
            wide = query.float() if query.dtype != torch.float64 else query
            query = (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)
        elif self.then == "softmax":
            query = (query @ key.transpose(-1, -2)).softmax(-1) @ key
        return self.block(query.transpose(1, 2).flatten(2))


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
