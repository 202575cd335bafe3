"""`twellc check` of models whose tensors lie on a GPU; without one these tests are skipped."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import twellc
from tests.models import Gated, Residual
from tests.twellc.checks.runs import graph_of
from tests.twellc.checks.test_not_finite import Squared
from twellc.checks.accuracy import OutputAccuracy

pytestmark = pytest.mark.gpu

IDS = torch.arange(12).reshape(2, 6)
SHAPES = ({0: Dim("batch", min=1, max=8), 1: Dim("tokens", min=1, max=64)},)


class Tokens(nn.Module):
    """A block between an embedding with places, which the program makes on its own device, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.ffn, self.head = nn.Embedding(96, 16), Residual(Gated(biases="gud")), nn.Linear(16, 96)
        self.register_buffer("places", torch.randn(64, 16))

    def forward(self, ids: Tensor) -> Tensor:
        places = self.places[torch.arange(ids.shape[1], device=ids.device)]
        return self.head(self.ffn(self.table(ids) + places))


def traced(module: nn.Module, *inputs: Tensor, shapes: Any = SHAPES) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module.eval(), inputs, dynamic_shapes=shapes)


def compiled(module: nn.Module, to: Path, *inputs: Tensor, shapes: Any = SHAPES, dtype: str | None = None) -> Path:
    """Compile a copy of the module on the CPU, so that only `check` sees the one on the GPU."""
    model, graph = to / "cpu.pt2", to / "m.onnx"
    torch.export.save(traced(copy.deepcopy(module).cpu(), *inputs, shapes=shapes), model)
    return graph_of(model, graph, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["module", "program", "archive"])
def test_check(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    module = Tokens().to(dtype).eval()
    graph = compiled(module, tmp_path, IDS)
    expected = twellc.check(tmp_path / "cpu.pt2", graph)
    module.cuda()
    ids = IDS.cuda()
    if kind == "module":
        found = twellc.check(module, graph, args=(ids,), dynamic_shapes=SHAPES)
    elif kind == "program":
        found = twellc.check(traced(module, ids), graph)
    else:
        torch.export.save(traced(module, ids), tmp_path / "gpu.pt2")
        found = twellc.check(tmp_path / "gpu.pt2", graph)
    assert found.within and expected.within
    assert len(found.blocks) == 1 and not found.blocks[0].diverges
    assert found.blocks[0].density == pytest.approx(expected.blocks[0].density, abs=0.01)
    (output,), (other,) = found.outputs, expected.outputs
    assert isinstance(output, OutputAccuracy) and isinstance(other, OutputAccuracy)
    assert output.compared == other.compared == output.elements
    assert output.plain.relative == pytest.approx(other.plain.relative, rel=0.5)
    assert output.separation is not None and output.separation.rewrite.relative < 1e-10
    assert all(parameter.is_cuda for parameter in module.parameters()), "the model is left where it was"


def test_a_wrong_candidate(tmp_path: Path) -> None:
    """A block of other weights is found on a GPU, too, and named."""
    module = Tokens().bfloat16().eval()
    graph = compiled(module, tmp_path, IDS)
    with torch.no_grad():
        module.ffn.ffn.down.weight.mul_(1.5)
    found = twellc.check(module.cuda(), graph, args=(IDS.cuda(),), dynamic_shapes=SHAPES)
    assert not found.within
    assert found.first_divergence == "ffn.ffn"


def test_a_plain_model_that_overflows(tmp_path: Path) -> None:
    """The plain model on the GPU does; where the kernels do not, they are right, and are said to be."""
    module, x = Squared().eval(), torch.randn(4, 64)
    shapes = ({0: Dim("n", min=1, max=64)},)
    graph = compiled(module, tmp_path, x, shapes=shapes, dtype="fp16")
    found = twellc.check(module.cuda(), graph, args=(x.cuda(),), dynamic_shapes=shapes)
    (output,) = found.outputs
    assert isinstance(output, OutputAccuracy)
    assert output.plain_stray == output.elements
    assert found.within == (output.stray == 0)
    assert found.within or "low_precision" in found.causes
