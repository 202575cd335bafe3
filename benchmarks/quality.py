"""Measure what FP8 costs a model of bytes: its bits a byte in bf16, with blocks in dense FP8, and by twellc.

python benchmarks/quality.py examples/bytelm --text FILE

The same windows of a text go through each form: the model as it is; with weights, input and hidden tensor of its
blocks in E4M3 (the rival of `twellc bench`, calibrated on the first window); with its blocks by twellc in the model's
type; by twellc with weights in E4M3, a scale for each neuron; and by the program that `twellc.LLM` runs, with its
cache in the model's type, and in E4M3 with scales of 1 and of the first window. Runs on a CPU, too, where ops compute
in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import harness
import torch
from generate import with_forms
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

import twellc
from twellc.benchmarking.forms import FP8, DenseFp8
from twellc.generation.directory import load_directory
from twellc.options.commands import LLMOptions

WINDOW, _CHUNK = 1024, 256
_BYTELM = Path(__file__).parents[1] / "examples/bytelm"


def bits_a_byte(model: Any, ids: Tensor) -> float:
    """Return the cross-entropy of each byte behind the first of each window, ids [windows, tokens], in bits."""
    found = [model(input_ids=window[None], use_cache=False).logits[0, :-1].float() for window in ids]
    nats = functional.cross_entropy(torch.cat(found), ids[:, 1:].flatten())
    return float(nats) / math.log(2)


class _Program:
    """What `twellc.LLM` runs, in the shape of a model of transformers; it keeps all keys and values in its cache."""

    def __init__(self, directory: Path, device: str, **options: Any) -> None:
        self._backend, *_ = load_directory(directory, LLMOptions(device=device, layers="all", **options))

    def __call__(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        """Return the logits behind each token, [rows, tokens, vocabulary], in chunks that see those before them."""
        self._backend.begin(*input_ids.shape)
        starts = range(0, input_ids.shape[1], _CHUNK)
        parts = [self._backend.fill(input_ids[:, start : start + _CHUNK], start, every=True) for start in starts]
        return SimpleNamespace(logits=torch.cat(parts, 1))


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--windows", default=40, show_default=True, help=f"Of {WINDOW} bytes.")
@harness.json_option
@harness.smoke_option(directory=_BYTELM, text=Path(__file__), windows=1)
@torch.inference_mode()
def main(directory: Path, text: Path, windows: int, json_path: Path | None) -> None:
    """Print a Markdown table of bits a byte."""
    data = text.read_bytes()[: windows * WINDOW]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    ids = ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW).to(device)
    if not len(ids):
        raise click.UsageError(f"{text} has {len(data)} bytes, fewer than a window of {WINDOW}")
    first = Path(harness.scratch_folder()) / "first.txt"
    first.write_text(data[:WINDOW].decode(errors="ignore"))
    loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model = loaded.to(device).eval()
    forms: dict[str, Callable[[], Any]] = {
        "bf16": lambda: model,
        FP8: lambda: with_forms(model, DenseFp8, ids[:1]),
        "twell bf16": lambda: twellc.optimize(copy.deepcopy(model), layers="all"),
        "twell FP8": lambda: twellc.optimize(copy.deepcopy(model), layers="all", weights="fp8:blocks"),
        "LLM": lambda: _Program(directory, device),
        "LLM, FP8 cache, scales of 1": lambda: _Program(directory, device, kv_cache_dtype="fp8"),
        "LLM, FP8 cache, scales of the first window": lambda: _Program(
            directory, device, kv_cache_dtype="fp8", text=first
        ),
    }
    report = {**harness.new_report(), "bytes": ids.numel(), "text": text.name}
    click.echo("| blocks | bits a byte | more than bf16 |\n| --- | ---: | ---: |")
    for name, make in forms.items():
        bits = bits_a_byte(make(), ids)
        report["results"].append({"blocks": name, "bits_a_byte": bits})
        click.echo(f"| {name} | {bits:.5f} | {bits - report['results'][0]['bits_a_byte']:.5f} |")
        harness.write_results(json_path, report)


if __name__ == "__main__":
    main()
