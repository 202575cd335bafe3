"""What benchmarks share: options, contestants, the check against float64, times in turns, and tables.

A benchmark has a class of `Options` and a function, of which `benchmark` makes a command:

    @harness.benchmark(Options, tokens="1,40", repeats=2)  # values with --smoke
    def main(run: Run, options: Options) -> None:
        run.begin(COLUMNS)
        for tokens in options.tokens:
            contestants = run.chosen({...}, EAGER)  # by name, a call for each of several sets of weights
            errors = check(f"{tokens} tokens", contestants, exact, rows)
            run.add({"tokens": tokens, "errors": errors, "times": run.time(contestants)})

Each result is printed and written as soon as it is there.
"""

from __future__ import annotations

import functools
import inspect
import json
import platform
import random
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import Tensor

from twellc.benchmarking import contest
from twellc.benchmarking.forms import EAGER, LOSSY
from twellc.benchmarking.timing import Call, commit_of, machine, time_calls
from twellc.checks.accuracy import measure
from twellc.commands.options import options_of
from twellc.options.option import COUNT, SEED, declared, option, option_of

# Tests set it, to run what needs no GPU of a script.
DEVICE = "cuda"

_Value = TypeVar("_Value")
_Command = TypeVar("_Command", bound=Callable[..., Any])

Calls = Sequence[Callable[[], Any]]
Result = dict[str, Any]
# What a table shows of a result, by the heads of its columns.
Columns = Mapping[str, Callable[[Result], str]]

CHECKED_ROWS = 64


# ---- the machine, and what is written ----


def refuse_without_gpu() -> None:
    """Fail on a machine without a GPU.

    Raises:
        click.ClickException: Torch sees none.
    """
    if not torch.cuda.is_available():
        raise click.ClickException("there is no CUDA device")


def describe_machine() -> dict[str, Any]:
    """Say what is measured on and with, and at which commit."""
    if torch.cuda.is_available():
        found = machine().to_json()
    else:
        found = {"gpu": "none", "python": platform.python_version(), "torch": torch.__version__}
    return {**found, "commit": commit_of(Path(__file__).parent) or "unknown"}


def new_report() -> dict[str, Any]:
    """What a script that runs under click writes down first: machine and arguments, but no paths."""
    context = click.get_current_context()
    paths = {each.name for each in context.command.params if isinstance(each.type, click.Path)}
    arguments = {name: value for name, value in context.params.items() if name not in paths}
    return {"machine": describe_machine(), "arguments": arguments, "results": []}


def write_results(path: Path | None, report: dict[str, Any], page: str = "") -> None:
    """Replace the file of results, and the page beside it if there is one: after each result, a run may be cut short.

    Args:
        path: The JSON file; None writes nothing.
        report: What was measured so far.
        page: The same in Markdown.
    """
    if path is None:
        return
    _replace(path, json.dumps(report, indent=1) + "\n")
    if page:
        _replace(path.with_suffix(".md"), page)


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def scratch_folder() -> str:
    """Return a new folder that is gone when the command ends."""
    return click.get_current_context().with_resource(tempfile.TemporaryDirectory())


def json_option(command: _Command) -> _Command:
    """Give a command the option --json, as `json_path`."""
    option = click.option(
        "--json",
        "json_path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write results here, after each of them.",
    )
    return option(command)


def is_smoke() -> bool:
    """Whether the command runs with --smoke."""
    return bool(click.get_current_context().default_map)


def smoke_option(**values: Any) -> Callable[[_Command], _Command]:
    """Give a command the option --smoke, which changes the default values of other parameters.

    Args:
        values: Values by the names of parameters; what is called gives a value.
    """

    def use(context: click.Context, _: click.Parameter, chosen: bool) -> None:
        if chosen:
            context.default_map = values

    return click.option(
        "--smoke",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=use,
        help="Try the script with the smallest sizes: other options have defaults that take seconds.",
    )


