"""`twellc inspect` on the command line. Importing this imports nothing large."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from twellc import api
from twellc.base.caches import FP8_CACHE
from twellc.base.errors import first_few
from twellc.commands.blocks import print_attention, print_layers, print_linear
from twellc.commands.options import FilePath, json_option, options_of
from twellc.commands.terminal import Command, open_console, plain, say, show_progress
from twellc.inspection.flops import CostTable, LayerCosts
from twellc.options.commands import InspectOptions

if TYPE_CHECKING:
    from twellc.base.caches import KeyValueCache
    from twellc.compiling.manifest import Manifest
    from twellc.inspection.kernels import KernelTable


@click.command(cls=Command)
@click.argument("model", type=FilePath(), metavar="TARGET")
@json_option
@options_of(InspectOptions)
def inspect(model: Path, as_json: bool, **options: Any) -> None:
    """Show the feed-forward blocks of TARGET, a model or a plan, with the decision for each.

    A plan is read through its manifest, so no GPU is needed. A rewritten ONNX file shows its plugin nodes, too.

    The expected speed-up of each over a dense block follows from times measured on the target GPU, at the density of
    the profile, or of a short run of the model; for a plan it is that of the compilation. A second table counts the
    FLOPs and bytes of each block in one call, with dense products and with active neurons alone: counts, no prediction
    of time.

    Then come the kernels that compute each rewritten block in such a call: their route, and the launches with their
    configuration. They are those of the target GPU, for a plan those of the GPU that it was compiled for, unless
    --target-gpu or --gpu names another one.
    """
    with show_progress() as progress:
        found = api.inspect(model, progress=progress, **options)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
        return
    description = found.description
    for note in description.notes:
        say("Note:", f"{note}.")
    print_layers(description.layers)
    print_attention(description.attention or [])
    print_linear(description.linear or [], asked=True)
    if description.manifest is not None:
        _print_libraries(description.manifest)
        if description.manifest.cache is not None:
            _print_cache(description.manifest.cache)
    if description.layers:
        _print_cost(found.cost)
    _print_kernels(found.kernels)
    for node in description.nodes or ():
        weights = [f"{name} {shape}" for name, shape in node.weights.items()]
        click.echo(plain(f"{node.name}: {', '.join(filter(None, (node.type, node.dtype, *weights)))}"))
        click.echo(plain("    " + ", ".join(f"{name}={value}" for name, value in node.fields.items())))


def _print_libraries(manifest: Manifest) -> None:
    """Name other people's plugin libraries that a plan needs."""
    for library in manifest.plugins.libraries or ():
        click.echo(plain(f"{library.file}: plugins {', '.join(library.names)}; sha256 {library.sha256}"))


def _print_cache(cache: KeyValueCache) -> None:
    """Print the facts that a host needs about a key-value cache."""
    console = open_console()
    ends = " and ".join(map(str, cache.end_tokens)) or "none"
    size = 1 if cache.dtype == FP8_CACHE else 2
    megabytes = size * sum(math.prod(pair.shape[1:]) for pair in cache.pairs) / 1e6
    facts = (
        f"key-value cache: up to {cache.length} tokens of each of up to {cache.batch} sequences, fed at most "
        f"{cache.prefill_chunk} tokens a call; {megabytes:,.4g} MB a sequence, {cache.dtype}",
        f"{cache.layers} layers, {cache.kv_heads} heads of {cache.head_dim}; {_LOGITS[cache.logits]}, for "
        f"{cache.vocabulary} tokens, of which {ends} end a text; files for text in {cache.text}",
    )
    for fact in facts:
        console.print(fact, soft_wrap=True)
    table = Table("input", "output, at the same address", "shape", title="caches")
    for pair in cache.pairs:
        table.add_row(pair.input, pair.output, "x".join("?" if size < 0 else str(size) for size in pair.shape))
    console.print(table)


_LOGITS = {
    "last": "logits behind the last token of a sequence",
    "all": "logits behind each token",
    "greedy": "the likeliest token behind a sequence",
}


def _print_cost(cost: CostTable) -> None:
    console = open_console()
    known = any(row.density is not None for row in cost.layers)
    where = ["at the densities that were measured"] if known else []
    if not known or any(row.density is None and row.sparse != row.dense for row in cost.layers):
        where.append(f"at an assumed density of {100 * cost.assumed_density:g} %")
    table = Table("block", title=f"{cost.tokens} tokens a call, {', else '.join(where)}")
    for column in (
        *(["density"] if known else []),
        "GFLOP dense",
        "sparse",
        "ratio",
        "MB dense",
        "sparse",
        "ratio",
        "MB gathered",
    ):
        table.add_column(column, justify="right")
    total = LayerCosts(cost.total.dense, cost.total.sparse, "all")
    for row in [*cost.layers, *([total] if len(cost.layers) > 1 else [])]:
        if row is total:
            table.add_section()
        cells = [row.module]
        if known:
            cells.append("-" if row.density is None else f"{row.density:.2%}")
        pairs = ((row.dense.flops, row.sparse.flops, 1e9), (row.dense.bytes, row.sparse.bytes, 1e6))
        for dense, sparse, unit in pairs:
            ratio = f"{dense / sparse:.2f}" if sparse else "-"  # a node of another origin may not say its widths
            cells += [f"{dense / unit:,.4g}", f"{sparse / unit:,.4g}", ratio]
        table.add_row(*cells, f"{row.sparse.gathered / 1e6:,.4g}")
    console.print(table)
    console.print(
        "counts, no prediction of time; gathered: rows of active neurons, read token by token, mostly from caches"
    )


def _print_kernels(kernels: KernelTable) -> None:
    """Show the launches of each block; blocks that have the same ones together."""
    console = open_console()
    modules: dict[tuple[str, ...], list[str]] = {}
    for block in kernels.blocks:
        modules.setdefault((block.route, *block.launches), []).append(block.module)
    for (route, *launches), names in modules.items():
        console.print(
            f"kernels on {kernels.gpu}, {kernels.tokens} tokens: {route}, for {first_few(names)}", soft_wrap=True
        )
        for launch in launches:
            console.print(f"  {launch}", soft_wrap=True)
