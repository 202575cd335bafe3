"""`twellc compile` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import twellc
from twellc.commands.blocks import print_attention, print_layers
from twellc.commands.options import FilePath, OutputPath, decision_options, json_option, tracing_options
from twellc.commands.terminal import Command, never_failing, open_console, say, show_progress
from twellc.options.commands import (
    ATTENTIONS,
    BACKENDS,
    triton_plan,
)

if TYPE_CHECKING:
    from twellc.compiling.manifest import Manifest


@click.command(cls=Command)
@click.argument("model", type=FilePath())
@click.option(
    "-o", "--output", type=OutputPath(), metavar="FILE", help="The plan to write; its manifest stands beside it."
)
@click.option("--onnx", type=OutputPath(), metavar="FILE", help="Also keep the rewritten graph as ONNX.")
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", show_default=True,
    help="auto: TensorRT where it is installed beside a GPU, else TensorRT-RTX, which needs none. none stops at ONNX.",
)  # fmt: skip
@click.option(
    "--profile", "profiles", multiple=True, metavar="NAME:MIN:OPT:MAX",
    help="Shapes of an input, such as input_ids:1x1:1x128:8x2048. Inputs that share a dimension follow. Given again "
    "for the same input, it starts the next optimization profile.",
)  # fmt: skip
@tracing_options
@decision_options
@click.option("--strict", is_flag=True, help="Fail when nothing matches, or a block that looks like one is refused.")
@click.option(
    "--dump-graphs", type=FilePath(), metavar="DIR", help="Folder for the graph as traced and after each pass."
)
@click.option("--report", type=OutputPath(), metavar="FILE.json", help="Write what was done as JSON.")
@click.option(
    "--html", type=OutputPath(), metavar="FILE.html", help="Write it as a page to look at, as twellc report makes it."
)
@json_option
@click.option("--overwrite", is_flag=True, help="Replace existing output files.")
@click.option(
    "--triton", type=FilePath(), metavar="DIR",
    help="Write the plan into a Triton model repository, with its config.pbtxt, instead of to --output.",
)  # fmt: skip
@click.option(
    "--attention", type=click.Choice(ATTENTIONS), default="auto", show_default=True,
    help="Who computes attention: tensorrt, or cudnn by a plugin, which takes causal and unmasked attention and leaves "
    "other to TensorRT. auto: cudnn where it is at hand and was measured faster, which is TensorRT on Hopper.",
)  # fmt: skip
@click.option(
    "--kv-cache", type=click.IntRange(min=1), metavar="LENGTH",
    help="Of a causal Hugging Face model: give it a key-value cache of so many tokens a sequence, so that it can "
    "generate text. Its inputs, outputs and profiles are then others.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(min=1), default=1, show_default=True, metavar="MAX",
    help="With --kv-cache: the most sequences of a call.",
)  # fmt: skip
@click.option(
    "--prefill-chunk", type=click.IntRange(min=1), metavar="N",
    help="With --kv-cache: the most tokens of a sequence in a call; longer prompts are fed in several. Default: 2048, "
    "or all that fit.",
)  # fmt: skip
@click.option(
    "--tensor-parallel", type=click.IntRange(1), default=1, metavar="N",
    help="Share the model among N GPUs of one machine: a plan for each of them, with its heads of attention and its "
    "neurons, FILE.rank0 and so on; FILE is a link to the first. With --calibration all get equally active neurons.",
)  # fmt: skip
@click.option("--embed-plugins", is_flag=True, help="Put the plugin library into the plan.")
@click.option(
    "--plugin-library", "plugin_libraries", multiple=True, type=FilePath(), metavar="FILE",
    help="A library of other people's TensorRT plugins, for a graph with nodes of theirs; several may be given. Its "
    "code runs here.",
)  # fmt: skip
def compile(as_json: bool, **options: Any) -> None:
    """Compile MODEL into a TensorRT plan.

    MODEL is a torch.export archive, a Hugging Face directory, an ONNX file of plain operators or a pickled module.

    Every feed-forward block with a ReLU is rewritten into a TwELL plugin; all else stays as it is. Ends with a table of
    the blocks and what became of them. Exit status 2: the input is bad, and nothing was written.
    """
    with show_progress() as progress:
        manifest = twellc.compile(progress=progress, **options)
    written = options["output"] or options["onnx"] or triton_plan(options["triton"], options["model"])
    with never_failing():
        if as_json:
            click.echo(json.dumps(manifest.to_json(), indent=2))
        else:
            _print_manifest(manifest, written)


def _print_manifest(manifest: Manifest, written: Path) -> None:
    for warning in manifest.warnings:
        say("Warning:", f"{warning}.", "bold yellow")
    for note in manifest.notes:
        say("Note:", f"{note}.")
    print_layers(manifest.layers)
    print_attention(manifest.attention)
    dtype = manifest.settings.dtype
    if manifest.plan is not None and manifest.backend is not None:
        plans = [each.plan for each in manifest.ranks or [] if each.plan is not None] or [manifest.plan]
        size, backend = sum(plan.bytes for plan in plans) / 1e6, manifest.backend
        result = f"{size:.1f} MB, {backend.name} {backend.version}, {dtype}"
        result += f", {len(manifest.plan.plugin_layers)} plugin layers"
        result += f", in {len(plans)} plans, one a GPU" if len(plans) > 1 else ""
    else:
        assert manifest.onnx.file is not None  # all that was made
        written = written.with_name(manifest.onnx.file)  # of several ranks, the first one's
        ranks = f", in {len(manifest.ranks)} graphs, one a GPU" if manifest.ranks else ""
        result = f"ONNX, {dtype}{ranks}; no plan was built"
    open_console().print(f"{written}: {result}", soft_wrap=True)
