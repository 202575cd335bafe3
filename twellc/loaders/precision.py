"""The precision that a loaded model is compiled in."""

from __future__ import annotations

import torch

from twellc.base.dtypes import DTYPES, dtype_name, torch_dtype
from twellc.loaders.loaded import LoadedModel
from twellc.passes.precision import parameter_dtypes
from twellc.plugins.fp8 import E4M3


def choose_dtype(model: LoadedModel, requested: str | None) -> tuple[str, list[str]]:
    """Return the dtype to compile in, `bf16` or `fp16`, and what to tell the user about the choice."""
    found = parameter_dtypes(model.program)
    if E4M3 in found:  # which keep their type, and have scales in float32
        found -= {E4M3} if found == {E4M3, torch.float32} else {E4M3, torch.float32}
    own = " and ".join(sorted(map(dtype_name, found))) or "no floating-point dtype"
    for name in DTYPES:
        if found == {torch_dtype(name)} and requested in (None, name):
            return name, []
    if requested is not None:
        return requested, [f"the model is in {own}; compiled in {DTYPES[requested]} as asked"]
    return "bf16", [f"the model is in {own}; compiled in bfloat16 (--dtype changes it)"]
