"""One list of passes: what each does shows in its graph, and every command takes its passes from there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import twellc
from tests.conftest import Cli
from tests.models import Gated, export
from twellc.passes import pipeline
from twellc.passes.dump import GraphDump

ROOT = Path(__file__).resolve().parents[2]
X = torch.randn(2, 8, 4)


class Everything(nn.Module):
    """Has something for each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(8, 32, 1), nn.Conv1d(32, 8, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 32))
        self.block = Gated(d_model=8, d_ff=32)

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.conv1d(x.add_(1.0), self.up.weight * self.scale[:, None, None])
        y = torch.maximum(self.down(z * (z > 0).type_as(z) / 2), torch.tensor(0.5))
        seen = y.transpose(1, 2) + self.block(y.transpose(1, 2))
        return nn.functional.scaled_dot_product_attention(seen[:, None], seen[:, None], seen[:, None])


def dumped(module: nn.Module, folder: Path) -> dict[str, str]:
    program = export(module.eval().requires_grad_(False), X.clone())
    pipeline.run_passes(program, torch.bfloat16, "all", 8, ("matmul",), GraphDump(folder))
    return {path.stem.partition("-")[2]: path.read_text() for path in sorted(folder.iterdir())}


def test_each_pass_is_seen(tmp_path: Path) -> None:
    graphs = dumped(Everything(), tmp_path)
    assert list(graphs) == [
        "traced", "decompose", "name_casts", "write_numbers", "merge_views", "name_relus", "fold_weights",
        "fold_constants", "feature_last", "in_precision", "rewrite_ffn", "rewrite_attention",
    ]  # fmt: skip
    texts = list(graphs.values())
    assert all(before != after for before, after in itertools.pairwise(texts))
    expected = {
        "decompose": "aten.add.Tensor", "name_casts": "aten._to_copy.default",
        "write_numbers": "aten.full.default", "name_relus": "aten.relu.default",
        "feature_last": "aten.linear.default", "in_precision": "bf16", "rewrite_ffn": "twell.gated_mlp.default",
        "rewrite_attention": "aten.matmul.default",
    }  # fmt: skip
    before = dict(zip(graphs, ["", *texts], strict=False))
    for name, operation in expected.items():
        assert graphs[name].count(operation) > before[name].count(operation), name
    views = [text.count("aten.transpose.int") for text in (before["merge_views"], graphs["merge_views"])]
    assert views[1] < views[0]


def test_every_pass_is_in_the_list() -> None:
    """Each file beside pipeline.py is a pass, or one of those that are named here."""
    others = {"__init__", "pipeline", "decide", "dump", "firing", "neurons", "report"}
    passes = [*pipeline.FUNCTIONAL, *pipeline.ARRANGING, pipeline.in_precision, pipeline.rewrite_ffn]
    modules = {each.__module__.rpartition(".")[2] for each in (*passes, pipeline.rewrite_attention)}
    assert {path.stem for path in (ROOT / "passes").glob("*.py")} - others == modules


def compiled(cli: Cli, model: Path, folder: Path) -> None:
    assert cli("compile", model, "--backend", "none", "--onnx", folder / "m.onnx", "--overwrite").exit_code == 0


def inspected(cli: Cli, model: Path, folder: Path) -> None:
    assert cli("inspect", model).exit_code == 0


def checked(cli: Cli, model: Path, folder: Path) -> None:
    assert cli("check", model, folder / "m.onnx").exit_code == 0


def optimized(cli: Cli, model: Path, folder: Path) -> None:
    twellc.optimize(Gated(d_model=8, d_ff=32))


@pytest.mark.parametrize("command", [compiled, inspected, checked, optimized])
def test_commands_take_their_passes_from_the_list(
    command: Callable[[Cli, Path, Path], None], cli: Cli, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(cli, archive, tmp_path)
    ran = []

    def added(program: ExportedProgram) -> ExportedProgram:
        ran.append(program)
        return program

    for group in ("FUNCTIONAL", "ARRANGING"):
        monkeypatch.setattr(pipeline, group, (*getattr(pipeline, group), added))
    command(cli, archive, tmp_path)
    assert ran
