"""Translate a model of any kind, and write its graph to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx

from twellc.base.files import digest, writing
from twellc.compiling.result import Translation
from twellc.compiling.summary import TranslationSummary
from twellc.compiling.translate_onnx import translate_onnx
from twellc.compiling.translate_torch import translate
from twellc.export.onnx_export import check_types, save_onnx
from twellc.export.profiles import resolve_profiles
from twellc.export.refused_nodes import cure, describe, refused_nodes
from twellc.loaders.loaded import fingerprint
from twellc.loaders.onnx_file import external_files
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.options.commands import CompileOptions


def translate_to_file(options: CompileOptions, onnx_path: Path, progress: Callable[[str], None]) -> TranslationSummary:
    """Translate a model and write the graph to `onnx_path`.

    Raises:
        UserError: See `translate` and `resolve_profiles`.
    """
    translation = translate_any(options, progress)
    profiles, notes = resolve_profiles(translation.inputs, options.requested_profiles, translation.ranges)
    progress("writing the ONNX graph")
    with writing(onnx_path):
        written = save_onnx(translation.graph, onnx_path)
    warnings = [*translation.warnings, *(_warnings(onnx_path) if options.backend == "none" else [])]
    is_onnx = looks_like_onnx(options.model)
    external_data = external_files(options.model) if is_onnx else []
    sha256 = digest(options.model, *external_data) if is_onnx else fingerprint(options.model)
    return TranslationSummary(
        model={"name": options.model.name, "kind": options.in_memory or translation.kind, "sha256": sha256},
        settings=translation.settings,
        layers=translation.layers,
        attention=translation.attention,
        notes=translation.notes + notes,
        warnings=warnings,
        profiles=profiles,
        files=[path.name for path in written],
        digest=digest(*written),
        external_data=external_data,
        cache=translation.cache,
    )


def translate_any(options: CompileOptions, progress: Callable[[str], None]) -> Translation:
    """Load a model of any kind and rewrite it; see `translate` and `translate_onnx`."""
    return (translate_onnx if looks_like_onnx(options.model) else translate)(options, progress)


def _warnings(onnx_path: Path) -> list[str]:
    """Return what may keep others from taking a graph; where a plan is built, the builder has its say."""
    refused = refused_nodes(onnx.load(onnx_path, load_external_data=False))
    warnings = [f"TensorRT does not know {describe(refused)}. {cure(refused).rstrip('.')}"] if refused else []
    against_types = check_types(onnx_path)
    if against_types:
        warnings.append(
            f"ONNX's own rules do not allow the graph ({against_types}); runtimes that keep to them refuse it"
        )
    return warnings
