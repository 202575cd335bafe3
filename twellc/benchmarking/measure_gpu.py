"""`twellc bench --measure-gpu`: the times of blocks on the GPU at hand, which `twellc.decisions` predicts from.

The blocks are a grid of tokens, widths, densities and distributions.

TwELL is compared with the fastest of three dense blocks: eager; with one fused kernel for the activation; with that
kernel, and gate and up packed in one product. Times are of one call within a CUDA graph that holds one call for each of
several sets of weights, so that weights come from memory as they do in a model. All contestants of a size take
turns, in a new order in each repetition.

Weights are drawn once a width, and x decides how often neurons fire. The first column of x is a threshold for each
token, which all neurons share. Each unequal distribution has a column after it: that of the gate is an offset for each
neuron. In the column of the distribution that is measured x is a constant, in those of the others zero.
"""

from __future__ import annotations

import datetime
import functools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from twellc.base.errors import UserError
from twellc.base.files import OutputFiles, uninterrupted, writing
from twellc.benchmarking import timing
from twellc.benchmarking.activity import draw_activity, hot_neurons_first, thresholds, zipf_offsets
from twellc.benchmarking.contest import time_rotated
from twellc.benchmarking.forms import Block, Packed, fused_dense
from twellc.decisions.predict import Widths, is_split
from twellc.decisions.times import DensePoint, GpuTimes, TwellPoint
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.library import limits
from twellc.plugins.ops import run_block

# After so many seconds no other size is begun.
_SECONDS = 200
_MANY_TOKENS = 8192  # beyond it activations push weights out of L2 anyway
# Where calls are not split, hot neurons matter only by their order: measured at these numbers of tokens.
_TOKENS_IN_ORDER = (1, 8, 32, 128)
# Twice the error of a dense block in bf16.
_LARGEST_ERROR = 0.02


Distribution = tuple[float, str, int]


@dataclass(frozen=True)
class Activity:
    """How active neurons are, and how many are hot: see `twellc.decisions.times`."""

    density: float
    neurons: str = "equal"
    hot: int = 0

    @property
    def distribution(self) -> Distribution:
        """The part that x and the gate decide: density, kind, and how many of the most active neurons come first."""
        return self.density, self.neurons, self.hot


@dataclass(frozen=True)
class Grid:
    """Blocks of one width to measure: every activity at every number of tokens; without any, dense blocks alone."""

    variant: str
    d_model: int
    d_ff: int
    tokens: tuple[int, ...]
    activities: tuple[Activity, ...]


def _equal(*densities: float) -> tuple[Activity, ...]:
    return tuple(map(Activity, densities))


def _unequal(neurons: str, *densities: float) -> tuple[Activity, ...]:
    return tuple(Activity(density, neurons) for density in densities)


_HOT = (128, 512, 1024, 3072)

_ALL = (
    *_equal(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0),
    *_unequal("zipf", 0.005, 0.01, 0.02, 0.04),
    *(Activity(density, "zipf", hot) for density in (0.005, 0.02) for hot in _HOT),
)
_SOME = (
    *_equal(0.001, 0.003, 0.01, 0.03, 0.1, 1.0),
    *_unequal("zipf", 0.005, 0.02),
    *(Activity(0.01, "zipf", hot) for hot in (512, 1024)),
)


def _both_sides(*last: int) -> tuple[int, ...]:
    """Return token counts on both sides of a change of kernels: the last of one kernel, the first of the next."""
    return tuple(tokens + step for tokens in last for step in (0, 1))


def grids() -> tuple[Grid, ...]:
    """Return the grids to measure, the most useful first, as a run may have to stop early.

    Raises:
        UserError: The plugin library is missing.
    """
    at = limits()
    largest = at.dense_block_products // (2048 * 5632)
    pair, few = _both_sides(at.one_or_two_tokens), _both_sides(at.few_tokens)
    generic, hopper = _both_sides(at.few_tokens_generic), _both_sides(at.few_tokens_sm90)
    block, usual = _both_sides(at.dense_block_tokens), _both_sides(largest)
    main = (1, *pair, 8, *few, 32, *generic, *hopper, 256, 320, 512, 1024, *usual, 2048, 3072)
    main = (*main, *_both_sides(at.chunk_tokens - 1), 8192, 16384, 32768)
    large = (1, at.one_or_two_tokens, 8, *few, 32, *generic, at.few_tokens_sm90, 256, 512, 1024, *block)
    large = (*large, 2048, 4096, 8192, 32768)
    plain = (1, *pair, 8, *few, 32, *generic, at.few_tokens_sm90, 256, 512, 1024, *block, *usual, 4096, 8192, 32768)
    narrow = (1, 8, 32, 128, 512, 2048, 8192, 32768)
    return (
        Grid("gated", 2048, 5632, main, _ALL),
        Grid("gated", 4096, 11008, large, _SOME),
        Grid("plain", 2048, 8192, plain, _SOME),
        Grid("gated", 2048, 2560, main, _SOME),
        *(Grid("gated", 2048, d_ff, narrow, ()) for d_ff in (128, 256, 512, 1024)),
        Grid("gated", 2048, 4096, large, _SOME),
        Grid("gated", 4096, 14336, large, _SOME),
        Grid("gated", 1024, 4096, plain, _SOME),
        Grid("plain", 1024, 4096, plain, _SOME),
        Grid("gated", 5120, 13824, large[:-1], _SOME),
        Grid("plain", 4096, 16384, plain[:-1], _SOME),
        *(Grid("gated", 4096, d_ff, narrow, ()) for d_ff in (256, 512, 1024)),
    )


