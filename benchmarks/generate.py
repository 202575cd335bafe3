"""Time a whole ReLU Llama that answers: prefill, and steps with a key-value cache, by twellc and dense.

python benchmarks/generate.py --json results.json
python benchmarks/generate.py --only decode-8 --json decode-8.json
python benchmarks/generate.py --smoke

The model is that of model.py, 1.5 billion parameters, and every contestant keeps its keys and values in a static
cache, and attends to it by lengths. A step is one new token of each sequence in the last place of a full cache, the
greedy choice included, as a CUDA graph. Contestants are the dense model (`dense_rivals.py`), eager, compiled, and
compiled with gate and up in one product; that with blocks in FP8 and in INT4, and with all linear layers but the
logits' in FP8; the program that `twellc.LLM` runs, eager and compiled, and with weights in
FP8; and with --plans a dense plan of `twellc compile --kv-cache`, and rewritten ones, of blocks alone and of
linear layers, too, in bf16 and in FP8, which need full TensorRT. All take turns, in a new order in each
repetition. Before that, the logits of each are compared with float64. Plans that are in the folder
already are used again, so that building and timing may be two calls.

By the contestants of twellc a whole answer is decoded, too, which gives tokens a second as a user has them, and the gap
that the host leaves between two steps.

The parts are prefill and decode-N for each number of sequences; each takes minutes, most of which torch.compile does.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import session
import torch
import transformers
from dense_rivals import DenseBackend
from model import CAUSAL, Logits, causal_attention, gate_density, make_model
from tables import table
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from twellc.base.errors import first_line
from twellc.benchmarking.contest import Contest
from twellc.benchmarking.forms import (
    BASELINES,
    COMPILED,
    EAGER,
    FP8,
    INT4,
    LOSSY,
    PACKED,
    Block,
    DenseFp8,
    DenseFp8Linear,
    DenseFp8Rows,
    Int4,
    Packed,
    takes_fp8,
    takes_int4,
)
from twellc.benchmarking.plans import PLAN_DENSE, PLAN_TWELL
from twellc.benchmarking.result import TWELL_COMPILED, TWELL_EAGER
from twellc.generation.backend import Backend
from twellc.generation.choice import Prompt
from twellc.generation.directory import load_directory
from twellc.generation.plan import load_plan
from twellc.generation.steps import Decoder
from twellc.options.commands import LLMOptions

FP8_LINEAR = f"{FP8} all linear"
TWELL_COMPILED_FP8, PLAN_TWELL_FP8 = f"{TWELL_COMPILED} FP8", f"{PLAN_TWELL} FP8"
PLAN_LINEAR, PLAN_LINEAR_FP8 = f"{PLAN_TWELL} linear", f"{PLAN_TWELL} linear FP8"
# Where these stand among the contestants, the first one is the yardstick of errors.
LABELS = (
    *(EAGER, COMPILED, PACKED, FP8, FP8_LINEAR, INT4),
    *(TWELL_EAGER, TWELL_COMPILED, TWELL_COMPILED_FP8),
    *(PLAN_DENSE, PLAN_TWELL, PLAN_TWELL_FP8, PLAN_LINEAR, PLAN_LINEAR_FP8),
)
# More than the model's dtype does.
_ROUNDED = (*LOSSY, FP8_LINEAR, TWELL_COMPILED_FP8, PLAN_TWELL_FP8, PLAN_LINEAR_FP8)
# Options of twellc compile.
_PLANS = {
    PLAN_DENSE: ("--layers", "none", "--linear", "tensorrt"),
    PLAN_TWELL: ("--layers", "all", "--linear", "tensorrt"),
    PLAN_TWELL_FP8: ("--layers", "all", "--linear", "tensorrt", "--weights", "fp8:blocks"),
    PLAN_LINEAR: ("--layers", "all", "--linear", "twell"),
    PLAN_LINEAR_FP8: ("--layers", "all", "--linear", "twell", "--weights", "fp8"),
}
_CHECKED_ROWS = 2
_COUNTED = (4, 512)  # sequences and tokens in which active neurons are counted
_PROMPT, _ANSWER = 64, 96
# What `twellc.LLM` runs: whether it is compiled, and its weights.
_PROGRAMS = {TWELL_EAGER: (False, "keep"), TWELL_COMPILED: (True, "keep"), TWELL_COMPILED_FP8: (True, "fp8")}


class _Form(nn.Module):
    """A dense form of a block, or of linear layers, in the place of a model's own."""

    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        """Compute y [..., out] of x [..., in]."""
        return self.form(x)


