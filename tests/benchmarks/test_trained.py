"""benchmarks/trained.py with a tiny model on a CPU: it trains, and twellc's commands work on what it trained."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from tests.conftest import Cli
from tests.processes import environment


@pytest.mark.slow
@pytest.mark.usefixtures("remembered_models")
def test_the_whole_way(trained: Any, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.json"
    run, started = subprocess.run, []

    def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run one command as the script does, and the others, which it starts likewise, in this process."""
        if command[0] == "git":
            return run(command, **options)
        started.append(command[:4])
        if command[4] == "profile":
            return run(command, env=environment(), **options)
        result = cli(*command[4:])
        return subprocess.CompletedProcess(command, result.exit_code, result.stdout, result.stderr)

    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)  # other tests come after
    arguments = ["--smoke", "--device", "cpu", "--minutes", "0.03", "--json", str(results)]
    with torch.random.fork_rng():
        done = click.testing.CliRunner().invoke(trained.main, ["--out", str(tmp_path / "out"), *arguments])
    assert done.exit_code == 0, done.output
    assert started == [[sys.executable, "-P", "-m", "twellc"]] * 5
    report = json.loads(results.read_text())
    assert report["training"]["steps"] > 0 and report["recipe"]["layers"] == 2
    planned = [name for name, _ in trained.plan_commands(tmp_path, trained.SMOKE, False, False)]
    assert list(report["commands"]) == planned and {"profile", "compile, pruned", "check, pruned"} <= set(planned)
    for name, each in report["commands"].items():
        assert each["status"] == 0, each
        assert str(tmp_path) not in each["command"]
        if name.startswith("compile"):
            assert [layer["decision"] for layer in each["found"]["layers"]], each
        if name.startswith("check"):
            assert each["found"]["within"] and each["found"]["text"]["tokens"] > 100
    page = results.with_suffix(".md").read_text()
    assert page == done.stdout
    assert "2 blocks twell" in page and "within tolerance; " in page


def test_training_leaves_an_ordinary_model(trained: Any) -> None:
    model = trained.make_model(trained.SMOKE)
    kinds, before = [type(module) for module in model.modules()], model.model.layers[0].mlp.gate_proj.weight.clone()
    data = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    with torch.random.fork_rng():
        done = trained.train(model, data, trained.SMOKE, 1e-9, compiled=False)
        assert done["steps"] == 0  # no time for one
        trained.train(model, data, trained.SMOKE, 0.5, compiled=False)
    assert [type(module) for module in model.modules()] == kinds
    assert not torch.equal(model.model.layers[0].mlp.gate_proj.weight, before)


def test_the_penalty_is_that_of_the_hidden_tensor(trained: Any) -> None:
    model, seen = trained.make_model(trained.SMOKE), []
    for layer in model.model.layers:
        layer.mlp.__class__ = trained.Penalised
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().sum(-1).mean()))
    _, penalty = trained.losses(model, torch.randint(0, 256, (2, 9)))
    torch.testing.assert_close(penalty, torch.stack(seen).mean())


def test_corpus(trained: Any, tmp_path: Path) -> None:
    data, held_out = trained.load_corpus(2_000_000)
    assert data[0] == 0 and 1_500_000 < len(data) + len(held_out) < 4_000_000
    assert 0.005 < len(held_out) / len(data) < 0.3
    text = trained.write_text(tmp_path / "text.txt", "a\0é\0é".encode(), 4).read_text()
    assert text == "aé"  # half a character is left out
