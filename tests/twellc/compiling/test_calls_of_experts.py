"""A model that calls `torch.ops.twell.experts`: what it compiles to, and what is said of that."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import twellc
from tests.conftest import Cli
from twellc.plugins.experts_op import EXPERTS
from twellc.plugins.fp8 import E4M3

D_MODEL, D_FF, COUNT, TOP = 32, 16, 4, 2


class Layer(nn.Module):
    """A router and gated experts, whose matrices are views: gate and up of one tensor, down of a transposed one."""

    def __init__(self, *, fp8: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def drawn(*sizes: int) -> nn.Parameter:
            values = torch.randn(*sizes, generator=generator)
            return nn.Parameter(values.to(E4M3) if fp8 else values * 0.2, requires_grad=False)

        self.router = nn.Linear(D_MODEL, COUNT, bias=False)
        self.gate_up, self.down = drawn(COUNT, 2 * D_FF, D_MODEL), drawn(COUNT, D_MODEL, D_FF)
        self.scale = nn.Parameter(torch.rand(COUNT, 1, 1, generator=generator) / 3) if fp8 else None

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).float().softmax(-1).topk(TOP)
        gate, up = self.gate_up.chunk(2, 1)
        scales = {} if self.scale is None else dict.fromkeys(("gate_scale", "up_scale", "down_scale"), self.scale)
        y: Tensor = EXPERTS(x, up, gate, self.down.transpose(1, 2), ids, weights, "relu", **scales)
        return x + y


@pytest.mark.parametrize("fp8", [False, True])
def test_compile_and_check(fp8: bool, cli: Cli, tmp_path: Path) -> None:
    """In float32, which is lowered but for what the op has in float32."""
    archive, graph = tmp_path / "m.pt2", tmp_path / "m.onnx"
    x, dims = torch.randn(5, D_MODEL), ({0: Dim("tokens", max=512)},)
    torch.export.save(torch.export.export(Layer(fp8=fp8).eval(), (x,), dynamic_shapes=dims), archive)
    manifest = twellc.compile(archive, backend="none", onnx=graph)
    assert manifest.plugins.names == ["TwellExperts"]
    note = "1 call of torch.ops.twell.experts in the model: each is a plugin layer, and not listed"
    assert note in manifest.notes and note in twellc.inspect(archive).description.notes
    assert not any("dense throughout" in warning for warning in manifest.warnings)
    model = onnx.load(graph)
    types = {each.name: each.data_type for each in model.graph.initializer}
    (node,) = [each for each in model.graph.node if each.op_type == "TwellExperts"]
    matrix = onnx.TensorProto.FLOAT8E4M3FN if fp8 else onnx.TensorProto.BFLOAT16
    scales = [onnx.TensorProto.FLOAT] * 3 if fp8 else []
    # x, ids and weights alone are computed: nothing is left to do with constants at each call.
    assert [types.get(name) for name in node.input] == [None, *[matrix] * 3, None, None, *scales]
    shown = cli("inspect", graph).output
    assert f"TwellExperts, {'float8_e4m3fn' if fp8 else 'bfloat16'}, " in shown
    assert shown.count(f"[{COUNT}, {D_FF}, {D_MODEL}]") == 3
    assert twellc.check(archive, graph).within
