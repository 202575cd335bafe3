"""Train the example model: a byte-level Llama with ReLU gates and an L1 penalty on them.

The corpus is the Python standard library's own sources (tests left out), one NUL byte before each file. Files are held
out by a hash of their path, so the same names are held out under every Python version. The loss is

    cross-entropy(next byte)  +  l1 · mean over layers and tokens of  Σ_n |g[n]|,      g = relu(x Wgᵀ)

and no threshold or top-k ever touches the activations: each zero that is counted is one that ReLU made.
Everything that is saved goes through transformers, so the result is an ordinary `LlamaForCausalLM` folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

VOCAB = 256
TILE = 256  # columns of a TwELL tile
HELD_OUT_SHARE = 0.08
EVAL_ROWS = 32  # windows in one held-out batch
# Left out: tests, foreign packages, the code pages of `encodings` (near copies of each other, which would flatter the
# held-out figure) and `pydoc_data` (one large file of manual text).
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


def load_corpus(root: Path) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Read the sources under `root`.

    Returns:
        The bytes to train on and the held-out bytes (uint8, on the CPU, files in path order), and a record of both.
    """
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(name.parts):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            held_out = int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64
            parts[held_out].append(b"\0" + path.read_bytes())
    if not parts[True] or not parts[False]:
        raise click.ClickException(f"{root}: too few .py files; the standard library's sources are needed")
    train, held_out_bytes = (torch.frombuffer(bytearray(b"".join(parts[k])), dtype=torch.uint8) for k in (False, True))
    record = {
        "source": f"standard library of Python {platform.python_version()}, *.py",
        "skipped_folders": sorted(SKIPPED_FOLDERS),
        "train_files": len(parts[False]),
        "train_bytes": train.numel(),
        "held_out_files": len(parts[True]),
        "held_out_bytes": held_out_bytes.numel(),
    }
    return train, held_out_bytes, record


