"""The manifest: a JSON file beside each plan that says what is in it and what was done."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellc import __version__
from twellc.config import CompileOptions
from twellc.errors import UserError
from twellc.files import digest
from twellc.plugins.library import PLUGIN_NAMES, PLUGIN_NAMESPACE, PLUGIN_VERSION
from twellc.plugins.registration import how_to_register

if TYPE_CHECKING:
    from twellc.export.plan import Plan
    from twellc.translation import TranslationSummary

SCHEMA = 1


def manifest_path(plan: Path) -> Path:
    """Return where the manifest of a plan stands: `model.plan` has `model.plan.json`."""
    return plan.with_name(plan.name + ".json")


def make_manifest(
    options: CompileOptions,
    translation: TranslationSummary,
    plan: Plan | None,
    plan_file: Path | None,
) -> dict[str, Any]:
    """Return the manifest of a plan, or the report of a run that stopped before one."""
    rewritten = {layer.variant for layer in translation.layers if layer.decision == "twell"}
    used = [name for name, variant in zip(PLUGIN_NAMES, ("gated", "plain"), strict=True) if variant in rewritten]
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "twellc": __version__,
        "model": translation.model,
        "settings": translation.settings,
        "layers": [asdict(layer) for layer in translation.layers],
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
            manifest["plugins"]["register"] = how_to_register(plan_file.name)
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
    if not path.is_file():
        raise UserError(
            str(plan), "the plan has no manifest beside it", expected=path.name,
            fix="Keep both files of `twellc compile` together.",
        )  # fmt: skip
    try:
        manifest = json.loads(path.read_text())
        schema, expected = manifest["schema"], manifest["plan"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(str(path), f"is not a manifest of twellc ({error!r})") from error
    if schema != SCHEMA:
        raise UserError(str(path), "the manifest is of another version", got=str(schema), expected=str(SCHEMA))
    if expected != digest(plan):
        raise UserError(str(path), "the manifest belongs to another plan", fix="Compile the model again.")
    assert isinstance(manifest, dict)
    return manifest
