"""The kernels behind twell.h, on a GPU: one table of cases, then what a table cannot say.

Real-valued blocks are held to the tolerance of `reference.assert_close`. Blocks of small integers, whose sums are exact
in any order, must match bit by bit, and so must their packed matrices.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import random
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.plugins import reference
from tests.plugins.reference import Block
from twellc.plugins import library

pytestmark = pytest.mark.gpu

SUCCESS, INVALID_VALUE, MISALIGNED_ADDRESS = 0, 1, 716
BEST = 0  # twell::Kernels; on compute capability 9.0, kernels of its own

BF16, FP16 = torch.bfloat16, torch.float16
# Up to so many tokens the whole block may have kernels of its own, which sum in another order than the two steps. They
# may take a dense path on Hopper. There, more are computed as a dense block.
FEW_TOKENS = 128
# Up to so many, h is in fp32 everywhere.
FEW_TOKENS_EXACT = 16
# With so many neurons 17 to 64 tokens are a dense block there whose down projection skips inactive ones, up to 0.9 %
# and more.
MANY_NEURONS = 14800
MOST_COLUMNS_OF_BOX = 64  # smaller matrices have no kernels for few tokens on Hopper

SCHEDULE_HEADER_BYTES = 256  # behind them, the rows in order

GUARD = 64  # elements on both sides of an output; a multiple of 16 bytes, so alignment stays
POISON = 0x7FDB  # a NaN in either element type
POISON_WORD = 0xDEADBEEF


@pytest.fixture(autouse=True)
def _fresh_inputs() -> None:
    """Draw other inputs in each run; the seed is shown with a failure."""
    sys.stdout.write(f"torch.manual_seed({torch.seed()})\n")


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem. `biases` names those that are there: g(ate), u(p), d(own)."""

    rows: int = 65
    d_model: int = 72
    d_ff: int = 600
    d_out: int = 136
    compression: int = 8
    dtype: torch.dtype = BF16
    gated: bool = True
    activation: str = "relu"
    density: float = 0.03
    biases: str = "gud"
    residual: bool = False
    hot: int = 0  # neurons, the first ones, that may be computed apart

    def __str__(self) -> str:
        kind = ("gated" if self.gated else "plain") + "-" + self.activation
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.rows}x{self.d_model}-{self.d_ff}-{self.d_out}-C{self.compression}-{dtype}-{kind}"
            f"-{self.density:g}-bias[{self.biases}]{'-residual' if self.residual else ''}"
            f"{f'-hot{self.hot}' if self.hot else ''}"
        )


def with_residual(cases: Iterable[Case], share: float = 1.0) -> list[Case]:
    """The cases, or a share of them, always the same ones, with a residual."""
    rng = random.Random(0)
    return [dataclasses.replace(case, residual=True) for case in cases if rng.random() < share]


def table() -> Iterator[Case]:
    """All cases that run against the reference."""
    yield from without_residual()
    yield from with_residual(without_residual(), share=0.5)


