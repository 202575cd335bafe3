"""Find and load the native libraries, and call their C API.

`plugins/include/twell/twell.h` and `attention.h` document the functions; the structures here mirror those there.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twellc.base.dtypes import CODES
from twellc.base.errors import UserError
from twellc.base.version import __version__
from twellc.plugins.elf import expected_size

PLUGIN_NAMESPACE = "twell"
# In TensorRT's message about missing plugins, only this names twellc.
PLUGIN_VERSION = "twellc-3"
BLOCK_NAMES = ("TwellGatedMlp", "TwellMlp")
LINEAR_NAME, EXPERTS_NAME = "TwellLinear", "TwellExperts"
PLUGIN_NAMES = (*BLOCK_NAMES, LINEAR_NAME, EXPERTS_NAME)
# Plugins in a separate library, which is not built everywhere.
ATTENTION_NAMES = ("TwellAttention", "TwellCachedAttention", "TwellAppendCaches")
ATTENTION_NAME, CACHED_ATTENTION_NAME, APPEND_NAME = ATTENTION_NAMES

DTYPES = CODES
E4M3 = 2  # `weight_dtype` of weights that have scales
# Of experts alone there is `expert`, and of them no `block`.
SCALE_FORMS = {"tensor": 0, "row": 1, "column": 2, "expert": 3, "block": 4}
VARIANTS = {"gated": 0, "plain": 1}
ACTIVATIONS = {"relu": 0, "relu2": 1, "fatrelu": 2, "drelu": 3}
NORMS = {"none": 0, "rms": 1, "layer": 2}
COMPRESSIONS = (1, 2, 4, 8)
SCALE_BLOCK_SIZE = 128  # rows, and columns, of a block of a matrix in FP8 that shares a scale
TILE = 256
MAX_D_FF = 1 << 20  # for plain blocks with 16-bit weights
MAX_PACKED_D_FF = 65536  # for all others
MAX_EXPERTS, MAX_EXPERTS_OF_TOKEN, MAX_EXPERT_D_FF, MAX_EXPERT_WIDTH = 1024, 64, 32768, 65536
MAX_EXPERT_PAIRS = 1 << 20  # of a token and an expert of it, in one call
# Columns of x and y in training, and pairs that a block may keep.
MAX_TRAIN_WIDTH = 65536
MAX_PAIRS = 2**31 - 1
LARGEST_HEAD = 256
# Outputs of a linear layer, and tokens up to which one kernel computes it.
MAX_SPLITS = 4
FEW_TOKENS_LINEAR = 16
# See twellc/passes/attention.py.
ATTENTION_FORMS = ("cudnn", "operator", "matmul")

_ENVIRONMENT_VARIABLE = "TWELLC_LIBRARY"
_REINSTALL = "Install twellc with pip again, or in a source tree run: cmake -S . -B build && cmake --build build"


_I32, _I64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


def _each(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    """Return fields with these names, all of one type."""
    return tuple((name, kind) for name in names.split())


class _Sized(ctypes.Structure):
    """A structure that begins with its size, which the constructor fills in; other fields are keywords."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"struct_bytes": ctypes.sizeof(self), **fields})


_SIZE = _each(ctypes.c_uint32, "struct_bytes")
_SIZE_OF_POINTERS = _each(ctypes.c_uint32, "struct_bytes reserved")


class Problem(_Sized):
    """Mirror of `twell_problem`; by default weights have the type of x."""

    _fields_ = (
        *_SIZE,
        *_each(_I32, "d_model"),
        *_each(_I64, "tokens"),
        *_each(_I32, "d_ff d_out compression dtype weight_dtype variant activation"),
        *_each(ctypes.c_float, "threshold"),
        *_each(_I32, "hot reserved gate_up_scale down_scale"),
        *_each(_I32, "norm"),
        *_each(ctypes.c_float, "eps"),
    )

    def __init__(self, *, dtype: int = 0, **fields: float) -> None:
        super().__init__(**{"dtype": dtype, "weight_dtype": dtype, **fields})


class Tensors(_Sized):
    """Mirror of `twell_tensors`."""

    _fields_ = (
        *_SIZE_OF_POINTERS,
        *_each(_POINTER, "x w_gate b_gate w_up b_up w_down b_down residual y w_gate_scale w_up_scale w_down_scale"),
        *_each(_POINTER, "thresholds norm_weight norm_bias"),
    )


