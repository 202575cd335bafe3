"""examples/finetune: a dense model becomes a sparse one that `twellc compile` takes, and what the script refuses."""

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import models
from tests.conftest import ROOT, Cli
from tests.processes import captured, environment
from twellc.firing.profile import FiringProfile
from twellc.training.log import TrainingLog

Finetune = Callable[..., click.testing.Result]
TEXT = "def add(a, b):\n    return a + b\n" * 120


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("finetune", ROOT / "examples" / "finetune" / "finetune.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["finetune"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def finetune(script: Any, tmp_path: Path) -> Finetune:
    """Return a function that runs the script on a text, for a few steps on a CPU."""
    pytest.importorskip("accelerate")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def run(*arguments: object, **options: object) -> click.testing.Result:
        given = {"text": text, "output": tmp_path / "out", "device": "cpu", "lr": 1e-3, "sequence": 16, "batch": 4}
        given |= {"steps": 6, "log-every": 2, "save-every": 3, **options}
        named = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        with torch.random.fork_rng():
            result = click.testing.CliRunner().invoke(script.main, [*named, *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny SiLU Llama that reads bytes."""
    model = models.llama("silu", vocab_size=256, bos_token_id=0, eos_token_id=0)
    return models.save(model, tmp_path_factory.mktemp("finetune") / "dense", torch.float32)


def refused(result: click.testing.Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.count("Error: ") == 1 and "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_the_whole_way(finetune: Finetune, dense: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.txt"
    held_out.write_text("def sub(a, b):\n    return a - b\n" * 20)
    out = tmp_path / "out"
    options: dict[str, object] = {"model": dense, "blend": 2, "held_out": held_out, "profile_steps": 3, "l1": 1e-3}
    done = finetune("--reinitialise", "--checkpointing", accumulate=2, **options)
    assert done.exit_code == 0, done.output
    assert f"twellc compile {out} -o MODEL.plan --firing-profile {out / 'firing.profile'}" in done.stdout
    configuration = json.loads((out / "config.json").read_text())
    assert configuration["hidden_act"] == "relu" and configuration["use_cache"] is True
    log = TrainingLog.read(out / "training.jsonl")
    assert [each.step for each in log.steps] == [2, 3, 4, 6] and log.model == "dense"
    assert [each.relu for each in log.steps] == [0.5, 1.0, 1.0, 1.0]
    assert log.steps[0].density == [1, 1] and all(0 < share < 0.9 for share in log.steps[-1].density)
    assert [each.tokens for each in log.steps] == [steps * 2 * 4 * 16 for steps in (2, 1, 1, 2)]
    assert all(4 < each.loss < 8 and each.l1 > 1 for each in log.steps)
    assert [each.step for each in log.steps if each.eval_loss is not None and 4 < each.eval_loss < 8] == [3, 6]
    profile = FiringProfile.read(out / "firing.profile")
    assert (profile.tokens, list(profile.blocks)) == (3 * 2 * 4 * 16, ["model.layers.0.mlp", "model.layers.1.mlp"])
    refused(finetune(**options), "the folder is not empty", "--resume")


@pytest.mark.slow
def test_going_on_changes_nothing(finetune: Finetune, dense: Path, cli: Cli, tmp_path: Path) -> None:
    """A run that is broken off, here on the way to ReLU, and goes on gives the weights of one that is not."""
    for name, steps in (("whole", (6,)), ("broken", (3, 6))):
        for count in steps:
            given = ["--reinitialise", *(["--resume"] if count == 6 and name == "broken" else [])]
            # The learning rate depends on the number of steps: it is constant here from the first one on.
            options: dict[str, object] = {"model": dense, "output": tmp_path / name, "steps": count, "blend": 5}
            done = finetune(*given, "--constant", **options, warm_up=0, l1_warm_up=0, profile_steps=3)
            assert done.exit_code == 0, done.output
    whole, graph = tmp_path / "whole", tmp_path / "m.onnx"
    calibrated = ("--firing-profile", whole / "firing.profile")
    made = cli("compile", whole, "--backend", "none", "--onnx", graph, *calibrated)
    assert made.exit_code == 0 and "2 of 2 feed-forward blocks rewritten" in made.stdout, made.output
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken"))
    assert one == other
    assert [each.relu for each in TrainingLog.read(tmp_path / "broken" / "training.jsonl").steps] == [0.2, 0.4, 0.6, 1]


def test_token_ids_are_taken_as_they_are(script: Any, dense: Path, tmp_path: Path) -> None:
    """Of all kinds of file; a tokenizer's special tokens stand around texts only."""
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    np.save(tmp_path / "b.npy", np.array([7, 8], np.uint16))
    (tmp_path / "c.jsonl").write_text('{"input_ids": [9, 9]}\n{"text": "ab"}\n')
    files = [tmp_path / name for name in ("a.npy", "b.npy", "c.jsonl")]
    found = script.read_texts("--text", files, dense, 256, 4, "text")
    assert found.tokens[:10].tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 9] and len(found.tokens) > 11


# accelerate shards on GPUs alone: this lets it do so on a CPU.
SHARDED = """
import runpy, sys
from accelerate.state import DistributedType, PartialState
begin = PartialState.__init__
def begin_sharded(state, *arguments, **named):
    begin(state, *arguments, **named)
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
PartialState.__init__ = begin_sharded
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_processes_that_share_the_weights(dense: Path, tmp_path: Path) -> None:
    """With FSDP2, as `accelerate launch` begins it, they save the whole model, which is that of one process."""
    pytest.importorskip("accelerate")
    child, text = tmp_path / "child.py", tmp_path / "text.txt"
    child.write_text(SHARDED)
    text.write_text(TEXT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    script = ROOT / "examples" / "finetune" / "finetune.py"
    options = ["--model", dense, "--text", text, "--steps", "3", "--sequence", "16", "--device", "cpu", "--lr", "1e-3"]
    found = []
    for number, batch, before in ((1, 4, ()), (2, 2, (child,))):
        out = tmp_path / f"by-{number}"
        given = [*launcher, str(number), *before, script, *options, "--batch", str(batch), "--output", out]
        sharded = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} if before else {}
        done = captured(given, env=environment(OMP_NUM_THREADS="1", **sharded))
        assert done.returncode == 0, done.stderr
        found.append(load_file(out / "model.safetensors"))
    alone, shared = found
    assert alone.keys() == shared.keys()
    for name, weight in alone.items():
        torch.testing.assert_close(shared[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_a_relu_model_stays_one(finetune: Finetune, bytelm: Path, tmp_path: Path) -> None:
    done = finetune(model=bytelm, steps=2, save_every=2)
    assert done.exit_code == 0, done.output
    log = TrainingLog.read(tmp_path / "out" / "training.jsonl")
    assert log.steps[-1].relu == 1 and max(log.steps[-1].density) < 0.1 and log.steps[-1].loss < 3


def test_refuses(finetune: Finetune, dense: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("a")
    refused(finetune(model=dense, text=empty), "is less than one sequence", "2 tokens", "--sequence 16")
    refused(finetune(model=dense, held_out=empty), "--held-out", "is less than one sequence")
    (tmp_path / "nothing.txt").write_text("")
    refused(finetune(model=dense, text=tmp_path / "nothing.txt"), "--text", "nothing.txt: the file is empty")
    np.save(tmp_path / "ids.npy", np.array([[1, 256]]))
    refused(finetune(model=dense, held_out=tmp_path / "ids.npy"), "--held-out", "token ids that the model has not")
    np.savez(tmp_path / "ids.npz", a=np.zeros(4))
    refused(finetune(model=dense, text=tmp_path / "ids.npz"), "holds arrays", "texts, or token ids in an .npy file")
    for rate in ("nan", "inf"):
        refused(finetune(model=dense, lr=rate), "--lr: is not finite")
    refused(finetune(model=tmp_path / "none"), "is not a Hugging Face folder")
    cut = shutil.copytree(dense, tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:2000])
    refused(finetune(model=cut.parent), "transformers cannot load it")
    weights = load_file(dense / "model.safetensors")
    save_file({name: weights[name] for name in weights if "up_proj" not in name}, cut, metadata={"format": "pt"})
    refused(finetune(model=cut.parent), "weights are missing; got model.layers.0.mlp.up_proj.weight")
    config = transformers.BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=4, bos_token_id=0)
    bloom = models.save(transformers.BloomForCausalLM(config), tmp_path / "bloom", torch.float32)
    refused(finetune(model=bloom), "BloomForCausalLM", "its configuration cannot say")
    assert not (tmp_path / "out").exists()
    (tmp_path / "link").symlink_to(dense)
    refused(finetune("--overwrite", model=dense, output=tmp_path / "link"), "--output", "is the folder of the model")
    (tmp_path / "file").write_text("")
    refused(finetune(model=dense, output=tmp_path / "file"), "is a file")


@pytest.mark.slow
def test_another_model_and_beginning_anew(finetune: Finetune, dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert finetune(model=dense, steps=3).exit_code == 0
    other = models.llama("silu", vocab_size=256, bos_token_id=0, eos_token_id=0)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    path = models.save(other, tmp_path / "other", torch.float32)
    before = {each: each.read_bytes() for each in out.rglob("*") if each.is_file()}
    refused(finetune("--resume", model=path), "the run there began with another model", "dense, SHA-256")
    assert {each: each.read_bytes() for each in out.rglob("*") if each.is_file()} == before
    # Anew: the checkpoints of the first run are gone, so that nothing goes on from them.
    assert finetune("--overwrite", model=path, steps=2, save_every=2).exit_code == 0
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint-2"]


@pytest.mark.slow
def test_a_loss_that_becomes_nan(
    finetune: Finetune, dense: Path, script: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """After a checkpoint, which stays as it was, and from which training goes on."""
    compute = script.SparseTrainer.compute_loss

    def breaks(self: Any, *arguments: Any, **named: Any) -> Any:
        loss = compute(self, *arguments, **named)
        if self.state.global_step == 4:
            self._sparsity._losses[-1] = loss.detach() * math.nan
            return loss * math.nan
        return loss

    monkeypatch.setattr(script.SparseTrainer, "compute_loss", breaks)
    refused(finetune(model=dense), "step 6: the loss is NaN or infinite", "The last checkpoint is as it was")
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert saved == ["checkpoint-3"]
    monkeypatch.undo()
    assert finetune("--resume", model=dense).exit_code == 0
    # Of the checkpoint, too, so that a resume has what was before it.
    assert [each.step for each in TrainingLog.read(tmp_path / "out" / "training.jsonl").steps] == [2, 3, 4, 6]


def test_without_accelerate(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    given = ["--model", str(tmp_path), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    result = click.testing.CliRunner().invoke(script.main, given)
    assert result.exit_code == 2
    assert "accelerate is not installed. Install it: pip install 'twellc[train]'." in result.stderr
    assert list(tmp_path.iterdir()) == []