def without_residual() -> Iterator[Case]:
    """Cases of every route."""
    dtypes = itertools.cycle((BF16, FP16))
    kinds = [(True, name) for name in ("relu", "relu2", "fatrelu", "drelu")]
    kinds += [(False, name) for name in ("relu", "relu2", "fatrelu")]
    densities = (0.0, 0.001, 0.005, 0.03, 0.3, 1.0)
    # Rows, around the block sizes of the gate kernel.
    for rows in (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000):
        for density in (0.005, 0.3):
            yield Case(rows=rows, density=density, dtype=next(dtypes))
    # Few tokens: around the tokens of a tile and of each configuration, with all kinds and densities.
    few = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)
    for rows, (gated, activation), dtype in itertools.product(few, kinds, (BF16, FP16)):
        yield Case(rows=rows, d_model=328, d_ff=1500, d_out=328, gated=gated, activation=activation, dtype=dtype)
    for rows, density, dtype in itertools.product(few, densities, (BF16, FP16)):
        yield Case(rows=rows, d_model=1032, d_ff=1111, d_out=1032, density=density, dtype=dtype)
    for rows, density in itertools.product((1, 16, 64, 100, 200), densities):
        yield Case(rows=rows, d_model=2048, d_ff=5632, d_out=2048, density=density, biases="", dtype=next(dtypes))
    # Up to what CTAs contribute to y for one or two tokens (on 132 multiprocessors), and beyond.
    for rows, (d_model, d_ff, d_out), density in itertools.product(
        (1, 2), ((2048, 6336, 2048), (2048, 6337, 72), (2056, 700, 72), (72, 700, 2056)), (0.005, 0.3, 1.0)
    ):
        for gated in (True, False):
            yield Case(
                rows=rows, d_model=d_model, d_ff=d_ff, d_out=d_out, density=density, gated=gated, dtype=next(dtypes)
            )
    for rows, (gated, activation), density in itertools.product((1, 2), kinds, (0.002, 0.1, 0.6)):
        base = Case(rows=rows, d_model=72, d_ff=4100, d_out=1544, density=density, dtype=next(dtypes))
        yield dataclasses.replace(base, gated=gated, activation=activation)
    # One token with so many active neurons that CTAs share them out: in one pass over them or more, all or a part of
    # them shared, and as many CTAs as d_out leaves; with few neurons and columns CTAs contribute.
    for d_ff, density in ((1100, 1.0), (2000, 0.7), (8192, 1.0), (8300, 0.5), (20000, 0.3)):
        for d_out, gated in itertools.product((8, 72, 136, 2048, 4104, 8200), (True, False)):
            yield Case(rows=1, d_model=72, d_ff=d_ff, d_out=d_out, density=density, gated=gated, dtype=next(dtypes))
    for rows, d_model, dtype in itertools.product((5, 30, 65), (8, 16, 24, 32, 40, 200, 2048), (BF16, FP16)):
        yield Case(rows=rows, d_model=d_model, dtype=dtype)
    for rows, d_ff, dtype in itertools.product((1, 20, 60, 65), (1, 8, 100, 255, 256, 257, 600, 5632), (BF16, FP16)):
        yield Case(rows=rows, d_ff=d_ff, dtype=dtype, density=0.1)
    # d_out: full and ragged pieces of what a CTA of a down projection has.
    for d_out in (8, 16, 1016, 1024, 1032, 2048, 2056, 4096, 4104, 8192, 8200, 16384, 16392, 40000):
        yield Case(rows=130, d_out=d_out, dtype=next(dtypes))
        for rows in (3, 12, 20, 50):
            yield Case(rows=rows, d_out=d_out, dtype=next(dtypes))
    for (gated, activation), dtype, compression in itertools.product(kinds, (BF16, FP16), (1, 2, 4, 8)):
        yield Case(gated=gated, activation=activation, dtype=dtype, compression=compression, density=0.1)
    for gated, biases in itertools.product((True, False), ("", "g", "u", "d", "gu", "gd", "ud", "gud")):
        if gated or "u" not in biases:
            for rows in (1, 40, 65):
                yield Case(rows=rows, gated=gated, biases=biases, dtype=next(dtypes))
    for density, compression, dtype in itertools.product(densities, (1, 2, 4, 8), (BF16, FP16)):
        yield Case(rows=150, d_model=136, d_ff=1500, d_out=1160, density=density, compression=compression, dtype=dtype)
    # The sizes that models have.
    for density in densities:
        yield Case(rows=257, d_model=2048, d_ff=5632, d_out=2048, density=density, biases="", dtype=next(dtypes))
    for rows in (40, 70):
        yield Case(rows=rows, d_model=768, d_ff=3072, d_out=768, gated=False)
        yield Case(rows=rows, d_model=4096, d_ff=14336, d_out=4096, activation="drelu", density=0.1, biases="")
        yield Case(rows=rows, d_model=4360, d_ff=8192, d_out=136, density=0.02)  # Wu in two parts, the last one uneven
        yield Case(rows=rows, d_model=1024, d_ff=65536, d_out=1024, gated=False, density=0.03, biases="", dtype=FP16)
        yield Case(rows=rows, d_model=16384, d_ff=300, d_out=16384, biases="")
        yield Case(rows=rows, d_model=20008, d_ff=300, d_out=24, dtype=FP16)
    # Several passes over the neurons; wider than dense blocks on Hopper.
    yield Case(rows=40, d_model=16392, d_ff=8300, d_out=264, density=0.003)
    yield Case(rows=64, d_model=16392, d_ff=8300, d_out=2600, density=0.001, dtype=FP16)
    yield Case(rows=25, d_model=16392, d_ff=8300, d_out=520, density=0.002, dtype=FP16)
    yield Case(rows=100, d_model=16392, d_ff=17000, d_out=520, density=0.001)
    yield Case(rows=128, d_model=16392, d_ff=8300, d_out=4104, density=0.001, dtype=FP16)
    yield Case(rows=100, d_model=16392, d_ff=300, d_out=264, gated=False)
    # More tokens than a CTA of the sparse down projection takes at once, on Hopper.
    for rows, d_out in ((100, 8200), (128, 4104), (90, 40000)):
        yield Case(rows=rows, d_model=264, d_ff=2000, d_out=d_out, density=0.004, dtype=next(dtypes))
    yield Case(rows=2, d_model=65544, d_ff=300, d_out=24)  # too wide for the kernels for few tokens
    # Dense blocks on Hopper whose down projection skips inactive neurons, or does not.
    for rows, (gated, activation), dtype in itertools.product((17, 64), kinds, (BF16, FP16)):
        base = Case(rows=rows, d_model=136, d_ff=MANY_NEURONS, d_out=328, density=0.004)
        yield dataclasses.replace(base, gated=gated, activation=activation, dtype=dtype)
    for d_ff, gated, rows in itertools.product((14784, 14785, 20000), (True, False), (20, 30, 40)):
        yield Case(rows=rows, d_model=264, d_ff=d_ff, d_out=72, density=0.004, gated=gated, dtype=next(dtypes))
    yield Case(rows=60, d_model=192, d_ff=17212, d_out=2376, density=0.004, gated=False)  # more CTAs than places
    # A dense down projection, of whose neurons one to eight CTAs have a share, by its width and the tokens.
    for rows, d_out in itertools.product((12, 24, 48, 100), (520, 1032, 1544, 2312, 4104, 8712, 17000)):
        for gated in (True, False):
            yield Case(rows=rows, d_model=72, d_ff=700, d_out=d_out, density=0.6, gated=gated, dtype=next(dtypes))
    # CTAs of 32 neurons fill their rounds better than those of 16, on 132 multiprocessors.
    for rows, density, gated in itertools.product((1, 3, 8, 9, 16), (0.003, 0.1, 1.0), (True, False)):
        yield Case(
            rows=rows, d_model=264, d_ff=8192, d_out=136, density=density, gated=gated, biases="", dtype=next(dtypes)
        )
    for rows, density in itertools.product((20, 33, 50), densities):
        yield Case(rows=rows, d_model=256, d_ff=11008, d_out=1032, density=density, biases="", dtype=next(dtypes))
    # Clusters of each size, by the number of neurons, on 132 multiprocessors.
    for d_ff, gated in itertools.product((4224, 4225, 6337, 8200, 10561, 12673), (True, False)):
        for rows, density in itertools.product((17, 33, 64), (0.004, 0.05, 1.0)):
            yield Case(rows=rows, d_model=264, d_ff=d_ff, d_out=136, density=density, gated=gated, dtype=next(dtypes))


