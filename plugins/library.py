"""Find and load the native libraries, and call their C API.

`plugins/include/twell/twell.h` and `attention.h` document the functions; the structures here mirror their structures.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twellc.base.dtypes import CODES
from twellc.base.errors import UserError
from twellc.base.version import __version__
from twellc.plugins.elf import expected_size

PLUGIN_NAMESPACE = "twell"
# In what TensorRT prints where it does not find the plugins, only this names twellc.
PLUGIN_VERSION = "twellc-3"
PLUGIN_NAMES = ("TwellGatedMlp", "TwellMlp")
# In a library of their own, which is not everywhere.
ATTENTION_NAMES = ("TwellAttention", "TwellCachedAttention", "TwellAppendCaches")
ATTENTION_NAME, CACHED_ATTENTION_NAME, APPEND_NAME = ATTENTION_NAMES

DTYPES = CODES
VARIANTS = {"gated": 0, "plain": 1}
ACTIVATIONS = {"relu": 0, "relu2": 1, "fatrelu": 2, "drelu": 3}
COMPRESSIONS = (1, 2, 4, 8)
TILE = 256
MAX_D_FF = 65536
# Columns of x and y in training, and pairs that a block may keep.
MAX_TRAIN_WIDTH = 65536
MAX_PAIRS = 2**31 - 1
LARGEST_HEAD = 256
# See passes/attention.py.
ATTENTION_FORMS = ("cudnn", "operator", "matmul")

_ENVIRONMENT_VARIABLE = "TWELLC_LIBRARY"
_REINSTALL = "Install twellc with pip again, or in a source tree run: cmake -S . -B build && cmake --build build"


class Problem(ctypes.Structure):
    """Mirror of `twell_problem`, made by keyword: its size is filled in, and weights have the type of x."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("d_model", ctypes.c_int32),
        ("tokens", ctypes.c_int64),
        ("d_ff", ctypes.c_int32),
        ("d_out", ctypes.c_int32),
        ("compression", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("weight_dtype", ctypes.c_int32),
        ("variant", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("threshold", ctypes.c_float),
        ("hot", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )

    def __init__(self, *, dtype: int = 0, **fields: float) -> None:
        super().__init__(**{"struct_bytes": ctypes.sizeof(self), "dtype": dtype, "weight_dtype": dtype, **fields})


class Tensors(ctypes.Structure):
    """Mirror of `twell_tensors`, made by keyword: its size is filled in."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down", "residual")
        ),
        *((name, ctypes.c_void_p) for name in ("y", "w_gate_scale", "w_up_scale", "w_down_scale")),
    )

    def __init__(self, **pointers: int | None) -> None:
        super().__init__(**{"struct_bytes": ctypes.sizeof(self), **pointers})


class TrainPairs(ctypes.Structure):
    """Mirror of `twell_train_pairs`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("row_begin", "words", "ups")),
        ("capacity", ctypes.c_int64),
    )


class _Sized(ctypes.Structure):
    """A structure that begins with its size, which is filled in, and is made by keyword."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"struct_bytes": ctypes.sizeof(self), **fields})


_SIZE = (("struct_bytes", ctypes.c_uint32), ("reserved", ctypes.c_uint32))


class TrainForward(_Sized):
    """Mirror of `twell_train_forward_tensors`."""

    _fields_ = (
        *_SIZE,
        ("neurons", ctypes.c_void_p),
        ("pairs", TrainPairs),
        *((name, ctypes.c_void_p) for name in ("hot", "row_l1", "counts")),
    )


class TrainBackward(_Sized):
    """Mirror of `twell_train_backward_tensors`."""

    _fields_ = (
        *_SIZE,
        ("neurons", ctypes.c_void_p),
        ("pairs", TrainPairs),
        *((name, ctypes.c_void_p) for name in ("dy", "dl1", "hot", "dx", "w_gate", "b_gate", "w_up", "b_up", "w_down")),
    )


class TrainHot(_Sized):
    """Mirror of `twell_train_hot_tensors`."""

    _fields_ = (
        *_SIZE,
        ("stride", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("z", "u", "h", "neurons", "counts", "l1_parts", "dh", "dz", "du", "dl1")
        ),
    )


class TrainCopy(ctypes.Structure):
    """Mirror of `twell_train_copy`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "target", "from_rows", "to_rows")),
        *((name, ctypes.c_int32) for name in ("rows", "width")),
    )


