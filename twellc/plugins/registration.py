"""Register the plugins in the TensorRTs of a process, and check for each on a machine whether that works.

Importing this imports neither torch nor a TensorRT.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from twellc.base.errors import UserError
from twellc.plugins.library import (
    ATTENTION_NAMES,
    PLUGIN_NAMES,
    PLUGIN_NAMESPACE,
    PLUGIN_VERSION,
    attention_library_path,
    library_path,
    load,
    load_attention,
    rtx_shim_path,
)

# The Python modules of each TensorRT. The second is alone where NVIDIA's meta-package is not installed; the first
# imports the second.
MODULES = (
    ("tensorrt", "tensorrt_bindings"),
    ("tensorrt_lean", "tensorrt_lean_bindings"),
    ("tensorrt_dispatch", "tensorrt_dispatch_bindings"),
    ("tensorrt_rtx", "tensorrt_rtx_bindings"),
)
# Libraries that trtexec and Triton use; a machine without the modules may have these.
LIBRARIES = (
    *(f"libnvinfer{kind}.so.{major}" for major in (11, 10) for kind in ("", "_lean", "_dispatch")),
    "libtensorrt_rtx.so.1",
)

NEEDS_PLUGINS = "needs the TensorRT plugins in libtwell_plugins.so; `twellc plugins` says where it is"

CUDNN = "libcudnn.so.9"

_CHECK_SECONDS = 120


@dataclass(frozen=True)
class Registration:
    """The plugins in one TensorRT.

    Attributes:
        host: The Python module or library.
        version: Its version; empty if it could not be loaded.
        state: `registered`, `already registered`, or the reason of a failure.
        good: Whether it has the plugins.
    """

    host: str
    version: str
    state: str
    good: bool = True


def register(module: ModuleType | None = None) -> list[Registration]:
    """Register the plugins in TensorRT; does nothing where they are registered already.

    Where the library of the attention plugins was built, this loads cuDNN first, if this Python has it: the plugins use
    the cuDNN in the process.

    Args:
        module: A TensorRT, such as the module `tensorrt`. Without it, every TensorRT that is imported.

    Returns:
        One entry for each TensorRT.

    Raises:
        UserError: No TensorRT is imported, the library is missing or cannot be loaded, or TensorRT refuses the plugins.
    """
    modules = [module] if module is not None else imported_modules()
    if not modules:
        expected = " or ".join(names[0] for names in MODULES)
        raise UserError("twellc.plugins.register", "no TensorRT is imported", expected=expected, fix="Import it first.")
    return [_register_in(found) for found in modules]


def how_to_register(plan: str, module: str, names: list[str], others: list[str]) -> dict[str, str]:
    """Return how to register the plugins before a plan is opened, by kind of host, and TensorRT's message without them.

    Args:
        plan: File name of the plan.
        module: Name of the Python module of the TensorRT that opens it.
        names: The plugins of twellc that it needs.
        others: File names of other people's plugin libraries that it needs.
    """
    own = ["libtwell_plugins.so"] if names else []
    ours = [*own, *(["libtwell_attention.so"] if {*ATTENTION_NAMES} & {*names} else [])]
    libraries = [*ours, *others]
    # The libraries of twellc register their plugins themselves.
    opened = [", ".join(f'dlopen("{each}", RTLD_NOW)' for each in ours) + ", once TensorRT is loaded"] if ours else []
    loaded = [f'getPluginRegistry()->loadLibrary("{each}")' for each in others]
    quote = "'" if len(libraries) > 1 else ""  # a shell ends a command at a semicolon
    python = [f"import {module}, twellc.plugins", "twellc.plugins.register()"] if own else [f"import {module}"]
    python += [f"{module}.get_plugin_registry().load_library({each!r})" for each in others]
    known = {
        "missing": (
            f"TensorRT prints «Cannot find plugin: {PLUGIN_NAMES[0]}{PLUGIN_NAMESPACE}, version: {PLUGIN_VERSION}, "
            f"namespace:{PLUGIN_NAMESPACE}.», or {PLUGIN_NAMES[1]} instead, where they are not registered"
        ),
        "find": "twellc plugins",
    }
    return {
        **(known if own else {}),
        "python": "; ".join(python),
        "trtexec": f"trtexec {' '.join(f'--dynamicPlugins={each}' for each in libraries)} --loadEngine={plan}",
        "triton": f"tritonserver {quote}--backend-config=tensorrt,plugins={';'.join(libraries)}{quote}",
        "c++": "; ".join([*opened, *loaded]),
        **({} if others else {"any program": f"LD_PRELOAD={':'.join(ours)}"}),
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
        raise UserError("twellc.plugins.register", f"{name} is not a TensorRT: it has no plugin registry")
    registry = get_registry()
    if registry is None:
        raise UserError(f"{module.__name__} {version}", "has no plugin registry")
    host = f"{module.__name__} {version}"
    is_new = _add_library(registry, host, library_path(), PLUGIN_NAMES)
    load()  # fails for a library of another version
    attention = attention_library_path()
    if attention is not None:
        load_cudnn()
        is_new |= _add_library(registry, host, attention, ATTENTION_NAMES)
        load_attention()
    if module.__name__.startswith("tensorrt_rtx"):
        _load_rtx_shim()
    return Registration(module.__name__, version, "registered" if is_new else "already registered")


def _add_library(registry: Any, host: str, path: Path, names: tuple[str, ...]) -> bool:
    """Add the plugins of a library to a registry; return whether they were missing."""
    if _has_plugins(registry, names):
        return False
    # A result of None means nothing: it also comes where the plugins were registered in another way.
    registry.load_library(str(path))
    if not _has_plugins(registry, names):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            raise UserError(str(path), f"cannot load the plugin library ({error})") from error
    if not _has_plugins(registry, names):
        expected = "TensorRT 10, TensorRT 11, or TensorRT-RTX from 1.5 on"
        raise UserError(str(path), f"the plugins do not register in {host}", expected=expected)
    return True


def _has_plugins(registry: Any, names: tuple[str, ...]) -> bool:
    return all(registry.get_creator(name, PLUGIN_VERSION, PLUGIN_NAMESPACE) is not None for name in names)


def load_cudnn() -> None:
    """Load the cuDNN that is installed in this Python, such as torch's, unless another one is to be used.

    Nothing fails here without cuDNN; a plan with attention fails when it is opened.
    """
    if os.environ.get("TWELLC_CUDNN"):
        return
    try:
        ctypes.CDLL(CUDNN, os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        packages = importlib.util.find_spec("nvidia")
        folders = [] if packages is None else list(packages.submodule_search_locations or [])
        candidates = [Path(folder, name, "lib", CUDNN) for name in ("cudnn", "cudnn_jit") for folder in folders]
        for path in filter(Path.is_file, candidates):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(path))
                return


def _load_rtx_shim() -> None:
    """Load the shim that makes `libtensorrt_rtx.so` resolve to the loaded library.

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
    """Register in every installed TensorRT, each in a separate process, and return the results.

    `register` does this for a Python module. A library that the dynamic linker finds by its name gets the plugins as in
    trtexec and Triton: by opening the plugin library.
    """
    modules = [[name for name in names if importlib.util.find_spec(name) is not None] for names in MODULES]
    candidates = [names[0] for names in modules if names] + list(LIBRARIES)
    return [found for found in map(_check_apart, candidates) if found is not None]


