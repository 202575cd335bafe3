"""Problems that the tests of the kernels run: tables of cases, and blocks that are drawn for them."""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Iterable, Iterator

import torch

from tests.plugins import reference
from tests.plugins.reference import Block

BF16, FP16 = torch.bfloat16, torch.float16
# With this number of neurons 17 to 64 tokens are a dense block there whose down projection skips inactive ones, up to
# 0.9 % and more.
MANY_NEURONS = 14800
KINDS = [(True, name) for name in ("relu", "relu2", "fatrelu", "drelu")]
KINDS += [(False, name) for name in ("relu", "relu2", "fatrelu")]


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


def kernel_table() -> Iterator[Case]:
    yield from kernel_cases()
    yield from with_residual(kernel_cases(), share=0.5)


def kernel_cases() -> Iterator[Case]:
    dtypes = itertools.cycle((BF16, FP16))
    densities = (0.0, 0.001, 0.005, 0.03, 0.3, 1.0)
    # Rows, around the block sizes of the gate kernel.
    for rows in (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000):
        for density in (0.005, 0.3):
            yield Case(rows=rows, density=density, dtype=next(dtypes))
    # Few tokens: around the tokens of a tile and of each configuration, with all kinds and densities.
    few = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)
    for rows, (gated, activation), dtype in itertools.product(few, KINDS, (BF16, FP16)):
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
    for rows, (gated, activation), density in itertools.product((1, 2), KINDS, (0.002, 0.1, 0.6)):
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
    for (gated, activation), dtype, compression in itertools.product(KINDS, (BF16, FP16), (1, 2, 4, 8)):
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
    for rows, (gated, activation), dtype in itertools.product((17, 64), KINDS, (BF16, FP16)):
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
SMALL_KERNELS = [
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
SMALL_KERNELS += with_residual(SMALL_KERNELS)


def make_block(case: Case, *, integers: bool = False, device: str = "cuda") -> Block:
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


def gate_table() -> Iterator[Case]:
    """All cases that run against the reference; d_model is a multiple of 64 throughout."""
    dtypes = itertools.cycle((BF16, FP16))
    base = Case(d_model=192, d_out=8, rows=300)
    # Around the row blocks of the kernels, with rows left over in either CTA of a cluster.
    for rows in (1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257, 385, 1000, 2049):
        yield dataclasses.replace(base, rows=rows, dtype=next(dtypes))
        yield dataclasses.replace(base, rows=rows, dtype=next(dtypes), biases="", density=0.3)
    # d_model: fewer slices than stages, as many, more; more than one round.
    for d_model, dtype in itertools.product((64, 128, 192, 256, 320, 2048, 4096), (BF16, FP16)):
        yield dataclasses.replace(base, d_model=d_model, dtype=dtype)
    # d_ff: ragged tiles; several tiles a cluster, the last round not full.
    for d_ff, dtype in itertools.product((1, 2, 255, 256, 257, 600, 5632, 40000), (BF16, FP16)):
        yield dataclasses.replace(base, d_ff=d_ff, dtype=dtype, density=0.1)
    # On 132 multiprocessors these have blocks of 64 to 256 tokens; test_routes.py demands that all sizes are reached.
    for rows in (64, 192, 250, 313, 450, 512, 600, 793, 1585, 2048, 2500, 3000, 3301, 3557):
        yield dataclasses.replace(base, rows=rows, d_model=128, d_ff=5632, dtype=next(dtypes), density=0.01)
        yield dataclasses.replace(base, rows=rows, d_model=448, d_ff=5632, dtype=next(dtypes), biases="", density=0.2)
    yield dataclasses.replace(base, rows=130, d_model=64, d_ff=65536, compression=1, biases="g")
    yield dataclasses.replace(base, rows=20000, d_model=64, d_ff=257)
    yield dataclasses.replace(base, rows=5000, d_model=128, d_ff=2560, density=0.01)
    for activation, dtype, compression in itertools.product(
        ("relu", "relu2", "fatrelu", "drelu"), (BF16, FP16), (1, 2, 4, 8)
    ):
        yield dataclasses.replace(base, activation=activation, dtype=dtype, compression=compression, density=0.1)
    for density, compression in itertools.product((0.0, 0.001, 0.03, 0.3, 1.0), (1, 2, 4, 8)):
        yield dataclasses.replace(base, density=density, compression=compression, dtype=next(dtypes), d_ff=1500)
    for density in (0.005, 0.3):
        yield Case(rows=2049, d_model=2048, d_ff=5632, d_out=8, density=density, biases="", dtype=next(dtypes))
        yield Case(rows=600, d_model=4096, d_ff=11008, d_out=8, density=density, biases="g", dtype=next(dtypes))


# Few launches for compute-sanitizer: one tile and several a CTA, loads that overlap, tails everywhere.
SMALL_GATE = [
    Case(rows=250, d_model=64, d_ff=5600, d_out=8, density=0.1, dtype=FP16),
    Case(rows=1, d_model=64, d_ff=1, d_out=8, density=1.0),
    Case(rows=129, d_model=64, d_ff=257, d_out=8, density=0.1, dtype=FP16, biases=""),
    Case(rows=130, d_model=320, d_ff=600, d_out=8, density=0.3, activation="relu2"),
    Case(rows=70, d_model=64, d_ff=20000, d_out=8, density=0.05, biases="g", activation="fatrelu"),
]


def guard_cases() -> Iterator[Case]:
    """Cases for the dense path: d_model is a multiple of 64 wherever there is an up projection."""
    dtypes = itertools.cycle((BF16, FP16))
    base = Case(rows=300, d_model=192, d_ff=600, d_out=136)
    # Around the blocks of tokens.
    for rows in (257, 263, 264, 265, 352, 511, 513, 1000, 2049):
        yield dataclasses.replace(base, rows=rows, density=0.2, dtype=next(dtypes))
    for d_model, dtype in itertools.product((64, 128, 320, 2048), (BF16, FP16)):
        yield dataclasses.replace(base, d_model=d_model, dtype=dtype, density=0.05)
    for d_ff, dtype in itertools.product((1, 8, 255, 256, 257, 1500, 5632), (BF16, FP16)):
        yield dataclasses.replace(base, d_ff=d_ff, dtype=dtype, density=0.1)
    for d_out, dtype in itertools.product((8, 64, 128, 248, 264, 2056), (BF16, FP16)):
        yield dataclasses.replace(base, d_out=d_out, dtype=dtype, density=0.2)
    # Tiles that have been spilled, and others, of each compression.
    for density, compression in itertools.product((0.0, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0), (1, 2, 4, 8)):
        yield dataclasses.replace(base, density=density, compression=compression, dtype=next(dtypes), d_ff=1500)
    for (gated, activation), dtype, biases in itertools.product(KINDS, (BF16, FP16), ("", "gud")):
        biases = biases if gated else biases.replace("u", "")
        yield dataclasses.replace(
            base, gated=gated, activation=activation, dtype=dtype, biases=biases, rows=700, density=0.1
        )
    for biases in ("g", "u", "d"):
        yield dataclasses.replace(base, biases=biases, density=0.2, dtype=next(dtypes))
    yield dataclasses.replace(base, gated=False, d_model=72, density=0.2)  # no up projection: any d_model
    # Every number of tokens in a block on 132 multiprocessors, several tiles a cluster: rows by the cost of tilings
    # (matmul_sm90.h). That every tiling is reached is a test in test_routes.py.
    many: tuple[int, ...] = (257, 321, 337, 385, 449, 513, 577, 641, 705, 769, 833, 897, 961, 1057, 1089, 1201, 1217)
    many += (1297, 1345, 1441, 1489, 1537, 1601, 1665, 1729, 1793, 1857, 1921, 1985, 2500, 3557, 5000)
    for rows in many:
        yield Case(rows=rows, d_model=256, d_ff=5632, d_out=2048, density=0.2, biases="", dtype=next(dtypes))
    yield Case(rows=2048, d_model=2048, d_ff=5632, d_out=2048, density=0.9, biases="")
    yield Case(rows=600, d_model=4096, d_ff=11008, d_out=4096, density=0.05, biases="", dtype=FP16)
    yield Case(rows=2180, d_model=64, d_ff=328, d_out=8, density=0.3)


def guard_table() -> Iterator[Case]:
    yield from guard_cases()
    yield from with_residual(guard_cases(), share=0.4)


def generic_guard_table() -> Iterator[Case]:
    yield from guard_table()
    dtypes = itertools.cycle((BF16, FP16))
    base = Case(rows=300, d_model=200, d_ff=600, d_out=136, density=0.2)
    for d_model in (8, 24, 40, 72, 264, 2056):
        yield dataclasses.replace(base, d_model=d_model, dtype=next(dtypes))
    # Around the blocks of tokens; one slice, as many as stages, and more.
    for rows in (383, 384, 385, 1100):
        yield dataclasses.replace(base, rows=rows, density=0.2, dtype=next(dtypes))
    for d_ff in (31, 32, 33, 128, 130):
        yield dataclasses.replace(base, d_ff=d_ff, dtype=next(dtypes))
    for d_out in (256, 512, 520):
        yield dataclasses.replace(base, d_out=d_out, dtype=next(dtypes))


def block_table() -> Iterator[Case]:
    """Cases for dense blocks, whose d_model need not be a multiple of 64."""
    yield from guard_table()
    dtypes = itertools.cycle((BF16, FP16))
    for d_model in (8, 72, 200, 264):
        for gated in (True, False):
            yield Case(rows=300, d_model=d_model, d_ff=600, gated=gated, density=0.2, dtype=next(dtypes))
    # The same, where clusters share tokens or weights, and of two or four parts of sums.
    base = Case(rows=1, d_model=200, d_ff=5632, d_out=1000, density=0.3, biases="")
    few = (1, 25, 33, 41, 49, 65, 97, 113, 129, 145, 161, 193, 225)
    many = (177, 513, 625, 721, 1281, 1585, 1729, 1825, 1921, 2049, 2177, 2305, 2433, 2561, 2689)
    for rows in (*few, *many, 2817, 2945, 3073, 3201, 3329):
        yield dataclasses.replace(base, rows=rows, dtype=next(dtypes))
    more = (81, 137, 153, 185, 209, 513, 577, 641, 705, 1585, 1665, 1801, 1945, 2049, 2177, 2305, 2433, 2561, 2689)
    for rows in (*few, *more, 2817, 2977, 3073, 3201, 3329):
        yield dataclasses.replace(base, rows=rows, dtype=next(dtypes), gated=False)
    for rows, d_model, d_ff, d_out in ((257, 200, 4096, 264), (1000, 1032, 1500, 264), (3100, 200, 600, 2056)):
        yield Case(rows, d_model, d_ff, d_out, density=0.3, biases="", dtype=next(dtypes))
    for rows, d_out in ((33, 264), (256, 264), (257, 264), (700, 2056), (800, 2056), (900, 4096), (1000, 4096)):
        d_model = 1032 if d_out == 4096 else 200
        yield Case(rows, d_model, 600, d_out, density=0.3, biases="", gated=False, dtype=next(dtypes))
    yield Case(2800, 200, 600, 4096, density=0.3, biases="", dtype=next(dtypes))
    # Tall tiles of every number of neurons, by the cost of tilings; d_ff is no multiple of any.
    for d_ff in (2185, 4405, 5293, 6033, 6958, 8475, 8993, 9511, 10066, 10621):
        for biases in ("", "gud"):
            yield Case(250, 200, d_ff, 264, density=0.3, biases=biases, dtype=next(dtypes))
    for rows, d_ff in ((193, 10621), (500, 1038), (513, 6033)):
        yield Case(rows, 200, d_ff, 264, density=0.3, dtype=next(dtypes))
        yield Case(rows, 200, d_ff, 264, density=0.3, dtype=next(dtypes), residual=True)
    # The smallest blocks of tokens of a wide down projection; two matrices with 96 tokens a block.
    for rows, d_out in ((1, 8464), (36, 9136), (43, 9576), (51, 10944), (65, 8736)):
        yield Case(rows, 192, 16, d_out, density=0.3, dtype=next(dtypes))
    yield Case(95, 64, 3385, 16, density=0.3)
    # Parts of sums, with a residual.
    for rows, gated in itertools.product((1, 25, 41, 65, 97, 129, 161, 225, 513, 1585), (True, False)):
        yield Case(rows, 200, 5632, 1000, density=0.3, biases="d", dtype=next(dtypes), gated=gated, residual=True)


def unequal_block(rows: int, full: float, density: float, dtype: torch.dtype = BF16) -> Block:
    """Draw a block some of whose rows are full, at random places."""
    block = make_block(Case(rows=rows, d_model=1024, d_ff=2816, d_out=1024, biases="", dtype=dtype))
    chosen = torch.rand(rows, device="cuda") < full
    shift = block.w_gate[:, :1].abs().float().mean()
    want = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(density))
    block.x[:, 0] = (-want / shift).to(dtype)
    block.w_gate[:, 0] = -shift.to(dtype)
    block.x[chosen, 0] = (-6.0 / shift).to(dtype)
    return block


