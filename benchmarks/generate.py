"""Time a whole ReLU Llama that answers: prefill, and steps with a key-value cache, by twellc and dense.

python benchmarks/generate.py --json results.json
python benchmarks/generate.py --prefill "" --decode 8 --json decode-8.json
python benchmarks/generate.py --smoke

The model is that of model.py, 1.5 billion parameters, and every contestant keeps its keys and values in a static
cache, and attends to it by lengths. A step is one new token of each sequence in the last place of a full cache, the
greedy choice included, as a CUDA graph. Contestants are the dense model (`dense_rivals.py`), eager, compiled, and
compiled with gate and up in one product; that with blocks in FP8 and in INT4, and with all linear layers but the
logits' in FP8; the program that `twellc.LLM` runs, eager and compiled, and with weights in FP8; and with --plans a
dense plan of `twellc compile --kv-cache`, and rewritten ones, of blocks alone and of linear layers, too, in bf16 and in
FP8, which need full TensorRT. The dense model with linear layers in FP8, the compiled programs and the plans of linear
layers come with a cache in FP8 of scale 1, too. All take turns, in a new order in each repetition. Before that, the
logits of each are compared with float64. Plans that are in the folder already are used again, so that building and
timing may be two calls.

By the contestants of twellc a whole answer is decoded, too, which gives tokens a second as a user has them, and the gap
that the host leaves between two steps.

The parts are prefill and decode-N for each number of sequences; each takes minutes, most of which torch.compile does.
"""

from __future__ import annotations

import copy
import functools
import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
import torch
from dense_rivals import DenseBackend
from harness import NUMBERS, Run, by_contestant, faults_of, over, shapes, table, time_of
from model import ModelOptions, compile_plan, describe_model, draw_ids
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
from twellc.options.option import COUNT, option

FP8_LINEAR = f"{FP8} all linear"
FP8_CACHE = "FP8 cache"
FP8_LINEAR_CACHE = f"{FP8_LINEAR} {FP8_CACHE}"
TWELL_COMPILED_FP8, PLAN_TWELL_FP8 = f"{TWELL_COMPILED} FP8", f"{PLAN_TWELL} FP8"
TWELL_COMPILED_CACHE, TWELL_COMPILED_FP8_CACHE = (
    f"{each} {FP8_CACHE}" for each in (TWELL_COMPILED, TWELL_COMPILED_FP8)
)
PLAN_LINEAR, PLAN_LINEAR_FP8 = f"{PLAN_TWELL} linear", f"{PLAN_TWELL} linear FP8"
PLAN_LINEAR_CACHE, PLAN_LINEAR_FP8_CACHE = (f"{each} {FP8_CACHE}" for each in (PLAN_LINEAR, PLAN_LINEAR_FP8))
# Where these stand among the contestants, the first one is the yardstick of errors.
LABELS = (
    *(EAGER, COMPILED, PACKED, FP8, FP8_LINEAR, FP8_LINEAR_CACHE, INT4),
    *(TWELL_EAGER, TWELL_COMPILED, TWELL_COMPILED_CACHE, TWELL_COMPILED_FP8, TWELL_COMPILED_FP8_CACHE),
    *(PLAN_DENSE, PLAN_TWELL, PLAN_TWELL_FP8, PLAN_LINEAR, PLAN_LINEAR_CACHE, PLAN_LINEAR_FP8, PLAN_LINEAR_FP8_CACHE),
)
# More than the model's dtype does.
_ROUNDED = (
    *(*LOSSY, FP8_LINEAR, FP8_LINEAR_CACHE, TWELL_COMPILED_CACHE, TWELL_COMPILED_FP8, TWELL_COMPILED_FP8_CACHE),
    *(PLAN_TWELL_FP8, PLAN_LINEAR_CACHE, PLAN_LINEAR_FP8, PLAN_LINEAR_FP8_CACHE),
)
# Options of twellc compile.
_PLANS = {
    PLAN_DENSE: ("--layers", "none", "--linear", "tensorrt"),
    PLAN_TWELL: ("--layers", "all", "--linear", "tensorrt"),
    PLAN_TWELL_FP8: ("--layers", "all", "--linear", "tensorrt", "--weights", "fp8:blocks"),
    PLAN_LINEAR: ("--layers", "all", "--linear", "twell"),
    PLAN_LINEAR_FP8: ("--layers", "all", "--linear", "twell", "--weights", "fp8"),
}
_PLANS[PLAN_LINEAR_CACHE], _PLANS[PLAN_LINEAR_FP8_CACHE] = (
    (*_PLANS[each], "--kv-cache-dtype", "fp8") for each in (PLAN_LINEAR, PLAN_LINEAR_FP8)
)
_CHECKED_ROWS = 2
_PROMPT, _ANSWER = 64, 96
# What `twellc.LLM` runs: whether it is compiled, its weights, and the type of its cache.
_PROGRAMS = {
    TWELL_EAGER: (False, "keep", "auto"),
    TWELL_COMPILED: (True, "keep", "auto"),
    TWELL_COMPILED_CACHE: (True, "keep", "fp8"),
    TWELL_COMPILED_FP8: (True, "fp8", "auto"),
    TWELL_COMPILED_FP8_CACHE: (True, "fp8", "fp8"),
}


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


