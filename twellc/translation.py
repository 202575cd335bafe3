"""From a model to an ONNX graph with `twell` nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from torch.export import ExportedProgram

from twellc import __version__
from twellc.config import DTYPES, CompileOptions
from twellc.errors import UserError, first_few
from twellc.export.attention_forms import choose_forms
from twellc.export.onnx_export import export_onnx, opset_of, save_onnx
from twellc.export.profiles import ModelInputs, input_specs, program_inputs, resolve_profiles
from twellc.export.shapes import Profile
from twellc.files import digest, writing
from twellc.loaders.model import DimensionRange, LoadedModel, dtype_name, fingerprint, load_model
from twellc.loaders.onnx_file import external_files
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.passes.pipeline import run_passes
from twellc.passes.precision import parameter_dtypes
from twellc.passes.program import has_inner_graphs, written_tensors
from twellc.passes.report import Attention, Layer

_AUTO_NOTE = "--layers auto rewrites every match: no sparsity was measured, so speed is not known"
METADATA_KEY = "twellc"
# Other names of activations in Hugging Face configs.
_SAME_ACTIVATION = {"swish": "silu", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "squared_relu": "relu2"}


@dataclass(frozen=True)
class Translation:
    """A model rewritten and translated to ONNX.

    Attributes:
        kind: The kind of model.
        inputs: The inputs of the graph.
        ranges: (min, opt, max) of the default optimization profile, by symbol.
        layers: What became of each feed-forward block.
        attention: What became of each attention block.
        graph: The graph.
        settings: The settings that decide what the graph is.
        notes: What the user should know.
        warnings: What the user should worry about.
    """

    kind: str
    inputs: ModelInputs
    ranges: dict[str, DimensionRange]
    layers: list[Layer]
    attention: list[Attention]
    graph: onnx_ir.Model
    settings: dict[str, Any]
    notes: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class TranslationSummary:
    """What is left of a translation once the graph is in a file.

    Attributes:
        model: Name, kind and SHA-256 of the model.
        settings: The settings that decide what the graph is.
        layers: What became of each feed-forward block.
        attention: What became of each attention block.
        notes: What the user should know.
        warnings: What the user should worry about.
        profiles: The optimization profiles.
        files: Names of the files that were written: the graph, and its weights where they stand apart.
        digest: SHA-256 of these files.
        external_data: The files beside an ONNX model that hold its weights.
    """

    model: dict[str, str]
    settings: dict[str, Any]
    layers: list[Layer]
    attention: list[Attention]
    notes: list[str]
    warnings: list[str]
    profiles: list[Profile]
    files: list[str]
    digest: str
    external_data: list[Path]


def translate_to_file(options: CompileOptions, onnx_path: Path, progress: Callable[[str], None]) -> TranslationSummary:
    """Translate a model and write the graph to `onnx_path`.

    Raises:
        UserError: See `translate` and `resolve_profiles`.
    """
    translation = translate_any(options, progress)
    profiles, notes = resolve_profiles(translation.inputs, list(options.profiles), translation.ranges)
    progress("writing the ONNX graph")
    with writing(onnx_path):
        written = save_onnx(translation.graph, onnx_path)
    is_onnx = looks_like_onnx(options.model)
    external_data = external_files(options.model) if is_onnx else []
    sha256 = digest(options.model, *external_data) if is_onnx else fingerprint(options.model)
    return TranslationSummary(
        model={"name": options.model.name, "kind": options.in_memory or translation.kind, "sha256": sha256},
        settings=translation.settings,
        layers=translation.layers,
        attention=translation.attention,
        notes=translation.notes + notes,
        warnings=translation.warnings,
        profiles=profiles,
        files=[path.name for path in written],
        digest=digest(*written),
        external_data=external_data,
    )


def translate_any(options: CompileOptions, progress: Callable[[str], None]) -> Translation:
    """Load a model of any kind and rewrite it; see `translate` and `translate_onnx`."""
    from twellc.onnx_models import translate_onnx

    return (translate_onnx if looks_like_onnx(options.model) else translate)(options, progress)


def translate(options: CompileOptions, progress: Callable[[str], None]) -> Translation:
    """Load a model, rewrite it and translate it to ONNX, all in memory.

    Raises:
        UserError: The model cannot be loaded, rewritten as asked (`strict`, `layers`) or translated.
    """
    progress("loading and tracing the model")
    model = load_model(options.model, options.trust_model, options.inputs, options.padding, options.logits)
    dtype, notes = choose_dtype(model, options.dtype)
    progress("rewriting feed-forward blocks")
    forms = tuple(options.attention_forms) or choose_forms(options.backend, options.attention)
    rewritten = run_passes(
        model.program, torch_dtype(dtype), options.layers, options.compression, options.dump_graphs, forms
    )
    warnings = [*check_matches(rewritten.layers, options), *state_warnings(rewritten.program)]
    notes = [*notes, *activation_notes(model, rewritten.layers), *inner_graph_notes(rewritten.program)]
    progress("exporting to ONNX")
    names = [spec.name for spec in input_specs(rewritten.program)]
    graph = export_onnx(
        rewritten.program, names, model.output_names, model.dimension_names, opset_of(rewritten.attention)
    )
    inputs = program_inputs(rewritten.program)
    traced_by = {**model.settings, "attention_forms": list(forms if rewritten.attention else ())}
    settings, auto = annotate(graph, rewritten.layers, dtype, options, traced_by)
    notes = [*model.notes, *notes, *auto]
    return Translation(
        model.kind, inputs, model.dimension_ranges, rewritten.layers, rewritten.attention, graph, settings, notes,
        warnings,
    )  # fmt: skip


def annotate(
    graph: onnx_ir.Model, layers: list[Layer], dtype: str, options: CompileOptions, traced_by: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Write into a graph what was done, and return the settings that decide what it is, with what to say of them.

    Args:
        graph: The graph.
        layers: What became of each feed-forward block.
        dtype: `bf16` or `fp16`.
        options: See `CompileOptions`.
        traced_by: The settings that the model was traced by, and the forms of its attention.
    """
    settings = {"dtype": dtype, "layers": options.layers, "compression": options.compression, **traced_by}
    done = {"twellc": __version__, "settings": settings, "layers": [asdict(layer) for layer in layers]}
    graph.metadata_props[METADATA_KEY] = json.dumps(done)
    automatic = options.layers == "auto" and any(layer.decision == "twell" for layer in layers)
    return settings, [_AUTO_NOTE] if automatic else []


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that `bf16` or `fp16` stands for."""
    dtype = getattr(torch, DTYPES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def choose_dtype(model: LoadedModel, requested: str | None) -> tuple[str, list[str]]:
    """Return the dtype to compile in, `bf16` or `fp16`, and what to tell the user about the choice."""
    found = parameter_dtypes(model.program)
    own = " and ".join(sorted(map(dtype_name, found))) or "no floating-point dtype"
    for name in DTYPES:
        if found == {torch_dtype(name)} and requested in (None, name):
            return name, []
    if requested is not None:
        return requested, [f"the model is in {own}; compiled in {DTYPES[requested]} as asked"]
    return "bf16", [f"the model is in {own}; compiled in bfloat16 (--dtype changes it)"]


def activation_notes(model: LoadedModel, layers: list[Layer]) -> list[str]:
    """Point out a config whose activation is not the one that the graph computes; the graph is what counts."""
    declared = _SAME_ACTIVATION.get(model.declared_activation, model.declared_activation)
    found = sorted({layer.activation for layer in layers})
    if not declared or not found or any(declared in name for name in found):
        return []
    return [
        f"config.json says the activation is {model.declared_activation}, but the graph computes {', '.join(found)}"
    ]


def inner_graph_notes(program: ExportedProgram) -> list[str]:
    """Point out the operations in whose graphs no pass looks."""
    operations = sorted({str(node.target) for node in program.graph.nodes if has_inner_graphs(node)})
    return [f"blocks within {operation} stay dense and are not listed" for operation in operations]


def state_warnings(program: ExportedProgram) -> list[str]:
    """Point out what the model writes to, buffers or inputs: a plan has no state."""
    written = sorted(written_tensors(program) | set(program.graph_signature.user_inputs_to_mutate.values()))
    if not written:
        return []
    return [f"the model writes to {first_few(written)}; the plan does not, so nothing stays from one call to the next"]


def check_matches(layers: list[Layer], options: CompileOptions) -> list[str]:
    """Return the warnings about blocks that did not match.

    Raises:
        UserError: There are some, and `strict` is set.
    """
    refused = [layer for layer in layers if not layer.matched]
    warnings = []
    if not any(layer.matched for layer in layers):
        warnings.append("no feed-forward block can be rewritten: the plan is dense throughout")
    warnings += [f"layer {layer.module}: {layer.reason}. Left dense" for layer in refused]
    if warnings and options.strict:
        raise UserError(
            str(options.model), first_few(warnings, "; "), fix="--strict was given; without it such blocks stay dense."
        )
    return warnings
