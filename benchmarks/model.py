"""Time a whole ReLU Llama of 1.5 billion parameters in torch: rewritten by twellc against the dense original.

python benchmarks/model.py --json results.json
python benchmarks/model.py --smoke

Prefill is a forward pass over several sequences. Decode is one new token a sequence with a key-value cache, in a CUDA
graph. The dense model is timed eager, compiled, and compiled with gate and up in one product; the fastest counts, as
it does of the rewritten one, eager and compiled. The dense model with its blocks in FP8 stands beside them. All take
turns, in a new order in each repetition. The logits of the first two are checked against float64 before.

The weights are random, and made so that gates are sparse: the first two columns of the embedding carry how active a
token is (log-normal) and a constant, nothing writes to these columns of the residual stream, and the gate projection
subtracts the first, scaled to the wanted share of non-zeros. RMSNorm scales a token's gate values and changes no
sign. The JSON file states the share that was counted in a forward pass.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
import torch
import transformers
from harness import NUMBERS, Columns, Result, Run, accuracies, field, shapes, time_of
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional
from torch.utils import _pytree as pytree

import twellc
from twellc.benchmarking.activity import quantile, zipf_offsets
from twellc.benchmarking.blocks import TWELL, block_calls, dense_models, see_blocks
from twellc.benchmarking.energy import EnergyMeter
from twellc.benchmarking.forms import BASELINES, COMPILED, EAGER, FP8, PACKED, compile_rival, dense_forms
from twellc.benchmarking.result import TWELL_COMPILED, TWELL_EAGER
from twellc.benchmarking.timing import Call, record
from twellc.options.option import COUNT, NOT_NEGATIVE, Number, option
from twellc.passes.precision import widen

CAUSAL = "benchmark"
_DECODED = "cached_benchmark"
_CHECKED_TOKENS = 64

_caches: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, [batch, heads, tokens, width]


def causal_attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attend within the sequence: torch's own fused kernel, and no mask, as every token counts."""
    grouped = q.shape[1] != k.shape[1]
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return y.transpose(1, 2).contiguous(), None


