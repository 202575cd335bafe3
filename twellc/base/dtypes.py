"""Element types under all of their names: the one table. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        name: Its name in torch, and in NumPy with ml_dtypes.
        onnx: Its number in `onnx.TensorProto`.
        tensorrt: Its name in TensorRT's `DataType`; empty where TensorRT has none.
        triton: Its name in Triton's configurations; empty where it has none.
        option: Its name for `--dtype`; empty where no model can be compiled in it.
        code: Its number in `twell.h`; None where the kernels do not take it.
    """

    name: str
    onnx: int
    tensorrt: str = ""
    triton: str = ""
    option: str = ""
    code: int | None = None

    @property
    def torch(self) -> torch.dtype:
        """The dtype of torch."""
        import torch

        dtype = getattr(torch, self.name)
        assert isinstance(dtype, torch.dtype)
        return dtype


TABLE = (
    DType("float64", 11),
    DType("float32", 1, "FLOAT", "TYPE_FP32"),
    DType("bfloat16", 16, "BF16", "TYPE_BF16", "bf16", 0),
    DType("float16", 10, "HALF", "TYPE_FP16", "fp16", 1),
    DType("float8_e4m3fn", 17, "FP8"),
    DType("int64", 7, "INT64", "TYPE_INT64"),
    DType("int32", 6, "INT32", "TYPE_INT32"),
    DType("int16", 5),
    DType("int8", 3, "INT8", "TYPE_INT8"),
    DType("uint8", 2, "UINT8", "TYPE_UINT8"),
    DType("bool", 9, "BOOL", "TYPE_BOOL"),
)
BY_NAME = {each.name: each for each in TABLE}
BY_ONNX = {each.onnx: each for each in TABLE}
BY_TENSORRT = {each.tensorrt: each for each in TABLE if each.tensorrt}
# The type of an ONNX graph in which nothing was rewritten; no model can be compiled in it.
UNCHANGED = "float32"
# The types that models are compiled in: names of the option and of torch.
DTYPES = {each.option: each.name for each in TABLE if each.option}
# The types that the kernels take: names and numbers in twell.h.
CODES = {each.name: each.code for each in TABLE if each.code is not None}


def torch_dtype(option: str) -> torch.dtype:
    """Return the dtype for `bf16` or `fp16`."""
    return BY_NAME[DTYPES[option]].torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16, and so on."""
    return str(dtype).removeprefix("torch.")


def option_of(name: str) -> str:
    """Return `bf16` for bfloat16, and so on; the name itself where no model can be compiled in it."""
    return BY_NAME[name].option or name if name in BY_NAME else name


def kernel_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that the kernels take."""
    return tuple(BY_NAME[name].torch for name in CODES)
