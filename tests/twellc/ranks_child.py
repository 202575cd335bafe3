"""One of several ranks, which torchrun starts: torchrun … ranks_child.py program|optimize MODEL FOLDER [cpu|cuda].

program     runs the rank's program of the Hugging Face model in MODEL, on a CPU
optimize    runs the model as transformers shards it, before and after `twellc.optimize`, on the device that is named

Rank 0 writes what it found into FOLDER/found.pt.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, distributed

import twellc
from tests.twellc.eager.test_optimize import ops_of, tokens

LENGTHS = (5, 9)


def logits(run: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found = run(ids)
    result: Tensor = found.logits if hasattr(found, "logits") else found[0] if isinstance(found, tuple) else found
    return result.cpu()


def program(model: Path, rank: int, ranks: int, _: str) -> dict[str, Any]:
    made = twellc.rewrite(model, layers="all", tensor_parallel=ranks, rank=rank)
    run, dense = (each.module(check_guards=False) for each in (made.program, made.dense))
    ids = [tokens(2, length) for length in LENGTHS]
    whole = twellc.rewrite(model, layers="all").program.module(check_guards=False)
    return {
        "ranks": [logits(lambda given: run(input_ids=given), each) for each in ids],
        "single": [logits(lambda given: whole(input_ids=given), each) for each in ids],
        "dense": [logits(lambda given: dense(input_ids=given), each) for each in ids],
        "notes": made.notes,
    }


def optimize(model: Path, rank: int, ranks: int, device: str) -> dict[str, Any]:
    sharded = transformers.AutoModelForCausalLM.from_pretrained(model, tp_plan="auto", dtype=torch.bfloat16).eval()
    ids = [tokens(2, length).to(device) for length in LENGTHS]
    before = [logits(sharded, each) for each in ids]
    twellc.optimize(sharded)
    after = [logits(sharded, each) for each in ids]
    _, counts = ops_of(sharded, ids[0])
    blocks = [(each.module, each.d_ff) for each in twellc.optimized_blocks(sharded)]
    twellc.restore(sharded)
    restored = [logits(sharded, each) for each in ids]
    return {"before": before, "after": after, "restored": restored, "counts": counts, "blocks": blocks}


def main(what: str, model: str, folder: str, device: str = "cpu") -> None:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    found = {"program": program, "optimize": optimize}[what](Path(model), rank, ranks, device)
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
