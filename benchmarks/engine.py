"""Time a whole ReLU Llama in TensorRT, as plans of twellc, against torch: prefill of several shapes, and one token.

python benchmarks/engine.py --json results.json --plans build/plans
python benchmarks/engine.py --smoke

The model is that of model.py, with fewer layers. Contestants are three plans of the same export, with all feed-forward
blocks rewritten (twell), these with FP8 weights (twell FP8), and with none rewritten (dense), in each form of
attention that is asked for, and with linear layers outside of blocks by TensorRT (generate.py has others); and torch,
eager and compiled, dense and rewritten, and compiled with packed blocks, with FP8 and with INT4 ones (see
`twellc.benchmarking.forms`), with two kinds of attention: `sdpa` is transformers' own, whose mask keeps torch from its
causal kernel where the model is compiled or exported; `causal` is that kernel, without a mask.

Everything runs in CUDA graphs, in turns, in a new order in each repetition. Before that, the logits of each contestant
at tokens drawn at random are compared with float64: a contestant may be twice as wrong as dense eager torch, which
always takes part, and FP8 as wrong as it is. One that is more wrong, or that fails, is named and left out, and the exit
status is 1.

The plans' times by kind of layer come from TensorRT's profiler, which runs one kernel at a time: their sum is longer
than a plan takes in a CUDA graph, and is shown beside it.

Needs full TensorRT. Plans are built on the GPU that is measured; with --plans they are kept, and used again by a later
call with the same model.
"""

from __future__ import annotations

import functools
import gc
import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import harness
import torch
from harness import Columns, Result, Run, by_contestant, faults_of, over, shapes, table
from model import CAUSAL, Logits, ModelOptions, compile_plan, describe_model, draw_ids, rewrite, rows_of
from torch import Tensor

from twellc.base.errors import UserError, first_line
from twellc.benchmarking.blocks import dense_models, see_blocks
from twellc.benchmarking.contest import Contest
from twellc.benchmarking.forms import BASELINES, COMPILED, EAGER, FP8, INT4, LOSSY, PACKED, compile_rival, dense_forms
from twellc.benchmarking.plans import add_plan
from twellc.benchmarking.result import TWELL_COMPILED, TWELL_EAGER
from twellc.compiling.manifest import manifest_path
from twellc.export.runner import Execution, OpenPlan, engine_layers, open_plan, prepare
from twellc.export.tensorrt_host import Host, load_host
from twellc.options.option import COUNT, option
from twellc.passes.precision import widen

Shape = tuple[int, int]
Wanted = Callable[[str], object]

_CHECKED_TOKENS = 512
_PROFILED_RUNS = 20
_FP8 = "FP8"  # in the names of plans
# Options of twellc compile.
_KINDS = {
    "twell": ("--layers", "all"),
    f"twell {_FP8}": ("--layers", "all", "--weights", "fp8"),
    "dense": ("--layers", "none"),
}
_TORCH = (EAGER, COMPILED, PACKED, FP8, INT4, TWELL_EAGER, TWELL_COMPILED)
_TORCH_ATTENTION = {"sdpa": "sdpa", "causal": CAUSAL}

# Kinds of layers, by the names of the ONNX nodes that a layer was made of or by its own: the first one that is found.
# twellc names nodes <module path>/<operation of torch>/<node>. "rotary" is what Q and K go through before attention,
# the scale of Q included; all else in the module of attention, but for its projections, is "attention".
LAYER_KINDS = (
    ("feed-forward", r"\.mlp[./]|/(gated_)?mlp(_\d+)?/"),
    ("logits", r"^lm_head/"),
    ("projections", r"\.self_attn\.[qkvo]_proj/"),
    ("attention", r"mha_|TwellAttention"),
    ("rotary", r"rotary_emb/|(?i:rotaryembedding)|\.self_attn/(mul|neg|cat|slice)"),
    ("attention", r"\.self_attn/"),
    ("norms", r"norm/"),
)
REST = "rest"
TABLE_KINDS = ("feed-forward", "attention", "projections", "norms", "rotary", "logits", REST)


def shape_name(shape: Shape) -> str:
    """Return `1x512`."""
    return f"{shape[0]}x{shape[1]}"


# ---- plans ----


def plan_label(kind: str, attention: str) -> str:
    """Name a plan among the contestants."""
    return f"plan {kind}" + (f", {attention}" if attention else "")


