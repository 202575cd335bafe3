"""What `twellc inspect` shows of a model, or of a rewritten ONNX file."""

from __future__ import annotations

from collections.abc import Callable

from twellc.config import InspectOptions
from twellc.inspection import Description
from twellc.loaders.model import load_model
from twellc.loaders.onnx_format import looks_like_onnx
from twellc.onnx_models import inspect_onnx
from twellc.passes.attention import MATMUL, rewrite_attention
from twellc.passes.canonicalize import canonicalize
from twellc.passes.decide import decide
from twellc.passes.find_ffn import find_ffn_blocks
from twellc.passes.precision import in_precision
from twellc.translation import activation_notes, choose_dtype, torch_dtype


def describe_model(options: InspectOptions, progress: Callable[[str], None]) -> Description:
    """Return what is known of a model or a rewritten ONNX file.

    Raises:
        UserError: It is no model, or not one that `dtype` or `inputs` are for.
    """
    if looks_like_onnx(options.target):
        progress("loading the model")
        return inspect_onnx(options.target, options.dtype, options.inputs)
    progress("loading and tracing the model")
    model = load_model(options.target, options.trust_model, options.inputs)
    chosen, notes = choose_dtype(model, options.dtype)
    progress("looking for feed-forward blocks")
    program = in_precision(canonicalize(model.program), torch_dtype(chosen))
    layers = decide(find_ffn_blocks(program), "auto")
    attention = rewrite_attention(program, (MATMUL,))[1]
    notes = model.notes + notes + activation_notes(model, layers)
    return Description(model.kind, layers, notes, dtype=chosen, attention=attention)