# Every kernel instance, every branch, few launches: these also run under compute-sanitizer.
SMALL = [
    Case(rows=1, d_model=8, d_ff=1, d_out=8, density=1.0),
    Case(rows=1, d_model=16, d_ff=1300, d_out=2056, density=1.0, dtype=FP16),
    Case(rows=1, d_model=520, d_ff=1300, d_out=72, density=0.1, dtype=FP16),
    Case(rows=1, d_model=2048, d_ff=300, d_out=1032, density=1.0, gated=False),
    Case(rows=2, d_model=1032, d_ff=2300, d_out=264, density=0.01),
    Case(rows=2, d_model=72, d_ff=700, d_out=2048, density=0.6, dtype=FP16, activation="drelu"),
    Case(rows=2, d_model=264, d_ff=200, d_out=8, density=0.05, gated=False, dtype=FP16),
    Case(rows=8, d_model=520, d_ff=100, d_out=72, density=0.1, dtype=FP16),
    Case(rows=20, d_model=1096, d_ff=100, d_out=264, density=0.05),
    Case(rows=64, d_model=1544, d_ff=200, d_out=264, density=0.01),
    Case(rows=40, d_model=776, d_ff=60, d_out=136, density=0.4, dtype=FP16, activation="drelu"),
    Case(rows=70, d_model=2056, d_ff=100, d_out=264, density=0.02),
    Case(rows=100, d_model=264, d_ff=300, d_out=72, density=0.5, dtype=FP16),
    Case(rows=16, d_model=72, d_ff=300, d_out=72, density=1.0, dtype=FP16),
    Case(rows=30, d_model=136, d_ff=300, d_out=136, density=1.0),
    Case(rows=60, d_model=136, d_ff=300, d_out=72, density=0.6, dtype=FP16, gated=False),
    Case(rows=33, d_model=72, d_ff=300, d_out=264, density=1.0, dtype=FP16, activation="drelu"),
    Case(rows=5, d_model=16, d_ff=8200, d_out=16, density=0.5, gated=False),
    Case(rows=16, d_model=16, d_ff=8200, d_out=136, density=0.01, gated=False, dtype=FP16),
    Case(rows=7, d_model=72, d_ff=8200, d_out=72, density=0.3, dtype=FP16),
    Case(rows=17, d_model=40, d_ff=300, d_out=24, density=0.3, dtype=FP16),
    Case(rows=25, d_model=72, d_ff=300, d_out=136, density=0.01, gated=False),
    Case(rows=25, d_model=72, d_ff=300, d_out=1544, density=0.6, gated=False, dtype=FP16),
    Case(rows=17, d_model=264, d_ff=257, d_out=24, density=1.0, gated=False, activation="relu2", biases=""),
    Case(rows=2, d_model=72, d_ff=600, d_out=8200, activation="drelu", dtype=FP16, compression=4),
    Case(rows=2, d_model=72, d_ff=600, d_out=8200, activation="fatrelu", density=0.3, compression=1),
    Case(rows=3, d_model=72, d_ff=600, d_out=16392, density=0.3, biases="g"),
    Case(rows=120, d_model=72, d_ff=300, d_out=16, density=0.1, compression=2, activation="relu2"),
    Case(rows=130, d_model=72, d_ff=300, d_out=1032, density=0.1, biases="d", dtype=FP16),
    Case(rows=120, d_model=16, d_ff=300, d_out=2056, density=0.5, biases="u"),
    Case(rows=120, d_model=16, d_ff=1300, d_out=2056, density=0.5, gated=False, compression=1, dtype=FP16),
    Case(rows=64, d_model=72, d_ff=300, d_out=2312, density=0.03),
    Case(rows=100, d_model=72, d_ff=300, d_out=4360, density=0.01),
    Case(rows=17, d_model=16392, d_ff=8224, d_out=72, density=0.0005),
    Case(rows=34, d_model=72, d_ff=6500, d_out=264, density=0.004, dtype=FP16),
    Case(rows=64, d_model=72, d_ff=12800, d_out=72, density=0.004, gated=False),
    Case(rows=40, d_model=72, d_ff=5600, d_out=72, density=0.3),
    Case(rows=20, d_model=72, d_ff=10240, d_out=136, density=0.004),
    Case(rows=50, d_model=72, d_ff=12288, d_out=72, density=0.1, dtype=FP16),
    Case(rows=33, d_model=72, d_ff=14336, d_out=136, density=0.004, activation="drelu"),
    Case(rows=64, d_model=72, d_ff=14784, d_out=72, density=0.2, dtype=FP16),
    Case(rows=34, d_model=72, d_ff=MANY_NEURONS, d_out=264, density=0.004, gated=False),
]
SMALL += with_residual(SMALL)


