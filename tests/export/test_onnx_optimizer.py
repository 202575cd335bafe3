"""No number of a model changes on its way to ONNX."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.numpy_helper
import pytest
import torch
import transformers
from torch import Tensor, nn

from tests import models
from tests.conftest import Cli
from tests.models import Gated, Residual, canonical, rewrite
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, save_onnx

Case = tuple[Callable[[Any, Any], Any], float]


class Operations(nn.Module):
    """Each `x operation number`, the number a Python scalar, or a tensor of no dimension or of one."""

    def __init__(self, cases: list[Case], form: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.operations = [operation for operation, _ in cases]
        self.numbers: list[Any] = [number for _, number in cases]
        if form != "scalar":
            shape = () if form == "tensor" else (1,)
            for index, number in enumerate(self.numbers):
                self.register_buffer(f"number_{index}", torch.full(shape, number, dtype=dtype))
            self.numbers = list(self.buffers())

    def forward(self, x: Tensor) -> list[Tensor]:
        return [operation(x, number) for operation, number in zip(self.operations, self.numbers, strict=True)]


def exported(module: nn.Module, x: Tensor, path: Path, outputs: int = 1) -> onnx.ModelProto:
    names = [f"y{index}" for index in range(outputs)]
    save_onnx(export_onnx(canonical(module, x), ["x"], names, {}), path)
    return onnx.load(path)


SUMMANDS = (1e-5, 1e-6, 1e-8, 1e-9, 1e-10, 1e-12)
FACTORS = (1 + 1e-6, 1 - 1e-6, 1 + 1.2e-7, 1 - 6e-8)
SMALL: list[Case] = [(operation, number) for operation in (operator.add, operator.sub) for number in SUMMANDS]
SMALL += [(operation, number) for operation in (operator.mul, operator.truediv) for number in FACTORS]
NEUTRAL: list[Case] = [(operator.add, 0.0), (operator.sub, 0.0), (operator.mul, 1.0), (operator.truediv, 1.0)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", ["scalar", "tensor", "vector"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_differences_stay(dtype: torch.dtype, form: str, tmp_path: Path) -> None:
    """Bit by bit what torch computes with the number as the dtype has it, also beside zeros."""
    x = torch.cat([torch.zeros(3), torch.randn(40), torch.full((2,), 1e-9)]).to(dtype)
    model = exported(Operations(SMALL, form, dtype), x, tmp_path / "m.onnx", len(SMALL))
    for (operation, number), found in zip(SMALL, OnnxEvaluator(tmp_path / "m.onnx").run({"x": x}), strict=True):
        assert torch.equal(found, operation(x, torch.tensor(number, dtype=dtype))), (operation, number)
    count = len([node for node in model.graph.node if node.op_type in ("Add", "Sub", "Mul", "Div")])
    effective = [number for _, number in SMALL if torch.tensor(number, dtype=dtype).item() not in (0.0, 1.0)]
    assert len(effective) == (len(SMALL) if dtype == torch.float32 else 2 * len(SUMMANDS))
    assert count >= len(effective)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_does_nothing_goes(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(4).to(dtype)
    model = exported(Operations(NEUTRAL, "scalar", dtype), x, tmp_path / "m.onnx", len(NEUTRAL))
    assert {node.op_type for node in model.graph.node} <= {"Identity"}


@pytest.mark.parametrize("epsilon", [1e-5, 1e-8, 1e-12, 0.0])
def test_norms(epsilon: float, tmp_path: Path) -> None:
    """A row of zeros is zeros with any epsilon, and NaN with none, as torch has it."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)

    x = torch.cat([torch.zeros(1, 16), torch.randn(2, 16), torch.full((1, 16), 1e-7)]).bfloat16()
    exported(Norm(), x, tmp_path / "m.onnx")
    (found,) = OnnxEvaluator(tmp_path / "m.onnx").run({"x": x})
    assert bool(found[0].isnan().all()) == (epsilon == 0.0)
    torch.testing.assert_close(found, Norm()(x), rtol=2**-7, atol=0, equal_nan=True)


def test_weights_are_initializers_once(tmp_path: Path) -> None:
    block = Residual(Gated(biases="gud")).bfloat16()
    program = rewrite(canonical(nn.Sequential(block, block), torch.randn(5, 16).bfloat16()))
    save_onnx(export_onnx(program, ["x"], ["y"], {}), tmp_path / "m.onnx")
    graph = onnx.load(tmp_path / "m.onnx").graph
    matrices = [onnx.numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer if len(tensor.dims) == 2]
    assert len(matrices) == len(set(matrices)) == 3
    assert not [node for node in graph.node if node.op_type in ("Constant", "Identity")]


@pytest.mark.slow
def test_helium_with_a_padding_token(cli: Cli, tmp_path: Path) -> None:
    """Its norms have an epsilon of 1e-8, and the embedding of padding is a row of zeros."""
    options = {**models.SMALL, "head_dim": 8, "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 3}
    config = transformers.HeliumConfig(**options, rms_norm_eps=1e-8, hidden_act="relu", max_position_embeddings=64)
    model = transformers.HeliumForCausalLM(config)
    assert not model.model.embed_tokens.weight[3].any(), "a row of zeros"
    folder = models.save(model, tmp_path / "helium")
    path = tmp_path / "m.onnx"
    assert cli("compile", folder, "--backend", "none", "--onnx", path).exit_code == 0
    ids = torch.tensor([[5, 3, 3, 7], [3, 3, 3, 3]])
    (logits,) = OnnxEvaluator(path).run({"input_ids": ids})
    assert logits.isfinite().all()
    checked = cli("check", folder, path)
    assert checked.exit_code == 0, checked.output
