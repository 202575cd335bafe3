"""Every benchmark with --smoke, on a CPU as far as it can; their help, and what they refuse without a GPU.

Without a GPU nothing is recorded or compiled, and the clock and the kernels of `block.py` are stand-ins.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from tests.caches import mostly_slow
from tests.conftest import ROOT
from tests.processes import captured
from tests.twellc.benchmarking.conftest import no_gpu_needed
from twellc.benchmarking import contest

__all__ = ["no_gpu_needed"]

FOLDER = ROOT / "benchmarks"
SCRIPTS = [path.name for path in sorted(FOLDER.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]
ON_A_CPU = {"compile.py", "make_llama.py", "quality.py", "when_it_pays.py"}
# Of scripts that have several commands, one of them.
COMMANDS = {"train.py": ("step",)}


def smoke(script: str, *arguments: object, commands: Mapping[str, tuple[str, ...]] = COMMANDS) -> str:
    """Run a script with --smoke, and return what it prints; it leaves nothing behind in the folder of benchmarks."""
    kept = [FOLDER, ROOT / "docs"]
    before = {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*.[jm][sd]*")}
    command = [sys.executable, FOLDER / script, *commands.get(script, ()), "--smoke", *map(str, arguments)]
    done = captured(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for folder in kept for path in folder.rglob("*.[jm][sd]*")} == before
    return done.stdout


def report(path: Path) -> dict[str, Any]:
    """Return what a script wrote: all of them say what was measured on, and at which commit."""
    found: dict[str, Any] = json.loads(path.read_text())
    assert {"gpu", "torch", "python", "commit"} <= set(found["machine"])
    return found


@pytest.fixture
def invoke(benchmark_module: Callable[[str], Any]) -> Callable[..., click.testing.Result]:
    """Return a function that runs a script in this process."""

    def run(script: str, *arguments: object) -> click.testing.Result:
        module = benchmark_module(script.removesuffix(".py"))
        with torch.random.fork_rng(devices=[]):
            return click.testing.CliRunner().invoke(module.main, [*COMMANDS.get(script, ()), *map(str, arguments)])

    return run


Invoke = Callable[..., click.testing.Result]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(invoke: Invoke, script: str) -> None:
    done = invoke(script, "--help")
    assert done.exit_code == 0 and "--smoke" in done.stdout, done.output


@pytest.mark.parametrize("script", sorted({*SCRIPTS} - ON_A_CPU))
def test_without_a_gpu(invoke: Invoke, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke(script, "--smoke")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "Error: there is no CUDA device\n")


@pytest.mark.slow
def test_compile(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    assert "| llama-smoke |" in smoke("compile.py", "--json", tmp_path / "r.json")
    (result,) = report(tmp_path / "r.json")["results"]
    assert result["model"] == "llama-smoke" and result["resident"] > result["private"] > result["plan"] > 0


@pytest.mark.slow
def test_failed_compilation_gives_no_figures(invoke: Invoke, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, results = tmp_path / "model", tmp_path / "results.json"
    model.mkdir()
    (model / "config.json").write_text("no JSON")
    done = invoke("compile.py", model, "--json", results)
    assert done.exit_code == 1 and "failed, so there are no figures" in done.stderr
    assert done.stdout == "" and not results.exists()
    assert "config.json" in capfd.readouterr().err  # of twellc, in a child process


def test_make_llama(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("make_llama.py", "--smoke", tmp_path / "model")
    assert done.exit_code == 0 and "billion parameters" in done.output, done.output
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["dtype"], config["hidden_size"], config["hidden_act"]) == ("bfloat16", 64, "relu")


@pytest.mark.slow
def test_quality(tmp_path: Path) -> None:
    page = smoke("quality.py", "--json", tmp_path / "r.json")
    bits = {each["blocks"]: each["bits_a_byte"] for each in report(tmp_path / "r.json")["results"]}
    assert abs(bits["twell bf16"] - bits["bf16"]) < 0.01 < 0.1 > abs(bits["twell FP8"] - bits["bf16"]) > 0
    assert 0 < abs(bits["LLM, FP8 cache, scales of 1"] - bits["LLM"]) < 0.1
    assert f"| dense FP8 | {bits['dense FP8']:.5f} |" in page


@pytest.mark.slow
def test_tensor_parallel_on_a_cpu(tmp_path: Path) -> None:
    page = smoke("tensor_parallel.py", "--device", "cpu", "--json", tmp_path / "r.json")
    assert "relative error against float64" in page
    assert set(report(tmp_path / "r.json")["errors"]) == {"dense", "twell", "dense, 2 ranks", "twell, 2 ranks"}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_train_proof(device: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    page = smoke("train_proof.py", "--device", device, "--json", path)
    found = report(path)
    assert [each["name"] for each in found["results"]] == [
        *("dense, seed 0", "dense, seed 1", "twell, seed 0"),
        *("SiLU, dense", "ReLU, twell"),
        *("without", "with reinitialise_dead"),
    ]
    for each in found["results"]:
        assert len(each["bits"]) == each["steps"] and 0 < each["held_out"]["bits"] < 12
        assert f": {each['name']} | {each['steps']} | " in page
    assert found["curves"]["bits_apart_twell"] >= 0 and "two dense seeds" in page
    silu, relu = found["results"][3:5]
    assert min(silu["held_out"]["density"]) > 0.99 > max(relu["held_out"]["density"])
    if importlib.util.find_spec("matplotlib") is not None:
        assert "<svg" in path.with_suffix(".svg").read_text()


DENSE = ("dense eager", "dense compiled", "dense packed")
BOTH = (*DENSE, "twell eager", "twell compiled")


@dataclass(frozen=True)
class Smoke:
    """What a script measures with --smoke: a result for each of `settings`, in which `contestants` have times.

    Its page has the line.
    """

    script: str
    key: str
    settings: tuple[object, ...]
    contestants: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    line: str = ""


SMOKES = {
    "block": Smoke("block.py", "tokens", (1, 40), (*DENSE, "mlp", "gate")),
    "hot": Smoke("block.py", "tokens", (1, 40), ("mlp", "mlp, whole"), ("--hot", "256", "--only", "mlp")),
    "suite": Smoke("block.py", "tokens", (2048, 8192), (*DENSE, "mlp", "gate"), ("--suite",)),
    "layers": Smoke("layers.py", "tokens", (1,) * 4 + (40,) * 4, ("dense packed", "as is", "pruned split 512")),
    "fp8": Smoke(
        *("fp8.py", "tokens", (1, 40) * 4, ("twell", "dense FP8", "dense FP8, pruned")),
        ("--trained", "--d-ff", "5632", "--energy-seconds", "0.1", "--launches"),
    ),
    "linear": Smoke("linear.py", "tokens", (1, 20) * 2, ("twell", "twell FP8", "compiled", "F.linear", "scaled_mm")),
    "features": Smoke("features.py", "tokens", (3, 40) * 2, ("twell", "twell in a graph", "block", "dense", "COO")),
    "features in FP8": Smoke(  # whose products by torch take multiples of 16
        *("features.py", "tokens", (3, 40), ("twell", "dense", "twell in a graph", "dense in a graph")),
        ("--weights", "fp8", "--sizes", "128x304x10"),
    ),
    "experts": Smoke("experts.py", "tokens", (1, 5, 300) * 2, ("twell", "grouped_mm", "Triton")),
    "experts in FP8": Smoke(
        "experts.py", "tokens", (1, 5, 300) * 2, ("twell", "Triton"), ("--weights", "fp8", "--routing", "zipf")
    ),
    "model": Smoke("model.py", "setting", ("prefill 2x64", "decode 2"), BOTH),
    "generate": Smoke(
        *("generate.py", "setting", ("prefill", "decode-2")),
        (
            *BOTH,
            "dense FP8 all linear",
            "twell compiled FP8",
            "dense FP8 all linear FP8 cache",
            "twell compiled FP8 cache",
        ),
    ),
    "tensor_parallel": Smoke(
        "tensor_parallel.py", "shape", ("1x16", "2x40"), ("dense", "twell", "dense, 2 ranks", "twell, 2 ranks")
    ),
}
# In full TensorRT.
PLANS = {
    "generate": Smoke(
        *("generate.py", "setting", ("prefill", "decode-2")),
        ("dense eager", "plan dense", "plan twell linear FP8", "plan twell linear FP8 FP8 cache"),
        ("--plans", "PLANS", "--only", "dense eager|plan dense|plan twell linear"),
    ),
    "engine": Smoke(
        *("engine.py", "shape", ("1x1", "2x32")),
        ("plan dense", "plan twell", "plan twell FP8", "torch dense eager, sdpa", "torch twell compiled, causal"),
        ("--plans", "PLANS"),
    ),
    "in_torch_tensorrt": Smoke(
        *("in_torch_tensorrt.py", "tokens", (1, 40)),
        ("dense eager", "dense compiled", "Torch-TensorRT dense", "Torch-TensorRT twell"),
    ),
}


def measured(case: Smoke, folder: Path, run: Callable[..., str] = smoke) -> tuple[dict[str, Any], str]:
    """Run a script, and return its report, which is as the case says, and its page."""
    arguments = [str(folder / "plans") if each == "PLANS" else each for each in case.arguments]
    page = run(case.script, *arguments, "--json", folder / "r.json")
    found = report(folder / "r.json")
    assert not found.get("failed")
    assert tuple(each[case.key] for each in found["results"]) == case.settings
    for each in found["results"]:
        assert not each.get("failed"), each["failed"]
        medians = {name: times["median_us"] for name, times in each["times"].items()}
        assert {*case.contestants} <= set(medians) and all(value > 0 for value in medians.values())
        assert str(each[case.key]) in page
    assert case.line in page
    if (folder / "r.md").exists():
        assert (folder / "r.md").read_text() in page
    return found, page


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_time(device: str, tmp_path: Path) -> None:
    of_blocks = (f"block{each}" for each in (", op", "", " in FP8", ", norm and residual", ", module", ", torch"))
    others = ("linear, norm and residual", "linear in FP8", "linear, torch", "experts", "encode", "encode in FP8")
    case = Smoke("host_time.py", "call", (*of_blocks, *others, "decode"), ("host",), ("--device", device))
    measured(case, tmp_path)


class Kernels:
    """What stands for the kernels of a block."""

    def __init__(self, x: torch.Tensor, *_: Any) -> None:
        self._x = x

    def kernels(self) -> list[str]:
        return ["none"]

    def gate(self, w: Any) -> None:
        pass

    def mlp(self, w: Any) -> torch.Tensor:
        product: torch.Tensor = w.block.dense(self._x)
        return product


FP8 = ("twell", "twell bf16", "dense FP8")
HERE = {
    "block": Smoke("block.py", "tokens", (1, 40), (*DENSE, "dense FP8", "mlp", "cuBLAS gate", "gate")),
    "layers": Smoke("layers.py", "tokens", (40,) * 4, ("dense packed", "as is", "pruned split 512"), ("--tokens=40",)),
    "fp8": Smoke(
        *("fp8.py", "tokens", (40,) * 4, (*FP8, "dense FP8, pruned")),
        ("--tokens=40", "--d-model=64", "--d-ff=5632", "--trained"),
    ),
    "fp8 at random": Smoke(
        *("fp8.py", "tokens", (1,), FP8, ("--tokens=1", "--density=0.1")),
        "\n| 10 % | 1 | 1000.0 | - | 999.0 | 998.0 | 997.0 | - | 1.00 | ",
    ),
    "linear": Smoke(
        *("linear.py", "tokens", (1, 20) * 2, ("twell", "twell FP8"), ("--only=twell",)),
        "\n| 128 -> 384, layer | 20 | 1000.0 | 0 | 999.0 | 0 | - | - | - | - |\n",
    ),
    "model": Smoke("model.py", "setting", ("prefill 2x64", "decode 2"), BOTH, ("--energy-seconds=0",)),
    "generate": Smoke(
        *("generate.py", "setting", ("prefill", "decode-2")),
        ("dense eager", "dense FP8 all linear", "twell eager", "twell compiled FP8"),
        ("--only=dense eager|dense FP8 all linear|twell eager|twell compiled FP8",),
        "| twell eager over the fastest dense form in bf16 | 1.00 | 1.00 |",
    ),
}


@pytest.mark.parametrize("name", mostly_slow(HERE, "block", "layers", "fp8", "fp8 at random", "linear"))
@pytest.mark.usefixtures("no_gpu_needed")
def test_smoke_here(
    name: str, invoke: Invoke, benchmark_module: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, script = benchmark_module("harness"), benchmark_module(HERE[name].script.removesuffix(".py"))
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(benchmark_module("draw"), "weight_sets", lambda *_: 2)
    clock = {name: getattr(contest, name) for name in ("record", "time_calls")}
    for module, own in ((script, {"Twell": Kernels, "_D_MODEL": 64, **clock}), (harness, clock)):
        for each in own.keys() & vars(module).keys():
            monkeypatch.setattr(module, each, own[each])

    def run(script: str, *arguments: object) -> str:
        done = invoke(script, "--smoke", *arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    found, _ = measured(HERE[name], tmp_path, run)
    if name == "model":
        assert 0 < found["density"]["mean"] < 0.03
        assert found["errors"]["twell"] <= 2 * found["errors"]["dense"] + 1e-3
    if name == "generate":
        for each in found["results"]:
            assert 0 < each["errors"]["twell eager"] < 2 * each["errors"]["dense eager"] < 0.1
            for narrow in ("twell compiled FP8", "dense FP8 all linear"):
                assert each["errors"]["twell eager"] < each["errors"][narrow] < 0.3


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_smoke(name: str, tmp_path: Path) -> None:
    if name == "tensor_parallel" and torch.cuda.device_count() < 2:
        pytest.skip("there are no two GPUs")
    found, page = measured(SMOKES[name], tmp_path)
    if name == "layers":
        assert [each["layer"] for each in found["results"]] == [0, 1, 2, 3] * 2
        for each in found["results"]:
            # The draw is that of the layer: about as many fire as in training; one token may be far from the mean.
            if each["tokens"] > 1:
                assert 0.5 < each["mean_nonzeros"] / (5632 * [0.0269, 0.0125, 0.0054, 0.0088][each["layer"]]) < 2
        assert [each["tokens"] for each in found["together"]] == [1, 40] and "All layers together" in page
    if name == "model":
        assert 0 < found["density"]["mean"] < 0.05 and found["errors"]["twell"] < 0.1
    if name == "generate":
        answers = found["results"][1]["answers"]
        ours = {"twell eager", *(f"twell compiled{each}" for each in ("", " FP8", " FP8 cache", " FP8 FP8 cache"))}
        assert set(answers) == ours and all(each["graph"] for each in answers.values())


@pytest.mark.gpu
@pytest.mark.tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_smoke_in_tensorrt(name: str, tmp_path: Path) -> None:
    if name == "in_torch_tensorrt":
        pytest.importorskip("torch_tensorrt")
    found, _ = measured(PLANS[name], tmp_path)
    if name == "engine":
        assert all(set(each["layers"]) == {"plan dense", "plan twell", "plan twell FP8"} for each in found["results"])
        assert sorted(path.name for path in (tmp_path / "plans").glob("*.plan")) == [
            "dense.plan",
            "twell-FP8.plan",
            "twell.plan",
        ]
    if name == "generate":
        assert all(stats["graph"] for stats in found["results"][1]["answers"].values())


@pytest.mark.gpu
@pytest.mark.slow
def test_all_of_them(tmp_path: Path) -> None:
    smoke("gpu.py", "--out", tmp_path)
    written = sorted(path.name.partition("-")[0] + path.suffix for path in tmp_path.iterdir())
    assert written == [f"{name}{suffix}" for name in ("layers", "model", "suite") for suffix in (".json", ".md")]
    for path in tmp_path.glob("*.json"):
        assert report(path)["results"]
        assert path.with_suffix(".md").read_text().count("\n|") > 2


@pytest.mark.gpu
@pytest.mark.slow
def test_train_step(tmp_path: Path) -> None:
    page = smoke("train.py", "--json", tmp_path / "r.json")
    results = report(tmp_path / "r.json")["results"]
    assert [each["contestant"] for each in results] == [
        f"{form} {how}" for how in ("compiled", "eager") for form in ("dense", "twell")
    ]
    for each in results:
        assert each["tokens_per_second"] > 0 and each["peak_bytes"] > 0 and each["joules_per_token"] >= 0
        assert f"\n| {each['contestant']} | " in page


@pytest.mark.gpu
@pytest.mark.slow
def test_train_block(tmp_path: Path) -> None:
    page = smoke("train.py", "--json", tmp_path / "r.json", commands={"train.py": ("block",)})
    found = report(tmp_path / "r.json")
    assert [(each["tokens"], each["variant"]) for each in found["results"]] == [
        *((2048, "gated"), (2048, "plain"), (2048, "gated"))
    ]
    assert not found["faults"] and "\n| 2048 | equal, plain | " in page
    assert all({"dense eager", "dense compiled", "twell"} == set(each["times"]) for each in found["results"])


@pytest.mark.gpu
@pytest.mark.slow
def test_trained(tmp_path: Path) -> None:
    page = smoke("trained.py", "--json", tmp_path / "r.json")
    commands = report(tmp_path / "r.json")["commands"]
    assert {"profile", "compile, pruned", "check, pruned", "bench, calibrated", "bench, pruned"} <= set(commands)
    assert all(each["status"] == 0 and f"`{each['command']}`" in page for each in commands.values())
    assert ("--backend tensorrt" in page) == (importlib.util.find_spec("tensorrt") is not None)