def make_block(case: Case, *, integers: bool, device: str = "cuda") -> Block:
    """Draw a block with about the asked density.

    The first column of x carries the shift that sets it, differently for each row, so that rows are unequal. A gate
    bias carries a part of the shift too.
    """

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if integers:
            return torch.randint(-1, 2, shape, device=device).float()
        return torch.randn(shape, device=device) * scale

    if case.density in (0.0, 1.0):
        shift = 12.0 if case.density == 0.0 else -12.0
    else:
        shift = statistics.NormalDist().inv_cdf(1.0 - case.density)
    deviation = (2 / 3 if integers else 1.0) * case.d_model**0.5 if case.d_model > 1 else 1.0
    shift *= deviation
    if integers:
        shift = float(round(shift))
    x = draw(case.rows, case.d_model)
    x[:, 0] = 1.0 if integers else 0.95 + 0.1 * torch.rand(case.rows, device=device)
    w_gate = draw(case.d_ff, case.d_model)
    w_gate[:, 0] = -shift
    b_gate = draw(case.d_ff)
    if "g" in case.biases and case.density not in (0.0, 1.0):
        w_gate[:, 0] += 1.0
        b_gate -= 1.0
    if not integers:
        w_gate /= case.d_model**0.5
        b_gate /= case.d_model**0.5
    active = max(1.0, case.density * case.d_ff)
    return Block(
        x=x.to(case.dtype),
        w_gate=w_gate.to(case.dtype),
        w_up=draw(case.d_ff, case.d_model, scale=case.d_model**-0.5).to(case.dtype) if case.gated else None,
        w_down=draw(case.d_ff, case.d_out, scale=active**-0.5).to(case.dtype),
        b_gate=b_gate.to(case.dtype) if "g" in case.biases else None,
        b_up=draw(case.d_ff, scale=0.5).to(case.dtype) if case.gated and "u" in case.biases else None,
        b_down=draw(case.d_out, scale=0.5).to(case.dtype) if "d" in case.biases else None,
        residual=draw(case.rows, case.d_out).to(case.dtype) if case.residual else None,
        activation=case.activation,
        threshold=0.0 if case.activation != "fatrelu" else (1.0 if integers else 0.05),
    )


def leave_out_lost_gates(block: Block) -> None:
    """Replace rows of x for which a neuron is active in float64, but not by contract, since z rounds to 0.

    It matters where weights of the neuron are infinite. For blocks without biases.
    """
    exact = torch.nn.functional.linear(block.x.double(), block.w_gate.double()) > 0
    lost = (exact != (reference.gate_values(block) != 0)).any(dim=1)
    block.x[lost] = block.x[~lost][0]


