"""Define the torch ops of `torch.ops.twell`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("twell", "DEF")


def define(schema: str, cpu: Callable[..., Any], cuda: Callable[..., Any], infer: Callable[..., Any]) -> Any:
    """Define an op, and return it.

    Args:
        schema: Its schema, as `torch.library` reads it.
        cpu: Computes it on a CPU: its meaning.
        cuda: Computes it on a GPU.
        infer: Gives shapes and dtypes of its results, for tracing.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for key, run in (("CPU", cpu), ("CUDA", cuda), ("Meta", infer)):
        LIBRARY.impl(name, run, key)
    return getattr(torch.ops.twell, name).default
