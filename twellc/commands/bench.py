"""`twellc bench` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from twellc import api
from twellc.base.errors import UserError
from twellc.commands.options import FilePath, OutputPath, options_of, refuse_other_options
from twellc.commands.terminal import Command, never_failing, open_console, say, show_progress
from twellc.options.commands import BenchOptions

if TYPE_CHECKING:
    from twellc.benchmarking.result import BenchResult, Standings


@click.command(cls=Command)
@click.argument("model", type=FilePath(), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--measure-gpu",
    is_flag=True,
    help="Measure no model, but what blocks of many sizes take on the GPU at hand, for --target-gpu of compile and "
    "inspect; takes less than four minutes.",
)
@click.option("-o", "--output", type=OutputPath(), metavar="FILE", help="With --measure-gpu: the data file to write.")
@options_of(BenchOptions)
@click.pass_context
def bench(
    context: click.Context,
    /,
    model: Path | None,
    as_json: bool,
    measure_gpu: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Measure MODEL on the GPU at hand: as it is, rewritten, and what else one could run.

    MODEL is what compile takes, but for ONNX files. At each shape the whole model and its
    rewritten feed-forward blocks alone are timed in torch, eager and compiled, in CUDA graphs, and then each block by
    itself. Beside them stand dense blocks with gate and up in one product, in the model's precision and in FP8, and
    plans where full TensorRT is installed. The model is rewritten as compile would for these shapes. Speed-ups are over
    the fastest dense one in torch that is not in FP8.

    Results are compared with float64 before they are timed; a contestant that is too far off is named and left out.
    Exit status 2: the input is bad, or there is no GPU.
    """
    if measure_gpu:
        taken = ("measure_gpu", "model", "output", "overwrite")
        refuse_other_options(context, "--measure-gpu", taken, "is for measuring a model")
        _measure_gpu(model, output, options["overwrite"])
        return
    if model is None:
        raise UserError("MODEL", "there is nothing to measure", expected="a model, or --measure-gpu")
    if output is not None:
        raise UserError(f"--output {output}", "is for --measure-gpu alone", fix="Use --json > FILE.")
    with show_progress() as progress:
        result = api.bench(model, progress=progress, **options)
    with never_failing():
        if as_json:
            click.echo(json.dumps(result.to_json(), indent=2))
        else:
            print_bench(result)


def _measure_gpu(model: Path | None, output: Path | None, overwrite: bool) -> None:
    if model is not None:
        raise UserError("--measure-gpu", "measures no model", got=str(model), fix="Leave it out.")
    if output is None:
        raise UserError("--measure-gpu", "no data file to write", fix="Add -o FILE.")
    from twellc.benchmarking.calibrate import calibrate

    with show_progress() as progress:
        times = calibrate(output, overwrite, progress)
    with never_failing():
        state = "" if times.complete else "; time or memory ran out before all of the grid was measured"
        click.echo(f"{output}: {times.gpu}, {len(times.dense)} dense and {len(times.twell)} sparse times{state}")


def print_bench(result: BenchResult) -> None:
    """Print what was found."""
    console = open_console()
    for note in result.notes:
        say("Note:", f"{note}.")
    console.print(f"{result.model}, {result.dtype}, {result.machine.gpu}, torch {result.machine.torch}", soft_wrap=True)
    console.print(f"Inputs: {result.inputs}", soft_wrap=True)
    shapes = [each.shape for each in result.results]
    models, blocks = [each.model for each in result.results], [each.blocks for each in result.results]
    console.print(_times("whole model", shapes, models))
    console.print(_times("rewritten feed-forward blocks alone", shapes, blocks))
    if any(each.by_block for each in result.results):
        console.print(_by_block(result, shapes))
    for title, own in (("whole model", models), ("blocks alone", blocks)):
        if any(each.joules_per_token for each in own):
            console.print(_energy(f"energy a token in mJ, {title}", shapes, own))
    densities = [each.densities for each in result.results]
    rows = {
        "mean of the blocks": [f"{sum(own) / len(own):.2%}" for own in densities],
        "least and most": [f"{min(own):.2%}, {max(own):.2%}" for own in densities],
    }
    console.print(_table("share of gate activations that are not zero", shapes, rows))
    for each in result.results:
        for title, standings in (("whole model", each.model), ("blocks alone", each.blocks)):
            for label, why in standings.failed.items():
                say("Left out:", f"{each.shape}, {title}, {label}: {why}.", "bold yellow")
    if any(each.baseline is None for each in models):
        say("Warning:", "no dense contestant is left to compare with.", "bold yellow")


def _table(title: str, shapes: list[str], rows: Mapping[str, Iterable[str]]) -> Table:
    table = Table("", title=title)
    for shape in shapes:
        table.add_column(shape, justify="right")
    for label, cells in rows.items():
        table.add_row(label, *cells)
    return table


def _times(title: str, shapes: list[str], standings: list[Standings]) -> Table:
    labels = dict.fromkeys(label for each in standings for label in each.times)
    rows = {label: [_time(each, label) for each in standings] for label in labels}
    return _table(f"{title}: milliseconds (speed-up)", shapes, rows)


def _by_block(result: BenchResult, shapes: list[str]) -> Table:
    found = [
        {own.module: f"{own.dense_us:.1f}, {own.twell_us:.1f} ({own.gain:.2f})" for own in each.by_block}
        for each in result.results
    ]
    rows = {module: [each.get(module, "-") for each in found] for module in dict.fromkeys(itertools.chain(*found))}
    title = "each block by itself: microseconds, fastest dense one and twell (speed-up)"
    return _table(title, shapes, rows)


def _time(standings: Standings, label: str) -> str:
    times = standings.times.get(label)
    if times is None:
        return "-"
    # The range is of the middle 80 %; half of it, relative to the median.
    spread = (times.p90_us - times.p10_us) / 2 / times.median_us
    speed_up = standings.speed_ups.get(label)
    return f"{times.median_us / 1e3:.3f} ±{spread:.0%}" + (f" ({speed_up:.2f})" if speed_up is not None else "")


def _energy(title: str, shapes: list[str], standings: list[Standings]) -> Table:
    joules = [{label: f"{own * 1e3:.2f}" for label, own in each.joules_per_token.items()} for each in standings]
    rows = {label: [each.get(label, "-") for each in joules] for label in dict.fromkeys(itertools.chain(*joules))}
    return _table(title, shapes, rows)
