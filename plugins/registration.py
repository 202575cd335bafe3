"""Register the TwELL plugins in the TensorRTs of a process, and find out on which of a machine that works.

Importing this imports neither torch nor a TensorRT.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from twellc.errors import UserError
from twellc.plugins.library import PLUGIN_NAMES, PLUGIN_NAMESPACE, PLUGIN_VERSION, library_path, load, rtx_shim_path

# The Python modules of each TensorRT. The second is there alone where only its wheels are, without NVIDIA's
# meta-package; the first imports the second.
MODULES = (
    ("tensorrt", "tensorrt_bindings"),
    ("tensorrt_lean", "tensorrt_lean_bindings"),
    ("tensorrt_dispatch", "tensorrt_dispatch_bindings"),
    ("tensorrt_rtx", "tensorrt_rtx_bindings"),
)
# What a machine without any of them may have: the libraries that trtexec and Triton use.
LIBRARIES = (
    *(f"libnvinfer{kind}.so.{major}" for major in (11, 10) for kind in ("", "_lean", "_dispatch")),
    "libtensorrt_rtx.so.1",
)

NEEDS_PLUGINS = "needs the TensorRT plugins in libtwell_plugins.so; `twellc plugins` says where it is"

_CHECK_SECONDS = 120


@dataclass(frozen=True)
class Registration:
    """The plugins in one TensorRT.

    Attributes:
        host: Its Python module or library.
        version: Its version; empty if it could not be loaded.
        state: `registered`, `already registered`, or why it failed.
        good: Whether it has the plugins.
    """

    host: str
    version: str
    state: str
    good: bool = True


def register(module: ModuleType | None = None) -> list[Registration]:
    """Register the plugins in TensorRT; does nothing where they are registered already.

    Args:
        module: A TensorRT, such as the module `tensorrt`. Without it, every TensorRT that is imported.

    Returns:
        One entry for each TensorRT.

    Raises:
        UserError: No TensorRT is imported, the library is missing or cannot be loaded, or TensorRT refuses the plugins.
    """
    modules = [module] if module is not None else imported_modules()
    if not modules:
        raise UserError(
            "twellc.plugins.register", "no TensorRT is imported",
            expected=" or ".join(names[0] for names in MODULES), fix="Import it first.",
        )  # fmt: skip
    return [_register_in(found) for found in modules]


def how_to_register(plan: str, module: str) -> dict[str, str]:
    """Return what makes the plugins known before a plan is opened, by kind of host, and what TensorRT says without.

    Args:
        plan: File name of the plan.
        module: Name of the Python module of the TensorRT that opens it.
    """
    library = "libtwell_plugins.so"
    return {
        "missing": (
            f"TensorRT prints «Cannot find plugin: {PLUGIN_NAMES[0]}{PLUGIN_NAMESPACE}, version: {PLUGIN_VERSION}, "
            f"namespace:{PLUGIN_NAMESPACE}.», or {PLUGIN_NAMES[1]} instead, where they are not registered"
        ),
        "find": "twellc plugins",
        "python": f"import {module}, twellc.plugins; twellc.plugins.register()",
        "trtexec": f"trtexec --dynamicPlugins={library} --loadEngine={plan}",
        "triton": f"tritonserver --backend-config=tensorrt,plugins={library}",
        "c++": f'dlopen("{library}", RTLD_NOW), once TensorRT is loaded',
        "any program": f"LD_PRELOAD={library}",
    }


def imported_modules() -> list[ModuleType]:
    """Return the TensorRT modules that are imported, one for each TensorRT."""
    loaded = [[sys.modules[name] for name in names if name in sys.modules] for names in MODULES]
    return [found[0] for found in loaded if found]


def _register_in(module: ModuleType) -> Registration:
    version = str(getattr(module, "__version__", ""))
    get_registry = getattr(module, "get_plugin_registry", None)
    if get_registry is None:
        name = getattr(module, "__name__", repr(module))
        raise UserError("twellc.plugins.register", f"{name} is no TensorRT: it has no plugin registry")
    registry = get_registry()
    if registry is None:
        raise UserError(f"{module.__name__} {version}", "has no plugin registry")
    state = "already registered"
    if not _has_plugins(registry):
        state = "registered"
        path = library_path()
        # None says nothing: it is returned, too, where the plugins got in on another way.
        registry.load_library(str(path))
        if not _has_plugins(registry):
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                raise UserError(str(path), f"cannot load the plugin library ({error})") from error
        if not _has_plugins(registry):
            raise UserError(
                str(path), f"the plugins do not register in {module.__name__} {version}",
                expected="TensorRT 10, TensorRT 11, or TensorRT-RTX from 1.5 on",
            )  # fmt: skip
    load()  # says so if it is the library of another version
    if module.__name__.startswith("tensorrt_rtx"):
        _load_rtx_shim()
    return Registration(module.__name__, version, state)


def _has_plugins(registry: Any) -> bool:
    return all(registry.get_creator(name, PLUGIN_VERSION, PLUGIN_NAMESPACE) is not None for name in PLUGIN_NAMES)


def _load_rtx_shim() -> None:
    """Load the shim that makes `libtensorrt_rtx.so` resolve to the library that is loaded already.

    TensorRT-RTX's parser opens that name at its first plugin node, while the wheel ships `libtensorrt_rtx.so.1` only;
    without the shim the process would end there.
    """
    path = rtx_shim_path()
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise UserError(str(path), f"cannot load the library ({error})", fix="Install twellc again.") from error


# ---- every TensorRT of the machine ----


def check_installed() -> list[Registration]:
    """Register in every TensorRT that is installed, each in a process of its own, and say what happened.

    A Python module is registered in with `register`. A library that the dynamic linker finds by its name is registered
    in as trtexec and Triton do it: by opening the plugin library beside it.
    """
    modules = [[name for name in names if importlib.util.find_spec(name) is not None] for names in MODULES]
    candidates = [names[0] for names in modules if names] + list(LIBRARIES)
    return [found for found in map(_check_apart, candidates) if found is not None]


def _check_apart(host: str) -> Registration | None:
    # The same module path as here, and not the working directory before it.
    command = [sys.executable, "-P", "-m", "twellc.plugins.registration_worker", host]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_CHECK_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        return Registration(host, "", f"no answer within {_CHECK_SECONDS} s", good=False)
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        return None if answer is None else Registration(**answer)
    except (IndexError, ValueError, TypeError):
        end = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        said = done.stderr.strip().splitlines()
        return Registration(host, "", f"the process ended with {end}" + (f" ({said[-1]})" if said else ""), good=False)


def check_one(host: str) -> Registration | None:
    """Register in one TensorRT, of a module's or a library's name; None if there is no such library."""
    if host not in LIBRARIES:
        try:
            return register(importlib.import_module(host))[0]
        except (ImportError, OSError) as error:
            return Registration(host, "", f"cannot be imported ({error})", good=False)
        except UserError as error:
            return Registration(host, "", str(error), good=False)
    try:
        library = ctypes.CDLL(host)
    except OSError:
        return None
    number = library.getInferLibVersion()
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    try:
        plugins = ctypes.CDLL(str(library_path()))
        plugins.initLibTwellPlugins.restype = ctypes.c_bool
        good = plugins.initLibTwellPlugins(None, b"")
    except (UserError, OSError, AttributeError) as error:
        return Registration(host, version, str(error), good=False)
    return Registration(host, version, "registered" if good else "refuses the plugins", good)
