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
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import session
import torch
import transformers
from model import CAUSAL, Logits, causal_attention, make_model
from tables import table
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

import twellc
from twellc.benchmarking.timing import Call, record, time_calls
from twellc.checks.accuracy import measure
from twellc.passes.precision import widen

DENSE, TWELL = "dense", "twell"
_KINDS = {DENSE: "none", TWELL: "all"}  # values of `layers`
_CHECKED = (2, 32)

Contestants = dict[str, Callable[[Tensor], Tensor]]


def on_ranks(kind: str, ranks: int) -> str:
    """Name a contestant on several ranks."""
    return f"{kind}, {ranks} ranks"


def make_contestants(model: Logits, rank: int, ranks: int) -> tuple[Contestants, twellc.Rewritten]:
    """Return the single programs and those of this rank, and the dense program."""
    example = torch.randint(0, model.model.config.vocab_size, _CHECKED, device=session.DEVICE)
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


def check(contestants: Contestants, dense: Any, ids: Tensor) -> dict[str, float]:
    """Return the relative error of each contestant's logits against float64.

    Raises:
        click.ClickException: One is more than twice as wrong as the dense single program.
    """
    results = {name: pytree.tree_leaves(call(ids))[0].flatten(0, 1) for name, call in contestants.items()}
    truth = pytree.tree_leaves(widen(dense).module(check_guards=False)(ids))[0].flatten(0, 1)
    errors, wrong = {}, []
    for name, result in results.items():
        accuracy = measure(name, result, results[DENSE], truth, language_model=True)
        errors[name] = accuracy.candidate.relative
        if not accuracy.within:
            wrong.append(f"{name} is off: {accuracy.candidate}, where dense has {accuracy.plain}")
    if wrong:
        raise click.ClickException("; ".join(wrong))
    return errors


def time_shape(contestants: Contestants, ids: Tensor, repeats: int, graphs: bool) -> dict[str, Any]:
    """Time all contestants on some tokens."""
    calls: list[Call] = [functools.partial(call, ids) for call in contestants.values()]
    calls = [record([call]) for call in calls] if graphs else calls
    distributed.barrier()
    times = time_calls(calls, repeats)
    batch, length = ids.shape
    named = zip(contestants, times, strict=True)
    return {"shape": f"{batch}x{length}", "times": {name: each.to_json() for name, each in named}}


def page_of(results: list[dict[str, Any]], ranks: int) -> str:
    """Return the table of times in milliseconds."""
    names = (DENSE, TWELL, on_ranks(DENSE, ranks), on_ranks(TWELL, ranks))
    rows = []
    for each in results:
        median = {name: times["median_us"] for name, times in each["times"].items()}
        gains = (median[TWELL] / median[names[3]], median[names[2]] / median[names[3]])
        rows.append(
            [each["shape"], *(f"{median[name] / 1e3:.2f}" for name in names), *(f"{gain:.2f}" for gain in gains)]
        )
    header = ("sequences x tokens, ms", *names, "over twell on one GPU", f"over dense on {ranks}")
    return table(header, rows)


def run_rank(
    shapes: list[tuple[int, int]],
    layers: int,
    d_model: int,
    d_ff: int,
    density: float,
    repeats: int,
    kv_heads: int,
    graphs: bool,
    json_path: Path | None,
) -> None:
    """Do what a rank has to do; the first one prints."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    random.seed(0)
    transformers.AttentionInterface.register(CAUSAL, causal_attention)
    model = Logits(make_model(layers, d_model, d_ff, density, "equal", kv_heads=kv_heads))
    contestants, made = make_contestants(model, rank, ranks)
    report = session.new_report()
    ids = torch.randint(0, model.model.config.vocab_size, _CHECKED, device=session.DEVICE)
    report["errors"] = check(contestants, made.dense, ids)
    first = rank == 0
    if first:
        click.echo(f"{report['machine']}\nlogits, relative error against float64: {report['errors']}\n")
        session.write_results(json_path, report)
    for batch, length in shapes if session.DEVICE == "cuda" else ():
        ids = torch.randint(0, model.model.config.vocab_size, (batch, length), device=session.DEVICE)
        report["results"].append(time_shape(contestants, ids, repeats, graphs))
        if first:
            session.write_results(json_path, report)
    if first and report["results"]:
        click.echo(page_of(report["results"], ranks))


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True)
@click.option("--shapes", default="1x2048,4x2048,1x16", show_default=True, help="Sequences and tokens a sequence.")
@click.option("--layers", default=8, show_default=True)
@click.option("--d-model", default=2048, show_default=True)
@click.option("--d-ff", default=5632, show_default=True)
@click.option("--kv-heads", default=16, show_default=True, help="Heads of keys and values.")
@click.option("--density", default=0.005, show_default=True, help="Share of non-zero gate activations.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--graphs/--no-graphs", default=True, show_default=True, help="Record CUDA graphs.")
@click.option("--repeats", default=20, show_default=True)
@session.json_option
@session.smoke_option(shapes="1x16,2x40", layers=2, d_model=256, d_ff=768, kv_heads=2, repeats=2)
@torch.no_grad()
def main(
    ranks: int,
    shapes: str,
    layers: int,
    d_model: int,
    d_ff: int,
    kv_heads: int,
    density: float,
    device: str,
    graphs: bool,
    repeats: int,
    json_path: Path | None,
) -> None:
    """Start the ranks, or be one of them."""
    if device == "cuda":
        session.refuse_without_gpu()
        if torch.cuda.device_count() < ranks:
            raise click.ClickException(f"there are {torch.cuda.device_count()} GPUs for {ranks} ranks")
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run([*launcher, __file__, *sys.argv[1:]], check=False)
        sys.exit(done.returncode)
    session.DEVICE = device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    sizes = [(int(batch), int(length)) for batch, length in (shape.split("x") for shape in shapes.split(","))]
    run_rank(sizes, layers, d_model, d_ff, density, repeats, kv_heads, graphs, json_path)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
