"""Translate a model of any kind, and write its graph to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twellc.base.files import digest, writing
from twellc.compiling.result import Translation
from twellc.compiling.summary import TranslationSummary
from twellc.compiling.translate_onnx import translate_onnx
from twellc.compiling.translate_torch import translate
from twellc.export.onnx_export import save_onnx
from twellc.export.profiles import resolve_profiles
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
    return (translate_onnx if looks_like_onnx(options.model) else translate)(options, progress)
