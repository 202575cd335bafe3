"""What a method of quantisation is: how a library says in config.json that it has quantised, and what it stores."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

TAKE_ORIGINAL = "Take the checkpoint that this one was made from"
SCALE = re.compile(r"(.*weight)_scale(_inv)?")  # what scales are called, and the weights that they are of


class Matrix(Protocol):
    """A quantised matrix. Ops read some that are `Fp8`; all others are dequantised."""

    @property
    def shape(self) -> torch.Size:
        """[out, in]."""

    @property
    def kind(self) -> str:
        """What notes call it: `E4M3`, for one."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return it, computed in float32 and rounded once."""


class Method(ABC):
    """A method of quantisation; `METHODS` of `quantization.py` lists them.

    Attributes:
        name: Its `quant_method` in config.json.
        reads: What is read of it, in messages.
        config: The class of transformers that undoes other forms of it by `dequantize=True`; empty where none does.
    """

    name: str
    reads: str
    config = ""

    @abstractmethod
    def fault(self, settings: Mapping[str, Any]) -> str:
        """Return what in its settings is not read; empty if all is."""

    @abstractmethod
    def take(self, path: Path, tensors: dict[str, Tensor]) -> Mapping[str, Matrix]:
        """Take its matrices, with what describes them, out of the tensors of a directory, by name.

        It is asked whatever the settings say: the tensors decide. Scales of activations may stay, and are dropped.

        Returns:
            The matrices, by the names that their weights have in a model of 16 bits.

        Raises:
            UserError: One of them is not whole; `path` is the directory.
        """
