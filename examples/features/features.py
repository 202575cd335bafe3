"""Train a sparse autoencoder on a layer of a model of bytes, and write a page of what its features fire for.

    x      what a layer of MODEL hands on, for each byte of some texts              [bytes, d_model]
    f      relu((x - b_dec) W_enc + b_enc), few of it not zero                      [bytes, d_features]
    loss   |f W_dec + b_dec - x|² + l1 · Σ f, rows of W_dec of length 1             means over bytes

The autoencoder is written as sae-lens writes one, so `twellc compile`, `check` and `profile` take its folder. Features
come from `twellc.load_autoencoder(folder).encode(x)`: the active ones of each byte with their values.
"""

from __future__ import annotations

import html
import json
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

import twellc
from twellc.base.errors import UserError
from twellc.commands.options import FilePath
from twellc.commands.terminal import Command
from twellc.features import Features

WINDOW = 256  # bytes that the model reads at once, behind a 0
BEFORE, BEHIND = 40, 16  # bytes that the page shows around one
RARE, OFTEN = 1e-4, 0.02  # features that fire for a smaller or larger share of the bytes are not shown
STYLE = "body{font:15px sans-serif;max-width:60em;margin:2em auto}h2{font-size:1em;margin:1.4em 0 .3em}"
STYLE += "pre{margin:0;line-height:1.5}mark{background:#fb6}"


def standard_library() -> list[Path]:
    """Return modules of Python's standard library, in the order of their names."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def read_windows(files: list[Path], count: int) -> Tensor:
    """Return the first `count` bytes of some files, cut into windows behind a 0, int64 [windows, 1 + WINDOW].

    Raises:
        UserError: There are fewer bytes than two windows have.
    """
    text = bytearray()
    for path in files:
        text += path.read_bytes()
        if len(text) >= count:
            break
    whole = min(len(text), count) // WINDOW
    if whole < 2:
        expected = f"{2 * WINDOW} at least"
        raise UserError(
            "--text and --bytes", "there are too few bytes", got=str(min(len(text), count)), expected=expected
        )
    ids = torch.frombuffer(text, dtype=torch.uint8)[: whole * WINDOW].reshape(whole, WINDOW).long()
    return functional.pad(ids, (1, 0))


@torch.no_grad()
def collect(model: transformers.PreTrainedModel, layer: int, ids: Tensor) -> Tensor:
    """Return what a layer hands on for each byte but the leading zeros, float32 [windows, WINDOW, d_model]."""
    parts = [
        model(batch, output_hidden_states=True, use_cache=False).hidden_states[layer + 1][:, 1:]
        for batch in ids.split(32)
    ]
    return torch.cat(parts).float()


def train(x: Tensor, features: int, steps: int, batch: int, l1: float) -> dict[str, Tensor]:
    """Return W_enc [d_model, features], b_enc, W_dec [features, d_model] and b_dec for x [bytes, d_model].

    Training sees x scaled to a mean length of sqrt(d_model); the scale is folded into what is returned.
    """
    scale = x.shape[1] ** 0.5 / x.norm(dim=1).mean()
    w_dec = functional.normalize(torch.randn(features, x.shape[1]))
    weights = {
        "W_enc": w_dec.t().contiguous(),
        "b_enc": torch.zeros(features),
        "W_dec": w_dec,
        "b_dec": x.mean(0) * scale,
    }
    for each in weights.values():
        each.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 5 * (1 - step / steps)))
    begun = time.monotonic()
    for step in range(steps):
        seen = x[torch.randint(len(x), (batch,))] * scale
        f = torch.relu((seen - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"])
        wrong = (f @ weights["W_dec"] + weights["b_dec"] - seen).square().sum(1).mean()
        optimizer.zero_grad()
        (wrong + l1 * f.sum(1).mean()).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            functional.normalize(weights["W_dec"], out=weights["W_dec"])
        if step % 100 == 0 or step == steps - 1:
            active, unexplained = (f != 0).sum(1).float().mean(), wrong / seen.var(0).sum()
            spent = time.monotonic() - begun
            click.echo(
                f"step {step}: {active:.1f} features a byte, {unexplained:.1%} unexplained, {spent:.0f} s", err=True
            )
    folded = {"W_enc": scale, "b_enc": 1.0, "W_dec": 1 / scale, "b_dec": 1 / scale}
    return {name: (each.detach() * folded[name]).contiguous() for name, each in weights.items()}


def save(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write an autoencoder as sae-lens does."""
    folder.mkdir(parents=True, exist_ok=True)
    d_in, d_sae = weights["W_enc"].shape
    config = {
        "architecture": "standard",
        "d_in": d_in,
        "d_sae": d_sae,
        "dtype": "float32",
        "apply_b_dec_to_input": True,
    }
    config |= {
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": "6.0.0"},
    }
    (folder / "cfg.json").write_text(json.dumps(config, indent=2))
    save_file(weights, folder / "sae_weights.safetensors")


