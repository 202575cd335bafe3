"""compile, check and inspect with real TensorRT, each in a process of its own."""

import json
from pathlib import Path

import pytest

from tests.tensorrt.plans import compiled, twellc
from twellc.compiling.manifest import manifest_path
from twellc.export.tensorrt_host import Host

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("commands")]


@pytest.fixture(scope="module")
def bytelm_plan(tensorrt: Host, bytelm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytelm")
    return compiled(bytelm, folder / "bytelm.plan", "--onnx", str(folder / "bytelm.onnx"))


def test_compile(bytelm_plan: Path, tensorrt: Host) -> None:
    manifest = json.loads(manifest_path(bytelm_plan).read_text())
    assert manifest["backend"] == {"name": "tensorrt", "version": tensorrt.version}
    assert len([name for name in manifest["plan"]["plugin_layers"] if "gated_mlp" in name]) == 4
    # cuDNN comes with torch, and was measured faster on Hopper.
    assert {block["form"] for block in manifest["attention"]} == {"cudnn"}
    assert [layer["decision"] for layer in manifest["layers"]] == ["twell"] * 4


def test_check_runs_the_plan(bytelm: Path, bytelm_plan: Path) -> None:
    done = twellc("check", bytelm, bytelm_plan, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["executed"] == "the plan"
    assert "NOT run" not in done.stdout + done.stderr


def test_inspect(bytelm_plan: Path, tensorrt: Host) -> None:
    done = twellc("inspect", bytelm_plan, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert (result["kind"], result["backend"]["version"]) == ("plan", tensorrt.version)
    assert len(result["plan"]["plugin_layers"]) == len(result["layers"]) + len(result["attention"]) == 8
