"""Train real models by the kernels, and compare them with dense torch: three proofs.

python benchmarks/train_proof.py --part curves --json curves.json
python benchmarks/train_proof.py --smoke --device cpu

curves     the model of examples/bytelm, by dense torch from two seeds and by twell from the first of them: are the two
           losses of one seed as near to each other as those of two seeds are, and as many neurons active?
fine-tune  a SiLU model of 4 layers of 2048 / 5632 is trained, then `sparsify` and an L1 term make it sparse: density,
           loss on held-out text and speed before and after
dead       a ReLU model of that size, with and without `reinitialise_dead`: dead neurons, density and loss

Each part takes about --seconds of training: as many steps as fit, of which all runs of a part take equally many. The
loss of dense and twell is the same: entropy in nats a byte, and the L1 term on the sum of |h|. Evaluation is dense
torch, for all of them. With --json, curves are drawn beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import harness
import torch
import transformers
from harness import Columns, field, head, row_of
from torch import Tensor, nn
from trained import SMOKE, Penalised, Recipe, dense_blocks, dense_term, draw_windows, load_corpus, make_model
from transformers.models.llama.modeling_llama import LlamaMLP

import twellc
from twellc.benchmarking.forms import compile_rival
from twellc.benchmarking.timing import time_calls
from twellc.training import Blend, L1Penalty, reinitialise_dead, sparsify, take_counts
from twellc.training.counts import Fired

PARTS = ("curves", "fine-tune", "dead")
_TRIED_STEPS = 12  # to see how long one takes
_FEWEST_STEPS = 20
_CORPUS_BYTES = 120_000_000
_SMOOTHED = 50  # steps
_HELD_OUT_WINDOWS = 8
_WARM_UP = 0.05  # of the learning rate, as a share of the steps
_L1_WARM_UP = 0.25


@dataclasses.dataclass(frozen=True)
class Run:
    """How a model is trained.

    Attributes:
        name: What to call it.
        steps: Steps of the optimizer.
        seed: Of the batches, and of what dead neurons are moved towards.
        rate: Peak learning rate.
        l1: Coefficient of the L1 term.
        twell: Whether by the kernels.
        reinitialise: Whether dead neurons are brought back after each step.
        blend: How activations become ReLU.
    """

    name: str
    steps: int
    seed: int = 0
    rate: float = 6e-4
    l1: float = 2e-5
    twell: bool = True
    reinitialise: bool = False
    blend: Blend | None = None


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to train on and to measure on, uint8 on the device, and how windows are drawn from them."""

    train: Tensor
    held_out: Tensor
    recipe: Recipe


# ---- training ----


