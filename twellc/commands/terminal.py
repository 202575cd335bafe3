"""Parts that commands share: exit status, paths and output. Importing this imports nothing large."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from twellc.base.errors import UserError
from twellc.commands.foreign import answer
from twellc.options.renamed import new_name, sentence


class InterruptedBySignal(SystemExit):
    """A signal asked the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


def discard_output() -> None:
    """Drop output that could not be written: Python would try again as it ends, and fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())


@contextmanager
def never_failing() -> Iterator[None]:
    """Ignore errors of output that may get lost, as the command has done its work."""
    try:
        yield
    except OSError:
        discard_output()


def plain(text: str) -> str:
    """Spell out control characters, as a terminal would obey them, and a name may come from anybody's file."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


class _Console(Console):
    """A console that spells out control characters, and leaves the status after a broken pipe to others."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)

    def on_broken_pipe(self) -> None:
        raise  # the exception that rich has caught where it calls this


class Command(click.Command):
    """A command that turns user errors into one message and exit status 2, and has options for more or less output."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += verbosity_options()

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; old names of options, and options of other tools, are answered with ours."""
        given, renamed = self._by_new_names(args)
        try:
            return super().parse_args(context, list(given))
        except click.NoSuchOption as error:
            told = answer(error.option_name)
            if told is None:
                raise
            raise click.UsageError(told, ctx=None) from error
        except UserError as error:
            raise click.UsageError(plain(str(error)), ctx=None) from error
        except click.MissingParameter as error:
            if self.name != "compile" or not any(each.startswith("--onnx") for each in given):
                raise
            raise click.UsageError(
                "MODEL is missing. trtexec's --onnx=FILE is the argument MODEL here: twellc compile FILE -o PLAN. "
                "--onnx FILE is where the rewritten graph is kept.",
                ctx=None,
            ) from error
        finally:
            for old, new in renamed.items():
                say("Note:", sentence(old, new))

    def _by_new_names(self, args: list[str]) -> tuple[list[str], dict[str, str]]:
        """Return arguments with the present names of options, and the old names that were given."""
        options = {name: each for each in self.params for name in (*each.opts, *each.secondary_opts)}
        given, renamed, rest = [], {}, iter(args)
        for argument in rest:
            name, sign, value = argument.partition("=")
            new = new_name(name, options)
            if new != name:
                renamed[name] = new
            given.append(f"{new}{sign}{value}")
            option = options.get(new)
            if argument == "--":
                given += rest
            elif isinstance(option, click.Option) and not option.is_flag and not sign:
                given += itertools.islice(rest, 1)  # its value, which may look like an option
        return given, renamed

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except UserError as error:
            if _level() > 0:
                traceback.print_exc()
            raise click.UsageError(plain(str(error)), ctx=None) from error
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.errno is None:
                raise
            where = error.filename or "reading or writing"
            raise click.UsageError(plain(f"{where}: {error.strerror}."), ctx=None) from error
        except MemoryError as error:
            raise click.UsageError("memory ran out. Use a machine with more memory.", ctx=None) from error
        except InterruptedBySignal as end:
            click.echo(f"Ended by {end.signal.name}. Nothing was left half-written.", err=True)
            raise


# ---- more or less ----

_LEVEL = "twellc.verbosity"


def verbosity_options() -> list[click.Parameter]:
    """Return the options for more or less output; the command itself gets no value of them."""

    def louder(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            context.meta[_LEVEL] = 1
            logger = logging.getLogger("twellc")
            logger.setLevel(logging.DEBUG)
            logger.addHandler(logging.StreamHandler())

    def quieter(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            context.meta[_LEVEL] = -1

    return [
        click.Option(
            ["-v", "--verbose"],
            is_flag=True,
            expose_value=False,
            callback=louder,
            help="Say more on standard error: log messages, the time of each step, and where an error was raised.",
        ),
        click.Option(
            ["-q", "--quiet"],
            is_flag=True,
            expose_value=False,
            callback=quieter,
            help="Say nothing on standard error but warnings and errors.",
        ),
    ]


def _level() -> int:
    """Return 1 after --verbose, -1 after --quiet, else 0."""
    context = click.get_current_context(silent=True)
    level: int = 0 if context is None else context.meta.get(_LEVEL, 0)
    return level


# ---- progress ----

# Steps that take longer show their seconds.
_LONG = 10

Progressing = Callable[[str], None]
Advancing = Callable[[int, int], None]


class _Step:
    """The current step of a command; names that differ only behind a colon are the same step."""

    def __init__(self) -> None:
        self.text, self.started, self.due = "", time.monotonic(), float(_LONG)

    def begin(self, text: str) -> bool:
        """Take the name of a step; return whether it is another one."""
        other = text.partition(":")[0] != self.text.partition(":")[0]
        self.text = text
        if other:
            self.started, self.due = time.monotonic(), float(_LONG)
        return other

    @property
    def seconds(self) -> int:
        """The seconds that it has taken."""
        return int(time.monotonic() - self.started)


class _Took(ProgressColumn):
    """How long a step has taken, if that is long."""

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self._step = step

    def render(self, task: Task) -> Text:
        return Text(f"{self._step.seconds} s" if self._step.seconds >= _LONG or _level() > 0 else "")


@contextmanager
def show_progress() -> Iterator[Progressing]:
    """Show the current step of a command; see `show_data`."""
    with show_data() as (progress, _):
        yield progress


@contextmanager
def show_data() -> Iterator[tuple[Progressing, Advancing]]:
    """Show step and time on standard error; while data is read also the part that is read, and the time left.

    Without a terminal each step is printed once, and again while it takes long, ever more rarely.
    """
    console, step = open_console(stderr=True), _Step()
    if _level() < 0:
        yield lambda text: None, lambda read, total: None
    elif not console.is_terminal:
        with _printed(step) as progress:
            yield progress, lambda read, total: None
    else:
        bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _Took(step),
            console=console,
            transient=True,
        )
        with bar:
            task = bar.add_task("starting", total=None)

            def begin(text: str) -> None:
                step.begin(text)
                bar.update(task, description=plain(text))

            def advance(read: int, total: int) -> None:
                if total and len(bar.columns) == 3:  # data has a bar
                    bar.columns = (*bar.columns, BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
                bar.update(task, completed=read, total=total or None)

            yield begin, advance


@contextmanager
def _printed(step: _Step) -> Iterator[Progressing]:
    """Print steps, each once, and again while one takes long."""
    shown: set[str] = set()
    over = threading.Event()

    def show(text: str) -> None:
        before, seconds = step.text, step.seconds
        if step.begin(text) and before and _level() > 0:
            click.echo(f"{before.partition(':')[0]}: {seconds} s", err=True)
        name = text.partition(":")[0]
        if name not in shown:
            shown.add(name)
            click.echo(f"{name} …", err=True)

    def remind() -> None:
        while not over.wait(1):
            if step.text and step.seconds >= step.due:
                step.due *= 2
                with never_failing():
                    click.echo(f"{plain(step.text)} … {step.seconds} s", file=stream)

    stream = sys.stderr
    thread = threading.Thread(target=remind, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        over.set()
        thread.join()


def open_console(stderr: bool = False) -> Console:
    """Return a console that prints names as they are, without markup or symbols for words between colons."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 140
    return _Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def say(kind: str, message: str, style: str = "") -> None:
    """Print a message on standard error, behind a word for its kind; no notes if quiet."""
    if _level() < 0 and kind == "Note:":
        return
    open_console(stderr=True).print(Text(kind, style), message, soft_wrap=True)
