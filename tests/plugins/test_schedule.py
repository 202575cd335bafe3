"""The order in which step 2 takes rows, on a GPU: every row once, the most non-zeros first."""

import ctypes
import dataclasses

import pytest
import torch

from tests.plugins.calls import SUCCESS, Call, assert_same_bits, count_without_list, level
from tests.plugins.cases import Case, make_block
from twellc.plugins import library

pytestmark = pytest.mark.gpu

TILES = 22
HEADER_BYTES = 256
UNIT_NONZEROS = 32
SPLIT_NONZEROS = 64


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What twell::ScheduleHeader and the rows behind it say."""

    heavy_count: int
    split_end: int
    unit_count: int
    order: torch.Tensor


def schedule(counts: torch.Tensor, compression: int) -> Schedule:
    """Schedule rows whose tiles have these counts [tokens, tiles]."""
    tokens, tiles = counts.shape
    words = library.TILE // compression
    packed = torch.full((tokens, tiles, words), -1, dtype=torch.int32, device="cuda")
    packed[:, :, 0] = counts.int()
    spilled = torch.zeros((tokens, tiles, library.TILE), dtype=torch.int16, device="cuda")
    problem = library.Problem(
        tokens=tokens, d_model=8, d_ff=tiles * library.TILE, d_out=8, compression=compression, dtype=0
    )
    lib = library.load()
    size, run = lib.twell_internal_schedule_bytes, lib.twell_internal_schedule
    size.restype, size.argtypes = ctypes.c_size_t, [ctypes.POINTER(library.Problem)]
    run.restype, run.argtypes = ctypes.c_int, [*size.argtypes, *[ctypes.c_void_p] * 4]
    memory = torch.full((size(problem),), 0xFF, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    assert run(problem, packed.data_ptr(), spilled.data_ptr(), memory.data_ptr(), stream) == SUCCESS
    torch.cuda.synchronize()
    heavy_count, split_end, unit_count = memory[:12].view(torch.int32).tolist()
    order = memory[HEADER_BYTES : HEADER_BYTES + 8 * tokens].view(torch.int32)[::2].long()
    return Schedule(heavy_count, split_end, unit_count, order)


def assert_ordered(result: Schedule, counts: torch.Tensor) -> None:
    order, totals = result.order, counts.sum(dim=1)
    tokens, tiles = counts.shape
    heavy = count_without_list(totals, tiles)
    assert result.heavy_count == (heavy if heavy <= -(-tokens // 4) else tokens), "not these rows are heavy"
    assert torch.equal(order.sort().values, torch.arange(len(counts), device="cuda")), "not every row exactly once"
    key = level(totals)[order]
    assert (key[1:] <= key[:-1]).all(), "a heavier row comes after a lighter one"
    split_end = max(int((totals >= SPLIT_NONZEROS).sum()), result.heavy_count)
    assert result.split_end == split_end, "not these rows are split"
    # All rows of a bucket get as many units as the heaviest could need.
    needed = -(-totals[order[result.heavy_count :]] // UNIT_NONZEROS)
    assert int(needed.sum()) <= result.unit_count <= int((needed + 1 + needed // 8).sum()), "not this number of units"


ROWS = (1, 2, 31, 32, 33, 1000, 4096, 4097, 131072)


@pytest.mark.parametrize("compression", [1, 8])
@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("kind", ["empty", "full", "equal", "one full", "unequal", "any"])
def test_every_row_once_heaviest_first(kind: str, tokens: int, compression: int) -> None:
    counts = torch.zeros((tokens, TILES), dtype=torch.long, device="cuda")
    if kind == "full":
        counts += 256
    elif kind == "equal":
        counts += 3
    elif kind == "one full":
        counts[tokens // 2] = 256
    elif kind == "unequal":
        mean = torch.exp(torch.randn((tokens, 1), device="cuda"))
        counts += torch.poisson(mean.expand(-1, TILES)).long().clamp(max=256)
    elif kind == "any":
        counts += torch.randint(0, 257, (tokens, TILES), device="cuda")
        counts[torch.rand((tokens, TILES), device="cuda") < torch.rand((tokens, 1), device="cuda")] = 0
    assert_ordered(schedule(counts, compression), counts)


@pytest.mark.parametrize("tiles", [1, 31, 32, 33, 256])
def test_any_number_of_tiles(tiles: int) -> None:
    counts = torch.randint(0, 257, (500, tiles), device="cuda")
    counts[torch.rand((500, tiles), device="cuda") < torch.rand((500, 1), device="cuda")] = 0
    for compression in (1, 2, 8):
        assert_ordered(schedule(counts, compression), counts)


def test_results_do_not_depend_on_the_order() -> None:
    """A row comes to another place among other rows, and in the next run, and keeps its bits."""
    block = make_block(Case(rows=600, d_model=264, d_ff=1500, d_out=264, density=0.05))
    expected = Call(block, 8).steps()
    shuffled = torch.randperm(600, device="cuda")
    block.x.copy_(block.x[shuffled].clone())
    assert_same_bits(Call(block, 8).steps(), expected[shuffled])
