"""`twellc report` on the command line. Importing this imports nothing large."""

from __future__ import annotations

from pathlib import Path

import click

from twellc import api
from twellc.commands.options import FilePath, OutputPath
from twellc.commands.terminal import Command, never_failing, open_console


@click.command(cls=Command)
@click.argument("profile", required=False, type=FilePath())
@click.option(
    "--decisions",
    type=FilePath(),
    metavar="FILE",
    help="What became of the blocks: a plan, its manifest, or JSON of compile --manifest or inspect --json.",
)
@click.option("--bench", type=FilePath(), metavar="FILE.json", help="What was measured, as twellc bench --json prints.")
@click.option(
    "--training", type=FilePath(), metavar="FILE.jsonl", help="The log of a training run, by twellc.training."
)
@click.option("-o", "--output", required=True, type=OutputPath(), metavar="FILE.html", help="The page to write.")
@click.option("--overwrite", is_flag=True, help="Replace an existing page.")
def report(
    profile: Path | None,
    decisions: Path | None,
    bench: Path | None,
    training: Path | None,
    output: Path,
    overwrite: bool,
) -> None:
    """Make a page of HTML about a model's sparsity, the decisions for its blocks, and the gains.

    PROFILE is a file of `twellc profile`: it brings density by layer and position, non-zeros by token, tiles against
    their slots, and how often each neuron fires. --decisions brings the decision for each block and the rewritten
    graph, --bench the measured gains, --training the course of loss, density and dead neurons. Any of the four will do;
    they have to be of one model.

    The page is one file that needs no network and no scripts, for light and dark screens and for phones. The figures
    need matplotlib.
    """
    api.report(output, profile=profile, decisions=decisions, bench=bench, training=training, overwrite=overwrite)
    with never_failing():
        open_console().print(f"{output}: {output.stat().st_size / 1e3:.0f} kB", soft_wrap=True)