# ---- options ----


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every benchmark, and what those mean that several have.

    Attributes:
        only: Contestants whose names it is found in; default: all.
        repeats: Repetitions of each measurement.
        seed: Of all random numbers.
        json: Write results here, after each of them.
        tokens: Row counts.
        d_model: Width of x and y.
        d_ff: Neurons of a block.
        density: Share of non-zero gate activations.
        layers: Decoder layers of the model.
        heads: Heads of attention.
        kv_heads: Heads of keys and values.
        weights: Type of the weights.
        plans: Where plans are kept; those that are there are used again.
        device: Where to run.
        prefill: Sequences and tokens a sequence; empty: none.
        decode: Sequences to decode at once; empty: none.
        cache: Tokens in the key-value cache, the new one included.
        shapes: Sequences and tokens a sequence.
        energy_seconds: For the energy of each contestant; 0: none.
    """

    only: str | None = option(None, "REGEX")
    repeats: int = option(20, "N", COUNT)
    seed: int = option(0, "N", SEED)
    json: Path | None = option(None, "FILE", Path)


@dataclass(frozen=True)
class Listed:
    """A kind of option: values with commas between them, which may be none.

    Attributes:
        kind: Returns the value of a text, or raises ValueError.
        example: A text for the message.
    """

    kind: Callable[[str], Any]
    example: str

    def read(self, name: str, text: str) -> tuple[Any, ...]:
        """Return the values of an option.

        Raises:
            click.BadParameter: They are not of the kind.
        """
        try:
            return tuple(map(self.kind, text.split(","))) if text else ()
        except ValueError:
            message = f"{text!r} is not a list such as {self.example}"
            raise click.BadParameter(message, param_hint=f"--{name.replace('_', '-')}") from None


def shapes(example: str) -> Listed:
    """Return the kind of shapes such as `1x512,4x2048`, with as many sizes each as the example has."""

    def parse(text: str) -> tuple[int, ...]:
        sizes = tuple(map(int, text.split("x")))
        if min(sizes) < 1 or len(sizes) != len(example.partition(",")[0].split("x")):
            raise ValueError(text)
        return sizes

    return Listed(parse, example)


NUMBERS = Listed(int, "1,16")
SHARES = Listed(float, "0.005,1")


def benchmark(kind: type[Any], **smoke: Any) -> Callable[[Callable[[Run, Any], None]], click.Command]:
    """Return a decorator that makes a command of a function, with the options of a class.

    Args:
        kind: A subclass of `Options`. If it has a `device`, the command runs there, else on a GPU.
        smoke: Values of options with --smoke.
    """

    def decorate(function: Callable[[Run, Any], None]) -> click.Command:
        @click.command(help=inspect.getdoc(function))
        @options_of(kind)
        @smoke_option(**smoke)
        def command(**given: Any) -> None:
            for each in declared(kind):
                how = option_of(each)
                if how is not None and isinstance(how.kind, Listed):
                    given[each.name] = how.kind.read(each.name, given[each.name])
            global DEVICE
            options, before = kind(**given), DEVICE
            DEVICE = getattr(options, "device", before)
            try:
                if DEVICE == "cuda":
                    refuse_without_gpu()
                torch.manual_seed(options.seed)
                random.seed(options.seed)
                run = Run(options)
                function(run, options)
                run.refuse_unknown()
            finally:
                DEVICE = before

        return command

    return decorate


# ---- a run ----


def _pattern(text: str | None) -> re.Pattern[str]:
    try:
        return re.compile(text or "")
    except re.error as error:
        raise click.BadParameter(f"{text!r} is not a regular expression: {error}", param_hint="--only") from None


class Run:
    """What a benchmark has measured so far.

    Attributes:
        is_silent: Whether it prints and writes nothing, since another process does.
    """

    is_silent = False

    def __init__(self, options: Options) -> None:
        self.options = options
        self._columns: Columns = {}
        self._only = _pattern(options.only)
        self._asked: dict[str, bool] = {}  # contestants, and whether they are wanted

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        """What --json writes; the first use of it looks at the GPU."""
        return new_report()

    def wants(self, contestant: str) -> bool:
        """Whether --only names a contestant."""
        self._asked[contestant] = self._only.search(contestant) is not None
        return self._asked[contestant]

    def refuse_unknown(self) -> None:
        """Fail if --only named no contestant.

        Raises:
            click.BadParameter: It did not.
        """
        if self._asked and not any(self._asked.values()):
            message = f"there is no {self.options.only!r} among {', '.join(self._asked)}"
            raise click.BadParameter(message, param_hint="--only")

    def chosen(self, contestants: Mapping[str, _Value], *always: str) -> dict[str, _Value]:
        """Return the contestants that --only names, and those that always take part."""
        return {name: each for name, each in contestants.items() if self.wants(name) or name in always}

    def time(self, contestants: Mapping[str, Calls]) -> dict[str, Any]:
        """Time one call of each contestant, which has one for each set of weights, in turns, in microseconds."""
        times = contest.time_rotated(contestants, self.options.repeats) if contestants else {}
        return {name: each.to_json() for name, each in times.items()}

    def time_calls(self, calls: Mapping[str, Call]) -> dict[str, Any]:
        """Time calls in turns as they are, in microseconds."""
        times = time_calls(list(calls.values()), self.options.repeats)
        return {name: each.to_json() for name, each in zip(calls, times, strict=True)}

    def begin(self, columns: Columns, what: str = "") -> None:
        """Print what is measured on, and the head of a table."""
        machine = self.report["machine"]
        self._echo(f"{machine['gpu']}, torch {machine['torch']}, commit {machine['commit']}{what and f': {what}'}\n")
        self._columns = columns
        self._echo(head(list(columns)))

    def add(self, result: Result) -> None:
        """Note a result: print its row, and write all results."""
        self.report["results"].append(result)
        self._echo(row_of(self._columns, result))
        self.write()

    def write(self, page: str = "") -> None:
        """Write all results, with a page if there is one."""
        write_results(None if self.is_silent else self.options.json, self.report, page)

    def _echo(self, text: str) -> None:
        if not self.is_silent:
            click.echo(text)

    def fail_for_faults(self) -> None:
        """Fail if some contestants did.

        Raises:
            click.ClickException: They did.
        """
        if faults := faults_of(self.report):
            raise click.ClickException("; ".join(f"{where}: {why}" for where, why in faults.items()))


# ---- what is right ----


def relative_error(y: Tensor, exact: Tensor) -> float:
    """Return how far y is from the exact result in float64, relative to that."""
    return float((y.double() - exact).norm() / exact.norm())


def check(
    where: str,
    contestants: Mapping[str, Calls],
    exact: Tensor,
    rows: Tensor | slice = slice(None),
    yardstick: str = EAGER,
    slack: float = 1e-3,
) -> dict[str, float]:
    """Compare the first call of each contestant with float64.

    Args:
        where: What is measured.
        contestants: See `Run.time`.
        exact: The result of some rows in float64.
        rows: Which rows these are.
        yardstick: The contestant of whose error others may have twice as much; those in FP8 and INT4 any.
        slack: How much more than that.

    Returns:
        The relative error of each.

    Raises:
        click.ClickException: One is off by more.
    """
    errors = {name: relative_error(calls[0]()[rows], exact) for name, calls in contestants.items()}
    for name, error in errors.items():
        if name not in LOSSY and not error <= 2 * errors[yardstick] + slack:
            raise click.ClickException(f"{where}: {name} is off by {error:.2e}, {yardstick} by {errors[yardstick]:.2e}")
    return errors


def accuracies(
    results: Mapping[str, Tensor], truth: Tensor, language_model: bool
) -> tuple[dict[str, float], dict[str, str]]:
    """Compare what whole models return, [rows, width], with float64.

    Returns:
        The relative error of each, and what is wrong with those that are more than twice as wrong as the first.
    """
    errors, failed = {}, {}
    first, *_ = results
    for name, result in results.items():
        accuracy = measure(name, result, results[first], truth, language_model)
        errors[name] = accuracy.candidate.relative
        if not accuracy.within:
            failed[name] = f"is off: {accuracy.candidate}, where {first} has {accuracy.plain}"
    return errors, failed


def faults_of(report: dict[str, Any]) -> dict[str, str]:
    """Return why contestants failed, by the first thing that each result says, and their names."""
    faults: dict[str, str] = dict(report.get("failed", {}))
    for result in report["results"]:
        faults |= {f"{next(iter(result.values()))}, {name}": why for name, why in result["failed"].items()}
    return faults


# ---- tables ----


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is words and all others are numbers."""
    return "\n".join([head(header), *map(row, rows)])


