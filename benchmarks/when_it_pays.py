"""Write the tables of docs/when-it-pays.md from measured times and committed results.

python benchmarks/when_it_pays.py
python benchmarks/when_it_pays.py --smoke

A table stands between two comments in the page, `<!-- NAME -->` and `<!-- end -->`; all else in it is written by hand.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from harness import table

from twellc.decisions.choose import Tokens, choose, count_text, percent
from twellc.decisions.predict import CostModel, Widths
from twellc.decisions.targets import TARGETS, choose_target
from twellc.decisions.times import Rates
from twellc.passes.report import Choice, Expectation

_ROOT = Path(__file__).resolve().parents[1]
PAGE = _ROOT / "docs" / "when-it-pays.md"
_SUITE = _ROOT / "benchmarks" / "results" / "suite-h200-2026-11-24.json"
_LAYERS = {target: _ROOT / "benchmarks" / "results" / f"layers-{target}-2026-11-25.json" for target in ("h100", "h200")}
_RATES = _ROOT / "benchmarks" / "data" / "trained_rates.npz"
_SIZES = (1, 16, 64, 256, 1024, 2048, 8192, 32768)
_BLOCKS = (
    Widths("gated", 2048, 5632, 2048),
    Widths("gated", 4096, 11008, 4096),
    Widths("plain", 2048, 8192, 2048),
)


def measured_gains() -> str:
    """Return speed-ups by density and number of tokens, as the suite measured them."""
    results: list[dict[str, Any]] = json.loads(_SUITE.read_text())["results"]
    chosen = [each for each in results if (each["d_model"], each["d_ff"], each["variant"]) == (2048, 5632, "gated")]
    rows = []
    for neurons, name in (("equal", "all alike"), ("zipf", "Zipf's law")):
        for density in sorted({each["density"] for each in chosen if each["neurons"] == neurons}):
            gains = {
                each["tokens"]: _gain(each["times"])
                for each in chosen
                if (each["neurons"], each["density"], each["heavy"]) == (neurons, density, 0)
            }
            rows.append(
                [f"{percent(density)}, {name}", *(f"{gains[count]:.2f}" if count in gains else "" for count in _SIZES)]
            )
    return table(["active, neurons", *map(count_text, _SIZES)], rows)


def _gain(times: dict[str, dict[str, float]]) -> float:
    dense = min(time["median_us"] for name, time in times.items() if name.startswith("dense "))
    return dense / times["mlp"]["median_us"]


def models() -> dict[str, CostModel]:
    """Return the GPUs whose times come with twellc."""
    return {target.upper(): choose_target(target, None).model for target in TARGETS}


def expect(model: CostModel, block: Widths, rates: Rates, tokens: int) -> tuple[Choice, Expectation]:
    """Return what is best for a block at one number of tokens, and what is expected of it."""
    choice = choose(model, block, rates, [Tokens(tokens, tokens, tokens)])
    assert choice.expectation is not None  # nothing is repeated here
    return choice, choice.expectation


def break_evens() -> str:
    """Return the density below which TwELL pays, by GPU, block and number of tokens, as the cost model has it."""
    rows = []
    for gpu, model in models().items():
        for block in _BLOCKS:
            limits = (expect(model, block, np.full(block.d_ff, 0.005), count)[1].pays_below for count in _SIZES)
            name = f"{gpu}, {block.variant} {count_text(block.d_model)} / {count_text(block.d_ff)}"
            rows.append([name, *({0.0: "never", 1.0: "always"}.get(limit, percent(limit)) for limit in limits)])
    return table(["GPU, block", *map(count_text, _SIZES)], rows)


def _layers() -> list[Rates]:
    """Return how often the neurons of the four trained layers fire."""
    with np.load(_RATES) as rates:
        return [rates[name] for name in sorted(rates.files)]


def trained_layers() -> str:
    """Return what is expected of the four trained layers."""
    rows = []
    for gpu, model in models().items():
        for index, layer in enumerate(_layers()):
            cells = []
            for count in (1, 2048, 8192, 32768):
                choice, expected = expect(model, _BLOCKS[0], layer, count)
                hot = f", {choice.hot} hot" if choice.hot else ""
                cells.append(f"{expected.gain:.2f}{hot}" if choice.decision == "twell" else "dense")
            rows.append([f"{gpu}, layer {index}, {percent(float(layer.mean()))}", *cells])
    return table(["GPU, layer, active", *map(count_text, (1, 2048, 8192, 32768))], rows)


def measured_layers() -> str:
    """Return how fast the four trained layers are together, as measured."""
    rows = []
    for target, path in _LAYERS.items():
        for each in sorted(json.loads(path.read_text())["together"], key=lambda each: int(each["tokens"])):
            speed_up, fp8 = each["speed_up"], each["over dense FP8"]
            cells = [f"{found[name]:.2f}" for found in (speed_up, fp8) for name in ("exact", "pruned")]
            rows.append([target.upper(), count_text(each["tokens"]), *cells])
    header = ["GPU", "tokens", "all neurons", "pruned", "all neurons, over dense FP8", "pruned, over dense FP8"]
    return table(header, rows)


def _layer_errors(target: str) -> tuple[float, float]:
    """Return which share of the trained layers' measured times the cost model predicts within 10 and 20 %."""
    model, rates, found = choose_target(target, None).model, _layers(), []
    for result in json.loads(_LAYERS[target].read_text())["results"]:
        hottest = np.sort(rates[result["layer"]])[::-1]
        for name, times in result["times"].items():
            if name.startswith("dense"):
                continue
            kept = hottest[: result["alive"]] if name.startswith("pruned") else hottest
            hot = int(name.rpartition("split ")[2]) if "split" in name else 0
            widths = Widths("gated", 2048, len(kept), 2048)
            found.append(abs(model.twell_us(widths, result["tokens"], kept, hot) / times["median_us"] - 1))
    off = np.array(found)
    return float((off <= 0.1).mean()), float((off <= 0.2).mean())


def errors() -> str:
    """Return how far the cost model is off."""
    rows = []
    for target in TARGETS:
        model = choose_target(target, None).model
        error, machine = model.error(), model.times.machine
        cells = [_share(share) for share in error.points[:2]]
        cells += [_share(share) for share in error.widths[:2]] if error.widths is not None else ["", ""]
        cells += [_share(share) for share in _layer_errors(target)]
        rows.append([f"{model.times.gpu}, {machine['date']}, {machine['commit']}", str(error.points[2]), *cells])
    header = ["GPU, measured on, at commit", "times", "within 10 %", "within 20 %", "other widths: 10 %", "20 %"]
    return table([*header, "trained layers: 10 %", "20 %"], rows)


def _share(share: float) -> str:
    return f"{math.floor(100 * share)} %"


TABLES: dict[str, Callable[[], str]] = {
    "measured gains": measured_gains,
    "break-evens": break_evens,
    "trained layers": trained_layers,
    "measured layers": measured_layers,
    "errors": errors,
}


def filled(text: str) -> str:
    """Return the page with all tables made anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(rf"<!-- ({'|'.join(map(re.escape, TABLES))}) -->\n.*?<!-- end -->", fill, text, flags=re.DOTALL)


@click.command()
@click.option("--smoke", is_flag=True, help="Print the tables, and write nothing.")
def main(smoke: bool) -> None:
    """Fill in the tables of docs/when-it-pays.md."""
    if smoke:
        click.echo("\n\n".join(make() for make in TABLES.values()))
        return
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