def entropy_of(model: Any, windows: Tensor) -> Tensor:
    """Return the cross-entropy in nats of the next byte of windows [batch, tokens + 1]."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def train(model: Any, corpus: Corpus, run: Run, note: Callable[[int, str], None] | None = None) -> dict[str, Any]:
    """Train a model in place, under autocast to bfloat16; return losses of all steps, and what was counted."""
    penalty: L1Penalty | None = None
    if run.twell:
        twellc.optimize(model, training=True)
        penalty = L1Penalty(model, run.l1, warm_up=round(_L1_WARM_UP * run.steps))
    else:
        dense_blocks(model, Penalised)
    groups = [
        {"params": [each for each in model.parameters() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in model.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]
    on_gpu = corpus.train.is_cuda
    optimizer = torch.optim.AdamW(groups, lr=run.rate, betas=(0.9, 0.95), fused=on_gpu)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1, (step + 1) / (_WARM_UP * run.steps + 1)) * (0.5 + 0.5 * math.cos(math.pi * step / run.steps))
        ),
    )
    if on_gpu:
        for layer in model.model.layers:
            if run.twell:
                layer.compile(dynamic=False)  # blocks in training stay outside of graphs
            else:
                layer._compiled_call_impl = compile_rival(layer._call_impl)
    model.train()
    losses, terms, seen, began = [], [], [], time.monotonic()
    window: dict[str, Fired] | None = None
    with torch.random.fork_rng(devices=[corpus.train.device] if on_gpu else []):
        torch.manual_seed(run.seed)
        for step in range(run.steps):
            if run.blend is not None:
                run.blend.set_step(step)
            with torch.autocast(corpus.train.device.type, dtype=torch.bfloat16):
                loss = entropy_of(model, draw_windows(corpus.train, corpus.recipe))
            if penalty is not None:
                term = penalty(step)
                assert penalty.value is not None
                value = penalty.value
            else:
                value = dense_term(model)
                term = value * run.l1 * min(1.0, (step + 1) / (round(_L1_WARM_UP * run.steps) + 1))
            terms.append(value.detach())
            torch.autograd.backward(loss + term)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            losses.append(loss.detach())
            last = step == run.steps - 1
            if run.twell and (run.reinitialise or last or (step + 1) % max(1, run.steps // 20) == 0):
                fired = take_counts(model)
                if run.reinitialise:
                    reinitialise_dead(model, fired, step=step, seed=run.seed)
                window = fired if window is None else {path: window[path].plus(each) for path, each in fired.items()}
                if last or (step + 1) % max(1, run.steps // 20) == 0:
                    seen.append({"step": step + 1, **shares(window)})
                    window = None
                    if note is not None:
                        note(step + 1, f"{float(losses[-1]) / math.log(2):.3f} bits a byte, {words(seen[-1])}")
    found = torch.stack(losses).tolist()  # waits
    seconds = time.monotonic() - began
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    twellc.restore(model)
    dense_blocks(model, LlamaMLP)
    return {
        **dataclasses.asdict(dataclasses.replace(run, blend=None)),
        "blended_over": 0 if run.blend is None else run.blend.steps,
        "seconds": seconds,
        "tokens": run.steps * corpus.recipe.batch * corpus.recipe.window,
        "bits": [each / math.log(2) for each in found],
        "l1_term": torch.stack(terms).tolist(),
        "seen": seen,
    }


def shares(fired: dict[str, Fired]) -> dict[str, list[float]]:
    """Return density and dead neurons of each block."""
    return {
        "density": [float(each.density) for each in fired.values()],
        "dead": [float(each.dead.double().mean()) for each in fired.values()],
    }


def words(seen: dict[str, Any]) -> str:
    """Say density and dead neurons of each block."""
    density, dead = (" ".join(f"{share:.2%}" for share in seen[key]) for key in ("density", "dead"))
    return f"density {density}, dead {dead}"


@torch.no_grad()
def evaluate(model: Any, corpus: Corpus) -> dict[str, Any]:
    """Measure a model on held-out windows, the same for all: bits a byte, and which gates are active, densely."""
    counts = [torch.zeros(model.config.intermediate_size, device=corpus.train.device) for _ in model.model.layers]
    hooks = [
        layer.mlp.act_fn.register_forward_hook(functools.partial(_count_active, at))
        for layer, at in zip(model.model.layers, counts, strict=True)
    ]
    model.eval()
    generator = torch.Generator(corpus.held_out.device).manual_seed(5)
    nats = torch.zeros((), device=corpus.held_out.device)
    recipe = corpus.recipe
    for _ in range(_HELD_OUT_WINDOWS):
        with torch.autocast(corpus.train.device.type, dtype=torch.bfloat16):
            nats += entropy_of(model, draw_windows(corpus.held_out, recipe, generator))
    for hook in hooks:
        hook.remove()
    model.train()
    tokens = _HELD_OUT_WINDOWS * recipe.batch * recipe.window
    return {
        "bits": float(nats) / _HELD_OUT_WINDOWS / math.log(2),
        "density": [float(each.sum()) / tokens / len(each) for each in counts],
        "dead": [float((each == 0).double().mean()) for each in counts],
    }


def _count_active(counts: Tensor, _module: nn.Module, _arguments: Any, g: Tensor) -> None:
    """Count active gates in a forward hook, which returns nothing: what it returned would be the result."""
    counts += (g != 0).sum((0, 1))


def steps_in(seconds: float, tries: Sequence[Callable[[int], float]]) -> int:
    """Return how many steps all of some trainings, which return their seconds, can take in `seconds` together."""
    taken, tried = 0.0, 1 if harness.is_smoke() else _TRIED_STEPS
    for attempt in tries:
        attempt(2)
        taken += attempt(tried) / tried
    return max(4 if harness.is_smoke() else _FEWEST_STEPS, int(seconds / taken))


# ---- the parts ----


def curves(seconds: float, device: str, _: Path | None, add: Callable[..., None]) -> None:
    """Train the model of examples/bytelm densely from two seeds, and by twell from the first of them."""
    bytelm = _bytelm()
    train_bytes, held_out, _record = bytelm.load_corpus(Path(sysconfig.get_path("stdlib")))
    small = dataclasses.replace(Recipe(), batch=32, window=1024)
    recipe = dataclasses.replace(small, batch=2, window=64) if harness.is_smoke() else small
    corpus = Corpus(train_bytes.to(device), held_out.to(device), recipe)

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return nn.Module.to(bytelm.make_model(), device)

    kinds = (("dense, seed 0", False, 0), ("dense, seed 1", False, 1), ("twell, seed 0", True, 0))

    def run(name: str, steps: int, seed: int, twell: bool) -> Run:
        return Run(name, steps, seed, rate=3e-3, l1=1e-3, twell=twell)

    def attempt(twell: bool, steps: int) -> float:
        return float(train(made(0), corpus, run("", steps, 0, twell))["seconds"])

    steps = steps_in(seconds, [functools.partial(attempt, twell) for _, twell, _ in kinds])
    for name, twell, seed in kinds:
        model = made(seed)
        found = train(model, corpus, run(name, steps, seed, twell))
        add({"part": "curves", **found, "held_out": evaluate(model, corpus)})


def fine_tune(seconds: float, device: str, out: Path | None, add: Callable[..., None]) -> None:
    """Train a SiLU model, then make it sparse."""
    corpus = _corpus(device)
    torch.manual_seed(0)
    model = _silu(corpus.recipe).to(device)
    trial = functools.partial(_trial, device=device, corpus=corpus)
    steps = steps_in(seconds / 3, [lambda n: trial(n, relu=False, twell=False)])
    found = train(model, corpus, Run("SiLU, dense", steps, l1=0.0, twell=False), _note)
    _keep(model, out, "silu")
    add({"part": "fine-tune", **found, "held_out": evaluate(model, corpus)}, functools.partial(_timed, model, corpus))
    steps = steps_in(seconds * 2 / 3, [lambda n: trial(n, relu=True, twell=True)])
    blend = sparsify(model, steps=steps // 10)
    found = train(model, corpus, Run("ReLU, twell", steps, rate=3e-4, l1=1e-4, blend=blend), _note)
    _keep(model, out, "relu")
    add({"part": "fine-tune", **found, "held_out": evaluate(model, corpus)}, functools.partial(_timed, model, corpus))


def dead(seconds: float, device: str, _: Path | None, add: Callable[..., None]) -> None:
    """Train a wide ReLU model with and without bringing dead neurons back."""
    corpus = _corpus(device)
    steps = steps_in(seconds / 2, [functools.partial(_trial, device=device, corpus=corpus, relu=True, twell=True)])
    for name, reinitialise in (("without", False), ("with reinitialise_dead", True)):
        torch.manual_seed(0)
        model = make_model(corpus.recipe).to(device)
        found = train(model, corpus, Run(name, steps, reinitialise=reinitialise), _note)
        add({"part": "dead", **found, "held_out": evaluate(model, corpus)})


def _trial(steps: int, *, device: str, corpus: Corpus, relu: bool, twell: bool) -> float:
    model = (make_model if relu else _silu)(corpus.recipe).to(device)
    return float(train(model, corpus, Run("", steps, twell=twell))["seconds"])


def _silu(recipe: Recipe) -> Any:
    model = make_model(recipe)
    config = transformers.LlamaConfig(**{**model.config.to_dict(), "hidden_act": "silu"})
    made: Any = transformers.LlamaForCausalLM(config)
    made.load_state_dict(model.state_dict())
    return made


def _corpus(device: str) -> Corpus:
    recipe = SMOKE if harness.is_smoke() else dataclasses.replace(Recipe(), corpus_bytes=_CORPUS_BYTES)
    train_bytes, held_out = (
        torch.frombuffer(bytearray(part), dtype=torch.uint8).to(device) for part in load_corpus(recipe.corpus_bytes)
    )
    return Corpus(train_bytes, held_out, recipe)


def _bytelm() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples" / "bytelm" / "train.py"
    spec = importlib.util.spec_from_file_location("bytelm_train", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _note(step: int, text: str) -> None:
    click.echo(f"step {step}: {text}", err=True)


def _keep(model: Any, out: Path | None, name: str) -> None:
    if out is not None:
        model.save_pretrained(out / name)


@torch.no_grad()
def _timed(model: Any, corpus: Corpus) -> dict[str, Any]:
    """Time a forward of the model in bfloat16 over its batch: compiled dense torch, and by `twellc.optimize`."""
    if not corpus.train.is_cuda:
        return {}
    half = type(model)(model.config).to(corpus.train.device, torch.bfloat16).eval()
    half.load_state_dict(model.state_dict())
    ids = draw_windows(corpus.held_out, corpus.recipe)[:, :-1]
    calls = {}
    for name in ("dense", "twell"):
        if name == "twell":
            if model.config.hidden_act != "relu":
                continue
            half = twellc.optimize(copy.deepcopy(half))
        compiled = compile_rival(functools.partial(half, use_cache=False))
        calls[name] = functools.partial(compiled, input_ids=ids)
    times = time_calls(list(calls.values()), 8)
    return {"forward_us": {name: each.median_us for name, each in zip(calls, times, strict=True)}}


# ---- what came out ----


def smoothed(values: Sequence[float]) -> list[float]:
    """Return means over `_SMOOTHED` steps each."""
    width = min(_SMOOTHED, len(values))
    return [sum(values[at : at + width]) / width for at in range(0, len(values) - width + 1, width)]


def spread(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how far two smoothed curves are from each other, as the mean of the absolute differences."""
    pairs = list(zip(smoothed(one), smoothed(other), strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def verdict(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the curves say; None before all are there."""
    runs = {each["name"]: each for each in results if each["part"] == "curves"}
    if len(runs) < 3:
        return None
    one, other, ours = (runs[name] for name in ("dense, seed 0", "dense, seed 1", "twell, seed 0"))
    of_seeds, of_twell = spread(one["bits"], other["bits"]), spread(one["bits"], ours["bits"])
    densities = [sum(each["held_out"]["density"]) / len(each["held_out"]["density"]) for each in (one, other, ours)]
    return {
        "bits_apart_two_seeds": of_seeds,
        "bits_apart_twell": of_twell,
        "within": of_twell <= of_seeds,
        "mean_density": dict(zip(runs, densities, strict=True)),
    }


def _shares(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda result: " ".join(f"{share:.2%}" for share in result["held_out"][key])


def _forward(result: dict[str, Any]) -> str:
    return ", ".join(f"{name} {us / 1e3:.2f} ms" for name, us in result.get("forward_us", {}).items()) or "-"


COLUMNS: Columns = {
    "run": lambda result: f"{result['part']}: {result['name']}",
    "steps": field("steps"),
    "s": field("seconds", ".0f"),
    "tokens/s": lambda result: f"{result['tokens'] / result['seconds']:.0f}",
    "bits a byte": lambda result: f"{smoothed(result['bits'])[-1]:.4f}",
    "held out": lambda result: f"{result['held_out']['bits']:.4f}",
    "density": _shares("density"),
    "never active": _shares("dead"),
    "forward": _forward,
}


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the losses of each part, smoothed."""
    from matplotlib.figure import Figure

    parts = list(dict.fromkeys(each["part"] for each in results))
    figure = Figure(figsize=(5 * len(parts), 4), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        for each in results:
            if each["part"] == part:
                values = smoothed(each["bits"])
                steps = [(at + 1) * min(_SMOOTHED, len(each["bits"])) for at in range(len(values))]
                axes.plot(steps, values, label=each["name"], linewidth=1.3)
        axes.set(title=part, xlabel="steps", ylabel="bits a byte, training")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(path)


_PART = dict(zip(PARTS, (curves, fine_tune, dead), strict=True))


@click.command(help=__doc__)
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, show_default=True)
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=75.0, show_default=True, help="Of each part."
)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep the models of fine-tune here.")
@harness.json_option
@harness.smoke_option(seconds=0.5)
def main(parts: tuple[str, ...], seconds: float, device: str, out: Path | None, json_path: Path | None) -> None:
    """Train models, and print a Markdown table of what came out."""
    if device == "cuda":
        harness.refuse_without_gpu()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # of a layer: each kind of block, and each model
    report = harness.new_report()
    machine = report["machine"]
    click.echo(f"{machine['gpu']}, torch {machine['torch']}, commit {machine['commit']}\n")
    click.echo(head(list(COLUMNS)))

    def add(result: dict[str, Any], more: Callable[[], dict[str, Any]] = dict) -> None:
        report["results"].append(result)
        report["curves"] = verdict(report["results"])
        harness.write_results(json_path, report)
        result.update(more())  # takes long: what there is has been written
        harness.write_results(json_path, report)
        click.echo(row_of(COLUMNS, result))

    for part in parts:
        _PART[part](seconds, device, out, add)
    if report["curves"] is not None:
        found = report["curves"]
        click.echo(
            f"\nmean distance of smoothed curves: two dense seeds {found['bits_apart_two_seeds']:.4f} bits a byte, "
            f"twell and dense {found['bits_apart_twell']:.4f}"
        )
    if json_path is not None and importlib.util.find_spec("matplotlib") is not None:
        draw(report["results"], json_path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
