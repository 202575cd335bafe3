"""Element types and their names. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Names of the options and of torch's dtypes.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that `bf16` or `fp16` stands for."""
    import torch

    dtype = getattr(torch, DTYPES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16, and so on."""
    return str(dtype).removeprefix("torch.")
