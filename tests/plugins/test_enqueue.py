"""The build and runtime methods of the plugins, called as an engine calls them, by a stand-in for TensorRT.

Machines without full TensorRT check `enqueue` here: against the C API on the same tensors, bit for bit. tests/tensorrt
runs it in real engines; the C API itself is checked in test_kernels.py.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.plugins.plugin_host import (
    BF16,
    CHW4,
    FLOAT32,
    FP16,
    LINEAR,
    TORCH,
    Desc,
    DynamicDesc,
    Field,
    Fields,
    host,
    make_desc,
    make_dims,
)
from twellc.plugins import library

__all__ = ["host"]


@dataclass(frozen=True)
class Block:
    gated: bool
    biases: tuple[str, ...] = ()
    residual: bool = False
    activation: str = "relu"
    threshold: float = 0.0
    compression: int = 8
    hot: int = 0
    d_model: int = 64
    d_ff: int = 300
    d_out: int = 32

    def inputs(self, leading: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each plugin input, in order, under its name in the C API."""
        shapes: dict[str, tuple[int, ...]] = {"x": (*leading, self.d_model)}
        for name in ("gate", "up") if self.gated else ("gate",):
            shapes[f"w_{name}"] = (self.d_ff, self.d_model)
            if name in self.biases:
                shapes[f"b_{name}"] = (self.d_ff,)
        shapes["w_down"] = (self.d_ff, self.d_out)
        if "down" in self.biases:
            shapes["b_down"] = (self.d_out,)
        if self.residual:
            shapes["residual"] = (*leading, self.d_out)
        return shapes

    def problem(self, tokens: int, dtype: int) -> library.Problem:
        return library.Problem(
            tokens=tokens,
            d_model=self.d_model,
            d_ff=self.d_ff,
            d_out=self.d_out,
            compression=self.compression,
            dtype=library.DTYPES["float16" if dtype == FP16 else "bfloat16"],
            variant=library.VARIANTS["gated" if self.gated else "plain"],
            activation=library.ACTIVATIONS[self.activation],
            threshold=self.threshold,
            hot=self.hot,
        )

    def create(self, host: ctypes.CDLL) -> Any:
        """Create the plugin of this block."""
        creator = host.load(str(library.library_path()).encode(), 0 if self.gated else 1)
        bias_fields = {"gate_bias": "gate", "up_bias": "up"} if self.gated else {"up_bias": "gate"}
        values: dict[str, ctypes.c_int32 | ctypes.c_float] = {
            name: ctypes.c_int32(bias in self.biases) for name, bias in (bias_fields | {"down_bias": "down"}).items()
        }
        values["residual"] = ctypes.c_int32(self.residual)
        values["compression"] = ctypes.c_int32(self.compression)
        values["hot"] = ctypes.c_int32(self.hot)
        values["threshold"] = ctypes.c_float(self.threshold)
        text = ctypes.create_string_buffer(self.activation.encode())
        items = [Field(b"activation", ctypes.addressof(text), 6, len(text))]
        for name, value in values.items():
            kind = 1 if isinstance(value, ctypes.c_float) else 5
            items.append(Field(name.encode(), ctypes.addressof(value), kind, 1))
        plugin = host.create(creator, Fields(len(items), (Field * len(items))(*items)))
        assert plugin
        return plugin


BLOCKS = [
    Block(gated=True),
    Block(gated=True, biases=("gate", "up", "down"), d_out=64),
    Block(gated=True, biases=("up",), compression=1),
    Block(gated=True, biases=("gate", "down"), activation="drelu"),
    Block(gated=True, activation="fatrelu", threshold=0.5, d_ff=1),
    Block(gated=False, d_model=8, d_ff=512),
    Block(gated=False, biases=("gate",), activation="relu2"),
    Block(gated=False, biases=("gate", "down")),
    Block(gated=True, residual=True),
    Block(gated=True, biases=("gate", "up", "down"), residual=True, d_out=64),
    Block(gated=False, biases=("down",), residual=True),
    Block(gated=True, d_ff=900, hot=500, residual=True),
    Block(gated=False, hot=300),
]


