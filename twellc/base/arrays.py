"""Tensors of torch as arrays of NumPy and back, bfloat16 and E4M3 included."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# Types of ml_dtypes and of torch, and the integer types of both with as many bits.
_SPELLED = ((BFLOAT16, torch.bfloat16, np.int16, torch.int16), (E4M3, torch.float8_e4m3fn, np.int8, torch.int8))


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a tensor of any device as an array; bfloat16 and float8_e4m3fn become those of ml_dtypes.

    Nothing else may call `Tensor.numpy`, which fails for a tensor on a GPU.
    """
    tensor = tensor.detach().cpu().contiguous()
    for spelled, dtype, _, bits in _SPELLED:
        if tensor.dtype == dtype:
            return tensor.view(bits).numpy().view(spelled)
    return tensor.numpy()


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array as a tensor; see `to_numpy`."""
    array = np.array(array, order="C")
    for spelled, dtype, bits, _ in _SPELLED:
        if array.dtype == spelled:
            return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)
