"""The build and runtime methods of the plugins, called as an engine calls them, by a stand-in for TensorRT.

Machines without full TensorRT check `enqueue` here: against the C API on the same tensors, bit for bit. tests/tensorrt
runs it in real engines; the C API itself is checked in test_kernels.py and test_attention_gpu.py.
"""

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.plugins import plugin_host
from tests.plugins.attention_calls import SCALE, MakePlan, assert_right, lib, make_plan, on_gpu, random_operands
from tests.plugins.plugin_host import (
    BF16,
    CHW4,
    FLOAT32,
    FP8,
    FP16,
    INT32,
    TORCH,
    host,
    make_desc,
    make_descs,
    make_ranges,
)
from twellc.plugins import library
from twellc.plugins.block import set_scales
from twellc.plugins.fp8 import scale_blocks

__all__ = ["host", "lib", "make_plan"]


EPS = 1e-5


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
    scales: tuple[str, str] | None = None  # how many gate and up, and down have, if weights are of fp8
    thresholds: bool = False
    norm: str = "none"
    of_norm: tuple[str, ...] = ()

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
        if self.scales is not None:
            forms: dict[str, tuple[int, ...]] = {"tensor": (), "row": (self.d_ff, 1), "column": (1, self.d_out)}
            for name in [name for name in shapes if name[:2] == "w_"]:
                form = self.scales[name == "w_down"]
                shapes[f"{name}_scale"] = scale_blocks(*shapes[name]) if form == "block" else forms[form]
        if self.thresholds:
            shapes["thresholds"] = (self.d_ff,)
        return shapes | dict.fromkeys(self.of_norm, (self.d_model,))

    def kind(self, name: str, dtype: int) -> int:
        """Return the type of an input, by its name in the C API, of a block of this element type."""
        if name == "thresholds":
            return FLOAT32
        if self.scales is None or name[:2] != "w_":
            return dtype
        return FLOAT32 if name.endswith("_scale") else FP8

    def problem(self, tokens: int, dtype: int) -> library.Problem:
        problem = library.Problem(
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
            norm=library.NORMS[self.norm],
            eps=EPS,
        )
        if self.scales is not None:
            set_scales(problem, *self.scales)
        return problem

    def create(self, host: ctypes.CDLL) -> Any:
        bias_fields = {"gate_bias": "gate", "up_bias": "up"} if self.gated else {"up_bias": "gate"}
        values: dict[str, str | int | float] = {
            name: int(bias in self.biases) for name, bias in (bias_fields | {"down_bias": "down"}).items()
        }
        values |= {"activation": self.activation, "threshold": self.threshold, "residual": int(self.residual)}
        values |= {"compression": self.compression, "hot": self.hot, "scales": int(self.scales is not None)}
        values |= {"thresholds": int(self.thresholds), "norm": self.norm, "eps": EPS}
        values |= {name: int(name in self.of_norm) for name in ("norm_weight", "norm_bias")}
        return plugin_host.create_plugin(host, library.library_path(), 0 if self.gated else 1, values)

    def tensors(self, leading: Sequence[int], dtype: int = BF16) -> plugin_host.Tensors:
        return [(shape, self.kind(name, dtype)) for name, shape in self.inputs(leading).items()]


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
    Block(gated=True, biases=("gate", "up", "down"), residual=True, scales=("row", "row"), d_model=128),
    Block(gated=True, scales=("tensor", "column")),
    Block(gated=True, scales=("block", "block"), residual=True, d_model=200),
    Block(gated=False, biases=("down",), scales=("row", "tensor")),
    Block(gated=False, biases=("gate", "down"), activation="fatrelu", thresholds=True, d_ff=70_000),
    Block(gated=True, residual=True, activation="fatrelu", thresholds=True, scales=("tensor", "tensor")),
    Block(gated=True, residual=True, norm="rms", of_norm=("norm_weight",)),
    Block(gated=False, biases=("gate",), norm="layer", of_norm=("norm_weight", "norm_bias")),
    Block(gated=True, norm="layer", of_norm=("norm_bias",), scales=("row", "tensor")),
]


Create = Callable[[ctypes.CDLL], Any]


