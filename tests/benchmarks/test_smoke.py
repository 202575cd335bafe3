"""Every benchmark with --smoke, those that need no GPU on a CPU; their help, and what they refuse without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from tests.conftest import ROOT
from tests.processes import environment
from tests.runtimes import tensorrt
from twellc.export.tensorrt_host import Host

__all__ = ["tensorrt"]

FOLDER = ROOT / "benchmarks"
SCRIPTS = [path.name for path in sorted(FOLDER.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]
# Of scripts that have several commands, one of them.
COMMANDS = {"train.py": ("step",)}
ON_A_GPU = [
    "block.py", "engine.py", "generate.py", "gpu.py", "in_torch_tensorrt.py", "layers.py", "model.py", "serving.py",
    "tensor_parallel.py", "train.py", "train_proof.py", "trained.py",
]  # fmt: skip
ON_A_CPU = ["compile.py", "make_llama.py", "when_it_pays.py"]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / script, *map(str, arguments)],
        capture_output=True, text=True, check=False, env=environment(), timeout=500,
    )  # fmt: skip


def invoke(benchmark_module: Callable[[str], Any], script: str, *arguments: object) -> click.testing.Result:
    """Run a script in this process."""
    module = benchmark_module(script.removesuffix(".py"))
    with torch.random.fork_rng(devices=[]):
        return click.testing.CliRunner().invoke(module.main, list(map(str, arguments)))


def smoke(script: str, *arguments: object) -> str:
    """Run a script with --smoke, and return what it prints; it leaves nothing behind in the folder of benchmarks."""
    kept = [FOLDER, ROOT / "docs"]
    before = {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*.[jm][sd]*")}
    done = run(script, "--smoke", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*.[jm][sd]*")} == before
    return done.stdout


def report(path: Path) -> dict[str, Any]:
    """Return what a script wrote: all of them say what was measured on, and at which commit."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert {"gpu", "torch", "python", "commit"} <= set(found["machine"])
    return found


def medians(result: dict[str, Any]) -> dict[str, float]:
    found = {name: times["median_us"] for name, times in result["times"].items()}
    assert found and all(value > 0 for value in found.values())
    return found


def test_every_script_is_here() -> None:
    assert sorted(ON_A_GPU + ON_A_CPU) == SCRIPTS


@pytest.mark.parametrize("script", ON_A_GPU)
def test_without_a_gpu(benchmark_module: Callable[[str], Any], script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke(benchmark_module, script, *COMMANDS.get(script, ()), "--smoke")
    assert done.exit_code == 1
    assert done.stderr == "Error: there is no CUDA device\n" and done.stdout == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(benchmark_module: Callable[[str], Any], script: str) -> None:
    done = invoke(benchmark_module, script, *COMMANDS.get(script, ()), "--help")
    assert done.exit_code == 0 and "--smoke" in done.stdout, done.output


# ---- on a CPU ----


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    assert "| llama-smoke |" in smoke("compile.py", "--json", tmp_path / "r.json")
    (result,) = report(tmp_path / "r.json")["results"]
    assert result["model"] == "llama-smoke" and result["resident"] > result["private"] > result["plan"] > 0


def test_make_llama(benchmark_module: Callable[[str], Any], tmp_path: Path) -> None:
    assert "billion parameters" in smoke("make_llama.py")
    done = invoke(benchmark_module, "make_llama.py", "--smoke", tmp_path / "model")
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["hidden_size"], config["hidden_act"]) == ("bfloat16", 64, "relu")


@pytest.mark.slow
def test_train_proof_on_a_cpu(tmp_path: Path) -> None:
    assert_proofs(smoke("train_proof.py", "--device", "cpu", "--json", tmp_path / "r.json"), tmp_path / "r.json")


def test_when_it_pays() -> None:
    assert smoke("when_it_pays.py").count("| --- |") == 5


