"""From a model to a plan: translate, build, write."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

from twellc.base.caches import FP8_CACHE
from twellc.base.errors import UnregisteredOperatorsError, UserError, first_few
from twellc.base.files import OutputFiles, read_file
from twellc.base.isolation import run_isolated
from twellc.base.modules import import_modules
from twellc.compiling.destinations import WEIGHTS, destinations_of
from twellc.compiling.manifest import (
    UNKEPT_GRAPH,
    Manifest,
    by_cudnn,
    make_manifest,
    manifest_path,
)
from twellc.compiling.summary import TranslationSummary
from twellc.export.plan import build_plan, check_builder
from twellc.export.tensorrt_host import RTX_CAPABILITIES, choose_host, compute_capability
from twellc.export.triton import CONFIG_NAME, model_config
from twellc.options.commands import CompileOptions
from twellc.passes.report import Layer, Linear, reads_fp8
from twellc.plugins.elf import machine_code
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
PTX_NOTE = (
    f"GPUs of TensorRT-RTX ({RTX_CAPABILITIES}) compile the kernels when they first load them: libtwell_plugins.so has "
    "no machine code for these (docs/limits.md)"
)
_FIRST_WITH_FP8 = (8, 9)  # of GPUs, for TensorRT
_FIRST_WITH_FP8_CACHE = (9, 0)  # for the kernel
TRITON_WARNING = (
    "Triton's TensorRT backend runs plans of TensorRT, not of TensorRT-RTX: compile with --backend tensorrt"
)


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
    if backend is not None and options.kv_cache_dtype == FP8_CACHE:
        refuse_fp8_cache(compute_capability())
    with OutputFiles(options.overwrite) as outputs:
        if options.triton is not None and options.output is not None:
            outputs.make_folder(options.output.parent)
        destinations = destinations_of(options)
        destinations.check(options, outputs)
        if options.onnx is not None:
            staged = list(map(outputs.stage, options.graphs(options.onnx)))
            onnx_path = staged[0].with_name(options.onnx.name)
        else:
            assert options.output is not None
            onnx_path = outputs.scratch(options.output, UNKEPT_GRAPH)
        libraries = list(options.plugin_libraries)
        if backend is not None and options.output is not None:
            cached = options.cache is not None
            run_isolated(check_builder, backend, options.needed_attention, cached, libraries, progress=progress)
        try:
            translation = run_isolated(_translate, options, onnx_path, progress=progress)
        except UnregisteredOperatorsError as error:
            if not _has_operators(error.operators):
                raise
            translation = _translate(options, onnx_path, progress)  # where they are registered
        destinations.refuse(translation.external_data)
        if backend == "tensorrt":
            refuse_fp8(translation.layers, translation.linear, compute_capability())
        if options.triton is not None and options.tensor_parallel > 1 and len(translation.profiles) > 1:
            where, got, fix = (
                "--optimization-profile",
                f"{len(translation.profiles)} profiles",
                "Give one that holds all shapes.",
            )
            raise UserError(where, "Triton runs plans for several GPUs with one optimization profile", got=got, fix=fix)
        if options.onnx is not None:
            for name in itertools.chain.from_iterable(graph.files[1:] for graph in translation.graphs):
                outputs.check(WEIGHTS, options.onnx.with_name(name))
                outputs.stage(options.onnx.with_name(name))
        plans = []
        for path, graph in zip(options.plans, options.graphs(onnx_path), strict=True) if backend is not None else ():
            plan_file = outputs.stage(path)
            what = "building the plan" if options.tensor_parallel == 1 else f"building {path.name}"
            of_plan = (_embedded(options, translation), libraries, _needs(options, translation))
            plan = run_isolated(
                build_plan,
                *(backend, graph, plan_file, translation.profiles, *of_plan, translation.cache is not None),
                progress=functools.partial(_say_phase, progress, what),
            )
            plans.append((plan, plan_file))
        if plans and options.output is not None and options.tensor_parallel > 1:
            outputs.link(options.output, options.plans[0].name)
        manifest = make_manifest(options, translation, plans)
        manifest.notes.extend([CUDNN_NOTE] if by_cudnn(translation.attention) else [])
        manifest.notes.extend([PTX_NOTE] if backend == "tensorrt-rtx" and not _has_code_of_rtx() else [])
        manifest.notes.extend([CACHE_NOTE] if translation.cache is not None else [])
        manifest.notes.extend([EMBEDDED_NOTE] if manifest.plugins.embedded else [])
        for path in destinations.stale:
            outputs.remove(path)
        if destinations.stale:
            names = first_few([path.name for path in destinations.stale])
            manifest.notes.append(f"files that an earlier compilation for more GPUs wrote were removed: {names}")
        manifest.warnings.extend([TRITON_WARNING] if options.triton is not None and backend != "tensorrt" else [])
        text = json.dumps(manifest.to_json(), indent=2) + "\n"
        for source, kept in destinations.texts:
            outputs.make_folder(kept.parent)
            outputs.write(kept, read_file(source))
        if options.output is not None:
            outputs.write(manifest_path(options.output), text)
        if options.manifest is not None:
            outputs.write(options.manifest, text)
        if options.html is not None:
            assert make_page is not None
            outputs.write(options.html, make_page(manifest))
        if options.triton is not None and plans:
            register = manifest.plugins.register
            of_model = (options.triton.name, plans[0][0], len(manifest.profiles), register, options.tensor_parallel)
            outputs.write(options.triton / CONFIG_NAME, model_config(*of_model))
        outputs.commit()
    return manifest


def _has_code_of_rtx() -> bool:
    """Whether the plugin library has machine code for all GPUs of TensorRT-RTX; that of 8.0 runs on 8.6 and 8.9."""
    return {8, 12} <= {major for major, _ in machine_code(library_path())}


def refuse_fp8(layers: list[Layer], linear: list[Linear], capability: tuple[int, int] | None) -> None:
    """Fail if blocks or linear layers have FP8 weights, and plans for a GPU cannot.

    Args:
        layers: What became of the blocks.
        linear: What became of linear layers outside of them.
        capability: The compute capability of the GPU; None without one.

    Raises:
        UserError: They have.
    """
    weights = [(each.module, each.weights) for each in layers] + [(each.modules[0], each.weights) for each in linear]
    found = [module for module, each in weights if reads_fp8(each)]
    if found and capability is not None and capability < _FIRST_WITH_FP8:
        raise UserError(
            f"layer {found[0]}", "TensorRT takes no FP8 weights on this GPU",
            got="compute capability {}.{}".format(*capability), expected="{}.{} or newer".format(*_FIRST_WITH_FP8),
            fix="Leave out --weights, or compile on another GPU.",
        )  # fmt: skip


def refuse_fp8_cache(capability: tuple[int, int] | None) -> None:
    """Fail if no kernel reads a cache in FP8 on a GPU of this compute capability, None without one.

    Raises:
        UserError: None does.
    """
    if capability is not None and capability < _FIRST_WITH_FP8_CACHE:
        raise UserError(
            "--kv-cache-dtype fp8", "no kernel reads such a cache on this GPU",
            got="compute capability {}.{}".format(*capability),
            expected="{}.{} or newer".format(*_FIRST_WITH_FP8_CACHE), fix="Leave it out, or compile on another GPU.",
        )  # fmt: skip


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
    parts = [name.split(".") for name in names]
    return torch is not None and all(hasattr(getattr(torch.ops, each[0]), each[1]) for each in parts)


def _embedded(options: CompileOptions, translation: TranslationSummary) -> list[Path]:
    """Return the plugin libraries that the plan is to carry."""
    if not options.embed_plugins:
        return []
    needed = by_cudnn(translation.attention) or translation.cache is not None
    attention = attention_library_path() if needed else None
    return [library_path(), *([attention] if attention is not None else []), *options.plugin_libraries]


def _needs(options: CompileOptions, translation: TranslationSummary) -> str:
    """Return what a plan says that it needs; one may be found without its manifest."""
    own = [NEEDS_PLUGINS] if translation.plugins else []
    others = [f"needs the TensorRT plugins in {path.name}" for path in options.plugin_libraries]
    return "; ".join([*own, *others])