def make_contestants(model: Any, cache: int, labels: list[str], prefill: bool) -> dict[str, Callable[[], Backend]]:
    """Return functions that make backends of the model, by name: each takes memory, so one is made at a time."""
    calibration = draw_ids(model, 4, 256)

    def backend(changed: Callable[[], Any], label: str) -> Backend:
        compiled = label != EAGER
        compiles = (compiled and not prefill, compiled and prefill)
        return DenseBackend(changed(), label, cache, *compiles, fp8_cache=label == FP8_LINEAR_CACHE)

    made: dict[str, Callable[[], Any]] = {
        EAGER: lambda: model,
        COMPILED: lambda: model,
        PACKED: lambda: with_forms(model, lambda block, _: Packed(block), calibration),
    }
    block = _block_of(model.model.layers[0])
    if takes_fp8(block):
        made[FP8] = lambda: with_forms(model, DenseFp8, calibration)
        made[FP8_LINEAR] = made[FP8_LINEAR_CACHE] = lambda: with_fp8_linears(model)
    if takes_int4(block):
        made[INT4] = lambda: with_forms(model, lambda block, _: Int4(block), calibration)
    backends: dict[str, Callable[[], Backend]] = {}
    for label in labels:
        if label in made:
            backends[label] = functools.partial(backend, made[label], label)
        elif label in _PROGRAMS:
            backends[label] = functools.partial(_program, model, cache, *_PROGRAMS[label])
    return backends


def _program(model: Any, cache: int, compiled: bool, weights: str, cache_dtype: str) -> Backend:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        options = LLMOptions(
            device=harness.DEVICE, max_model_len=cache, compiled=compiled, layers="all", weights=weights,
            kv_cache_dtype=cache_dtype,
        )  # fmt: skip
        return load_directory(Path(folder), options)[0]


def _open_plan(path: Path) -> Backend:
    return load_plan(path)[0]


