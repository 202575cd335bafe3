"""From an ONNX file of plain operators to an ONNX graph with `twell` nodes."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx
import onnx_ir

from twellc.base.dtypes import DTYPES, UNCHANGED, torch_dtype
from twellc.base.errors import UserError
from twellc.compiling.result import Translation, annotate, check_matches
from twellc.compiling.settings import settings_of
from twellc.decisions.advise import Advisor
from twellc.decisions.choose import Tokens
from twellc.decisions.targets import choose_target, gpu_at_hand
from twellc.export.names import distinct_outputs, name_ends
from twellc.export.profiles import plan_sizes
from twellc.export.rotary_halves import RotaryHalves
from twellc.export.shapes import ShapeProfile
from twellc.loaders.cached import no_directory
from twellc.loaders.onnx_models import (
    KIND,
    choose_onnx_dtype,
    low_precisions,
    model_inputs,
    open_model,
    refuse_rewritten,
)
from twellc.options.commands import CompileOptions
from twellc.options.decisions import refuse_calibration, refuse_linear
from twellc.options.source import refuse_choices
from twellc.options.weights import KEEP
from twellc.passes.decide import repeat
from twellc.passes.dump import GraphDump
from twellc.passes.fp8 import Wish
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.onnx.ffn import OnnxBlocks, find_onnx_blocks, rewrite_onnx
from twellc.passes.report import Earlier
from twellc.passes.sizes.inputs import ModelInputs


def translate_onnx(options: CompileOptions, progress: Callable[[str], None]) -> Translation:
    """Load an ONNX model and rewrite it.

    Raises:
        UserError: The model cannot be loaded or rewritten as asked (`strict`, `layers`, `dtype`).
    """
    if options.attention != "auto":
        where, what = f"--attention {options.attention}", "attention in an ONNX file stays as it is"
        expected = "a torch.export archive or a Hugging Face directory"
        raise UserError(where, what, got=str(options.model), expected=expected, fix="Leave it out.")
    refuse_linear(options, str(options.model))
    if options.tensor_parallel > 1:
        where, what = f"--tensor-parallel {options.tensor_parallel}", "an ONNX file cannot be shared"
        expected = "a torch.export archive, a Hugging Face directory, a pickled module or a sparse autoencoder"
        raise UserError(where, what, got=str(options.model), expected=expected)
    refuse_calibration(options, f"{options.model}, an {KIND}")
    if options.fp8_error is not None:
        where, what = f"--fp8-error {options.fp8_error}", "an ONNX file is not run, so nothing is measured"
        raise UserError(where, what, got=str(options.model), fix="Choose blocks by --layers.")
    if options.cache is not None:
        raise no_directory(options.model)
    progress("loading the model")
    refuse_choices(options.padding, options.logits, f"{options.model}, an {KIND}")
    model = open_model(options.model, options.input_specs)
    refuse_rewritten(options.model, model)
    inputs = model_inputs(options.model, model)
    dtype = choose_onnx_dtype(model, options.dtype)
    progress("rewriting feed-forward blocks")
    sizes = plan_sizes(str(options.model), inputs, list(options.optimization_profiles), {})
    target = choose_target(options.target_gpu, gpu_at_hand())
    advisor = Advisor(target, rows_of_inputs(inputs, sizes.profiles), compression=options.compression)
    decided = options.earlier.decided
    advise = advisor if decided is None else repeat(decided)
    found = find_onnx_blocks(model, torch_dtype(dtype), options.layers, advise, Wish(options.weights != KEEP))
    rewritten = rewrite_onnx(found, options.compression)
    dump = GraphDump(options.dump_graphs)
    dump.text("source", lambda: onnx.helper.printable_graph(model.graph))
    dump.text("rewrite_onnx", lambda: onnx.helper.printable_graph(onnx_ir.serde.serialize_graph(rewritten.graph)))
    warnings = [*check_matches(found.layers, options), *sizes.warnings]
    _keep_metadata_once(rewritten)
    graph = RotaryHalves()(rewritten).model
    names = [spec.name for spec in inputs.specs]
    outputs, renamed = distinct_outputs(names, [value.name for value in model.graph.output])
    name_ends(graph.graph, names, outputs)
    is_low = bool(low_precisions(model)) or any(layer.decision == "twell" for layer in found.layers)
    earlier = Earlier(attention_forms=[], decided=decided or advisor.decided or None)
    settings = settings_of(options, dtype if is_low else UNCHANGED, earlier)
    annotate(graph, found.layers, settings)
    return Translation(
        kind=KIND,
        graph=graph,
        settings=settings,
        layers=found.layers,
        notes=[*renamed, *onnx_notes(found, dtype), *advisor.notes(found.layers), *sizes.notes],
        warnings=warnings,
        profiles=sizes.profiles,
        relations=sizes.relations,
    )


def _keep_metadata_once(model: onnx_ir.Model) -> None:
    """Leave the metadata of initializers to their values: onnx_ir would write it twice."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, onnx_ir.serde.TensorProtoTensor) and tensor.metadata_props:
            del tensor.raw.metadata_props[:]


def rows_of_inputs(inputs: ModelInputs, profiles: list[ShapeProfile]) -> Callable[[FfnBlock], list[Tokens]]:
    """Return what tells the rows of a block where shapes within the graph are not known: the most that an input has."""

    def most(profile: ShapeProfile, which: str) -> int:
        shapes = ((spec, getattr(profile[spec.name], which)) for spec in inputs.specs)
        # Floating-point inputs have features behind the tokens.
        rows = (math.prod(shape[:-1] if spec.dtype.is_floating_point else shape) for spec, shape in shapes)
        return max(rows, default=1)

    found = [Tokens(*(most(profile, which) for which in ("min", "opt", "max"))) for profile in profiles]
    return lambda block: found


def onnx_notes(found: OnnxBlocks, dtype: str) -> list[str]:
    """Say that blocks change their precision, or that of their weights, if some do."""
    if not found.casts:
        return found.dequantised
    return [
        *found.dequantised,
        f"the graph is in float32: rewritten blocks compute in {DTYPES[dtype]} between casts (--dtype changes it), "
        f"everything else stays in float32; export the model in {DTYPES[dtype]} to run all of it so",
    ]
