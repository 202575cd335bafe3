"""What `twellc inspect` shows of a model or a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twellc.errors import UserError
from twellc.inputs import InputDeclaration
from twellc.loaders.model import load_model
from twellc.loaders.onnx_file import looks_like_onnx
from twellc.manifest import manifest_path, read_manifest
from twellc.onnx_models import inspect_onnx
from twellc.passes.canonicalize import canonicalize
from twellc.passes.decide import decide
from twellc.passes.find_ffn import find_ffn_blocks
from twellc.passes.precision import lower, parameter_dtypes
from twellc.translation import activation_notes, choose_dtype, torch_dtype


def inspect_target(
    target: Path,
    dtype: str | None,
    trust_model: bool,
    inputs: tuple[InputDeclaration, ...],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return what is known of a model or a plan, with `layers` and `notes` always among it.

    Raises:
        UserError: It is neither.
    """
    if not target.exists():
        raise UserError(str(target), "there is no such file or folder", expected="a model or a plan")
    if target.is_file() and manifest_path(target).is_file():
        progress("reading the manifest")
        return {"kind": "plan", **read_manifest(target)}
    if looks_like_onnx(target):
        progress("loading the model")
        return inspect_onnx(target, dtype, inputs)
    progress("loading and tracing the model")
    model = load_model(target, trust_model, inputs)
    chosen, notes = choose_dtype(model, dtype)
    progress("looking for feed-forward blocks")
    program = canonicalize(model.program)
    dtype_found = torch_dtype(chosen)
    if parameter_dtypes(program) - {dtype_found}:
        program = lower(program, dtype_found)
    layers = decide(find_ffn_blocks(program), "auto")
    return {
        "kind": model.kind,
        "dtype": chosen,
        "layers": [asdict(layer) for layer in layers],
        "notes": model.notes + notes + activation_notes(model, layers),
    }
