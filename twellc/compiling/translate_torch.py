"""From a model to an ONNX graph with `twell` nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import sympy
import torch
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.base.caches import FP8_CACHE
from twellc.base.devices import choose_device
from twellc.base.dtypes import torch_dtype
from twellc.base.errors import UserError, first_few
from twellc.compiling.cache_scales import by_placeholder, choose_scales
from twellc.compiling.fp8 import measure_errors, read_samples, wish_of
from twellc.compiling.result import Translation, annotate, check_matches
from twellc.compiling.settings import settings_of
from twellc.decisions.advise import Advisor
from twellc.decisions.choose import Tokens
from twellc.decisions.targets import choose_target, gpu_at_hand
from twellc.export.attention_forms import choose_forms
from twellc.export.onnx_export import export_onnx, opset_of
from twellc.export.profiles import PlanSizes, plan_sizes, symbol_sizes
from twellc.export.shapes import ShapeProfile, ShapeRange, fixed_sizes
from twellc.firing.calibration import LoadedCalibration, load_calibration
from twellc.firing.short_run import run_shortly
from twellc.loaders.cached import load_with_cache
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.loaders.precision import choose_dtype
from twellc.options.commands import CompileOptions
from twellc.options.decisions import DecisionOptions
from twellc.options.source import LAST_LOGITS
from twellc.passes.dump import NOWHERE, GraphDump
from twellc.passes.graph.program import has_inner_graphs, largest_size, user_inputs, written_tensors
from twellc.passes.match.linear import is_grouped
from twellc.passes.match.shared_axis import Part
from twellc.passes.pipeline import PassOptions, Rewritten, Stage, run_for_ranks, run_passes, run_until
from twellc.passes.report import Earlier, Layer
from twellc.passes.sizes.conditions import value_warnings
from twellc.passes.sizes.inputs import ModelInputs, program_inputs
from twellc.passes.tensor_parallel import is_in_order
from twellc.plugins.experts_op import EXPERTS

# Other names of activations in Hugging Face configs.
_SAME_ACTIVATION = {"swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "squared_relu": "relu2"}


def translate_for_ranks(options: CompileOptions, progress: Callable[[str], None]) -> Iterator[Translation]:
    """Load a model, rewrite it and translate it to ONNX, all in memory: yield what comes of it for each rank.

    Notes and warnings are with the first one only.

    Raises:
        UserError: The model cannot be loaded, rewritten as asked (`strict`, `layers`) or translated, or cannot be
            shared among that many ranks.
    """
    progress("loading and tracing the model")
    calibrated = load_calibration(options, options.model)
    model = _load(options)
    dtype, notes = choose_dtype(model, options.dtype)
    cached, ranks = options.cache is not None, options.tensor_parallel
    scales, cache = None, model.cache
    if options.kv_cache_dtype == FP8_CACHE:
        assert cache is not None  # see compile_options
        progress("choosing the scales of the cache")
        scales, said = _cache_scales(options, model)
        cache, notes = replace(cache, dtype=FP8_CACHE), [*notes, *said]
    asked = options.needed_attention
    forms = tuple(options.earlier.attention_forms or choose_forms(options.backend, asked, cached=cached))
    dump = GraphDump(options.dump_graphs)
    errors = _fp8_errors(options, model, dtype, progress)
    wanted = PassOptions(
        attention=forms,
        dump=dump,
        part=Part(0, ranks),
        progress=lambda done, steps: progress(f"rewriting feed-forward blocks: pass {done + 1} of {steps}"),
        weights=wish_of(options, errors),
        cache_scales=None if scales is None else by_placeholder(model, scales),
        earlier=options.earlier,
    )
    wanted, advisor, sizes = _complete(wanted, model, dtype, options, options.requested_profiles, calibrated)
    called = call_notes(model.program)
    found = run_until(model.program, wanted, Stage.FIND)
    if calibrated is None and options.earlier == Earlier():
        progress("measuring how many neurons are active")
        advisor.run, advisor.unmeasured = run_shortly(model, found)
    for rank, rewritten in enumerate(run_for_ranks(found, wanted)):
        program, layers = rewritten.program, rewritten.layers
        if calibrated is not None:
            calibrated.refuse_other_blocks(layers)
        refuse_grouped_products(model, program, layers)
        warnings = [*check_matches(layers, options, has_calls=bool(called)), *state_warnings(program)]
        warnings += [*order_warnings(program), *sizes.warnings, *value_warnings(model.program)]
        progress("exporting to ONNX" if ranks == 1 else f"exporting rank {rank} of {ranks} to ONNX")
        names = [model.input_names.get(node.name, node.name) for node in user_inputs(program)]
        opset, own_dump = opset_of(rewritten.attention), dump if rank == 0 else NOWHERE
        graph = export_onnx(program, names, model.output_names, model.dimension_names, opset, own_dump)
        decided = options.earlier.decided or advisor.decided
        earlier = Earlier(
            attention_forms=list(forms if rewritten.attention else ()),
            calibration=None if calibrated is None else calibrated.sha256,
            decided=decided if decided or calibrated is not None else None,
            linear_taken=rewritten.taken or None,
            fp8_errors=errors if options.fp8_error is not None else None,
            cache_scales=scales,
        )
        settings = settings_of(options, dtype, earlier, model.settings)
        annotate(graph, layers, settings)
        rewriting_notes = [*activation_notes(model, layers), *called, *inner_graph_notes(program)]
        if calibrated is not None:
            rewriting_notes += calibrated.notes(layers, dtype)
            warnings += calibrated.profile.warnings
        yield Translation(
            kind=model.kind,
            graph=graph,
            settings=settings,
            layers=layers,
            attention=rewritten.attention,
            linear=rewritten.linear,
            notes=[*model.notes, *notes, *rewriting_notes, *advisor.notes(layers), *rewritten.notes, *sizes.notes],
            warnings=warnings,
            cache=cache,
            profiles=sizes.profiles,
            relations=sizes.relations,
        )


def _load(options: CompileOptions) -> LoadedModel:
    """Load and trace a model, with a key-value cache if it is to have one."""
    if options.cache is None:
        return load_model(options, fixed_sizes(options.optimization_profiles))
    return load_with_cache(options.model, options.cache, options.logits or LAST_LOGITS, options.dtype)


def _cache_scales(options: CompileOptions, model: LoadedModel) -> tuple[dict[str, float], list[str]]:
    """Return the scales of caches in FP8, as chosen before or now, and notes on them."""
    if options.earlier.cache_scales is not None:
        return options.earlier.cache_scales, []
    return choose_scales(model, options.text, choose_device("auto"))


def _fp8_errors(
    options: CompileOptions, model: LoadedModel, dtype: str, progress: Callable[[str], None]
) -> dict[str, float] | None:
    """Return by how much FP8 changes the outputs of blocks, as measured before or now; None where nothing limits it."""
    if options.fp8_error is None or options.earlier.fp8_errors is not None:
        return options.earlier.fp8_errors
    # A model with a cache has other inputs than samples; its blocks are those of the model without one.
    plain = model if options.cache is None else load_model(replace(options, logits=None))
    return measure_errors(plain, dtype, read_samples(options, plain), progress)


def rewrite(
    model: LoadedModel,
    dtype: str,
    options: DecisionOptions,
    profiles: list[tuple[str, ShapeRange]],
    calibrated: LoadedCalibration | None,
    wanted: PassOptions = PassOptions(),  # noqa: B008
) -> tuple[Rewritten, Advisor]:
    """Run every pass on a model, as options and calibration have it.

    Args:
        model: The model.
        dtype: `bf16` or `fp16`.
        options: What decides about blocks.
        profiles: The optimization profiles, as `CompileOptions` has them.
        calibrated: What is known of the model's neurons.
        wanted: What else the passes are to do.

    Returns:
        What the passes made, and the advisor, which has notes for the user.

    Raises:
        UserError: See `run_passes`, `resolve_profiles`, `relations_within`, `choose_target` and `LoadedCalibration`.
    """
    wanted, advisor, _ = _complete(wanted, model, dtype, options, profiles, calibrated)
    rewritten = run_passes(model.program, wanted)
    if calibrated is not None:
        calibrated.refuse_other_blocks(rewritten.layers)
    return rewritten, advisor


def _complete(
    wanted: PassOptions,
    model: LoadedModel,
    dtype: str,
    options: DecisionOptions,
    profiles: list[tuple[str, ShapeRange]],
    calibrated: LoadedCalibration | None,
) -> tuple[PassOptions, Advisor, PlanSizes]:
    """Return the passes' options by those of the command and the calibration, the advisor, and the plan's sizes."""
    inputs = program_inputs(model.program, model.input_names)
    sizes = plan_sizes(str(model.path), inputs, profiles, model.dimension_ranges)
    calibration = None if calibrated is None else calibrated.calibration
    target = choose_target(options.target_gpu, gpu_at_hand())
    rows = rows_of(inputs, sizes.profiles)
    advisor = Advisor(target, lambda block: rows(block.x), compression=options.compression)
    wanted = replace(
        wanted,
        dtype=torch_dtype(dtype),
        layers=options.layers,
        compression=options.compression,
        calibration=calibration,
        advise=advisor,
        linear=options.linear,
        calls=lambda x: [each.max for each in rows(x)],
    )
    return wanted, advisor, sizes


def rows_of(inputs: ModelInputs, profiles: list[ShapeProfile]) -> Callable[[Node], list[Tokens]]:
    """Return what tells the rows of a tensor [..., width] of a traced program, by optimization profile."""
    known = [_known_sizes(inputs, each) for each in profiles]

    def rows(x: Node) -> list[Tokens]:
        dims = x.meta["val"].shape[:-1]
        return [Tokens(*(max(1, math.prod(_size(dim, *sizes) for dim in dims)) for sizes in three)) for three in known]

    return rows


def _known_sizes(inputs: ModelInputs, profile: ShapeProfile) -> list[tuple[dict[str, int], int]]:
    """Return values of symbols, and the most places of an input, at a profile's smallest, tuned and largest shapes.

    A vector is one place.
    """
    values = symbol_sizes(inputs, profile)
    ends = {spec.name: len(spec.shape) - spec.dtype.is_floating_point for spec in inputs.specs}
    shapes = zip(*((each.min, each.opt, each.max) for each in map(profile.__getitem__, ends)), strict=True)
    places = [max(math.prod(shape[:end]) for shape, end in zip(three, ends.values(), strict=True)) for three in shapes]
    return [({symbol: sizes[end] for symbol, sizes in values.items()}, most) for end, most in enumerate(places)]


def _size(dim: int | torch.SymInt, values: dict[str, int], places: int) -> int:
    """Return the size of a dimension for sizes of symbols; the traced one where others are in it.

    Values decide a size that was not traced: its bound counts, but no more than `places`.
    """
    if isinstance(dim, int):
        return dim
    expression = dim.node.expr
    known = {symbol: sympy.Integer(values[str(symbol)]) for symbol in expression.free_symbols if str(symbol) in values}
    size = expression.xreplace(known)
    if size.is_Integer or dim.node.hint is not None:
        return int(size if size.is_Integer else dim.node.hint)
    bound = largest_size(dim.node.shape_env.bound_sympy(size).upper)
    return places if bound is None else min(bound, places)


def activation_notes(model: LoadedModel, layers: list[Layer]) -> list[str]:
    """Point out a config whose activation is not the one that the graph computes; the graph is what counts."""
    declared = _SAME_ACTIVATION.get(model.declared_activation, model.declared_activation)
    found = sorted({layer.activation for layer in layers})
    if not declared or not found or any(declared in name for name in found):
        return []
    return [
        f"config.json says the activation is {model.declared_activation}, but the graph computes {', '.join(found)}"
    ]


def call_notes(program: ExportedProgram) -> list[str]:
    """Point out how many layers of a plan are calls of an op that the model makes itself."""
    calls = len(program.graph.find_nodes(op="call_function", target=EXPERTS))
    many = "1 call" if calls == 1 else f"{calls} calls"
    return [f"{many} of torch.ops.twell.experts in the model: each is a plugin layer, and not listed"] if calls else []


def inner_graph_notes(program: ExportedProgram) -> list[str]:
    """Point out the operations in whose graphs no pass looks."""
    operations = sorted({str(node.target) for node in program.graph.nodes if has_inner_graphs(node)})
    return [f"blocks within {operation} stay dense and are not listed" for operation in operations]


def refuse_grouped_products(model: LoadedModel, program: ExportedProgram, layers: list[Layer]) -> None:
    """Fail if experts stay dense whose products ONNX has no operator for.

    Raises:
        UserError: Some do.
    """
    product = next((node for node in program.graph.nodes if is_grouped(node)), None)
    if product is None:
        return
    dense = [f"{layer.module}: {layer.reason}" for layer in layers if layer.experts and layer.decision != "twell"]
    fix = "`twellc generate` runs the model, and vLLM serves it."
    if model.cache is None:
        fix = (
            'Call model.set_experts_implementation("batched_mm"), for which ONNX has operators, export the model with'
            " torch.export.save, and compile that archive: its experts are dense, too. Switch has no such form."
        )
    raise UserError(
        str(model.path),
        "mixtures of experts that stay dense cannot be compiled as they are",
        got=first_few(dense, "; ") or f"the operation {product.target}",
        expected="experts with ReLU or squared ReLU, as transformers computes them from 5.12 on, which are rewritten",
        fix=fix,
    )


def order_warnings(program: ExportedProgram) -> list[str]:
    """Point out that a host may run what ranks do together in another order on one of them."""
    if is_in_order(program):
        return []
    return [
        "not every all-reduce depends on the one before it, as where attention runs beside a dense block: the engines "
        "of all ranks must run them in one order, which TensorRT does not promise"
    ]


def state_warnings(program: ExportedProgram) -> list[str]:
    """Point out what the model writes to, buffers or inputs: a plan has no state."""
    written = sorted(written_tensors(program) | set(program.graph_signature.user_inputs_to_mutate.values()))
    if not written:
        return []
    return [f"the model writes to {first_few(written)}; the plan does not, so nothing stays from one call to the next"]