class Limits(ctypes.Structure):
    """Mirror of `twell_limits`: where other kernels take over. See `limits`."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("one_or_two_tokens", ctypes.c_int32),
        ("dense_block_products", ctypes.c_int64),
        ("dense_block_products_if_split", ctypes.c_int64),
        ("few_tokens", ctypes.c_int32),
        ("few_tokens_generic", ctypes.c_int32),
        ("few_tokens_sm90", ctypes.c_int32),
        ("narrow_gated", ctypes.c_int32),
        ("narrow_plain", ctypes.c_int32),
        ("dense_block_tokens", ctypes.c_int32),
        ("dense_block_tokens_if_split", ctypes.c_int32),
        ("fewest_hot", ctypes.c_int32),
        ("most_hot", ctypes.c_int32),
        ("chunk_tokens", ctypes.c_int32),
    )

    one_or_two_tokens: int
    dense_block_products: int
    dense_block_products_if_split: int
    few_tokens: int
    few_tokens_generic: int
    few_tokens_sm90: int
    narrow_gated: int
    narrow_plain: int
    dense_block_tokens: int
    dense_block_tokens_if_split: int
    fewest_hot: int
    most_hot: int
    chunk_tokens: int


class Device(ctypes.Structure):
    """Mirror of `twell_device`: a GPU."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("major", "minor", "multiprocessors", "shared_bytes", "l2_bytes")
    )


# GPUs by name, as their drivers or data sheets describe them.
GPUS = {
    "H200": Device(9, 0, 132, 227 << 10, 60 << 20),
    "H100": Device(9, 0, 132, 227 << 10, 50 << 20),
    "H100-PCIe": Device(9, 0, 114, 227 << 10, 50 << 20),
    "H20": Device(9, 0, 78, 227 << 10, 60 << 20),
    "A100": Device(8, 0, 108, 163 << 10, 40 << 20),
    "L40S": Device(8, 9, 142, 99 << 10, 96 << 20),
    "RTX-4090": Device(8, 9, 128, 99 << 10, 72 << 20),
    "RTX-5090": Device(12, 0, 170, 99 << 10, 96 << 20),
}


def gpu_named(driver_name: str) -> str | None:
    """Return which of GPUS a driver's name, such as `NVIDIA H100 80GB HBM3`, is of; None where it is none of them."""
    words = set(re.split(r"[\s-]+", driver_name.upper()))
    found = [name for name in GPUS if words.issuperset(name.upper().split("-"))]
    return max(found, key=len, default=None)


class AttentionProblem(ctypes.Structure):
    """Mirror of `twell_attention_problem`."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("lengths", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("cached", ctypes.c_int32),
    )


class AttentionTensors(ctypes.Structure):
    """Mirror of `twell_attention_tensors`."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("q", "k", "v", "lengths", "y", "query_lengths"))


class AppendProblem(ctypes.Structure):
    """Mirror of `twell_append_problem`."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "length")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "key_bytes", "value_bytes")),
    )


class AppendTensors(ctypes.Structure):
    """Mirror of `twell_append_tensors`."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("keys", "values", "new_keys", "new_values", "starts", "counts")
    )


def library_path() -> Path:
    """Return the path of `libtwell_plugins.so`: $TWELLC_LIBRARY if set, else the one that was built with this package.

    Raises:
        UserError: There is no such file, or it is cut off.
    """
    override = os.environ.get(_ENVIRONMENT_VARIABLE)
    path = Path(override) if override else Path(__file__).resolve().parent / "lib" / "libtwell_plugins.so"
    return _whole(path, f" (named by ${_ENVIRONMENT_VARIABLE})" if override else "")


def rtx_shim_path() -> Path:
    """Return the path of `libtensorrt_rtx.so`, beside the plugin library.

    Raises:
        UserError: There is no such file, or it is cut off.
    """
    return _whole(library_path().with_name("libtensorrt_rtx.so"))


def attention_library_path() -> Path | None:
    """Return the path of `libtwell_attention.so`, beside the plugin library; None where it was not built.

    Raises:
        UserError: The plugin library is missing, or one of the two is cut off.
    """
    path = library_path().with_name("libtwell_attention.so")
    return _whole(path) if path.exists() else None