def chunk_table() -> Iterator[Case]:
    dtypes = itertools.cycle((BF16, FP16))
    base = Case(rows=4100, d_model=192, d_ff=1600, d_out=136, density=0.02)
    # Around runs, and several of them in a block of the schedule, or more than it takes at once.
    for rows in (4096, 4097, 4159, 4160, 4161, 8193, 20000, 33000):
        yield dataclasses.replace(base, rows=rows, d_model=64, dtype=next(dtypes))
    # Around blocks of neurons, and the most of them.
    for d_ff in (1, 2, 8, 255, 256, 257, 1471, 1472, 1473, 2945, 5632, 11008, 23552, 23553):
        yield dataclasses.replace(base, d_ff=d_ff, d_model=128, density=0.01, dtype=next(dtypes))
    for d_model in (64, 128, 320, 2048, 4096):
        yield dataclasses.replace(base, d_model=d_model, dtype=next(dtypes))
    # Rows without a non-zero, octets with one row or two, more than the chunks hold, and rows without a list.
    for density, compression in itertools.product((0.0, 0.001, 0.005, 0.01, 0.03, 0.1, 0.24, 0.4), (1, 8)):
        yield dataclasses.replace(base, density=density, compression=compression, dtype=next(dtypes))
    for activation, dtype, biases in itertools.product(
        ("relu", "relu2", "fatrelu", "drelu"), (BF16, FP16), ("", "gud")
    ):
        yield dataclasses.replace(base, activation=activation, dtype=dtype, biases=biases)