@pytest.mark.slow
def test_tensor_parallel_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "relative error against float64" in smoke(
        "tensor_parallel.py", "--device", "cpu", "--json", tmp_path / "r.json"
    )
    assert set(report(tmp_path / "r.json")["errors"]) == {"dense", "twell", "dense, 2 ranks", "twell, 2 ranks"}


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", [(), ("--suite",)], ids=["one setting", "suite"])
def test_block(part: tuple[str, ...], tmp_path: Path) -> None:
    page = smoke("block.py", *part, "--json", tmp_path / "r.json")
    results = report(tmp_path / "r.json")["results"]
    assert [each["tokens"] for each in results] == ([2048, 8192] if part else [1, 40])
    for each in results:
        assert {"dense eager", "dense compiled", "dense packed", "mlp", "gate"} <= set(medians(each))
        assert f"\n| {each['tokens']} | " in page


@pytest.mark.gpu
@pytest.mark.slow
def test_layers(tmp_path: Path) -> None:
    page = smoke("layers.py", "--json", tmp_path / "r.json")
    found = report(tmp_path / "r.json")
    assert [(each["tokens"], each["layer"]) for each in found["results"]] == [
        (tokens, layer) for tokens in (1, 40) for layer in range(4)
    ]
    for each in found["results"]:
        assert {"dense packed", "as is", "split 512", "pruned split 512"} <= set(medians(each))
        # The draw is that of the layer: about as many fire as in training; one token alone may be far from the mean.
        if each["tokens"] > 1:
            assert 0.5 < each["mean_nonzeros"] / (5632 * [0.0269, 0.0125, 0.0054, 0.0088][each["layer"]]) < 2
    assert [each["tokens"] for each in found["together"]] == [1, 40]
    assert "All layers together" in page and "40 tokens, µs (speed-up):" in page


@pytest.mark.gpu
@pytest.mark.slow
def test_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page = smoke("model.py", "--json", tmp_path / "r.json")
    found = report(tmp_path / "r.json")
    assert [each["setting"] for each in found["results"]] == ["prefill 2x64", "decode 2"]
    for each in found["results"]:
        assert {"dense eager", "dense compiled", "dense packed", "twell eager", "twell compiled"} <= set(medians(each))
        assert f"\n| {each['setting']} | " in page
    assert 0 < found["density"]["mean"] < 0.05 and found["errors"]["twell"] < 0.1


