"""Turn results of block.py into a data file of measured times, which `twellc compile` decides by.

python benchmarks/cost_data.py results/suite.json --commit 2c3acb7 --date 2026-11-24 -o times.json

`twellc bench --calibrate` measures more of what decisions need; this is for results that are there already.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from twellc.decisions.times import DensePoint, Times, TwellPoint

_Size = tuple[str, int, int, int]


def spread(time: dict[str, float]) -> tuple[float, float, float]:
    """Return median, tenth and ninetieth percentile in microseconds."""
    return round(time["median_us"], 3), round(time["p10_us"], 3), round(time["p90_us"], 3)


def convert(reports: list[dict[str, Any]], commit: str, date: str) -> Times:
    """Return the times of reports of one GPU; of several times of a dense block the middle one."""
    dense: dict[_Size, list[tuple[tuple[float, float, float], str]]] = defaultdict(list)
    twell = []
    for result in (result for report in reports for result in report["results"]):
        if result["heavy"] > 0:
            continue
        size = (result["variant"], result["d_model"], result["d_ff"], result["tokens"])
        forms = {name: time for name, time in result["times"].items() if name.startswith("dense ")}
        best = min(forms, key=lambda name: forms[name]["median_us"])
        dense[size].append((spread(forms[best]), best.removeprefix("dense ")))
        density = round(result["mean_nonzeros"] / result["d_ff"], 7)
        twell.append(TwellPoint(*size, *spread(result["times"]["mlp"]), density, result["density"], result["neurons"]))
    points = []
    for size, times in dense.items():
        time, by = sorted(times)[(len(times) - 1) // 2]
        points.append(DensePoint(*size, *time, by))
    machine = {**reports[0]["machine"], "form": "C API in CUDA graphs over rotating weights; dense: torch"}
    return Times({**machine, "commit": commit, "date": date}, True, points, twell)


@click.command(help=__doc__)
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--commit", required=True, help="Of twellc that was measured.")
@click.option("--date", required=True, help="Of the measurement.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The data file.")
def main(results: tuple[Path, ...], commit: str, date: str, output: Path) -> None:
    """Convert results."""
    reports = [json.loads(path.read_text()) for path in results]
    output.write_text(convert(reports, commit, date).to_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