@dataclass(frozen=True)
class BlockWeights:
    """A block, and its weights as other contestants read them: all in one product, and down [d_ff, d_model]."""

    block: Block
    packed: Packed
    down_by_neuron: Tensor


def place_columns(activities: tuple[Activity, ...]) -> dict[Distribution, int]:
    """Give each unequal distribution a column of x and gate, after the column for the tokens' activity."""
    unequal = dict.fromkeys(activity.distribution for activity in activities if activity.neurons != "equal")
    return {distribution: column for column, distribution in enumerate(unequal, 1)}


def draw_weights(grid: Grid, columns: dict[Distribution, int], device: str = "cuda") -> BlockWeights:
    """Draw the weights of one block; `columns` are those of the gate that hold the neurons' activity."""
    d_model, d_ff = grid.d_model, grid.d_ff
    scale = d_model**-0.5
    gate = torch.randn((d_ff, d_model), device=device) * scale
    gate[:, 0] = -scale
    gate[:, 1 : 1 + len(columns)] = 0
    for (density, _, hot), column in columns.items():
        gate[:, column] = hot_neurons_first(zipf_offsets(d_ff, density, device), hot) * scale
    up = None if grid.variant == "plain" else torch.randn((d_ff, d_model), device=device) * scale
    down = (torch.randn((d_model, d_ff), device=device) * 0.2).bfloat16()
    block = Block(gate.bfloat16(), None if up is None else up.bfloat16(), down)
    return BlockWeights(block, Packed(block), down.t().contiguous())


def draw_rows(
    tokens: int, d_model: int, distribution: Distribution, columns: dict[Distribution, int], device: str = "cuda"
) -> Tensor:
    """Draw x [tokens, d_model] for which as many neurons are active as the distribution says."""
    density = distribution[0]
    x = torch.randn((tokens, d_model), device=device)
    x[:, 0] = thresholds(draw_activity(tokens, density, device), density) * d_model**0.5
    x[:, 1 : 1 + len(columns)] = 0
    if distribution in columns:
        x[:, columns[distribution]] = d_model**0.5
    return x.bfloat16()


def twell(x: Tensor, hot: int, w: BlockWeights) -> Tensor:
    """Compute the block by TwELL; where calls are split, a dense product computes the first `hot` neurons."""
    block = w.block
    first = {"w_up": block.gate} if block.up is None else {"w_gate": block.gate, "w_up": block.up}
    return run_block(Operands(x=x, **first, w_down=w.down_by_neuron), BlockOptions(activation="relu", hot=hot))


def share_active(x: Tensor, w: BlockWeights) -> float:
    """Return the share of gate activations that are not zero."""
    return float(w.block.active(x).double().mean())