def profile_of(plan: Path, shape: Shape) -> int | None:
    """Return the optimization profile of a plan that is for this shape alone; None without one, or without a plan."""
    manifest = manifest_path(plan)
    if not (plan.exists() and manifest.exists()):
        return None
    wanted = {which: list(shape) for which in ("min", "opt", "max")}
    profiles = [profile["input_ids"] for profile in json.loads(manifest.read_text())["profiles"]]
    return profiles.index(wanted) if wanted in profiles else None


def build_plans(
    model: Any, made: dict[str, Any], folder: Path, options: Options, wanted: Wanted
) -> tuple[dict[str, Path], dict[str, str]]:
    """Build the plans that are not there yet.

    Args:
        model: The model.
        made: What it was made with.
        folder: Where the plans are, and the file that says which model they are of.
        options: Which forms of attention there are, and for which shapes a plan has an optimization profile each.
        wanted: Whether a contestant takes part.

    Returns:
        The plans by the contestants' names, and why others could not be built.

    Raises:
        click.ClickException: The folder has plans of another model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "model.json"
    if stamp.exists() and json.loads(stamp.read_text()) != made:
        raise click.ClickException(f"{folder} holds plans of another model, see {stamp}: name another folder")
    stamp.write_text(json.dumps(made) + "\n")
    source = Path(harness.scratch_folder()) / "model"
    plans, failed = {}, {}
    for attention in (options.attention or "").split(","):
        for kind, given in _KINDS.items():
            label = plan_label(kind, attention)
            if not wanted(label):
                continue
            path = folder / f"{'-'.join(filter(None, (*kind.split(), attention)))}.plan"
            if any(profile_of(path, shape) is None for shape in options.shapes):
                profiles = [f"input_ids:{name}:{name}:{name}" for name in map(shape_name, options.shapes)]
                given = (*given, *(each for profile in profiles for each in ("--optimization-profile", profile)))
                given = (*given, "--linear", "tensorrt", *(("--attention", attention) if attention else ()))
                if fault := compile_plan(model, source, path, given):
                    failed[label] = fault
                    continue
            plans[label] = path
    return plans, failed


def open_plans(host: Host, paths: dict[str, Path]) -> tuple[dict[str, OpenPlan], dict[str, str]]:
    """Open plans; return them, and why others do not open."""
    plans, failed = {}, {}
    for label, path in paths.items():
        try:
            plans[label] = open_plan(host, path, host.version)
        except UserError as error:
            failed[label] = str(error)
    return plans, failed


def inputs_of(plan: OpenPlan, ids: Tensor) -> tuple[dict[str, Tensor], int]:
    """Return the inputs of a plan for token ids [batch, tokens], and its profile; where it reads a mask, all count."""
    profile = profile_of(plan.path, (ids.shape[0], ids.shape[1]))
    assert profile is not None, plan.path  # it was built with one
    return {name: ids if name == "input_ids" else torch.ones_like(ids) for name in plan.names("INPUT")}, profile


# ---- time by kind of layer ----


def kind_of(name: str, nodes: list[str]) -> str:
    """Return the kind of a layer from its name and those of the ONNX nodes that it was made of; see `LAYER_KINDS`."""
    texts = [name, *nodes]
    return next((kind for kind, pattern in LAYER_KINDS if any(re.search(pattern, text) for text in texts)), REST)


def onnx_nodes(metadata: str) -> list[str]:
    """Return the names of ONNX nodes from a layer's metadata, where TensorRT's parser writes them."""
    return re.findall(r"\[ONNX Layer: ([^\]]*)\]", metadata)


def _bare(name: str) -> str:
    """Drop what TensorRT appends to the names of layers of its second and later profiles."""
    return re.sub(r" *\[profile \d+\]$", "", name)


def times_by_layer(execution: Execution) -> dict[str, float]:
    """Run a plan under TensorRT's profiler; return the median time of each layer in microseconds."""

    class Profiler(execution.plan.host.module.IProfiler):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.run: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            name = _bare(layer_name)
            self.run[name] = self.run.get(name, 0.0) + ms * 1e3

    profiler = Profiler()
    execution.enqueue()
    torch.cuda.synchronize()
    execution.context.profiler = profiler
    runs = []
    for _ in range(_PROFILED_RUNS):
        profiler.run = {}
        execution.enqueue()
        torch.cuda.synchronize()
        runs.append(profiler.run)
    return {name: statistics.median(run.get(name, 0.0) for run in runs) for name in runs[-1]}


