"""Calls of the kernels, by the C API and by what plugins/kernels/internal.h has for tests."""

import ctypes
import dataclasses
import enum
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.plugins import reference
from tests.plugins.reference import Block
from twellc.plugins import library


class Run(enum.Enum):
    """What a call runs: `twell_internal_path`. A number of rows in place of one of these is DENSE_ROWS."""

    ROUTES = 0
    GATE = 1
    MANY_TOKENS = 2
    EARLY = 3
    DENSE_ROWS = 4
    DENSE_BLOCK = 5
    SPLIT = 6


GUARD_DECIDES = Run.MANY_TOKENS
EARLY = Run.EARLY  # all rows are dense, as if the gate's count had told so
DENSE_BLOCK = Run.DENSE_BLOCK
SPLIT = Run.SPLIT  # the first neurons as a dense block, the others by the two steps


class Choice(ctypes.Structure):
    """Mirror of `twell_internal_choice`."""

    _fields_ = (("path", ctypes.c_int32), ("kernels", ctypes.c_int32), ("dense_rows", ctypes.c_int64))


def choose(rows: int | Run, kernels: int) -> Choice:
    """Return the choice of a path, or of a number of rows on the dense path."""
    if isinstance(rows, Run):
        return Choice(rows.value, kernels, 0)
    return Choice(Run.DENSE_ROWS.value, kernels, rows)


SUCCESS, INVALID_VALUE, MISALIGNED_ADDRESS = 0, 1, 716
BEST = 0  # twell::Kernels; on compute capability 9.0, those for it
# Up to this number of tokens the whole block may have special kernels, which sum in another order than the two steps.
# They may take a dense path on Hopper. There, more are computed as a dense block.
FEW_TOKENS = 128
# Up to this number, h is in fp32 everywhere.
FEW_TOKENS_EXACT = 16
MOST_COLUMNS_OF_BOX = 64  # smaller matrices have no kernels for few tokens on Hopper
SCHEDULE_HEADER_BYTES = 256  # behind them, the rows in order
GUARD = 64  # elements on both sides of an output; a multiple of 16 bytes, so alignment stays
POISON = 0x7FDB  # a NaN in either element type
POISON_WORD = 0xDEADBEEF


