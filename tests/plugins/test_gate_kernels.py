"""Each gate kernel by itself, on a GPU: the one that suits the device is not the only one that has to be right.

Blocks of small integers have exact sums and must match the reference bit by bit; others are held to a few roundings.
"""

import dataclasses

import numpy as np
import pytest
import torch

from tests.plugins import reference
from tests.plugins.calls import (
    GENERIC,
    ON_SM90,
    POISON_WORD,
    SM90,
    SUCCESS,
    Call,
    assert_guards,
    assert_packed,
    assert_packed_near,
    bits_of,
    gate,
    needs_sm90,
    try_gate,
)
from tests.plugins.cases import BF16, FP16, SMALL_GATE, Case, gate_table, make_block

pytestmark = pytest.mark.gpu

INVALID_VALUE, NOT_SUPPORTED = 1, 801
KERNELS = [pytest.param(GENERIC, id="generic"), pytest.param(SM90, id="sm90", marks=[pytest.mark.sm90, needs_sm90])]


def kernels_of(call: Call) -> set[str]:
    """Give the names of the kernels that twell_gate launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call.gate()
        torch.cuda.synchronize()
    return {event.key for event in profile.key_averages() if "gate" in event.key}


def refill(call: Call) -> None:
    call.packed.fill_(POISON_WORD - (1 << 32))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", list(gate_table()), ids=str)
def test_integers_match_bit_by_bit(case: Case, kernel: int) -> None:
    block = make_block(case, integers=True)
    call = Call(block, case.compression)
    gate(call, kernel)
    assert_packed(call, bits_of(reference.gate_values(block)))
    assert_guards(call.packed_buffer)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", list(gate_table()), ids=str)
def test_against_float64(case: Case, kernel: int) -> None:
    block = make_block(case)
    call = Call(block, case.compression)
    gate(call, kernel)
    assert_packed_near(call)
    assert_guards(call.packed_buffer)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", SMALL_GATE, ids=str)
def test_sanitize(case: Case, kernel: int) -> None:
    """What sanitize.py runs."""
    block = make_block(case, integers=True, device="cpu")
    call = Call(block.to("cuda"), case.compression, poison=False)
    call.packed.zero_()  # the words that the kernel leaves alone are copied too
    gate(call, kernel)
    torch.cuda.synchronize()
    decoded = call.decoded()
    counts = torch.nn.functional.pad(reference.gate_values(block) != 0, (0, -case.d_ff % 256))
    assert decoded.counts.tolist() == counts.view(case.rows, -1, 256).sum(dim=2).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu"])
def test_nan_and_infinity_stay_in_their_rows(dtype: torch.dtype, activation: str, kernel: int) -> None:
    case = Case(rows=300, d_model=128, d_ff=600, dtype=dtype, activation=activation, biases="")
    block = make_block(case, integers=True)
    x = block.x.clone()
    x[0, 71] = float("nan")
    x[133, 5] = float("inf")
    x[299, 0] = -float("inf")
    call = Call(dataclasses.replace(block, x=x), 8)
    gate(call, kernel)
    expected = reference.gate_values(dataclasses.replace(block, x=x))
    counts = call.decoded().counts
    assert counts[0].tolist() == [256, 256, 88]  # NaN is a non-zero, and columns past d_ff are not counted
    padded = torch.nn.functional.pad(expected != 0, (0, 768 - 600)).view(300, 3, 256).sum(dim=2)
    assert counts.tolist() == padded.tolist()
    assert_guards(call.packed_buffer)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
@pytest.mark.parametrize(
    ("activation", "threshold"), [("relu", 0.0), ("relu2", 0.0), *(("fatrelu", t) for t in (0.0, 1e-40, 0.1, 0.5, 1e6))]
)
def test_every_value_is_activated_exactly(activation: str, threshold: float, dtype: torch.dtype, kernel: int) -> None:
    """Row i of z is the element with the bits i: all numbers, also subnormal ones, infinities and NaNs."""
    z = torch.arange(1 << 16, device="cuda").to(torch.int16).view(dtype)
    x = torch.zeros(len(z), 64, dtype=dtype, device="cuda")
    x[:, 3] = z
    w_gate = torch.zeros(5, 64, dtype=dtype, device="cuda")
    w_gate[:, 3] = 1
    w_down = torch.zeros(5, 8, dtype=dtype, device="cuda")
    block = reference.Block(x, w_gate, None, w_down, activation=activation, threshold=threshold)
    call = Call(block, 8)
    gate(call, kernel)
    stored = torch.from_numpy(call.decoded().bits.view(np.int16)).cuda().view(dtype)
    expected = reference.gate_values(block)
    assert torch.equal(expected[:, 0].isnan(), z.isnan())
    torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)
    counts = torch.from_numpy(call.decoded().counts).cuda()
    assert torch.equal(counts[:, 0], (expected != 0).sum(dim=1))
    assert_guards(call.packed_buffer)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_weights_stay_in_their_neurons(kernel: int) -> None:
    block = make_block(Case(rows=300, d_model=128, d_ff=600, density=0.05), integers=True)
    assert block.b_gate is not None
    block.w_gate[300, 5] = float("nan")
    block.b_gate[599] = float("nan")
    call = Call(block, 1)
    gate(call, kernel)
    stored = torch.from_numpy(call.decoded().bits.view(np.int16)).cuda().view(BF16)
    torch.testing.assert_close(stored, reference.gate_values(block), rtol=0, atol=0, equal_nan=True)
    assert torch.isnan(stored[:, [300, 599]]).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "d_ff"), [(200, 2000), (3000, 5632)])
def test_bitwise_repeatable(rows: int, d_ff: int, kernel: int) -> None:
    block = make_block(Case(rows=rows, d_model=1024, d_ff=d_ff, d_out=8, density=0.02))
    call = Call(block, 8)
    gate(call, kernel)
    first = call.packed.clone()
    for _ in range(100):
        refill(call)
        gate(call, kernel)
        assert torch.equal(call.packed, first)


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_do_not_depend_on_their_number(kernel: int) -> None:
    block = make_block(Case(rows=1000, d_model=512, d_ff=1100, d_out=8, density=0.1))
    whole = Call(block, 1)
    gate(whole, kernel)
    for begin, end in ((0, 1), (7, 20), (100, 150), (150, 290), (400, 1000)):
        part = Call(dataclasses.replace(block, x=block.x[begin:end].contiguous()), 1)
        gate(part, kernel)
        assert torch.equal(part.packed, whole.packed[begin:end])


@pytest.mark.parametrize("kernel", KERNELS)
def test_capture_keeps_the_pointers_of_its_call(kernel: int) -> None:
    """Several calls on other tensors in one graph, replayed after later calls on yet other ones."""
    case = Case(rows=300, d_model=256, d_ff=900, d_out=8, density=0.1)
    calls = [Call(make_block(case, integers=True), 8) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls[:2]:
            gate(call, kernel)
    for _ in range(3):
        for call in calls:
            call.block.x.copy_(make_block(case, integers=True).x)
            refill(call)
        gate(calls[2], kernel)
        graph.replay()
        torch.cuda.synchronize()
        for call in calls:
            assert_packed(call, bits_of(reference.gate_values(call.block)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_streams_at_once(kernel: int) -> None:
    cases = [Case(rows=rows, d_model=1024, d_ff=3000, d_out=8, density=0.05) for rows in (129, 700, 2000)]
    calls = [Call(make_block(case), 8) for case in cases]
    streams = [torch.cuda.Stream() for _ in calls]  # type: ignore[no-untyped-call]
    expected = []
    for call in calls:
        gate(call, kernel)
        expected.append(call.packed.clone())
    for _ in range(20):
        for call in calls:
            refill(call)
        torch.cuda.synchronize()
        for _ in range(3):
            for call, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    gate(call, kernel)
        torch.cuda.synchronize()
        for call, packed in zip(calls, expected, strict=True):
            assert torch.equal(call.packed, packed)


@pytest.mark.sm90
@needs_sm90
def test_dispatch() -> None:
    """Many rows on compute capability 9.0 take the Hopper kernel; few, or another d_model, the generic one."""
    for rows, d_model, hopper in ((5000, 256, True), (17, 256, True), (16, 256, False), (5000, 264, False)):
        names = kernels_of(Call(make_block(Case(rows=rows, d_model=d_model, d_out=8), integers=True), 8))
        assert names and all(("gate_sm90" in name) == hopper for name in names), names


def test_kernels_that_cannot_run() -> None:
    call = Call(make_block(Case(rows=300, d_model=72), integers=True), 8)
    assert try_gate(call, SM90) == NOT_SUPPORTED
    assert try_gate(call, 3) == INVALID_VALUE
    assert try_gate(call, -1) == INVALID_VALUE
    call = Call(make_block(Case(rows=300, d_model=128), integers=True), 8)
    assert try_gate(call, SM90) == (SUCCESS if ON_SM90 else NOT_SUPPORTED)
    torch.cuda.synchronize()
