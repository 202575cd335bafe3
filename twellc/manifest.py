"""The manifest: a JSON file beside each plan that says what is in it and what was done."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twellc import __version__
from twellc.errors import UserError
from twellc.export.plan import Plan
from twellc.export.profiles import Profile
from twellc.export.tensorrt_host import Host
from twellc.passes.decide import Layer
from twellc.plugins.library import PLUGIN_NAMES, PLUGIN_NAMESPACE, PLUGIN_VERSION

SCHEMA = 1


def manifest_path(plan: Path) -> Path:
    """Return where the manifest of a plan stands: `model.plan` has `model.plan.json`."""
    return plan.with_name(plan.name + ".json")


def file_digest(*paths: Path) -> str:
    """Return the SHA-256 of the files' contents, one after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def make_manifest(
    *,
    model: dict[str, Any],
    settings: dict[str, Any],
    layers: list[Layer],
    notes: list[str],
    warnings: list[str],
    onnx: dict[str, Any],
    profiles: list[Profile],
    host: Host | None = None,
    plan: Plan | None = None,
    plan_file: Path | None = None,
) -> dict[str, Any]:
    """Return the manifest of a plan, or the report of a run that stopped before one."""
    rewritten = {layer.variant for layer in layers if layer.decision == "twell"}
    used = [name for name, variant in zip(PLUGIN_NAMES, ("gated", "plain"), strict=True) if variant in rewritten]
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "twellc": __version__,
        "model": model,
        "settings": settings,
        "layers": [asdict(layer) for layer in layers],
        "notes": notes,
        "warnings": warnings,
        "plugins": {"namespace": PLUGIN_NAMESPACE, "version": PLUGIN_VERSION, "names": used},
        "onnx": onnx,
        "profiles": [{name: asdict(shapes) for name, shapes in profile.items()} for profile in profiles],
        "plan": None,
    }
    if host is not None and plan is not None and plan_file is not None:
        manifest["backend"] = {"name": host.name, "version": host.version}
        manifest["plan"] = {
            "file": plan_file.name,
            "bytes": plan_file.stat().st_size,
            "sha256": file_digest_single(plan_file),
            **asdict(plan),
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
        schema, digest = manifest["schema"], manifest["plan"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(str(path), f"is not a manifest of twellc ({error!r})") from error
    if schema != SCHEMA:
        raise UserError(str(path), "the manifest is of another version", got=str(schema), expected=str(SCHEMA))
    if digest != file_digest_single(plan):
        raise UserError(str(path), "the manifest belongs to another plan", fix="Compile the model again.")
    assert isinstance(manifest, dict)
    return manifest


def file_digest_single(path: Path) -> str:
    """Return the SHA-256 of one file, as `sha256sum` prints it."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