def guarded(shape: tuple[int, int], dtype: torch.dtype, poison: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output of a shape, within a buffer whose every 2- or 4-byte element is poison. Gives (buffer, output)."""
    carrier = torch.int32 if dtype == torch.int32 else torch.int16
    size = shape[0] * shape[1]
    signed = poison - (1 << 32) if carrier == torch.int32 and poison >= 1 << 31 else poison
    buffer = torch.full((size + 2 * GUARD,), signed, dtype=carrier, device="cuda")
    return buffer, buffer[GUARD : GUARD + size].view(dtype).view(shape)


def assert_guards(buffer: torch.Tensor) -> None:
    poison = buffer[0].item()
    assert (buffer[:GUARD] == poison).all() and (buffer[-GUARD:] == poison).all(), "out-of-bounds write"


class Call:
    """A problem ready to run through the C API, with guarded and poisoned outputs."""

    def __init__(self, block: Block, compression: int, *, hot: int = 0, poison: bool = True) -> None:
        self.lib = library.load()
        self.block = block
        self.has_schedule = False  # of the last call, in the workspace
        rows, d_model = block.x.shape
        d_ff, d_out = block.w_down.shape
        self.problem = library.Problem(
            tokens=rows,
            d_model=d_model,
            d_ff=d_ff,
            d_out=d_out,
            compression=compression,
            dtype=library.DTYPES[str(block.x.dtype).removeprefix("torch.")],
            variant=library.VARIANTS["plain" if block.w_up is None else "gated"],
            activation=library.ACTIVATIONS[block.activation],
            threshold=0.0 if isinstance(block.threshold, torch.Tensor) else block.threshold,
            hot=hot,
        )
        words = -(-d_ff // 256) * (256 // compression)
        assert self.lib.twell_packed_bytes(self.problem) == rows * words * 4
        assert self.lib.twell_workspace_bytes(self.problem) >= rows * words * 4
        if poison:
            self.y_buffer, self.y = guarded((rows, d_out), block.x.dtype, POISON)
            self.packed_buffer, self.packed = guarded((rows, words), torch.int32, POISON_WORD)
        else:
            self.y_buffer = self.y = torch.empty((rows, d_out), dtype=block.x.dtype, device="cuda")
            self.packed_buffer = self.packed = torch.empty((rows, words), dtype=torch.int32, device="cuda")
        self.workspace = torch.empty(self.lib.twell_workspace_bytes(self.problem), dtype=torch.uint8, device="cuda")
        if poison:
            self.workspace.fill_(0xFF)
        names = ("x", "w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down", "residual")
        inputs = {name: getattr(block, name) for name in names}
        inputs["thresholds"] = block.threshold if isinstance(block.threshold, torch.Tensor) else None
        assert all(tensor is None or tensor.is_contiguous() for tensor in inputs.values())
        self.tensors = library.Tensors(
            **{name: None if tensor is None else tensor.data_ptr() for name, tensor in inputs.items()},
            y=self.y.data_ptr(),
        )

    def _check(self, status: int) -> None:
        assert status == SUCCESS, f"CUDA error {status}"

    def gate(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._check(self.lib.twell_gate(self.problem, self.tensors, self.packed.data_ptr(), stream))

    def start(self, rows: int | Run, kernels: int = BEST) -> int:
        """Enqueue what the routes would not run, and give the CUDA status: see `choose`."""
        function = self.lib.twell_internal_run
        function.restype = ctypes.c_int
        function.argtypes = [
            *self.lib.twell_gate.argtypes[:2],
            ctypes.c_void_p,
            ctypes.POINTER(Choice),
            ctypes.c_void_p,
        ]
        self.has_schedule = rows not in (Run.GATE, Run.DENSE_BLOCK)
        memory = (self.packed if rows is Run.GATE else self.workspace).data_ptr()
        stream = torch.cuda.current_stream().cuda_stream
        status: int = function(self.problem, self.tensors, memory, choose(rows, kernels), stream)
        return status

    def start_steps(self, rows: int | Run, kernels: int = BEST) -> None:
        """Enqueue the two steps with a number of rows on the dense path, or another path."""
        self._check(self.start(rows, kernels))

    def mlp(self) -> None:
        self.has_schedule = library.describe(self.problem).startswith("route many_tokens")
        stream = torch.cuda.current_stream().cuda_stream
        workspace = self.workspace.data_ptr()
        self._check(self.lib.twell_mlp(self.problem, self.tensors, workspace, self.workspace.numel(), stream))

    def steps(self) -> torch.Tensor:
        """Both steps, with no more rows on the dense path than have to be; also the gate alone."""
        self.gate()
        return self.poisoned(lambda: self.start_steps(0))

    def poisoned(self, start: Callable[[], None]) -> torch.Tensor:
        """Run what start() enqueues where nothing has been written before."""
        self.y.view(torch.int16).fill_(POISON)
        # What an earlier call left in the workspace must not matter: all bits set is a NaN and says "active".
        self.workspace.fill_(0xFF)
        start()
        torch.cuda.synchronize()
        return self.y.clone()

    def run(self) -> torch.Tensor:
        """The whole block, after the steps with few dense rows. The results must be the same bits, or just as good.

        Rows on the dense path, and all rows of few tokens, are summed in another order.
        """
        steps = self.steps()
        same = ~self.dense_rows_of_steps()
        y = self.poisoned(self.mlp)
        same &= ~self.dense_rows()
        assert_same_bits(y[same], steps[same])
        if not same.all():
            reference.assert_close(steps, self.block)
        return y

    def schedule(self) -> torch.Tensor:
        """Give the workspace, [bytes], from the schedule of the last call on: its header, then the rows in order."""
        return self.workspace[-(-self.lib.twell_packed_bytes(self.problem) // 256) * 256 :]

    def dense_rows(self) -> torch.Tensor:
        """Mark the rows that the last call has put on the dense path, or all of few tokens: [tokens], bool."""
        if self.problem.tokens <= FEW_TOKENS:
            return torch.ones(self.problem.tokens, dtype=torch.bool, device="cuda")
        return self.dense_rows_of_steps()

    def dense_rows_of_steps(self) -> torch.Tensor:
        """Mark the rows that the two steps have put on the dense path, or all of a dense block: [tokens], bool."""
        tokens = self.problem.tokens
        if not self.has_schedule:
            return torch.ones(tokens, dtype=torch.bool, device="cuda")
        schedule = self.schedule()
        count = int(schedule[:4].view(torch.int32).item())
        if count == tokens:  # without an order
            return torch.ones(tokens, dtype=torch.bool, device="cuda")
        mask = torch.zeros(tokens, dtype=torch.bool, device="cuda")
        mask[self.row_order()[:count, 0]] = True
        return mask

    def row_order(self) -> torch.Tensor:
        """Give the order of the last call's rows and their numbers of non-zeros: [tokens, 2], int64."""
        end = SCHEDULE_HEADER_BYTES + 8 * self.problem.tokens
        return self.schedule()[SCHEDULE_HEADER_BYTES:end].view(torch.int32).view(-1, 2).long()

    def decoded(self) -> reference.Packed:
        words = self.packed.cpu().numpy().view(np.uint32)
        return reference.decode(words, self.problem.d_ff, self.problem.compression)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    same = actual.view(torch.int16) == expected.view(torch.int16)
    assert same.all(), (
        f"{int((~same).sum())} of {same.numel()} values differ, first at {same.logical_not().nonzero()[0]}"
    )


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.cpu().view(torch.int16).numpy().view(np.uint16)


def assert_packed(call: Call, expected_bits: np.ndarray) -> None:
    """Check the packed matrix word by word: counts, entries, and that no other word was touched."""
    decoded = call.decoded()
    tiles = decoded.counts.shape[1]
    padded = np.zeros((len(expected_bits), tiles * 256), np.uint16)
    padded[:, : expected_bits.shape[1]] = expected_bits
    counts = (padded.reshape(len(expected_bits), tiles, 256) != 0).sum(axis=2)
    np.testing.assert_array_equal(decoded.counts, counts)
    fits = np.repeat(~decoded.overflowed, 256, axis=1)[:, : expected_bits.shape[1]]
    np.testing.assert_array_equal(decoded.bits, np.where(fits, expected_bits, 0))
    words = call.packed.cpu().numpy().view(np.uint32)
    whole_tiles = np.repeat(~decoded.overflowed, 256 // call.problem.compression, axis=1)
    assert (words[~decoded.written & whole_tiles] == POISON_WORD).all(), "a word past the last non-zero was written"


def assert_packed_near(call: Call) -> None:
    """Check the packed values of a block, up to sums on a rounding boundary, and on the threshold of fatrelu."""
    expected, decoded = reference.gate_values(call.block), call.decoded()
    stored = torch.from_numpy(decoded.bits.view(np.int16)).cuda().view(expected.dtype).double()
    fits = torch.from_numpy(np.repeat(~decoded.overflowed, 256, axis=1)[:, : expected.shape[1]]).cuda()
    eps, expected = torch.finfo(expected.dtype).eps, expected.double()
    off = (stored - expected).abs() > 4 * eps * expected.abs() + 1e-3
    assert (off & fits).sum() <= (2 if call.block.activation == "fatrelu" else 0)


GENERIC, SM90 = 1, 2  # twell::Kernels
ON_SM90 = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_sm90 = pytest.mark.skipif(
    not ON_SM90 and os.environ.get("TWELLC_REQUIRE_GPU") != "1", reason="needs a GPU of compute capability 9.0"
)


def try_gate(call: Call, kernel: int) -> int:
    """Run one gate kernel and give the CUDA status."""
    return call.start(Run.GATE, kernel)


def gate(call: Call, kernel: int) -> None:
    status = try_gate(call, kernel)
    assert status == SUCCESS, f"CUDA error {status}"


# Like BEST, and from 4096 rows on with chunks, also in calls that are too small for them.
CHUNKS = SM90


def on_sm90(*values: object, id: str | None = None) -> object:
    return pytest.param(*values, id=id, marks=[pytest.mark.sm90, needs_sm90])


KERNELS = [pytest.param(GENERIC, id="generic"), on_sm90(BEST, id="sm90")]


def paths(**rows: float | Run) -> list[Any]:
    """Give pairs of kernels and rows, by name; only compute capability 9.0 has dense blocks and counts early."""
    return [
        *(
            pytest.param(GENERIC, count, id=f"generic-{name}")
            for name, count in rows.items()
            if count not in (DENSE_BLOCK, EARLY)
        ),
        *(on_sm90(BEST, count, id=f"sm90-{name}") for name, count in rows.items()),
    ]


def run_poisoned(call: Call, rows: int | Run, kernels: int = BEST) -> torch.Tensor:
    """Run the two steps where nothing has been written before."""
    return call.poisoned(lambda: call.start_steps(rows, kernels))


def run_dense(call: Call, rows: int | Run, kernels: int = BEST) -> torch.Tensor:
    """Force the heaviest rows, all, or the whole block onto the dense path; more only if they have no list."""
    y = run_poisoned(call, rows, kernels)
    tokens = call.problem.tokens
    if rows is DENSE_BLOCK:
        return y  # there is no schedule
    if isinstance(rows, Run):
        expected = tokens
    else:
        expected = max(rows, count_without_list(call.row_order()[:, 1], -(-call.problem.d_ff // library.TILE)))
        expected = expected if expected <= -(-tokens // 4) else tokens
    assert call.dense_rows_of_steps().sum() == expected
    return y


def is_early(call: Call) -> bool:
    """Say whether the last call has left the schedule out."""
    *_, early = call.schedule()[:20].view(torch.int32).tolist()  # a twell::ScheduleHeader
    return bool(early)


def heavy_rows(call: Call, kernels: int) -> int:
    call.workspace.fill_(0xFF)
    call.start_steps(GUARD_DECIDES, kernels)
    torch.cuda.synchronize()
    return int(call.dense_rows().sum())


LISTED_PER_TILE = 64


def level(total: torch.Tensor) -> torch.Tensor:
    """Number the buckets: each count below 16 has one, each octave from there on eight."""
    octave = torch.frexp(total.double()).exponent.long() - 1
    return torch.where(total < 16, total, 8 * octave + (total >> (octave - 3).clamp(min=0)) % 8)


def count_without_list(totals: torch.Tensor, tiles: int) -> int:
    """Count the rows that must be dense, whatever the guard says: those in buckets of too many non-zeros for a list."""
    return int((level(totals) >= level(torch.tensor(LISTED_PER_TILE * tiles + 1))).sum())


FEWEST_HOT = 128  # fewer neurons are not computed apart


def splits(problem: library.Problem) -> bool:
    """Say whether the hint is one for the kernels: see twell_mlp in twell.h."""
    return problem.dtype == library.DTYPES["bfloat16"] and (problem.hot == problem.d_ff or problem.hot >= FEWEST_HOT)


def ways(call: Call) -> dict[str, Callable[[], torch.Tensor]]:
    """All ways to y, each from poisoned memory: what the C API chooses, and what can be forced.

    Sums are not in the same order in all of them.
    """
    result: dict[str, Callable[[], torch.Tensor]] = {
        "steps": call.steps,
        "mlp": functools.partial(call.poisoned, call.mlp),
        "generic": functools.partial(run_poisoned, call, GUARD_DECIDES, GENERIC),
    }
    if ON_SM90:
        result["best"] = functools.partial(run_poisoned, call, GUARD_DECIDES, BEST)
        result["dense block"] = functools.partial(run_poisoned, call, DENSE_BLOCK, BEST)
        if call.problem.d_model % 64 == 0:
            result["sm90"] = functools.partial(run_poisoned, call, GUARD_DECIDES, SM90)
    if splits(call.problem):
        result["split"] = functools.partial(run_poisoned, call, SPLIT, BEST)
        result["split generic"] = functools.partial(run_poisoned, call, SPLIT, GENERIC)
    return result


MOST_HOT = 128  # twell::kMostHot


def hot_neurons(call: Call, kernels: int = SM90) -> list[int]:
    """Which neurons were hot in a call that had no dense rows."""
    function = call.lib.twell_internal_hot_neurons
    function.restype = ctypes.c_void_p
    function.argtypes = [call.lib.twell_gate.argtypes[0], ctypes.c_void_p, ctypes.c_int32]
    begin = call.workspace.data_ptr()
    place = function(call.problem, begin, kernels)
    if place is None:
        return []
    words = call.workspace[place - begin :][: 256 + 4 * MOST_HOT].view(torch.int32)
    result: list[int] = words[64 : 64 + int(words[0])].tolist()
    return result


Runs = Callable[[], torch.Tensor]


def assert_repeatable(run: Runs, times: int = 100) -> torch.Tensor:
    """Check that each run gives the same bits; return them."""
    first = run()
    for _ in range(times):
        assert_same_bits(run(), first)
    return first


def assert_streams_agree(calls: list[Call], start: Callable[[Call], None], runs: int = 3) -> None:
    """Check that calls on a stream each, at once, give the bits that they give alone."""
    expected = [call.poisoned(functools.partial(start, call)) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]  # type: ignore[no-untyped-call]
    for _ in range(20):
        for call in calls:
            call.y.view(torch.int16).fill_(POISON)
        torch.cuda.synchronize()
        for _ in range(runs):
            for call, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    start(call)
        torch.cuda.synchronize()
        for call, y in zip(calls, expected, strict=True):
            assert_same_bits(call.y, y)


def assert_chain_agrees(calls: list[Call], start: Callable[[Call], None], split: int = 0) -> None:
    """Check that calls close behind each other, each of which reads the output before, are as right as one by one.

    They share a workspace, and their kernels may overlap.
    """
    for call in calls:
        call.workspace = calls[0].workspace
        start(call)
        torch.cuda.synchronize()
        reference.assert_close(call.y, call.block, split=split)
    expected = [call.y.clone() for call in calls]
    for _ in range(50):
        for call in calls:
            call.y.view(torch.int16).fill_(POISON)
        for call in calls:
            start(call)
        torch.cuda.synchronize()
        for call, y in zip(calls, expected, strict=True):
            assert_same_bits(call.y, y)


def chain(block: Block, reads: str, *, hot: int = 0) -> list[Call]:
    """Make four calls, of which each reads the output of the one before as its x or residual."""
    calls: list[Call] = []
    for _ in range(4):
        calls.append(Call(block, 8, hot=hot))
        block = dataclasses.replace(block, **{reads: calls[-1].y})
    return calls


def replays(call: Call, start: Callable[[], None]) -> Runs:
    """Capture a call in a CUDA graph; return what replays it and gives y."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start()

    def replay() -> torch.Tensor:
        call.y.view(torch.int16).fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        return call.y

    return replay


def assert_replays(run: Callable[[], torch.Tensor], expected: torch.Tensor, times: int) -> None:
    """Capture in a CUDA graph what gives `expected`; each replay has to give these bits again."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(times):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


def run_plain_buffers(block: Block, start: Callable[[Call], None], compression: int = 8, *, hot: int = 0) -> Call:
    """Run a block, drawn on a CPU, as compute-sanitizer has to see it: without poison, which would hide what is read.

    The packed matrix is read 16 bytes at a time: words that the gate leaves alone come along, and are not used.
    """
    call = Call(block.to("cuda"), compression, hot=hot, poison=False)
    call.packed.zero_()
    call.workspace[: call.packed.nbytes].zero_()
    start(call)
    torch.cuda.synchronize()
    reference.assert_close(call.y.cpu(), block, split=hot)
    return call
