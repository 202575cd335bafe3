"""Plans with FP8 weights, in real TensorRT: against the torch ops, float64, and plans with 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.models import Gated, Plain, export
from tests.tensorrt.plans import compiled, run, same_bits, twellc
from twellc.checks.fp8 import Fp8Block
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.plan import build_plan
from twellc.export.runner import OpenPlan, open_plan
from twellc.export.shapes import ShapeRange
from twellc.export.tensorrt_host import Host
from twellc.passes.fp8 import Wish
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.plugins.block import Operands, call_of
from twellc.plugins.fp8 import E4M3, Fp8
from twellc.plugins.ops import VARIANT_OF, run_block

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("fp8")]

BF16 = torch.bfloat16
TOKENS = (1, 8, 65, 300, 2100)
D_MODEL, D_FF = 256, 1024


class Stored(nn.Module):
    """A block whose down projection is stored in E4M3, with a scale for each output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((D_MODEL, D_FF), (D_FF, D_MODEL)))
        for name in ("up", "down"):
            q, scale = Fp8.quantize(getattr(self, name).weight, "row")
            setattr(self, name, None)
            self.register_buffer(f"{name}_q", q)
            self.register_buffer(f"{name}_scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        up, down = ((getattr(self, f"{n}_q").float() * getattr(self, f"{n}_scale")).to(x.dtype) for n in ("up", "down"))
        return nn.functional.linear(torch.relu(nn.functional.linear(x, up)), down)


BLOCKS: dict[str, nn.Module] = {
    "gated": Gated(biases="gud", d_model=D_MODEL, d_ff=D_FF),
    "plain": Plain(d_model=D_MODEL, d_ff=D_FF),
    "stored": Stored(),
}


@dataclass
class Built:
    """A plan of one block, and the block as the torch op reads it."""

    plan: OpenPlan
    block: Fp8Block

    def operands(self, x: Tensor) -> Operands[Tensor]:
        return Operands(**{name: each.to(x.device) for name, each in self.block.weights.named().items()}, x=x)


@pytest.fixture(scope="module", params=BLOCKS)
def built(request: pytest.FixtureRequest, tensorrt: Host, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("fp8")
    module = BLOCKS[request.param].to(BF16) if request.param != "stored" else BLOCKS[request.param]
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = export(module.eval().requires_grad_(False), torch.randn(5, D_MODEL).to(BF16), dynamic=({0: tokens},))
    rewritten = run_passes(program, PassOptions(BF16, "all", weights=Wish(quantise=True)))
    save_onnx(export_onnx(rewritten.program, ["x"], ["y"], {}), folder / "m.onnx")
    profiles = [{"x": ShapeRange((1, D_MODEL), (300, D_MODEL), (max(TOKENS), D_MODEL))}]
    nothing: list[Path] = []
    build_plan(
        tensorrt.name, folder / "m.onnx", folder / "m.plan", profiles, nothing, nothing, "", False, lambda _: None
    )
    (node,) = [node for node in rewritten.program.graph.nodes if node.target in VARIANT_OF]
    operands, options = call_of(VARIANT_OF[node.target], node.args, node.kwargs)
    names = {each.arg.name: each.target for each in rewritten.program.graph_signature.input_specs}
    weights = operands.weights.map(lambda each: rewritten.program.state_dict[names[each.name]])
    assert weights.w_down.dtype == E4M3
    return Built(open_plan(tensorrt, folder / "m.plan", tensorrt.version), Fp8Block(weights, None, options))


@pytest.mark.parametrize("tokens", TOKENS)
def test_plans_give_what_the_op_gives(built: Built, tokens: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, D_MODEL).to(BF16)
    (y,) = run(built.plan, {"x": x})
    expected = run_block(built.operands(x.cuda()), built.block.options)
    assert same_bits(y, expected)
    truth = run_block(built.operands(x.double().cpu()).map(_widened), built.block.options)
    error, dense_fp8 = ((each.double() - truth).norm() for each in (y, built.block.by_dense_fp8(x, None)))
    assert error <= dense_fp8 + 2**-8 * truth.norm()


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == BF16 else tensor


def test_compile_check_and_size(llama: Path, tmp_path: Path) -> None:
    """The plan of a Llama is checked by running it, and is smaller than that with 16 bits."""
    narrow = compiled(llama, tmp_path / "narrow.plan", "--weights", "fp8", "--onnx", str(tmp_path / "m.onnx"))
    wide = compiled(llama, tmp_path / "wide.plan")
    assert narrow.stat().st_size < wide.stat().st_size
    done = twellc("check", llama, narrow)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Executed: the plan" in " ".join((done.stdout + done.stderr).split())
