"""`twellc bench` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import itertools
import json
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
    help="Measure blocks of many sizes on the GPU at hand, instead of a model, for --target-gpu of compile and "
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
    """Measure MODEL on the GPU at hand: as it is, rewritten, and in other dense forms.

    MODEL is as for compile, but no ONNX file. At each shape it times the whole model, then the rewritten feed-forward
    blocks alone, in torch, eager and compiled, in CUDA graphs, and then each block by itself. It compares dense blocks
    with gate and up in one product, in the model's precision and in FP8, and with --tensorrt plans of both. The model
    is rewritten as compile would for these shapes. Speed-ups are over the fastest dense one in torch that is not in
    FP8. Each shape is shown as soon as it is measured.

    Results are compared with float64 first; a contestant that is too far off is named and left out.
    Exit status 2: the input is bad, or no GPU is found.
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
    said: set[str] = set()

    def show(found: BenchResult) -> None:
        with never_failing():
            if not as_json:
                print_shape(found, said)

    with show_progress() as progress:
        result = api.bench(model, done=show, progress=progress, **options)
    with never_failing():
        if as_json:
            click.echo(json.dumps(result.to_json(), indent=2))
        elif any(each.by_block for each in result.results):
            open_console().print(_by_block(result))


def _measure_gpu(model: Path | None, output: Path | None, overwrite: bool) -> None:
    if model is not None:
        raise UserError("--measure-gpu", "measures no model", got=str(model), fix="Leave it out.")
    if output is None:
        raise UserError("--measure-gpu", "no data file to write", fix="Add -o FILE.")
    from twellc.benchmarking.measure_gpu import measure_gpu

    with show_progress() as progress:
        times = measure_gpu(output, overwrite, progress)
    with never_failing():
        state = "" if times.complete else "; time or memory ran out before all of the grid was measured"
        click.echo(f"{output}: {times.gpu}, {len(times.dense)} dense and {len(times.twell)} sparse times{state}")


def print_shape(found: BenchResult, said: set[str]) -> None:
    """Print the results of the last shape so far; before the first shape also model, machine and inputs.

    Args:
        found: The results so far.
        said: The notes that were printed; new ones are added.
    """
    console = open_console()
    for note in found.notes:
        if note not in said:
            say("Note:", f"{note}.")
    said.update(found.notes)
    if len(found.results) == 1:
        console.print(f"{found.model}, {found.dtype}, {found.machine.gpu}, torch {found.machine.torch}", soft_wrap=True)
        console.print(f"Inputs: {found.inputs}", soft_wrap=True)
    result = found.results[-1]
    parts = {"whole model": result.model, "blocks alone": result.blocks}
    least, mean, most = min(result.densities), sum(result.densities) / len(result.densities), max(result.densities)
    active = f"{mean:.2%} of gate activations are not zero, {least:.2%} to {most:.2%} by block"
    table = Table("milliseconds (speed-up)", title=f"{result.shape}: {result.tokens} tokens; {active}")
    for title, standings in parts.items():
        table.add_column(title, justify="right")
        if standings.joules_per_token:
            table.add_column("mJ a token", justify="right")
    for label in dict.fromkeys(itertools.chain(*(each.times for each in parts.values()))):
        cells = []
        for standings in parts.values():
            cells.append(_time(standings, label))
            joules = standings.joules_per_token
            cells += [f"{joules[label] * 1e3:.2f}" if label in joules else "-"] if joules else []
        table.add_row(label, *cells)
    console.print(table)
    for title, standings in parts.items():
        for label, why in standings.failed.items():
            say("Left out:", f"{result.shape}, {title}, {label}: {why}.", "bold yellow")
    if result.model.baseline is None:
        say("Warning:", f"{result.shape}: no dense contestant is left to compare with.", "bold yellow")


def _by_block(result: BenchResult) -> Table:
    table = Table("", title="each block by itself: microseconds, fastest dense one and twell (speed-up)")
    found = []
    for each in result.results:
        table.add_column(each.shape, justify="right")
        found.append({own.module: f"{own.dense_us:.1f}, {own.twell_us:.1f} ({own.gain:.2f})" for own in each.by_block})
    for module in dict.fromkeys(itertools.chain(*found)):
        table.add_row(module, *(each.get(module, "-") for each in found))
    return table


def _time(standings: Standings, label: str) -> str:
    times = standings.times.get(label)
    if times is None:
        return "-"
    # The range is of the middle 80 %; half of it, relative to the median.
    spread = (times.p90_us - times.p10_us) / 2 / times.median_us
    speed_up = standings.speed_ups.get(label)
    return f"{times.median_us / 1e3:.3f} ±{spread:.0%}" + (f" ({speed_up:.2f})" if speed_up is not None else "")
