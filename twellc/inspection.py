"""What `twellc inspect` shows of a model or a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twellc.cost import count_costs
from twellc.errors import UserError
from twellc.inputs import InputDeclaration, refuse_inputs
from twellc.loaders.model import load_model
from twellc.loaders.onnx_file import looks_like_onnx
from twellc.manifest import is_plan, read_manifest
from twellc.onnx_models import inspect_onnx
from twellc.passes.attention import MATMUL, rewrite_attention
from twellc.passes.canonicalize import canonicalize
from twellc.passes.decide import decide
from twellc.passes.find_ffn import find_ffn_blocks
from twellc.passes.precision import in_precision
from twellc.translation import activation_notes, choose_dtype, refuse_dtype, torch_dtype


def inspect_target(
    target: Path,
    dtype: str | None,
    trust_model: bool,
    inputs: tuple[InputDeclaration, ...],
    tokens: int,
    density: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return what is known of a model or a plan, with `layers`, `notes` and `cost` always among it.

    Args:
        target: A model, a plan or a rewritten ONNX file.
        dtype: Precision to judge a model in; None takes the one that `compile` would.
        trust_model: Load a pickle, or an archive that could execute code.
        inputs: The inputs of a pickled module.
        tokens: Tokens in a call, for `cost`.
        density: Assumed share of gate activations that are not zero, for `cost`.
        progress: Receives the name of each step.

    Raises:
        UserError: It is neither a model nor a plan, or not one that `dtype` or `inputs` are for.
    """
    found = _describe(target, dtype, trust_model, inputs, progress)
    return {**found, "cost": count_costs(found["layers"], tokens, density)}


def _describe(
    target: Path,
    dtype: str | None,
    trust_model: bool,
    inputs: tuple[InputDeclaration, ...],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    if not target.exists():
        raise UserError(str(target), "there is no such file or folder", expected="a model or a plan")
    if looks_like_onnx(target):
        progress("loading the model")
        return inspect_onnx(target, dtype, inputs)
    if is_plan(target):
        refuse_inputs(inputs, f"{target}, a plan")
        refuse_dtype(dtype, f"{target}, a plan")
        progress("reading the manifest")
        return {"kind": "plan", **read_manifest(target)}
    progress("loading and tracing the model")
    model = load_model(target, trust_model, inputs)
    chosen, notes = choose_dtype(model, dtype)
    progress("looking for feed-forward blocks")
    program = in_precision(canonicalize(model.program), torch_dtype(chosen))
    layers = decide(find_ffn_blocks(program), "auto")
    return {
        "kind": model.kind,
        "dtype": chosen,
        "layers": [asdict(layer) for layer in layers],
        "attention": [asdict(block) for block in rewrite_attention(program, (MATMUL,))[1]],
        "notes": model.notes + notes + activation_notes(model, layers),
    }
