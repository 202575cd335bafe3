"""Train a small language model with sparse feed-forward blocks, then let twellc's own commands work on it.

python benchmarks/trained.py --out build/trained --json results.json

The model is a byte-level Llama with ReLU gates: 4 layers, d_model 2048, d_ff 5632, about 200 million parameters,
trained on the Python sources of the installed standard library and packages, with an L1 penalty on the hidden tensor
h = relu(x Wgᵀ) ⊙ (x Wuᵀ). Of every 25 files one is held out. Then, each as a separate command: `twellc profile` on
a text that was trained on; `twellc compile`, with that profile and with pruning, too; `twellc check` and
`twellc bench` on a text that was held out. What needs a GPU is left out where there is none; a command that fails is
named, and the exit status is 1.

`--smoke` does the same with a model of 2 narrow layers and a few steps, with `--device cpu` on any machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import harness
import torch
import transformers
from harness import head, row, table
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

from twellc.export.tensorrt_host import has_gpu, python_module

VOCABULARY = 256
_HELD_OUT_EVERY = 25
_PENALTY = 2e-5
_RATE = 6e-4
_WARM_UP = 200  # steps


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Sizes of the model, and of what it is trained and measured on."""

    layers: int = 4
    d_model: int = 2048
    d_ff: int = 5632
    heads: int = 16
    window: int = 1024
    batch: int = 32
    corpus_bytes: int = 350_000_000
    profiled_bytes: int = 524_288
    checked_bytes: int = 1024
    benched_bytes: int = 65_536
    shapes: str = "1x1,2x1024,8x1024,32x1024"
    profile: str = "1x1:8x1024:32x1024"


SMOKE = Recipe(
    layers=2,
    d_model=64,
    d_ff=256,
    heads=4,
    window=64,
    batch=4,
    corpus_bytes=200_000,
    profiled_bytes=2048,
    checked_bytes=256,
    benched_bytes=512,
    shapes="1x1,2x16",
    profile="1x1:2x16:2x32",
)


# ---- data ----


def source_files() -> list[Path]:
    """Return the Python sources of the standard library and of what is installed, in an order that is like drawn."""
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")}
    files = {path for root in roots for path in root.rglob("*.py")}
    return sorted(
        files, key=lambda path: hashlib.sha256(path.name.encode() + bytes(path.parent.name, "utf-8")).digest()
    )


def load_corpus(most: int) -> tuple[bytes, bytes]:
    """Return what is trained on, at most `most` bytes, and what is held out; a NUL stands before each file."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    size = 0
    for index, path in enumerate(source_files()):
        try:
            data = path.read_bytes().decode().encode()  # twellc reads texts in UTF-8
        except (OSError, UnicodeDecodeError):
            continue
        parts[index % _HELD_OUT_EVERY == 0].append(b"\0" + data)
        size += len(data)
        if size > most:
            break
    return b"".join(parts[False]), b"".join(parts[True])


def write_text(path: Path, data: bytes, size: int) -> Path:
    """Write the first bytes of a text, without the NULs between files."""
    path.write_text(data.replace(b"\0", b"")[:size].decode(errors="ignore"), encoding="utf-8")
    return path


# ---- training ----


class Penalised(LlamaMLP):
    """A block that notes the mean over tokens of the sum of |h|."""

    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for x [batch, tokens, d_model]."""
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        self.penalty = h.abs().sum(-1, dtype=torch.float32).mean()
        y: Tensor = self.down_proj(h)
        return y


def dense_blocks(model: Any, kind: type[LlamaMLP]) -> None:
    """Let dense blocks note the L1 term, or no longer."""
    for layer in model.model.layers:
        layer.mlp.__class__ = kind
        vars(layer.mlp).pop("penalty", None)


def dense_term(model: Any) -> Tensor:
    """Return the L1 term of dense blocks."""
    return torch.stack([layer.mlp.penalty for layer in model.model.layers]).mean()


def make_model(recipe: Recipe) -> Any:
    """Return the untrained model in float32."""
    config: Any = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=recipe.d_model,
        intermediate_size=recipe.d_ff,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        hidden_act="relu",
        max_position_embeddings=2 * recipe.window,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    small = 0.02 / math.sqrt(2 * recipe.layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=small if "down_proj" in name or "o_proj" in name else 0.02)
    return model


