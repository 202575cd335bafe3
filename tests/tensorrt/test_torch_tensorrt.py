"""Engines of Torch-TensorRT with the plugins in them: built, run, saved and loaded."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twellc
import twellc.torch_tensorrt
from tests.models import Gated, Plain, export
from tests.processes import captured
from tests.tolerance import assert_as_accurate
from twellc.plugins.ops import GATED_MLP, MLP
from twellc.torch_tensorrt import converter

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("torch_tensorrt")]

WIDEST = 96
ACTIVATIONS: dict[str, Any] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "fatrelu": lambda z: nn.functional.threshold(z, 0.25, 0.0),
}


@pytest.fixture
def torch_tensorrt() -> Any:
    module = pytest.importorskip("torch_tensorrt", reason="Torch-TensorRT is not installed")
    twellc.torch_tensorrt.register()
    return module


@pytest.fixture
def calls(torch_tensorrt: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers for which a plugin was made."""
    made: list[str] = []
    make = converter.make_plugin

    def count(name: str, *rest: Any) -> Any:
        made.append(name)
        return make(name, *rest)

    monkeypatch.setattr(converter, "make_plugin", count)
    return made


class Stack(nn.Module):
    """x + block(norm(x) + 1), for each block: the sum is the block's residual, and it reads something else."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(nn.functional.layer_norm(x, x.shape[-1:]) + 1)
        return x


OPTIONS = {"use_python_runtime": True, "min_block_size": 1, "use_explicit_typing": True, "immutable_weights": True}
# Else torch.compile's backend runs in torch what it fails to build.
STRICT = {**OPTIONS, "pass_through_build_failures": True}


@torch.no_grad()
def assert_right(run: Any, module: nn.Module, rows: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    plain, truth = module(x), module.double()(x.double())
    module.to(dtype)
    assert_as_accurate(run(x).cpu(), plain.cpu(), truth.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_rewritten_program_runs(torch_tensorrt: Any, calls: list[str], activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function = ACTIVATIONS[activation]
    module = Stack(
        Gated(function, biases="gud", d_model=72, d_ff=1000, d_out=72),
        Plain(function, biases="ud", d_model=72, d_ff=520, d_out=72),
        Gated(function, d_model=72, d_ff=256, d_out=72), Plain(function, d_model=72, d_ff=256, d_out=72),
    ).cuda().to(dtype)  # fmt: skip
    rows = {0: torch.export.Dim("rows", min=1, max=WIDEST)}
    program = export(module, torch.randn(4, 72, device="cuda", dtype=dtype), dynamic=(rows,))
    rewritten = twellc.rewrite(program, layers="all").program
    assert [node.target for node in rewritten.graph.nodes if node.target in (GATED_MLP, MLP)] == 2 * [GATED_MLP, MLP]
    shapes = {"min_shape": (1, 72), "opt_shape": (16, 72), "max_shape": (WIDEST, 72)}
    compiled = torch_tensorrt.dynamo.compile(rewritten, inputs=[torch_tensorrt.Input(**shapes, dtype=dtype)], **OPTIONS)
    assert len(calls) == 4
    for count in (1, 7, WIDEST):
        assert_right(compiled, module, count, 72, dtype)


def test_an_optimized_module_runs(torch_tensorrt: Any, calls: list[str]) -> None:
    torch.manual_seed(0)
    module = (
        Stack(Gated(d_model=64, d_ff=320, d_out=64), Gated(d_model=64, d_ff=320, d_out=64)).cuda().bfloat16().eval()
    )
    dense = Stack(Gated(d_model=64, d_ff=320, d_out=64), Gated(d_model=64, d_ff=320, d_out=64)).cuda().bfloat16().eval()
    dense.load_state_dict(module.state_dict())
    with torch.no_grad():
        run = torch.compile(twellc.optimize(module), backend="torch_tensorrt", options=STRICT)
        assert_right(run, dense, 16, 64, torch.bfloat16)
    assert len(calls) == 2


# Opens an engine in a process of its own: python -c LOAD engine.pt y.pt [register]
LOAD = """
import sys
import torch
import torch_tensorrt
import twellc.torch_tensorrt
from torch_tensorrt.dynamo.runtime import PythonTorchTensorRTModule
if sys.argv[3:]:
    twellc.torch_tensorrt.register()
saved = torch.load(sys.argv[1], weights_only=False)
engine = PythonTorchTensorRTModule(
    saved["engine"], saved["inputs"], saved["outputs"], settings=torch_tensorrt.dynamo.CompilationSettings()
)
torch.save(engine(saved["x"].cuda()).cpu(), sys.argv[2])
"""


def test_an_engine_is_saved_and_loaded(torch_tensorrt: Any, calls: list[str], tmp_path: Path) -> None:
    """The Python runtime keeps no files of its own: what its module holds of the engine is enough to make it again."""
    torch.manual_seed(0)
    module = Stack(Gated(d_model=64, d_ff=320, d_out=64)).cuda().bfloat16().eval()
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    rewritten = twellc.rewrite(export(module, x), layers="all").program
    compiled = torch_tensorrt.dynamo.compile(rewritten, inputs=[x], **OPTIONS)
    assert len(calls) == 1
    (engine,) = (each for each in compiled.modules() if hasattr(each, "serialized_engine"))
    names = {"inputs": engine.input_names, "outputs": engine.output_names}
    torch.save({"engine": engine.serialized_engine, **names, "x": x.cpu()}, tmp_path / "engine.pt")

    def load(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", LOAD, str(tmp_path / "engine.pt"), str(tmp_path / "y.pt"), *arguments]
        return captured(command)

    alone = load()
    assert alone.returncode != 0 and "Cannot find plugin" in alone.stdout + alone.stderr
    registered = load("register")
    assert registered.returncode == 0, registered.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), compiled(x).cpu())
