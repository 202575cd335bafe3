"""The manifest: a JSON file beside each plan that says what is in it and what was done."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellc import __version__
from twellc.config import DTYPES, CompileOptions
from twellc.errors import UserError
from twellc.export.tensorrt_host import python_module
from twellc.files import digest
from twellc.plugins.library import ATTENTION_NAME, COMPRESSIONS, PLUGIN_NAMES, PLUGIN_NAMESPACE, PLUGIN_VERSION
from twellc.plugins.registration import how_to_register

if TYPE_CHECKING:
    from twellc.export.plan import Plan
    from twellc.passes.report import Attention
    from twellc.translation import TranslationSummary

SCHEMA = 2

_SHAPES = {"min": [int], "opt": [int], "max": [int]}
_TENSOR = {"name": str, "dtype": str, "shape": [int]}
# What the manifest of a plan holds: a type or one of several; a list of one form; a dictionary with these
# keys, or with any (`str`).
_FORM: dict[str, Any] = {
    "twellc": str,
    "model": {"name": str, "kind": str, "sha256": str},
    "settings": {"dtype": str, "layers": str, "compression": int, "attention_forms": [str]},
    "layers": [
        {
            "module": str, "variant": str, "activation": str, "d_model": int, "d_ff": int, "d_out": int,
            "matched": bool, "decision": str, "reason": str, "residual": bool,
        }
    ],
    "attention": [
        {"module": str, "heads": int, "kv_heads": int, "width": int, "mask": str, "form": str, "reason": str}
    ],
    "notes": [str],
    "warnings": [str],
    "plugins": {"namespace": str, "version": str, "names": [str], "embedded": bool},
    "onnx": {"file": (str, type(None)), "sha256": str},
    "profiles": [{str: _SHAPES}],
    "backend": {"name": str, "version": str},
    "plan": {"sha256": str, "inputs": [_TENSOR], "outputs": [_TENSOR], "plugin_layers": [str]},
}  # fmt: skip


# File name of the graph that a plan is built from where it is not kept.
UNKEPT_GRAPH = "model.onnx"


def manifest_path(plan: Path) -> Path:
    """Return where the manifest of a plan stands: `model.plan` has `model.plan.json`."""
    return plan.with_name(plan.name + ".json")


def has_manifest(file: Path) -> bool:
    """Say whether a manifest stands beside a file. Names end at 255 bytes, and none can be longer."""
    try:
        return manifest_path(file).is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def is_plan(file: Path) -> bool:
    """Say whether this is a file that has a manifest, or starts as the plans of TensorRT and TensorRT-RTX do."""
    if not file.is_file():
        return False
    if has_manifest(file):
        return True
    with file.open("rb") as stream:
        return stream.read(4) in (b"ftrt", b"vtrt")


def by_cudnn(attention: list[Attention]) -> bool:
    """Whether a plan needs the attention plugin, and so cuDNN where it runs."""
    return any(block.form == "cudnn" for block in attention)


def make_manifest(
    options: CompileOptions,
    translation: TranslationSummary,
    plan: Plan | None,
    plan_file: Path | None,
) -> dict[str, Any]:
    """Return the manifest of a plan, or the report of a run that stopped before one."""
    rewritten = {layer.variant for layer in translation.layers if layer.decision == "twell"}
    used = [name for name, variant in zip(PLUGIN_NAMES, ("gated", "plain"), strict=True) if variant in rewritten]
    used += [ATTENTION_NAME] if by_cudnn(translation.attention) else []
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "twellc": __version__,
        "model": translation.model,
        "settings": translation.settings,
        "layers": [asdict(layer) for layer in translation.layers],
        "attention": [asdict(block) for block in translation.attention],
        "notes": translation.notes,
        "warnings": translation.warnings,
        "plugins": {"namespace": PLUGIN_NAMESPACE, "version": PLUGIN_VERSION, "names": used, "embedded": False},
        "onnx": {"file": options.onnx and options.onnx.name, "sha256": translation.digest},
        "profiles": [{name: asdict(shapes) for name, shapes in profile.items()} for profile in translation.profiles],
        "backend": None,
        "plan": None,
    }
    if plan is not None and plan_file is not None:
        description = asdict(plan)
        manifest["backend"] = description.pop("backend")
        if used:
            manifest["plugins"]["embedded"] = options.embed_plugins
            module = python_module(plan.backend["name"])
            assert module is not None  # it built the plan
            manifest["plugins"]["register"] = how_to_register(plan_file.name, module, ATTENTION_NAME in used)
        manifest["plan"] = {
            "file": plan_file.name,
            "bytes": plan_file.stat().st_size,
            "sha256": digest(plan_file),
            **description,
        }
    return manifest


def read_manifest(plan: Path) -> dict[str, Any]:
    """Read the manifest of a plan.

    Raises:
        UserError: There is none, it is damaged, of another schema, or belongs to another plan.
    """
    path = manifest_path(plan)
    if not has_manifest(plan):
        raise UserError(
            str(plan), "has no manifest beside it, as a plan must", expected=path.name,
            fix="Keep both files of `twellc compile` together.",
        )  # fmt: skip
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            str(path), f"is no manifest of twellc: it cannot be read as JSON ({error})", fix=_FIX
        ) from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if type(schema) is not int:
        raise UserError(str(path), "is no manifest of twellc: it names no schema", fix=_FIX)
    if schema != SCHEMA:
        raise UserError(
            str(path), "the manifest is of another version", got=str(schema), expected=str(SCHEMA),
            fix="Use the twellc that made the plan, or compile the model again.",
        )  # fmt: skip
    misfit = _misfit(manifest, _FORM) or _unusable(manifest)
    if misfit:
        raise UserError(str(path), f"the manifest is damaged: {misfit}", fix=_FIX)
    if manifest["plan"]["sha256"] != digest(plan):
        raise UserError(str(path), "the manifest belongs to another plan, or the plan is damaged", fix=_FIX)
    assert isinstance(manifest, dict)
    return manifest


def refuse_other_plugins(plan: Path, manifest: dict[str, Any]) -> None:
    """Fail if a plan needs plugins of another version than this package's.

    Raises:
        UserError: It does.
    """
    plugins = manifest["plugins"]
    if plugins["names"] and plugins["version"] != PLUGIN_VERSION:
        raise UserError(
            str(plan), f"the plan needs other plugins than those of twellc {__version__}",
            got=f"plugin version {PLUGIN_VERSION}",
            expected=f"plugin version {plugins['version']}, of twellc {manifest['twellc']}",
            fix="Install that twellc, or compile the model again with this one.",
        )  # fmt: skip


_FIX = "Compile the model again."


def _misfit(value: Any, form: Any, place: str = "") -> str:
    """Say where a JSON value does not have a form; see `_FORM`. Keys that the form does not name are allowed."""
    if isinstance(form, tuple):
        return "" if type(value) in form else f"{place} is no {_KINDS[form[0]]}"
    if isinstance(form, type):
        return _misfit(value, (form,), place)
    if not isinstance(value, type(form)):
        return f"{place} is no {_KINDS[type(form)]}"
    if isinstance(form, list):
        items = [(f"{place}[{index}]", item, form[0]) for index, item in enumerate(value)]
    elif str in form:
        items = [(f"{place}.{key}", item, form[str]) for key, item in value.items()]
    else:
        missing = [key for key in form if key not in value]
        if missing:
            return f"{place} has no {missing[0]}".strip()
        items = [(f"{place}.{key}".strip("."), value[key], wanted) for key, wanted in form.items()]
    return next(filter(None, (_misfit(item, wanted, where) for where, item, wanted in items)), "")


_KINDS = {str: "string", int: "integer", bool: "boolean", list: "list", dict: "object"}


def _unusable(manifest: dict[str, Any]) -> str:
    """Say what contradicts itself in a manifest that has the right form."""
    settings = manifest["settings"]
    if settings["dtype"] not in DTYPES or settings["compression"] not in COMPRESSIONS:
        return "settings has values that twellc compile does not take"
    inputs = {tensor["name"]: tensor["shape"] for tensor in manifest["plan"]["inputs"]}
    if manifest["onnx"]["file"] not in (None, Path(manifest["onnx"]["file"] or "").name):
        return "onnx.file is no name of a file beside the plan"
    if not manifest["profiles"]:
        return "profiles is empty"
    for index, profile in enumerate(manifest["profiles"]):
        for name, shape in inputs.items():
            if name not in profile:
                return f"profiles[{index}] lacks the input {name!r}"
            shapes = profile[name]
            ranks = {len(shapes[which]) for which in _SHAPES} | {len(shape)}
            sizes = zip(*(shapes[which] for which in _SHAPES), strict=False)
            if len(ranks) > 1 or any(not 1 <= low <= opt <= high for low, opt, high in sizes):
                return f"profiles[{index}].{name} has impossible shapes"
    return ""
