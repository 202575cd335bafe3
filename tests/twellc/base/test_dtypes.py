"""The names in the table of element types are those of the libraries that they are for."""

import re
import subprocess
import sys

import ml_dtypes  # noqa: F401  makes bfloat16 a dtype of NumPy
import numpy as np
import onnx
import pytest
import torch

from tests.conftest import ROOT
from tests.processes import environment
from twellc.base.dtypes import CODES, DTYPES, TABLE, DType, dtype_name, kernel_dtypes, torch_dtype

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX is not installed")


@pytest.mark.parametrize("dtype", TABLE, ids=lambda dtype: dtype.name)
def test_names(dtype: DType) -> None:
    assert dtype_name(dtype.torch) == np.dtype(dtype.name).name == dtype.name
    assert onnx.helper.tensor_dtype_to_np_dtype(dtype.onnx) == np.dtype(dtype.name)
    assert bool(dtype.triton) == (dtype.tensorrt not in ("", "FP8"))
    if dtype.tensorrt:
        assert trt.DataType.__members__[dtype.tensorrt].itemsize == np.dtype(dtype.name).itemsize


def test_what_models_are_compiled_in() -> None:
    assert list(DTYPES) == ["bf16", "fp16"]
    assert (torch_dtype("bf16"), torch_dtype("fp16")) == kernel_dtypes() == (torch.bfloat16, torch.float16)


def test_numbers_of_the_c_api() -> None:
    header = (ROOT / "plugins" / "include" / "twell" / "twell.h").read_text()
    found = {name: int(number) for name, number in re.findall(r"TWELL_(BF16|FP16) = (\d+)", header)}
    assert found == {"BF16": CODES["bfloat16"], "FP16": CODES["float16"]}


def test_importing_the_table_imports_no_torch() -> None:
    code = "import sys, twellc.base.dtypes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0
