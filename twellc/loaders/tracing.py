"""Trace modules with torch.export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from twellc.errors import UserError, first_line
from twellc.passes.program import quiet_torch


def trace(
    path: Path, module: torch.nn.Module, inputs: dict[str, torch.Tensor], shapes: dict[str, dict[int, Any]], fix: str
) -> ExportedProgram:
    """Trace a module.

    Args:
        path: Where it came from, for the message.
        module: The module, in eval mode.
        inputs: Example inputs by parameter of `forward`.
        shapes: The dynamic dimensions (torch.export.Dim) of each input, by axis.
        fix: What to do where it cannot be traced.

    Raises:
        UserError: It cannot be traced.
    """
    try:
        with quiet_torch(), torch.no_grad():
            # Comparisons of two lengths (masks in T5) become assertions instead of constraints on the lengths.
            return torch.export.export(
                module,
                (),
                inputs,
                dynamic_shapes=shapes,
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
    except Exception as error:  # torch.export raises what the module's code raises
        raise UserError(str(path), f"torch.export cannot trace the model ({first_line(error)})", fix=fix) from error
