"""The C API of the attention library on a GPU, against float64.

Importing torch brings the cuDNN that the library takes, where it is a CUDA build.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.plugins.attention_reference import BF16, CASES, FP16, plain
from tests.tolerance import assert_as_accurate
from twellc.plugins import library
from twellc.plugins.attention_op import ATTENTION

pytestmark = pytest.mark.gpu

GUARD = 64  # elements on both sides of an output; a multiple of 16 bytes, so alignment stays
POISON = 0x7FDB  # a NaN in either element type
SCALE = 0.17

Operands = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    loaded = library.load_attention()
    if loaded is None:
        pytest.skip("the attention library was not built")
    torch.backends.cudnn.version()  # loads cuDNN, if torch did not yet
    return loaded


class Plan:
    """A plan of the C API for the extents of some operands."""

    def __init__(self, lib: ctypes.CDLL, operands: Operands, has_lengths: bool, causal: bool) -> None:
        q, k, _ = operands
        self.lib = lib
        self.problem = library.AttentionProblem(
            q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3],
            library.DTYPES[str(q.dtype).removeprefix("torch.")], int(causal), int(has_lengths), SCALE,
        )  # fmt: skip
        self.message = ctypes.create_string_buffer(2000)
        self.handle = lib.twell_attention_create(self.problem, self.message, 2000)
        assert self.handle, self.message.value.decode()
        size = lib.twell_attention_workspace_bytes(self.handle)
        self.workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")  # NaN in every type

    def close(self) -> None:
        torch.cuda.synchronize()
        self.lib.twell_attention_destroy(self.handle)

    def launch(self, operands: Operands, lengths: Tensor | None, y: Tensor) -> int:
        """Put a run on the current stream."""
        q, k, v = (t.data_ptr() for t in operands)
        tensors = library.AttentionTensors(q, k, v, None if lengths is None else lengths.data_ptr(), y.data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        status: int = self.lib.twell_attention_run(
            self.handle, tensors, self.workspace.data_ptr(), stream, self.message, 2000
        )
        return status

    def run(self, operands: Operands, lengths: Tensor | None) -> Tensor:
        """Return the result; fail if anything outside of it was written."""
        q = operands[0]
        buffer = torch.full((q.numel() + 2 * GUARD,), POISON, dtype=torch.int16, device="cuda")
        y = buffer[GUARD:-GUARD].view(q.dtype).view(q.shape)
        assert self.launch(operands, lengths, y) == 0, self.message.value.decode()
        torch.cuda.synchronize()
        assert (buffer[:GUARD] == POISON).all()
        assert (buffer[-GUARD:] == POISON).all()
        return y


MakePlan = Callable[[Operands, bool, bool], Plan]


@pytest.fixture
def make_plan(lib: ctypes.CDLL) -> Iterator[MakePlan]:
    plans: list[Plan] = []

    def make(operands: Operands, has_lengths: bool, causal: bool) -> Plan:
        plans.append(Plan(lib, operands, has_lengths, causal))
        return plans[-1]

    yield make
    for plan in plans:
        plan.close()


def random_operands(
    batch: int, tokens: int, keys: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = BF16
) -> Operands:
    shapes = (batch, tokens, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width)
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return q, k, v


def on_gpu(lengths: list[int] | None) -> Tensor | None:
    return None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")


def assert_right(y: Tensor, operands: Operands, lengths: list[int] | None, causal: bool) -> None:
    q, k, v = operands
    truth = plain(q.double(), k.double(), v.double(), lengths, SCALE, causal)
    yardstick = plain(q, k, v, lengths, SCALE, causal)
    assert_as_accurate(y, yardstick.contiguous(), truth.contiguous())


# batch, tokens, keys, heads, kv_heads, width; lengths; causal
LARGE: dict[str, tuple[tuple[int, ...], list[int] | None, bool]] = {
    **{
        f"{tokens}-{'causal' if causal else 'all'}": ((2, tokens, tokens, 8, 2, 128), None, causal)
        for tokens in (1, 2, 3, 15, 63, 64, 65, 127, 128, 129, 200, 333, 1000, 2048)
        for causal in (False, True)
    },
    **{f"width-{width}": ((1, 131, 131, 4, 2, width), None, True) for width in (8, 16, 40, 64, 72, 80, 96, 192, 256)},
    "mha": ((2, 256, 256, 16, 16, 64), None, True),
    "mqa": ((2, 256, 256, 16, 1, 64), None, True),
    "many-sequences": ((33, 48, 48, 4, 2, 64), None, True),
    "decode": ((3, 1, 700, 8, 2, 128), None, False),
    "decode-lengths": ((3, 1, 700, 8, 2, 128), [700, 1, 350], False),
    "cross": ((2, 37, 450, 8, 8, 64), None, False),
    "cross-lengths": ((2, 37, 450, 8, 8, 64), [450, 3], False),
    "lengths": ((5, 300, 300, 8, 2, 128), [300, 1, 299, 128, 129], False),
    "lengths-causal": ((5, 300, 300, 8, 2, 128), [300, 1, 299, 128, 129], True),
    "lengths-wide": ((3, 77, 77, 4, 2, 256), [77, 5, 64], True),
}
# What the plugin is not given: the graph clamps before it.
SMALL = {name: case for name, case in CASES.items() if name != "lengths-out-of-range"}


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_result_is_as_accurate_as_torch(make_plan: MakePlan, name: str, dtype: torch.dtype) -> None:
    extents, lengths, causal = (SMALL | LARGE)[name]
    operands = random_operands(*extents, dtype=dtype)
    y = make_plan(operands, lengths is not None, causal).run(operands, on_gpu(lengths))
    assert_right(y, operands, lengths, causal)


@pytest.mark.parametrize("name", ["gqa-causal", "lengths-causal", "lengths-out-of-range", "other-keys"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_op_on_a_gpu_means_the_same(name: str, dtype: torch.dtype) -> None:
    extents, lengths, causal = CASES[name]
    q, k, v = random_operands(*extents, dtype=dtype)
    y = ATTENTION(q, k, v, on_gpu(lengths), SCALE, causal)
    assert y.is_contiguous()
    assert_right(y, (q, k, v), lengths, causal)


def test_repeated_runs_give_the_same_bits(make_plan: MakePlan) -> None:
    operands = random_operands(4, 777, 777, 8, 2, 128)
    lengths = on_gpu([777, 500, 1, 64])
    plan = make_plan(operands, True, True)
    first = plan.run(operands, lengths)
    for _ in range(10):
        assert torch.equal(plan.run(operands, lengths), first)
    again = make_plan(operands, True, True)
    assert torch.equal(again.run(operands, lengths), first)


def test_lengths_are_read_at_each_run(make_plan: MakePlan) -> None:
    operands = random_operands(3, 150, 150, 4, 4, 64)
    plan = make_plan(operands, True, False)
    lengths = on_gpu([150, 150, 150])
    assert lengths is not None
    for values in ([150, 150, 150], [1, 75, 150], [149, 2, 3]):
        lengths.copy_(torch.tensor(values))
        assert_right(plan.run(operands, lengths), operands, values, False)


def test_padding_does_not_reach_the_result(make_plan: MakePlan) -> None:
    operands = random_operands(2, 200, 200, 4, 2, 128)
    lengths = on_gpu([200, 70])
    plan = make_plan(operands, True, False)
    before = plan.run(operands, lengths)
    for t in operands[1:]:
        t[1, 70:] = 1000.0
    assert torch.equal(plan.run(operands, lengths), before)


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize("has_lengths", [False, True])
def test_nan_reaches_the_result(make_plan: MakePlan, slot: int, has_lengths: bool) -> None:
    operands = random_operands(2, 130, 130, 4, 2, 64)
    operands[slot][1, 0, 0] = math.nan
    lengths = on_gpu([130, 100]) if has_lengths else None
    y = make_plan(operands, has_lengths, True).run(operands, lengths)
    # Query 0 of its head alone; or all queries, which all see key 0, of the heads that share it.
    hit = y[1, 0, :1] if slot == 0 else y[1, :, :2]
    assert hit.isnan().all()
    assert y[0].isfinite().all()
    assert y[1, :, 2:].isfinite().all()


@pytest.mark.parametrize("has_lengths", [False, True])
def test_cuda_graph(make_plan: MakePlan, has_lengths: bool) -> None:
    operands = random_operands(3, 257, 257, 8, 2, 128)
    lengths = on_gpu([257, 31, 200]) if has_lengths else None
    plan = make_plan(operands, has_lengths, True)
    plan.run(operands, lengths)  # once before, as TensorRT asks of its hosts
    y = torch.full_like(operands[0], math.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert plan.launch(operands, lengths, y) == 0, plan.message.value.decode()
    for values in ([257, 31, 200], [5, 257, 1]):
        for old, new in zip(operands, random_operands(3, 257, 257, 8, 2, 128), strict=True):
            old.copy_(new)
        if lengths is not None:
            lengths.copy_(torch.tensor(values))
        y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, plan.run(operands, lengths))
        assert_right(y, operands, values if has_lengths else None, True)


def test_threads_with_streams_of_their_own(lib: ctypes.CDLL) -> None:
    shapes = [(2, 300, 300, 8, 2, 128), (1, 511, 511, 4, 4, 64)]
    given = [random_operands(*shape) for shape in shapes]
    expected = []
    for operands in given:
        plan = Plan(lib, operands, False, True)
        expected.append(plan.run(operands, None))
        plan.close()
    torch.cuda.synchronize()
    faults: list[str] = []

    def work(index: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                plan = Plan(lib, given[index], False, True)  # plans are built in both threads at once, too
                stream.synchronize()
                for _ in range(50):
                    y = torch.empty_like(given[index][0])
                    assert plan.launch(given[index], None, y) == 0, plan.message.value.decode()
                    stream.synchronize()
                    assert torch.equal(y, expected[index])
                plan.close()
        except Exception as error:
            faults.append(f"{index}: {error}")

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_a_plan_can_be_built_while_another_thread_captures(lib: ctypes.CDLL) -> None:
    operands = random_operands(2, 64, 64, 4, 2, 64)
    lengths = on_gpu([64, 3])
    captured = Plan(lib, operands, True, True)
    expected = captured.run(operands, lengths)
    y = torch.full_like(operands[0], math.nan)
    faults: list[str] = []

    message = ctypes.create_string_buffer(2000)
    problem = library.AttentionProblem(2, 65, 65, 4, 2, 64, 0, 1, 1, SCALE)

    def create() -> None:
        handle = lib.twell_attention_create(problem, message, 2000)
        if not handle:
            faults.append(message.value.decode())
        lib.twell_attention_destroy(handle)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # in the mode that forbids other threads to allocate
        thread = threading.Thread(target=create)
        thread.start()
        thread.join()
        assert captured.launch(operands, lengths, y) == 0, captured.message.value.decode()
    graph.replay()
    torch.cuda.synchronize()
    assert faults == []
    assert torch.equal(y, expected)
    captured.close()


def test_nothing_to_do(make_plan: MakePlan) -> None:
    for shape in ((0, 5, 5, 4, 2, 64), (2, 0, 5, 4, 2, 64)):
        operands = random_operands(*shape)
        y = make_plan(operands, False, False).run(operands, None)
        assert y.numel() == 0


def test_a_pointer_off_16_bytes_is_refused(make_plan: MakePlan) -> None:
    q, k, v = random_operands(1, 16, 16, 2, 2, 64)
    plan = make_plan((q, k, v), False, True)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape)
    assert plan.launch((shifted, k, v), None, torch.empty_like(q)) == 1
    assert "16-byte alignment" in plan.message.value.decode()
    assert_right(plan.run((q, k, v), None), (q, k, v), None, True)
