"""`twellc profile`: run a model on data, and write and print how often each neuron fires; or merge such profiles.

Importing this imports nothing large.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from twellc import api
from twellc.base.errors import first_few
from twellc.commands.options import FilePath, OutputPath, options_of, refuse_other_options
from twellc.commands.terminal import Command, never_failing, open_console, say, show_data
from twellc.options.commands import ProfileOptions

if TYPE_CHECKING:
    from twellc.firing.profile import FiringProfile


@click.command(cls=Command)
@click.argument("paths", nargs=-1, required=True, type=FilePath(), metavar="MODEL [DATA]...")
@click.option(
    "--data",
    "data",
    multiple=True,
    type=FilePath(),
    metavar="DATA",
    help="What to run the model on; more files may follow. FILE.jsonl, FILE.ndjson, FILE.json: a text, or token ids as "
    "input_ids, in each object; FILE.csv, FILE.tsv: a text in each row; FILE.npz: arrays named as the model's inputs; "
    "FILE.npy: token ids; any other file is a text in UTF-8.",
)
@click.option("-o", "--output", required=True, type=OutputPath(), metavar="FILE", help="The profile to write.")
@click.option("--merge", is_flag=True, help="Make one profile of several of one model: the arguments are profiles.")
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON instead of a table.")
@options_of(ProfileOptions)
@click.pass_context
def profile(
    context: click.Context,
    /,
    paths: tuple[Path, ...],
    data: tuple[Path, ...],
    merge: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Count how often each neuron of MODEL fires for the user's data.

    MODEL is as for compile, but no ONNX file. It runs as `twellc compile` would compile it without rewriting anything.
    Text goes through the tokenizer in its directory. Padding does not count.

    The profile is for --firing-profile of compile, inspect and check. It holds counts, and nothing of the data itself.
    """
    if merge:
        taken = ("merge", "paths", "output", "overwrite", "as_json")
        refuse_other_options(context, "--merge", taken, "merging profiles runs no model")
        found = api.merge_profiles(paths, options["output"], overwrite=options["overwrite"])
    else:
        with show_data() as (progress, advance):
            files = [*data, *paths[1:]]
            found = api.profile(paths[0], files, progress=progress, advance=advance, **options)
    with never_failing():
        if as_json:
            click.echo(json.dumps(found.to_json(), indent=2))
        else:
            print_profile(found)
            open_console().print(f"{options['output']}: {found.tokens} tokens", soft_wrap=True)


def print_profile(profile: FiringProfile) -> None:
    """Print the statistics of a profile."""
    for warning in profile.warnings:
        say("Warning:", f"{warning}.", "bold yellow")
    for note in profile.notes:
        say("Note:", f"{note}.")
    statistics: Any = profile.to_json()["blocks"]
    hottest = [count for count in ("128", "512") if all(count in each["carried_by_hottest"] for each in statistics)]
    table = Table(title="non-zeros a token, and which neurons have them")
    table.add_column("block", no_wrap=True)
    for column in ("tokens", "density", "mean", "99 %", "most", "tiles > 31", *(f"hottest {n}" for n in hottest)):
        table.add_column(column, justify="right")
    table.add_column("never fired", justify="right")
    for each in statistics:
        active = each["nonzeros_per_token"]
        table.add_row(
            each["module"],
            str(each["tokens"]),
            f"{each['density']:.2%}",
            f"{active['mean']:.1f}",
            str(active["p99"]),
            str(active["largest"]),
            *_of_single_neurons(each, hottest),
        )
    console = open_console()
    console.print(table)
    experts = [each for each in statistics if "experts" in each]
    if experts:
        console.print(_table_of_experts(experts))
    bound = max((each["never_fired_rate_bound"] for each in statistics if "experts" not in each), default=None)
    if bound is not None:
        console.print(f"a neuron that never fired fires for at most {bound:.3g} of such tokens, with 95 % confidence")
    console.print(f"data: {first_few([source.name for source in profile.data])}", soft_wrap=True)


def _of_single_neurons(block: Any, hottest: Sequence[str]) -> list[str]:
    """Return the cells about tiles and single neurons; dashes for experts, where each has its own neurons."""
    if "experts" in block:
        return ["-"] * (2 + len(hottest))
    return [
        f"{block['tiles_over']['31']:.2%}",
        *(f"{block['carried_by_hottest'][count]:.0%}" for count in hottest),
        f"{block['never_fired']} of {block['d_ff']}",
    ]


def _table_of_experts(blocks: Sequence[Any]) -> Table:
    table = Table(title="experts, and how many times fewer bytes a step of so many sequences reads without idle rows")
    table.add_column("experts", no_wrap=True)
    for column in ("no tokens", "tokens of one", "density of one", *blocks[0]["experts"]["gain_by_bytes"]):
        table.add_column(column, justify="right")
    for each in blocks:
        found = each["experts"]
        tokens = sorted(found["tokens"])
        densities = sorted(density for density in found["density"] if density is not None)
        table.add_row(
            each["module"],
            f"{tokens.count(0)} of {len(tokens)}",
            f"{tokens[0]} to {tokens[-1]}",
            f"{densities[0]:.2%} to {densities[-1]:.2%}",
            *(f"{gain:.2f} x" for gain in found["gain_by_bytes"].values()),
        )
    return table
