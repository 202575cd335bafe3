"""Define the torch ops of `torch.ops.twell`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("twell", "DEF")
_Function = Callable[..., Any]


def define(schema: str, cpu: _Function, cuda: _Function, infer: _Function, *, by_device: bool = False) -> Any:
    """Define an op, and return it.

    Args:
        schema: The schema, as `torch.library` reads it.
        cpu: Computes the op on a CPU, which defines its meaning.
        cuda: Computes the op on a GPU.
        infer: Gives shapes and dtypes of the results, for tracing.
        by_device: Whether these depend on the device.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for key, run in (("CPU", cpu), ("CUDA", cuda)):
        LIBRARY.impl(name, run, key)
    if by_device:
        torch.library.register_fake(f"twell::{name}", infer, lib=LIBRARY)
    else:
        LIBRARY.impl(name, infer, "Meta")
    return getattr(torch.ops.twell, name).default
