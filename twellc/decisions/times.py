"""Measured times of feed-forward blocks on one GPU: a data file, one a GPU, that decisions are made from.

A file holds one object in JSON:

    format      1
    machine     what was measured on and with: gpu, multiprocessors, twellc, commit, date, form, …
    complete    whether all of the grid was measured
    dense       [{variant, d_model, d_ff, tokens, us, p10_us, p90_us, by}, …]
    twell       [{variant, d_model, d_ff, tokens, us, p10_us, p90_us, density, nominal, neurons, hot}, …]

Times are microseconds of one call in bfloat16: the median, and the range that holds the middle 80 %. A dense block's is
that of the fastest of several forms, which `by` names. `density` is the share of gate activations that were not zero,
`nominal` the one that was asked for; `neurons` says how they are shared out: `equal`; `zipf`, by Zipf's law, in no
order but for the `hot` most active, which come first and are a dense product where calls are split.

Importing this imports no torch: decisions and reports read it, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from twellc.base.errors import UserError
from twellc.base.records import Record

Rates = np.ndarray[Any, np.dtype[np.float64]]  # how often each neuron fires, as shares of the tokens: [d_ff]

FORMAT = 1
VARIANTS = ("gated", "plain")
NEURONS = ("equal", "zipf")

_FIX = "Measure the GPU again: twellc bench --calibrate -o FILE"


@dataclass(frozen=True)
class Measured(Record):
    """The time of one call of a block.

    Attributes:
        variant: `gated` or `plain`.
        d_model: Width of its input and output.
        d_ff: Its neurons.
        tokens: Rows of the call.
        us: Median, in microseconds.
        p10_us: Tenth percentile.
        p90_us: Ninetieth percentile.
    """

    variant: str
    d_model: int
    d_ff: int
    tokens: int
    us: float
    p10_us: float
    p90_us: float


@dataclass(frozen=True)
class DensePoint(Measured):
    """The time of a dense block, and which form of it was the fastest: `eager`, `compiled` or `packed`."""

    by: str


@dataclass(frozen=True)
class TwellPoint(Measured):
    """The time of a block by TwELL.

    Attributes:
        density: Share of gate activations that were not zero.
        nominal: The share that was asked for.
        neurons: How they are shared out over neurons: `equal` or `zipf`.
        hot: How many neurons came first and were a dense product where calls are split.
    """

    density: float
    nominal: float
    neurons: str
    hot: int = 0


@dataclass(frozen=True)
class GpuTimes(Record):
    """What was measured on one GPU.

    Attributes:
        machine: What was measured on and with; `gpu` is there in any case.
        complete: Whether all of the grid was measured.
        dense: Dense blocks.
        twell: Blocks by TwELL.
    """

    machine: dict[str, str]
    complete: bool
    dense: list[DensePoint]
    twell: list[TwellPoint]

    @property
    def gpu(self) -> str:
        """The name that the driver has for the GPU."""
        return self.machine["gpu"]

    def to_text(self) -> str:
        """Return the content of a data file: JSON with a line a point."""
        rows = {
            name: ",\n".join(f"  {json.dumps(point.to_json())}" for point in points)
            for name, points in (("dense", self.dense), ("twell", self.twell))
        }
        lists = ",\n".join(f' "{name}": [\n{text}\n ]' for name, text in rows.items())
        head = f' "format": {FORMAT},\n "machine": {json.dumps(self.machine)},\n'
        return f'{{\n{head} "complete": {json.dumps(self.complete)},\n{lists}\n}}\n'


def zipf_rates(d_ff: int, density: float) -> Rates:
    """Return how often each of `d_ff` neurons fires by Zipf's law, the most active first, as shares of the tokens.

    No neuron fires for more than half of the tokens, so the mean is below `density` where neurons are dense.
    """
    share = 1 / np.arange(1, d_ff + 1)
    rates: Rates = np.clip(share / share.mean() * density, 1e-7, 0.5)
    return rates


def read_times(path: Path) -> GpuTimes:
    """Read a data file.

    Raises:
        UserError: It cannot be read, is no data file, of another format, or holds too little to interpolate in.
    """
    where = f"--target-gpu {path}"
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(where, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(where, f"holds no measured times: it is no JSON ({error})", fix=_FIX) from error
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(where, "holds no measured times: it names no format", fix=_FIX)
    if content["format"] != FORMAT:
        raise UserError(
            where, "the measured times are of another format", got=str(content["format"]), expected=str(FORMAT),
            fix=_FIX,
        )  # fmt: skip
    machine = content.get("machine")
    if not isinstance(machine, dict) or not isinstance(machine.get("gpu"), str):
        raise UserError(where, "the measured times name no GPU: machine.gpu is missing", fix=_FIX)
    if not isinstance(content.get("complete"), bool):
        raise UserError(where, "the measured times are damaged: complete is neither true nor false", fix=_FIX)
    dense = _points(DensePoint, content, "dense", where)
    twell = _points(TwellPoint, content, "twell", where)
    return GpuTimes({str(key): str(value) for key, value in machine.items()}, content["complete"], dense, twell)


_Point = TypeVar("_Point", bound=Measured)


def _points(kind: type[_Point], content: Mapping[str, Any], name: str, where: str) -> list[_Point]:
    rows = content.get(name)
    if not isinstance(rows, list) or not rows:
        raise UserError(where, f"the measured times are damaged: {name} is no list of points", fix=_FIX)
    points = []
    for index, row in enumerate(rows):
        fault = _fault(kind, row)
        if fault:
            raise UserError(where, f"the measured times are damaged: {name}[{index}] {fault}", fix=_FIX)
        points.append(kind(**{each.name: row[each.name] for each in fields(kind)}))
    return points


def _fault(kind: type[Measured], row: Any) -> str:
    """Say what is wrong with a point of a data file, or return an empty string."""
    if not isinstance(row, dict):
        return "is no object"
    for name in (each.name for each in fields(kind)):
        if name not in row:
            return f"has no {name}"
        value = row[name]
        if name in ("variant", "neurons", "by"):
            allowed = {"variant": VARIANTS, "neurons": NEURONS}.get(name)
            if not isinstance(value, str) or (allowed and value not in allowed):
                return f"has {value!r} as {name}" + (f", not {' or '.join(allowed)}" if allowed else "")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"has {value!r} as {name}, not a number"
        elif name in ("d_model", "d_ff", "tokens", "hot") and (type(value) is not int or value < (name != "hot")):
            return f"has {value!r} as {name}, not a count"
        elif name.endswith("us") and value <= 0:
            return f"has {value!r} as {name}, not a time"
        elif name in ("density", "nominal") and not 0 <= value <= 1:
            return f"has {value!r} as {name}, not a share"
    return f"has {row['hot']} as hot, not fewer than d_ff" if row.get("hot", 0) >= row["d_ff"] else ""
