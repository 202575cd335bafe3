"""What commands share: how they end, read paths and print. Importing this imports nothing large."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from twellc.base.errors import UserError


class InterruptedBySignal(SystemExit):
    """A signal asked the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)


def discard_output() -> None:
    """Send what could not be written nowhere: Python would try, and fail, again at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())


@contextmanager
def never_failing() -> Iterator[None]:
    """Print what may get lost: the command has done what it was to do."""
    try:
        yield
    except OSError:
        discard_output()


def plain(text: str) -> str:
    """Spell out control characters: a terminal would obey them, and a name may come from anybody's file."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], text)


class _Console(Console):
    """A console that spells out control characters, and leaves the status after a broken pipe to others."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)

    def on_broken_pipe(self) -> None:
        raise  # what rich has caught where it calls this


class Command(click.Command):
    """A command whose user errors are one message and exit status 2."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(context)
        except UserError as error:
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


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Show the current step on a terminal's standard error; print each step once where there is no terminal."""
    console = open_console(stderr=True)
    if not console.is_terminal:
        shown: set[str] = set()

        def show(step: str) -> None:
            step = step.partition(":")[0]
            if step not in shown:
                shown.add(step)
                click.echo(f"{step} …", err=True)

        yield show
        return
    with console.status("starting") as status:
        yield lambda step: status.update(Text(plain(step)))


def open_console(stderr: bool = False) -> Console:
    """Return a console that prints names as they are: without markup, and without symbols for words between colons."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 140
    return _Console(file=stream, highlight=False, markup=False, emoji=False, width=width)


def say(kind: str, message: str, style: str = "") -> None:
    """Print a message on standard error, behind the word that says what kind of message it is."""
    open_console(stderr=True).print(Text(kind, style), message, soft_wrap=True)
