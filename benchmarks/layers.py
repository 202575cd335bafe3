"""Time the four trained layers as they are, with a hot split and without dead neurons, against dense torch.

python benchmarks/layers.py --json results.json
python benchmarks/layers.py --smoke

Columns, all of the same layer with the same x: `as is`; `split H`, the H hottest neurons first, as dense products in
the same call; `pruned`, without the neurons that never fired (but up to 7 of them, which make the width a multiple of
8); `pruned split H`. Neurons are arranged by the compiler's own code. Dense blocks are eager, compiled and packed;
dense FP8 and the packed block without the dead neurons stand beside them. Rows of every contestant are compared with
float64 before it is timed.

The table of all layers says how much faster the four are together than the fastest dense block of each, which does not
leave out dead neurons. `exact` takes the fastest column of each layer that drops nothing, `pruned` the fastest of all,
as a compiler does that knows these times; a layer that none of them makes faster is left dense.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import session
import torch
from block import CHECKED_ROWS, fastest, refuse_error, relative_error, time_rotated
from draw import TRAINED_LAYERS, Neurons, Weights, make_inputs
from tables import head, row, table
from torch import Tensor

from twellc.benchmarking.forms import BASELINES, EAGER, FP8, LOSSY, Block, Packed, dense_forms
from twellc.passes.block_profile import hot_first
from twellc.passes.neurons import without
from twellc.plugins.ops import GATED_MLP

_D_MODEL, _D_FF = 2048, 5632
_COMPRESSION = 8
PACKED_ALIVE = "dense packed, pruned"
# Tokens: speed-ups that all layers together are to reach, exact and with pruning.
TARGETS = {1: (2.7, 2.7), 8: (2.3, 2.3), 32: (1.7, 1.7), 2048: (1.3, 1.6), 8192: (1.45, 1.75), 32768: (1.55, 1.85)}
LEAST_LAYER = 0.95  # of each layer


def part(weights: Weights, chosen: Tensor) -> Weights:
    """Return a block of some of the neurons, in the order of `chosen`, int64 [neurons]."""
    block = weights.block
    assert block.up is not None
    up, down = block.up[chosen], weights.down_by_neuron[chosen]
    return Weights(Block(block.gate[chosen], up, down.t().contiguous()), down)


def run_twell(x: Tensor, weights: Weights, hot: int) -> Tensor:
    """Compute the block by the `twell` op."""
    block = weights.block
    y: Tensor = GATED_MLP(
        x, block.gate, None, block.up, None, weights.down_by_neuron, None, None, "relu", 0.0, _COMPRESSION, hot
    )
    return y


def columns(sets: list[Weights], rates: Tensor, hot: tuple[int, ...]) -> dict[str, list[tuple[Weights, int]]]:
    """Return the blocks that twell computes by column: weights and number of hot neurons for each set of weights."""
    shares = rates.cpu().numpy()
    found: dict[str, list[tuple[Weights, int]]] = {}
    for name, prefix, kept in (("as is", "", np.arange(len(shares))), ("pruned", "pruned ", without(shares == 0))):
        for count in (0, *hot):
            if count < len(kept):
                chosen = torch.from_numpy(kept[hot_first(shares[kept], count)]).to(rates.device)
                found[f"{prefix}split {count}" if count else name] = [(part(w, chosen), count) for w in sets]
    return found


def measure(layer: int, tokens: int, hot: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Check and time one layer at one number of tokens."""
    torch._dynamo.reset()  # or compiled kernels would be launched as suits the size before
    neurons = Neurons("trained", layer=layer)
    x, sets = make_inputs(tokens, _D_MODEL, _D_FF, torch.bfloat16, neurons, "gated", session.DEVICE)
    blocks = columns(sets, neurons.rates().to(session.DEVICE), hot)
    forms = [dense_forms(w.block, x) for w in sets]
    contestants: dict[str, Sequence[Callable[[], Tensor]]] = {
        name: [functools.partial(form[name], x) for form in forms] for name in forms[0]
    }
    contestants[PACKED_ALIVE] = [functools.partial(Packed(w.block), x) for w, _ in blocks["pruned"]]
    contestants |= {name: [functools.partial(run_twell, x, *each) for each in own] for name, own in blocks.items()}
    rows = torch.randperm(tokens, device=x.device)[:CHECKED_ROWS]
    exact = sets[0].block.double().dense(x[rows].double())
    errors = {name: relative_error(calls[0]()[rows], exact) for name, calls in contestants.items()}
    for name, error in errors.items():
        if name not in LOSSY:
            refuse_error(f"layer {layer}, {tokens} tokens: {name}", error, errors[EAGER])
    active = sets[0].block.active(x).sum(1)
    return {
        "layer": layer,
        "tokens": tokens,
        "alive": len(blocks["pruned"][0][0].block.gate),
        "mean_nonzeros": float(active.double().mean()),
        "max_nonzeros": int(active.max()),
        "errors": errors,
        "times": time_rotated(contestants, repeats),
    }


# ---- tables ----


def medians(result: dict[str, Any]) -> dict[str, float]:
    """Return the median of each contestant in microseconds."""
    return {name: times["median_us"] for name, times in result["times"].items()}


