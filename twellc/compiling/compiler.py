"""From a model to a plan: translate, build, write."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from twellc.base.errors import UnregisteredOperatorsError, UserError, first_few
from twellc.base.files import OutputFiles, digest, external_data, places, read_file, refuse_replacing
from twellc.base.isolation import run_isolated
from twellc.base.modules import import_modules
from twellc.base.records import of_json, parse_json
from twellc.compiling.manifest import (
    UNKEPT_GRAPH,
    Manifest,
    by_cudnn,
    make_manifest,
    manifest_path,
    needs_plugins,
)
from twellc.compiling.summary import TranslationSummary
from twellc.compiling.text_files import text_files
from twellc.export.plan import build_plan, check_builder
from twellc.export.tensorrt_host import choose_host
from twellc.export.triton import CONFIG_NAME, model_config
from twellc.options.commands import CompileOptions, plan_of_rank
from twellc.plugins.library import attention_library_path, library_path
from twellc.plugins.other_libraries import check_libraries
from twellc.plugins.registration import NEEDS_PLUGINS

EMBEDDED_NOTE = (
    "the plan carries native code, the plugins: TensorRT 10.6 loads it without being asked to, other versions may want "
    "engine_host_code_allowed, and Triton version-compatible=true"
)
CUDNN_NOTE = "the plan computes attention with cuDNN: where it runs, it needs libtwell_attention.so and cuDNN 9"
CACHE_NOTE = (
    "each cache goes in and comes out: a host binds one address to both, and zeroes the memory once (docs/kv-cache.md)"
)
TRITON_WARNING = (
    "Triton's TensorRT backend runs plans of TensorRT, not of TensorRT-RTX: compile with --backend tensorrt"
)
_WEIGHTS = "weights of --onnx"
_METADATA = 1 << 24  # bytes at the end of a graph, where its metadata stands
# What an earlier run may have written into a model's folder, and may be written again.
_COMPILED = ("*.plan", "*.plan.json", "*.onnx", "*.onnx.data")


def compile_model(
    options: CompileOptions, progress: Callable[[str], None], make_page: Callable[[Manifest], str] | None = None
) -> Manifest:
    """Compile a model and write what the options ask for.

    Args:
        options: See `CompileOptions`.
        progress: Receives the name of each step.
        make_page: Returns a page to look at; only `html` needs it.

    Returns:
        The manifest, which is also the report.

    Raises:
        UserError: Something that the user gave does not work; nothing was written.
    """
    check_libraries(options.plugin_libraries)
    backend = None if options.backend == "none" else choose_host(options.backend)
    with OutputFiles(options.overwrite) as outputs:
        if options.triton is not None and options.output is not None:
            outputs.make_folder(options.output.parent)
        _check_outputs(options, outputs)
        texts = text_files(options)
        if texts:
            outputs.check_folder("--output", texts[0][1].parent)
        if options.onnx is not None:
            staged = list(map(outputs.stage, options.graphs(options.onnx)))
            onnx_path = staged[0].with_name(options.onnx.name)
        else:
            assert options.output is not None
            onnx_path = outputs.scratch(options.output, UNKEPT_GRAPH)
        if backend is not None and options.output is not None:
            run_isolated(
                check_builder, backend, options.attention, options.cache is not None, list(options.plugin_libraries),
                progress=progress,
            )  # fmt: skip
        try:
            translation = run_isolated(_translate, options, onnx_path, progress=progress)
        except UnregisteredOperatorsError as error:
            if not _has_operators(error.operators):
                raise
            translation = _translate(options, onnx_path, progress)  # where they are registered
        _refuse_model_files(options, translation.external_data)
        if options.triton is not None and options.tensor_parallel > 1 and len(translation.profiles) > 1:
            raise UserError(
                "--profile", "Triton runs plans for several GPUs with one optimization profile",
                got=f"{len(translation.profiles)} profiles", fix="Give one that holds all shapes.",
            )  # fmt: skip
        if options.onnx is not None:
            for name in itertools.chain.from_iterable(graph.files[1:] for graph in translation.graphs):
                outputs.check(_WEIGHTS, options.onnx.with_name(name))
                outputs.stage(options.onnx.with_name(name))
        plans = []
        for path, graph in zip(options.plans, options.graphs(onnx_path), strict=True) if backend is not None else ():
            plan_file = outputs.stage(path)
            said = "building the plan" if options.tensor_parallel == 1 else f"building {path.name}"
            plan = run_isolated(
                build_plan, backend, graph, plan_file, translation.profiles, _embedded(options, translation),
                list(options.plugin_libraries), _needs(options, translation), translation.cache is not None,
                progress=functools.partial(_say_phase, progress, said),
            )  # fmt: skip
            plans.append((plan, plan_file))
        if plans and options.output is not None and options.tensor_parallel > 1:
            outputs.link(options.output, options.plans[0].name)
        manifest = make_manifest(options, translation, plans)
        manifest.notes.extend([CUDNN_NOTE] if by_cudnn(translation.attention) else [])
        manifest.notes.extend([CACHE_NOTE] if translation.cache is not None else [])
        manifest.notes.extend([EMBEDDED_NOTE] if manifest.plugins.embedded else [])
        stale = list(_stale(options))
        for path in stale:
            outputs.remove(path)
        if stale:
            names = first_few([path.name for path in stale])
            manifest.notes.append(f"files that an earlier compilation for more GPUs wrote were removed: {names}")
        manifest.warnings.extend([TRITON_WARNING] if options.triton is not None and backend != "tensorrt" else [])
        text = json.dumps(manifest.to_json(), indent=2) + "\n"
        for source, kept in texts:
            outputs.make_folder(kept.parent)
            outputs.write(kept, read_file(source))
        if options.output is not None:
            outputs.write(manifest_path(options.output), text)
        if options.report is not None:
            outputs.write(options.report, text)
        if options.html is not None:
            assert make_page is not None
            outputs.write(options.html, make_page(manifest))
        if options.triton is not None and plans:
            config = model_config(
                options.triton.name, plans[0][0], len(manifest.profiles), manifest.plugins.register,
                options.tensor_parallel,
            )  # fmt: skip
            outputs.write(options.triton / CONFIG_NAME, config)
        outputs.commit()
    return manifest


def _stale(options: CompileOptions) -> Iterator[Path]:
    """Yield plans and graphs of ranks that an earlier compilation to the same place wrote, and this one does not.

    A plan that is not as the manifest there says may be somebody else's, and so may a graph that does not say that it
    is of one of several ranks.
    """
    output, onnx = options.output, options.onnx
    if output is not None and manifest_path(output).is_file():
        with suppress(ValueError, AttributeError):
            earlier = of_json(Manifest, parse_json(read_file(manifest_path(output)))).ranks or []
            for path, rank in [(plan_of_rank(output, number), rank) for number, rank in enumerate(earlier)]:
                plain = path.is_file() and not path.is_symlink()
                if plain and path not in options.plans and rank.plan is not None and rank.plan.sha256 == digest(path):
                    yield path
    if onnx is not None and onnx.parent.is_dir():
        of_rank = re.compile(rf"{re.escape(onnx.stem)}\.rank\d+{re.escape(onnx.suffix)}")
        found = sorted(path for path in onnx.parent.iterdir() if of_rank.fullmatch(path.name))
        for path in [each for each in found if each not in options.graphs(onnx) and each.is_file()]:
            if not path.is_symlink() and _is_of_a_rank(path):
                yield path
                if external_data(path).is_file():
                    yield external_data(path)


def _is_of_a_rank(graph: Path) -> bool:
    """Whether a file is a graph of ours for one of several ranks, by what the end of it says."""
    with graph.open("rb") as file:
        file.seek(max(0, graph.stat().st_size - _METADATA))
        end = file.read()
    return b'{"twellc": "' in end and b'"tensor_parallel": ' in end


def _say_phase(progress: Callable[[str], None], what: str, phase: str) -> None:
    progress(f"{what}: {phase}")


def _translate(options: CompileOptions, onnx_path: Path, progress: Callable[[str], None]) -> TranslationSummary:
    """Translate a model; only the process that does it imports torch."""
    from twellc.compiling.translate import translate_to_file

    import_modules(options.import_modules)
    return translate_to_file(options, onnx_path, progress)


def _has_operators(names: list[str]) -> bool:
    """Whether operators of torch, each as `namespace.name`, are registered in this process."""
    torch = sys.modules.get("torch")
    return torch is not None and all(hasattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1])
                                     for name in names)  # fmt: skip


def _embedded(options: CompileOptions, translation: TranslationSummary) -> list[Path]:
    """Return the plugin libraries that the plan is to carry."""
    if not options.embed_plugins:
        return []
    needed = by_cudnn(translation.attention) or translation.cache is not None
    attention = attention_library_path() if needed else None
    return [library_path(), *([attention] if attention is not None else []), *options.plugin_libraries]


def _needs(options: CompileOptions, translation: TranslationSummary) -> str:
    """Return what a plan says that it needs; one may be found without its manifest."""
    own = [NEEDS_PLUGINS] if needs_plugins(translation) else []
    others = [f"needs the TensorRT plugins in {path.name}" for path in options.plugin_libraries]
    return "; ".join([*own, *others])


def _check_outputs(options: CompileOptions, outputs: OutputFiles) -> None:
    taken: dict[Path, str] = {}
    for option, path in _destinations(options):
        if option == "--dump-graphs":
            outputs.check_folder(option, path)
        elif option != _WEIGHTS:  # which stand in the ONNX file as long as they are small
            outputs.check(option, path)
        # A link is itself replaced, not what it leads to.
        twin = taken.setdefault(Path(os.path.realpath(path.parent)) / path.name, option)
        if twin != option:
            raise UserError(f"{option} {path}", f"is the same file as {twin}")
        refuse_replacing(option, path, (options.calibration, options.prune_check))
    stale = [] if options.overwrite else [path.name for path in _stale(options)]
    if stale:
        what = "an earlier compilation for more GPUs wrote to the same place"
        fix = "Add --overwrite to remove these files."
        raise UserError(f"--tensor-parallel {options.tensor_parallel}", what, got=first_few(stale), fix=fix)
    files = list(options.model.iterdir()) if options.model.is_dir() else []
    folder = Path(os.path.realpath(options.model))
    files += [path for _, path in _destinations(options) if any(folder in place.parents for place in places(path))]
    files = [file for file in files if file.is_file() and not any(map(file.match, _COMPILED))]
    _refuse_model_files(options, [options.model, *options.plugin_libraries, *files])


def _refuse_model_files(options: CompileOptions, files: list[Path]) -> None:
    taken = {place for file in files for place in places(file)}
    for option, path in _destinations(options):
        if taken & places(path):
            raise UserError(
                f"{option} {path}", "belongs to the model, or stands among its files", fix="Write to another place."
            )


def _destinations(options: CompileOptions) -> Iterator[tuple[str, Path]]:
    """Yield what is written, with the option that asks for it; names made of another come after that one.

    The root has no name: whoever checks it never gets to the file beside it.
    """
    if options.output is not None:
        yield "--output" if options.triton is None else "--triton", options.output
        if options.tensor_parallel > 1:
            yield from (("--tensor-parallel", plan) for plan in options.plans)
        yield "manifest", manifest_path(options.output)
    if options.triton is not None:
        yield "--triton", options.triton / CONFIG_NAME
    if options.onnx is not None:
        for graph in options.graphs(options.onnx):
            yield "--onnx", graph
            yield _WEIGHTS, external_data(graph)
    if options.report is not None:
        yield "--report", options.report
    if options.html is not None:
        yield "--html", options.html
    if options.dump_graphs is not None:
        yield "--dump-graphs", options.dump_graphs
