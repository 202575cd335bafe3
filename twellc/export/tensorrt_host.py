"""The one module that knows how TensorRT's flavours differ: TensorRT 10 and 11, and TensorRT for RTX.

Flags are always taken by name: their numbers changed between the majors.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twellc.base.errors import UserError
from twellc.base.files import writing

# TensorRT-RTX is called tensorrt_rtx where NVIDIA's meta-package is installed; its wheels alone have the second name.
_MODULES = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}
RTX_CAPABILITIES = "8.6, 8.9 and 12.x"


@dataclass(frozen=True)
class Host:
    """A TensorRT that can be imported.

    Attributes:
        name: `tensorrt` or `tensorrt-rtx`.
        module: Its Python module.
        version: Its version.
    """

    name: str
    module: Any
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def choose_host(backend: str) -> str:
    """Return which TensorRT to use, `tensorrt` or `tensorrt-rtx`, without importing it.

    `auto` takes full TensorRT where it is installed and sees a GPU, which it needs to build; else TensorRT-RTX.

    Raises:
        UserError: It is not installed, or cannot build on this machine.
    """
    names = [backend] if backend != "auto" else ["tensorrt", "tensorrt-rtx"]
    for name in names:
        if python_module(name) is None or (backend == "auto" and name == "tensorrt" and not has_gpu()):
            continue
        if name == "tensorrt" and not has_gpu():
            raise UserError(
                f"--backend {backend}", "TensorRT builds on the GPU that it builds for, and there is none here",
                fix="Build on the target machine, or use --backend tensorrt-rtx or none.",
            )  # fmt: skip
        return name
    raise UserError(
        f"--backend {backend}", f"{' and '.join(names)} not found",
        fix="Install tensorrt, or tensorrt-rtx-cu13-libs and tensorrt-rtx-cu13-bindings; or stop at --backend none.",
    )  # fmt: skip


def load_host(name: str) -> Host:
    """Import `tensorrt` or `tensorrt-rtx`.

    Raises:
        UserError: It is not installed, or cannot be imported.
    """
    module_name = python_module(name)
    if module_name is None:
        raise UserError(name, "is not installed")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, OSError) as error:
        raise UserError(name, f"{module_name} cannot be imported ({error})") from error
    return Host(name, module, str(module.__version__))


def python_module(name: str) -> str | None:
    """Return the Python module of `tensorrt` or `tensorrt-rtx`, or None if it is not installed."""
    return next((module for module in _MODULES[name] if importlib.util.find_spec(module) is not None), None)


def has_gpu() -> bool:
    """Whether an NVIDIA driver with at least one GPU is there; asks the driver, without CUDA's runtime."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first GPU, or None without one."""
    if not has_gpu():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return major.value, minor.value


def why_not_here(host_name: str) -> str:
    """Say why a plan of this flavour cannot run on this machine, or return an empty string."""
    capability = compute_capability()
    if capability is None:
        return "there is no GPU on this machine"
    if host_name == "tensorrt-rtx" and capability not in ((8, 6), (8, 9)) and capability[0] != 12:
        found = ".".join(map(str, capability))
        return f"TensorRT-RTX runs on compute capability {RTX_CAPABILITIES}, this GPU has {found}"
    return ""


def make_logger(host: Host, messages: list[str]) -> Any:
    """Return a TensorRT logger that collects errors in `messages`, and says nothing itself."""
    severity = host.module.ILogger.Severity

    class Collector(host.module.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()

        def log(self, level: Any, message: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                messages.append(message)

    return Collector()


def create_network(host: Host, builder: Any) -> Any:
    """Create a strongly typed network; where the flag is gone, every network is."""
    flag = getattr(host.module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return builder.create_network(0 if flag is None else 1 << int(flag))


def write_plan(host: Host, builder: Any, network: Any, config: Any, path: Path) -> bool:
    """Build a network and write its plan; piece by piece where this TensorRT can, so that it is not held in memory.

    Returns:
        Whether TensorRT built it.

    Raises:
        UserError: The file cannot be written.
    """
    failures: list[OSError] = []
    with writing(path), path.open("wb") as stream:
        if not hasattr(builder, "build_serialized_network_to_stream"):
            data = builder.build_serialized_network(network, config)
            if data is not None:
                stream.write(data)
            return data is not None

        class Writer(host.module.IStreamWriter):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()

            def write(self, piece: bytes) -> int:
                try:
                    return stream.write(piece)
                except OSError as error:  # must not pass through TensorRT
                    failures.append(error)
                    return 0

        built = bool(builder.build_serialized_network_to_stream(network, config, Writer()))
        if failures:
            raise failures[0]
        return built