def create_attention(host: ctypes.CDLL, has_lengths: bool = True, causal: bool = True) -> Any:
    path = library.attention_library_path()
    if path is None:
        pytest.skip("the attention library was not built")
    values: dict[str, str | int | float] = {"scale": SCALE, "causal": int(causal), "lengths": int(has_lengths)}
    return plugin_host.create_plugin(host, path, 0, values)


def qkv(tokens: int, has_lengths: bool = True) -> plugin_host.Tensors:
    rows: list[tuple[tuple[int, ...], int]] = [((2, tokens, heads, 64), BF16) for heads in (4, 2, 2)]
    return [*rows, ((2,), INT32)] if has_lengths else rows


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("block", BLOCKS)
def test_workspace_is_that_of_the_largest_shape(host: ctypes.CDLL, block: Block, dtype: int) -> None:
    ranges = make_ranges(block.tensors((1, 1), dtype), block.tensors((3, 700), dtype))
    plugin = block.create(host)
    assert host.configure(plugin, ranges, len(ranges), None) == 0
    expected = library.load().twell_workspace_bytes(ctypes.byref(block.problem(2100, dtype)))
    assert host.workspace_size(plugin, ranges, len(ranges), None) == expected > 0
    host.destroy(plugin)


def test_attention_asks_for_the_least_workspace_without_a_gpu(
    host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which may want more")
    plugin = create_attention(host)
    ranges = make_ranges(qkv(1), qkv(4096))
    # Of a computed tensor TensorRT may know a bound only, other than that of q.
    ranges[1].max = plugin_host.make_dims((5, 9000, 2, 64))
    assert host.configure(plugin, ranges, 4, None) == 0
    assert host.workspace_size(plugin, ranges, 4, None) == 32 << 20
    ranges[2].max = plugin_host.make_dims((2, 4096, 2, 60))
    assert host.configure(plugin, ranges, 4, None) != 0
    host.destroy(plugin)
    message = "width must be a positive multiple of 8, up to 256 (q up to [2, 4096, 4, 64], k up to [5, 9000, 2, 64])"
    assert f"log 1 TwellAttention 'layer0': {message}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("create", "counts"), [(Block(gated=False).create, None), (create_attention, 3)], ids=("block", "attention")
)
def test_only_linear_tensors_of_one_type_are_supported(host: ctypes.CDLL, create: Create, counts: int | None) -> None:
    """All have the type of the first, which is bf16 or fp16; `counts` is the position of an int32 input."""
    plugin = create(host)
    places = range(4 if counts is None else 5)

    def types(kind: int) -> list[int]:
        return [INT32 if place == counts else kind for place in places]

    for dtype, place in itertools.product((BF16, FP16), places):
        assert plugin_host.supports(host, plugin, place, types(dtype))
        assert not plugin_host.supports(host, plugin, place, types(dtype), CHW4)
        for other in (FP16 if dtype == BF16 else BF16, FLOAT32):
            changed = types(dtype)
            changed[place] = other
            assert plugin_host.supports(host, plugin, place, changed) == (place == 0 and other != FLOAT32)
    for place in (-1, len(places)):
        assert not plugin_host.supports(host, plugin, place, types(BF16))
    host.destroy(plugin)


