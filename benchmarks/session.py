"""What a run of any benchmark has: the GPU, a description of the machine, results, and --smoke."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch

from twellc.benchmarking.timing import commit_of, machine

# Tests set it, to run what needs no GPU of a script.
DEVICE = "cuda"

_Command = TypeVar("_Command", bound=Callable[..., Any])


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