def _check_apart(host: str) -> Registration | None:
    # The same module path as here, and not the working directory before it.
    code = "from twellc.plugins.registration import answer; answer()"
    command = [sys.executable, "-P", "-c", code, host]
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
        messages = done.stderr.strip().splitlines()
        last = f" ({messages[-1]})" if messages else ""
        return Registration(host, "", f"the process ended with {end}{last}", good=False)


def answer() -> None:
    """Register in the TensorRT that the command line names, print the result as JSON, and end the process.

    The answer goes to a copy of standard output: a TensorRT may write to the original.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as output:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        found = _check_one(sys.argv[1])
        output.write(json.dumps(found and asdict(found)) + "\n")
    # A lean TensorRT without a GPU may crash as it ends, though the answer is printed.
    os._exit(0)


def _check_one(host: str) -> Registration | None:
    """Register in one TensorRT, given the name of a module or library; None for a library that is not found."""
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
        libraries = {library_path(): "initLibTwellPlugins", attention_library_path(): "initLibTwellAttention"}
        good = all(_initialise(path, name) for path, name in libraries.items() if path is not None)
    except (UserError, OSError, AttributeError) as error:
        return Registration(host, version, str(error), good=False)
    return Registration(host, version, "registered" if good else "refuses the plugins", good)


def _initialise(path: Path, name: str) -> bool:
    """Open a plugin library and call its function that registers its plugins everywhere."""
    function: Any = getattr(ctypes.CDLL(str(path)), name)
    function.restype = ctypes.c_bool
    return bool(function(None, b""))
