"""Walk through a list of steps in a separate process and report on each; run by test_registration.py.

    python registration_child.py STEP... > report.json

Steps: `import NAME` (rtx, or lean10 and lean11 with their folders in $LEAN10 and $LEAN11), `open` (dlopen of the plugin
library), `open-global`, `close`, `load NAME` (IPluginRegistry::loadLibrary), `load-local` (into a registry of
TensorRT-RTX's builder), `init NAMESPACE`, `use NAME` (get_plugin_registry), `build` (a builder of TensorRT-RTX), `show`
(who has the plugins) and `log` (what the logger of TensorRT-RTX gets when a plugin refuses its fields).
"""

import _ctypes
import ctypes
import importlib
import json
import os
import sys
from typing import Any

from twellc.plugins.library import PLUGIN_NAMES, PLUGIN_NAMESPACE, PLUGIN_VERSION, library_path

modules: dict[str, Any] = {}
CORES = {"rtx": "libtensorrt_rtx.so.1", "lean10": "libnvinfer_lean.so.10", "lean11": "libnvinfer_lean.so.11"}
library: ctypes.CDLL | None = None
builder: Any = None
messages: list[str] = []


def import_tensorrt(name: str) -> None:
    if name == "rtx":
        modules[name] = importlib.import_module("tensorrt_rtx_bindings")
        return
    sys.path.insert(0, os.environ[name.upper()])
    modules[name] = importlib.import_module("tensorrt_lean_bindings")
    sys.path.pop(0)
    for loaded in [each for each in sys.modules if each.startswith("tensorrt_lean")]:
        del sys.modules[loaded]  # the other lean runtime has the same name


def call_registry(name: str, slots: tuple[int, int], result: Any, *texts: str) -> Any:
    """Call a function of the registry by its slot in TensorRT 10, or in 11.

    Not through Python: modules of several TensorRTs in one process share their types, and with them the wrong slots.
    """
    core = ctypes.CDLL(CORES[name], os.RTLD_NOLOAD | os.RTLD_LAZY)
    core.getPluginRegistry.restype = ctypes.c_void_p
    registry = ctypes.c_void_p(core.getPluginRegistry())
    table = ctypes.cast(registry, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))).contents
    signature = ctypes.CFUNCTYPE(result, ctypes.c_void_p, *[ctypes.c_char_p] * len(texts))
    return signature(table[slots[0 if name == "lean10" else 1]])(registry, *(text.encode() for text in texts))


def make_builder() -> Any:
    trt = modules["rtx"]

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, text: str) -> None:
            messages.append(text)

    return trt.Builder(Logger())


def take(step: str) -> Any:
    global library, builder
    verb, _, argument = step.partition(" ")
    path = str(library_path())
    match verb:
        case "import":
            import_tensorrt(argument)
        case "open":
            library = ctypes.CDLL(path)
        case "open-global":
            library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        case "close":
            assert library is not None
            _ctypes.dlclose(library._handle)
        case "load":
            return call_registry(argument, (10, 6), ctypes.c_void_p, path) is not None
        case "use":
            modules[argument].get_plugin_registry()
        case "build":
            builder = make_builder()
        case "load-local":
            builder = builder or make_builder()
            return builder.get_plugin_registry().load_library(path) is not None
        case "init":
            assert library is not None
            library.initLibTwellPlugins.restype = ctypes.c_bool
            return library.initLibTwellPlugins(None, argument.encode())
        case "show":
            identity = (PLUGIN_VERSION, PLUGIN_NAMESPACE)
            return [
                name
                for name in modules
                if all(call_registry(name, (14, 10), ctypes.c_void_p, each, *identity) for each in PLUGIN_NAMES)
            ]
        case "log":
            builder = builder or make_builder()
            messages.clear()
            trt = modules["rtx"]
            creator = trt.get_plugin_registry().get_creator("TwellMlp", PLUGIN_VERSION, PLUGIN_NAMESPACE)
            creator.create_plugin("layer0", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)
            return list(messages)
        case _:
            raise ValueError(step)
    return None


if __name__ == "__main__":
    report = [take(step) for step in sys.argv[1:]]
    sys.stdout.write(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)