def descs(block: Block, leading: Sequence[int], dtype: int) -> Any:
    shapes = block.inputs(leading).values()
    return (Desc * len(shapes))(*[make_desc(shape, dtype) for shape in shapes])


# ---- build ----


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("block", BLOCKS)
def test_workspace_is_that_of_the_largest_shape(host: ctypes.CDLL, block: Block, dtype: int) -> None:
    inputs = [
        DynamicDesc(make_desc(now, dtype), make_dims(least), make_dims(most), make_dims(least))
        for now, least, most in zip(
            *(block.inputs(leading).values() for leading in ((-1, -1), (1, 1), (3, 700))), strict=True
        )
    ]
    array = (DynamicDesc * len(inputs))(*inputs)
    plugin = block.create(host)
    assert host.configure(plugin, array, len(inputs), None) == 0
    expected = library.load().twell_workspace_bytes(ctypes.byref(block.problem(2100, dtype)))
    assert host.workspace_size(plugin, array, len(inputs), None) == expected > 0
    host.destroy(plugin)


def test_only_linear_bf16_or_fp16_of_one_kind_is_supported(host: ctypes.CDLL) -> None:
    plugin = Block(gated=False).create(host)

    def supports(position: int, types: Sequence[int], layouts: Sequence[int] = (LINEAR,) * 4) -> bool:
        items = [DynamicDesc(make_desc((8, 8), *pair)) for pair in zip(types, layouts, strict=True)]
        supported: bool = host.supports(plugin, position, (DynamicDesc * 4)(*items), 3)
        return supported

    for dtype, position in itertools.product((BF16, FP16), range(4)):
        assert supports(position, [dtype] * 4)
    for position in range(4):
        assert not supports(position, [FLOAT32] * 4)
        assert not supports(position, [BF16] * 4, [CHW4] * 4)
    for position in range(1, 4):
        assert not supports(position, [BF16, *([FP16] * 3)])
    assert not supports(4, [BF16] * 4)
    assert not supports(-1, [BF16] * 4)
    host.destroy(plugin)


# ---- runtime ----