class LinearProblem(_Sized):
    """Mirror of `twell_linear_problem`."""

    _fields_ = (
        *_SIZE,
        *_each(_I32, "in"),
        *_each(_I64, "tokens"),
        *_each(_I32, "out dtype weight_dtype weight_scale norm"),
        *_each(ctypes.c_float, "eps"),
        *_each(_I32 * MAX_SPLITS, "splits"),
        *_each(_I32, "choose reserved"),
    )


class LinearTensors(_Sized):
    """Mirror of `twell_linear_tensors`."""

    _fields_ = (
        *_SIZE_OF_POINTERS,
        *_each(_POINTER, "x weight bias norm_weight norm_bias residual weight_scale"),
        *_each(_POINTER * MAX_SPLITS, "y"),
    )


class ExpertStrides(ctypes.Structure):
    """Mirror of `twell_expert_strides`."""

    _fields_ = _each(_I64, "expert row")


class ExpertsProblem(_Sized):
    """Mirror of `twell_experts_problem`."""

    _fields_ = (
        *_SIZE,
        *_each(_I32, "d_model"),
        *_each(_I64, "tokens"),
        *_each(_I32, "experts top d_ff d_out dtype weight_dtype variant activation"),
        *_each(ctypes.c_float, "threshold"),
        *_each(_I32, "id_bytes gate_up_scale down_scale"),
        *_each(ExpertStrides, "gate up down"),
    )


class ExpertsTensors(_Sized):
    """Mirror of `twell_experts_tensors`."""

    _fields_ = (
        *_SIZE_OF_POINTERS,
        *_each(_POINTER, "x gate up down ids weights y gate_scale up_scale down_scale thresholds"),
    )


class TrainPairs(ctypes.Structure):
    """Mirror of `twell_train_pairs`."""

    _fields_ = (*_each(_POINTER, "row_begin words ups"), *_each(_I64, "capacity"))


class TrainForward(_Sized):
    """Mirror of `twell_train_forward_tensors`."""

    _fields_ = (
        *_SIZE_OF_POINTERS,
        *_each(_POINTER, "neurons"),
        *_each(TrainPairs, "pairs"),
        *_each(_POINTER, "hot row_l1 counts"),
    )


class TrainBackward(_Sized):
    """Mirror of `twell_train_backward_tensors`."""

    _fields_ = (
        *_SIZE_OF_POINTERS,
        *_each(_POINTER, "neurons"),
        *_each(TrainPairs, "pairs"),
        *_each(_POINTER, "dy dl1 hot dx w_gate b_gate w_up b_up w_down"),
    )


class TrainHot(_Sized):
    """Mirror of `twell_train_hot_tensors`."""

    _fields_ = (
        *_SIZE_OF_POINTERS,
        *_each(_I64, "stride"),
        *_each(_POINTER, "z u h neurons counts l1_parts dh dz du dl1"),
    )


class TrainCopy(ctypes.Structure):
    """Mirror of `twell_train_copy`."""

    _fields_ = (*_each(_POINTER, "source target from_rows to_rows"), *_each(_I32, "rows width"))