def losses(model: Any, windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy in nats of the next byte of windows [batch, tokens + 1], and the mean penalty."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    entropy = functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
    return entropy, dense_term(model)


def draw_windows(data: Tensor, recipe: Recipe, generator: torch.Generator | None = None) -> Tensor:
    """Return random windows of bytes, int64 [batch, window + 1]."""
    most, shape = data.numel() - recipe.window - 1, (recipe.batch, 1)
    first = torch.randint(most, shape, device=data.device, generator=generator)
    return data[first + torch.arange(recipe.window + 1, device=data.device)].long()


def train(model: Any, data: Tensor, recipe: Recipe, seconds: float, compiled: bool) -> dict[str, Any]:
    """Train in place for `seconds`, the compilation included; return what was done."""
    dense_blocks(model, Penalised)
    run = torch.compile(losses) if compiled else losses
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    start, step, entropy, penalty = time.monotonic(), 0, torch.tensor(0.0), torch.tensor(0.0)
    while (done := (time.monotonic() - start) / seconds) < 1:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1, step / _WARM_UP) * max(0.05, 0.5 + 0.5 * math.cos(math.pi * done))
        with torch.autocast(data.device.type, dtype=torch.bfloat16):
            entropy, penalty = run(model, draw_windows(data, recipe))
        torch.autograd.backward(entropy + _PENALTY * penalty)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        entropy, penalty = entropy.detach(), penalty.detach()
        if step % 250 == 0:
            bits = float(entropy) / math.log(2)
            click.echo(f"step {step}, {done:.0%}: {bits:.3f} bits a byte, sum of |h| {float(penalty):.1f}", err=True)
    dense_blocks(model, LlamaMLP)
    return {
        "steps": step,
        "tokens": step * recipe.batch * recipe.window,
        "seconds": round(time.monotonic() - start),
        "training_bits": float(entropy) / math.log(2),
        "penalty": _PENALTY,
    }


# ---- commands ----