def head(header: Sequence[str]) -> str:
    """Return the first two lines of such a table, whose rows come later."""
    return f"{row(header)}\n{row(['---', *['---:'] * (len(header) - 1)])}"


def row(cells: Sequence[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def row_of(columns: Columns, result: Result) -> str:
    """Return the row of a result."""
    return row([cell(result) for cell in columns.values()])


def median(result: Result, names: Iterable[str]) -> float | None:
    """Return the time of the fastest of some contestants, None where none of them was timed."""
    return min((result["times"][name]["median_us"] for name in names if name in result["times"]), default=None)


def time_of(name: str, digits: int = 1, unit: float = 1.0) -> Callable[[Result], str]:
    """Return a column of times, in units of so many microseconds."""

    def cell(result: Result) -> str:
        time = median(result, [name])
        return "-" if time is None else f"{time / unit:.{digits}f}"

    return cell


def times_of(*names: str, digits: int = 1) -> dict[str, Callable[[Result], str]]:
    """Return columns of times of contestants, under their names."""
    return {name: time_of(name, digits) for name in names}


def over(rivals: Iterable[str], ours: str) -> Callable[[Result], str]:
    """Return a column of speed-ups of a contestant over the fastest of its rivals."""
    rivals = tuple(rivals)

    def cell(result: Result) -> str:
        theirs, own = median(result, rivals), median(result, [ours])
        return "-" if theirs is None or own is None else f"{theirs / own:.2f}"

    return cell


def field(name: str, form: str = "") -> Callable[[Result], str]:
    """Return a column of what a result has under a name, in a form of `format`."""
    return lambda result: format(result[name], form)


def by_contestant(title: str, results: Iterable[Result], key: str, cells: Columns) -> str:
    """Return a table with a column for each result, named by what it has under a key, and the rows that have cells."""
    results = list(results)
    rows = [[name, *map(cell, results)] for name, cell in cells.items()]
    known = [each for each in rows if {*each[1:]} != {"-"}]
    return f"{title}:\n\n{table(['', *(result[key] for result in results)], known)}"