def guarded(shape: tuple[int, int], dtype: torch.dtype, poison: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An output of a shape, within a buffer whose every 2- or 4-byte element is poison. Gives (buffer, output)."""
    carrier = torch.int32 if dtype == torch.int32 else torch.int16
    size = shape[0] * shape[1]
    signed = poison - (1 << 32) if carrier == torch.int32 and poison >= 1 << 31 else poison
    buffer = torch.full((size + 2 * GUARD,), signed, dtype=carrier, device="cuda")
    return buffer, buffer[GUARD : GUARD + size].view(dtype).view(shape)


def assert_guards(buffer: torch.Tensor) -> None:
    """Check that nothing was written beside an output."""
    poison = buffer[0].item()
    assert (buffer[:GUARD] == poison).all() and (buffer[-GUARD:] == poison).all(), "out-of-bounds write"


class Call:
    """A problem ready to run through the C API, with guarded and poisoned outputs."""

    def __init__(self, block: Block, compression: int, *, hot: int = 0, poison: bool = True) -> None:
        self.lib = library.load()
        self.block = block
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
            threshold=block.threshold,
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

    def start_steps(self, dense_rows: int, kernels: int = BEST) -> None:
        """Enqueue both steps, with so many rows on the dense path; see twell_internal_dense."""
        function = self.lib.twell_internal_dense
        function.restype = ctypes.c_int
        function.argtypes = [
            *self.lib.twell_gate.argtypes[:2],
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_void_p,
        ]
        stream = torch.cuda.current_stream().cuda_stream
        self._check(function(self.problem, self.tensors, self.workspace.data_ptr(), dense_rows, kernels, stream))

    def mlp(self) -> None:
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
        """Mark the rows that mlp() has put on the dense path, or all of few tokens: [tokens], bool."""
        if self.problem.tokens <= FEW_TOKENS:
            return torch.ones(self.problem.tokens, dtype=torch.bool, device="cuda")
        return self.dense_rows_of_steps()

    def dense_rows_of_steps(self) -> torch.Tensor:
        """Mark the rows that the two steps have put on the dense path: [tokens], bool."""
        tokens = self.problem.tokens
        schedule = self.schedule()
        count = int(schedule[:4].view(torch.int32).item())
        if count in (-1, tokens):  # without a schedule, as in a dense block, or without an order
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
    """Compare bit by bit, NaN included."""
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


def measured_density(block: Block) -> float:
    return float((reference.gate_values(block) != 0).double().mean())


@pytest.mark.parametrize("case", list(table()), ids=str)
def test_against_float64(case: Case) -> None:
    block = make_block(case, integers=False)
    if case.rows * case.d_ff >= 10_000 and case.d_model >= 16 and case.activation != "fatrelu":
        assert case.density / 3 <= measured_density(block) <= 2 * case.density + 1e-3
    call = Call(block, case.compression)
    y = call.run()
    reference.assert_close(y, block)
    assert_guards(call.y_buffer)
    assert_guards(call.packed_buffer)
    # A sum on a rounding boundary may round either way, so stored values may differ in their last bits, and one at the
    # threshold of fatrelu may, rarely, come or go.
    decoded = call.decoded()
    stored = torch.from_numpy(decoded.bits.view(np.int16)).cuda().view(case.dtype).double()
    fits = torch.from_numpy(np.repeat(~decoded.overflowed, 256, axis=1)[:, : case.d_ff]).cuda()
    expected = reference.gate_values(block).double()
    off = (stored - expected).abs() > 4 * torch.finfo(case.dtype).eps * expected.abs() + 1e-3
    assert (off & fits).sum() <= (2 if case.activation == "fatrelu" else 0)


def rounds_h(block: Block) -> bool:
    """Say whether a call for few tokens rounds h, and nothing else, on the way: some kernels of Hopper do."""
    fits = min(*block.w_gate.shape, block.w_down.shape[1]) >= MOST_COLUMNS_OF_BOX
    return FEW_TOKENS_EXACT < len(block.x) <= FEW_TOKENS and fits and torch.cuda.get_device_capability() == (9, 0)


def may_be_dense(block: Block) -> bool:
    """Say whether few tokens' u may be rounded, or h that is in fp32 elsewhere: the kernels' rule, with a margin."""
    rows = len(block.x)
    if rows > FEW_TOKENS_EXACT:
        return False
    active = torch.nn.functional.pad(reference.gate_values(block) != 0, (0, -len(block.w_gate) % 16))
    of_token = active.view(rows, -1, 16).sum(dim=2).amax(dim=0).sum()
    scale = 0.9 * len(block.w_gate) / 5632
    return rows > 1 and (int(active.sum()) > scale * (1500 + 120 * rows) or int(of_token) > scale * 1500)


@pytest.mark.parametrize("case", [*table(), *SMALL], ids=str)
def test_integers_match_bit_by_bit(case: Case) -> None:
    block = make_block(case, integers=True)
    call = Call(block, case.compression)
    y = call.run()
    assert_packed(call, bits_of(reference.gate_values(block)))
    if reference.is_exact(block):
        # Few tokens or not, sums in another order are exact; only the dense paths round u and h.
        expected = reference.emulate(block)
        if case.rows > FEW_TOKENS:
            same = ~call.dense_rows()
            assert_same_bits(y[same], expected[same])
        elif not may_be_dense(block):
            assert_same_bits(y, reference.emulate(block, rounds_h=rounds_h(block)))
        steps = call.steps()
        same = ~call.dense_rows_of_steps()
        assert_same_bits(steps[same], expected[same])
    reference.assert_close(y, block)
    assert_guards(call.y_buffer)
    assert_guards(call.packed_buffer)


def test_table_has_exact_and_overflowing_cases() -> None:
    """The two checks above must not pass for want of what they check."""
    exact = overflowed = few = few_dense = 0
    for case in table():
        if case.d_ff > 2000:
            continue
        block = make_block(case, integers=True)
        exact += reference.is_exact(block)
        few += reference.is_exact(block) and case.rows <= FEW_TOKENS and not may_be_dense(block)
        few_dense += case.rows <= FEW_TOKENS and may_be_dense(block)
        call = Call(block, case.compression)
        call.gate()
        overflowed += bool(call.decoded().overflowed.any())
    assert exact >= 100
    assert overflowed >= 20
    assert few >= 10
    assert few_dense >= 10


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_sanitize(case: Case) -> None:
    """What sanitize.py runs: plain buffers, so that reads of words nobody wrote show."""
    block = make_block(case, integers=True, device="cpu")
    call = Call(block.to("cuda"), case.compression, poison=False)
    # The packed matrix is read 16 bytes at a time: words that the gate leaves alone come along, and are not used.
    call.packed.zero_()
    call.gate()
    call.workspace[: call.packed.nbytes].zero_()
    call.start_steps(0)
    torch.cuda.synchronize()
    reference.assert_close(call.y.cpu(), block)
    call.mlp()
    torch.cuda.synchronize()
    reference.assert_close(call.y.cpu(), block)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=("bf16", "fp16"))
@pytest.mark.parametrize("gated", [True, False], ids=("gated", "plain"))
@pytest.mark.parametrize("activation", ["relu", "relu2", "fatrelu"])
@pytest.mark.parametrize("rows", [70, 34])
def test_nan_and_infinity_stay_in_their_rows(rows: int, dtype: torch.dtype, gated: bool, activation: str) -> None:
    case = Case(rows=rows, dtype=dtype, gated=gated, activation=activation)
    block = make_block(case, integers=False)
    clean = Call(block, case.compression).steps()
    x = block.x.clone()
    x[0, 71] = float("nan")
    x[33, 5] = float("inf")
    x[rows - 2, 0] = -float("inf")
    dirty = dataclasses.replace(block, x=x)
    call = Call(dirty, case.compression)
    y = call.run()
    assert torch.isnan(y[0]).all()
    touched = [0, 33, rows - 2]
    untouched = [row for row in range(case.rows) if row not in touched]
    reference.assert_close(y, dirty)
    assert torch.isfinite(y[untouched]).all()
    assert_same_bits(call.steps()[untouched], clean[untouched])
    counts = call.decoded().counts
    assert counts[0].tolist() == [256, 256, 88]  # NaN is a non-zero, and columns past d_ff are not counted
    assert_guards(call.packed_buffer)


def make_one_infinity(rows: int, d_model: int, device: str = "cuda") -> tuple[Block, torch.Tensor]:
    """Draw a block in which infinity ends the first row of x and reaches one neuron; also y of that row."""
    case = Case(rows=rows, d_model=d_model, d_ff=600, d_out=72, density=0.3, biases="")
    block = make_block(case, integers=False, device=device)
    assert block.w_up is not None
    block.x[0, -1] = float("inf")
    block.w_gate[:, -1] = -1.0
    block.w_gate[300, -1] = 1.0
    block.w_up[300, -1] = 1.0
    return block, torch.sign(block.w_down[300]) * float("inf")


@pytest.mark.parametrize("rows", [1, 2, 4, 40])
@pytest.mark.parametrize("d_model", [72, 1032, 2048])
def test_infinity_is_not_multiplied_by_absent_weights(rows: int, d_model: int) -> None:
    block, expected = make_one_infinity(rows, d_model)
    call = Call(block, 8)
    y = call.poisoned(call.mlp)
    assert_same_bits(y[0], expected)
    assert torch.isfinite(y[1:]).all()


@pytest.mark.parametrize("where", ["w_gate", "b_gate", "w_up", "b_up", "w_down"])
@pytest.mark.parametrize(
    ("rows", "d_ff", "density"), [(20, 600, 0.3), (65, 600, 0.3), (60, 11008, 0.005), (60, MANY_NEURONS, 0.005)]
)
def test_nan_in_one_neuron(where: str, rows: int, d_ff: int, density: float) -> None:
    block = make_block(Case(rows=rows, d_ff=d_ff, density=density), integers=False)
    assert block.b_gate is not None
    n = 300
    block.b_gate[n] += 2 if density < 0.1 else 0  # active in some rows
    getattr(block, where)[n] = float("nan")
    y = Call(block, 4).run()
    reference.assert_close(y, block)
    active = reference.gate_values(block)[:, n] != 0
    assert torch.isnan(y[active]).all() and torch.isfinite(y[~active]).all()
    assert active.any() and (where in ("w_gate", "b_gate") or not active.all())


@pytest.mark.parametrize("density", [0.005, 0.3])  # without and with tiles that overflow
@pytest.mark.parametrize(("rows", "d_ff"), [(10, 600), (40, 600), (65, 600), (200, 600), (50, MANY_NEURONS)])
def test_inactive_neurons_add_nothing(rows: int, d_ff: int, density: float) -> None:
    """Where a dense block computes 0 * inf = NaN, the contract is 0."""
    block = make_block(Case(rows=rows, d_ff=d_ff, density=density), integers=False)
    assert block.b_gate is not None and block.w_up is not None
    inactive = [0, 255, 256, 599]
    block.w_gate[inactive] = 0
    block.b_gate[inactive] = -1
    expected = Call(block, 8).run()
    block.w_up[inactive] = float("inf")
    block.w_down[inactive] = float("nan")
    y = Call(block, 8).run()
    assert torch.isfinite(y).all()
    reference.assert_close(y, block)
    if density < 0.1 and rows <= FEW_TOKENS:  # a dense path sums again, in another order
        assert_same_bits(y, expected)


@pytest.mark.parametrize("b_down", [True, False])
@pytest.mark.parametrize("rows", [5, 200])
def test_rows_without_active_neurons(rows: int, b_down: bool) -> None:
    block = make_block(Case(rows=rows, density=0.0, biases="d" if b_down else ""), integers=False)
    y = Call(block, 8).run()
    expected = torch.zeros_like(y) if block.b_down is None else block.b_down.expand_as(y)
    assert_same_bits(y, expected.contiguous())


@pytest.mark.parametrize(
    ("rows", "d_ff", "density"),
    [*((rows, 600, density) for rows in (10, 40, 65, 200) for density in (0.03, 1.0)), (50, MANY_NEURONS, 0.005)],
)
def test_fp16_does_not_overflow_between(rows: int, d_ff: int, density: float) -> None:
    """A dense fp16 block stores u and g * u, which do not fit here; y does."""
    block = make_block(Case(rows=rows, d_ff=d_ff, dtype=FP16, density=density, biases=""), integers=False)
    assert block.w_up is not None
    large = dataclasses.replace(
        block, w_gate=block.w_gate * 64, w_up=block.w_up * 32768, w_down=block.w_down * 2.0**-13
    )
    assert not torch.isfinite(reference.plain(large)).all()
    y = Call(large, 8).run()
    assert torch.isfinite(y).all()
    reference.assert_close(y, large)


@pytest.mark.parametrize(
    ("rows", "d_ff", "density"),
    [*((rows, 600, density) for rows in (1, 10, 40, 65, 200) for density in (0.02, 0.3)), (50, MANY_NEURONS, 0.005)],
)
def test_active_neuron_whose_h_is_too_small_for_fp16(rows: int, d_ff: int, density: float) -> None:
    """Its infinite weights reach y, also where h is rounded to 0 as if it were inactive."""
    block = make_block(Case(rows=rows, d_ff=d_ff, dtype=FP16, density=density, biases=""), integers=False)
    assert block.w_up is not None
    block.w_gate[300] = block.x[-1].sign() * 2.0**-18
    block.w_up[300] *= 2.0**-14
    block.w_down[300, 5:] = float("inf")
    leave_out_lost_gates(block)
    y = Call(block, 8).run()
    active = reference.gate_values(block)[:, 300] != 0
    assert active[-1]
    assert torch.isinf(y[active, 5:]).all() and torch.isfinite(y[active, :5]).all() and torch.isfinite(y[~active]).all()
    reference.assert_close(y, block)


@pytest.mark.parametrize("active", [100, 1000, 1300, 2816])
@pytest.mark.parametrize("rows", [2, 12, 20, 40, 100])
def test_one_heavy_token(rows: int, active: int) -> None:
    """A token with many active neurons among others with few, on either side of where the whole call becomes dense."""
    block = make_block(Case(rows=rows, d_model=256, d_ff=2816, d_out=264, density=0.002), integers=False)
    heavy = rows // 2
    block.x[:, 7] = 0
    block.x[heavy, 7] = 8
    block.w_gate[:active, 7] = 1
    counts = (reference.gate_values(block) != 0).sum(dim=1)
    assert counts[heavy] >= 0.9 * active and counts.median() < 50
    reference.assert_close(Call(block, 8).run(), block)


@pytest.mark.parametrize("rows", [20, 40, 100])
def test_long_list(rows: int) -> None:
    """About as many active neurons of a token as a sparse down projection lists on Hopper, over two passes."""
    block = make_block(Case(rows=rows, d_model=16392, d_ff=8300, d_out=264, density=0.0002), integers=False)
    block.x[:, 7] = 0
    block.x[rows // 2, 7] = 8
    block.w_gate[6500:, 7] = 100
    counts = (reference.gate_values(block) != 0).sum(dim=1)
    assert 1700 < counts[rows // 2] < 1900 and counts.median() < 20
    reference.assert_close(Call(block, 8).run(), block)


@pytest.mark.parametrize("count", [30, 31, 32, 62, 63, 64, 126, 127, 128, 254, 255, 256])
@pytest.mark.parametrize("compression", [1, 2, 4, 8])
def test_counts_at_the_number_of_slots(count: int, compression: int) -> None:
    """A tile of exactly as many non-zeros as slots fits; one more overflows."""
    block = make_block(Case(rows=20, biases=""), integers=True)
    block.x.fill_(0)
    block.x[:, 0] = 1
    block.w_gate.fill_(0)
    block.w_gate[:, 0] = -1
    chosen = torch.randperm(256, device="cuda")[:count] + 256
    block.w_gate[chosen, 0] = 3
    call = Call(block, compression)
    y = call.run()
    assert_packed(call, bits_of(reference.gate_values(block)))
    assert call.decoded().overflowed[:, 1].all() == (count > 256 // compression - 1)
    assert_same_bits(y, reference.emulate(block))


def test_full_empty_and_overflowed_tiles_beside_each_other() -> None:
    """Lists of about as many non-zeros as a sparse row may have."""
    d_ff = 256 * 12
    block = make_block(Case(rows=140, d_model=16, d_ff=d_ff, d_out=24, biases=""), integers=True)
    block.x.fill_(0)
    block.x[:, 0] = 1
    block.w_gate.fill_(0)
    per_tile = [127, 0, 128, 0, 0, 256, 1, 127, 0, 0, 0, 127]
    for tile, count in enumerate(per_tile):
        chosen = torch.randperm(256, device="cuda")[:count] + 256 * tile
        block.w_gate[chosen, 0] = 2
    call = Call(block, 2)
    y = call.run()
    assert call.decoded().counts[0].tolist() == per_tile
    assert call.decoded().overflowed[0].tolist() == [count > 127 for count in per_tile]
    assert_same_bits(y, reference.emulate(block))
    assert_same_bits(call.steps(), y)
    assert not call.dense_rows_of_steps().any()


@pytest.mark.parametrize("density", [0.005, 0.3, 0.9])
@pytest.mark.parametrize(
    ("rows", "d_ff"),
    [(1, 2000), (3, 2000), (14, 2000), (30, 2000), (60, 2000), (200, 2000), (50, 11008), (60, MANY_NEURONS)],
)
def test_bitwise_repeatable(rows: int, d_ff: int, density: float) -> None:
    block = make_block(Case(rows=rows, d_model=1024, d_ff=d_ff, d_out=1032, density=density), integers=False)
    call = Call(block, 8)
    steps, whole = call.steps(), call.run()
    packed = call.packed.clone()
    for _ in range(100):
        call.packed.fill_(POISON_WORD - (1 << 32))
        assert_same_bits(call.steps(), steps)
        assert torch.equal(call.packed, packed)
        call.y.view(torch.int16).fill_(POISON)
        call.mlp()
        assert_same_bits(call.y, whole)


def test_calls_close_behind_each_other() -> None:
    """Kernels of successive calls, which may overlap, share a workspace; each call's input is the output before."""
    rows = 7
    block = make_block(Case(rows=rows, d_model=512, d_ff=2000, d_out=512, density=0.1, biases=""), integers=False)
    assert block.w_up is not None
    block.w_gate[:, 0] = 0.0  # about half of the neurons are active, whatever x is
    calls: list[Call] = []
    for _ in range(4):
        calls.append(Call(block, 8))
        calls[-1].workspace = calls[0].workspace
        block = dataclasses.replace(block, x=calls[-1].y)
    for call in calls:
        call.mlp()
        torch.cuda.synchronize()
    expected = [call.y.clone() for call in calls]
    for call, y in zip(calls, expected, strict=True):
        reference.assert_close(y, call.block)
    for _ in range(50):
        for call in calls:
            call.y.view(torch.int16).fill_(POISON)
        for call in calls:
            call.mlp()
        torch.cuda.synchronize()
        for call, y in zip(calls, expected, strict=True):
            assert_same_bits(call.y, y)


def test_rows_do_not_depend_on_their_number() -> None:
    """All configurations of the two steps give the same bits for a row."""
    block = make_block(Case(rows=300, d_model=264, d_out=1100 // 8 * 8, density=0.1), integers=False)
    whole = Call(block, 8).steps()
    for begin, end in ((0, 1), (7, 20), (100, 150), (150, 290)):
        part = dataclasses.replace(block, x=block.x[begin:end].contiguous())
        assert_same_bits(Call(part, 8).steps(), whole[begin:end])


@pytest.mark.parametrize("rows", [1, 8, 16, 40, 200])
def test_cuda_graph(rows: int) -> None:
    case = Case(rows=rows, density=0.1)
    call = Call(make_block(case, integers=False), case.compression)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.mlp()
    for _ in range(3):
        call.block.x.copy_(make_block(case, integers=False).x)
        call.y.view(torch.int16).fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_close(call.y, call.block)


@pytest.mark.parametrize("rows", [1, 200])
def test_cuda_graph_without_warm_up(rows: int) -> None:
    """The first call of a process may be one that is captured: loading kernels and setting attributes must be legal."""
    script = f"""
        import torch
        from tests.plugins import reference, test_kernels
        case = test_kernels.Case(rows={rows}, density=0.1)
        call = test_kernels.Call(test_kernels.make_block(case, integers=False), case.compression)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.mlp()
        graph.replay()
        torch.cuda.synchronize()
        reference.assert_close(call.y, call.block)
    """
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=root, env=environment)


def test_streams_at_once() -> None:
    cases = (
        Case(rows=700, d_model=1024, density=0.05),
        Case(rows=40, d_model=1024, dtype=FP16, density=0.3),
        Case(rows=1, d_model=1024, density=0.3),
        Case(rows=1, d_model=1024, density=0.1),
        Case(rows=1, d_model=1024, d_ff=3000, density=0.9),
    )
    calls = [Call(make_block(case, integers=False), case.compression) for case in cases]
    expected = [call.run() for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]  # type: ignore[no-untyped-call]
    for _ in range(20):
        for call in calls:
            call.y.view(torch.int16).fill_(POISON)
        torch.cuda.synchronize()
        for _ in range(5):
            for call, stream in zip(calls, streams, strict=True):
                with torch.cuda.stream(stream):
                    call.mlp()
        torch.cuda.synchronize()
        for call, y in zip(calls, expected, strict=True):
            assert_same_bits(call.y, y)


@pytest.mark.parametrize(
    ("rows", "d_model", "d_ff", "d_out", "compression"),
    [(1_100_000, 2048, 256, 2048, 8), (40_000, 8, 65536, 8, 1)],
    ids=("x and y", "packed"),
)
def test_more_than_2_31_elements(rows: int, d_model: int, d_ff: int, d_out: int, compression: int) -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs 40 GB of device memory")
    case = Case(rows=64, d_model=d_model, d_ff=d_ff, d_out=d_out, compression=compression, density=0.01, biases="")
    block = make_block(case, integers=False)
    picked = torch.tensor([0, 1, rows // 2, rows - 129, rows - 2, rows - 1], device="cuda")
    x = torch.zeros((rows, d_model), dtype=block.x.dtype, device="cuda")
    x[picked] = block.x[: len(picked)]
    call = Call(dataclasses.replace(block, x=x), compression)
    call.gate()
    call.start_steps(0)
    reference.assert_close(call.y[picked], dataclasses.replace(block, x=block.x[: len(picked)].contiguous()))
    assert torch.isfinite(call.y[-1000:]).all()
    assert_guards(call.y_buffer)
    assert_guards(call.packed_buffer)


@pytest.fixture
def call() -> Call:
    return Call(make_block(Case(residual=True), integers=False), 8)


def status_of(call: Call) -> tuple[int, int]:
    """What twell_gate and twell_mlp return for the call's problem and tensors."""
    stream = torch.cuda.current_stream().cuda_stream
    packed, workspace = call.packed.data_ptr(), (call.workspace.data_ptr(), call.workspace.numel())
    return (
        call.lib.twell_gate(call.problem, call.tensors, packed, stream),
        call.lib.twell_mlp(call.problem, call.tensors, *workspace, stream),
    )


@pytest.mark.parametrize("name", ["x", "w_gate", "w_up", "w_down", "y", "b_gate", "b_up", "b_down", "residual"])
def test_bad_pointers(call: Call, name: str) -> None:
    assert status_of(call) == (SUCCESS, SUCCESS)
    gate_reads = name in ("x", "w_gate", "b_gate")
    pointer = getattr(call.tensors, name)
    setattr(call.tensors, name, pointer + 8)
    wrong = MISALIGNED_ADDRESS
    assert status_of(call) == (wrong if gate_reads else SUCCESS, wrong)
    setattr(call.tensors, name, None)
    wrong = SUCCESS if name.startswith("b_") or name == "residual" else INVALID_VALUE
    assert status_of(call) == (wrong if gate_reads else SUCCESS, wrong)
    torch.cuda.synchronize()


def test_residual_must_not_overlap_y(call: Call) -> None:
    y, size = call.y.data_ptr(), call.y.numel() * call.y.element_size()
    for residual in (y, y + size - 16, y - size + 16):
        call.tensors.residual = residual
        assert status_of(call) == (SUCCESS, INVALID_VALUE)
    torch.cuda.synchronize()


def test_bad_workspace(call: Call) -> None:
    pointer, size = call.workspace.data_ptr(), call.workspace.numel()
    packed = call.packed.data_ptr()
    mlp, gate = call.lib.twell_mlp, call.lib.twell_gate
    assert mlp(call.problem, call.tensors, pointer, size - 1, None) == INVALID_VALUE
    assert mlp(call.problem, call.tensors, None, size, None) == INVALID_VALUE
    assert mlp(call.problem, call.tensors, pointer + 16, size, None) == MISALIGNED_ADDRESS
    assert gate(call.problem, call.tensors, None, None) == INVALID_VALUE
    assert gate(call.problem, None, packed, None) == INVALID_VALUE
    assert gate(call.problem, call.tensors, packed + 4, None) == MISALIGNED_ADDRESS


def test_bad_problem(call: Call) -> None:
    call.problem.d_model = 70
    assert status_of(call) == (INVALID_VALUE, INVALID_VALUE)


def test_plain_takes_no_up_weights() -> None:
    call = Call(make_block(Case(gated=False), integers=False), 8)
    call.tensors.w_up = call.tensors.w_gate
    assert status_of(call) == (SUCCESS, INVALID_VALUE)


def test_no_tokens(call: Call) -> None:
    """Nothing is read or written, so nothing has to be there."""
    call.problem.tokens = 0
    nothing = library.Tensors()
    assert call.lib.twell_packed_bytes(call.problem) == 0
    assert call.lib.twell_gate(call.problem, nothing, None, None) == SUCCESS
    assert call.lib.twell_mlp(call.problem, nothing, None, 0, None) == SUCCESS
