"""The tolerance must reject what a broken sparse kernel produces, and accept what a sound one does."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.plugins import reference
from tests.plugins.reference import Block, assert_close, decode

D_MODEL, D_FF, D_OUT, ROWS = 128, 1024, 96, 24
DTYPES = (torch.bfloat16, torch.float16)
SHIFTS = {"sparse": 1.9, "half": 0.0, "dense": -4.0}  # of z, in its standard deviations


def make_block(dtype: torch.dtype, shift: float, *, gated: bool = True, activation: str = "relu") -> Block:
    """A random block; the first column of x is 1 and carries the shift that sets the density."""

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns) / math.sqrt(columns)

    x = torch.randn(ROWS, D_MODEL)
    x[:, 0] = 1.0
    w_gate = draw(D_FF, D_MODEL)
    w_gate[:, 0] = -shift
    return Block(
        x=x.to(dtype),
        w_gate=w_gate.to(dtype),
        w_up=draw(D_FF, D_MODEL).to(dtype) if gated else None,
        w_down=draw(D_FF, D_OUT).to(dtype),
        b_gate=(0.1 * torch.randn(D_FF)).to(dtype),
        b_up=(0.1 * torch.randn(D_FF)).to(dtype) if gated else None,
        b_down=None,
        activation=activation,
        threshold=0.01,
    )


@pytest.fixture(params=DTYPES, ids=("bf16", "fp16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


@pytest.fixture(params=SHIFTS)
def block(request: pytest.FixtureRequest, dtype: torch.dtype) -> Block:
    return make_block(dtype, SHIFTS[request.param])


def without(block: Block, *neurons: int) -> torch.Tensor:
    """A y from which some neurons are missing, otherwise as good as can be."""
    w_down = block.w_down.clone()
    w_down[list(neurons)] = 0
    return reference.emulate(dataclasses.replace(block, w_down=w_down))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu", "drelu"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
def test_accepts_plain_and_exact(dtype: torch.dtype, shift: float, gated: bool, activation: str) -> None:
    if activation == "drelu" and not gated:
        pytest.skip("drelu is gated only")
    for _ in range(5):
        block = make_block(dtype, shift, gated=gated, activation=activation)
        assert_close(reference.plain(block), block)
        assert_close(reference.emulate(block), block)


def test_accepts_both_sides_of_a_threshold(dtype: torch.dtype) -> None:
    # z lies half-way between two representable values, of which only the upper one exceeds the threshold.
    threshold = 0.75
    half = threshold * torch.finfo(dtype).eps / 3
    block = Block(
        x=torch.tensor([[1.0, 1.0]], dtype=dtype),
        w_gate=torch.tensor([[threshold, half], [0.0, 0.5]], dtype=dtype),
        w_up=None,
        w_down=torch.tensor([[3.0, -2.0], [1.0, 1.0]], dtype=dtype),
        activation="fatrelu",
        threshold=threshold,
    )
    active = (threshold * block.w_down[:1].double()).to(dtype)
    assert_close(active, block)
    assert_close(torch.zeros_like(active), block)
    clearly_active = dataclasses.replace(block, threshold=threshold * 0.9)
    assert_close(active, clearly_active)
    with pytest.raises(AssertionError, match="too large"):
        assert_close(torch.zeros_like(active), clearly_active)


def test_accepts_sums_in_fp32_that_cancel(dtype: torch.dtype) -> None:
    # 1 and -1 leave 2^-12, of which a sum in fp32 that cuts partial sums may lose the last bits of 1.
    block = Block(
        x=torch.ones(1, 2048, dtype=dtype),
        w_gate=torch.zeros(1, 2048, dtype=dtype),
        w_up=None,
        w_down=torch.ones(1, 8, dtype=dtype),
    )
    block.w_gate[0, :3] = torch.tensor([1.0, -1.0, 2.0**-12])
    steps = 2048 // 16
    y = torch.full((1, 8), 2.0**-12)
    assert_close((y + steps * 2.0**-24).to(dtype), block)
    with pytest.raises(AssertionError, match="too large"):
        assert_close((y + 8 * steps * 2.0**-24).to(dtype), block)


def test_reference_against_loops() -> None:
    block = make_block(torch.bfloat16, 1.0)
    assert block.w_up is not None and block.b_gate is not None and block.b_up is not None
    x, w_gate, w_up, w_down, b_gate, b_up = (
        t.double().numpy() for t in (block.x, block.w_gate, block.w_up, block.w_down, block.b_gate, block.b_up)
    )
    y = reference.reference(block).numpy()
    for row in (0, ROWS - 1):
        expected = np.zeros(D_OUT)
        for n in range(D_FF):
            z = x[row] @ w_gate[n] + b_gate[n]
            if z > 0:
                expected += z * (x[row] @ w_up[n] + b_up[n]) * w_down[n]
        np.testing.assert_allclose(y[row], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [0, 0.5])
def test_rejects_zeros_and_half(block: Block, share: float) -> None:
    with pytest.raises(AssertionError, match="too large"):
        assert_close(reference.emulate(block) * share, block)


@pytest.mark.parametrize("tile", range(D_FF // 256))
def test_rejects_a_dropped_tile(block: Block, tile: int) -> None:
    with pytest.raises(AssertionError, match="too large"):
        assert_close(without(block, *range(tile * 256, tile * 256 + 256)), block)


def test_rejects_a_dropped_nonzero_in_one_row(block: Block) -> None:
    h = reference._hidden(block, reference.gate_values(block).double())[5].abs()
    typical = h[h != 0].square().mean().sqrt()
    y = reference.emulate(block)
    y[5] = without(block, int((h - typical).abs().argmin()))[5]
    with pytest.raises(AssertionError, match="worst in row 5"):
        assert_close(y, block)


def test_rejects_a_doubled_nonzero_in_one_row(block: Block) -> None:
    h = reference._hidden(block, reference.gate_values(block).double())[5]
    n = int(h.abs().argmax())
    y = reference.emulate(block)
    y[5] = (2 * y[5].double() - without(block, n)[5].double()).to(y.dtype)
    with pytest.raises(AssertionError, match="worst in row 5"):
        assert_close(y, block)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rejects_one_value_that_is_not_finite(block: Block, value: float) -> None:
    y = reference.emulate(block)
    y[3, 7] = value
    with pytest.raises(AssertionError, match=r"first at \(3, 7\)"):
        assert_close(y, block)


def test_rejects_a_lost_nan(block: Block) -> None:
    y = reference.emulate(block)
    block.x[2, 1] = float("nan")
    with pytest.raises(AssertionError, match=r"first at \(2, 0\)"):
        assert_close(y, block)


def test_rejects_shape_and_dtype(block: Block) -> None:
    y = reference.emulate(block)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(y[:-1], block)
    with pytest.raises(AssertionError, match="expected torch"):
        assert_close(y.float(), block)


def test_is_exact() -> None:
    block = make_block(torch.bfloat16, 0.0)
    assert not reference.is_exact(block)
    whole: dict[str, Any] = {
        name: value.sign() for name, value in vars(block).items() if isinstance(value, torch.Tensor)
    }
    assert reference.is_exact(dataclasses.replace(block, **whole))
    huge = {name: value * 256 for name, value in whole.items()}
    assert not reference.is_exact(dataclasses.replace(block, **huge))


def encode(bits: np.ndarray, compression: int, *, fill: int) -> np.ndarray:
    rows, d_ff = bits.shape
    size, tiles = 256 // compression, -(-d_ff // 256)
    packed = np.full((rows, tiles * size), fill, np.uint32)
    for row in range(rows):
        for tile in range(tiles):
            columns = [n for n in range(tile * 256, min(tile * 256 + 256, d_ff)) if bits[row, n]]
            packed[row, tile * size] = len(columns)
            if len(columns) < size:
                for j, n in enumerate(columns):
                    packed[row, tile * size + 1 + j] = n | int(bits[row, n]) << 16
    return packed


@pytest.fixture
def bits() -> np.ndarray:
    generator = np.random.default_rng()
    values = generator.integers(1, 0x7F80, (6, 600)).astype(np.uint16)
    values[generator.random(values.shape) > 0.05] = 0
    values[0] = 0
    values[1, 256:512] = 0x3F80  # a full tile
    values[2, [0, 255, 256, 599]] = 0x7FC0
    return values


@pytest.mark.parametrize("compression", [1, 2, 4, 8])
def test_decode_inverts_encode(bits: np.ndarray, compression: int) -> None:
    fill = 0xDEADBEEF
    packed = encode(bits, compression, fill=fill)
    decoded = decode(packed, 600, compression)
    assert decoded.overflowed[1, 1]
    keep = np.repeat(~decoded.overflowed, 256, axis=1)[:, :600]
    np.testing.assert_array_equal(decoded.bits, np.where(keep, bits, 0))
    assert decoded.counts[:, 0].tolist() == (bits[:, :256] != 0).sum(axis=1).tolist()
    np.testing.assert_array_equal(decoded.written, packed != fill)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 257, "more non-zeros"),
        (1, 0x3F800100, "outside its tile"),
        (1, 0x00000000, "is zero"),
        (1, 0x3F800005, "not ascending"),
    ],
)
def test_decode_rejects(word: int, value: int, message: str) -> None:
    bits = np.zeros((1, 300), np.uint16)
    bits[0, [0, 5, 9]] = 0x3F80
    packed = encode(bits, 4, fill=0)
    packed[0, word] = value
    with pytest.raises(AssertionError, match=message):
        decode(packed, 300, 4)


def test_decode_rejects_columns_past_d_ff() -> None:
    bits = np.zeros((1, 300), np.uint16)
    bits[0, 299] = 0x3F80
    with pytest.raises(AssertionError, match="outside its tile"):
        decode(encode(bits, 4, fill=0), 299, 4)


def test_sound_result_where_plain_overflows() -> None:
    """The plain block's error then says nothing, but roundings of z that add up are no fault."""
    half = 2.0**-11  # of what the last bit of a float16 above 1 is worth
    z = torch.tensor([1 + 0.98 * half, 1 + 1.02 * half, 1 + 0.98 * half, 1 + 1.02 * half])
    block = Block(
        x=torch.ones(1, 2, dtype=torch.float16),
        w_gate=torch.stack([torch.ones(4), z - 1], dim=1).half(),
        w_up=torch.full((4, 2), 40000.0, dtype=torch.float16),
        w_down=torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).half() / 1024,
    )
    assert not torch.isfinite(reference.plain(block)).any()
    y = reference.emulate(block)
    assert_close(y, block)
    with pytest.raises(AssertionError, match="too large"):
        assert_close(y * 2, block)


