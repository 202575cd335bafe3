"""The twell torch ops on a CPU: their meaning against float64, their checks, and what torch demands of an op."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerance import assert_as_accurate, assert_same
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.kernel_calls import as_read
from twellc.plugins.ops import GATED_MLP, MLP, run_block

ROWS, D_MODEL, D_FF, D_OUT = 7, 16, 300, 24
ACTIVATIONS = {"relu": 0.0, "relu2": 0.0, "fatrelu": 0.5, "drelu": 0.0}


def tensors(
    dtype: torch.dtype = torch.float32, biases: str = "gud", gated: bool = True, residual: bool = False
) -> list[Tensor | None]:
    """Return x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual; without w_gate and b_gate for a plain block."""
    shapes = {"g": (D_FF, D_MODEL), "u": (D_FF, D_MODEL), "d": (D_FF, D_OUT)}
    result: list[Tensor | None] = [torch.randn(2, ROWS, D_MODEL).to(dtype)]
    for name in "gud" if gated else "ud":
        width = shapes[name][1 if name == "d" else 0]
        result.append((torch.randn(shapes[name]) / 4).to(dtype))
        result.append(torch.randn(width).to(dtype) if name in biases else None)
    result.append(torch.randn(2, ROWS, D_OUT).to(dtype) if residual else None)
    return result


def reference(operands: list[Tensor | None], activation: str, threshold: float) -> Tensor:
    """The formula of the module's documentation, written with plain products in float64."""
    wide = [None if t is None else t.double() for t in operands]
    x, *rest, residual = wide
    assert x is not None
    pairs = list(zip(rest[::2], rest[1::2], strict=True))

    def project(weight: Any, bias: Any) -> Tensor:
        return x @ weight.t() + (0 if bias is None else bias)

    z = project(*pairs[0])
    g = {"relu": z.clamp(min=0), "drelu": z.clamp(min=0), "relu2": z.clamp(min=0) ** 2, "fatrelu": z * (z > threshold)}[
        activation
    ]
    if len(pairs) == 3:
        up = project(*pairs[1])
        g = g * (up.clamp(min=0) if activation == "drelu" else up)
    w_down, b_down = pairs[-1]
    return g @ w_down + (0 if b_down is None else b_down) + (0 if residual is None else residual)


CASES = [(True, name) for name in ACTIVATIONS] + [(False, name) for name in ACTIVATIONS if name != "drelu"]


@pytest.mark.parametrize(("gated", "activation"), CASES)
@pytest.mark.parametrize("biases", ["", "gud", "g", "d"])
@pytest.mark.parametrize("residual", [False, True])
def test_meaning(gated: bool, activation: str, biases: str, residual: bool) -> None:
    op, threshold = GATED_MLP if gated else MLP, ACTIVATIONS[activation]
    for dtype in (torch.float32, torch.float64):
        operands = tensors(dtype, biases, gated, residual)
        y = op(*operands, activation, threshold, 8)
        assert y.shape == (2, ROWS, D_OUT)
        assert_same(y, reference(operands, activation, threshold).to(dtype))


