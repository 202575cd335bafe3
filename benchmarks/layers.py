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
from dataclasses import dataclass
from typing import Any

import click
import harness
import numpy as np
import torch
from draw import TRAINED_LAYERS, Neurons, Weights, make_inputs
from harness import CHECKED_ROWS, NUMBERS, Calls, Columns, Result, Run, check, field, over, table, time_of
from torch import Tensor

from twellc.benchmarking.forms import BASELINES, EAGER, FP8, Packed, dense_forms
from twellc.options.option import option
from twellc.passes.block_profile import hot_first
from twellc.passes.neurons import without
from twellc.plugins.block import BlockOptions
from twellc.plugins.ops import run_block

_D_MODEL, _D_FF = 2048, 5632
PACKED_ALIVE = "dense packed, pruned"
# Tokens: speed-ups that all layers together are to reach, exact and with pruning.
TARGETS = {1: (2.7, 2.7), 8: (2.3, 2.3), 32: (1.7, 1.7), 2048: (1.3, 1.6), 8192: (1.45, 1.75), 32768: (1.55, 1.85)}
LEAST_LAYER = 0.95  # of each layer


def run_twell(x: Tensor, weights: Weights, hot: int) -> Tensor:
    """Compute the block by the `twell` op."""
    return run_block(weights.operands(x), BlockOptions(activation="relu", hot=hot))


def columns(sets: list[Weights], rates: Tensor, hot: tuple[int, ...]) -> dict[str, list[tuple[Weights, int]]]:
    """Return the blocks that twell computes by column: weights and number of hot neurons for each set of weights."""
    shares = rates.cpu().numpy()
    found: dict[str, list[tuple[Weights, int]]] = {}
    for name, prefix, kept in (("as is", "", np.arange(len(shares))), ("pruned", "pruned ", without(shares == 0))):
        for count in (0, *hot):
            if count < len(kept):
                chosen = torch.from_numpy(kept[hot_first(shares[kept], count)]).to(rates.device)
                found[f"{prefix}split {count}" if count else name] = [(w.part(chosen), count) for w in sets]
    return found


def measure(run: Run, layer: int, tokens: int, hot: tuple[int, ...]) -> Result:
    """Check and time one layer at one number of tokens."""
    torch._dynamo.reset()  # or compiled kernels would be launched as suits the size before
    neurons = Neurons("trained", layer=layer)
    x, sets = make_inputs(tokens, _D_MODEL, _D_FF, torch.bfloat16, neurons, "gated", harness.DEVICE)
    blocks = columns(sets, neurons.rates().to(harness.DEVICE), hot)
    forms = [dense_forms(w.block, x) for w in sets]
    contestants: dict[str, Calls] = {name: [functools.partial(form[name], x) for form in forms] for name in forms[0]}
    contestants[PACKED_ALIVE] = [functools.partial(Packed(w.block), x) for w, _ in blocks["pruned"]]
    contestants |= {name: [functools.partial(run_twell, x, *each) for each in own] for name, own in blocks.items()}
    contestants = run.chosen(contestants, EAGER)
    rows = torch.randperm(tokens, device=x.device)[:CHECKED_ROWS]
    exact = sets[0].block.double().dense(x[rows].double())
    active = sets[0].block.active(x).sum(1)
    return {
        "layer": layer,
        "tokens": tokens,
        "alive": len(blocks["pruned"][0][0].block.gate),
        "mean_nonzeros": float(active.double().mean()),
        "max_nonzeros": int(active.max()),
        "errors": check(f"layer {layer}, {tokens} tokens", contestants, exact, rows),
        "times": run.time(contestants),
    }


# ---- tables ----


