"""The `twellc` command line."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from twellc.base.files import end_commands_by
from twellc.base.version import __version__
from twellc.commands.bench import bench
from twellc.commands.check import check
from twellc.commands.compile import compile
from twellc.commands.generate import generate
from twellc.commands.inspect import inspect
from twellc.commands.plugins import plugins
from twellc.commands.profile import profile
from twellc.commands.report import report
from twellc.commands.terminal import InterruptedBySignal, discard_output, never_failing, verbosity_options

_FAULT = 70  # EX_SOFTWARE of sysexits.h


def _interrupt(number: int, _: FrameType | None) -> None:
    raise InterruptedBySignal(number)


def _open_closed_streams() -> None:
    """Open the null device as a standard stream that is closed, as by `>&-`, for this process and its children."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w"))


@contextmanager
def _ended_by_broken_pipe() -> Iterator[None]:
    """End with the status of SIGPIPE, which Python ignores, where a pipe lost its reader. click would end with 1."""
    try:
        yield
    except BrokenPipeError as error:
        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from error


class _Group(click.Group):
    """The commands. A fault of twellc itself is a traceback and another exit status."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += verbosity_options()

    def main(self, *args: Any, **kwargs: Any) -> Any:
        _open_closed_streams()
        try:
            return super().main(*args, **kwargs)
        except Exception as error:
            status = _FAULT
            with never_failing():
                if isinstance(error, OSError) and error.errno is not None:
                    # It came up while something was printed: the commands look after all else.
                    status = 2
                    click.echo(f"Error: the output cannot be printed: {error.strerror}.", err=True)
                else:
                    traceback.print_exc()
                    click.echo("This is a fault of twellc. Please report it, with the lines above.", err=True)
            sys.exit(status)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _ended_by_broken_pipe():
            return super().make_context(*args, **kwargs)

    def invoke(self, context: click.Context) -> Any:
        with _ended_by_broken_pipe():
            return super().invoke(context)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version")
def main() -> None:
    """Compile transformers with sparse feed-forward layers into TensorRT engines.

    Exit status: 0 done; 1 a check failed; 2 bad input, with one message; 70 a fault of twellc, with a traceback;
    128 + N ended by signal N. Unless it is 0, compile wrote no output.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    # What is printed may quote names in any script.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    end_commands_by(_interrupt)


for each in (compile, inspect, check, plugins, profile, bench, report, generate):
    main.add_command(each)