class Limits(_Sized):
    """Mirror of `twell_limits`: where other kernels take over. See `limits`."""

    _fields_ = (
        *_SIZE,
        *_each(_I32, "one_or_two_tokens"),
        *_each(_I64, "dense_block_products dense_block_products_if_split"),
        *_each(_I32, "few_tokens few_tokens_generic few_tokens_sm90 narrow_gated narrow_plain dense_block_tokens"),
        *_each(_I32, "dense_block_tokens_if_split fewest_hot most_hot chunk_tokens dense_block_tokens_scaled"),
        *_each(_I64, "dense_block_products_scaled"),
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


class Device(ctypes.Structure):
    """Mirror of `twell_device`: a GPU."""

    _fields_ = _each(_I32, "major minor multiprocessors shared_bytes l2_bytes")


class AttentionProblem(ctypes.Structure):
    """Mirror of `twell_attention_problem`."""

    _fields_ = (
        *_each(_I64, "batch tokens keys"),
        *_each(_I32, "heads kv_heads width dtype causal lengths"),
        *_each(ctypes.c_float, "scale"),
        *_each(_I32, "cached rotated fp8"),
        *_each(ctypes.c_float, "key_scale value_scale"),
    )


class AttentionTensors(ctypes.Structure):
    """Mirror of `twell_attention_tensors`."""

    _fields_ = _each(_POINTER, "q k v lengths y query_lengths cosines sines")


class AppendProblem(ctypes.Structure):
    """Mirror of `twell_append_problem`."""

    _fields_ = (
        *_each(_I64, "batch tokens length"),
        *_each(_I32, "kv_heads key_bytes value_bytes rotated dtype fp8"),
        *_each(ctypes.c_float, "key_scale value_scale"),
    )


class AppendTensors(ctypes.Structure):
    """Mirror of `twell_append_tensors`."""

    _fields_ = _each(_POINTER, "keys values new_keys new_values starts counts cosines sines")


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
    """Return the key in GPUS for a driver's name, such as `NVIDIA H100 80GB HBM3`; None without one."""
    words = set(re.split(r"[\s-]+", driver_name.upper()))
    found = [name for name in GPUS if words.issuperset(name.upper().split("-"))]
    return max(found, key=len, default=None)


def library_path() -> Path:
    """Return the path of `libtwell_plugins.so`: $TWELLC_LIBRARY if set, else the one that was built with this package.

    Raises:
        UserError: The file is missing or truncated.
    """
    override = os.environ.get(_ENVIRONMENT_VARIABLE)
    path = Path(override) if override else Path(__file__).resolve().parent / "lib" / "libtwell_plugins.so"
    return _whole(path, f" (named by ${_ENVIRONMENT_VARIABLE})" if override else "")


def rtx_shim_path() -> Path:
    """Return the path of `libtensorrt_rtx.so`, beside the plugin library.

    Raises:
        UserError: The file is missing or truncated.
    """
    return _whole(library_path().with_name("libtensorrt_rtx.so"))


def attention_library_path() -> Path | None:
    """Return the path of `libtwell_attention.so`, beside the plugin library; None where it was not built.

    Raises:
        UserError: The plugin library is missing, or one of the two is truncated.
    """
    path = library_path().with_name("libtwell_attention.so")
    return _whole(path) if path.exists() else None


def _whole(path: Path, origin: str = "") -> Path:
    if not path.is_file():
        raise UserError(str(path), f"the plugin library is missing{origin}", fix=_REINSTALL)
    expected, size = expected_size(path), path.stat().st_size
    if expected is None or expected > size:
        whole = f"{expected} bytes" if expected else "a 64-bit ELF file"
        what = f"the plugin library is damaged{origin}"
        raise UserError(str(path), what, got=f"{size} bytes", expected=whole, fix=_REINSTALL)
    return path


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library once a process and declare its functions.

    Raises:
        UserError: The library is missing, cannot be loaded, or is of another version than this package.
    """
    problem, tensors, run = ctypes.POINTER(Problem), ctypes.POINTER(Tensors), (_POINTER, ctypes.c_size_t, _POINTER)
    linear, experts = ctypes.POINTER(LinearProblem), ctypes.POINTER(ExpertsProblem)
    functions: dict[str, tuple[Any, ...]] = {
        "twell_linear_validate": (ctypes.c_char_p, linear),
        "twell_linear_workspace_bytes": (ctypes.c_size_t, linear),
        "twell_linear": (ctypes.c_int, linear, ctypes.POINTER(LinearTensors), *run),
        "twell_linear_describe": (ctypes.c_size_t, linear, ctypes.POINTER(Device), ctypes.c_char_p, ctypes.c_size_t),
        "twell_experts_validate": (ctypes.c_char_p, experts),
        "twell_experts_workspace_bytes": (ctypes.c_size_t, experts),
        "twell_experts": (ctypes.c_int, experts, ctypes.POINTER(ExpertsTensors), *run),
        "twell_experts_describe": (ctypes.c_size_t, experts, ctypes.POINTER(Device), ctypes.c_char_p, ctypes.c_size_t),
        "twell_validate": (ctypes.c_char_p, problem),
        "twell_validate_tensors": (ctypes.c_char_p, problem, tensors),
        "twell_get_limits": (None, ctypes.POINTER(Limits)),
        "twell_packed_bytes": (ctypes.c_size_t, problem),
        "twell_workspace_bytes": (ctypes.c_size_t, problem),
        "twell_gate": (ctypes.c_int, problem, tensors, _POINTER, _POINTER),
        "twell_mlp": (ctypes.c_int, problem, tensors, *run),
        "twell_encode_bytes": (ctypes.c_size_t, problem, _I32),
        "twell_encode": (ctypes.c_int, problem, tensors, _I32, _POINTER, _POINTER, _POINTER, _I64, *run),
        "twell_decode": (ctypes.c_int, problem, tensors, _POINTER, _POINTER, _POINTER, _I64, _POINTER),
        "twell_train_forward_bytes": (ctypes.c_size_t, problem, _I64),
        "twell_train_backward_bytes": (ctypes.c_size_t, problem, _I64),
        "twell_train_forward": (ctypes.c_int, problem, tensors, ctypes.POINTER(TrainForward), *run),
        "twell_train_backward": (ctypes.c_int, problem, tensors, ctypes.POINTER(TrainBackward), *run),
        "twell_train_hot_parts": (_I64, problem),
        "twell_train_copy_rows": (ctypes.c_int, ctypes.POINTER(TrainCopy), _I32, _POINTER),
        "twell_train_hot": (ctypes.c_int, problem, ctypes.POINTER(TrainHot), _POINTER),
        "twell_describe": (ctypes.c_size_t, problem, ctypes.POINTER(Device), ctypes.c_char_p, ctypes.c_size_t),
    }
    return _open(library_path(), "twell_version", functions)


@functools.cache
def load_attention() -> ctypes.CDLL | None:
    """Load the attention library once a process and declare its functions; None where it was not built.

    Raises:
        UserError: The library cannot be loaded, or is of another version than this package.
    """
    path = attention_library_path()
    if path is None:
        return None
    problem, message = ctypes.POINTER(AttentionProblem), (ctypes.c_char_p, ctypes.c_size_t)
    functions: dict[str, tuple[Any, ...]] = {
        "twell_attention_validate": (ctypes.c_char_p, problem),
        "twell_attention_create": (_POINTER, problem, *message),
        "twell_attention_destroy": (None, _POINTER),
        "twell_attention_workspace_bytes": (ctypes.c_size_t, _POINTER),
        "twell_attention_run": (_I32, _POINTER, ctypes.POINTER(AttentionTensors), _POINTER, _POINTER, *message),
        "twell_append_caches": (ctypes.c_int, ctypes.POINTER(AppendProblem), ctypes.POINTER(AppendTensors), _POINTER),
    }
    return _open(path, "twell_attention_version", functions)


def _open(path: Path, version: str, functions: dict[str, tuple[Any, ...]]) -> ctypes.CDLL:
    """Load a library, check that its function `version` returns this package's, and declare its functions.

    Args:
        path: The library.
        version: Name of this function.
        functions: By name, the types of the result and of the arguments.
    """
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
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def limits() -> Limits:
    """Return the numbers at which other kernels take over, from the library.

    Raises:
        UserError: As in `load`.
    """
    found = Limits()
    load().twell_get_limits(found)
    return found


def fault_of(problem: Problem | LinearProblem | ExpertsProblem) -> str:
    """Return why the library refuses a problem; an empty text where it does not.

    Raises:
        UserError: As in `load`.
    """
    library = load()
    validate = {
        Problem: library.twell_validate,
        LinearProblem: library.twell_linear_validate,
        ExpertsProblem: library.twell_experts_validate,
    }
    fault: bytes | None = validate[type(problem)](problem)
    return "" if fault is None else fault.decode()


def describe(problem: Problem | ExpertsProblem, device: Device | None = None) -> str:
    """Return the text of `twell_describe` about the kernels of a block or experts on a GPU; None for the current GPU.

    For a block the first line is `route NAME`, each other line a launch.

    Raises:
        UserError: There are no kernels for the problem or the GPU; or as in `load`.
    """
    library = load()
    of_experts = isinstance(problem, ExpertsProblem)
    called = library.twell_experts_describe if of_experts else library.twell_describe
    function = functools.partial(called, problem, device)
    if function(None, 0) == 0:
        message = fault_of(problem) or "there is no GPU with compute capability 8.0 or later"
        raise UserError("twell_describe", message, fix="Name one of the GPUs in twellc.plugins.library.GPUS")
    return read_text(function)


def read_text(function: Callable[[ctypes.Array[ctypes.c_char] | None, int], int]) -> str:
    """Return the text of a function of the C API that takes a buffer with its size, and returns the needed size."""
    size = function(None, 0)
    buffer = ctypes.create_string_buffer(max(size, 1))
    function(buffer, size)
    return buffer.value.decode()
