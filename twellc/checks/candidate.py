"""What `twellc check` compares with a model: an ONNX graph or a plan; the graph of a plan that cannot run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import onnx
import torch

from twellc.base.caches import FP8_CACHE
from twellc.base.dtypes import DTYPES
from twellc.base.errors import UserError
from twellc.base.files import digest, external_data, why_no_file
from twellc.checks.evaluator import OnnxEvaluator, runs_kernels
from twellc.checks.generation import Steps, graph_steps, plan_steps
from twellc.checks.reference import Outputs
from twellc.compiling.manifest import UNKEPT_GRAPH, Manifest, is_plan, read_manifest, refuse_other_plugins
from twellc.compiling.result import noted_settings
from twellc.compiling.settings import UNKNOWN, Settings
from twellc.compiling.translate import translate_any
from twellc.export.onnx_export import save_onnx
from twellc.export.runner import PlanRunner, open_plan
from twellc.export.shapes import ShapeProfile
from twellc.export.tensorrt_host import load_host, why_not_here
from twellc.loaders.huggingface_inputs import read_sizes
from twellc.loaders.onnx_file import load_onnx
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.options.commands import CheckOptions, CompileOptions
from twellc.passes.report import Earlier
from twellc.samples.samples import Sample


@dataclass(frozen=True)
class Candidate:
    """Something to run.

    Attributes:
        run: Returns its outputs for a sample.
        inputs: Names of its inputs.
        settings: Those of its compilation, as far as it notes them.
        executed: What runs, in words.
        graph: Its ONNX file; None where that is not known.
        is_graph: Whether this file is what runs.
        note: Why something else runs in the place of a plan; empty where the candidate itself does.
        profile: The first optimization profile of a plan.
        steps: What runs it step by step, if it has a key-value cache.
    """

    run: Callable[[Sample], Outputs]
    inputs: list[str]
    settings: Settings
    executed: str
    graph: tuple[Path, onnx.ModelProto] | None
    is_graph: bool
    note: str = ""
    profile: ShapeProfile | None = None
    steps: Steps | None = None


def open_candidate(options: CheckOptions, folder: Path, progress: Callable[[str], None]) -> Candidate:
    """Open a candidate.

    Args:
        options: See `CheckOptions`.
        folder: Where to write a graph that must be made again.
        progress: Receives the name of each step.

    Raises:
        UserError: It cannot be opened, or was made from something else than the options name.
    """
    path = options.candidate
    if not path.is_file():
        raise UserError(str(path), "there is no such file", expected="an ONNX file or a plan")
    if looks_like_onnx(path):
        progress("reading the candidate")
        return _open_onnx(options, path)
    if is_plan(path):
        return _open_plan(options, folder, progress)
    raise UserError(str(path), "is neither an ONNX file nor a plan with its manifest beside it")


def _open_onnx(options: CheckOptions, path: Path) -> Candidate:
    model = load_onnx(path)
    settings = noted_settings(model) or UNKNOWN
    _refuse_foreign(options, settings)
    evaluator = OnnxEvaluator(path, model)
    executed = "the ONNX graph, in onnx's reference evaluator"
    if runs_kernels():
        executed += f", its plugin nodes by the CUDA kernels on {torch.cuda.get_device_name()}"
    steps = graph_steps(path, evaluator.run, model) if settings.cache is not None else None
    return Candidate(evaluator.run, evaluator.inputs, settings, executed, (path, model), is_graph=True, steps=steps)


def _open_plan(options: CheckOptions, folder: Path, progress: Callable[[str], None]) -> Candidate:
    """Open a plan, or the graph that it was built from where no GPU can run it; made again in `folder` if need be."""
    plan = options.candidate
    progress("reading the manifest")
    manifest = read_manifest(plan)
    if manifest.plugins.libraries:
        where, what = str(plan), "holds plugins of other people, which the float64 model cannot compute"
        got = ", ".join(f"{name} ({each.file})" for each in manifest.plugins.libraries for name in each.names)
        raise UserError(where, what, got=got, fix="Check the model without them; compare this plan's outputs by hand.")
    settings = manifest.settings
    _refuse_foreign(options, settings)
    assert manifest.backend is not None and manifest.plan is not None  # see read_manifest
    profile = manifest.profiles[0]
    kept = plan.parent / str(manifest.onnx.file)
    data = external_data(kept)
    is_kept = kept.is_file() and digest(kept, *([data] if data.is_file() else [])) == manifest.onnx.sha256
    obstacle = why_not_here(manifest.backend.name)
    if not obstacle:
        refuse_other_plugins(plan, manifest)
        progress("opening the plan")
        opened = open_plan(load_host(manifest.backend.name), plan, manifest.backend.version, manifest.relations)
        return Candidate(
            PlanRunner(opened),
            [tensor.name for tensor in manifest.plan.inputs],
            settings,
            "the plan",
            (kept, load_onnx(kept)) if is_kept else None,
            is_graph=False,
            profile=profile,
            steps=None if manifest.cache is None else plan_steps(opened, manifest),
        )
    if is_kept:
        candidate, source = _open_onnx(options, kept), f"{kept.name}, the ONNX graph that it was built from"
    else:
        candidate = _open_onnx(options, _graph_made_again(options, manifest, folder, progress))
        source = "the ONNX graph that it was built from, made again"
    executed = candidate.executed.replace("the ONNX graph", source, 1)
    note = f"the plan itself was NOT run: {obstacle}"
    return replace(candidate, settings=settings, executed=executed, note=note, profile=profile)


def _graph_made_again(options: CheckOptions, manifest: Manifest, folder: Path, progress: Callable[[str], None]) -> Path:
    """Compile the model again as a plan's manifest says, and return the graph.

    Raises:
        UserError: That gives another graph, or needs a profile.
    """
    plan, settings = options.candidate, manifest.settings
    if settings.calibration is not None and options.firing_profile is None:
        fix = "Give it with --firing-profile PROFILE; or compile again, and keep the graph with --onnx."
        raise UserError(str(plan), "was compiled with a profile, which is needed to make its graph again", fix=fix)
    other = {"cache", "sizes", "calibration", *(each.name for each in fields(Earlier))}
    asked: dict[str, Any] = {name: value for name, value in settings.to_json().items() if name not in other}
    asked["earlier"] = replace(settings, linear_taken=settings.linear_taken or [])
    if settings.sizes is not None:
        names = [name for name, _ in read_sizes(settings.sizes)]
        asked["optimization_profiles"] = tuple((name, profile[name]) for profile in manifest.profiles for name in names)
    asked["dtype"] = settings.dtype if settings.dtype in DTYPES else None  # of a graph that was left as it is
    if settings.cache is not None:
        cache = settings.cache
        asked |= {"kv_cache": cache.length, "max_batch_size": cache.batch, "prefill_chunk": cache.prefill_chunk}
        asked |= {} if settings.cache_scales is None else {"kv_cache_dtype": FP8_CACHE}
    asked |= {
        "trust_model": options.trust_model,
        "input_specs": options.input_specs,
        "firing_profile": options.firing_profile,
    }
    translation = translate_any(CompileOptions(options.model, backend="none", **asked), progress)
    # Its name is in the graph where weights stand in another file.
    written = save_onnx(translation.graph, folder / (manifest.onnx.file or UNKEPT_GRAPH))
    if digest(*written) != manifest.onnx.sha256:
        what = f"was not built from {options.model} by this version of twellc"
        raise UserError(str(plan), what, fix="Compile again, and keep the graph with --onnx to check a plan later.")
    return written[0]


def _refuse_foreign(options: CheckOptions, settings: Settings) -> None:
    """Fail if a candidate is a part of a model, for one of several GPUs, or was compiled with another profile.

    Raises:
        UserError: It is, or was.
    """
    ranks, sha256, path = settings.tensor_parallel, settings.calibration, options.firing_profile
    if ranks is not None:
        fix = "Check the model compiled without --tensor-parallel; benchmarks/tensor_parallel.py compares the ranks."
        raise UserError(str(options.candidate), f"computes a part of the model, for one of {ranks} GPUs", fix=fix)
    if path is None:
        return
    where, expected = f"--firing-profile {path}", f"the profile that {options.candidate} was compiled with"
    if not path.is_file():
        raise UserError(where, why_no_file(path), expected=expected)
    if sha256 is None:
        raise UserError(where, f"{options.candidate} was compiled without a profile", fix="Leave it out.")
    own = digest(path)
    if own != sha256:
        got, expected = f"SHA-256 {own[:12]}…", f"{expected}, {sha256[:12]}…"
        raise UserError(where, "is another profile", got=got, expected=expected, fix="Give that one, or none.")
