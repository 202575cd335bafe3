"""`twellc bench`: the original model against the rewritten one and other dense forms, on this GPU.

Each shape has two contests, in CUDA graphs; contestants take turns. In the first they run the whole model, in the
second the rewritten blocks alone, one after the other, on the inputs that these have in the model. Before that,
results are compared with float64: a contestant with more than twice the eager model's error is left out. FP8 of all
kinds, INT4 and models with pruned neurons have no such limit. At last each block is timed by itself.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from twellc.base.errors import UserError, first_few
from twellc.base.files import OutputFiles, temporary_folder
from twellc.base.modules import import_modules
from twellc.base.torch_private import pytree
from twellc.benchmarking.blocks import (
    TWELL,
    Form,
    Seen,
    block_calls,
    dense_models,
    rotated_calls,
    see_blocks,
    with_all_neurons,
)
from twellc.benchmarking.contest import Contest, time_rotated
from twellc.benchmarking.energy import EnergyMeter
from twellc.benchmarking.forms import (
    BASELINES,
    COMPILED,
    EAGER,
    FP8,
    FP8_TUNED,
    LOSSY,
    compile_rival,
    dense_forms,
    tuned,
)
from twellc.benchmarking.inputs import make_samples
from twellc.benchmarking.plans import PLAN_TWELL, add_plan, build_plans, profiles_of, refuse_without_tensorrt
from twellc.benchmarking.plot import refuse_plot, write_plot
from twellc.benchmarking.result import (
    SCHEMA,
    SHOWN,
    TWELL_COMPILED,
    TWELL_EAGER,
    BenchResult,
    BlockTimes,
    ShapeResult,
    Standings,
)
from twellc.benchmarking.timing import machine, refuse_without_gpu
from twellc.checks.reference import widen_sample
from twellc.compiling.fp8 import measure_errors, wish_of
from twellc.compiling.translate_torch import rewrite
from twellc.export.runner import OpenPlan
from twellc.firing.calibration import LoadedCalibration, load_calibration
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.loaders.precision import choose_dtype
from twellc.options.commands import BenchOptions
from twellc.options.source import refuse_missing
from twellc.options.weights import refuse_samples
from twellc.passes.graph.execution import call_arguments
from twellc.passes.pipeline import PassOptions, Rewritten
from twellc.passes.precision import widen
from twellc.passes.report import Layer, reads_fp8
from twellc.passes.sizes.inputs import program_inputs
from twellc.plugins import library
from twellc.samples.samples import Sample

_DEVICE = "cuda"
_CHECKED_ROWS = 512  # of the whole model's first output
_CHECKED_BLOCK_ROWS = 64
_ENERGY_SECONDS = 1.0


def bench_model(
    options: BenchOptions, progress: Callable[[str], None], done: Callable[[BenchResult], None]
) -> BenchResult:
    """Measure a model.

    Args:
        options: See `BenchOptions`.
        progress: Receives the name of each step.
        done: Receives the results so far after each shape.

    Raises:
        UserError: No GPU is found, or no TensorRT for the requested plans; the model or the inputs cannot be read; or
            no block is rewritten.
    """
    import_modules(options.import_modules)
    refuse_samples(options, {"--arrays": options.arrays, "--text": options.text}, only_to_measure=False)
    refuse_missing(options.model, "a model")
    if looks_like_onnx(options.model):
        raise UserError(str(options.model), "is an ONNX file, which torch does not run", fix="Give the model itself.")
    with OutputFiles(options.overwrite) as outputs, temporary_folder() as folder:
        if options.plot is not None:
            outputs.check("--plot", options.plot)
            refuse_plot(options.plot)
        calibrated = load_calibration(options, options.model)
        library.load()
        refuse_without_gpu("twellc bench", _what_it_would_do(options))
        if options.tensorrt:
            refuse_without_tensorrt()
        result = _Bench(options, calibrated, folder, progress).run(done)
        if options.plot is not None:
            write_plot(result, outputs.stage(options.plot))
        outputs.commit()
    return result


def _what_it_would_do(options: BenchOptions) -> str:
    shapes = ", ".join("x".join(map(str, shape)) for shape in options.shapes) or "the usual shapes"
    compiled = "eager and compiled" if options.compiled else "eager"
    plans = "; plans of both" if options.tensorrt else ""
    return (
        f"With a GPU it would time {options.model} at {shapes}: the original and the rewritten model, {compiled}, in "
        f"CUDA graphs; beside them dense blocks with gate and up in one product, in bf16, FP8 and INT4{plans}."
    )


class _Bench:
    """One run of the command."""

    def __init__(
        self, options: BenchOptions, calibrated: LoadedCalibration | None, folder: Path, progress: Callable[[str], None]
    ) -> None:
        self._options, self._folder, self._progress = options, folder, progress
        progress("loading and tracing the model")
        self._model = load_model(options)
        self._dtype, self._notes = choose_dtype(self._model, options.dtype)
        self._samples, self._inputs = make_samples(options, self._model)
        progress("rewriting feed-forward blocks")
        self._rewritten = self._rewrite(calibrated)
        if not any(layer.decision == "twell" for layer in self._rewritten.layers):
            reasons = [f"{layer.module}: {layer.reason}" for layer in self._rewritten.layers]
            what = "no feed-forward block is rewritten, so there is nothing to compare"
            fix = "`--layers all` takes those that are left dense, too; `twellc inspect` shows the blocks."
            raise UserError(str(options.model), what, got=first_few(reasons, "; "), fix=fix)
        self._meter: EnergyMeter | None = None
        try:
            self._meter = EnergyMeter()
        except UserError as error:
            self._notes.append(f"energy was not measured: {error}".rstrip("."))

    def _rewrite(self, calibrated: LoadedCalibration | None) -> Rewritten:
        """Rewrite the model as `twellc compile` does, with the shapes to measure as optimization profiles."""
        self._profiles = profiles_of(program_inputs(self._model.program), list(self._samples.values()))
        options = self._options
        self._errors = None
        if options.fp8_error is not None:
            self._errors = measure_errors(self._model, self._dtype, self._samples.values(), self._progress)
        wanted = PassOptions(weights=wish_of(options, self._errors), experts=False)
        rewritten, advisor = rewrite(self._model, self._dtype, options, self._profiles, calibrated, wanted)
        self._notes += [*rewritten.notes, *advisor.notes(rewritten.layers)]
        if read := [f"{each.module}: {each.weights}" for each in rewritten.layers if each.weights is not None]:
            self._notes.append(first_few(read, "; "))
        if calibrated is not None:
            self._notes += [*calibrated.profile.warnings, *calibrated.notes(rewritten.layers, self._dtype)]
        return rewritten

    def run(self, done: Callable[[BenchResult], None]) -> BenchResult:
        """Measure every shape."""
        plans, failed = self._plans()
        truths = self._truths()
        whole = with_all_neurons(self._rewritten, self._options.compression)
        programs = (self._rewritten.dense, self._rewritten.program, whole)
        dense, ours, whole = (move_to_device_pass(each, _DEVICE) for each in programs)
        results: list[ShapeResult] = []
        for index, (shape, sample) in enumerate(self._samples.items()):
            self._progress(f"measuring: {shape}")
            measured = _Shape(self._options, self._rewritten.layers, self._draw, self._meter, self._notes)
            args, kwargs = call_arguments(dense, _on_device(sample))
            own = {
                label: functools.partial(add_plan, plan=plan, inputs=_on_device(sample), profile=index)
                for label, plan in plans.items()
            }
            with torch.no_grad():
                found = measured.run(shape, truths[shape], args, kwargs, dense, ours, whole, own)
            found.model.failed.update(failed)
            results.append(found)
            done(self._found(results))
            gc.collect()
            torch.cuda.empty_cache()
        return self._found(results)

    def _plans(self) -> tuple[dict[str, OpenPlan], dict[str, str]]:
        if not self._options.tensorrt:
            return {}, {}
        return build_plans(self._options, self._profiles, self._errors, self._folder, self._progress)

    def _found(self, results: list[ShapeResult]) -> BenchResult:
        name = self._options.in_memory or self._options.model.name
        layers, notes = self._rewritten.layers, list(dict.fromkeys(self._notes))
        return BenchResult(SCHEMA, machine(), name, self._dtype, self._inputs, notes, layers, list(results))

    def _draw(self, result: Any) -> Tensor:
        """Return some rows of the first floating-point output, the same ones each time."""
        output: Tensor = next(leaf for leaf in pytree.tree_leaves(result) if _is_floating(leaf))
        rows = output.reshape(-1, output.shape[-1] if output.dim() else 1)
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:_CHECKED_ROWS]
        return rows[drawn.to(rows.device)].clone()

    def _truths(self) -> dict[str, Tensor | None]:
        """Return the drawn rows in float64 for each shape; None where they do not fit into memory."""
        self._progress("running the model in float64")
        truths: dict[str, Tensor | None] = {}
        wide = move_to_device_pass(widen(self._rewritten.dense), _DEVICE)
        module = wide.module(check_guards=False)
        for shape, sample in self._samples.items():
            args, kwargs = call_arguments(wide, _on_device(widen_sample(sample)))
            truths[shape] = None
            try:
                with torch.no_grad():
                    result = module(*args, **kwargs)
                if any(map(_is_floating, pytree.tree_leaves(result))):
                    truths[shape] = self._draw(result)
                else:
                    self._notes.append("whole models were not compared: no output has floating-point numbers")
                del result
            except torch.OutOfMemoryError:
                self._notes.append(f"{shape}: whole models were not compared, float64 does not fit into memory")
        del wide, module
        gc.collect()
        torch.cuda.empty_cache()
        return truths


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _on_device(sample: Sample) -> Sample:
    return {name: tensor.to(_DEVICE) for name, tensor in sample.items()}


class _Shape:
    """The measurements at one shape."""

    def __init__(
        self,
        options: BenchOptions,
        layers: list[Layer],
        draw: Callable[[Any], Tensor],
        meter: EnergyMeter | None,
        notes: list[str],
    ) -> None:
        self._options, self._draw, self._meter, self._notes = options, draw, meter, notes
        chosen = [layer for layer in layers if layer.decision == "twell"]
        self._modules = [layer.module for layer in chosen]
        pruned = any(layer.neurons is not None and layer.neurons.dead for layer in chosen)
        fp8 = any(reads_fp8(layer.weights) for layer in chosen)
        # Their error has no limit: pruned neurons are missing from the result, and FP8 rounds.
        self._lossy = {*LOSSY, *((TWELL, TWELL_EAGER, TWELL_COMPILED, PLAN_TWELL) if pruned or fp8 else ())}

    def run(
        self,
        shape: str,
        truth: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dense: ExportedProgram,
        ours: ExportedProgram,
        whole: ExportedProgram,
        plans: Mapping[str, Callable[..., None]],
    ) -> ShapeResult:
        """Run both contests, and time each block; `whole` is `ours` with all neurons, see `with_all_neurons`."""
        torch.compiler.reset()  # or it would compile for several shapes at once
        seen = see_blocks(whole, args, kwargs)
        tokens = seen[0].x.numel() // seen[0].x.shape[-1]
        densities = [float(each.block.active(each.x).double().mean()) for each in seen]
        options = self._options
        forms = [dense_forms(each.block, each.x, options.compiled, max_autotune=options.max_autotune) for each in seen]
        modules: dict[str, Any] = {
            EAGER: dense.module(check_guards=False),
            TWELL_EAGER: ours.module(check_guards=False),
        }
        if options.compiled:
            modules |= {COMPILED: compile_rival(modules[EAGER]), TWELL_COMPILED: compile_rival(modules[TWELL_EAGER])}
        models = dense_models(whole, forms)
        modules |= {name: compile_rival(each) for name, each in models.items()} if options.compiled else models
        if options.max_autotune and FP8 in models:
            modules[FP8_TUNED] = tuned(models[FP8])
        contest = Contest(truth, self._draw, language_model=False)
        for label, module in modules.items():
            contest.add(label, functools.partial(module, *args, **kwargs), module, lossy=label in self._lossy)
        for label, add in plans.items():
            add(contest, label, lossy=label in self._lossy)
        own = see_blocks(ours, args, kwargs)
        blocks = _blocks(seen, own, forms, self._lossy)
        standings = self._standings(contest, tokens), self._standings(blocks, tokens)
        del contest, blocks, forms, models, modules  # and their memory
        return ShapeResult(shape, tokens, densities, *standings, self._by_block(shape, seen, own, standings[1]))

    def _by_block(self, shape: str, seen: list[Seen], ours: list[Seen], together: Standings) -> list[BlockTimes]:
        """Time each block by itself: by twell, and by the dense forms that stayed in the contest."""
        names = [name for name in BASELINES if name in together.times]
        if not names or TWELL not in together.times:
            return []
        found = []
        try:
            for module, whole, own in zip(self._modules, seen, ours, strict=True):
                times = time_rotated(rotated_calls(whole, own, names), self._options.repeats)
                best = min(names, key=lambda name: times[name].median_us)
                found.append(BlockTimes(module, best, times[best].median_us, times[TWELL].median_us))
        except torch.OutOfMemoryError:
            self._notes.append(f"{shape}: not every block was timed by itself, copies of its weights do not fit")
        return found

    def _standings(self, contest: Contest, tokens: int) -> Standings:
        times = contest.time(self._options.repeats)
        standings = Standings(times, contest.errors, contest.failed, {})
        chosen = [standings.baseline, *(standings.fastest(labels) for labels in SHOWN.values())]
        for label in filter(None, chosen):
            if self._meter is not None:
                joules = self._meter.of(contest.replay(label), _ENERGY_SECONDS, times[label].median_us)
                standings.joules_per_token[label] = joules / tokens
        return standings


def _blocks(seen: list[Seen], ours: list[Seen], forms: list[dict[str, Form]], lossy: set[str]) -> Contest:
    """Start a contest of the blocks alone; the truth is the result of `seen`, with all neurons."""
    rows = [torch.randperm(each.x.numel() // each.x.shape[-1])[:_CHECKED_BLOCK_ROWS].to(_DEVICE) for each in seen]
    exact = [
        each.block.double().dense(each.x.reshape(-1, each.x.shape[-1])[own].double())
        for each, own in zip(seen, rows, strict=True)
    ]
    # Scaling by powers of two changes no rounding, and lets blocks with small results count like others.
    scales = [2.0 ** -round(float(y.square().mean().clamp(min=1e-30).log2()) / 2) for y in exact]

    def scaled(results: list[Tensor]) -> Tensor:
        return torch.cat([(y * scale).reshape(-1, 1) for y, scale in zip(results, scales, strict=True)])

    def drawn(results: list[Tensor]) -> Tensor:
        return scaled([y.reshape(-1, y.shape[-1])[own] for y, own in zip(results, rows, strict=True)])

    contest = Contest(scaled(exact), drawn, language_model=False)
    for name, call in block_calls(ours, forms).items():
        contest.add(name, call, lossy=name in lossy)
    return contest