@pytest.mark.gpu
@pytest.mark.slow
def test_generate(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    page = smoke("generate.py", "--json", tmp_path / "r.json")
    found = report(tmp_path / "r.json")
    assert [each["setting"] for each in found["results"]] == ["prefill", "decode-2"]
    for each in found["results"]:
        assert not each["failed"], each["failed"]
        assert {"dense eager", "dense compiled", "dense packed", "twell eager", "twell compiled"} <= set(medians(each))
    assert set(found["results"][1]["answers"]) == {"twell eager", "twell compiled"}
    assert all(stats["graph"] for stats in found["results"][1]["answers"].values())
    assert (tmp_path / "r.md").read_text() in page


@pytest.mark.gpu
@pytest.mark.tensorrt
@pytest.mark.slow
def test_generate_by_plans(tensorrt: Host, tmp_path: Path) -> None:
    plans = ("--plans", tmp_path / "plans", "--contestants", "dense eager,plan dense,plan twell")
    smoke("generate.py", "--json", tmp_path / "r.json", *plans)
    found = report(tmp_path / "r.json")
    assert not found["failed"], found["failed"]
    for each in found["results"]:
        assert not each["failed"] and set(medians(each)) == {"dense eager", "plan dense", "plan twell"}, each["failed"]
    assert all(stats["graph"] for stats in found["results"][1]["answers"].values())


@pytest.mark.gpu
@pytest.mark.slow
def test_all_of_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    smoke("gpu.py", "--out", tmp_path)
    written = sorted(path.name.partition("-")[0] + path.suffix for path in tmp_path.iterdir())
    assert written == [f"{name}{suffix}" for name in ("layers", "model", "suite") for suffix in (".json", ".md")]
    for path in tmp_path.glob("*.json"):
        assert report(path)["results"]
        assert path.with_suffix(".md").read_text().count("\n|") > 2


@pytest.mark.gpu
@pytest.mark.slow
def test_train_step(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = run("train.py", "step", "--smoke", "--json", tmp_path / "r.json")
    assert done.returncode == 0, done.stdout + done.stderr
    results = report(tmp_path / "r.json")["results"]
    assert [each["contestant"] for each in results] == [
        "dense compiled",
        "twell compiled",
        "dense eager",
        "twell eager",
    ]
    for each in results:
        assert each["tokens_per_second"] > 0 and each["peak_bytes"] > 0 and each["joules_per_token"] >= 0
        assert f"\n| {each['contestant']} | " in done.stdout


def assert_proofs(page: str, path: Path) -> None:
    found = report(path)
    names = [each["name"] for each in found["results"]]
    assert names == [
        "dense, seed 0", "dense, seed 1", "twell, seed 0", "SiLU, dense", "ReLU, twell", "without",
        "with reinitialise_dead",
    ]  # fmt: skip
    for each in found["results"]:
        assert len(each["bits"]) == each["steps"] and 0 < each["held_out"]["bits"] < 12
        assert f": {each['name']} | {each['steps']} | " in page
    assert found["curves"]["bits_apart_twell"] >= 0 and "two dense seeds" in page
    silu, relu = found["results"][3:5]
    assert min(silu["held_out"]["density"]) > 0.99 > max(relu["held_out"]["density"])
    if importlib.util.find_spec("matplotlib") is not None:
        assert "<svg" in path.with_suffix(".svg").read_text()


@pytest.mark.gpu
@pytest.mark.slow
def test_train_proof(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert_proofs(smoke("train_proof.py", "--json", tmp_path / "r.json"), tmp_path / "r.json")


@pytest.mark.gpu
@pytest.mark.slow
def test_trained(tmp_path: Path) -> None:
    for module in ("transformers", "onnxscript", "onnx_graphsurgeon"):
        pytest.importorskip(module)
    page = smoke("trained.py", "--json", tmp_path / "r.json")
    commands = report(tmp_path / "r.json")["commands"]
    assert {"profile", "compile, pruned", "check, pruned", "bench, calibrated", "bench, pruned"} <= set(commands)
    assert all(each["status"] == 0 and f"`{each['command']}`" in page for each in commands.values())
    plans = importlib.util.find_spec("tensorrt") is not None
    assert ("--backend tensorrt" in page) == plans


@pytest.mark.gpu
@pytest.mark.tensorrt
@pytest.mark.slow
def test_engine(tensorrt: Host, tmp_path: Path) -> None:
    page = smoke("engine.py", "--json", tmp_path / "r.json", "--plans", tmp_path / "plans")
    found = report(tmp_path / "r.json")
    assert [each["shape"] for each in found["results"]] == ["1x1", "2x32"] and not found["failed"]
    for each in found["results"]:
        assert not each["failed"], each["failed"]
        torch_too = {"torch dense eager, sdpa", "torch twell compiled, causal"}
        assert {"plan dense", "plan twell", *torch_too} <= set(medians(each))
        assert f"| {each['shape']}, milliseconds |" in page
        assert set(each["layers"]) == {"plan dense", "plan twell"}
    assert (tmp_path / "r.md").read_text() in page
    assert sorted(path.name for path in (tmp_path / "plans").glob("*.plan")) == ["dense.plan", "twell.plan"]


@pytest.mark.gpu
@pytest.mark.tensorrt
@pytest.mark.slow
def test_in_torch_tensorrt(tensorrt: Host, tmp_path: Path) -> None:
    pytest.importorskip("torch_tensorrt")
    page = smoke("in_torch_tensorrt.py", "--json", tmp_path / "r.json")
    results = report(tmp_path / "r.json")["results"]
    assert [each["tokens"] for each in results] == [1, 40]
    for each in results:
        names = {"dense eager", "dense compiled", "Torch-TensorRT dense", "Torch-TensorRT twell"}
        assert set(medians(each)) == names and not each["failed"]
        assert f"| {each['tokens']} | " in page


@pytest.mark.gpu
@pytest.mark.slow
def test_tensor_parallel(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    if torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    page = smoke("tensor_parallel.py", "--json", tmp_path / "r.json")
    results = report(tmp_path / "r.json")["results"]
    assert [each["shape"] for each in results] == ["1x16", "2x40"]
    for each in results:
        assert set(medians(each)) == {"dense", "twell", "dense, 2 ranks", "twell, 2 ranks"}
        assert f"| {each['shape']} | " in page
