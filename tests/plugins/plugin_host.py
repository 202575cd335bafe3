"""A stand-in for TensorRT that calls a plugin's methods as an engine does, and what it is given."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

BF16, FP16, FLOAT32, INT32, INT64, FP8 = 7, 1, 0, 3, 8, 6  # nvinfer1::DataType
LINEAR, CHW4 = 0, 3  # nvinfer1::TensorFormat
TORCH = {BF16: torch.bfloat16, FP16: torch.float16, FLOAT32: torch.float32, FP8: torch.float8_e4m3fn}
KINDS = {**{dtype: kind for kind, dtype in TORCH.items()}, torch.int32: INT32, torch.int64: INT64}


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


Tensors = Sequence[tuple[Sequence[int], int]]  # shapes and types


def make_descs(tensors: Tensors) -> Any:
    return (Desc * len(tensors))(*(make_desc(shape, kind) for shape, kind in tensors))


def make_ranges(least: Tensors, most: Tensors) -> Any:
    """Describe tensors whose every extent may vary, or none where both are the same."""
    ranges = []
    for (low, kind), (high, _) in zip(least, most, strict=True):
        now = [size if size == other else -1 for size, other in zip(low, high, strict=True)]
        ranges.append(DynamicDesc(make_desc(now, kind), make_dims(low), make_dims(high), make_dims(low)))
    return (DynamicDesc * len(ranges))(*ranges)


def create_plugin(
    host: ctypes.CDLL, library: Path, index: int, values: Mapping[str, str | int | float | list[int]]
) -> Any:
    """Create a plugin of the library's creator of this index with these fields."""
    kept: list[Any] = []
    items = []
    for name, value in values.items():
        if isinstance(value, str):
            kept.append(ctypes.create_string_buffer(value.encode()))
        elif isinstance(value, list):
            kept.append((ctypes.c_int32 * len(value))(*value))
        else:
            kept.append((ctypes.c_float if isinstance(value, float) else ctypes.c_int32)(value))
        kind = 6 if isinstance(value, str) else 1 if isinstance(value, float) else 5
        length = len(kept[-1]) if isinstance(value, str | list) else 1
        items.append(Field(name.encode(), ctypes.addressof(kept[-1]), kind, length))
    plugin = host.create(host.load(str(library).encode(), index), Fields(len(items), (Field * len(items))(*items)))
    assert plugin
    return plugin


def supports(host: ctypes.CDLL, plugin: Any, position: int, types: Sequence[int], layout: int = LINEAR) -> bool:
    """Ask for a position of inputs and one output of these types."""
    items = [DynamicDesc(make_desc((8, 8), kind, layout)) for kind in types]
    answer: bool = host.supports(plugin, position, (DynamicDesc * len(items))(*items), len(items) - 1)
    return answer


def enqueue(function: Any, plugin: Any, inputs: Sequence[Tensor], y: Tensor, workspace: Tensor, *more: Tensor) -> int:
    """Call `host.enqueue` or `host.enqueue_attached` with the tensors as they are; `more` are outputs behind y."""
    descs = make_descs([(each.shape, KINDS[each.dtype]) for each in inputs])
    given = (ctypes.c_void_p * len(inputs))(*[each.data_ptr() for each in inputs])
    outputs = (ctypes.c_void_p * (1 + len(more)))(*(each.data_ptr() for each in (y, *more)))
    output = make_desc(y.shape, KINDS[y.dtype])
    stream = torch.cuda.current_stream().cuda_stream
    status: int = function(plugin, descs, ctypes.byref(output), given, outputs, workspace.data_ptr(), stream)
    return status


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