def times_by_kind(execution: Execution) -> dict[str, Any]:
    """Return a plan's time by kind of layer, and its layers from the longest on."""
    nodes = {_bare(layer["Name"]): onnx_nodes(layer.get("Metadata", "")) for layer in engine_layers(execution)}
    kinds = dict.fromkeys(TABLE_KINDS, 0.0)
    layers: list[dict[str, Any]] = []
    for name, microseconds in times_by_layer(execution).items():
        kind = kind_of(name, nodes.get(name, []))
        kinds[kind] += microseconds
        unknown = {"nodes": nodes.get(name, [])} if kind == REST else {}
        layers.append({"name": name, "kind": kind, "us": microseconds, **unknown})
    layers.sort(key=lambda layer: -layer["us"])
    return {"kinds_us": kinds, "sum_us": sum(kinds.values()), "layers": layers}


# ---- one shape ----


def start_contest(model: Logits, ids: Tensor) -> Contest:
    """Start a contest of logits at tokens that are drawn at random."""
    rows = torch.randperm(ids.numel(), device=ids.device)[:_CHECKED_TOKENS]

    def drawn(logits: Any) -> Tensor:
        return rows_of(logits)[rows].clone()

    model.model.set_attn_implementation(CAUSAL)
    program = rewrite(model, (ids,)).dense
    return Contest(drawn(widen(program).module(check_guards=False)(ids)), drawn, language_model=True)


def add_torch(contest: Contest, model: Logits, ids: Tensor, wanted: Wanted) -> None:
    """Add dense and rewritten torch, eager and compiled, with each attention; the yardstick first, wanted or not."""
    for attention, implementation in _TORCH_ATTENTION.items():
        model.model.set_attn_implementation(implementation)
        torch._dynamo.reset()  # or it would compile for several shapes at once
        labels = {form: f"torch {form}, {attention}" for form in _TORCH}
        chosen = [form for form, label in labels.items() if wanted(label) or (form, attention) == (EAGER, "sdpa")]
        modules: dict[str, Any] = {EAGER: model, COMPILED: compile_rival(model)}
        try:
            if not modules.keys() >= {*chosen}:
                program = rewrite(model, (ids,)).program
                forms = [
                    dense_forms(each.block, each.x, with_compiled=False) for each in see_blocks(program, (ids,), {})
                ]
                modules |= {label: compile_rival(module) for label, module in dense_models(program, forms).items()}
                ours = program.module(check_guards=False)
                modules |= {TWELL_EAGER: ours, TWELL_COMPILED: compile_rival(ours)}
        except Exception as error:  # whatever it is, the others go on
            contest.failed[f"torch rewritten, {attention}"] = f"{type(error).__name__}: {first_line(error)}"
        for form in (form for form in chosen if form in modules):
            call = functools.partial(modules[form], ids)
            contest.add(labels[form], call, modules[form], lossy=form in LOSSY)


def measure_shape(model: Logits, plans: dict[str, OpenPlan], shape: Shape, repeats: int, wanted: Wanted) -> Result:
    """Check and time all contestants at one shape."""
    ids = draw_ids(model.model, *shape)
    contest = start_contest(model, ids)
    gc.collect()
    torch.cuda.empty_cache()  # of the model in float64
    add_torch(contest, model, ids, wanted)
    for label, plan in plans.items():
        add_plan(contest, label, plan, *inputs_of(plan, ids), lossy=_FP8 in label)
    times = {label: each.to_json() for label, each in contest.time(repeats).items()}
    profiled = {}
    for label in filter(contest.__contains__, plans):
        try:
            profiled[label] = times_by_kind(prepare(plans[label], *inputs_of(plans[label], ids)))
        except Exception as error:  # its time is known all the same
            contest.failed[f"{label}, profiled"] = f"{type(error).__name__}: {first_line(error)}"
    return {
        "shape": shape_name(shape),
        "checked_tokens": min(_CHECKED_TOKENS, ids.numel()),
        "errors": contest.errors,
        "times": times,
        "layers": profiled,
        "failed": contest.failed,
    }


# ---- the page ----


def shape_table(result: Result) -> str:
    """Return what was measured at one shape, to be shown before the others are known."""
    return by_contestant("Milliseconds, median (10th to 90th percentile)", [result], "shape", _times(result["times"]))


