"""Calls of the attention library, with guarded outputs."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.plugins.attention_reference import BF16, plain
from tests.tolerance import assert_as_accurate
from twellc.plugins import library

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
            q.shape[0],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            k.shape[2],
            q.shape[3],
            library.DTYPES[str(q.dtype).removeprefix("torch.")],
            int(causal),
            int(has_lengths),
            SCALE,
        )
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