@pytest.mark.sampled(26)
@pytest.mark.parametrize("leading", [(), (0,), (5,), (2, 3), (2, 0, 3), (1, 2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("block", BLOCKS)
def test_any_rank_and_token_count_is_accepted(host: ctypes.CDLL, block: Block, leading: tuple[int, ...]) -> None:
    plugin = block.create(host)
    inputs = make_descs(block.tensors(leading))
    assert host.shape_change(plugin, inputs, len(inputs), None) == 0
    host.destroy(plugin)


GATED, RESIDUAL = Block(gated=True), Block(gated=True, residual=True)
SCALED = Block(gated=False, scales=("row", "column"))
ONE_TYPE = "all inputs must be bf16, or all fp16"
OF_KEYS, OF_Y = "expected [batch, keys, kv_heads, width]", "expected that of y, [..., d_out] = [4, 32]"


@pytest.mark.parametrize(
    ("block", "slot", "shape", "dtype", "message"),
    [
        (GATED, 0, (4, 60), BF16, "input x has shape [4, 60]; its last extent must be d_model = 64"),
        (GATED, 0, (), BF16, "input x has rank 0; expected [..., d_model] of rank 1 to 8"),
        (GATED, 0, (1 << 40, 1 << 40, 64), BF16, f"tokens must be 0 to 536870912 (2^29) (x {[1 << 40, 1 << 40, 64]}"),
        (GATED, 1, (300, 60), BF16, "input w_up has shape [300, 64]; expected [d_ff, d_model] = [300, 60]"),
        (GATED, 2, (301, 64), BF16, "input w_up has shape [301, 64]; expected [d_ff, d_model] = [300, 64]"),
        (GATED, 3, (300, 32, 1), BF16, "input w_down has shape [300, 32, 1]; expected [d_ff, d_out]"),
        (GATED, 3, (300, 32), FP16, f"input w_down is fp16; {ONE_TYPE} (x is bf16)"),
        (GATED, 0, (4, 64), FLOAT32, f"input x is float32; {ONE_TYPE}"),
        # Only the shapes tell how many neurons there are.
        (Block(gated=True, hot=301), 0, (4, 64), BF16, "field 'hot': got 301; allowed: 0 to d_ff = 300"),
        (RESIDUAL, 4, (4, 64), BF16, f"input residual has shape [4, 64]; {OF_Y}"),
        (RESIDUAL, 4, (5, 32), BF16, f"input residual has shape [5, 32]; {OF_Y}"),
        (RESIDUAL, 4, (2, 2, 32), BF16, f"input residual has shape [2, 2, 32]; {OF_Y}"),
        (RESIDUAL, 4, (32,), BF16, f"input residual has shape [32]; {OF_Y}"),
        (RESIDUAL, 4, (4, 32), FP16, f"input residual is fp16; {ONE_TYPE} (x is bf16)"),
        (SCALED, 1, (300, 64), BF16, "input w_up is bf16; expected fp8, or int8 with its bytes"),
        (SCALED, 0, (4, 64), FP8, "input x is fp8; all inputs but weights and their scales must be bf16, or all fp16"),
        (
            SCALED,
            3,
            (64, 1),
            FLOAT32,
            "input w_up_scale has shape [64, 1]; expected none, [d_ff / 128, d_model / 128] or [d_ff, 1] = [300, 1]",
        ),
        (
            SCALED,
            4,
            (1, 300),
            FLOAT32,
            "input w_down_scale has shape [1, 300]; expected none, [d_ff / 128, d_out / 128], [d_ff, 1] or [1, d_out]",
        ),
        (None, 0, (2, 9, 256), BF16, "input q has shape [2, 9, 256]; expected [batch, tokens, heads, width] = [?, ?"),
        (None, 0, (2, 9, 3, 64), BF16, "heads must be a positive multiple of kv_heads (q [2, 9, 3, 64], k [2, 9, 2, "),
        (None, 0, (2, 9, 4, 60), BF16, f"input k has shape [2, 9, 2, 64]; {OF_KEYS} = [2, 9, ?, 60]"),
        (None, 1, (2, 8, 2, 64), BF16, f"input k has shape [2, 8, 2, 64]; {OF_KEYS} = [2, 9, ?, 64]"),
        (None, 1, (3, 9, 2, 64), BF16, f"input k has shape [3, 9, 2, 64]; {OF_KEYS} = [2, 9, ?, 64]"),
        (None, 2, (2, 9, 1, 64), BF16, f"input v has shape [2, 9, 1, 64]; {OF_KEYS} = [2, 9, 2, 64]"),
        (None, 2, (2, 9, 2, 64), FP16, "input v is fp16; q, k and v must all be bf16, or all fp16 (q is bf16)"),
        (None, 3, (3,), INT32, "input lengths has shape [3]; expected [batch] = [2]"),
        (None, 3, (2,), FLOAT32, "input lengths is float32; expected int32"),
    ],
)
def test_bad_shapes_at_run_time_are_refused(
    host: ctypes.CDLL,
    capfd: pytest.CaptureFixture[str],
    block: Block | None,
    slot: int,
    shape: tuple[int, ...],
    dtype: int,
    message: str,
) -> None:
    """Of a block, or of attention."""
    plugin = create_attention(host) if block is None else block.create(host)
    inputs = make_descs(qkv(9) if block is None else block.tensors((4,)))
    inputs[slot] = make_desc(shape, dtype)
    assert host.shape_change(plugin, inputs, len(inputs), None) != 0
    host.destroy(plugin)
    name = "TwellAttention" if block is None else "TwellGatedMlp" if block.gated else "TwellMlp"
    assert f"log 1 {name} 'layer0': {message}" in capfd.readouterr().out


def test_a_wrong_number_of_inputs_is_refused(host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = create_attention(host)
    assert host.shape_change(plugin, make_descs(qkv(9, has_lengths=False)), 3, None) != 0
    host.destroy(plugin)
    assert "TwellAttention 'layer0': got 3 inputs; expected 4: q, k, v, lengths" in capfd.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("leading", [(), (7,), (2, 150), (0, 4)])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("block", BLOCKS)
def test_enqueue_equals_the_c_api(host: ctypes.CDLL, block: Block, dtype: int, leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = {
        name: (torch.randn(shape, device="cuda") / (1 if name == "x" else 4)).to(TORCH[block.kind(name, dtype)])
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
    status = plugin_host.enqueue(host.enqueue, plugin, list(tensors.values()), actual, workspace)
    torch.cuda.synchronize()
    host.destroy(plugin)
    assert status == 0
    assert not torch.isnan(actual).any()
    assert torch.equal(actual.view(torch.int16), expected.view(torch.int16))
    if tokens and block.d_ff > 1:  # a single neuron may well be inactive for a single token
        assert actual.abs().max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("has_lengths", [False, True])
def test_attention_back_and_forth(lib: ctypes.CDLL, host: ctypes.CDLL, make_plan: MakePlan, has_lengths: bool) -> None:
    plugin = create_attention(host, has_lengths)
    array = make_ranges(qkv(1, has_lengths), qkv(500, has_lengths))
    assert host.configure(plugin, array, len(array), None) == 0
    size = host.workspace_size(plugin, array, len(array), None)
    assert size >= 32 << 20
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    attached, run = host.attach(plugin), functools.partial(plugin_host.enqueue, host.enqueue_attached)
    host.destroy(plugin)
    # Back and forth: the plans of shapes that come again are kept.
    for tokens in (7, 500, 1, 7, 499, 500):
        operands = random_operands(2, tokens, tokens, 4, 2, 64)
        lengths = on_gpu([tokens, 1] if has_lengths else None)
        given = make_descs(qkv(tokens, has_lengths))
        assert host.shape_change(attached, given, len(given), None) == 0
        y = torch.full_like(operands[0], math.nan)
        assert run(attached, operands if lengths is None else [*operands, lengths], y, workspace) == 0
        torch.cuda.synchronize()
        assert_right(y, operands, [tokens, 1] if has_lengths else None, True)
        expected = make_plan(operands, has_lengths, True).run(operands, lengths)
        assert torch.equal(y, expected)
    host.destroy(attached)


@pytest.mark.gpu
def test_attention_of_shapes_that_were_not_set_are_refused(
    lib: ctypes.CDLL, host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin = create_attention(host, has_lengths=False)
    attached, run = host.attach(plugin), functools.partial(plugin_host.enqueue, host.enqueue_attached)
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    operands = random_operands(2, 9, 9, 4, 2, 64)
    assert run(plugin, operands, torch.empty_like(operands[0]), workspace) != 0
    given = make_descs(qkv(8, has_lengths=False))
    assert host.shape_change(attached, given, len(given), None) == 0
    assert run(attached, operands, torch.empty_like(operands[0]), workspace) != 0
    for each in (plugin, attached):
        host.destroy(each)
    output = capfd.readouterr().out
    assert "log 1 TwellAttention 'layer0': run before its shapes were set" in output
    assert "log 1 TwellAttention 'layer0': run with shapes that were not set before" in output
