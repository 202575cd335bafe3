"""Run the programs of ranks on a GPU each: do they compute what the single program does, and how long do they take.

python benchmarks/tensor_parallel.py --ranks 2 --json results.json
python benchmarks/tensor_parallel.py --smoke
python benchmarks/tensor_parallel.py --smoke --device cpu

Starts itself by torchrun, a process a rank, over NCCL; on a CPU over gloo, where nothing is timed. The model is that of
model.py, with fewer layers. Contestants are the single program and the programs of ranks, each with all feed-forward
blocks rewritten (twell) and with none (dense), as torch runs them operation by operation. The logits of all of them
are compared with float64 before: one that is more than twice as wrong as the dense single program is named, and the
exit status is 1. All run in CUDA graphs, in turns, in a new order in each repetition, which is the same on all ranks;
the times are those of rank 0.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import click
import harness
import torch
from harness import Columns, Run, field, over, shapes, time_of
from model import Logits, ModelOptions, check, draw_ids
from torch import Tensor, distributed

import twellc
from twellc.benchmarking.timing import Call, record
from twellc.options.option import COUNT, option

DENSE, TWELL = "dense", "twell"
_KINDS = {DENSE: "none", TWELL: "all"}  # values of `layers`
_CHECKED = (2, 32)

Contestants = dict[str, Callable[[Tensor], Tensor]]


def on_ranks(kind: str, ranks: int) -> str:
    """Name a contestant on several ranks."""
    return f"{kind}, {ranks} ranks"


def make_contestants(model: Logits, rank: int, ranks: int) -> tuple[Contestants, twellc.Rewritten]:
    """Return the single programs and those of this rank, and the dense program."""
    example = draw_ids(model.model, *_CHECKED)
    dims = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("tokens", min=2, max=4096)}
    program = torch.export.export(model, (example,), dynamic_shapes=(dims,))
    found: Contestants = {}
    for name, parts in ((lambda kind: kind, 1), (lambda kind: on_ranks(kind, ranks), ranks)):
        for kind, layers in _KINDS.items():
            made = twellc.rewrite(
                program, dtype="bf16", layers=layers, tensor_parallel=parts, rank=rank if parts > 1 else 0
            )
            if made.notes:
                raise click.ClickException("; ".join(made.notes))
            found[name(kind)] = made.program.module(check_guards=False)
    return found, made


def columns_of(ranks: int) -> Columns:
    """Return the columns of times in milliseconds."""
    dense, twell = on_ranks(DENSE, ranks), on_ranks(TWELL, ranks)
    return {
        "sequences x tokens, ms": field("shape"),
        **{name: time_of(name, 2, 1e3) for name in (DENSE, TWELL, dense, twell)},
        "over twell on one GPU": over([TWELL], twell),
        f"over dense on {ranks}": over([dense], twell),
    }


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of this benchmark.

    Attributes:
        ranks: Processes, each on a GPU.
        graphs: Record CUDA graphs.
    """

    ranks: int = option(2, "N", COUNT)
    shapes: tuple[tuple[int, int], ...] = option("1x2048,4x2048,1x16", "SHAPE,…", shapes("1x2048"))
    layers: int = option(8, "N", COUNT)
    kv_heads: int = option(16, "N", COUNT)
    device: str = option("cuda", kind=("cuda", "cpu"))
    graphs: bool = option(True)


def run_rank(run: Run, options: Options) -> None:
    """Do what a rank has to do; the first one prints and writes."""
    run.is_silent = distributed.get_rank() > 0
    model = Logits(options.make(kv_heads=options.kv_heads))
    contestants, made = make_contestants(model, distributed.get_rank(), options.ranks)
    run.report["errors"] = check(contestants, made.dense, draw_ids(model.model, *_CHECKED))
    run.begin(columns_of(options.ranks), f"logits, relative error against float64: {run.report['errors']}")
    run.write()
    for batch, length in options.shapes if harness.DEVICE == "cuda" else ():
        ids = draw_ids(model.model, batch, length)
        calls: dict[str, Call] = {name: functools.partial(call, ids) for name, call in run.chosen(contestants).items()}
        calls = {name: record([call]) for name, call in calls.items()} if options.graphs else calls
        distributed.barrier()
        run.add({"shape": f"{batch}x{length}", "times": run.time_calls(calls)})


@harness.benchmark(Options, shapes="1x16,2x40", layers=2, d_model=256, d_ff=768, kv_heads=2, repeats=2)
@torch.no_grad()
def main(run: Run, options: Options) -> None:
    """Start the ranks, or be one of them."""
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        raise click.ClickException(f"there are {torch.cuda.device_count()} GPUs for {options.ranks} ranks")
    if "RANK" not in os.environ:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
        done = subprocess.run([sys.executable, "-m", *launcher, __file__, *sys.argv[1:]], check=False)
        sys.exit(done.returncode)
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if options.device == "cuda" else "gloo")
    run_rank(run, options)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
