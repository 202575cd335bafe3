"""What the built libraries export and need, read with readelf."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import twellc.plugins
from tests.conftest import ROOT
from twellc.plugins.library import attention_library_path, library_path

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf (binutils)")


# Functions of TensorRT that the library stands in front of, and the symbol of their version.
HOOKS = {"createInferBuilder_INTERNAL", "createInferRuntime_INTERNAL", "getPluginRegistry", "TWELL_HOOKS", "TWELL_1"}


def readelf(option: str, path: Path) -> str:
    return subprocess.run(["readelf", "-W", option, str(path)], capture_output=True, text=True, check=True).stdout


def dynamic(path: Path, tag: str) -> list[str]:
    return re.findall(rf"\({tag}\).*\[(.*)\]", readelf("-d", path))


def symbols(path: Path) -> tuple[set[str], set[str]]:
    """Return the defined and the undefined dynamic symbols, without versions."""
    defined: set[str] = set()
    undefined: set[str] = set()
    for line in readelf("--dyn-syms", path).splitlines():
        columns = line.split()
        if len(columns) >= 8 and columns[0].rstrip(":").isdigit():
            (undefined if columns[6] == "UND" else defined).add(columns[7].split("@")[0])
    return defined, undefined


def declared(*headers: Path) -> set[str]:
    """Return the functions that headers of the library declare as exported."""
    text = "".join(path.read_text() for path in headers)
    return set(re.findall(r"^TWELL_API [^;(]*?\b(twell_\w+)\(", text, flags=re.MULTILINE))


@pytest.fixture
def attention() -> Path:
    path = attention_library_path()
    if path is None:
        pytest.skip("the attention library was not built")
    return path


# What the wheel has; where twellc is not installed from one, the sources.
WHEEL = Path(twellc.plugins.__path__[0]) / "include" / "twell"
INCLUDE = WHEEL if WHEEL.exists() else ROOT / "plugins" / "include" / "twell"
ENTRIES = {"getCreators", "setLoggerFinder"}


def test_exports_are_the_plugin_entry_points_and_the_c_api() -> None:
    api = declared(*(INCLUDE / f"{name}.h" for name in ("twell", "twell_train", "twell_features", "twell_experts")))
    assert {"twell_mlp", "twell_train_forward", "twell_encode", "twell_linear"} <= api
    internal = declared(ROOT / "plugins" / "kernels" / "internal.h")  # of the source tree: no package has it
    assert all(name.startswith("twell_internal_") for name in internal)
    assert symbols(library_path())[0] - HOOKS == api | internal | ENTRIES | {"initLibTwellPlugins"}


def test_exports_of_the_attention_library(attention: Path) -> None:
    api = declared(INCLUDE / "attention.h")
    assert len(api) == 7
    versioned = set(re.findall(r" (\w+)@+TWELL_1", readelf("--dyn-syms", attention)))
    assert (versioned & symbols(attention)[0]) - {"TWELL_1"} == api | ENTRIES | {"initLibTwellAttention"}


def test_hooks_are_hidden_from_programs_that_link() -> None:
    # One @: the dynamic linker binds them, a program's linker and dlsym do not. See exports.map.
    versioned = set(re.findall(r" (\w+@+TWELL_HOOKS)", readelf("--dyn-syms", library_path())))
    assert versioned == {f"{name}@TWELL_HOOKS" for name in HOOKS if not name.startswith("TWELL")}


def test_libraries_need_neither_tensorrt_nor_cuda_and_name_no_folder_of_their_build() -> None:
    allowed = r"(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux-[\w-]+)\.so\.\d+"
    foreign = r"nvinfer|createInfer|getPluginRegistry|^cu[A-Z]|cuda|cudnn"
    for path in filter(None, (library_path(), attention_library_path())):
        assert [name for name in dynamic(path, "NEEDED") if not re.fullmatch(allowed, name)] == []
        assert [name for name in symbols(path)[1] if re.search(foreign, name)] == []
        assert dynamic(path, "RPATH") + dynamic(path, "RUNPATH") == []
    assert dynamic(library_path(), "SONAME") == ["libtwell_plugins.so"]


def test_shim_has_the_unversioned_name_and_only_needs_the_versioned_library() -> None:
    path = library_path().with_name("libtensorrt_rtx.so")
    assert dynamic(path, "SONAME") == ["libtensorrt_rtx.so"]
    assert dynamic(path, "RPATH") + dynamic(path, "RUNPATH") == []
    assert dynamic(path, "NEEDED") == ["libtensorrt_rtx.so.1"]
    assert symbols(path)[0] == set()
