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
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import torch
from draw import Neurons, make_inputs
from harness import NUMBERS, Columns, Run, accuracies, field, over, times_of
from torch import Tensor, nn

import twellc
import twellc.torch_tensorrt
from twellc.benchmarking.forms import COMPILED, EAGER, Block, compile_rival
from twellc.options.option import COUNT, SHARE, option

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


COLUMNS: Columns = {
    "tokens, µs": field("tokens"),
    **times_of(EAGER, COMPILED, DENSE, TWELL, digits=0),
    "speed-up over its dense engine": over([DENSE], TWELL),
}


@dataclass(frozen=True, kw_only=True)
class Options(harness.Options):
    """The options of this benchmark.

    Attributes:
        layers: Blocks.
    """

    tokens: tuple[int, ...] = option("1,32,2048", "N,…", NUMBERS)
    layers: int = option(4, "N", COUNT)
    d_model: int = option(2048, "N", COUNT)
    d_ff: int = option(5632, "N", COUNT)
    density: float = option(0.005, "SHARE", SHARE)


@harness.benchmark(Options, tokens="1,40", layers=2, d_model=256, d_ff=768, repeats=2)
@torch.no_grad()
def main(run: Run, options: Options) -> None:
    """Print a table of times."""
    twellc.torch_tensorrt.register()
    sizes = (options.d_model, options.d_ff, torch.bfloat16, Neurons(density=options.density), "gated", harness.DEVICE)
    x, sets = make_inputs(max(options.tokens), *sizes)
    while len(sets) < options.layers:
        sets += make_inputs(1, *sizes)[1]
    blocks = [each.block for each in sets[: options.layers]]
    model = Stack(blocks).eval()
    rows = {0: torch.export.Dim("rows", min=1, max=len(x))}
    program = torch.export.export(model, (x,), dynamic_shapes=(rows,))
    rewritten = twellc.rewrite(program, layers="all")
    assert [layer.decision for layer in rewritten.layers] == ["twell"] * options.layers
    contestants: dict[str, Callable[[Tensor], Tensor]] = {EAGER: model, COMPILED: compile_rival(model)}
    contestants = run.chosen(contestants, EAGER)
    run.report["build_seconds"] = {}
    for name, source in run.chosen({DENSE: program, TWELL: rewritten.program}).items():
        contestants[name], run.report["build_seconds"][name] = build(source, x)
    run.begin(COLUMNS)
    for count in options.tokens:
        some = x[:count].contiguous()
        wide = some.double()
        truth = wide + sum(block.double().dense(wide) for block in blocks)
        results = {name: call(some) for name, call in contestants.items()}
        errors, failed = accuracies(results, truth, language_model=False)
        kept = {name: functools.partial(contestants[name], some) for name in results if name not in failed}
        run.add({"tokens": count, "errors": errors, "failed": failed, "times": run.time_calls(kept)})
    run.fail_for_faults()


if __name__ == "__main__":
    main()
