"""Ranks in processes of their own, which torchrun starts: programs of twellc, and models that transformers shards."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models
from tests.conftest import ROOT
from tests.processes import captured, environment
from tests.runtimes import install
from tests.tolerance import assert_as_accurate
from tests.twellc.eager.test_optimize import tokens
from tests.twellc.ranks_child import LENGTHS

pytestmark = pytest.mark.slow


def torchrun(what: str, model: Path, folder: Path, *modules: Path, device: str = "cpu") -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests" / "twellc" / "ranks_child.py"), what, str(model), str(folder), device]
    variables = environment(ROOT, *modules, OMP_NUM_THREADS="1")
    done = captured(command, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return found


def truth(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the logits of a tiny Llama whose weights were rounded to bfloat16, in float64."""
    wide = model.to(torch.bfloat16).double()
    with torch.no_grad():
        return [wide(tokens(2, length)).logits for length in LENGTHS]


def test_programs_of_ranks(llama: Path, tmp_path: Path) -> None:
    found = torchrun("program", llama, tmp_path)
    assert found["notes"] == []
    for ours, single, dense, exact in zip(
        found["ranks"], found["single"], found["dense"], truth(models.llama()), strict=True
    ):
        assert_as_accurate(ours, dense, exact)
        assert_as_accurate(single, dense, exact)


@pytest.mark.parametrize("biases", [False, True])
def test_optimize_a_sharded_model(request: pytest.FixtureRequest, tmp_path: Path, biases: bool) -> None:
    """A bias of the down projection counts once."""
    accelerate = install(request, "accelerate-1.15.0", "accelerate==1.15.0")
    model = models.save(models.llama(mlp_bias=biases), tmp_path / "llama")
    assert_optimized(torchrun("optimize", model, tmp_path, accelerate), biases)


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [False, True])
def test_optimize_a_sharded_model_on_gpus(tmp_path: Path, biases: bool) -> None:
    pytest.importorskip("accelerate")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = models.save(models.llama(mlp_bias=biases), tmp_path / "llama")
    assert_optimized(torchrun("optimize", model, tmp_path, device="cuda"), biases)


def assert_optimized(found: dict[str, Any], biases: bool) -> None:
    """Check what a rank found of the sharded model before `twellc.optimize`, behind it, and restored."""
    assert found["counts"] == {"gated_mlp": 2}
    assert found["blocks"] == [(f"model.layers.{layer}.mlp", 160) for layer in range(2)]
    for before, after, restored, exact in zip(
        found["before"], found["after"], found["restored"], truth(models.llama(mlp_bias=biases)), strict=True
    ):
        assert_as_accurate(after, before, exact)
        assert not torch.equal(after, before)  # sums in float32 differ from products in bfloat16
        assert torch.equal(restored, before)