def measure_size(
    grid: Grid, tokens: int, sets: list[BlockWeights], columns: dict[Distribution, int], repeats: int
) -> tuple[DensePoint, list[TwellPoint]]:
    """Time the blocks of one width at one number of tokens.

    Raises:
        RuntimeError: TwELL's result is not that of the dense block.
    """
    used = sets if tokens <= _MANY_TOKENS else sets[:2]
    widths = Widths(grid.variant, grid.d_model, grid.d_ff, grid.d_model)
    with_hot = tokens in _TOKENS_IN_ORDER or is_split(widths, tokens)
    activities = [each for each in grid.activities if not each.hot or with_hot]
    drawn = {
        distribution: draw_rows(tokens, grid.d_model, distribution, columns)
        for distribution in dict.fromkeys(activity.distribution for activity in activities)
    }
    rows = {activity: drawn[activity.distribution] for activity in activities}
    for activity, x in rows.items():
        exact = sets[0].block.dense(x).float()
        error = float((twell(x, activity.hot, sets[0]).float() - exact).norm() / exact.norm().clamp(min=1e-30))
        if not error <= _LARGEST_ERROR:
            raise RuntimeError(f"{grid}, {tokens} tokens, {activity}: off from the dense block by {error:.2e}")
        del exact
    any_rows = next(iter(rows.values())) if rows else draw_rows(tokens, grid.d_model, (0.01, "equal", 0), columns)
    # Unlike a block that is compiled as a whole, these dense forms need no compilation for each size.
    calls: dict[Any, Callable[[BlockWeights], Tensor]] = {
        "eager": lambda w: w.block.dense(any_rows),
        "fused": lambda w: fused_dense(w.block, any_rows),
        "packed": lambda w: w.packed(any_rows),
    }
    calls |= {activity: functools.partial(twell, x, activity.hot) for activity, x in rows.items()}
    rotated = {name: [functools.partial(call, w) for w in used] for name, call in calls.items()}
    times = time_rotated(rotated, repeats)
    size = (grid.variant, grid.d_model, grid.d_ff, tokens)
    best = min((name for name in times if isinstance(name, str)), key=lambda name: times[name].median_us)
    points = []
    for activity, x in rows.items():
        density = round(statistics.fmean(share_active(x, w) for w in used), 7)
        points.append(TwellPoint(*size, *_microseconds(times[activity]), density, *astuple(activity)))
    return DensePoint(*size, *_microseconds(times[best]), best), points


def _microseconds(times: timing.CallTime) -> tuple[float, float, float]:
    return round(times.median_us, 3), round(times.p10_us, 3), round(times.p90_us, 3)


def _machine() -> dict[str, str]:
    """Describe the machine and the software of the measurement."""
    return {
        **{name: str(value) for name, value in timing.machine().to_json().items()},
        "form": "torch ops in CUDA graphs over rotating weights",
        "commit": timing.commit_of(Path(__file__).parent),
        "date": str(datetime.datetime.now(datetime.UTC).date()),
    }


def measure_gpu(path: Path, overwrite: bool, progress: Callable[[str], None]) -> GpuTimes:
    """Measure the grid and write the data file, anew after each number of tokens.

    Args:
        path: The data file. After an interrupt it is whole, with the times that were measured so far.
        overwrite: Whether it may replace a file.
        progress: Receives the name of each measurement.

    Returns:
        The measured times.

    Raises:
        UserError: No GPU is found, or its memory holds none of the sizes, or the file cannot be written.
    """
    timing.refuse_without_gpu("--measure-gpu", "Run it on a machine with the GPU that plans are for.")
    OutputFiles(overwrite).check("--output", path)
    torch.manual_seed(0)
    random.seed(0)
    end = monotonic() + _SECONDS
    times = GpuTimes(_machine(), False, [], [])
    left = False
    for grid in grids():
        shape = f"{grid.variant} {grid.d_model} / {grid.d_ff}"
        columns = place_columns(grid.activities)
        bytes_each = 2 * grid.d_model * grid.d_ff * (3 if grid.variant == "gated" else 2)
        count = timing.sets_in_rotation(bytes_each)
        sets: list[BlockWeights] = []
        # Most tokens first: torch launches the compiled activation as suits the first size that it sees.
        for tokens in reversed(grid.tokens):
            if monotonic() > end:
                left = True
                break
            progress(f"{shape}, {tokens} tokens: {max(0, math.ceil(end - monotonic()))} s at most to go")
            sets = sets or [draw_weights(grid, columns) for _ in range(count)]
            try:
                dense_point, points = measure_size(grid, tokens, sets, columns, 5 if tokens > 256 else 9)
            except torch.OutOfMemoryError:
                progress(f"{shape}: {tokens} tokens do not fit in this GPU's memory")
                left = True
                continue
            times.dense.append(dense_point)
            times.twell.extend(points)
            _write(path, times)
    if not times.dense:
        raise UserError("--measure-gpu", "this GPU's memory holds none of the sizes", got=times.gpu)
    times = GpuTimes(times.machine, not left, times.dense, times.twell)
    _write(path, times)
    return times


def _write(path: Path, times: GpuTimes) -> None:
    """Replace the data file as a whole."""
    partial = path.with_name(f".{path.name}.partial")
    with uninterrupted(), writing(path):
        partial.write_text(times.to_text(), encoding="utf-8")
        partial.replace(path)
