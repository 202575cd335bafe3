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
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import session
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import twellc
from twellc.benchmarking.activity import quantile, zipf_offsets
from twellc.benchmarking.blocks import TWELL, block_calls, dense_models, see_blocks
from twellc.benchmarking.energy import EnergyMeter
from twellc.benchmarking.forms import BASELINES, COMPILED, EAGER, FP8, PACKED, compile_rival, dense_forms
from twellc.benchmarking.timing import Call, record, time_calls
from twellc.checks.accuracy import measure
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
    with torch.device(session.DEVICE):
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
    active = (torch.exp(0.8 * torch.randn(vocabulary, device=session.DEVICE) - 0.32) * density).clamp(max=0.9)
    embedding = model.model.embed_tokens.weight.normal_()
    embedding[:, 0] = quantile(active) * root
    embedding[:, 1] = root
    for layer in model.model.layers:
        gate = layer.mlp.gate_proj.weight
        gate[:, 0] = -1 / root
        if neurons == "zipf":
            gate[:, 1] = zipf_offsets(d_ff, density, session.DEVICE) / root
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


def check(dense: nn.Module, rewritten: twellc.Rewritten, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """Compare the logits of a short sequence with float64.

    Raises:
        click.ClickException: twellc's are more than twice as wrong as the dense model's.
    """
    plain, result = dense(*inputs), rewritten.program.module(check_guards=False)(*inputs)
    wide = widen(rewritten.dense).module(check_guards=False)
    truth = wide(*inputs)
    truth = pytree.tree_leaves(truth)[0]
    ours_rows, plain_rows, true_rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (result, plain, truth))
    accuracy = measure("logits", ours_rows, plain_rows, true_rows, language_model=True)
    figures = {"twell": accuracy.candidate.relative, "dense": accuracy.plain.relative}
    if not accuracy.within:
        raise click.ClickException(f"the logits are off: {figures}")
    return figures


def measure_setting(
    name: str,
    dense: nn.Module,
    rewritten: twellc.Rewritten,
    inputs: tuple[Tensor, ...],
    graphs: bool,
    repeats: int,
    energy_seconds: float,
) -> dict[str, Any]:
    """Time and energy of one setting; without any seconds for energy, none is measured."""
    torch._dynamo.reset()  # or it would compile for several sizes at once

    def prepare(call: Call) -> Call:
        call()
        return record([call]) if graphs else call

    def time_all(calls: dict[str, Call]) -> dict[str, dict[str, Any]]:
        times = time_calls(list(calls.values()), repeats)
        return {label: each.to_json() for label, each in zip(calls, times, strict=True)}

    ours = rewritten.program.module(check_guards=False)
    seen = see_blocks(rewritten.program, inputs, {})
    forms = [dense_forms(each.block, each.x) for each in seen]
    modules: dict[str, Callable[..., Any]] = {EAGER: dense, "twell eager": ours}
    compiled: dict[str, Callable[..., Any]] = {COMPILED: dense, "twell compiled": ours}
    compiled |= dense_models(rewritten.program, forms)
    modules |= {label: compile_rival(module) for label, module in compiled.items()}
    calls = {label: prepare(functools.partial(module, *inputs)) for label, module in modules.items()}
    times = time_all(calls)
    kinds = {"dense": BASELINES, "twell": ("twell eager", "twell compiled"), "FP8": (FP8,)}
    best = {
        kind: min(known, key=lambda label: times[label]["median_us"])
        for kind, labels in kinds.items()
        if (known := [label for label in labels if label in times])
    }
    medians = {kind: times[label]["median_us"] for kind, label in best.items()}
    parts = block_calls(seen, forms)
    alone = {kind: prepare(parts[TWELL if kind == "twell" else label]) for kind, label in best.items()}
    feed_forward = {kind: times["median_us"] for kind, times in time_all(alone).items()}
    tokens = inputs[0].numel()
    energy = {}
    if energy_seconds > 0:
        meter = EnergyMeter()
        energy = {kind: meter.of(calls[label], energy_seconds, medians[kind]) / tokens for kind, label in best.items()}
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