def together(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the speed-ups of the layers together, at one number of tokens.

    Returns:
        Of each column and of the best choices `exact` and `pruned`: the speed-up of all layers, and the least of one;
        what the choices are; and the speed-ups of the best choices over dense FP8 and the pruned packed block.
    """
    times = [{name: each["median_us"] for name, each in result["times"].items()} for result in results]
    dense = [min(us for name, us in layer.items() if name in BASELINES) for layer in times]
    # A layer with few neurons may lack a column with many hot ones.
    common = [name for name in times[0] if not name.startswith("dense") and all(name in layer for layer in times)]
    chosen = {
        name: [
            min((each for each in layer if each in BASELINES or not each.startswith(others)), key=layer.__getitem__)
            for layer in times
        ]
        for name, others in (("exact", ("dense", "pruned")), ("pruned", ("dense",)))
    }
    taken = {f"all {name}": [name] * len(times) for name in common} | chosen

    def gain(base: list[float], names: list[str]) -> float:
        ours: float = sum(layer[name] for layer, name in zip(times, names, strict=True))
        return sum(base) / ours

    found: dict[str, Any] = {
        "tokens": results[0]["tokens"],
        "dense_us": sum(dense),
        "speed_up": {name: gain(dense, names) for name, names in taken.items()},
        "least_layer": {
            name: min(base / layer[each] for base, layer, each in zip(dense, times, names, strict=True))
            for name, names in taken.items()
        },
        "chosen": chosen,
    }
    for rival in (FP8, PACKED_ALIVE):
        if all(rival in layer for layer in times):
            base = [layer[rival] for layer in times]
            found[f"over {rival}"] = {name: gain(base, names) for name, names in chosen.items()}
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
            gains = each.get(f"over {rival}")
            cells.append(f"{gains['exact']:.2f}, {gains['pruned']:.2f}" if gains else "-")
        rows.append(cells)
    header = ["tokens", "dense µs", "exact", "target", "least layer", "with pruning", "target", "least layer"]
    header += [f"over {FP8}", f"over {PACKED_ALIVE}"]
    blocks = ["All layers together, over the fastest dense block of each:\n\n" + table(header, rows)]
    names = [name for name in sums[0]["speed_up"] if name.startswith("all ")]
    header = ["tokens", *(name.removeprefix("all ") for name in names)]
    rows = [
        [f"{each['tokens']}", *(_pair(each["speed_up"].get(n), each["least_layer"].get(n)) for n in names)]
        for each in sums
    ]
    blocks.append("Speed-up with one column for all layers (least of one layer):\n\n" + table(header, rows))
    return "\n\n".join(blocks) + "\n"


def columns_of(first: Result) -> Columns:
    """Return the columns of one number of tokens, whose first layer has all contestants."""
    return {
        "layer": field("layer"),
        "non-zeros a row, mean / max": lambda each: f"{each['mean_nonzeros']:.0f} / {each['max_nonzeros']}",
        "neurons that fired": field("alive"),
        **{name: functools.partial(_with_speed_up, name) for name in first["times"]},
    }


def _yes(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _pair(speed_up: float | None, least: float | None) -> str:
    return "-" if speed_up is None or least is None else f"{speed_up:.2f} ({least:.2f})"


def _with_speed_up(name: str, result: Result) -> str:
    own = time_of(name)(result)
    return own if own == "-" or name.startswith("dense") else f"{own} ({over(BASELINES, name)(result)})"


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """The options of this benchmark.

    Attributes:
        hot: Numbers of hot neurons to try; empty: no split.
    """

    tokens: tuple[int, ...] = option(",".join(map(str, TARGETS)), "N,…", NUMBERS)
    hot: tuple[int, ...] = option("512,1024,1536,3072", "N,…", NUMBERS)


@harness.benchmark(Options, tokens="1,40", hot="512", repeats=2)
def main(run: Run, options: Options) -> None:
    """Print Markdown tables: speed-ups of the four trained layers together, and of each, with times in microseconds."""
    run.report["together"] = []
    for tokens in options.tokens:
        results: list[Result] = []
        for layer in range(TRAINED_LAYERS):
            results.append(measure(run, layer, tokens, options.hot))
            if layer == 0:
                run.begin(columns_of(results[0]), f"{tokens} tokens, µs (speed-up)")
            run.add(results[-1])
        run.report["together"].append(together(results))
        run.write()
        click.echo()
    click.echo(markdown(run.report["together"]))


if __name__ == "__main__":
    main()
