"""From a model to a plan: translate, build, write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twellc.config import CompileOptions
from twellc.errors import UserError
from twellc.export.tensorrt_host import choose_host
from twellc.export.triton import CONFIG_NAME, model_config
from twellc.files import Outputs
from twellc.isolation import run_isolated
from twellc.manifest import make_manifest, manifest_path

EMBEDDED_NOTE = (
    "the plan carries the plugin library, which is native code: TensorRT loads it only where the program sets "
    "engine_host_code_allowed, and Triton with version-compatible=true"
)
TRITON_WARNING = (
    "Triton's TensorRT backend runs plans of TensorRT, not of TensorRT-RTX: compile with --backend tensorrt"
)


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
    backend = None if options.backend == "none" else choose_host(options.backend)
    with Outputs(options.overwrite) as outputs:
        if options.triton is not None and options.output is not None:
            outputs.make_folder(options.output.parent)
        _check_outputs(options, outputs)
        if options.onnx is not None:
            onnx_path = outputs.stage(options.onnx)
        else:
            assert options.output is not None
            onnx_path = outputs.scratch(options.output.with_name(f"{options.output.stem}.onnx"))
        translation = run_isolated("twellc.translation:translate_to_file", options, onnx_path, progress=progress)
        if options.onnx is not None:
            for extra in map(options.onnx.with_name, translation.files[1:]):
                outputs.check("--onnx", extra)
                outputs.stage(extra)
        plan = plan_file = None
        if backend is not None and options.output is not None:
            plan_file = outputs.stage(options.output)
            plan = run_isolated(
                "twellc.export.plan:build_plan", backend, onnx_path, plan_file, translation.profiles,
                options.embed_plugins, progress=lambda phase: progress(f"building the plan: {phase}"),
            )  # fmt: skip
        manifest = make_manifest(options, translation, plan, plan_file)
        manifest["notes"] += [EMBEDDED_NOTE] if manifest["plugins"]["embedded"] else []
        manifest["warnings"] += [TRITON_WARNING] if options.triton is not None and backend != "tensorrt" else []
        text = json.dumps(manifest, indent=2) + "\n"
        if options.output is not None:
            outputs.write(manifest_path(options.output), text)
        if options.report is not None:
            outputs.write(options.report, text)
        if options.triton is not None and plan is not None:
            outputs.write(options.triton / CONFIG_NAME, model_config(options.triton.name, plan, manifest))
        outputs.commit()
    return manifest


def _check_outputs(options: CompileOptions, outputs: Outputs) -> None:
    if options.dump_graphs is not None:
        outputs.check_folder("--dump-graphs", options.dump_graphs)
    if options.output is not None:
        outputs.check("--output", options.output)  # the root has no name, so no manifest beside it
    destinations = {
        "--output": options.output,
        "--onnx": options.onnx,
        "--report": options.report,
        "--triton": options.triton and options.triton / CONFIG_NAME,
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