@pytest.mark.parametrize("leading", [(), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("block", BLOCKS)
def test_any_rank_and_token_count_is_accepted(host: ctypes.CDLL, block: Block, leading: tuple[int, ...]) -> None:
    plugin = block.create(host)
    inputs = descs(block, leading, BF16)
    assert host.shape_change(plugin, inputs, len(inputs), None) == 0
    host.destroy(plugin)


@pytest.mark.parametrize(
    ("slot", "shape", "dtype", "message"),
    [
        (0, (4, 60), BF16, "input x has shape [4, 60]; its last extent must be d_model = 64"),
        (0, (), BF16, "input x has rank 0; expected [..., d_model] of rank 1 to 8"),
        (0, (1 << 40, 1 << 40, 64), BF16, "tokens must be 0 to 536870912 (2^29) (x [1099511627776, 1099511627776, 64]"),
        (1, (300, 60), BF16, "input w_up has shape [300, 64]; expected [d_ff, d_model] = [300, 60]"),
        (2, (301, 64), BF16, "input w_up has shape [301, 64]; expected [d_ff, d_model] = [300, 64]"),
        (3, (300, 32, 1), BF16, "input w_down has shape [300, 32, 1]; expected [d_ff, d_out]"),
        (3, (300, 32), FP16, "input w_down is fp16; all inputs must be bf16, or all fp16 (x is bf16)"),
        (0, (4, 64), FLOAT32, "input x is float32; all inputs must be bf16, or all fp16"),
    ],
)
def test_bad_shapes_at_run_time_are_refused(
    host: ctypes.CDLL, capfd: pytest.CaptureFixture[str], slot: int, shape: tuple[int, ...], dtype: int, message: str
) -> None:
    block = Block(gated=True)
    plugin = block.create(host)
    inputs = descs(block, (4,), BF16)
    inputs[slot] = make_desc(shape, dtype)
    assert host.shape_change(plugin, inputs, len(inputs), None) != 0
    host.destroy(plugin)
    assert f"log 1 TwellGatedMlp 'layer0': {message}" in capfd.readouterr().out


def test_hot_beyond_d_ff_is_refused(host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the shapes tell how many neurons there are."""
    block = Block(gated=True, hot=301)
    plugin = block.create(host)
    inputs = descs(block, (4,), BF16)
    assert host.shape_change(plugin, inputs, len(inputs), None) != 0
    host.destroy(plugin)
    message = "log 1 TwellGatedMlp 'layer0': field 'hot': got 301; allowed: 0 to d_ff = 300"
    assert message in capfd.readouterr().out


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 64), BF16, "input residual has shape [4, 64]; expected that of y, [..., d_out] = [4, 32]"),
        ((5, 32), BF16, "input residual has shape [5, 32]; expected that of y, [..., d_out] = [4, 32]"),
        ((2, 2, 32), BF16, "input residual has shape [2, 2, 32]; expected that of y, [..., d_out] = [4, 32]"),
        ((32,), BF16, "input residual has shape [32]; expected that of y, [..., d_out] = [4, 32]"),
        ((4, 32), FP16, "input residual is fp16; all inputs must be bf16, or all fp16 (x is bf16)"),
    ],
)
def test_bad_residual_at_run_time_is_refused(
    host: ctypes.CDLL, capfd: pytest.CaptureFixture[str], shape: tuple[int, ...], dtype: int, message: str
) -> None:
    block = Block(gated=True, residual=True)
    plugin = block.create(host)
    inputs = descs(block, (4,), BF16)
    assert host.shape_change(plugin, inputs, len(inputs), None) == 0
    inputs[4] = make_desc(shape, dtype)
    assert host.shape_change(plugin, inputs, len(inputs), None) != 0
    host.destroy(plugin)
    assert f"log 1 TwellGatedMlp 'layer0': {message}" in capfd.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("leading", [(), (7,), (2, 150), (0, 4)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("block", BLOCKS)
def test_enqueue_equals_the_c_api(host: ctypes.CDLL, block: Block, dtype: int, leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape, device="cuda").to(TORCH[dtype]) / (1 if name == "x" else 4)
        for name, shape in block.inputs(leading).items()
    }
    tokens = math.prod(leading)
    problem = block.problem(tokens, dtype)
    api = library.load()
    size = api.twell_workspace_bytes(ctypes.byref(problem))
    workspace = torch.empty(max(size, 256), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    expected, actual = (torch.full((*leading, block.d_out), float("nan"), device="cuda").to(TORCH[dtype]) for _ in "ab")

    pointers = library.Tensors(**{name: tensor.data_ptr() for name, tensor in tensors.items()}, y=expected.data_ptr())
    arguments = (ctypes.byref(problem), ctypes.byref(pointers), workspace.data_ptr(), size, stream)
    assert api.twell_mlp(*arguments) == 0

    plugin = block.create(host)
    inputs = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors.values()])
    outputs = (ctypes.c_void_p * 1)(actual.data_ptr())
    output = make_desc((*leading, block.d_out), dtype)
    status = host.enqueue(
        plugin, descs(block, leading, dtype), ctypes.byref(output), inputs, outputs, workspace.data_ptr(), stream
    )
    torch.cuda.synchronize()
    host.destroy(plugin)
    assert status == 0
    assert not torch.isnan(actual).any()
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))
    if tokens and block.d_ff > 1:  # a single neuron may well be inactive for a single token
        assert actual.abs().max() > 0
