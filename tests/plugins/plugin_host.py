"""A stand-in for TensorRT that calls a plugin's methods as an engine does, and what it is given."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

BF16, FP16, FLOAT32 = 7, 1, 0  # nvinfer1::DataType
LINEAR, CHW4 = 0, 3  # nvinfer1::TensorFormat
TORCH = {BF16: torch.bfloat16, FP16: torch.float16}


class Dims(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int32), ("extents", ctypes.c_int64 * 8))


class Desc(ctypes.Structure):
    _fields_ = (("dims", Dims), ("type", ctypes.c_int32), ("format", ctypes.c_int32), ("scale", ctypes.c_float))


class DynamicDesc(ctypes.Structure):
    _fields_ = (("desc", Desc), ("min", Dims), ("max", Dims), ("opt", Dims))


class Field(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("length", ctypes.c_int32),
    )


class Fields(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("fields", ctypes.POINTER(Field)))


assert ctypes.sizeof(Desc) == 88
assert ctypes.sizeof(DynamicDesc) == 304


def make_dims(shape: Sequence[int]) -> Dims:
    return Dims(len(shape), (ctypes.c_int64 * 8)(*shape))


def make_desc(shape: Sequence[int], dtype: int, layout: int = LINEAR) -> Desc:
    return Desc(make_dims(shape), dtype, layout, 1.0)


def compile_host(path: Path, version: int, layout: int) -> Path:
    """Compile the stand-in for a TensorRT of this version and layout of interfaces."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the stand-in for TensorRT")
    source = Path(__file__).with_name("fake_host.cpp")
    flags = ["-std=c++17", "-shared", "-fPIC", f"-DHOST_VERSION={version}", f"-DHOST_LAYOUT={layout}"]
    subprocess.run([compiler, *flags, "-o", str(path), str(source), "-ldl"], check=True)
    return path


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = compile_host(tmp_path_factory.mktemp("host") / "libnvinfer.so.10", 101401, 10)
    loaded = ctypes.CDLL(str(path))
    pointer, count = ctypes.c_void_p, ctypes.c_int32
    loaded.load.argtypes, loaded.load.restype = [ctypes.c_char_p, count], pointer
    loaded.create.argtypes, loaded.create.restype = [pointer, ctypes.POINTER(Fields)], pointer
    loaded.configure.argtypes = [pointer, pointer, count, pointer]
    loaded.workspace_size.argtypes, loaded.workspace_size.restype = loaded.configure.argtypes, ctypes.c_size_t
    loaded.supports.argtypes, loaded.supports.restype = [pointer, count, pointer, count], ctypes.c_bool
    loaded.shape_change.argtypes = loaded.configure.argtypes
    loaded.enqueue.argtypes = loaded.enqueue_attached.argtypes = [pointer] * 7
    loaded.attach.argtypes, loaded.attach.restype = [pointer], pointer
    loaded.destroy.argtypes = [pointer]
    return loaded
