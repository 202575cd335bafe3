"""Both plugins in real TensorRT: every activation, with and without biases and residual, against float64."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.models import Function, Gated, Plain
from tests.tensorrt.plans import build, run, yardsticks
from tests.tolerance import assert_as_accurate
from twellc.export.runner import OpenPlan
from twellc.export.shapes import ShapeRange
from twellc.export.tensorrt_host import Host

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("blocks")]

TOKENS = (1, 2, 3, 17, 65, 300, 2100)
WIDEST = 256
# d_model, d_ff, d_out
SIZES = ((72, 1000, 136), (256, 1024, 256), (200, 999, 8))
# What is subtracted from every value of the gate, in standard deviations of 1.4: half or 2 % of the neurons are active.
SHIFTS = (0.0, 3.0)
THRESHOLD = 0.5
ACTIVATIONS: dict[str, Function] = {
    "relu": torch.relu,
    "relu2": lambda t: torch.relu(t).square(),
    "fatrelu": lambda t: F.threshold(t, THRESHOLD, 0.0),
}


class Drelu(Gated):
    """down(relu(gate(x)) * relu(up(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.gate(x)) * torch.relu(self.up(x)))


@dataclass(frozen=True)
class Case:
    """One block: y = block(x), or y = residual + block(x)."""

    gated: bool
    activation: str
    biases: str
    residual: bool
    sizes: tuple[int, int, int]

    def module(self) -> nn.Module:
        d_model, d_ff, d_out = self.sizes
        options = {"biases": self.biases, "d_model": d_model, "d_ff": d_ff, "d_out": d_out}
        block: nn.Module
        if self.activation == "drelu":
            block = Drelu(**options)  # type: ignore[arg-type]
        else:
            block = (Gated if self.gated else Plain)(ACTIVATIONS[self.activation], **options)  # type: ignore[arg-type]
        first = block.gate if self.gated else block.up
        with torch.no_grad():
            first.weight[:, 0] = -1  # type: ignore[index]
        return block


def cases() -> list[Case]:
    kinds = [(True, name) for name in (*ACTIVATIONS, "drelu")] + [(False, name) for name in ACTIVATIONS]
    variants = itertools.product(kinds, (False, True), (False, True))
    return [
        Case(gated, name, ("gud" if gated else "ud") if biases else "", residual, SIZES[index % len(SIZES)])
        for index, ((gated, name), biases, residual) in enumerate(variants)
    ]


CASES = cases()


class Blocks(nn.Module):
    """The blocks of all cases beside each other: each reads the first columns of x, and adds those of residual."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(case.module() for case in CASES)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        results = []
        for case, block in zip(CASES, self.blocks, strict=True):
            d_model, _, d_out = case.sizes
            y = block(x[:, :d_model])
            results.append(residual[:, :d_out] + y if case.residual else y)
        return tuple(results)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def engine(
    request: pytest.FixtureRequest, tensorrt: Host, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Blocks, OpenPlan]:
    dtype, folder = request.param, tmp_path_factory.mktemp("blocks")
    torch.manual_seed(0)
    module = Blocks().to(dtype).eval().requires_grad_(False)
    inputs = [torch.randn(5, WIDEST).to(dtype) for _ in range(2)]
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    ranges = ShapeRange((1, WIDEST), (300, WIDEST), (max(TOKENS), WIDEST))
    profiles = [{"x": ranges, "residual": ranges}]
    return module, build(tensorrt, module, folder, dtype, inputs, ({0: tokens}, {0: tokens}), profiles)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_against_float64(engine: tuple[Blocks, OpenPlan], tokens: int, shift: float) -> None:
    module, plan = engine
    dtype = module.blocks[0].down.weight.dtype
    x, residual = (torch.randn(tokens, WIDEST).to(dtype) for _ in range(2))
    x[:, 0] = shift
    ours = run(plan, {"x": x, "residual": residual})
    wrong = {}
    for case, y, (plain, truth) in zip(CASES, ours, yardsticks(module, x, residual), strict=True):
        try:
            assert_as_accurate(y, plain, truth)
        except AssertionError as error:
            wrong[case] = str(error)
    assert not wrong


def test_plugins_add_the_residual(engine: tuple[Blocks, OpenPlan]) -> None:
    """Or the cases above would not test that."""
    graph = onnx.load(Path(engine[1].path).with_name("m.onnx")).graph
    assert "Add" not in {node.op_type for node in graph.node}