@torch.library.custom_op("benchmark::cached_attention", mutates_args=())
def cached_attention_op(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Put the new key and value at the end of a layer's cache and attend to all of it."""
    keys, values = _caches[layer]
    keys[:, :, -1:] = k
    values[:, :, -1:] = v
    return functional.scaled_dot_product_attention(q, keys, values).transpose(1, 2).contiguous()


@cached_attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


def cached_attention(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Attend to the cache. One op for both models: what happens in it is neither's merit."""
    return cached_attention_op(q, k, v, module.layer_idx), None


def make_model(
    layers: int,
    d_model: int,
    d_ff: int,
    density: float,
    neurons: str,
    vocabulary: int = 32000,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> Any:
    """Make the model in bfloat16, with random weights and sparse gates; with heads of width 128 by default.

    `kv_heads` is the number of heads of keys and values; by default as many as there are heads.
    """
    transformers.AttentionInterface.register(CAUSAL, causal_attention)
    config: Any = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=d_model,
        intermediate_size=d_ff,
        num_hidden_layers=layers,
        num_attention_heads=heads or d_model // 128,
        num_key_value_heads=kv_heads,
        hidden_act="relu",
        max_position_embeddings=4096,
        use_cache=False,
        tie_word_embeddings=False,
    )
    config._attn_implementation = CAUSAL
    with torch.device(harness.DEVICE):
        model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    root = d_model**0.5
    std = {"o_proj": 0.3 / root, "down_proj": 0.1}
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(std=next((value for part, value in std.items() if part in name), 1 / root))
        if any(part in name for part in std):
            weight[:2] = 0
        elif "_proj" in name:
            weight[:, :2] = 0
    active = (torch.exp(0.8 * torch.randn(vocabulary, device=harness.DEVICE) - 0.32) * density).clamp(max=0.9)
    embedding = model.model.embed_tokens.weight.normal_()
    embedding[:, 0] = quantile(active) * root
    embedding[:, 1] = root
    for layer in model.model.layers:
        gate = layer.mlp.gate_proj.weight
        gate[:, 0] = -1 / root
        if neurons == "zipf":
            gate[:, 1] = zipf_offsets(d_ff, density, harness.DEVICE) / root
    return model


class Logits(nn.Module):
    """The model as a function of tensors alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return logits [batch, tokens, vocabulary]."""
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits


@dataclass(frozen=True, kw_only=True)
class ModelOptions(harness.Options):
    """The options of every benchmark of the model."""

    layers: int = option(28, "N", COUNT)
    d_model: int = option(2048, "N", COUNT)
    d_ff: int = option(5632, "N", COUNT)
    density: float = option(0.005, "SHARE", Number(0.0, 1.0, above=True))

    def make(self, neurons: str = "equal", heads: int | None = None, kv_heads: int | None = None) -> Any:
        """Make the model of these sizes; see `make_model`."""
        sizes = (self.layers, self.d_model, self.d_ff, self.density)
        return make_model(*sizes, neurons, heads=heads, kv_heads=kv_heads)


def draw_ids(model: Any, *shape: int) -> Tensor:
    """Draw token ids for a model of transformers, [batch, tokens]."""
    return torch.randint(0, model.config.vocab_size, shape, device=harness.DEVICE)


def describe_model(report: dict[str, Any], model: Any, *counted: int) -> str:
    """Note size and density of a model in a report, counted in so many sequences of so many tokens; return a line."""
    report["machine"]["transformers"] = transformers.__version__
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    report["density"] = gate_density(Logits(model), (draw_ids(model, *counted),))
    return f"{report['parameters'] / 1e9:.2f} billion parameters; gates: {report['density']}"


def compile_plan(model: Any, source: Path, path: Path, options: Sequence[str]) -> str:
    """Compile a plan by `twellc compile` of a model that is written to a folder; return why it failed, or no text."""
    if not source.exists():
        model.save_pretrained(source)
    click.echo(f"building {path.name}", err=True)
    # -P keeps unbuilt sources in the working directory off the module path.
    command = [sys.executable, "-P", "-m", "twellc", "compile", str(source), "-o", str(path), "--overwrite"]
    done = subprocess.run([*command, "--backend", "tensorrt", *options], capture_output=True, text=True, check=False)
    return f"twellc compile: exit status {done.returncode}: {done.stderr.strip()[-600:]}" if done.returncode else ""


def gate_density(model: Any, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Count the share of non-zero gate values in a forward pass, and how unequal tokens are."""
    rows: list[Tensor] = []
    hooks = [
        layer.mlp.act_fn.register_forward_hook(lambda _, __, y: rows.append((y != 0).sum(-1).flatten().float()))
        for layer in model.model.model.layers
    ]
    model(*inputs)
    for hook in hooks:
        hook.remove()
    counts = torch.stack(rows)
    width = model.model.config.intermediate_size
    by_layer = counts.mean(1) / width
    return {
        "mean": float(by_layer.mean()),
        "least_layer": float(by_layer.min()),
        "largest_layer": float(by_layer.max()),
        "largest_row": float(counts.max()),
    }


def rewrite(model: nn.Module, inputs: tuple[Tensor, ...], dynamic: Any = None) -> twellc.Rewritten:
    """Let twellc rewrite all blocks of the model."""
    program = torch.export.export(model, inputs, dynamic_shapes=dynamic)
    result = twellc.rewrite(program, dtype="bf16", layers="all")
    left = [layer for layer in result.layers if layer.decision != "twell"]
    if left or not result.layers:
        raise click.ClickException(f"blocks were not rewritten: {left}")
    return result


def rows_of(result: Any) -> Tensor:
    """Return the logits of all tokens, [tokens, vocabulary], of what a model returns."""
    logits: Tensor = pytree.tree_leaves(result)[0]
    return logits.flatten(0, -2)


def check(contestants: Mapping[str, Callable[..., Any]], dense: ExportedProgram, *inputs: Tensor) -> dict[str, float]:
    """Compare the logits of contestants, dense ones first, with those of the dense program in float64.

    Raises:
        click.ClickException: One is more than twice as wrong as the first.
    """
    truth = rows_of(widen(dense).module(check_guards=False)(*inputs))
    results = {name: rows_of(call(*inputs)) for name, call in contestants.items()}
    errors, failed = accuracies(results, truth, language_model=True)
    if failed:
        raise click.ClickException("; ".join(f"{name} {why}" for name, why in failed.items()))
    return errors


def measure_setting(
    run: Run, options: Options, name: str, dense: nn.Module, rewritten: twellc.Rewritten, inputs: tuple[Tensor, ...]
) -> Result:
    """Time and energy of one setting; without any seconds for energy, none is measured."""
    torch._dynamo.reset()  # or it would compile for several sizes at once

    def prepare(call: Call) -> Call:
        call()
        return record([call]) if name.startswith("decode") else call

    ours = rewritten.program.module(check_guards=False)
    seen = see_blocks(rewritten.program, inputs, {})
    forms = [dense_forms(each.block, each.x) for each in seen]
    modules: dict[str, Callable[..., Any]] = {EAGER: dense, TWELL_EAGER: ours}
    compiled: dict[str, Callable[..., Any]] = {COMPILED: dense, TWELL_COMPILED: ours}
    compiled |= dense_models(rewritten.program, forms)
    modules |= {label: compile_rival(module) for label, module in compiled.items()}
    modules = run.chosen(modules, EAGER, TWELL_EAGER)
    calls = {label: prepare(functools.partial(module, *inputs)) for label, module in modules.items()}
    times = run.time_calls(calls)
    kinds = {"dense": BASELINES, "twell": (TWELL_EAGER, TWELL_COMPILED), "FP8": (FP8,)}
    best = {
        kind: min(known, key=lambda label: times[label]["median_us"])
        for kind, labels in kinds.items()
        if (known := [label for label in labels if label in times])
    }
    medians = {kind: times[label]["median_us"] for kind, label in best.items()}
    parts = block_calls(seen, forms)
    alone = {kind: prepare(parts[TWELL if kind == "twell" else label]) for kind, label in best.items()}
    feed_forward = {kind: each["median_us"] for kind, each in run.time_calls(alone).items()}
    tokens, energy, seconds = inputs[0].numel(), {}, options.energy_seconds
    if seconds > 0:
        meter = EnergyMeter()
        energy = {kind: meter.of(calls[label], seconds, medians[kind]) / tokens for kind, label in best.items()}
    return {
        "setting": name,
        "tokens": tokens,
        "times": times,
        "best": best,
        "speed_up": medians["dense"] / medians["twell"],
        "joules_per_token": energy,
        "feed_forward_us": feed_forward,
        "feed_forward_share": {kind: feed_forward[kind] / medians[kind] for kind in medians},
    }


def _of_kind(name: str, kind: str, unit: float) -> Callable[[Result], str]:
    return lambda result: f"{result[name][kind] / unit:.2f}" if kind in result[name] else "-"


COLUMNS: Columns = {
    "setting, ms": field("setting"),
    **{name: time_of(name, 3, 1e3) for name in (EAGER, COMPILED, PACKED, FP8, TWELL_EAGER, TWELL_COMPILED)},
    "speed-up": field("speed_up", ".2f"),
    **{f"feed-forward's share, {kind}": _of_kind("feed_forward_share", kind, 1) for kind in ("dense", "twell")},
    **{f"mJ a token, {kind}": _of_kind("joules_per_token", kind, 1e-3) for kind in ("dense", "twell")},
}


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of this benchmark.

    Attributes:
        neurons: How often they fire: equally, or by Zipf's law.
    """

    prefill: tuple[tuple[int, int], ...] = option("8x2048", "SHAPE", shapes("8x2048"))
    decode: tuple[int, ...] = option("1,8,32", "N,…", NUMBERS)
    cache: int = option(1024, "N", COUNT)
    neurons: str = option("equal", kind=("equal", "zipf"))
    repeats: int = option(10, "N", COUNT)
    energy_seconds: float = option(3.0, "SECONDS", NOT_NEGATIVE)


@harness.benchmark(
    Options, prefill="2x64", decode="2", cache=32, layers=2, d_model=256, d_ff=768, repeats=2, energy_seconds=0.1
)
@torch.no_grad()
def main(run: Run, options: Options) -> None:
    """Print a Markdown table: milliseconds a step, speed-up over the faster dense model, and energy."""
    transformers.AttentionInterface.register(_DECODED, cached_attention)
    llama = options.make(options.neurons)
    model = Logits(llama)

    def tokens(batch: int, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
        places = (first + torch.arange(length, device=harness.DEVICE)).expand(batch, -1).contiguous()
        return draw_ids(llama, batch, length), places

    run.begin(COLUMNS, describe_model(run.report, llama, 4, 512))
    for batch, length in options.prefill:
        short = tokens(1, _CHECKED_TOKENS)
        rewritten = rewrite(model, short)
        contestants = {"dense": model, "twell": rewritten.program.module(check_guards=False)}
        run.report["errors"] = check(contestants, rewritten.dense, *short)
        click.echo(f"logits, relative error against float64: {run.report['errors']}", err=True)
        inputs = tokens(batch, length)
        rewritten = rewrite(model, inputs)
        run.add(measure_setting(run, options, f"prefill {batch}x{length}", model, rewritten, inputs))
        del rewritten
    llama.set_attn_implementation(_DECODED)
    for batch in options.decode:
        shape = (batch, options.d_model // 128, options.cache, 128)
        drawn = [torch.randn(shape, device=harness.DEVICE).bfloat16() for _ in range(2 * options.layers)]
        _caches[:] = zip(drawn[::2], drawn[1::2], strict=True)
        inputs = tokens(batch, 1, first=options.cache - 1)
        rewritten = rewrite(model, inputs)
        run.add(measure_setting(run, options, f"decode {batch}", model, rewritten, inputs))


if __name__ == "__main__":
    main()