def with_forms(model: Any, make: Callable[[Block, Tensor], Callable[[Tensor], Tensor]], ids: Tensor) -> Any:
    """Return the model with other forms of its blocks, which share its weights where they can.

    Args:
        model: The dense model.
        make: Makes a form of a block, and of what it reads for `ids`.
        ids: Token ids [batch, tokens].
    """
    read: dict[int, Tensor] = {}
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs, number=number: read.update({number: inputs[0]}))
        for number, layer in enumerate(model.model.layers)
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    changed = _copy_of(model)
    for number, layer in enumerate(changed.model.layers):
        layer.mlp = _Form(make(_block_of(layer), read[number]))
    return changed


def with_fp8_linears(model: Any) -> Any:
    """Return the model with the linear layers of all its layers in FP8.

    Queries, keys and values are one product, which comes behind the norm, so that attention gets its result and takes
    parts of it; gate and up are another.
    """
    changed = _copy_of(model)
    for layer in changed.model.layers:
        attention, begin = layer.self_attn, 0
        parts = {name: getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")}
        joined = DenseFp8Linear(torch.cat(list(parts.values())))
        layer.input_layernorm = nn.Sequential(layer.input_layernorm, _Form(joined))
        for name, weight in parts.items():
            setattr(attention, name, _Form(functools.partial(torch.narrow, dim=-1, start=begin, length=len(weight))))
            begin += len(weight)
        attention.o_proj = _Form(DenseFp8Linear(attention.o_proj.weight))
        layer.mlp = _Form(DenseFp8Rows(_block_of(layer)))
    return changed


def _copy_of(model: Any) -> Any:
    """Return a copy that shares all tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _block_of(layer: Any) -> Block:
    return Block(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight, layer.mlp.down_proj.weight)


def make_contestants(model: Any, cache: int, labels: set[str], prefill: bool) -> dict[str, Callable[[], Backend]]:
    """Return functions that make backends of the model, by name: each takes memory, so one is made at a time."""
    calibration = torch.randint(0, model.config.vocab_size, (4, 256), device=session.DEVICE)

    def backend(changed: Callable[[], Any], label: str) -> Backend:
        compiled = label != EAGER
        return DenseBackend(changed(), label, cache, compiled and not prefill, compiled and prefill)

    made: dict[str, Callable[[], Any]] = {
        EAGER: lambda: model,
        COMPILED: lambda: model,
        PACKED: lambda: with_forms(model, lambda block, _: Packed(block), calibration),
    }
    block = _block_of(model.model.layers[0])
    if takes_fp8(block):
        made[FP8] = lambda: with_forms(model, DenseFp8, calibration)
        made[FP8_LINEAR] = lambda: with_fp8_linears(model)
    if takes_int4(block):
        made[INT4] = lambda: with_forms(model, lambda block, _: Int4(block), calibration)
    backends: dict[str, Callable[[], Backend]] = {}
    for label in (each for each in LABELS if each in labels):
        if label in made:
            backends[label] = functools.partial(backend, made[label], label)
        elif label in _PROGRAMS:
            backends[label] = functools.partial(_program, model, cache, *_PROGRAMS[label])
    return backends


def _program(model: Any, cache: int, compiled: bool, weights: str) -> Backend:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = LLMOptions(
            device=session.DEVICE, max_model_len=cache, compiled=compiled, layers="all", weights=weights
        )
        return load_directory(Path(folder), options)[0]


def _open_plan(path: Path) -> Backend:
    return load_plan(path)[0]


def build_plans(
    model: Any, folder: Path, wanted: dict[str, list[str]], labels: set[str]
) -> tuple[dict[str, dict[str, Path]], dict[str, str]]:
    """Build the plans that are not there yet.

    Args:
        model: The dense model.
        folder: Where they stand.
        wanted: Options of `twellc compile`, by the kind of setting that they are for.
        labels: Contestants that take part.

    Returns:
        The plans by kind of setting and contestant, and why others could not be built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plans: dict[str, dict[str, Path]] = {kind: {} for kind in wanted}
    failed = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, options in wanted.items():
            for label in (label for label in _PLANS if label in labels):
                path = folder / f"{kind}-{label.removeprefix('plan ').replace(' ', '-')}.plan"
                if not path.exists():
                    source = Path(scratch) / "model"
                    if not source.exists():
                        model.save_pretrained(source)
                    click.echo(f"building {path.name}", err=True)
                    # -P keeps unbuilt sources in the working directory off the module path.
                    command = [sys.executable, "-P", "-m", "twellc", "compile", str(source), "-o", str(path)]
                    command += ["--backend", "tensorrt", *_PLANS[label], *options]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode:
                        failed[f"{kind}, {label}"] = f"twellc compile: status {done.returncode}: {done.stderr[-600:]}"
                        continue
                plans[kind][label] = path
    return plans, failed


def truth_of(model: Any, ids: Tensor) -> Tensor:
    """Return the logits behind the first rows of `ids` in float64, [rows, vocabulary]."""
    wide = copy.deepcopy(model).double()
    logits: Tensor = wide(input_ids=ids[:_CHECKED_ROWS], use_cache=False, logits_to_keep=1).logits
    return logits[:, -1]


def whole_answer(backend: Backend, ids: Tensor) -> dict[str, Any]:
    """Decode an answer greedily, as `twellc generate` does, twice; return the statistics of the second time."""
    decoder = Decoder(backend)
    for _ in range(2):
        rows = ids[:, :_PROMPT].cpu()
        answer = min(_ANSWER, backend.longest - rows.shape[1])
        processors, criteria = LogitsProcessorList(), StoppingCriteriaList()
        for _step in decoder.steps([Prompt(row[None], processors, criteria, frozenset(), answer) for row in rows]):
            pass
    return decoder.stats.to_json()


def measure(
    name: str, model: Any, contestants: dict[str, Callable[[], Backend]], ids: Tensor, prefill: bool, repeats: int
) -> Iterator[dict[str, Any]]:
    """Check and time all contestants in one setting; yield the result, and the same one again with whole answers."""
    contest = Contest(truth_of(model, ids), lambda logits: logits[:_CHECKED_ROWS].clone(), language_model=True)
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()  # or it would compile for several settings at once
    left = torch._dynamo.utils.counters["graph_break"]  # why, and how often: then torch went on eagerly
    left.clear()
    answers: dict[str, Any] = {}
    for label, make in contestants.items():
        click.echo(f"{name}: {label}", err=True)
        try:
            backend = make()
            backend.begin(len(ids), ids.shape[1])
            call = functools.partial(_prefill if prefill else _step, backend, ids)
            if not prefill:
                _fill(backend, ids[:, :-1])
        except Exception as error:  # whatever it is, the others go on
            contest.failed[label] = f"{type(error).__name__}: {first_line(error)}"
            continue
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            contest.add(label, call(), backend, lossy=label in _ROUNDED)
        if left:
            raise click.ClickException(
                f"{name}: {label}: torch.compile left its graph: {next(iter(left)).splitlines()[0]}"
            )
        if label in contest and not prefill and "twell" in label:
            answers[label] = functools.partial(whole_answer, backend, ids)
    times = {label: each.to_json() for label, each in contest.time(repeats).items()}
    result: dict[str, Any] = {
        "setting": name,
        "tokens": ids.numel() if prefill else len(ids),
        "errors": contest.errors,
        "times": times,
        "answers": {},
        "failed": contest.failed,
    }
    yield result
    # Behind the others: it overwrites the caches.
    for label, answer in answers.items():
        result["answers"][label] = answer()
    yield result


def _prefill(backend: Backend, ids: Tensor) -> Callable[[], Tensor]:
    return lambda: _fill(backend, ids)


def _fill(backend: Backend, ids: Tensor) -> Tensor:
    """Put tokens into the cache; return the logits behind the last ones."""
    starts = range(0, ids.shape[1], backend.chunk)
    return [backend.fill(ids[:, start : start + backend.chunk], start) for start in starts][-1]


def _step(backend: Backend, ids: Tensor) -> Callable[[], Tensor]:
    """Return a step at the last place of the cache: what it returns are the logits."""
    tokens, places = ids[:, -1].clone(), torch.full((len(ids),), ids.shape[1] - 1, device=ids.device)
    chosen = torch.zeros_like(tokens)

    def call() -> Tensor:
        logits = backend.decode(tokens, places).float()
        chosen.copy_(logits.argmax(-1))
        return logits

    return call


def page_of(report: dict[str, Any]) -> str:
    """Write a report's tables as Markdown."""
    results = {result["setting"]: result for result in report["results"]}
    labels = list(dict.fromkeys(label for result in results.values() for label in result["times"]))
    rows = [[label, *(_milliseconds(each["times"].get(label)) for each in results.values())] for label in labels]
    blocks = [
        f"{report['machine']}\n\n{report['parameters'] / 1e9:.2f} billion parameters; gates: {report['density']}; "
        f"{report['arguments']}"
    ]
    blocks.append("Milliseconds, median:\n\n" + table(["", *results], rows))
    rivals: dict[str, tuple[str, ...]] = {"the fastest dense form in bf16": BASELINES}
    rivals |= {FP8: (FP8,), FP8_LINEAR: (FP8_LINEAR,), INT4: (INT4,), "the dense plan": (PLAN_DENSE,)}
    rows = []
    for ours in (label for label in labels if "twell" in label):
        for name, theirs in rivals.items():
            cells = [_speed_up(each["times"], ours, theirs) for each in results.values()]
            rows += [[f"{ours} over {name}", *cells]] if any(cell != "-" for cell in cells) else []
    blocks.append("Speed-up:\n\n" + table(["", *results], rows))
    rows = [
        [setting, label, f"{each['decode_tokens_per_second']:.0f}", f"{each['gap_us']:.1f}", f"{each['gap_share']:.2%}"]
        for setting, result in results.items()
        for label, each in result["answers"].items()
    ]
    if rows:
        head = ["setting", "", "tokens a second", "gap between steps, us", "its share"]
        blocks.append(f"Answers of {_ANSWER} tokens:\n\n" + table(head, rows))
    failed = {f"{setting}, {label}": why for setting, each in results.items() for label, why in each["failed"].items()}
    blocks += [f"{label} failed: {why}" for label, why in failed.items()]
    blocks += [f"{label} failed: {why}" for label, why in report.get("failed", {}).items()]
    return "\n\n".join(blocks) + "\n"


def _milliseconds(times: dict[str, float] | None) -> str:
    return f"{times['median_us'] / 1e3:.3f}" if times else "-"


def _speed_up(times: dict[str, Any], ours: str, theirs: tuple[str, ...]) -> str:
    known = [times[label]["median_us"] for label in theirs if label in times]
    return f"{min(known) / times[ours]['median_us']:.2f}" if known and ours in times else "-"


@click.command()
@click.option("--prefill", default="8x2048", show_default=True, help="Sequences and tokens a sequence; empty: none.")
@click.option("--decode", default="1,8,32", show_default=True, help="Sequences to decode at once; empty: none.")
@click.option("--cache", default=1024, show_default=True, help="Tokens in the key-value cache, the new one included.")
@click.option("--only", default="", metavar="PART,…", help="Measure these parts alone: prefill, decode-8, …")
@click.option("--contestants", default=",".join(LABELS), show_default=True, help="Names of those that take part.")
@click.option("--plans", type=click.Path(file_okay=False, path_type=Path), help="Where plans are, or are built.")
@click.option("--layers", default=28, show_default=True)
@click.option("--d-model", default=2048, show_default=True)
@click.option("--d-ff", default=5632, show_default=True)
@click.option("--density", default=0.005, show_default=True, help="Share of non-zero gate activations, at layer 0.")
@click.option("--repeats", default=20, show_default=True)
@click.option("--seed", default=0, show_default=True)
@session.json_option
@session.smoke_option(prefill="2x64", decode="2", cache=128, layers=2, d_model=256, d_ff=768, repeats=2)
@torch.no_grad()
def main(
    prefill: str,
    decode: str,
    cache: int,
    only: str,
    contestants: str,
    plans: Path | None,
    layers: int,
    d_model: int,
    d_ff: int,
    density: float,
    repeats: int,
    seed: int,
    json_path: Path | None,
) -> None:
    """Print Markdown tables: milliseconds a step, speed-ups, tokens a second."""
    session.refuse_without_gpu()
    torch.manual_seed(seed)
    random.seed(seed)
    transformers.AttentionInterface.register(CAUSAL, causal_attention)  # as make_model wants it
    model = make_model(layers, d_model, d_ff, density, "equal")
    model.set_attn_implementation("sdpa")
    parts: dict[str, tuple[int, int]] = {}
    if prefill:
        batch, length = map(int, prefill.split("x"))
        parts["prefill"] = batch, length
    parts |= {f"decode-{count}": (int(count), cache) for count in decode.split(",") if count}
    chosen = [part for part in only.split(",") if part] or list(parts)
    unknown = sorted(set(chosen) - set(parts)) + sorted(set(contestants.split(",")) - set(LABELS))
    if unknown:
        raise click.BadParameter(f"there is no {unknown[0]!r} among {', '.join([*parts, *LABELS])}")
    report = session.new_report()
    report["machine"]["transformers"] = transformers.__version__
    report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    drawn = torch.randint(0, model.config.vocab_size, _COUNTED, device=session.DEVICE)
    report["density"] = gate_density(Logits(model), (drawn,))
    labels = set(contestants.split(","))
    built: dict[str, dict[str, Path]] = {}
    if plans is not None:
        sizes = {part.partition("-")[0]: parts[part] for part in sorted(parts, key=lambda part: parts[part][0])}
        wanted = {
            kind: ["--kv-cache", str(length), "--max-batch-size", str(batch)]
            + (["--prefill-chunk", str(length)] if kind == "prefill" else [])
            for kind, (batch, length) in sizes.items()
            if any(part.startswith(kind) for part in chosen)
        }
        built, report["failed"] = build_plans(model, plans, wanted, labels)
    for part in chosen:
        ids = torch.randint(0, model.config.vocab_size, parts[part], device=session.DEVICE)
        backends = make_contestants(model, parts[part][1], labels, part == "prefill")
        for label, path in built.get(part.partition("-")[0], {}).items():
            backends[label] = functools.partial(_open_plan, path)
        before = report["results"]
        for result in measure(part, model, backends, ids, part == "prefill", repeats):
            report["results"] = [*before, result]
            session.write_results(json_path, report, page_of(report))
        del backends
        gc.collect()
        torch.cuda.empty_cache()
    click.echo(page_of(report))
    if report.get("failed") or any(result["failed"] for result in report["results"]):
        raise click.ClickException("some contestants failed, see above")


if __name__ == "__main__":
    main()
