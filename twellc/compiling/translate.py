"""Translate a model of any kind, and write its graph to a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import onnx
import onnx_ir
from onnx_ir.traversal import RecursiveGraphIterator

from twellc.base.files import digest, writing
from twellc.compiling.result import Translation
from twellc.compiling.summary import GraphFiles, Translated, TranslationSummary
from twellc.compiling.translate_onnx import translate_onnx
from twellc.compiling.translate_torch import translate_for_ranks
from twellc.export.onnx_export import check_types, save_onnx
from twellc.export.refused_nodes import cure, describe, refused_nodes
from twellc.loaders.loaded import fingerprint
from twellc.loaders.onnx_file import external_files
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.options.commands import CompileOptions
from twellc.plugins.library import ATTENTION_NAMES, PLUGIN_NAMES, PLUGIN_NAMESPACE


def translate_to_file(options: CompileOptions, onnx_path: Path, progress: Callable[[str], None]) -> TranslationSummary:
    """Translate a model and write the graph to `onnx_path`, or those of several ranks beside it.

    Raises:
        UserError: See `translate_for_ranks` and `translate_onnx`.
    """
    first, graphs, warnings = None, [], []
    for translation, path in zip(_translations(options, progress), options.graphs(onnx_path), strict=True):
        progress("writing the ONNX graph")
        with writing(path):
            written = save_onnx(translation.graph, path)
        graphs.append(GraphFiles([each.name for each in written], digest(*written)))
        if first is None:
            first = translation
            warnings = [*first.warnings, *(_warnings(path) if options.backend == "none" else [])]
    assert first is not None
    is_onnx = looks_like_onnx(options.model)
    external_data = external_files(options.model) if is_onnx else []
    sha256 = digest(options.model, *external_data) if is_onnx else fingerprint(options.model)
    known = {each.name: getattr(first, each.name) for each in fields(Translated)}
    return TranslationSummary(
        **{**known, "warnings": warnings},
        model={"name": options.model.name, "kind": options.in_memory or first.kind, "sha256": sha256},
        graphs=graphs,
        plugins=_plugins_of(first.graph),
        external_data=external_data,
    )


def _plugins_of(model: onnx_ir.Model) -> list[str]:
    used = {node.op_type for node in RecursiveGraphIterator(model.graph) if node.domain == PLUGIN_NAMESPACE}
    return [name for name in (*PLUGIN_NAMES, *ATTENTION_NAMES) if name in used]


def translate_any(options: CompileOptions, progress: Callable[[str], None]) -> Translation:
    """Load a model of any kind and rewrite it, for the first of several ranks; see `translate_to_file`."""
    return next(_translations(options, progress))


def _translations(options: CompileOptions, progress: Callable[[str], None]) -> Iterator[Translation]:
    if looks_like_onnx(options.model):
        yield translate_onnx(options, progress)
    else:
        yield from translate_for_ranks(options, progress)


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
