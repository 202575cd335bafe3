"""From a model to a plan: load, rewrite, export, build, write."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir
import torch

from twellc import __version__
from twellc.config import DTYPES, CompileOptions
from twellc.errors import UserError
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.plan import build_plan
from twellc.export.profiles import input_specs, resolve_profiles
from twellc.export.tensorrt_host import find_host
from twellc.files import Outputs
from twellc.loaders.model import LoadedModel, dtype_name, fingerprint, load_model
from twellc.manifest import file_digest, make_manifest, manifest_path
from twellc.passes.decide import Layer
from twellc.passes.pipeline import Rewritten, run_passes
from twellc.passes.precision import parameter_dtypes

AUTO_NOTE = "--layers auto rewrites every match: no sparsity was measured, so speed is not known"
METADATA_KEY = "twellc"


@dataclass(frozen=True)
class Translation:
    """A model rewritten and translated to ONNX, with the notes and warnings that came up."""

    model: LoadedModel
    rewritten: Rewritten
    graph: onnx_ir.Model
    dtype: torch.dtype
    notes: list[str]
    warnings: list[str]


def compile_model(options: CompileOptions, progress: Callable[[str], None]) -> dict[str, Any]:
    """Compile a model and write what the options ask for.

    Args:
        options: See `CompileOptions`.
        progress: Receives the name of each step.

    Returns:
        The manifest, which is also the report.

    Raises:
        UserError: Something that the user gave does not work; nothing was written.
    """
    host = None if options.backend == "none" else find_host(options.backend)
    with Outputs(options.overwrite) as outputs:
        _check_outputs(options, outputs)
        translation = translate(options, progress)
        profiles, notes = resolve_profiles(
            translation.rewritten.program, list(options.profiles), translation.model.dimension_ranges
        )
        with _onnx_destination(options, outputs) as onnx_path:
            progress("writing the ONNX graph")
            written = save_onnx(translation.graph, onnx_path)
            if options.onnx is not None:
                for extra in written[1:]:
                    outputs.stage(options.onnx.with_name(extra.name))
            contents: dict[str, Any] = {
                "model": {
                    "name": options.model.name,
                    "kind": translation.model.kind,
                    "sha256": fingerprint(options.model),
                },
                "settings": settings_of(options, translation.dtype),
                "layers": translation.rewritten.layers,
                "notes": translation.notes + notes,
                "onnx": {"file": options.onnx and options.onnx.name, "sha256": file_digest(*written)},
                "profiles": profiles,
                "warnings": translation.warnings,
            }
            # The builder needs the memory.
            del translation
            gc.collect()
            if host is None:
                manifest = make_manifest(**contents)
            else:
                assert options.output is not None
                plan_file = outputs.stage(options.output)
                plan = build_plan(
                    host, onnx_path, plan_file, profiles, lambda phase: progress(f"building the plan: {phase}")
                )
                manifest = make_manifest(**contents, host=host, plan=plan, plan_file=plan_file)
                outputs.stage(manifest_path(options.output)).write_text(json.dumps(manifest, indent=2) + "\n")
        if options.report is not None:
            outputs.stage(options.report).write_text(json.dumps(manifest, indent=2) + "\n")
        outputs.commit()
    return manifest


def translate(options: CompileOptions, progress: Callable[[str], None]) -> Translation:
    """Load a model, rewrite it and translate it to ONNX, all in memory.

    Raises:
        UserError: The model cannot be loaded, rewritten as asked (`strict`, `layers`) or translated.
    """
    progress("loading and tracing the model")
    model = load_model(options.model, options.trust_model)
    dtype, notes = choose_dtype(model, options.dtype)
    progress("rewriting feed-forward blocks")
    rewritten = run_passes(model.program, dtype, options.layers, options.compression, options.dump_graphs)
    warnings = check_matches(rewritten.layers, options)
    progress("exporting to ONNX")
    names = [spec.name for spec in input_specs(rewritten.program)]
    graph = export_onnx(rewritten.program, names, model.output_names, model.dimension_names)
    if options.layers == "auto" and any(layer.decision == "twell" for layer in rewritten.layers):
        notes = [*notes, AUTO_NOTE]
    graph.metadata_props[METADATA_KEY] = json.dumps(
        {
            "twellc": __version__,
            "settings": settings_of(options, dtype),
            "layers": [asdict(layer) for layer in rewritten.layers],
        }
    )
    return Translation(model, rewritten, graph, dtype, model.notes + notes, warnings)


def choose_dtype(model: LoadedModel, requested: str | None) -> tuple[torch.dtype, list[str]]:
    """Return the dtype to compile in, and what to tell the user about the choice."""
    found = parameter_dtypes(model.program)
    own = " and ".join(sorted(map(dtype_name, found)))
    if requested is not None:
        dtype = DTYPES[requested]
        return dtype, [] if found == {dtype} else [f"the model is in {own}; compiled in {dtype_name(dtype)} as asked"]
    if len(found) == 1 and (dtype := next(iter(found))) in DTYPES.values():
        return dtype, []
    return torch.bfloat16, [f"the model is in {own or 'no floating-point dtype'}; compiled in bfloat16 (--dtype)"]


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
            str(options.model), "; ".join(warnings[:3]) + (f"; and {len(warnings) - 3} more" if warnings[3:] else ""),
            fix="--strict was given; without it such blocks stay dense.",
        )  # fmt: skip
    return warnings


def _check_outputs(options: CompileOptions, outputs: Outputs) -> None:
    destinations = {
        "--output": options.output,
        "--onnx": options.onnx,
        "--report": options.report,
        "manifest": options.output and manifest_path(options.output),
    }
    taken: dict[Path, str] = {}
    for option, path in destinations.items():
        if path is None:
            continue
        outputs.check(option, path)
        twin = taken.setdefault(path.resolve(), option)
        if twin != option:
            raise UserError(f"{option} {path}", f"is the same file as {twin}")
        if path.resolve() == options.model.resolve():
            raise UserError(f"{option} {path}", "is the model itself")


@contextmanager
def _onnx_destination(options: CompileOptions, outputs: Outputs) -> Iterator[Path]:
    """Give a path for the ONNX file: the one to keep, or one that vanishes."""
    if options.onnx is not None:
        yield outputs.stage(options.onnx)
        return
    assert options.output is not None
    with tempfile.TemporaryDirectory(prefix=".twellc-", dir=options.output.parent) as folder:
        yield Path(folder) / f"{options.output.stem}.onnx"


def settings_of(options: CompileOptions, dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings that decide what the rewritten graph is."""
    name = next(name for name, known in DTYPES.items() if known == dtype)
    return {"dtype": name, "layers": options.layers, "compression": options.compression}