def is_exact(column: str) -> bool:
    """Whether a column of twell drops nothing."""
    return not column.startswith("pruned")


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speed-ups of the layers together, at one number of tokens.

    Returns:
        Of each column and of the best choices `exact` and `pruned`: the speed-up of all layers, and the least of one;
        what the choices are; and the speed-ups of the best choices over dense FP8 and the pruned packed block.
    """
    times = [medians(result) for result in results]
    dense = [fastest(median) for median in times]
    # A layer with few neurons may lack a column with many hot ones.
    ours = [name for name in times[0] if not name.startswith("dense") and all(name in median for median in times)]
    chosen = {
        name: [
            min(
                (each for each in median if each in BASELINES or (not each.startswith("dense") and keep(each))),
                key=median.__getitem__,
            )
            for median in times
        ]
        for name, keep in (("exact", is_exact), ("pruned", lambda _: True))
    }
    taken = {f"all {name}": [name] * len(times) for name in ours} | chosen

    def over(base: list[float], names: list[str]) -> float:
        return sum(base) / sum(median[name] for median, name in zip(times, names, strict=True))

    found: dict[str, Any] = {
        "tokens": results[0]["tokens"],
        "dense_us": sum(dense),
        "speed_up": {name: over(dense, names) for name, names in taken.items()},
        "least_layer": {
            name: min(base / median[each] for base, median, each in zip(dense, times, names, strict=True))
            for name, names in taken.items()
        },
        "chosen": chosen,
    }
    for rival in (FP8, PACKED_ALIVE):
        if all(rival in median for median in times):
            base = [median[rival] for median in times]
            found[f"over {rival}"] = {name: over(base, names) for name, names in chosen.items()}
    return found


def markdown(sums: list[dict[str, Any]]) -> str:
    """Return the tables of the layers together as Markdown."""
    rows = []
    for each in sums:
        targets = TARGETS.get(each["tokens"])
        cells = [f"{each['tokens']}", f"{each['dense_us']:.1f}"]
        for index, name in enumerate(("exact", "pruned")):
            speed_up, least = each["speed_up"][name], each["least_layer"][name]
            cells.append(f"{speed_up:.2f}")
            cells.append("-" if targets is None else f"{targets[index]:g} {_yes(speed_up >= targets[index])}")
            cells.append(f"{least:.2f} {_yes(least >= LEAST_LAYER)}")
        for rival in (FP8, PACKED_ALIVE):
            over = each.get(f"over {rival}")
            cells.append(f"{over['exact']:.2f}, {over['pruned']:.2f}" if over else "-")
        rows.append(cells)
    header = [
        "tokens",
        "dense µs",
        "exact",
        "target",
        "least layer",
        "with pruning",
        "target",
        "least layer",
        f"over {FP8}",
        f"over {PACKED_ALIVE}",
    ]
    blocks = ["All layers together, over the fastest dense block of each:\n\n" + table(header, rows)]
    names = [name for name in sums[0]["speed_up"] if name.startswith("all ")]
    header = ["tokens", *(name.removeprefix("all ") for name in names)]
    rows = [
        [f"{each['tokens']}", *(_pair(each["speed_up"].get(n), each["least_layer"].get(n)) for n in names)]
        for each in sums
    ]
    blocks.append("Speed-up with one column for all layers (least of one layer):\n\n" + table(header, rows))
    return "\n\n".join(blocks) + "\n"


def layer_head(result: dict[str, Any]) -> str:
    """Return the first lines of the table of one number of tokens, whose first layer has all columns."""
    header = ["layer", "non-zeros a row, mean / max", "neurons that fired", *result["times"]]
    return f"{result['tokens']} tokens, µs (speed-up):\n\n{head(header)}"


def layer_row(result: dict[str, Any], columns: Sequence[str]) -> str:
    """Return the row of a layer."""
    numbers = f"{result['mean_nonzeros']:.0f} / {result['max_nonzeros']}", f"{result['alive']}"
    return row([f"{result['layer']}", *numbers, *(_with_speed_up(name, medians(result)) for name in columns)])


def _yes(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _pair(speed_up: float | None, least: float | None) -> str:
    return "-" if speed_up is None or least is None else f"{speed_up:.2f} ({least:.2f})"


def _with_speed_up(name: str, median: dict[str, float]) -> str:
    if name not in median:
        return "-"
    return f"{median[name]:.1f}" + ("" if name.startswith("dense") else f" ({fastest(median) / median[name]:.2f})")


@click.command()
@click.option("--tokens", default=",".join(map(str, TARGETS)), show_default=True, help="Row counts.")
@click.option(
    "--hot", default="512,1024,1536,3072", show_default=True, help="Numbers of hot neurons to try; empty: no split."
)
@click.option("--repeats", default=20, show_default=True)
@click.option("--seed", default=0, show_default=True)
@session.json_option
@session.smoke_option(tokens="1,40", hot="512", repeats=2)
def main(tokens: str, hot: str, repeats: int, seed: int, json_path: Path | None) -> None:
    """Print Markdown tables: speed-ups of the four trained layers together, and of each, with times in microseconds."""
    session.refuse_without_gpu()
    torch.manual_seed(seed)
    random.seed(seed)
    numbers = tuple(int(value) for value in hot.split(",") if value)
    report = session.new_report() | {"together": []}
    machine = report["machine"]
    click.echo(f"{machine['gpu']}, torch {machine['torch']}, commit {machine['commit']}\n")
    for count in (int(value) for value in tokens.split(",")):
        results: list[dict[str, Any]] = []
        for layer in range(TRAINED_LAYERS):
            result = measure(layer, count, numbers, repeats)
            results.append(result)
            report["results"].append(result)
            session.write_results(json_path, report)
            if layer == 0:
                click.echo(layer_head(result))
            click.echo(layer_row(result, list(results[0]["times"])))
        report["together"].append(together(results))
        session.write_results(json_path, report)
        click.echo()
    click.echo(markdown(report["together"]))


if __name__ == "__main__":
    main()
