"""The C API of the attention library on a GPU, against float64.

Importing torch brings the cuDNN that the library takes, where it is a CUDA build.
"""

import ctypes
import math
import threading

import pytest
import torch

from tests.plugins.attention_calls import SCALE, MakePlan, Plan, assert_right, lib, make_plan, on_gpu, random_operands
from tests.plugins.attention_reference import BF16, CASES, FP16
from tests.processes import at_once
from twellc.plugins import library
from twellc.plugins.attention_op import ATTENTION

__all__ = ["lib", "make_plan"]

pytestmark = pytest.mark.gpu

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

    at_once(work, 2)
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
