"""Decisions by a profile: what compile and inspect do with it, and that check can follow."""

import json
from pathlib import Path

import pytest
import torch

import twellc
from tests.conftest import Cli
from tests.models import Gated, Residual, export
from twellc.decisions.times import DensePoint, GpuTimes, TwellPoint


def test_decisions_by_a_profile(cli: Cli, bytelm: Path, tmp_path: Path) -> None:
    """On a GPU where TwELL pays for some of the layers only, the others are left dense."""
    (tmp_path / "a.py").write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    profile = twellc.profile(bytelm, tmp_path / "a.py", tmp_path / "p")
    densities = sorted(block.density for block in profile.blocks.values())
    limit = 0.5 * (densities[1] * densities[2]) ** 0.5  # of equal neurons; these differ
    layer = twellc.inspect(bytelm).layers[0]
    sizes = [(layer.variant, layer.d_model, layer.d_ff, tokens) for tokens in (1, 64, 1000, 2048, 8192)]
    dense = [DensePoint(*size, 10.0, 10.0, 10.0, "eager") for size in sizes]
    twell = [
        TwellPoint(*size, time, time, time, density, density, "equal")
        for size in sizes
        for density in (limit / 8, limit / 4, limit / 2, limit, 2 * limit, 4 * limit)
        for time in [10.0 * (density / limit) ** 0.5]
    ]
    times = tmp_path / "gpu.json"
    times.write_text(GpuTimes({"gpu": "NVIDIA Test"}, True, dense, twell).to_text())

    graph, report = tmp_path / "m.onnx", tmp_path / "r.json"
    options = ["--calibration", tmp_path / "p", "--target-gpu", times, "--profile", "input_ids:1x1:4x512:4x1024"]
    result = cli("compile", bytelm, "--backend", "none", "--onnx", graph, "--report", report, *options)
    assert result.exit_code == 0, result.output
    layers = json.loads(report.read_text())["layers"]
    for row in layers:
        assert row["decision"] == ("twell" if row["expectation"]["gain"] >= 1.03 else "dense")
        assert row["expectation"]["density"] == pytest.approx(profile.blocks[row["module"]].density, rel=1e-3)
        assert row["expectation"]["gpu"] == "NVIDIA Test" and not row["expectation"]["assumed"]
        if row["decision"] == "dense":
            assert row["matched"] and row["reason"].startswith("left dense: ")
            assert row["reason"].endswith(" at 2048 tokens") and " active, pays below " in row["reason"]
        else:
            assert " times as fast at 2048 tokens" in row["reason"]
            assert row["compression"] in (1, 2, 4, 8)
    assert {row["decision"] for row in layers} == {"twell", "dense"}

    fields = {node.name: node.fields for node in twellc.inspect(graph).description.nodes or ()}
    taken = [row for row in layers if row["decision"] == "twell"]
    assert [each["compression"] for each in fields.values()] == [row["compression"] for row in taken]
    assert [each["hot"] for each in fields.values()] == [row["hot"] for row in taken]

    shown = twellc.inspect(bytelm, calibration=tmp_path / "p", target_gpu=str(times), tokens=2048).layers
    assert [row.decision for row in shown] == [row["decision"] for row in layers]
    checked = twellc.check(bytelm, graph)
    assert checked.within
    assert [block.module for block in checked.blocks] == [row["module"] for row in taken]


@pytest.mark.parametrize("source", ["archive", "ONNX"])
def test_blocks_left_dense_without_a_profile(source: str, cli: Cli, tmp_path: Path) -> None:
    """TwELL pays at no density for the first block; widths like the second were not measured. Check follows."""
    module = torch.nn.Sequential(Residual(Gated(d_ff=320)), Residual(Gated(d_ff=40))).bfloat16()
    dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(export(module, torch.randn(4, 3, 16).bfloat16(), dynamic=dynamic), tmp_path / "m.pt2")
    model = tmp_path / "m.pt2"
    if source == "ONNX":
        model = tmp_path / "plain.onnx"
        written = cli("compile", tmp_path / "m.pt2", "--layers", "none", "--backend", "none", "--onnx", model)
        assert written.exit_code == 0
    sizes = [("gated", 16, 320, tokens) for tokens in (1, 64, 1000, 2048, 8192)]
    dense = [DensePoint(*size, 10.0, 10.0, 10.0, "eager") for size in sizes]
    densities = (0.0001, 0.001, 0.01, 0.1, 0.5)
    twell = [TwellPoint(*size, 20.0, 20.0, 20.0, each, each, "equal") for size in sizes for each in densities]
    times, report = tmp_path / "gpu.json", tmp_path / "r.json"
    times.write_text(GpuTimes({"gpu": "NVIDIA Test"}, True, dense, twell).to_text())

    arguments = ("--backend", "none", "--onnx", tmp_path / "m.onnx", "--report", report)
    result = cli("compile", model, *arguments, "--target-gpu", times)
    assert result.exit_code == 0, result.output
    content = json.loads(report.read_text())
    first, second = content["layers"]
    assert (first["decision"], second["decision"], second["reason"]) == ("dense", "twell", "matches")
    assert first["reason"].startswith("left dense: TwELL pays at no density at ")
    assert any("were measured: what is expected of them is a guess" in note for note in content["notes"])
    assert any("rewrites every match for which TwELL can pay" in note for note in content["notes"])
    shown = twellc.inspect(model, target_gpu=str(times)).layers
    assert [row.decision for row in shown] == ["dense", "twell"]
    checked = twellc.check(model, tmp_path / "m.onnx")
    assert checked.within and [block.module for block in checked.blocks] == [second["module"]]
    result = cli("compile", model, *arguments, "--target-gpu", times, "--layers", "all", "--overwrite")
    assert [row["decision"] for row in json.loads(report.read_text())["layers"]] == ["twell", "twell"]
