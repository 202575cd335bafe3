"""`twellc compile` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twellc import api
from twellc.commands.blocks import print_attention, print_layers, print_linear
from twellc.commands.options import FilePath, json_option, options_of
from twellc.commands.terminal import Command, never_failing, open_console, say, show_progress
from twellc.options.commands import CompileOptions, triton_plan

if TYPE_CHECKING:
    from twellc.compiling.manifest import Manifest


@click.command(cls=Command)
@click.argument("model", type=FilePath())
@json_option
@options_of(CompileOptions)
def compile(as_json: bool, **options: Any) -> None:
    """Compile MODEL into a TensorRT plan.

    MODEL is a torch.export archive, a Hugging Face directory, an ONNX file of plain operators, a pickled module or a
    sparse autoencoder.

    Every feed-forward block with a ReLU is rewritten into a TwELL plugin; all else stays as it is. It ends with a table
    of the blocks and the decisions. Exit status 2: the input is bad, and nothing was written.
    """
    with show_progress() as progress:
        manifest = api.compile(progress=progress, **options)
    written = options["output"] or options["onnx"] or triton_plan(options["triton"], options["model"])
    with never_failing():
        if as_json:
            click.echo(json.dumps(manifest.to_json(), indent=2))
        else:
            _print_manifest(manifest, written, options["linear"] != "auto")


def _print_manifest(manifest: Manifest, written: Path, asked_linear: bool) -> None:
    for warning in manifest.warnings:
        say("Warning:", f"{warning}.", "bold yellow")
    for note in manifest.notes:
        say("Note:", f"{note}.")
    print_layers(manifest.layers)
    print_attention(manifest.attention)
    print_linear(manifest.linear or [], asked_linear)
    dtype = manifest.settings.dtype
    if manifest.plan is not None and manifest.backend is not None:
        plans = [each.plan for each in manifest.ranks or [] if each.plan is not None] or [manifest.plan]
        size, backend = sum(plan.bytes for plan in plans) / 1e6, manifest.backend
        result = f"{size:.1f} MB, {backend.name} {backend.version}, {dtype}"
        result += f", {len(manifest.plan.plugin_layers)} plugin layers"
        result += f", in {len(plans)} plans, one a GPU" if len(plans) > 1 else ""
    else:
        assert manifest.onnx.file is not None  # the only output
        written = written.with_name(manifest.onnx.file)  # for several ranks that of the first
        ranks = f", in {len(manifest.ranks)} graphs, one a GPU" if manifest.ranks else ""
        result = f"ONNX, {dtype}{ranks}; no plan was built"
    open_console().print(f"{written}: {result}", soft_wrap=True)
