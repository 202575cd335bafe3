"""What autoencoders need of the kernels, on a GPU: thresholds, more than 65 536 neurons, and features."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from tests.plugins import calls, reference
from tests.plugins.calls import BEST, DENSE_BLOCK, GUARD_DECIDES, KERNELS, SPLIT, Call, bits_of, run_poisoned
from tests.plugins.cases import FP16, SPLIT_BASE, Case, make_block, split_block
from tests.plugins.reference import Block
from twellc.checks.fp8 import Fp8Block
from twellc.features import decode, encode
from twellc.plugins.block import BlockOptions, Operands, WeightOperands
from twellc.plugins.fp8 import Fp8
from twellc.plugins.meaning import dequantize, hidden_of, output_of
from twellc.plugins.ops import run_block

pytestmark = pytest.mark.gpu

EACH = Case(d_model=328, d_ff=1500, d_out=328, activation="fatrelu")
FATRELU = BlockOptions(activation="fatrelu")


def with_thresholds(block: Block, integers: bool = False) -> Block:
    """Return a block with a threshold for each neuron, some of which are 0."""
    d_ff = len(block.w_gate)
    drawn = torch.randint(0, 3, (d_ff,)) / 2 if integers else torch.rand(d_ff) * 0.2
    drawn[::5] = 0
    return dataclasses.replace(block, threshold=drawn.to(block.x.device))


# ---- a threshold for each neuron ----

ROWS = (1, 2, 12, 16, 17, 40, 64, 100, 130, 700, 2500)
ROUTES = [
    *(dataclasses.replace(EACH, rows=rows, gated=gated) for rows, gated in itertools.product(ROWS, (True, False))),
    *(dataclasses.replace(EACH, rows=rows, d_ff=700, density=0.6, dtype=FP16) for rows in (1, 12, 40, 100, 300)),
    dataclasses.replace(EACH, rows=2, d_model=2056),
    dataclasses.replace(EACH, rows=20, d_ff=20_000, density=0.004),
    dataclasses.replace(EACH, rows=5000, d_model=1088, d_ff=2816, density=0.01),
]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", ROUTES, ids=str)
def test_a_threshold_for_each_neuron(case: Case) -> None:
    block = with_thresholds(make_block(case))
    reference.assert_close(Call(block, case.compression).run(), block)
    whole = with_thresholds(make_block(case, integers=True), integers=True)
    call = Call(whole, case.compression)
    reference.assert_close(call.run(), whole)
    calls.assert_packed(call, bits_of(reference.gate_values(whole)))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [GUARD_DECIDES, 100, 300], ids=str)
def test_thresholds_of_chosen_rows(rows: int | calls.Run, kernels: int) -> None:
    block = with_thresholds(make_block(dataclasses.replace(EACH, rows=300, d_model=256, density=0.1)))
    reference.assert_close(run_poisoned(Call(block, 8), rows, kernels), block)


@pytest.mark.parametrize("kernels", KERNELS)
def test_thresholds_of_a_split(kernels: int) -> None:
    block = with_thresholds(split_block(dataclasses.replace(SPLIT_BASE, activation="fatrelu"), hot_density=0.3))
    reference.assert_close(run_poisoned(Call(block, 8, hot=512), SPLIT, kernels), block, split=512)


@pytest.mark.parametrize(("rows", "d_ff", "gated"), [(250, 5293, True), (41, 5632, True), (153, 5632, False)])
def test_thresholds_of_dense_blocks(rows: int, d_ff: int, gated: bool) -> None:
    """Tall tiles, and parts of sums."""
    case = dataclasses.replace(EACH, rows=rows, d_model=200, d_ff=d_ff, d_out=1000, density=0.3, gated=gated)
    block = with_thresholds(make_block(case))
    reference.assert_close(run_poisoned(Call(block, 8), DENSE_BLOCK, BEST), block)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [1, 12, 40, 100, 300, 2000])
def test_thresholds_beside_weights_in_fp8(rows: int, gated: bool) -> None:
    block = with_thresholds(make_block(dataclasses.replace(EACH, rows=rows, d_model=256, d_out=256, gated=gated)))
    first, first_scale = Fp8.quantize(block.w_gate, "row")
    down, down_scale = Fp8.quantize(block.w_down, "column")
    tensors = {"w_up": first, "w_up_scale": first_scale, "w_down": down, "w_down_scale": down_scale}
    if block.w_up is not None:
        up, up_scale = Fp8.quantize(block.w_up, "row")
        tensors |= {"w_gate": first, "w_gate_scale": first_scale, "w_up": up, "w_up_scale": up_scale}
    weights: WeightOperands[Tensor] = WeightOperands(**tensors, thresholds=block.threshold)  # type: ignore[arg-type]
    exact = dequantize(Operands(**weights.named(), x=block.x.double()))
    truth = output_of(hidden_of(exact, FATRELU)[-1], exact)
    dense = Fp8Block(weights, None, FATRELU).by_dense_fp8(block.x, None)
    ours, theirs = (
        float((y.double() - truth).norm() / truth.norm()) for y in (run_block(weights.of(block.x), FATRELU), dense)
    )
    assert ours <= 1.2 * theirs + 2**-8


# ---- more neurons than 16 bits count ----

WIDE = [
    *(Case(rows, 64, d_ff, 72, gated=False, density=0.001) for rows in (1, 9, 300) for d_ff in (65_544, 200_000)),
    Case(1300, 64, 70_000, 136, gated=False, density=0.0005, dtype=FP16, activation="relu2"),
    Case(40, 72, 66_000, 8, gated=False, density=0.3, dtype=FP16, biases=""),
    Case(5, 64, 65_537, 264, gated=False, density=1.0, residual=True),
    Case(3, 64, 1 << 20, 16, gated=False, density=0.0),
    Case(300, 192, 131_072, 2056, gated=False, density=0.001, activation="fatrelu", residual=True),
]


def operands_of(block: Block) -> tuple[Operands[Tensor], BlockOptions]:
    """Return a plain block as the op takes it."""
    is_each = isinstance(block.threshold, Tensor)
    options = BlockOptions(activation=block.activation, threshold=0.0 if is_each else block.threshold)  # type: ignore[arg-type]
    return Operands(
        x=block.x, w_up=block.w_gate, b_up=block.b_gate, w_down=block.w_down, b_down=block.b_down,
        residual=block.residual, thresholds=block.threshold if is_each else None,  # type: ignore[arg-type]
    ), options  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_blocks(case: Case) -> None:
    block = make_block(case)
    if case.activation == "fatrelu":
        block = with_thresholds(block)
    operands, options = operands_of(block)
    y = run_block(operands, options)
    reference.assert_close(y, block)
    assert torch.equal(run_block(operands, options), y)


def test_wide_blocks_keep_what_is_not_finite() -> None:
    """A NaN reaches its row alone; what is infinite in a row of w_down of a neuron that does not fire does not."""
    block = make_block(Case(40, 64, 70_000, 72, gated=False, density=0.001, biases=""))
    block.x[7, 3] = float("nan")
    silent = ~(reference.gate_values(block) != 0).any(0)
    silent |= (reference.gate_values(block)[[*range(7), *range(8, 40)]] == 0).all(0)
    block.w_down[silent] = float("inf")
    finite = run_block(*operands_of(block)).isfinite()
    assert not finite[7].any() and finite[:7].all() and finite[8:].all()


# ---- features ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP16])
@pytest.mark.parametrize(
    ("rows", "d_ff", "heavy"), [(1, 600, 0), (700, 16_384, 0), (33, 70_000, 0), (300, 1000, 3), (200, 70_000, 200)]
)
def test_features_are_the_packed_gate(rows: int, d_ff: int, heavy: int, dtype: torch.dtype) -> None:
    """Also of rows with more active neurons in a tile than slots, in which case all is encoded again."""
    block = make_block(Case(rows, 64, d_ff, 72, gated=False, density=0.01, dtype=dtype, biases="d"), integers=True)
    block.w_gate[: d_ff // 2, 5] = 1
    block.x[:heavy] = 0
    block.x[:heavy, 5] = 2
    found = encode(block.x, block.w_gate)
    g = reference.gate_values(block)
    assert torch.equal(found.offsets.diff(), (g != 0).sum(1))
    tokens, neurons = (g != 0).nonzero(as_tuple=True)
    assert torch.equal(found.indices.long(), neurons) and torch.equal(found.values, g[tokens, neurons])
    reference.assert_close(decode(found, block.w_down, block.b_down), block)


def small() -> list[Block]:
    made = [Case(3, 64, 65_544, 72, gated=False, density=0.001), Case(20, 64, 600, 264, gated=False, density=0.3)]
    return [with_thresholds(make_block(dataclasses.replace(each, activation="fatrelu"))) for each in made]


def test_sanitize() -> None:
    """What sanitize.py runs."""
    for block in small():
        operands, options = operands_of(block)
        run_block(operands, options)
        found = encode(operands.x, operands.w_up, operands.b_up, activation="fatrelu", thresholds=operands.thresholds)
        decode(found, operands.w_down)
        decode((found.indices[:12].view(3, 4), found.values[:12].view(3, 4)), operands.w_down, operands.b_down)
    for rows in (1, 12, 20, 70, 130):
        case = dataclasses.replace(EACH, rows=rows, d_model=72, d_ff=300, d_out=72)
        calls.run_plain_buffers(with_thresholds(make_block(case, device="cpu")), Call.mlp, 8)
    torch.cuda.synchronize()
