"""Models with mixtures of experts, from a directory or an archive to a graph and its check."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch.export import Dim

from tests import models
from tests.conftest import Cli

QWEN = {"moe_intermediate_size": 32, "num_experts": 2, "num_experts_per_tok": 2, "head_dim": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "mixtral": models.mixtral,
    "nemotron_h": lambda: models.nemotron_h(layers_block_type=["moe", "attention"]),
    "qwen3_moe": models.family("Qwen3Moe", **models.WIDE, **QWEN, hidden_act="relu2"),
    "switch": models.switch,
}


def archived(model: Any, path: Path, form: str) -> Path:
    model.set_experts_implementation(form)
    tokens = {"dynamic": ({0: Dim("batch", max=8), 1: Dim("sequence", max=32)},)}
    torch.export.save(models.export(models.Logits(model), torch.ones(2, 8, dtype=torch.int64), **tokens), path)
    return path


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        ("nemotron_h", "", torch.bfloat16),
        ("qwen3_moe", "", torch.float32),
        pytest.param("switch", "", torch.bfloat16, marks=pytest.mark.slow),
        ("mixtral", "batched_mm", torch.bfloat16),
        ("mixtral", "grouped_mm", torch.float32),
    ],
)
def test_experts_are_compiled_and_checked(name: str, form: str, dtype: torch.dtype, cli: Cli, tmp_path: Path) -> None:
    """One node a layer, a row in every report; and what float64 says of them. Without a form it is a directory."""
    model, graph = MODELS[name]().to(dtype), tmp_path / "m.onnx"
    path = archived(model, tmp_path / "m.pt2", form) if form else models.save(model, tmp_path / "m", dtype)
    done = cli("compile", path, "--backend", "none", "--onnx", graph, "--manifest", tmp_path / "m.json")
    assert done.exit_code == 0, done.stderr
    rows = [row for row in json.loads((tmp_path / "m.json").read_text())["layers"] if row["experts"]]
    nodes = [node for node in onnx.load(graph).graph.node if node.op_type == "TwellExperts"]
    assert len(rows) == len(nodes) > 0
    top = 1 if name == "switch" else 2
    assert all((row["decision"], row["top"], row["reason"]) == ("twell", top, "matches") for row in rows)
    shown = json.loads(cli("inspect", path, "--json").stdout)
    assert [row for row in shown["layers"] if row["experts"]] == rows
    assert "experts" in {block["route"] for block in shown["kernels"]["blocks"]}
    checked = cli("check", path, graph, "--json")
    assert checked.exit_code == 0, checked.stdout
    blocks = {block["module"]: block for block in json.loads(checked.stdout)["blocks"]}
    for row in rows:
        assert blocks[row["module"]]["accuracy"]["separation"]["rewrite"]["relative"] < 1e-10


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["silu"], "gate activation is silu; TwELL needs a ReLU family"),
        (["relu", "--layers", "none"], "--layers none"),
        (["silu", "--kv-cache", "16"], "gate activation is silu; TwELL needs a ReLU family"),
    ],
)
def test_experts_that_stay_dense(options: list[str], reason: str, cli: Cli, tmp_path: Path) -> None:
    """ONNX has no operator for them; inspect says what they are."""
    activation, *others = options
    path = models.save(models.mixtral(hidden_act=activation, num_hidden_layers=1), tmp_path / "m", torch.bfloat16)
    done = cli("compile", path, "--backend", "none", "--onnx", tmp_path / "m.onnx", *others)
    assert done.exit_code == 2
    message = " ".join(done.stderr.split())
    assert "mixtures of experts that stay dense cannot be compiled as they are" in message
    assert f"got model.layers.0.mlp.experts: {reason}; expected experts with ReLU or squared ReLU" in message
    works = "twellc generate" if "--kv-cache" in others else 'set_experts_implementation("batched_mm")'
    assert works in message
    if not others:
        (row,) = json.loads(cli("inspect", path, "--json").stdout)["layers"]
        assert (row["experts"], row["activation"], row["decision"]) == (2, "silu", "dense")
