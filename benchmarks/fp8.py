"""Time a block with FP8 weights against dense FP8, and against itself in bf16.

python benchmarks/fp8.py --tokens 64,2048 --density 0.005,1 --json results.json
python benchmarks/fp8.py --tokens 2048 --launches
python benchmarks/fp8.py --tokens 2048 --trained --energy-seconds 2
python benchmarks/fp8.py --smoke

Weights have a scale for each neuron or output. Dense FP8 stands there twice: with one scale for each tensor, calibrated
beforehand, and with a scale for each row, which kernels compiled by torch work out with what they quantise. With
--trained there are four layers whose neurons fire as often as in a trained model. Twell then computes them without the
neurons that never fire, but up to 15 of them, which make the width a multiple of 16, as torch wants it in FP8, once
packed and once with all neurons hot, which a profile may choose: a dense FP8 product. Dense blocks are whole,
and dense FP8 stands there without these neurons, too. Times are of one call within a CUDA graph over
several sets of weights, in turns (see block.py). Every size is checked against float64 of the dequantised weights
before it is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import click
import harness
import torch
from draw import TRAINED_LAYERS, Neurons, Weights, make_inputs
from harness import CHECKED_ROWS, NUMBERS, SHARES, Calls, Columns, Result, Run, check, field, over, time_of
from torch import Tensor
from torch.nn import functional

from twellc.benchmarking.energy import EnergyMeter
from twellc.benchmarking.forms import DenseFp8, DenseFp8Rows, compile_rival
from twellc.benchmarking.timing import record
from twellc.options.option import COUNT, NOT_NEGATIVE, option
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.fp8 import Fp8
from twellc.plugins.meaning import dequantize
from twellc.plugins.ops import run_block

RELU = BlockOptions(activation="relu")
TWELL, TWELL_BF16, TENSORWISE, ROWWISE = "twell", "twell bf16", "dense FP8", "dense FP8, a scale a row"
PRUNED, HOT = "dense FP8, pruned", "twell, all hot"
_WIDTHS = 16  # of what torch multiplies in FP8: their multiples


def in_fp8(operands: Operands[Tensor]) -> Operands[Tensor]:
    """Return a block with weights in FP8, a scale for each neuron or output."""
    given, forms = operands.named(), {"w_gate": "row", "w_up": "row", "w_down": "column"}
    for name, form in forms.items():
        given[name], given[f"{name}_scale"] = Fp8.quantize(given[name], form)
    return Operands(**given)


def exact_rows(operands: Operands[Tensor], rows: Tensor) -> Tensor:
    """Compute some rows of a block in float64 of the dequantized weights."""
    x, given = operands.x[rows].double(), {k: v.double() for k, v in dequantize(operands).named().items()}
    h = functional.relu(x @ given["w_gate"].t()) * (x @ given["w_up"].t())
    return h @ given["w_down"]


def launches(calls: Calls) -> dict[str, float]:
    """Return how long each kernel of a call takes, in microseconds: one after the other, over 50 rounds of calls."""
    count = 50
    for call in calls:
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in (call for _ in range(count) for call in calls):
            call()
        torch.cuda.synchronize()
    per_call = count * len(calls)
    return {each.key.split("(")[0][-60:]: each.device_time_total / per_call for each in profile.key_averages()}


def without_dead(sets: list[Weights], neurons: Neurons) -> list[Weights]:
    """Return blocks without neurons that never fire, but for those that make the width a multiple of 16."""
    rates = neurons.rates()
    count = -(-int((rates > 0).sum()) // _WIDTHS) * _WIDTHS
    kept = rates.argsort(descending=True)[:count].sort().values.to(sets[0].down_by_neuron.device)
    return [each.part(kept) for each in sets]


def measure(run: Run, options: Options, tokens: int, neurons: Neurons) -> Result:
    """Check and time one size."""
    torch._dynamo.reset()  # or compiled kernels would be launched as suits the size before
    x, sets = make_inputs(tokens, options.d_model, options.d_ff, torch.bfloat16, neurons, "gated", harness.DEVICE)
    alive = without_dead(sets, neurons) if options.trained else sets
    wide = [each.operands(x) for each in alive]
    narrow = [in_fp8(each) for each in wide]
    rowwise = compile_rival(DenseFp8Rows.__call__)
    checked: dict[str, Calls] = {
        TWELL: [functools.partial(run_block, each, RELU) for each in narrow],
        ROWWISE: [functools.partial(rowwise, DenseFp8Rows(alive[0].block), x)],
    }
    rows = torch.randperm(len(x), device=x.device)[:CHECKED_ROWS]
    errors = check(f"{len(x)} tokens", checked, exact_rows(narrow[0], rows), rows, ROWWISE, 2**-8)
    contestants: dict[str, Calls] = {
        TWELL: checked[TWELL],
        TWELL_BF16: [functools.partial(run_block, each, RELU) for each in wide],
        TENSORWISE: [functools.partial(DenseFp8(each.block, x), x) for each in sets],
        ROWWISE: [functools.partial(rowwise, DenseFp8Rows(each.block), x) for each in sets],
    }
    if options.trained:
        contestants[PRUNED] = [functools.partial(DenseFp8(each.block, x), x) for each in alive]
        hot = replace(RELU, hot=len(alive[0].down_by_neuron))
        contestants[HOT] = [functools.partial(run_block, each, hot) for each in narrow]
    contestants = run.chosen(contestants)
    found: Result = {"tokens": tokens, "d_model": options.d_model, "d_ff": options.d_ff, "neurons": asdict(neurons)}
    found |= {"width": len(alive[0].down_by_neuron), "errors": errors, "times": run.time(contestants)}
    if options.launches:
        found["launches"] = launches(checked[TWELL])
    if options.energy_seconds > 0:
        meter = EnergyMeter()
        found["joules"] = {}
        for name, calls in contestants.items():
            if name in (TWELL, TENSORWISE):
                time = len(calls) * found["times"][name]["median_us"]
                found["joules"][name] = meter.of(record(calls), options.energy_seconds, time) / len(calls)
    return found


def neurons_of(result: Result) -> str:
    """Return which neurons fire."""
    neurons = result["neurons"]
    trained = f"layer {neurons['layer']}, {result['width']} neurons"
    return trained if neurons["distribution"] == "trained" else f"{neurons['density'] * 100:g} %"


def _joules(name: str) -> Callable[[Result], str]:
    return lambda result: f"{result['joules'][name] * 1e3:.2f}" if name in result.get("joules", {}) else "-"


COLUMNS: Columns = {
    "density": neurons_of,
    "tokens": field("tokens"),
    "twell": time_of(TWELL),
    "all hot": time_of(HOT),
    "twell bf16": time_of(TWELL_BF16),
    "dense FP8": time_of(TENSORWISE),
    "a scale a row": time_of(ROWWISE),
    "pruned": time_of(PRUNED),
    "over dense FP8": over([TENSORWISE], TWELL),
    "over a scale a row": over([ROWWISE], TWELL),
    "over pruned": over([PRUNED], TWELL),
    "error": lambda result: f"{result['errors'][TWELL]:.4f}",
    "error of dense FP8": lambda result: f"{result['errors'][ROWWISE]:.4f}",
    "mJ": _joules(TWELL),
    "mJ of dense FP8": _joules(TENSORWISE),
}


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """The options of this benchmark.

    Attributes:
        trained: Four layers of a trained model instead, with their densities.
        launches: Also time each kernel alone.
    """

    tokens: tuple[int, ...] = option("1,8,33,64,128,256,512,1024,2048,8192", "N,…", NUMBERS)
    density: tuple[float, ...] = option("0.005", "SHARE,…", SHARES)
    trained: bool = option(False)
    d_model: int = option(2048, "N", COUNT)
    d_ff: int = option(5632, "N", COUNT)
    energy_seconds: float = option(0.0, "SECONDS", NOT_NEGATIVE)
    launches: bool = option(False)


@harness.benchmark(Options, tokens="1,40", d_model=256, d_ff=768, repeats=2)
def main(run: Run, options: Options) -> None:
    """Print a Markdown table of times in microseconds."""
    drawn = [Neurons(density=share) for share in options.density]
    if options.trained:
        drawn = [Neurons("trained", layer=layer) for layer in range(TRAINED_LAYERS)]
        if options.d_ff != len(drawn[0].rates()):
            raise click.UsageError("--trained are layers with d_ff 5632")
    run.begin(COLUMNS)
    for neurons in drawn:
        for tokens in options.tokens:
            found = measure(run, options, tokens, neurons)
            run.add(found)
            for name, time in found.get("launches", {}).items():
                click.echo(f"    {time:8.2f} {name}")


if __name__ == "__main__":
    main()