def make_active(block: Block, neurons: torch.Tensor, share: float) -> None:
    """Make some neurons active in about this share of the rows."""
    block.w_gate[neurons, 0] = -statistics.NormalDist().inv_cdf(1 - share)


def choose_neurons(d_ff: int, count: int) -> torch.Tensor:
    return torch.randperm(d_ff)[:count].sort().values


HOT_BASE = Case(rows=4100, d_model=192, d_ff=1600, d_out=136, density=0.01)


def hot_table() -> Iterator[tuple[Case, int]]:
    """Cases, and how many neurons are active in a third of the rows."""
    dtypes = itertools.cycle((BF16, FP16))
    # Around the tokens of a CTA of the product, of each size.
    for rows in (4096, 4224, 4225, 6337, 8449, 12673, 16897, 25345, 33793, 70000):
        yield dataclasses.replace(HOT_BASE, rows=rows, d_model=64, dtype=next(dtypes)), 60
    for count in (20, 60, 127, 128, 129, 200):
        yield dataclasses.replace(HOT_BASE, dtype=next(dtypes)), count
    # Around words of the map of neurons, and the most of them.
    for d_ff in (31, 32, 33, 128, 129, 1471, 1473, 5632, 23552):
        yield dataclasses.replace(HOT_BASE, d_ff=d_ff, d_model=128, density=0.004, dtype=next(dtypes)), min(d_ff, 120)
    for d_model in (64, 320, 2048, 4096):
        yield dataclasses.replace(HOT_BASE, d_model=d_model, dtype=next(dtypes)), 80
    # Rows with nothing but hot neurons, and tiles that overflow.
    for density, compression in itertools.product((0.0, 0.001, 0.03), (1, 8)):
        yield dataclasses.replace(HOT_BASE, density=density, compression=compression, dtype=next(dtypes)), 60
    for activation, dtype, biases in itertools.product(
        ("relu", "relu2", "fatrelu", "drelu"), (BF16, FP16), ("", "gud")
    ):
        yield dataclasses.replace(HOT_BASE, activation=activation, dtype=dtype, biases=biases), 60
        yield dataclasses.replace(HOT_BASE, activation=activation, dtype=dtype, biases=biases, residual=True), 60


SPLIT_BASE = Case(rows=300, d_model=200, d_ff=900, d_out=136, hot=512)


def split_block(case: Case, hot_density: float) -> Block:
    """Draw a block whose first neurons have another density."""
    block = make_block(case)
    other = make_block(dataclasses.replace(case, density=hot_density))
    block.w_gate[: case.hot, 0] = other.w_gate[: case.hot, 0]
    return block
