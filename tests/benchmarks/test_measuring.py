"""What the benchmarks measure, as far as a CPU can do it: all but recording, compiling, the kernels and the clock."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
import torch

from tests.twellc.benchmarking.conftest import no_gpu_needed
from twellc.benchmarking import contest, forms, plans

__all__ = ["no_gpu_needed"]

DENSE = ["dense eager", "dense compiled", "dense packed", "dense FP8"]
OURS = ["twell eager", "twell compiled"]


@pytest.fixture
def scripts(
    benchmark_module: Callable[[str], Any], no_gpu_needed: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Any]:
    """Return a function that imports a benchmark, which then does without a GPU."""
    monkeypatch.setattr(benchmark_module("harness"), "DEVICE", "cpu")
    monkeypatch.setattr(benchmark_module("draw"), "weight_sets", lambda *_: 2)
    return benchmark_module


def smoke(module: Any, folder: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run a script with --smoke in this process; return what it prints and writes."""
    with torch.random.fork_rng(devices=[]):
        done = click.testing.CliRunner().invoke(
            module.main, ["--smoke", "--json", str(folder / "r.json"), *arguments], catch_exceptions=False
        )
    assert done.exit_code == 0, done.output
    return done.stdout, json.loads((folder / "r.json").read_text())


def test_block(scripts: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = scripts("block")

    class Kernels:
        """What stands for the kernels."""

        def __init__(self, x: torch.Tensor, *_: Any) -> None:
            self._x = x

        def kernels(self) -> list[str]:
            return ["none"]

        def gate(self, w: Any) -> None:
            pass

        def mlp(self, w: Any) -> torch.Tensor:
            return w.block.dense(self._x)

    monkeypatch.setattr(block, "Twell", Kernels)
    page, report = smoke(block, tmp_path, "--density", "0.1")
    assert report["arguments"]["tokens"] == "1,40" and "json" not in report["arguments"]
    assert [each["tokens"] for each in report["results"]] == [1, 40]
    for each in report["results"]:
        assert list(each["times"]) == [*DENSE, "mlp", "cuBLAS gate", "gate"]
        assert each["errors"]["mlp"] <= 2 * each["errors"]["dense eager"] + 1e-3
        assert scripts("harness").row_of(block.COLUMNS, each) in page.splitlines()
    # A block that is wrong ends the run; what was measured before stays.
    monkeypatch.setattr(Kernels, "mlp", lambda self, w: torch.zeros_like(self._x))
    (tmp_path / "r.json").unlink()
    done = click.testing.CliRunner().invoke(block.main, ["--smoke", "--json", str(tmp_path / "r.json")])
    assert done.exit_code == 1 and "mlp is off by" in done.stderr and not (tmp_path / "r.json").exists()


def test_layers(scripts: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = scripts("layers")
    monkeypatch.setattr(layers, "_D_MODEL", 64)
    page, report = smoke(layers, tmp_path, "--tokens", "40")
    assert [(each["tokens"], each["layer"]) for each in report["results"]] == [(40, layer) for layer in range(4)]
    ours = ["as is", "split 512", "pruned", "pruned split 512"]
    for each in report["results"]:
        assert list(each["times"]) == [*DENSE, layers.PACKED_ALIVE, *ours]
        assert scripts("harness").row_of(layers.columns_of(each), each) in page.splitlines()
    assert page.endswith(layers.markdown(report["together"]) + "\n")


def test_fp8(scripts: Callable[[str], Any], tmp_path: Path) -> None:
    fp8 = scripts("fp8")
    page, report = smoke(fp8, tmp_path, "--tokens", "40", "--d-model", "64", "--d-ff", "5632", "--trained")
    assert [each["neurons"]["layer"] for each in report["results"]] == [0, 1, 2, 3]
    for each in report["results"]:
        assert list(each["times"]) == ["twell", "twell bf16", fp8.TENSORWISE, fp8.ROWWISE, fp8.PRUNED, fp8.HOT]
        assert each["width"] % 16 == 0 and each["width"] < 5632
        assert scripts("harness").row_of(fp8.COLUMNS, each) in page.splitlines()
    page, report = smoke(fp8, tmp_path, "--tokens", "1", "--density", "0.1")
    assert list(report["results"][0]["times"]) == ["twell", "twell bf16", fp8.TENSORWISE, fp8.ROWWISE]
    assert "\n| 10 % | 1 | 1000.0 | - | 999.0 | 998.0 | 997.0 | - | 1.00 | " in page


def test_linear(scripts: Callable[[str], Any], tmp_path: Path) -> None:
    linear = scripts("linear")
    page, report = smoke(linear, tmp_path, "--only", "twell")
    assert [(each["tokens"], each["norm"]) for each in report["results"]] == [
        *((1, "layer"), (20, "layer")),
        *((1, "none"), (20, "none")),
    ]
    assert all(list(each["times"]) == ["twell", "twell FP8"] for each in report["results"])
    assert "\n| 128 -> 384, layer | 20 | 1000.0 | 0 | 999.0 | 0 | - | - | - | - |\n" in page


@pytest.mark.slow
def test_model(scripts: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = scripts("model")
    for module, name in ((model, "record"), (scripts("harness"), "time_calls")):
        monkeypatch.setattr(module, name, getattr(contest, name))
    page, report = smoke(model, tmp_path, "--energy-seconds", "0")
    assert [each["setting"] for each in report["results"]] == ["prefill 2x64", "decode 2"]
    for each in report["results"]:
        assert {*DENSE, "twell eager", "twell compiled"} == set(each["times"])
        assert f"\n| {each['setting']} | " in page
    assert 0 < report["density"]["mean"] < 0.03
    assert report["errors"]["twell"] <= 2 * report["errors"]["dense"] + 1e-3


@pytest.mark.slow
def test_engine(scripts: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch and a plan at one shape; the plan is made up, but is added as every plan is."""
    engine, model = scripts("engine"), scripts("model")
    import transformers

    transformers.AttentionInterface.register(model.CAUSAL, model.causal_attention)
    llama = model.make_model(1, 64, 256, 0.1, "equal", vocabulary=96, heads=2)
    module = model.Logits(llama)
    llama.config.dtype = torch.bfloat16

    def prepare(plan: Any, inputs: dict[str, torch.Tensor], profile: int) -> Any:
        assert profile == 0
        execution = SimpleNamespace(outputs=[torch.empty(0)])

        def enqueue() -> None:
            execution.outputs = [module(inputs["input_ids"]) * plan.factor]

        execution.enqueue = enqueue
        return execution

    monkeypatch.setattr(plans, "prepare", prepare)
    monkeypatch.setattr(engine, "prepare", prepare)
    monkeypatch.setattr(engine, "inputs_of", lambda plan, ids: ({"input_ids": ids}, 0))
    monkeypatch.setattr(engine, "times_by_kind", lambda _: {"kinds_us": {}, "sum_us": 1.0})
    monkeypatch.setattr(forms, "takes_fp8", lambda block: False)
    factors = {"plan twell": 1.0, "plan twell FP8": 1.1, "plan dense": 2.0}
    opened = {label: SimpleNamespace(factor=factor) for label, factor in factors.items()}
    with torch.no_grad():
        result = engine.measure_shape(module, opened, (1, 8), 2, re.compile("plan|eager|twell").search)
    chosen = [f"torch {form}, {kind}" for kind in ("sdpa", "causal") for form in ("dense eager", *OURS)]
    assert list(result["times"]) == [*chosen, "plan twell", "plan twell FP8"]
    assert list(result["failed"]) == ["plan dense"] and "its result is off" in result["failed"]["plan dense"]
    assert list(result["layers"]) == ["plan twell", "plan twell FP8"]
    assert "| plan twell | " in engine.shape_table(result)


@pytest.mark.slow
def test_generate(scripts: Callable[[str], Any], tmp_path: Path) -> None:
    generate = scripts("generate")
    wanted = "dense eager|dense FP8 all linear|twell eager|twell compiled FP8"
    page, report = smoke(generate, tmp_path, "--only", wanted)
    assert [each["setting"] for each in report["results"]] == ["prefill", "decode-2"]
    for each in report["results"]:
        assert 0 < each["errors"]["twell eager"] < 2 * each["errors"]["dense eager"] < 0.1
        for narrow in ("twell compiled FP8", "dense FP8 all linear"):
            assert each["errors"]["twell eager"] < each["errors"][narrow] < 0.3
    stats = report["results"][1]["answers"]["twell eager"]
    assert stats["new_tokens"] == 2 * 64 and not stats["graph"]
    assert "| twell eager over the fastest dense form in bf16 | 1.00 | 1.00 |" in page
    assert (tmp_path / "r.md").read_text() in page
    assert (
        "there is no " in click.testing.CliRunner().invoke(generate.main, ["--smoke", "--only", "dense, twell"]).output
    )
