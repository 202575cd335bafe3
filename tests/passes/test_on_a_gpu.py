"""Models whose weights lie on a GPU: all passes make the same of them as on a CPU, and leave everything there."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models import D_FF, D_MODEL, Gated, Plain, Residual, Written, export
from twellc.export.onnx_export import export_onnx
from twellc.passes.block_profile import BlockProfile, Calibration, shapes
from twellc.passes.pipeline import PassOptions, Rewritten, run_passes
from twellc.passes.report import Choice

pytestmark = pytest.mark.gpu


def packed() -> nn.Module:
    """A packed gate and up, stored the other way round, and a scaled down projection."""

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = (x @ self.both).chunk(2, -1)
        return nn.functional.linear(torch.relu(gate) * up, self.down * self.scale)

    return Written(
        forward, both=torch.randn(D_MODEL, 2 * D_FF), down=torch.randn(D_MODEL, D_FF), scale=torch.rand(D_MODEL, 1)
    )


def convolutions() -> nn.Module:
    """1 x 1 convolutions with a batch norm behind the ReLU, and a constant of the code."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.norm(torch.maximum(self.up(x.transpose(1, 2)), torch.tensor(0.0)))
        return self.down(hidden).transpose(1, 2)

    norm = nn.BatchNorm1d(D_FF)
    with torch.no_grad():
        norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return Written(forward, up=nn.Conv1d(D_MODEL, D_FF, 1), norm=norm, down=nn.Conv1d(D_FF, D_MODEL, 1))


def unable() -> nn.Module:
    """Some neurons cannot fire, which takes a look at the values of weights and biases."""
    module = Gated(biases="gud")
    with torch.no_grad():
        module.gate.weight[8:24] = 0
        module.gate.bias[8:24] = -1
    return Residual(module)


def attention() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return self.ffn(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])  # type: ignore[no-any-return]

    return Written(forward, qkv=nn.Linear(D_MODEL, 3 * D_MODEL), ffn=Plain(biases="ud"))


@pytest.mark.parametrize("build", [packed, convolutions, unable, attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prune", [False, True])
def test_as_on_a_cpu(build: Callable[[], nn.Module], dtype: torch.dtype, prune: bool) -> None:
    """Hot neurons are moved, and some are removed; the ONNX graph is the same."""
    module = build().to(dtype).eval().requires_grad_(False)
    x = torch.randn(2, 5, D_MODEL, dtype=dtype)
    counts = {name: np.arange(np.prod(shape)).reshape(shape) % 7 for name, shape in shapes(D_FF).items()}
    found = rewritten(module, x, None, 0).layers
    blocks = {layer.module: BlockProfile(layer.module, layer.variant, "relu", **counts) for layer in found}
    known = Calibration(blocks, prune_dead=prune)
    ours, theirs = (rewritten(copy.deepcopy(module).to(device), x.to(device), known, 8) for device in ("cuda", "cpu"))
    assert ours.layers == theirs.layers and any(layer.decision == "twell" for layer in ours.layers)
    for program in (ours.dense, ours.program):
        assert {tensor.device.type for tensor in program.state_dict.values()} == {"cuda"}
    assert ours.program.state_dict.keys() == theirs.program.state_dict.keys()
    for name, tensor in ours.program.state_dict.items():
        assert torch.equal(tensor.cpu(), theirs.program.state_dict[name]), name
    graphs = [export_onnx(each.program, ["x"], ["y"], {}) for each in (ours, theirs)]
    assert [node.op_type for node in graphs[0].graph] == [node.op_type for node in graphs[1].graph]


def rewritten(module: nn.Module, x: Tensor, known: Calibration | None, hot: int) -> Rewritten:
    choice = Choice("twell", "matches", hot, 8, None)
    options = PassOptions(
        torch.bfloat16, "all", attention=("matmul",), calibration=known, advise=lambda block, neurons: choice
    )
    return run_passes(export(module, x), options)
