"""FP8 weights in programs: which spellings keep them, what is dequantised and why, and what moves neurons."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import Gated, Plain, Written, export, run
from twellc.passes.fp8 import Wish
from twellc.passes.match.shared_axis import Part
from twellc.passes.pipeline import PassOptions, Rewritten, Stage, run_for_ranks, run_passes, run_until
from twellc.plugins.block import call_of
from twellc.plugins.fp8 import E4M3, Fp8
from twellc.plugins.ops import VARIANT_OF

BF16 = torch.bfloat16
D_MODEL, D_FF = 24, 40
Spelling = Callable[["Narrow"], Tensor]
KEPT_WITH_BLOCKS = "weights in 8 bits, as the model has them, with scales for blocks of 128 x 128"


class Narrow(nn.Module):
    """A linear layer in E4M3, with a scale for each `kind` of its matrix [out, in]."""

    def __init__(self, d_in: int, d_out: int, kind: str, spelling: Spelling) -> None:
        super().__init__()
        q, scale = Fp8.quantize(torch.randn(d_out, d_in) * d_in**-0.5, kind)
        self.weight, self.scale = nn.Parameter(q, requires_grad=False), nn.Parameter(scale, requires_grad=False)
        self.spelling = spelling

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.spelling(self))

    def dequantized(self) -> Tensor:
        return self.weight.double() * self.scale.double()


class Block(nn.Module):
    def __init__(
        self, gate: str, up: str, down: str, spelling: Spelling, d_model: int = D_MODEL, d_ff: int = D_FF
    ) -> None:
        super().__init__()
        self.gate, self.up = Narrow(d_model, d_ff, gate, spelling), Narrow(d_model, d_ff, up, spelling)
        self.down = Narrow(d_ff, d_model, down, spelling)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.gate(x)) * self.up(x))
        return y

    def exact(self, x: Tensor) -> Tensor:
        x = x.double()
        hidden = torch.relu((x @ self.gate.dequantized().T).to(BF16).double()) * (x @ self.up.dequantized().T)
        return x + hidden @ self.down.dequantized().T


SPELLINGS: dict[str, Spelling] = {
    "through-float32": lambda each: (each.weight.to(torch.float32) * each.scale).to(BF16),
    "scale-first": lambda each: (each.scale * each.weight.float()).bfloat16(),
    "in-bfloat16": lambda each: each.weight.to(BF16) * each.scale.to(BF16),
}


def rewritten(module: nn.Module, wish: Wish = Wish()) -> Rewritten:  # noqa: B008
    program = export(module.eval(), torch.randn(3, D_MODEL).to(BF16))
    return run_passes(program, PassOptions(BF16, "all", weights=wish))


def operands_of(found: Rewritten) -> dict[str, Tensor]:
    """Return what the op of a rewritten program reads from constants, by name."""
    (node,) = [node for node in found.program.graph.nodes if node.target in VARIANT_OF]
    operands, _ = call_of(VARIANT_OF[node.target], node.args, node.kwargs)
    names = {spec.arg.name: spec.target for spec in found.program.graph_signature.input_specs}
    state = found.program.state_dict
    return {name: state[names[each.name]] for name, each in operands.named().items() if names.get(each.name) in state}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kinds", [("row", "row", "column"), ("tensor", "row", "row"), ("tensor",) * 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_blocks_keep_bytes_and_scales(spelling: str, kinds: tuple[str, str, str]) -> None:
    module = Block(*kinds, SPELLINGS[spelling])
    found = rewritten(module)
    (layer,) = found.layers
    assert str(layer.weights) == "weights in 8 bits, as the model has them"
    assert layer.reason.endswith(f"; {layer.weights}")
    stored = operands_of(found)
    for name, part in (("w_gate", module.gate), ("w_up", module.up)):
        assert torch.equal(stored[name].view(torch.uint8), part.weight.view(torch.uint8))
    assert torch.equal(stored["w_down"].view(torch.uint8), module.down.weight.view(torch.uint8).t())


@pytest.mark.parametrize("seed", range(3))
def test_random_blocks_against_float64(seed: int) -> None:
    draw = random.Random(seed)
    gate, up = (draw.choice(["tensor", "row"]) for _ in range(2))
    down, d_model, d_ff = draw.choice(["tensor", "row", "column"]), 8 * draw.randint(1, 20), draw.randint(1, 300)
    module = Block(gate, up, down, SPELLINGS["through-float32"], d_model, d_ff)
    x = torch.randn(3, d_model).to(BF16)
    found = run_passes(export(module.eval(), x), PassOptions(BF16, "all"))
    assert str(found.layers[0].weights) == "weights in 8 bits, as the model has them"
    (y,) = run(found.program, x)
    assert torch.allclose(y.double(), module.exact(x), rtol=2**-8, atol=1e-6)


class Packed(nn.Module):
    """A block whose gate and up are one matrix."""

    def __init__(self, d_ff: int = D_FF, spelling: Spelling = SPELLINGS["through-float32"]) -> None:
        super().__init__()
        self.both = Narrow(D_MODEL, 2 * d_ff, "row", spelling)
        self.down = Narrow(d_ff, D_MODEL, "tensor", SPELLINGS["through-float32"])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        y: Tensor = self.down(torch.relu(gate) * up)
        return y


def test_parts_of_a_packed_matrix_have_their_scales() -> None:
    module = Packed()
    stored = operands_of(rewritten(module))
    for name, rows in (("w_gate", slice(0, D_FF)), ("w_up", slice(D_FF, None))):
        assert torch.equal(stored[name].float(), module.both.weight.float()[rows])
        assert torch.equal(stored[f"{name}_scale"], module.both.scale[rows])


def in_blocks(each: Narrow) -> Tensor:
    rows, columns = each.weight.shape
    wide = each.scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (each.weight.float() * wide).to(BF16)


def with_scales_of_blocks(layer: Narrow) -> Narrow:
    rows, columns = layer.weight.shape
    scale = torch.rand(math.ceil(rows / 128), math.ceil(columns / 128)) + 0.5
    layer.scale = nn.Parameter(scale, requires_grad=False)
    return layer


def test_blocks_keep_scales_of_blocks() -> None:
    """With their neurons where they are: 128 of them have scales together."""
    module = Block("row", "row", "row", in_blocks, d_model=200, d_ff=264)
    parts = [with_scales_of_blocks(each) for each in (module.gate, module.up, module.down)]
    with torch.no_grad():
        module.gate.weight[:9] = 0  # neurons that cannot fire
    x = torch.randn(3, 200).to(BF16)
    found = run_passes(export(module, x), PassOptions(BF16, "all"))
    assert str(found.layers[0].weights) == KEPT_WITH_BLOCKS and not found.notes
    stored = operands_of(found)
    for name, each in zip(("w_gate", "w_up", "w_down"), parts, strict=True):
        matrix = Fp8(each.weight, each.scale)
        matrix = matrix.t() if name == "w_down" else matrix
        assert torch.equal(stored[name].float(), matrix.values.float())
        assert torch.equal(stored[f"{name}_scale"], matrix.scale)
    y, exact = run(found.program, x)[0], module(x)
    assert float((y - exact).norm() / exact.norm()) < 6e-3
    first, _ = run_for_ranks(export(module, x), PassOptions(BF16, "all", part=Part(0, 2)))
    said = "weights in 16 bits, dequantised: ranks share its neurons, and 128 of them have scales together"
    assert str(first.layers[0].weights) == said
    module.up.scale = nn.Parameter(torch.ones(264, 1), requires_grad=False)
    module.up.spelling = SPELLINGS["through-float32"]
    mixed = run_passes(export(module, x), PassOptions(BF16, "all"))
    said = "weights in 16 bits, dequantised: w_gate and w_up have scales of different forms"
    assert str(mixed.layers[0].weights) == said


@pytest.mark.parametrize("d_ff", [256, 200])
def test_parts_of_a_packed_matrix_have_their_scales_of_blocks(d_ff: int) -> None:
    module = Packed(d_ff, in_blocks)
    with_scales_of_blocks(module.both)
    found = rewritten(module)
    if d_ff % 128:
        said = "weights in 16 bits, dequantised: w_up is a part of a matrix that does not begin with a block of 128"
        assert str(found.layers[0].weights) == said
        return
    stored = operands_of(found)
    assert torch.equal(stored["w_gate_scale"], module.both.scale[:2])
    assert torch.equal(stored["w_up_scale"], module.both.scale[2:])


def test_what_kernels_do_not_take_is_dequantised_and_said() -> None:
    found = rewritten(Block("column", "row", "row", SPELLINGS["through-float32"]))
    assert str(found.layers[0].weights) == "weights in 16 bits, dequantised: w_gate has a scale for each input"
    assert operands_of(found)["w_gate"].dtype == BF16
    (note,) = found.notes
    assert note.startswith("3 weights that the model has in FP8 are dequantised: ") and "gate.weight" in note
    again = rewritten(Block("column", "row", "row", SPELLINGS["through-float32"]), Wish(quantise=True))
    assert str(again.layers[0].weights) == "weights in 8 bits, quantised"
    module = Block("row", "row", "row", SPELLINGS["through-float32"])
    module.down = nn.Linear(D_FF, D_MODEL, bias=False, dtype=BF16)  # type: ignore[assignment]
    assert "16 bits, dequantised: the model has only some of them in FP8" in rewritten(module).layers[0].reason


def in_groups(each: Narrow) -> Tensor:
    return (each.weight.float().unflatten(1, (2, -1)) * each.scale[..., None]).flatten(1).to(BF16)


def test_scales_of_groups_are_dequantised_and_said() -> None:
    module = Block("row", "row", "row", in_groups)
    for part in (module.gate, module.up):
        part.scale = nn.Parameter(part.scale.expand(-1, 2).clone(), requires_grad=False)
    found = rewritten(module)
    assert operands_of(found)["w_gate"].dtype == BF16
    said = "3 weights that the model has in FP8 are dequantised: gate.weight, up.weight, down.weight"
    assert found.notes == [said]


@pytest.mark.parametrize("module", [Gated(d_model=D_MODEL, d_ff=D_FF, biases="gud"), Plain(d_model=D_MODEL, d_ff=D_FF)])
def test_blocks_of_sixteen_bits_are_quantised(module: nn.Module) -> None:
    module = module.to(BF16)
    assert rewritten(module).layers[0].weights is None
    found = rewritten(module, Wish(quantise=True))
    stored, x = operands_of(found), torch.randn(3, D_MODEL).to(BF16)
    matrices = [name for name in stored if name[:2] == "w_" and "scale" not in name]
    assert {stored[name].dtype for name in matrices} == {E4M3}
    assert {tuple(stored[f"{name}_scale"].shape) for name in matrices} == {(D_FF, 1)}
    up, scale = Fp8.quantize(module.up.weight, "row")  # type: ignore[arg-type]
    assert torch.equal(stored["w_up"].float(), up.float()) and torch.equal(stored["w_up_scale"], scale)
    (y,), (dense,) = run(found.program, x), run(found.dense, x)
    assert 0 < (y - dense).norm() / dense.norm() < 0.1


def test_a_block_with_too_large_an_error_stays() -> None:
    module = Plain(d_model=D_MODEL, d_ff=D_FF).to(BF16)
    (name,) = [layer.module for layer in rewritten(module).layers]
    cases: tuple[tuple[dict[str, float], str], ...] = (
        ({name: 0.04}, "weights in 8 bits, quantised, which changes its output by 4.00%"),
        ({name: 0.06}, "weights in 16 bits, FP8 changes its output by 6.00%, more than --fp8-error 0.05"),
        ({}, "weights in 16 bits, what FP8 changes could not be measured on the samples"),
    )
    for errors, said in cases:
        (layer,) = rewritten(module, Wish(True, 0.05, errors)).layers
        assert str(layer.weights) == said


@pytest.mark.parametrize("narrow", [False, True])
def test_scales_move_with_their_neurons(narrow: bool) -> None:
    module: nn.Module = Block("row", "row", "column", SPELLINGS["through-float32"])
    module = module if narrow else Gated(d_model=D_MODEL, d_ff=D_FF, biases="gud").to(BF16)
    program, options = export(module.eval(), torch.randn(3, D_MODEL).to(BF16)), PassOptions(BF16, "all")
    options = replace(options, weights=Wish(quantise=not narrow))
    decided = run_until(program, options, Stage.DECIDE)
    order = torch.randperm(D_FF)[:32]
    moved = replace(decided, stage=Stage.ORDER, orders={decided.layers[0].module: order})
    before, after = (operands_of(run_until(each, options, Stage.ATTENTION)) for each in (decided, moved))
    for name in ("w_gate", "w_up", "w_down"):
        dequantized, own = (each[name].float() * each[f"{name}_scale"] for each in (before, after))
        assert torch.equal(own, dequantized[order])


def test_ranks_share_scales() -> None:
    module = Gated(d_model=D_MODEL, d_ff=D_FF, biases="d").to(BF16)
    program = export(module.eval(), torch.randn(3, D_MODEL).to(BF16))
    options = PassOptions(BF16, "all", weights=Wish(quantise=True), part=Part(0, 2))
    whole = operands_of(run_passes(program, replace(options, part=Part(0, 1))))
    parts = [operands_of(each) for each in run_for_ranks(program, options)]
    for name in ("w_gate_scale", "w_down_scale"):
        together = torch.cat([each[name] for each in parts]).sort(0).values
        assert torch.equal(together, whole[name].sort(0).values)


class Two(nn.Module):
    """Two layers that read one x."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.q = Narrow(D_MODEL, 16, first, SPELLINGS["through-float32"])
        self.k = Narrow(D_MODEL, 8, second, SPELLINGS["through-float32"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x), self.k(x)


@pytest.mark.parametrize("kinds", [("tensor", "row"), ("row", "row"), ("row", "column")])
def test_linear_layers_keep_their_fp8(kinds: tuple[str, str]) -> None:
    module, x = Two(*kinds), torch.randn(3, D_MODEL).to(BF16)
    found = run_passes(export(module, x), PassOptions(BF16, linear="twell"))
    (row,) = found.linear
    if "column" in kinds:
        assert str(row.weights) == "weights in 16 bits, dequantised: a weight has a scale for each input"
    else:
        assert str(row.weights) == "weights in 8 bits, as the model has them" and not found.notes
    for actual, layer in zip(run(found.program, x), (module.q, module.k), strict=True):
        exact = x.double() @ layer.dequantized().T
        assert float((actual.double() - exact).norm() / exact.norm()) < (4e-3 if "column" in kinds else 2.5e-3)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (128, KEPT_WITH_BLOCKS),
        (
            64,
            "weights in 16 bits, dequantised: they are computed together, and blocks of 128 rows do not begin with each"
            " of them",
        ),
    ],
)
def test_linear_layers_keep_scales_of_blocks(first: int, said: str) -> None:
    module, x = Two("row", "row"), torch.randn(3, 200).to(BF16)
    for name, rows in (("q", first), ("k", 136)):
        module.add_module(name, with_scales_of_blocks(Narrow(200, rows, "row", in_blocks)))
    found = run_passes(export(module, x), PassOptions(BF16, linear="twell"))
    (row,) = found.linear
    assert str(row.weights) == said and bool(found.notes) == (first == 64)
    scales = [each for each in found.program.state_dict.values() if each.dtype == torch.float32]
    assert [tuple(each.shape) for each in scales] == ([(3, 2)] if first == 128 else [])
    for actual, expected in zip(run(found.program, x), module(x), strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.parametrize("conv1d", [False, True])
def test_linear_layers_are_quantised(conv1d: bool) -> None:
    """With a scale for each output, also where the weight is stored [in, out]."""
    module, x = nn.Module(), torch.randn(3, D_MODEL).to(BF16)
    weight = torch.randn(16, D_MODEL).to(BF16) * torch.logspace(-2, 2, 16, dtype=BF16)[:, None]
    module.weight = nn.Parameter(weight.t().contiguous() if conv1d else weight)
    module.forward = lambda x: (x @ module.weight if conv1d else nn.functional.linear(x, module.weight)).sin()
    found = run_passes(export(module, x), PassOptions(BF16, linear="twell", weights=Wish(True, linear=True)))
    assert [str(row.weights) for row in found.linear] == ["weights in 8 bits, quantised"]
    q, scale = Fp8.quantize(weight, "row")
    state = found.program.state_dict
    assert torch.equal(state["weight_e4m3"].float(), q.float()) and torch.equal(state["weight_scale"], scale)
    expected = (x.float() @ (q.float() * scale).T).to(BF16).sin()
    torch.testing.assert_close(run(found.program, x)[0], expected)
    for wish, said in (
        (Wish(True), "None"),
        (Wish(True, 0.5, linear=True), "weights in 16 bits, what FP8 changes is measured of blocks alone"),
    ):
        left = run_passes(export(module, x), PassOptions(BF16, linear="twell", weights=wish))
        assert [str(row.weights) for row in left.linear] == [said]


@pytest.mark.parametrize("choose", [False, True])
def test_logits_stay_in_16_bits(choose: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        logits: Tensor = 30 * torch.tanh(self.layers(x).unsqueeze(0).float() / 30)
        return (logits.argmax(-1) if choose else logits)[0]

    layers, x = nn.Sequential(nn.Linear(D_MODEL, 16), nn.Tanh(), nn.Linear(16, 24)), torch.randn(3, D_MODEL)
    module = Written(forward, layers=layers).to(BF16)
    found = run_passes(export(module, x.to(BF16)), PassOptions(BF16, linear="twell", weights=Wish(True, linear=True)))
    said = ["weights in 8 bits, quantised", "weights in 16 bits, the model returns its result, as logits are"]
    assert [str(row.weights) for row in found.linear] == said
