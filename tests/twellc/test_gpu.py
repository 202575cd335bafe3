"""Whole models with `twell` ops on a GPU, against float64 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from twellc.checks.accuracy import measure
from twellc.checks.checking import check
from twellc.compiling.translate import translate_to_file
from twellc.loaders.model import load_model
from twellc.options.commands import CheckOptions, CompileOptions
from twellc.passes.graph.execution import Runner
from twellc.passes.pipeline import run_passes
from twellc.passes.precision import widen

EXAMPLE = Path(__file__).parents[2] / "examples" / "bytelm"
TEXT = b'def main(arguments: list[str]) -> int:\n    """Parse the command line."""\n    return 0\n'


def on_gpu(program: ExportedProgram, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    moved = move_to_device_pass(program, "cuda")
    return Runner(moved)({name: tensor.cuda() for name, tensor in inputs.items()})[0].cpu()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "compression"), [(torch.bfloat16, 8), (torch.bfloat16, 1), (torch.float16, 4)])
def test_example_model(dtype: torch.dtype, compression: int) -> None:
    model = load_model(EXAMPLE, trust_model=False)
    result = run_passes(model.program, dtype, "all", compression)
    assert [layer.decision for layer in result.layers] == ["twell"] * 4
    ids = torch.frombuffer(bytearray(TEXT * 3), dtype=torch.uint8).long().repeat(2, 1)
    inputs = {"input_ids": ids}
    # One token alone, too. Moving a program to the GPU moves its weights: the truth comes first.
    one = {name: tensor[:1, :1] for name, tensor in inputs.items()}
    wide = widen(result.dense)
    truth, truth_of_one = Runner(wide)(inputs)[0], Runner(wide)(one)[0]
    plain, ours = on_gpu(result.dense, inputs), on_gpu(result.program, inputs)
    accuracy = measure("logits", ours, plain, truth, language_model=True)
    assert accuracy.within, accuracy
    assert torch.equal(ours, on_gpu(result.program, inputs))
    accuracy = measure(
        "logits", on_gpu(result.program, one), on_gpu(result.dense, one), truth_of_one, language_model=True
    )
    assert accuracy.within, accuracy


@pytest.mark.gpu
def test_check_runs_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, text = tmp_path / "bytelm.onnx", tmp_path / "text.py"
    text.write_bytes(TEXT * 8)
    translate_to_file(CompileOptions(model=EXAMPLE, backend="none"), graph, lambda step: None)
    options = CheckOptions(EXAMPLE, graph, text=text)
    result = check(options, lambda step: None)
    assert "its plugin nodes by the CUDA kernels on NVIDIA" in result.executed
    assert result.within, result
    for each in (*result.outputs, *(block.accuracy for block in result.blocks)):
        assert each.separation is not None
        assert each.separation.rewrite.relative < 1e-13
        assert each.separation.kernels_within
    # The kernels add in another order than the CPU implementation does: their last bits tell them apart.
    monkeypatch.setattr("twellc.checks.evaluator.runs_kernels", lambda: False)
    other = check(options, lambda step: None)
    for ours, cpu in zip(result.blocks, other.blocks, strict=True):
        assert ours.accuracy.plain == cpu.accuracy.plain
        assert ours.accuracy.candidate != cpu.accuracy.candidate
