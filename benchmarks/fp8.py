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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import session
import torch
from block import relative_error, time_rotated
from draw import TRAINED_LAYERS, Neurons, make_inputs
from layers import part
from tables import head, row
from torch import Tensor
from torch.nn import functional

from twellc.benchmarking.energy import EnergyMeter
from twellc.benchmarking.forms import Block, DenseFp8, compile_rival, fp8_product
from twellc.benchmarking.timing import record
from twellc.plugins.block import BlockOptions, Operands
from twellc.plugins.fp8 import E4M3, LARGEST, Fp8
from twellc.plugins.meaning import dequantize
from twellc.plugins.ops import run_block

CHECKED_ROWS = 64
RELU = BlockOptions(activation="relu")
TWELL, TWELL_BF16, TENSORWISE, ROWWISE = "twell", "twell bf16", "dense FP8", "dense FP8, a scale a row"
PRUNED, HOT = "dense FP8, pruned", "twell, all hot"
DENSE = (TENSORWISE, ROWWISE, PRUNED)


def _rows(x: Tensor) -> Fp8:
    scale = (x.float().abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-30)
    return Fp8((x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale)


def _hidden_rows(gate_up: Tensor) -> Fp8:
    gate, up = gate_up.chunk(2, -1)
    return _rows(functional.relu(gate) * up)


@functools.cache
def _compiled(function: Callable[[Tensor], Fp8]) -> Callable[[Tensor], Fp8]:
    return compile_rival(function)


class RowWise:
    """A block in dense FP8 with a scale for each row of x and of the hidden tensor."""

    def __init__(self, block: Block) -> None:
        assert block.up is not None
        self._weight = Fp8.quantize(torch.cat([block.gate, block.up]), "row")
        self._down = Fp8.quantize(block.down, "row")

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [tokens, d_out] of x [tokens, d_model]."""
        gate_up = fp8_product(_compiled(_rows)(x), self._weight, x.dtype)
        return fp8_product(_compiled(_hidden_rows)(gate_up), self._down, x.dtype)


def operands_of(x: Tensor, block: Block, down_by_neuron: Tensor) -> tuple[Operands[Tensor], Operands[Tensor]]:
    """Return a block's tensors with weights in FP8 and in 16."""
    assert block.up is not None
    gate, gate_scale = Fp8.quantize(block.gate, "row")
    up, up_scale = Fp8.quantize(block.up, "row")
    down, down_scale = Fp8.quantize(down_by_neuron, "column")
    scales = {"w_gate_scale": gate_scale, "w_up_scale": up_scale, "w_down_scale": down_scale}
    return (
        Operands(x=x, w_gate=gate, w_up=up, w_down=down, **scales),
        Operands(x=x, w_gate=block.gate, w_up=block.up, w_down=down_by_neuron),
    )


def check(operands: Operands[Tensor], dense: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Compare some rows with float64 of the dequantized weights.

    Raises:
        click.ClickException: Twell is further off than twice what dense FP8 is.
    """
    x = operands.x
    rows = torch.randperm(len(x), device=x.device)[:CHECKED_ROWS]
    given = {name: value.double() for name, value in dequantize(operands).named().items()}
    h = functional.relu(x[rows].double() @ given["w_gate"].t()) * (x[rows].double() @ given["w_up"].t())
    exact = h @ given["w_down"]
    errors = {
        TWELL: relative_error(run_block(operands, RELU)[rows], exact),
        ROWWISE: relative_error(dense(x)[rows], exact),
    }
    if not errors[TWELL] <= 2 * errors[ROWWISE] + 2**-8:
        raise click.ClickException(f"{len(x)} tokens: twell is off by {errors[TWELL]:.2e}, FP8 {errors[ROWWISE]:.2e}")
    return errors


def launches(call: Callable[[], object]) -> dict[str, float]:
    """Return how long each kernel of a call takes, in microseconds: one after the other, over 50 calls."""
    count = 50
    for _ in range(3):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return {each.key.split("(")[0][-60:]: each.device_time_total / count for each in profile.key_averages()}


@dataclasses.dataclass(frozen=True)
class Size:
    """What is timed."""

    tokens: int
    neurons: Neurons
    d_model: int
    d_ff: int


def measure(size: Size, repeats: int, energy_seconds: float, with_launches: bool) -> dict[str, Any]:
    """Check and time one size."""
    torch._dynamo.reset()  # or compiled kernels would be launched as suits the size before
    x, sets = make_inputs(size.tokens, size.d_model, size.d_ff, torch.bfloat16, size.neurons, "gated", session.DEVICE)
    alive = sets
    if size.neurons.distribution == "trained":
        rates = size.neurons.rates()
        count = -(-int((rates > 0).sum()) // 16) * 16
        kept = rates.argsort(descending=True)[:count].sort().values.to(x.device)
        alive = [part(each, kept) for each in sets]
    pairs = [operands_of(x, each.block, each.down_by_neuron) for each in alive]
    found: dict[str, Any] = dataclasses.asdict(size) | {"width": len(alive[0].down_by_neuron)}
    found["errors"] = check(pairs[0][0], RowWise(alive[0].block))
    if with_launches:
        found["launches"] = launches(lambda: [run_block(each, RELU) for each, _ in pairs][-1])
        found["launches"] = {name: time / len(pairs) for name, time in found["launches"].items()}
    contestants: dict[str, Sequence[Callable[[], object]]] = {
        TWELL: [functools.partial(run_block, each, RELU) for each, _ in pairs],
        TWELL_BF16: [functools.partial(run_block, each, RELU) for _, each in pairs],
        TENSORWISE: [functools.partial(DenseFp8(each.block, x), x) for each in sets],
        ROWWISE: [functools.partial(RowWise(each.block), x) for each in sets],
    }
    if alive is not sets:
        contestants[PRUNED] = [functools.partial(DenseFp8(each.block, x), x) for each in alive]
        hot = dataclasses.replace(RELU, hot=len(alive[0].down_by_neuron))
        contestants[HOT] = [functools.partial(run_block, each, hot) for each, _ in pairs]
    found["times"] = time_rotated(contestants, repeats)
    if energy_seconds > 0:
        meter = EnergyMeter()
        found["joules"] = {
            name: meter.of(record(calls), energy_seconds, len(calls) * found["times"][name]["median_us"]) / len(calls)
            for name, calls in contestants.items()
            if name in (TWELL, TENSORWISE)
        }
    return found


HEADER = head(
    [
        *("density", "tokens", "twell", "all hot", "twell bf16", "dense FP8", "a scale a row", "pruned"),
        *("over dense FP8", "over a scale a row", "over pruned", "error", "error of dense FP8"),
        *("mJ", "mJ of dense FP8"),
    ]
)


def table_row(found: dict[str, Any]) -> str:
    """One line of the Markdown table."""
    median = {name: value["median_us"] for name, value in found["times"].items()}
    joules, neurons = found.get("joules", {}), found["neurons"]
    trained = neurons["distribution"] == "trained"
    return row(
        [
            f"layer {neurons['layer']}, {found['width']} neurons" if trained else f"{neurons['density'] * 100:g} %",
            f"{found['tokens']}",
            *(f"{median[name]:.1f}" if name in median else "-" for name in (TWELL, HOT, TWELL_BF16, *DENSE)),
            *(f"{median[name] / median[TWELL]:.2f}" if name in median else "-" for name in DENSE),
            *(f"{found['errors'][name]:.4f}" for name in (TWELL, ROWWISE)),
            *(f"{joules[name] * 1e3:.2f}" if name in joules else "-" for name in (TWELL, TENSORWISE)),
        ]
    )


@click.command()
@click.option("--tokens", default="1,8,33,64,128,256,512,1024,2048,8192", show_default=True, help="Row counts.")
@click.option("--density", default="0.005", show_default=True, help="Shares of non-zero gate activations.")
@click.option("--trained", is_flag=True, help="Four layers of a trained model instead, with their densities.")
@click.option("--d-model", default=2048, show_default=True)
@click.option("--d-ff", default=5632, show_default=True)
@click.option("--repeats", default=20, show_default=True)
@click.option("--energy-seconds", default=0.0, show_default=True, help="For the energy of each contestant; 0: none.")
@click.option("--launches", "with_launches", is_flag=True, help="Also time each kernel alone.")
@session.json_option
@session.smoke_option(tokens="1,40", d_model=256, d_ff=768, repeats=2)
def main(
    tokens: str,
    density: str,
    trained: bool,
    d_model: int,
    d_ff: int,
    repeats: int,
    energy_seconds: float,
    with_launches: bool,
    json_path: Path | None,
) -> None:
    """Print a Markdown table of times in microseconds."""
    session.refuse_without_gpu()
    if trained and d_ff != len(Neurons("trained").rates()):
        raise click.UsageError("--trained are layers with d_ff 5632")
    report = session.new_report()
    click.echo(str(report["machine"]) + "\n\n" + HEADER)
    drawn = [Neurons(density=float(share)) for share in density.split(",")]
    for neurons in [Neurons("trained", layer=layer) for layer in range(TRAINED_LAYERS)] if trained else drawn:
        for count in tokens.split(","):
            found = measure(Size(int(count), neurons, d_model, d_ff), repeats, energy_seconds, with_launches)
            click.echo(table_row(found))
            for name, time in found.get("launches", {}).items():
                click.echo(f"    {time:8.2f} {name}")
            report["results"].append(found)
            session.write_results(json_path, report)


if __name__ == "__main__":
    main()
