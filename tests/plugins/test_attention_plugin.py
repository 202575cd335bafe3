"""The methods of the attention plugin, called as an engine calls them, by a stand-in for TensorRT."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.attention_calls import SCALE, MakePlan, assert_right, lib, make_plan, on_gpu, random_operands
from tests.plugins.plugin_host import (
    BF16,
    CHW4,
    FLOAT32,
    FP16,
    LINEAR,
    Desc,
    DynamicDesc,
    Field,
    Fields,
    host,
    make_desc,
    make_dims,
)
from twellc.plugins import library

__all__ = ["host", "lib", "make_plan"]

INT32 = 3  # nvinfer1::DataType
KEYS = "[batch, keys, kv_heads, width]"


def create(host: ctypes.CDLL, has_lengths: bool, causal: bool) -> Any:
    path = library.attention_library_path()
    if path is None:
        pytest.skip("the attention library was not built")
    values: dict[str, ctypes.c_int32 | ctypes.c_float] = {
        "scale": ctypes.c_float(SCALE),
        "causal": ctypes.c_int32(causal),
        "lengths": ctypes.c_int32(has_lengths),
    }
    items = [
        Field(name.encode(), ctypes.addressof(value), 1 if isinstance(value, ctypes.c_float) else 5, 1)
        for name, value in values.items()
    ]
    plugin = host.create(host.load(str(path).encode(), 0), Fields(len(items), (Field * len(items))(*items)))
    assert plugin
    return plugin


def shapes_of(tokens: int, has_lengths: bool) -> list[tuple[tuple[int, ...], int]]:
    rows: list[tuple[tuple[int, ...], int]] = [((2, tokens, heads, 64), BF16) for heads in (4, 2, 2)]
    return [*rows, ((2,), INT32)] if has_lengths else rows


def descs(tokens: int, has_lengths: bool) -> Any:
    items = [make_desc(shape, kind) for shape, kind in shapes_of(tokens, has_lengths)]
    return (Desc * len(items))(*items)


def enqueue(host: ctypes.CDLL, plugin: Any, tensors: list[Tensor], y: Tensor, workspace: Tensor) -> int:
    inputs = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
    outputs = (ctypes.c_void_p * 1)(y.data_ptr())
    output, stream = make_desc(y.shape, BF16), torch.cuda.current_stream().cuda_stream
    given = descs(y.shape[1], len(tensors) == 4)
    status: int = host.enqueue_attached(
        plugin, given, ctypes.byref(output), inputs, outputs, workspace.data_ptr(), stream
    )
    return status


# ---- without a GPU ----


@pytest.mark.parametrize(
    ("slot", "shape", "kind", "message"),
    [
        (0, (2, 9, 256), BF16, "input q has shape [2, 9, 256]; expected [batch, tokens, heads, width] = [?, ?, ?, ?]"),
        (0, (2, 9, 3, 64), BF16, "heads must be a positive multiple of kv_heads (q [2, 9, 3, 64], k [2, 9, 2, 64])"),
        (0, (2, 9, 4, 60), BF16, f"input k has shape [2, 9, 2, 64]; expected {KEYS} = [2, 9, ?, 60]"),
        (1, (2, 8, 2, 64), BF16, f"input k has shape [2, 8, 2, 64]; expected {KEYS} = [2, 9, ?, 64]"),
        (1, (3, 9, 2, 64), BF16, f"input k has shape [3, 9, 2, 64]; expected {KEYS} = [2, 9, ?, 64]"),
        (2, (2, 9, 1, 64), BF16, f"input v has shape [2, 9, 1, 64]; expected {KEYS} = [2, 9, 2, 64]"),
        (2, (2, 9, 2, 64), FP16, "input v is fp16; q, k and v must all be bf16, or all fp16 (q is bf16)"),
        (3, (3,), INT32, "input lengths has shape [3]; expected [batch] = [2]"),
        (3, (2,), FLOAT32, "input lengths is float32; expected int32"),
    ],
)  # fmt: skip
def test_bad_shapes_at_run_time_are_refused(
    host: ctypes.CDLL, capfd: pytest.CaptureFixture[str], slot: int, shape: tuple[int, ...], kind: int, message: str
) -> None:
    plugin = create(host, has_lengths=True, causal=True)
    given = descs(9, has_lengths=True)
    given[slot] = make_desc(shape, kind)
    assert host.shape_change(plugin, given, 4, None) != 0
    host.destroy(plugin)
    assert f"log 1 TwellAttention 'layer0': {message}" in capfd.readouterr().out


def test_a_wrong_number_of_inputs_is_refused(host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = create(host, has_lengths=True, causal=True)
    assert host.shape_change(plugin, descs(9, has_lengths=False), 3, None) != 0
    host.destroy(plugin)
    assert "TwellAttention 'layer0': got 3 inputs; expected 4: q, k, v, lengths" in capfd.readouterr().out


def test_only_linear_tensors_of_the_right_types_are_supported(host: ctypes.CDLL) -> None:
    plugin = create(host, has_lengths=True, causal=False)

    def supports(position: int, types: list[int], layout: int = LINEAR) -> bool:
        items = [DynamicDesc(make_desc((8, 8, 8, 8), kind, layout)) for kind in types]
        supported: bool = host.supports(plugin, position, (DynamicDesc * 5)(*items), 4)
        return supported

    for kind in (BF16, FP16):
        good = [kind, kind, kind, INT32, kind]
        assert all(supports(position, good) for position in range(5))
        assert not any(supports(position, good, CHW4) for position in range(5))
    assert not supports(0, [FLOAT32] * 5)
    assert not supports(1, [BF16, FP16, BF16, INT32, BF16])
    assert not supports(3, [BF16, BF16, BF16, BF16, BF16])
    assert not supports(4, [BF16, BF16, BF16, INT32, FP16])
    assert not supports(5, [BF16, BF16, BF16, INT32, BF16])
    assert not supports(-1, [BF16, BF16, BF16, INT32, BF16])
    host.destroy(plugin)


def test_a_build_without_a_gpu_asks_for_the_least_workspace(
    host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which may want more")
    plugin = create(host, has_lengths=True, causal=True)
    ranges = (DynamicDesc * 4)(
        *(
            DynamicDesc(make_desc((-1,) * len(least), kind), make_dims(least), make_dims(most), make_dims(least))
            for (least, kind), (most, _) in zip(shapes_of(1, True), shapes_of(4096, True), strict=True)
        )
    )
    # Of a computed tensor TensorRT may know a bound only, other than that of q.
    ranges[1].max = make_dims((5, 9000, 2, 64))
    assert host.configure(plugin, ranges, 4, None) == 0
    assert host.workspace_size(plugin, ranges, 4, None) == 32 << 20
    ranges[2].max = make_dims((2, 4096, 2, 60))
    assert host.configure(plugin, ranges, 4, None) != 0
    host.destroy(plugin)
    said = "width must be a positive multiple of 8, up to 256 (q up to [2, 4096, 4, 64], k up to [5, 9000, 2, 64])"
    assert f"log 1 TwellAttention 'layer0': {said}" in capfd.readouterr().out


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("has_lengths", [False, True])
def test_shapes_back_and_forth(lib: ctypes.CDLL, host: ctypes.CDLL, make_plan: MakePlan, has_lengths: bool) -> None:
    plugin = create(host, has_lengths, causal=True)
    ranges = [
        DynamicDesc(make_desc((-1,) * len(least), kind), make_dims(least), make_dims(most), make_dims(least))
        for (least, kind), (most, _) in zip(shapes_of(1, has_lengths), shapes_of(500, has_lengths), strict=True)
    ]
    array = (DynamicDesc * len(ranges))(*ranges)
    assert host.configure(plugin, array, len(ranges), None) == 0
    size = host.workspace_size(plugin, array, len(ranges), None)
    assert size >= 32 << 20
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    attached = host.attach(plugin)
    host.destroy(plugin)
    lengths = [on_gpu([7, 1])] if has_lengths else []
    # Back and forth: the plans of shapes that come again are kept.
    for tokens in (7, 500, 1, 7, 499, 500):
        operands = random_operands(2, tokens, tokens, 4, 2, 64)
        if has_lengths:
            lengths = [on_gpu([tokens, 1])]
        given = descs(tokens, has_lengths)
        assert host.shape_change(attached, given, len(given), None) == 0
        y = torch.full_like(operands[0], math.nan)
        assert enqueue(host, attached, [*operands, *(t for t in lengths if t is not None)], y, workspace) == 0
        torch.cuda.synchronize()
        assert_right(y, operands, [tokens, 1] if has_lengths else None, True)
        expected = make_plan(operands, has_lengths, True).run(operands, lengths[0] if lengths else None)
        assert torch.equal(y, expected)
    host.destroy(attached)


@pytest.mark.gpu
def test_shapes_that_were_not_set_are_refused(
    lib: ctypes.CDLL, host: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin = create(host, has_lengths=False, causal=True)
    attached = host.attach(plugin)
    workspace = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    operands = random_operands(2, 9, 9, 4, 2, 64)
    assert enqueue(host, plugin, list(operands), torch.empty_like(operands[0]), workspace) != 0
    given = descs(8, has_lengths=False)
    assert host.shape_change(attached, given, len(given), None) == 0
    assert enqueue(host, attached, list(operands), torch.empty_like(operands[0]), workspace) != 0
    for each in (plugin, attached):
        host.destroy(each)
    said = capfd.readouterr().out
    assert "log 1 TwellAttention 'layer0': run before its shapes were set" in said
    assert "log 1 TwellAttention 'layer0': run with shapes that were not set before" in said
