"""Experts in real TensorRT: equal to the op bit by bit, and within tolerance of float64."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.models import export
from tests.tensorrt.plans import compiled, run, same_bits, twellc
from twellc.compiling.manifest import manifest_path
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.plan import build_plan
from twellc.export.runner import OpenPlan, open_plan
from twellc.export.shapes import ShapeRange
from twellc.export.tensorrt_host import Host
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.plugins.experts_op import EXPERTS
from twellc.plugins.fp8 import E4M3

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("experts")]

TOKENS = (1, 16, 512)
TOLERANCES = {torch.bfloat16: 8e-3, torch.float16: 2e-3}  # those of tests/plugins/test_experts.py


class Experts(nn.Module):
    """A router and its experts. It returns ids and weights, too: routers in another precision choose others."""

    def __init__(
        self, sizes: tuple[int, int, int, int], activation: str, dtype: torch.dtype, *, gated: bool, fp8: bool
    ) -> None:
        super().__init__()
        self.activation, self.fp8 = activation, fp8
        d_model, d_ff, experts, self.top = sizes
        self.router = nn.Linear(d_model, experts, bias=False, dtype=dtype)
        shapes = {"up": d_model, "down": d_ff} | ({"gate": d_model} if gated else {})
        for name, fan_in in shapes.items():
            matrix = torch.randn(experts, d_ff, d_model, dtype=dtype) * (1 if fp8 else fan_in**-0.5)
            self.register_parameter(name, nn.Parameter(matrix.to(E4M3) if fp8 else matrix, requires_grad=False))
            if fp8:
                scale = torch.rand(experts, d_ff, 1) + 0.5
                self.register_buffer(f"{name}_scale", scale * fan_in**-0.5)

    def operands(self, dtype: torch.dtype, device: str) -> dict[str, Tensor | None]:
        """Return the matrices and scales of the op, on a device; those that are not in FP8 in a dtype."""
        found = dict(self.named_parameters(recurse=False)) | dict(self.named_buffers())
        kept = (E4M3, torch.float32)
        moved = {name: each.to(device, each.dtype if each.dtype in kept else dtype) for name, each in found.items()}
        return {"gate": None, **moved}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = self.router(x).float().softmax(-1).topk(self.top)
        operands = self.operands(x.dtype, str(x.device))
        return EXPERTS(x=x, ids=ids, weights=weights, activation=self.activation, **operands), ids, weights


@dataclass
class Built:
    """A plan of experts, and these."""

    plan: OpenPlan
    module: Experts
    dtype: torch.dtype


CASES = {
    "plain": ((64, 48, 8, 3), "relu2", torch.bfloat16, False, False),
    "gated": ((64, 48, 8, 2), "relu", torch.float16, True, False),
    "fp8": ((64, 48, 8, 2), "relu", torch.bfloat16, True, True),
    "nano": ((2688, 1856, 128, 6), "relu2", torch.bfloat16, False, False),
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name == "nano" else ()) for name in CASES]
)
def built(request: pytest.FixtureRequest, tensorrt: Host, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("experts")
    sizes, activation, dtype, gated, fp8 = CASES[request.param]
    torch.manual_seed(0)
    module = Experts(sizes, activation, dtype, gated=gated, fp8=fp8).eval().requires_grad_(False)
    width = sizes[0]
    tokens = torch.export.Dim("tokens", min=1, max=max(TOKENS))
    program = export(module, torch.randn(5, width).to(dtype), dynamic=({0: tokens},))
    rewritten = run_passes(program, PassOptions(dtype, "all"))
    save_onnx(export_onnx(rewritten.program, ["x"], ["y", "ids", "weights"], {}), folder / "m.onnx")
    profiles = [{"x": ShapeRange((1, width), (16, width), (max(TOKENS), width))}]
    path, nothing = folder / "m.plan", list[Path]()
    plan = build_plan(tensorrt.name, folder / "m.onnx", path, profiles, nothing, nothing, "", False, lambda _: None)
    assert len(plan.plugin_layers) == 1
    return Built(open_plan(tensorrt, path, tensorrt.version), module, dtype)


@pytest.mark.parametrize("tokens", TOKENS)
def test_against_the_op_and_float64(built: Built, tokens: int) -> None:
    module, dtype = built.module, built.dtype
    x = torch.randn(tokens, module.router.in_features).to(dtype)
    y, ids, weights = run(built.plan, {"x": x})
    routing = {"ids": ids, "weights": weights, "activation": module.activation}
    on_gpu = {"ids": ids.cuda(), "weights": weights.cuda(), "activation": module.activation}
    assert same_bits(y, EXPERTS(x=x.cuda(), **on_gpu, **module.operands(dtype, "cuda")))
    truth = EXPERTS(x=x.double(), **routing, **module.operands(torch.float64, "cpu"))
    assert (y.double() - truth).norm() < TOLERANCES[dtype] * truth.norm()


def test_switch(tensorrt: Host, tmp_path: Path) -> None:
    """Its router counts the tokens of each expert, and drops some."""
    model = models.save(models.switch(), tmp_path / "model")
    plan = compiled(model, tmp_path / "m.plan")
    assert json.loads(manifest_path(plan).read_text())["plugins"]["names"] == ["TwellExperts"]
    done = twellc("check", model, plan, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["executed"] == "the plan"