def build_plans(
    model: Any, folder: Path, wanted: dict[str, list[str]], labels: list[str]
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
    failed, source = {}, Path(harness.scratch_folder()) / "model"
    for kind, options in wanted.items():
        for label in (label for label in _PLANS if label in labels):
            path = folder / f"{kind}-{label.removeprefix('plan ').replace(' ', '-')}.plan"
            fault = "" if path.exists() else compile_plan(model, source, path, (*_PLANS[label], *options))
            if fault:
                failed[f"{kind}, {label}"] = fault
            else:
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


# Of an answer's statistics.
_ANSWER_CELLS = ("{decode_tokens_per_second:.0f}", "{gap_us:.1f}", "{gap_share:.2%}")


def page_of(report: dict[str, Any], what: str) -> str:
    """Write a report's tables as Markdown, behind a line about the model."""
    results: list[dict[str, Any]] = report["results"]
    labels = list(dict.fromkeys(label for result in results for label in result["times"]))
    rivals: dict[str, tuple[str, ...]] = {"the fastest dense form in bf16": BASELINES}
    rivals |= {FP8: (FP8,), FP8_LINEAR: (FP8_LINEAR,), INT4: (INT4,), "the dense plan": (PLAN_DENSE,)}
    rivals[FP8_LINEAR_CACHE] = (FP8_LINEAR_CACHE,)
    ours = [label for label in labels if "twell" in label]
    gains = {f"{label} over {name}": over(theirs, label) for label in ours for name, theirs in rivals.items()}
    blocks = [
        f"{report['machine']}\n\n{what}; {report['arguments']}",
        by_contestant("Milliseconds, median", results, "setting", {label: time_of(label, 3, 1e3) for label in labels}),
        by_contestant("Speed-up", results, "setting", gains),
    ]
    rows = [
        [result["setting"], label, *(form.format(**each) for form in _ANSWER_CELLS)]
        for result in results
        for label, each in result["answers"].items()
    ]
    if rows:
        head = ["setting", "", "tokens a second", "gap between steps, us", "its share"]
        blocks.append(f"Answers of {_ANSWER} tokens:\n\n" + table(head, rows))
    blocks += [f"{label} failed: {why}" for label, why in faults_of(report).items()]
    return "\n\n".join(blocks) + "\n"


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of this benchmark."""

    prefill: tuple[tuple[int, int], ...] = option("8x2048", "SHAPE", shapes("8x2048"))
    decode: tuple[int, ...] = option("1,8,32", "N,…", NUMBERS)
    cache: int = option(1024, "N", COUNT)
    plans: Path | None = option(None, "DIR", Path)


@harness.benchmark(Options, prefill="2x64", decode="2", cache=128, layers=2, d_model=256, d_ff=768, repeats=2)
@torch.no_grad()
def main(run: Run, options: Options) -> None:
    """Print Markdown tables: milliseconds a step, speed-ups, tokens a second."""
    model, report = options.make(), run.report
    model.set_attn_implementation("sdpa")
    what = describe_model(report, model, 4, 512)
    if len(options.prefill) > 1:
        raise click.UsageError("--prefill is one shape, for which a plan is built, too")
    parts = {f"decode-{count}": (count, options.cache) for count in options.decode}
    if options.prefill:
        parts = {"prefill": options.prefill[0], **parts}
    labels = list(filter(run.wants, LABELS))
    run.refuse_unknown()  # before plans are built
    built: dict[str, dict[str, Path]] = {}
    if options.plans is not None:
        most = {part.partition("-")[0]: parts[part] for part in sorted(parts, key=lambda part: parts[part][0])}
        wanted = {
            kind: ["--kv-cache", str(length), "--max-batch-size", str(batch)]
            + (["--prefill-chunk", str(length)] if kind == "prefill" else [])
            for kind, (batch, length) in most.items()
        }
        built, report["failed"] = build_plans(model, options.plans, wanted, labels)
    for part, shape in parts.items():
        ids = draw_ids(model, *shape)
        backends = make_contestants(model, shape[1], labels, part == "prefill")
        for label, path in built.get(part.partition("-")[0], {}).items():
            backends[label] = functools.partial(_open_plan, path)
        before = report["results"]
        for result in measure(part, model, backends, ids, part == "prefill", options.repeats):
            report["results"] = [*before, result]
            run.write(page_of(report, what))
        del backends
        gc.collect()
        torch.cuda.empty_cache()
    click.echo(page_of(report, what))
    run.fail_for_faults()


if __name__ == "__main__":
    main()