@pytest.mark.parametrize(("gated", "activation"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("residual", [False, True])
def test_low_precision_is_as_accurate_as_dense_torch(
    gated: bool, activation: str, dtype: torch.dtype, residual: bool
) -> None:
    op, threshold = GATED_MLP if gated else MLP, ACTIVATIONS[activation]
    operands = tensors(dtype, "gud", gated, residual)
    x, *rest, added = operands
    z = torch.nn.functional.linear(x, rest[0], rest[1])
    h = {"relu2": torch.relu(z) ** 2, "fatrelu": torch.nn.functional.threshold(z, threshold, 0)}.get(
        activation, torch.relu(z)
    )
    if gated:
        up = torch.nn.functional.linear(x, rest[2], rest[3])
        h = h * (torch.relu(up) if activation == "drelu" else up)
    plain = torch.nn.functional.linear(h, rest[-2].t(), rest[-1]) + (0 if added is None else added)
    truth = reference(operands, activation, threshold)
    assert_as_accurate(op(*operands, activation, threshold, 8), plain, truth)


@pytest.mark.parametrize("compression", [1, 2, 4])
def test_compression_never_changes_the_result(compression: int) -> None:
    operands = tensors(torch.bfloat16)
    expected = GATED_MLP(*operands, "relu", 0.0, 8)
    assert torch.equal(GATED_MLP(*operands, "relu", 0.0, compression), expected)


@pytest.mark.parametrize("hot", [1, 256, D_FF])
@pytest.mark.parametrize("gated", [True, False])
def test_hot_never_changes_the_result(hot: int, gated: bool) -> None:
    op, operands = GATED_MLP if gated else MLP, tensors(torch.bfloat16, gated=gated, residual=True)
    expected = op(*operands, "relu", 0.0, 8)
    assert torch.equal(op(*operands, "relu", 0.0, 8, 0), expected)
    assert torch.equal(op(*operands, "relu", 0.0, 8, hot), expected)
    assert torch.equal(op(*operands, "relu", 0.0, 8, hot=hot), expected)


@pytest.mark.parametrize("hot", [-1, D_FF + 1])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_hot(hot: int, device: str) -> None:
    operands = [None if t is None else t.to(device) for t in tensors()]
    with pytest.raises(ValueError, match=f"twell: hot must be 0 to d_ff = {D_FF}, got {hot}"):
        GATED_MLP(*operands, "relu", 0.0, 8, hot)


def test_threshold_is_exclusive() -> None:
    """Keeps z > t: a pre-activation equal to the threshold is dropped."""
    eye = torch.eye(8)
    x = torch.tensor([[0.4, 0.5, 0.6, -1.0, 0.0, 2.0, 0.5, 1.0]])
    y = MLP(x, eye, None, eye, None, None, "fatrelu", 0.5, 8)
    assert torch.equal(y, torch.tensor([[0, 0, 0.6, 0, 0, 2, 0, 1.0]]))


@pytest.mark.parametrize("gated", [True, False])
def test_a_threshold_for_each_neuron(gated: bool) -> None:
    """Compared in float32, exclusively; what is below 0 or NaN counts as 0."""
    block = Operands(
        x=torch.tensor([[1.0, -1.0], [math.nan, 0.0]], dtype=torch.bfloat16),
        w_gate=torch.ones(5, 2, dtype=torch.bfloat16) if gated else None,
        b_gate=torch.tensor([1.0, 1.0, 1.0, -2.0, 1.0], dtype=torch.bfloat16) if gated else None,
        w_up=torch.zeros(5, 2, dtype=torch.bfloat16) if gated else torch.ones(5, 2, dtype=torch.bfloat16),
        b_up=torch.tensor([1.0, 1.0, 1.0, 1.0 if gated else -2.0, 1.0], dtype=torch.bfloat16),
        w_down=torch.eye(5, 8, dtype=torch.bfloat16),
        thresholds=torch.tensor([0.9999, 1.0, -math.inf, -3.0, math.nan]),
    )
    y = run_block(block, BlockOptions(activation="fatrelu"))
    assert y[0].tolist() == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0] and y[1].isnan().all()


def test_what_thresholds_need() -> None:
    x, w_up, w_down = torch.ones(3, 8), torch.ones(16, 8), torch.ones(16, 8)
    block = Operands(x=x, w_up=w_up, w_down=w_down, thresholds=torch.zeros(16))
    for options in (BlockOptions(activation="relu"), BlockOptions(activation="fatrelu", threshold=0.5)):
        with pytest.raises(ValueError, match="thresholds are for fatrelu with threshold 0 alone"):
            run_block(block, options)
    options = BlockOptions(activation="fatrelu")
    with pytest.raises(ValueError, match=r"thresholds must have shape \(16,\), got \(8,\)"):
        run_block(replace(block, thresholds=torch.zeros(8)), options)
    with pytest.raises(TypeError, match=r"thresholds must be torch.float32, got torch.float64"):
        run_block(replace(block, thresholds=torch.zeros(16).double()), options)
    with pytest.raises(NotImplementedError, match="a threshold for each neuron has no gradients"):
        run_block(replace(block, x=x.clone().requires_grad_()), options)
    torch.library.opcheck(MLP, (x, w_up, None, w_down, None, None, "fatrelu"), {"thresholds": block.thresholds})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_reaches_y(activation: str) -> None:
    operands = tensors()
    operands[0][0, 2, 5] = torch.nan
    y = GATED_MLP(*operands, activation, ACTIVATIONS[activation], 8)
    assert y[0, 2].isnan().all()
    assert int(y.isnan().any(-1).sum()) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_residual_that_is_not_finite_reaches_its_place_of_y(value: float) -> None:
    operands = tensors(residual=True)
    operands[-1][0, 2, 5] = value
    y = GATED_MLP(*operands, "relu", 0.0, 8)
    assert not y[0, 2, 5].isfinite()
    assert int((~y.isfinite()).sum()) == 1


@pytest.mark.parametrize("gated", [True, False])
def test_the_residual_is_added_before_the_one_rounding(gated: bool) -> None:
    """Rounded by itself, each of the two summands would be lost beside the other, or overflow."""
    eye, ones = torch.eye(8).half(), torch.ones(1, 8).half()
    weights = [eye, None, eye, None] if gated else [eye, None]
    op = GATED_MLP if gated else MLP
    # 2049 is not a float16; 2049 - 2048 is 1, where rounding first gives 0.
    bias = torch.full((8,), 2048.0).half()
    y = op(ones, *weights, eye, bias, torch.full((1, 8), -2048.0).half(), "relu", 0.0, 8)
    assert torch.equal(y, ones)
    # 65504 + 65504 overflows in float16; with a residual of -65504 the sum does not.
    large = (65504 * eye.float()).half()
    bias = torch.full((8,), 65504.0).half()
    y = op(ones, *weights, large, bias, torch.full((1, 8), -65504.0).half(), "relu", 0.0, 8)
    assert torch.equal(y, torch.full((1, 8), 65504.0).half())


def test_an_inactive_neuron_contributes_nothing() -> None:
    eye = torch.eye(8)
    x = torch.full((1, 8), 1.0)
    w_gate = torch.diag(torch.tensor([-1.0, 1, 1, 1, 1, 1, 1, 1]))
    w_up = eye.clone()
    w_up[0, 0] = torch.inf
    y = GATED_MLP(x, w_gate, None, w_up, None, eye, None, None, "relu", 0.0, 8)
    assert torch.equal(y, torch.tensor([[0, 1.0, 1, 1, 1, 1, 1, 1]]))


@pytest.mark.parametrize("shape", [(D_MODEL,), (0, D_MODEL), (1, D_MODEL), (2, 1, 3, D_MODEL)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    operands = tensors()
    operands[0] = torch.randn(shape)
    y = GATED_MLP(*operands, "relu", 0.0, 8)
    assert y.shape == (*shape[:-1], D_OUT)
    assert_same(y, reference(operands, "relu", 0.0).float())


def test_inputs_are_not_changed() -> None:
    operands = tensors()
    copies = [None if t is None else t.clone() for t in operands]
    GATED_MLP(*operands, "relu", 0.0, 8)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(operands, copies, strict=True))


def test_inputs_may_be_strided() -> None:
    operands = tensors()
    expected = GATED_MLP(*operands, "relu", 0.0, 8)
    strided = [t if t is None or t.dim() < 2 else t.mT.contiguous().mT for t in operands]
    assert not any(t.is_contiguous() for t in strided if t is not None and t.dim() > 1)
    assert_same(GATED_MLP(*strided, "relu", 0.0, 8), expected)


def test_the_kernels_are_given_aligned_memory() -> None:
    """As for a slice of a packed bias; tested without the kernels, on a CPU."""
    packed = torch.randn(300).bfloat16()
    for part in (packed[100:], packed[:100], packed[8:], packed[::2], packed.view(3, 100)[:, 4:]):
        read = as_read(part)
        assert read.is_contiguous() and read.data_ptr() % 16 == 0
        assert torch.equal(read, part)
    assert as_read(packed).data_ptr() == packed.data_ptr()


SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {
    "x": (0, (2, D_MODEL + 1)),
    "b_gate": (2, (D_FF - 1,)),
    "b_up": (4, (1,)),
    "w_up": (3, (D_FF, D_MODEL + 8)),
    "w_down": (5, (D_OUT, D_FF)),
    "b_down": (6, (D_FF,)),
    "residual": (7, (ROWS, D_OUT)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_shape(name: str, device: str) -> None:
    operands = tensors()
    slot, shape = SHAPES[name]
    operands[slot] = torch.randn(shape)
    operands = [None if t is None else t.to(device) for t in operands]
    with pytest.raises(ValueError, match=f"twell: {name} must have shape"):
        GATED_MLP(*operands, "relu", 0.0, 8)


@pytest.mark.parametrize(("slot", "name"), [(1, "the first weight"), (5, "w_down")])
@pytest.mark.parametrize("shape", [(D_FF,), (1, D_FF, D_MODEL)])
def test_weight_that_is_no_matrix(slot: int, name: str, shape: tuple[int, ...]) -> None:
    operands = tensors()
    operands[slot] = torch.randn(shape)
    with pytest.raises(ValueError, match=f"twell: {name} must have two dimensions, got "):
        GATED_MLP(*operands, "relu", 0.0, 8)


@pytest.mark.parametrize("slot", [0, 2, 3, 4, 5, 6, 7])
def test_wrong_dtype(slot: int) -> None:
    operands = tensors(residual=True)
    operands[slot] = operands[slot].half()
    with pytest.raises(TypeError, match=r"must be torch\.float32 like the weights, got torch\.float16"):
        GATED_MLP(*operands, "relu", 0.0, 8)


@pytest.mark.parametrize("activation", ["silu", "RELU", ""])
def test_wrong_activation(activation: str) -> None:
    with pytest.raises(ValueError, match="activation must be one of relu, relu2, fatrelu, drelu"):
        GATED_MLP(*tensors(), activation, 0.0, 8)


def test_drelu_needs_a_gate() -> None:
    with pytest.raises(ValueError, match="activation must be one of relu, relu2, fatrelu, got 'drelu'"):
        MLP(*tensors(gated=False), "drelu", 0.0, 8)


@pytest.mark.parametrize("biases", ["", "gud"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck(biases: str, dtype: torch.dtype) -> None:
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, gated in ((GATED_MLP, True), (MLP, False)):
        operands = tensors(dtype, biases, gated, residual=biases != "")
        torch.library.opcheck(op, (*operands, "relu", 0.0, 8), test_utils=utilities)
        torch.library.opcheck(op, (*operands, "relu", 0.0, 8, 256), test_utils=utilities)


def test_meta_gives_shape_and_dtype() -> None:
    operands = [None if t is None else t.to("meta") for t in tensors(torch.float16)]
    y = GATED_MLP(*operands, "relu", 0.0, 8)
    assert (y.shape, y.dtype, y.device.type) == ((2, ROWS, D_OUT), torch.float16, "meta")