def plan_commands(out: Path, recipe: Recipe, tensorrt: bool, gpu: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands to run, by a name for each, as far as this machine has what they need."""
    model, profile = str(out / "model"), str(out / "profile")
    yield "profile", ["profile", model, "--data", str(out / "trained_on.txt"), "-o", profile, "--overwrite", "--json"]
    decided = {"calibrated": ["--firing-profile", profile], "pruned": ["--firing-profile", profile, "--prune-dead"]}
    for name, options in decided.items():
        path = out / f"{name}.{'plan' if tensorrt else 'onnx'}"
        target = ["--backend", "tensorrt", "-o", str(path)] if tensorrt else ["--backend", "none", "--onnx", str(path)]
        given = [
            "--optimization-profile",
            f"input_ids:{recipe.profile}",
            "--manifest",
            str(path.with_suffix(".report.json")),
        ]
        yield f"compile, {name}", ["compile", model, *target, *given, *options, "--overwrite"]
        yield f"check, {name}", ["check", model, str(path), "--text", str(out / "checked.txt"), "--json"]
    if gpu:
        bench = ["bench", model, "--text", str(out / "held_out.txt"), "--shapes", recipe.shapes, "--json"]
        plans = ["--tensorrt"] if importlib.util.find_spec("tensorrt") else []
        yield "bench, calibrated", [*bench, *decided["calibrated"], *plans]
        # Its plans would take as long to build as all else here.
        yield "bench, pruned", [*bench, *decided["pruned"]]


def run_command(arguments: list[str], out: Path) -> dict[str, Any]:
    """Run a command of twellc; return its arguments without paths, exit status, seconds, and what it found."""
    start = time.monotonic()
    # -P keeps unbuilt sources in the working directory off the module path.
    command = [sys.executable, "-P", "-m", "twellc", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shown = [argument.replace(f"{out}/", "") for argument in arguments]
    result: dict[str, Any] = {
        "command": f"twellc {' '.join(shown)}",
        "status": done.returncode,
        "seconds": round(time.monotonic() - start, 1),
    }
    if done.returncode not in (0, 1):
        result["message"] = done.stderr.strip()[-1000:]
    elif "--json" in arguments:
        result["found"] = json.loads(done.stdout)
    elif "--manifest" in arguments:
        result["found"] = json.loads(Path(arguments[arguments.index("--manifest") + 1]).read_text())
    return result


# ---- the page ----


def markdown(report: dict[str, Any]) -> str:
    """Write a report's tables as Markdown."""
    lines = [opening(report), *(command_row(name, each) for name, each in report["commands"].items())]
    for name, each in report["commands"].items():
        if name.startswith("bench") and "found" in each:
            lines += ["", _bench_table(name, each["found"])]
    return "\n".join(lines) + "\n"


def opening(report: dict[str, Any]) -> str:
    """Return the page up to the table of commands, whose rows come later."""
    training, machine = report["training"], report["machine"]
    return (
        f"{machine['gpu']}, torch {machine['torch']}, commit {machine['commit']}: {training['steps']} steps of "
        f"{training['tokens'] / training['steps']:.0f} tokens in {training['seconds']} s, "
        f"{report['parameters'] / 1e6:.0f} million parameters\n\n{head(['command', 'exit status', 's', 'result'])}"
    )


def command_row(name: str, each: dict[str, Any]) -> str:
    """Return the row of a command that ran."""
    return row([f"`{each['command']}`", str(each["status"]), str(each["seconds"]), _summary(name, each)])


def _summary(name: str, each: dict[str, Any]) -> str:
    found = each.get("found")
    if found is None:
        return each.get("message", "").splitlines()[-1] if each.get("message") else ""
    if name.startswith("compile"):
        decisions = [layer["decision"] for layer in found["layers"]]
        return ", ".join(f"{decisions.count(kind)} blocks {kind}" for kind in dict.fromkeys(decisions))
    if name.startswith("check"):
        text = found["text"]
        bits = f"; {text['candidate_bits']:.4f} bits a token, dense {text['plain_bits']:.4f}" if text else ""
        return ("within tolerance" if found["within"] else "**outside of tolerance**") + bits
    if name.startswith("bench"):
        return f"{len(found['results'])} shapes"
    return ""


def _bench_table(name: str, found: dict[str, Any]) -> str:
    rows = []
    for part, title in (("blocks", "blocks alone"), ("model", "whole model")):
        standings = [each[part] for each in found["results"]]
        for label in dict.fromkeys(label for each in standings for label in each["speed_ups"]):
            cells = [each["speed_ups"].get(label) for each in standings]
            rows.append([f"{title}, {label}", *("-" if value is None else f"{value:.2f}" for value in cells)])
    densities = [sum(each["densities"]) / len(each["densities"]) for each in found["results"]]
    rows.append(["mean density", *(f"{density:.2%}" for density in densities)])
    return table([f"{name}: speed-up over the fastest dense", *(each["shape"] for each in found["results"])], rows)


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Model and results.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=5.0, show_default=True, help="Of training.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="To train on.")
@click.option("--compiled/--no-compiled", default=True, show_default=True, help="Train through torch.compile.")
@click.option("--reuse", is_flag=True, help="Do not train: take the model that is in --out.")
@click.option("--seed", default=0, show_default=True)
@harness.json_option
@harness.smoke_option(out=harness.scratch_folder, minutes=0.05, compiled=False)
def main(
    out: Path, minutes: float, device: str, compiled: bool, reuse: bool, seed: int, json_path: Path | None
) -> None:
    """Train, profile, compile, check and bench; print a Markdown table of what came out."""
    if device == "cuda":
        harness.refuse_without_gpu()
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    recipe = SMOKE if harness.is_smoke() else Recipe()
    out.mkdir(parents=True, exist_ok=True)
    training_file = out / "training.json"
    if not reuse:
        trained_on, held_out = load_corpus(recipe.corpus_bytes)
        write_text(out / "trained_on.txt", trained_on, recipe.profiled_bytes)
        write_text(out / "held_out.txt", held_out, recipe.benched_bytes)
        write_text(out / "checked.txt", held_out, recipe.checked_bytes)
        model = make_model(recipe).to(device)
        data = torch.frombuffer(bytearray(trained_on), dtype=torch.uint8).to(device)
        training = train(model, data, recipe, 60 * minutes, compiled)
        training["corpus_bytes"], training["parameters"] = data.numel(), sum(p.numel() for p in model.parameters())
        model.to(torch.bfloat16).save_pretrained(out / "model")
        training_file.write_text(json.dumps(training))
        del model, data
        if device == "cuda":
            torch.cuda.empty_cache()
    if not training_file.exists():
        raise click.ClickException(f"{out} holds no trained model: leave out --reuse")
    training = json.loads(training_file.read_text())
    gpu = device == "cuda" and has_gpu()
    report: dict[str, Any] = {
        "machine": harness.describe_machine(),
        "recipe": dataclasses.asdict(recipe),
        "parameters": training.pop("parameters"),
        "training": training,
        "commands": {},
    }
    click.echo(opening(report))
    for name, arguments in plan_commands(out, recipe, gpu and python_module("tensorrt") is not None, gpu):
        click.echo(f"twellc {name}", err=True)
        report["commands"][name] = run_command(arguments, out)
        click.echo(command_row(name, report["commands"][name]))
        harness.write_results(json_path, report, markdown(report))
    for name, each in report["commands"].items():
        if name.startswith("bench") and "found" in each:
            click.echo(f"\n{_bench_table(name, each['found'])}")
    failed = [name for name, each in report["commands"].items() if each["status"] != 0]
    if failed:
        raise click.ClickException(f"commands failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