def make_model() -> transformers.LlamaForCausalLM:
    """Return the untrained model: 2.8 million parameters in float32."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        hidden_act="relu",
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


class GateTap:
    """Forward hooks that keep what each layer's `act_fn` returned in the last forward pass.

    Attributes:
        gates: Layer → activated gate, [batch, seq, d_ff].
    """

    def __init__(self, model: nn.Module) -> None:
        """Attach a hook to the activation of every feed-forward block."""
        self.gates: dict[int, Tensor] = {}
        acts = [module for name, module in model.named_modules() if name.endswith(".mlp.act_fn")]
        for layer, act in enumerate(acts):
            act.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
            self.gates[layer] = output

        return keep

    def l1(self) -> Tensor:
        """Return Σ_n |g[n]|, averaged over layers and tokens (ReLU's output needs no abs)."""
        return torch.stack([g.sum(-1, dtype=torch.float32).mean() for g in self.gates.values()]).mean()

    def sparsity(self) -> list[float]:
        """Return each layer's share of exact zeros."""
        return [1.0 - (g.count_nonzero() / g.numel()).item() for g in self.gates.values()]


def next_byte_loss(model: nn.Module, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy, in nats, of bytes 1… of `windows` [batch, seq + 1] given those before."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


def train(model: nn.Module, data: Tensor, steps: int, batch: int, seq: int, l1: float, lr: float) -> None:
    """Train in place with AdamW on random windows of `data` (uint8, on the model's device).

    The learning rate warms up over 2 % of the steps and falls to zero as a cosine; the penalty grows to `l1` over the
    first quarter, because neurons that it silences at random initial weights seldom come back.
    """
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=data.is_cuda)
    warm_up = max(1, steps // 50)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * i / steps))
    )
    tap, offsets, start = GateTap(model), torch.arange(seq + 1, device=data.device), time.perf_counter()
    model.train()
    for step in range(steps):
        first = torch.randint(data.numel() - seq, (batch, 1), device=data.device)
        with torch.autocast(data.device.type, dtype=torch.bfloat16):
            loss = next_byte_loss(model, data[first + offsets].long())
            penalty = tap.l1()
        torch.autograd.backward(loss + l1 * min(1.0, 4 * (step + 1) / steps) * penalty)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % max(1, steps // 20) == 0 or step == steps - 1:
            zeros = " ".join(f"{100 * s:5.2f}" for s in tap.sparsity())
            bits, seconds = loss.item() / math.log(2), time.perf_counter() - start
            click.echo(
                f"step {step:6d}  {bits:.3f} bits/byte  Σ|g| {penalty.item():7.3f}  zeros % {zeros}  {seconds:.0f} s"
            )


def ngram_bits(data: Tensor, held_out: Tensor, order: int) -> float:
    """Return the held-out bits/byte of an add-one-smoothed model of 1 (unigram) or 2 (bigram) bytes."""

    def symbols(stream: Tensor) -> Tensor:
        codes = stream.long().cpu()
        return codes[1:] if order == 1 else codes[:-1] * VOCAB + codes[1:]

    counts = torch.bincount(symbols(data), minlength=VOCAB**order).double().view(-1, VOCAB) + 1.0
    return round(-(counts / counts.sum(-1, keepdim=True)).log2().flatten()[symbols(held_out)].mean().item(), 4)


def load_saved(folder: Path, device: torch.device) -> Any:
    """Load the saved model: in bfloat16 for a GPU, in float32 for a CPU, on which bfloat16 can be very slow."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device).eval()


@torch.inference_mode()
def evaluate(folder: Path, held_out: Tensor, seq: int) -> dict[str, Any]:
    """Measure the saved model on the held-out bytes.

    Returns:
        Bits/byte over windows of `seq` bytes without overlap, and per layer: the share of exact zeros, the non-zeros of
        a row (token), the fullest 256-column tile, and how unequally the neurons fire.
    """
    model = load_saved(folder, held_out.device)
    tap, nats, scored = GateTap(model), 0.0, 0
    layers = range(model.config.num_hidden_layers)
    rows: list[list[Tensor]] = [[] for _ in layers]
    fired = [torch.zeros(model.config.intermediate_size, device=held_out.device) for _ in layers]
    tile_max = [0 for _ in layers]
    # Windows share one byte, so that each byte is predicted once; the incomplete last one is dropped.
    for windows in torch.split(held_out.unfold(0, seq + 1, seq), EVAL_ROWS):
        nats += next_byte_loss(model, windows.long(), reduction="sum").item()
        scored += windows[:, 1:].numel()
        for i, gate in tap.gates.items():
            active = gate.flatten(0, 1) != 0
            rows[i].append(active.sum(-1).cpu())
            fired[i] += active.sum(0)
            tile_max[i] = max(tile_max[i], int(active.view(active.shape[0], -1, TILE).sum(-1).max()))

    def describe(i: int) -> dict[str, Any]:
        row, by_use = torch.cat(rows[i]).sort().values, fired[i].sort(descending=True).values
        return {
            "sparsity": round(1.0 - row.double().mean().item() / by_use.numel(), 5),
            "nonzeros_per_row_mean": round(row.double().mean().item(), 2),
            "nonzeros_per_row_p50_p99_max": [int(row[int(q * (row.numel() - 1))]) for q in (0.5, 0.99, 1.0)],
            "nonzeros_per_tile_max": tile_max[i],
            "neurons_never_active": int((by_use == 0).sum()),
            "share_of_busiest_tenth": round((by_use[: by_use.numel() // 10].sum() / by_use.sum()).item(), 4),
        }

    return {
        "bits_per_byte": round(nats / scored / math.log(2), 4),
        "bytes_scored": scored,
        "layers": [describe(i) for i in layers],
    }


def save(model: transformers.LlamaForCausalLM, folder: Path) -> None:
    """Write the bfloat16 model into `folder`, each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        model.bfloat16().save_pretrained(temporary)
        for file in sorted(temporary.iterdir()):
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(temporary)


def sample(folder: Path, device: torch.device, prompt: bytes, length: int = 300) -> str:
    """Return `prompt` continued by the saved model."""
    model = load_saved(folder, device)
    ids = torch.tensor([list(b"\0" + prompt)], device=device)
    out = model.generate(ids, max_new_tokens=length, do_sample=True, temperature=0.8, top_k=0, pad_token_id=0)
    return bytes(out[0, 1:].tolist()).decode("utf-8", errors="replace")


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=4000, help="Optimizer steps; 0 only measures the model in --output.")
@click.option("--batch", default=32, help="Windows a step.")
@click.option("--seq", default=1024, help="Bytes a window.")
@click.option("--l1", default=1e-3, help="Weight of the penalty; 0 trains the same model without it.")
@click.option("--lr", default=3e-3, help="Peak learning rate.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=Path(__file__).parent)
@click.option("--seed", default=0)
@click.option(
    "--eval-bytes", type=int, help="How many of the held-out bytes to measure on, from the first one; all by default."
)
def main(
    steps: int, batch: int, seq: int, l1: float, lr: float, device: str, output: Path, seed: int, eval_bytes: int | None
) -> None:
    """Train the byte-level example model on the standard library's sources, then measure it on held-out files."""
    torch.manual_seed(seed)
    data, held_out, corpus = load_corpus(Path(sysconfig.get_path("stdlib")))
    click.echo(json.dumps(corpus))
    begin = time.perf_counter()
    if steps:
        model = make_model()
        nn.Module.to(model, device)
        train(model, data.to(device), steps, batch, seq, l1, lr)
        save(model, output)
    seconds = time.perf_counter() - begin
    report = {
        "machine": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "corpus": corpus,
        "recipe": {
            "steps": steps,
            "batch": batch,
            "seq": seq,
            "l1": l1,
            "lr": lr,
            "seed": seed,
            "seconds": round(seconds),
        },
        "baselines_bits_per_byte": {n: ngram_bits(data, held_out, k) for k, n in ((1, "unigram"), (2, "bigram"))},
        "held_out": evaluate(output, held_out[:eval_bytes].to(device), seq),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(each)}" for name, each in report.items()]
    text = ",\n".join(lines).join(("{\n", "\n}\n"))
    click.echo(text)
    if steps:
        partial = output / ".metrics.json.part"
        partial.write_text(text)
        partial.replace(output / "metrics.json")
    click.echo(sample(output, torch.device(device), b'"""'))


if __name__ == "__main__":
    main()
