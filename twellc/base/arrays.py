"""Tensors of torch as arrays of NumPy and back, bfloat16 included."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a tensor of any device as an array; bfloat16 becomes ml_dtypes.bfloat16.

    Nothing else may call `Tensor.numpy`, which fails for a tensor on a GPU.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array as a tensor; ml_dtypes.bfloat16 becomes torch.bfloat16."""
    array = np.array(array, order="C")
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