@dataclass(frozen=True)
class Shown:
    """A feature: its number, for which share of the bytes it fires, and at which bytes most, with its values there."""

    number: int
    share: float
    places: list[int]
    values: list[float]


def strongest(features: Features, count: int, contexts: int) -> Iterator[Shown]:
    """Yield the features with the largest values, of those that fire neither too rarely nor too often."""
    tokens = len(features.offsets) - 1
    places = torch.arange(tokens).repeat_interleave(features.offsets.diff())
    order = features.values.argsort(descending=True, stable=True)
    order = order[features.indices[order].argsort(stable=True)]  # by feature, and of each the largest values first
    places, values = places[order], features.values[order]
    fired = features.indices.bincount(minlength=features.d_ff)
    begins = fired.cumsum(0) - fired
    fits = ((fired >= max(contexts, RARE * tokens)) & (fired <= OFTEN * tokens)).nonzero()[:, 0]
    for number in fits[values[begins[fits]].argsort(descending=True)][:count].tolist():
        own = slice(int(begins[number]), int(begins[number] + fired[number]))
        yield Shown(number, int(fired[number]) / tokens, places[own].tolist(), values[own].tolist())


def context_of(ids: Tensor, place: int) -> str:
    """Return the bytes around one, which is marked, as HTML; ids [windows, 1 + WINDOW] and `place` over all windows."""
    window, at = bytes(ids[place // WINDOW, 1:].tolist()), place % WINDOW
    parts = window[max(0, at - BEFORE) : at], window[at : at + 1], window[at + 1 : at + 1 + BEHIND]
    before, byte, behind = (html.escape(part.decode("ascii", "replace").replace("\n", "⏎")) for part in parts)
    return f"{before}<mark>{byte}</mark>{behind}"


def page(ids: Tensor, shown: list[Shown], contexts: int, title: str) -> str:
    """Return a page of features, each with the different contexts that it fires most for."""
    lines = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"]
    for each in shown:
        lines.append(f"<h2>feature {each.number}: fires for {each.share:.2%} of the bytes</h2><pre>")
        texts: dict[str, float] = {}
        for place, value in zip(each.places, each.values, strict=True):
            if len(texts) < contexts:
                texts.setdefault(context_of(ids, place), value)
        lines += [f"{value:8.2f}  {text}" for text, value in texts.items()]
        lines.append("</pre>")
    return "\n".join(lines) + "\n"


@click.command(cls=Command)
@click.option("--model", type=FilePath(), default=Path(__file__).parents[1] / "bytelm", help="A model of bytes.")
@click.option("--layer", type=click.IntRange(0), default=2, show_default=True, help="Whose output is read.")
@click.option("--text", "texts", type=FilePath(), multiple=True, help="What to read; default: the standard library.")
@click.option("--bytes", "count", type=click.IntRange(1), default=400_000, show_default=True, help="How much of it.")
@click.option("--features", type=click.IntRange(8), default=1024, show_default=True, help="Of the autoencoder.")
@click.option("--steps", type=click.IntRange(1), default=4000, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=512, show_default=True, help="Bytes in a step.")
@click.option(
    "--l1", type=click.FloatRange(0), default=4.0, show_default=True, help="The larger, the fewer are active."
)
@click.option("--show", type=click.IntRange(1), default=40, show_default=True, help="Features on the page.")
@click.option("--contexts", type=click.IntRange(1), default=8, show_default=True, help="For each of them.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A folder: the autoencoder, page.html.")
def main(
    model: Path,
    layer: int,
    texts: tuple[Path, ...],
    count: int,
    features: int,
    steps: int,
    batch: int,
    l1: float,
    show: int,
    contexts: int,
    output: Path,
) -> None:
    """Train a sparse autoencoder on a layer of a model of bytes, and write a page of what its features fire for."""
    torch.manual_seed(0)
    ids = read_windows(list(texts) or standard_library(), count)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    layers = loaded.config.num_hidden_layers
    if layer >= layers:
        raise UserError(f"--layer {layer}", "the model has no such layer", expected=f"0 to {layers - 1}")
    x = collect(loaded, layer, ids)
    save(output, train(x.flatten(end_dim=1), features, steps, batch, l1))
    autoencoder = twellc.load_autoencoder(output)
    found = autoencoder.encode(x)
    shown = list(strongest(found, show, contexts))
    mean = len(found.values) / (len(found.offsets) - 1)
    title = f"{features} features of layer {layer}: {mean:.1f} active for a byte"
    (output / "page.html").write_text(page(ids, shown, contexts, title), encoding="utf-8")
    click.echo(f"{output / 'page.html'}: {len(shown)} features; {title}")


if __name__ == "__main__":
    main()