def markdown(report: dict[str, Any], what: str) -> str:
    """Write a report's tables as Markdown, behind a line about the model."""
    results: list[Result] = report["results"]
    labels = list(dict.fromkeys(label for result in results for label in result["times"]))
    gains = {
        f"{ours} over {name}": over(theirs, ours)
        for ours in labels
        if ours.startswith("plan twell")
        for name, theirs in _rivals(ours, labels).items()
    }
    blocks = [
        f"{report['machine']}\n\n{what}",
        by_contestant("Milliseconds, median (10th to 90th percentile)", results, "shape", _times(labels)),
        by_contestant("Speed-up", results, "shape", gains),
    ]
    for result in (result for result in results if result["layers"]):
        layers = result["layers"]
        rows = [[kind, *(f"{each['kinds_us'][kind]:.1f}" for each in layers.values())] for kind in TABLE_KINDS]
        rows.append(["sum", *(f"{each['sum_us']:.1f}" for each in layers.values())])
        rows.append(["in a CUDA graph", *(f"{result['times'][name]['median_us']:.1f}" for name in layers)])
        blocks.append(f"{result['shape']}, microseconds by kind of layer:\n\n" + table(["", *layers], rows))
    wrong = {label: functools.partial(_error, label) for result in results for label in result["errors"]}
    blocks.append(by_contestant("Relative error of the logits against float64", results, "shape", wrong))
    blocks += ["\n".join(f"- {label}: {why}" for label, why in faults_of(report).items())]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _times(labels: Iterable[str]) -> Columns:
    return {label: functools.partial(_time, label) for label in labels}


def _time(label: str, result: Result) -> str:
    if label not in result["times"]:
        return "-"
    low, median, high = (result["times"][label][name] / 1e3 for name in ("p10_us", "median_us", "p90_us"))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def _error(label: str, result: Result) -> str:
    return f"{result['errors'][label]:.4f}" if label in result["errors"] else "-"


def _rivals(ours: str, labels: list[str]) -> dict[str, list[str]]:
    """Return what a twell plan is compared with: labels by name, of which the fastest counts."""
    dense = [label for label in labels if label.startswith(tuple(f"torch {form}," for form in BASELINES))]
    fp8 = [label for label in labels if label.startswith(f"torch {FP8},")]
    return {
        "the dense plan": [re.sub(f"twell( {_FP8})?", "dense", ours)],
        "compiled dense torch, sdpa": ["torch dense compiled, sdpa"],
        "the fastest dense torch": dense,
        "the fastest dense torch in FP8": fp8,
    }


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """The options of this benchmark.

    Attributes:
        attention: Values of twellc compile's --attention, with commas; default: its own.
    """

    layers: int = option(8, "N", COUNT)
    heads: int = option(16, "N", COUNT)
    kv_heads: int | None = option(None, "N", COUNT)
    shapes: tuple[Shape, ...] = option("1x1,1x512,1x2048,4x2048", "SHAPE,…", shapes("1x512,4x2048"))
    attention: str | None = option(None, "NAME,…")
    plans: Path | None = option(None, "DIR", Path)


@harness.benchmark(Options, layers=2, d_model=256, d_ff=768, heads=2, shapes="1x1,2x32", repeats=2)
@torch.no_grad()
def main(run: Run, options: Options) -> None:
    """Print Markdown tables: milliseconds, speed-ups, microseconds by kind of layer, and errors of the logits."""
    try:
        host = load_host("tensorrt")
    except UserError as error:
        raise click.ClickException(f"full TensorRT is needed: {error}") from error
    llama = options.make(heads=options.heads, kv_heads=options.kv_heads)
    llama.set_attn_implementation("sdpa")
    llama.config.dtype = torch.bfloat16
    model, report = Logits(llama), run.report
    what = describe_model(report, llama, 4, 512)
    report["machine"]["tensorrt"] = host.version
    made = {name: getattr(options, name) for name in ("layers", "d_model", "d_ff", "heads", "kv_heads", "density")}
    folder = options.plans or Path(harness.scratch_folder())
    paths, report["failed"] = build_plans(llama, made, folder, options, run.wants)
    opened, unopened = open_plans(host, paths)
    report["failed"] |= unopened
    for shape in options.shapes:
        click.echo(f"measuring {shape_name(shape)}", err=True)
        try:
            report["results"].append(measure_shape(model, opened, shape, options.repeats, run.wants))
            click.echo(shape_table(report["results"][-1]) + "\n")
        except Exception as error:  # whatever it is, other shapes go on
            report["failed"][shape_name(shape)] = f"{type(error).__name__}: {first_line(error)}"
        gc.collect()
        torch.cuda.empty_cache()
        run.write(markdown(report, what))
    click.echo(markdown(report, what))
    run.fail_for_faults()


if __name__ == "__main__":
    main()
