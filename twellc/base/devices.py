"""The device that an option names."""

from __future__ import annotations

from typing import Any

import torch

from twellc.base.errors import UserError

_EXPECTED = "auto, cpu, cuda or cuda:N"


def is_sm90(device: torch.device) -> bool:
    """Return whether a device has compute capability 9.0, for which the library has kernels that others do not run."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def choose_device(name: Any) -> torch.device:
    """Return the device of a name or a `torch.device`, a GPU with its number; `auto` is a GPU where torch sees one.

    Raises:
        UserError: The device is of another kind, or torch does not see it.
    """
    where = f"--device {name}"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(where, "is not a device", expected=_EXPECTED) from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(where, "is not a device of twellc", expected=_EXPECTED)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(where, "torch sees no such GPU", got=f"{torch.cuda.device_count()} GPUs")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