def test_accepts_either_side_of_the_range() -> None:
    """A sum that rounds to the largest float16, or to infinity, as roundings of h will have it."""
    block = Block(
        torch.ones(1, 8, dtype=torch.float16),
        torch.ones(8, 8, dtype=torch.float16),
        None,
        torch.full((8, 8), 1023.75, dtype=torch.float16),
    )
    for value in (65504.0, float("inf")):
        assert_close(torch.full((1, 8), value, dtype=torch.float16), block)
    for value in (float("nan"), 60000.0):
        with pytest.raises(AssertionError):
            assert_close(torch.full((1, 8), value, dtype=torch.float16), block)


def test_one_rounding_more_of_the_first_neurons() -> None:
    """It is more than all others where the rest cancels what was rounded, and is allowed only if told of."""
    block = make_block(torch.bfloat16, 0.0, gated=False)
    half = D_FF // 2
    for tensor in (block.w_gate, block.b_gate):
        assert tensor is not None
        tensor[half:] = tensor[:half]
    block.w_down[:half].abs_()
    block.w_down[half:] = -block.w_down[:half]
    first = reference.reference(
        dataclasses.replace(block, w_gate=block.w_gate[:half], b_gate=block.b_gate[:half], w_down=block.w_down[:half])
    )
    y = (first.bfloat16().double() - first).bfloat16()
    assert_close(y, block, split=half)
    with pytest.raises(AssertionError, match="too large"):
        assert_close(y, block)