@click.command()
@click.option("--prefill", default="8x2048", show_default=True, help="Sequences and tokens a sequence; empty: none.")
@click.option("--decode", default="1,8,32", show_default=True, help="Sequences to decode at once; empty: none.")
@click.option("--cache", default=1024, show_default=True, help="Tokens in the key-value cache, the new one included.")
@click.option("--layers", default=28, show_default=True)
@click.option("--d-model", default=2048, show_default=True)
@click.option("--d-ff", default=5632, show_default=True)
@click.option("--density", default=0.005, show_default=True, help="Share of non-zero gate activations.")
@click.option("--neurons", type=click.Choice(["equal", "zipf"]), default="equal", show_default=True)
@click.option("--repeats", default=10, show_default=True)
@click.option("--energy-seconds", default=3.0, show_default=True, help="For the energy of each contestant; 0: none.")
@click.option("--seed", default=0, show_default=True)
@session.json_option
@session.smoke_option(
    prefill="2x64", decode="2", cache=32, layers=2, d_model=256, d_ff=768, repeats=2, energy_seconds=0.1
)
@torch.no_grad()
def main(
    prefill: str,
    decode: str,
    cache: int,
    layers: int,
    d_model: int,
    d_ff: int,
    density: float,
    neurons: str,
    repeats: int,
    energy_seconds: float,
    seed: int,
    json_path: Path | None,
) -> None:
    """Print a Markdown table: milliseconds a step, speed-up over the faster dense model, and energy."""
    session.refuse_without_gpu()
    torch.manual_seed(seed)
    random.seed(seed)
    transformers.AttentionInterface.register(CAUSAL, causal_attention)
    transformers.AttentionInterface.register(_DECODED, cached_attention)
    model = Logits(make_model(layers, d_model, d_ff, density, neurons))
    vocabulary = model.model.config.vocab_size

    def tokens(batch: int, length: int, first: int = 0) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, vocabulary, (batch, length), device=session.DEVICE)
        return ids, (first + torch.arange(length, device=session.DEVICE)).expand(batch, -1).contiguous()

    report = session.new_report()
    report["machine"]["transformers"] = transformers.__version__
    report["density"] = gate_density(model, tokens(4, 512))
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    click.echo(
        f"{report['machine']}\n{report['parameters'] / 1e9:.2f} billion parameters; gates: {report['density']}\n"
    )
    click.echo(
        "| setting | dense eager ms | compiled | packed | FP8 | twell eager | compiled | speed-up "
        "| feed-forward's share, dense | twell | mJ a token, dense | twell |\n|" + " ---: |" * 12
    )

    def add(result: dict[str, Any]) -> None:
        report["results"].append(result)
        found = {label: f"{times['median_us'] / 1e3:.3f}" for label, times in result["times"].items()}
        labels = (EAGER, COMPILED, PACKED, FP8, "twell eager", "twell compiled")
        times = " | ".join(found.get(label, "-") for label in labels)
        joules = result["joules_per_token"]
        energy = " | ".join(f"{joules[kind] * 1e3:.2f}" if kind in joules else "-" for kind in ("dense", "twell"))
        share = " | ".join(f"{result['feed_forward_share'][kind]:.2f}" for kind in ("dense", "twell"))
        click.echo(f"| {result['setting']} | {times} | {result['speed_up']:.2f} | {share} | {energy} |")
        session.write_results(json_path, report)

    if prefill:
        batch, length = (int(size) for size in prefill.split("x"))
        short = rewrite(model, tokens(1, _CHECKED_TOKENS))
        report["errors"] = check(model, short, tokens(1, _CHECKED_TOKENS))
        click.echo(f"logits, relative error against float64: {report['errors']}", err=True)
        del short
        inputs = tokens(batch, length)
        rewritten = rewrite(model, inputs)
        name = f"prefill {prefill}"
        add(measure_setting(name, model, rewritten, inputs, False, repeats, energy_seconds))
        del rewritten
    if decode:
        model.model.set_attn_implementation(_DECODED)
        for batch in (int(size) for size in decode.split(",")):
            shape = (batch, d_model // 128, cache, 128)
            drawn = [torch.randn(shape, device=session.DEVICE).bfloat16() for _ in range(2 * layers)]
            _caches[:] = zip(drawn[::2], drawn[1::2], strict=True)
            inputs = tokens(batch, 1, first=cache - 1)
            rewritten = rewrite(model, inputs)
            add(measure_setting(f"decode {batch}", model, rewritten, inputs, True, repeats, energy_seconds))


if __name__ == "__main__":
    main()