def _whole(path: Path, origin: str = "") -> Path:
    if not path.is_file():
        raise UserError(str(path), f"the plugin library is missing{origin}", fix=_REINSTALL)
    expected, size = expected_size(path), path.stat().st_size
    if expected is None or expected > size:
        raise UserError(
            str(path), f"the plugin library is damaged{origin}", got=f"{size} bytes",
            expected=f"{expected} bytes" if expected else "a 64-bit ELF file", fix=_REINSTALL,
        )  # fmt: skip
    return path


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library once a process and declare its functions.

    Raises:
        UserError: The library is missing, cannot be loaded, or is of another version than this package.
    """
    library = _open(library_path(), "twell_version")
    problem, tensors, pointer = ctypes.POINTER(Problem), ctypes.POINTER(Tensors), ctypes.c_void_p
    for name, restype, argtypes in (
        ("twell_validate", ctypes.c_char_p, [problem]),
        ("twell_validate_tensors", ctypes.c_char_p, [problem, tensors]),
        ("twell_get_limits", None, [ctypes.POINTER(Limits)]),
        ("twell_packed_bytes", ctypes.c_size_t, [problem]),
        ("twell_workspace_bytes", ctypes.c_size_t, [problem]),
        ("twell_gate", ctypes.c_int, [problem, tensors, pointer, pointer]),
        ("twell_mlp", ctypes.c_int, [problem, tensors, pointer, ctypes.c_size_t, pointer]),
        ("twell_train_forward_bytes", ctypes.c_size_t, [problem, ctypes.c_int64]),
        ("twell_train_backward_bytes", ctypes.c_size_t, [problem, ctypes.c_int64]),
        (
            "twell_train_forward",
            ctypes.c_int,
            [problem, tensors, ctypes.POINTER(TrainForward), pointer, ctypes.c_size_t, pointer],
        ),
        (
            "twell_train_backward",
            ctypes.c_int,
            [problem, tensors, ctypes.POINTER(TrainBackward), pointer, ctypes.c_size_t, pointer],
        ),
        ("twell_train_hot_parts", ctypes.c_int64, [problem]),
        ("twell_train_copy_rows", ctypes.c_int, [ctypes.POINTER(TrainCopy), ctypes.c_int32, pointer]),
        ("twell_train_hot", ctypes.c_int, [problem, ctypes.POINTER(TrainHot), pointer]),
        ("twell_describe", ctypes.c_size_t, [problem, ctypes.POINTER(Device), ctypes.c_char_p, ctypes.c_size_t]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = restype, argtypes
    return library


@functools.cache
def limits() -> Limits:
    """Return the numbers at which other kernels take over, as the library has them.

    Raises:
        UserError: As in `load`.
    """
    found = Limits(struct_bytes=ctypes.sizeof(Limits))
    load().twell_get_limits(found)
    return found


def describe(problem: Problem, device: Device | None = None) -> str:
    """Return which kernels compute a block on a GPU, as `twell_describe` says it; None for the current GPU.

    The first line is `route NAME`, each other one a launch.

    Raises:
        UserError: There are no kernels for the problem or the GPU; or as in `load`.
    """
    library = load()
    function = functools.partial(library.twell_describe, problem, device)
    if function(None, 0) == 0:
        fault = library.twell_validate(problem)
        message = fault.decode() if fault else "there is no GPU with compute capability 8.0 or later"
        raise UserError("twell_describe", message, fix="Name one of the GPUs in twellc.plugins.library.GPUS")
    return read_text(function)


def read_text(function: Callable[[ctypes.Array[ctypes.c_char] | None, int], int]) -> str:
    """Return what a function of the C API writes that takes a buffer and its size, and returns the size it needs."""
    size = function(None, 0)
    buffer = ctypes.create_string_buffer(max(size, 1))
    function(buffer, size)
    return buffer.value.decode()


@functools.cache
def load_attention() -> ctypes.CDLL | None:
    """Load the attention library once a process and declare its functions; None where it was not built.

    Raises:
        UserError: The library cannot be loaded, or is of another version than this package.
    """
    path = attention_library_path()
    if path is None:
        return None
    library = _open(path, "twell_attention_version")
    problem, tensors, pointer = ctypes.POINTER(AttentionProblem), ctypes.POINTER(AttentionTensors), ctypes.c_void_p
    append, appended = ctypes.POINTER(AppendProblem), ctypes.POINTER(AppendTensors)
    message = [ctypes.c_char_p, ctypes.c_size_t]
    for name, restype, argtypes in (
        ("twell_attention_validate", ctypes.c_char_p, [problem]),
        ("twell_attention_create", pointer, [problem, *message]),
        ("twell_attention_destroy", None, [pointer]),
        ("twell_attention_workspace_bytes", ctypes.c_size_t, [pointer]),
        ("twell_attention_run", ctypes.c_int32, [pointer, tensors, pointer, pointer, *message]),
        ("twell_append_caches", ctypes.c_int, [append, appended, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = restype, argtypes
    return library


def _open(path: Path, version: str) -> ctypes.CDLL:
    """Load a library, whose function `version` must say that of this package."""
    try:
        library = ctypes.CDLL(str(path))
        ask: Any = getattr(library, version)
    except (OSError, AttributeError) as error:
        raise UserError(str(path), f"cannot load the plugin library ({error})", fix=_REINSTALL) from error
    ask.restype = ctypes.c_char_p
    found = ask().decode()
    if found != __version__:
        raise UserError(
            str(path), "the plugin library is of another version", got=found, expected=__version__, fix=_REINSTALL
        )
    return library
