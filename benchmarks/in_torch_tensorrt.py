"""Time a stack of feed-forward blocks in Torch-TensorRT: an engine with twellc's plugins against its dense engine.

python benchmarks/in_torch_tensorrt.py --tokens 1,32,2048 --json results.json
python benchmarks/in_torch_tensorrt.py --smoke

All blocks read the same x, and each adds its result to the sum of those before it. Both engines are of one program,
which lies on the GPU, and take any number of rows. Eager and compiled torch stand beside them. Everything is called as
a user calls it, not in CUDA graphs: with few rows the times are the host's. The result of each contestant is compared
with float64 before; one that is more than twice as wrong as eager torch is named, and the exit status is 1.

Needs Torch-TensorRT.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import session
import torch
from draw import Neurons, make_inputs
from tables import head, row
from torch import Tensor, nn

import twellc
import twellc.torch_tensorrt
from twellc.benchmarking.forms import COMPILED, EAGER, Block, compile_rival
from twellc.benchmarking.timing import time_calls
from twellc.checks.accuracy import measure

DENSE, TWELL = "Torch-TensorRT dense", "Torch-TensorRT twell"
# Torch-TensorRT as it is without its C++ library, too.
_SETTINGS = {"use_python_runtime": True, "min_block_size": 1, "use_explicit_typing": True, "immutable_weights": True}


class Gated(nn.Module):
    """A block that keeps its weights as parameters."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        assert block.up is not None
        self.gate, self.up, self.down = (
            nn.Parameter(w, requires_grad=False) for w in (block.gate, block.up, block.down)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model]."""
        return Block(self.gate, self.up, self.down).dense(x)


class Stack(nn.Module):
    """x plus what each block makes of x."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Gated, blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [rows, d_model] of x [rows, d_model]."""
        y = x
        for block in self.blocks:
            y = y + block(x)
        return y


def build(program: torch.export.ExportedProgram, x: Tensor) -> tuple[Any, float]:
    """Build an engine for 1 to all rows of x; return it, and how many seconds that took."""
    import torch_tensorrt

    shapes = {"min_shape": (1, x.shape[1]), "opt_shape": tuple(x.shape), "max_shape": tuple(x.shape)}
    start = time.perf_counter()
    inputs = [torch_tensorrt.Input(**shapes, dtype=x.dtype)]
    return torch_tensorrt.dynamo.compile(program, inputs=inputs, **_SETTINGS), time.perf_counter() - start


def measure_rows(
    contestants: dict[str, Callable[[Tensor], Tensor]], x: Tensor, truth: Tensor, repeats: int
) -> dict[str, Any]:
    """Check and time all contestants on some rows."""
    plain = contestants[EAGER](x)
    errors, failed = {}, {}
    for name, call in contestants.items():
        accuracy = measure(name, call(x), plain, truth, language_model=False)
        errors[name] = accuracy.candidate.relative
        if not accuracy.within:
            failed[name] = f"is off: {accuracy.candidate}, eager torch has {accuracy.plain}"
    kept = {name: functools.partial(call, x) for name, call in contestants.items() if name not in failed}
    times = dict(zip(kept, time_calls(list(kept.values()), repeats), strict=True))
    return {
        "tokens": len(x),
        "errors": errors,
        "failed": failed,
        "times": {name: each.to_json() for name, each in times.items()},
    }


_NAMES = (EAGER, COMPILED, DENSE, TWELL)


def row_of(result: dict[str, Any]) -> str:
    """Return the row of a result in the table of times in microseconds."""
    median = {name: times["median_us"] for name, times in result["times"].items()}
    gain = f"{median[DENSE] / median[TWELL]:.2f}" if {DENSE, TWELL} <= set(median) else "-"
    return row([str(result["tokens"]), *(f"{median[n]:.0f}" if n in median else "-" for n in _NAMES), gain])


@click.command(help=__doc__)
@click.option("--tokens", default="1,32,2048", show_default=True, help="Row counts.")
@click.option("--layers", default=4, show_default=True, help="Blocks.")
@click.option("--d-model", default=2048, show_default=True)
@click.option("--d-ff", default=5632, show_default=True)
@click.option("--density", default=0.005, show_default=True, help="Share of non-zero gate activations.")
@click.option("--repeats", default=20, show_default=True)
@session.json_option
@session.smoke_option(tokens="1,40", layers=2, d_model=256, d_ff=768, repeats=2)
@torch.no_grad()
def main(
    tokens: str, layers: int, d_model: int, d_ff: int, density: float, repeats: int, json_path: Path | None
) -> None:
    """Print a table of times."""
    session.refuse_without_gpu()
    twellc.torch_tensorrt.register()
    torch.manual_seed(0)
    random.seed(0)
    counts = [int(count) for count in tokens.split(",")]
    neurons = Neurons(density=density)
    x, sets = make_inputs(max(counts), d_model, d_ff, torch.bfloat16, neurons, "gated", session.DEVICE)
    while len(sets) < layers:
        sets += make_inputs(1, d_model, d_ff, torch.bfloat16, neurons, "gated", session.DEVICE)[1]
    blocks = [each.block for each in sets[:layers]]
    model = Stack(blocks).eval()
    rows = {0: torch.export.Dim("rows", min=1, max=len(x))}
    program = torch.export.export(model, (x,), dynamic_shapes=(rows,))
    rewritten = twellc.rewrite(program, layers="all")
    assert [layer.decision for layer in rewritten.layers] == ["twell"] * layers
    report = session.new_report()
    contestants: dict[str, Callable[[Tensor], Tensor]] = {EAGER: model, COMPILED: compile_rival(model)}
    report["build_seconds"] = {}
    for name, source in ((DENSE, program), (TWELL, rewritten.program)):
        contestants[name], report["build_seconds"][name] = build(source, x)
    click.echo(head(["tokens, µs", *_NAMES, "speed-up over its dense engine"]))
    for count in counts:
        some = x[:count].contiguous()
        wide = some.double()
        truth = wide + sum(block.double().dense(wide) for block in blocks)
        report["results"].append(measure_rows(contestants, some, truth, repeats))
        session.write_results(json_path, report)
        click.echo(row_of(report["results"][-1]))
    wrong = [
        f"{each['tokens']} tokens: {name} {why}" for each in report["results"] for name, why in each["failed"].items()
    ]
    if wrong:
        raise click.ClickException("; ".join(wrong))


if __name__ == "__main__":
    main()
