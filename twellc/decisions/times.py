"""Measured times of feed-forward blocks: a data file for each GPU, which decisions rest on.

A file holds one object in JSON:

    format      2
    machine     the GPU and the software: gpu, multiprocessors, twellc, commit, date, form, …
    complete    whether all of the grid was measured
    dense       fields: variant, d_model, d_ff, tokens, us, p10_us, p90_us, by
                rows: a value for each field, a row a point
    twell       fields: variant, d_model, d_ff, tokens, us, p10_us, p90_us, density, nominal, neurons, hot
                rows: likewise

Format 1, where each point is an object with these keys, is read, too.

Times are microseconds of one call in bfloat16: the median, and the range that holds the middle 80 %. For a dense block
it is the fastest of several forms, which `by` names. `density` is the share of gate activations that were not zero,
`nominal` the requested share; `neurons` says how they are spread over neurons: `equal`; `zipf`, by Zipf's law, in no
order but for the `hot` most active, which come first and are a dense product where calls are split.

Importing this imports no torch: decisions and reports read it, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from twellc.base.errors import UserError
from twellc.base.records import Count, OneOf, Record, Share, Size, Time, of_json, parse_json

Rates = np.ndarray[Any, np.dtype[np.float64]]  # how often each neuron fires, as shares of the tokens: [d_ff]

FORMAT = 2
_READ = (1, FORMAT)
VARIANTS = ("gated", "plain")
NEURONS = ("equal", "zipf")

_FIX = "Measure the GPU again: twellc bench --measure-gpu -o FILE"


@dataclass(frozen=True)
class Measured(Record):
    """The time of one call of a block.

    Attributes:
        variant: `gated` or `plain`.
        d_model: Width of input and output.
        d_ff: Number of neurons.
        tokens: Rows of the call.
        us: Median, in microseconds.
        p10_us: Tenth percentile.
        p90_us: Ninetieth percentile.
    """

    variant: Annotated[str, OneOf(VARIANTS)]
    d_model: Size
    d_ff: Size
    tokens: Size
    us: Time
    p10_us: Time
    p90_us: Time


@dataclass(frozen=True)
class DensePoint(Measured):
    """The time of a dense block, and which form of it was the fastest: `eager`, `compiled` or `packed`."""

    by: str


@dataclass(frozen=True)
class TwellPoint(Measured):
    """The time of a block by TwELL.

    Attributes:
        density: Share of gate activations that were not zero.
        nominal: The requested share.
        neurons: How they are spread over neurons: `equal` or `zipf`.
        hot: How many neurons came first and were a dense product where calls are split.
    """

    density: Share
    nominal: Share
    neurons: Annotated[str, OneOf(NEURONS)]
    hot: Count = 0


@dataclass(frozen=True)
class GpuTimes(Record):
    """The measured times of one GPU.

    Attributes:
        machine: The GPU and the software; the key `gpu` is always there.
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
        """Return the content of a data file: JSON with a line for all points of one size."""
        parts = {
            "format": str(FORMAT),
            "machine": json.dumps(self.machine),
            "complete": json.dumps(self.complete),
            "dense": _table(DensePoint, self.dense),
            "twell": _table(TwellPoint, self.twell),
        }
        return ",\n".join(f' "{name}": {text}' for name, text in parts.items()).join(("{\n", "\n}\n"))


@dataclass(frozen=True)
class _Table(Record):
    """Points as a file holds them: the names of their fields, and a row of values for each."""

    fields: list[str]
    rows: list[list[Any]]


def _table(kind: type[Measured], points: Sequence[Measured]) -> str:
    """Return points as JSON: the names of their fields once, and a row for each point."""
    names = json.dumps([field.name for field in fields(kind)])
    sizes = groupby(points, key=lambda point: (point.variant, point.d_model, point.d_ff, point.tokens))
    lines = (", ".join(json.dumps(astuple(point)) for point in same) for _, same in sizes)
    return f'{{"fields": {names}, "rows": [\n  ' + ",\n  ".join(lines) + "\n ]}"


def _points(content: Any, place: str) -> Any:
    """Return the points of a table as objects; return other JSON as it is.

    Raises:
        ValueError: The table is damaged.
    """
    if not isinstance(content, dict):
        return content
    table = of_json(_Table, content, place)
    for index, row in enumerate(table.rows):
        if len(row) != len(table.fields):
            raise ValueError(f"{place}.rows[{index}] has {len(row)} values for {len(table.fields)} fields")
    return [dict(zip(table.fields, row, strict=True)) for row in table.rows]


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
        UserError: It cannot be read, is not a data file, has another format, or holds too little to interpolate in.
    """
    where = f"--target-gpu {path}"
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(where, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(where, f"holds no measured times: it cannot be read as JSON ({error})", fix=_FIX) from error
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(where, "holds no measured times: it names no format", fix=_FIX)
    if content["format"] not in _READ:
        got, expected = str(content["format"]), " or ".join(map(str, _READ))
        raise UserError(where, "the measured times are of another format", got=got, expected=expected, fix=_FIX)
    try:
        points = {name: _points(content[name], name) for name in ("dense", "twell") if name in content}
        times = of_json(GpuTimes, {**content, **points})
        _refuse_contradictions(times)
    except ValueError as error:
        raise UserError(where, f"the measured times are damaged: {error}", fix=_FIX) from error
    return times


def _refuse_contradictions(times: GpuTimes) -> None:
    """Fail if no interpolation between the times is possible.

    Raises:
        ValueError: None is possible; the message names the place.
    """
    if "gpu" not in times.machine:
        raise ValueError("machine has no gpu")
    for name, points in (("dense", times.dense), ("twell", times.twell)):
        if not points:
            raise ValueError(f"{name} is empty")
        for index, point in enumerate(points):
            if any(math.isnan(each) for each in vars(point).values() if isinstance(each, float)):
                raise ValueError(f"{name}[{index}] has a null that is not a time or a share")
            if isinstance(point, TwellPoint) and point.hot >= point.d_ff:
                raise ValueError(f"{name}[{index}].hot is not less than d_ff")
