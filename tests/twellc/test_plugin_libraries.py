"""`--plugin-library`: graphs with nodes of other people's plugins, in the real parser and builder of TensorRT-RTX."""

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import helper

import twellc
from tests.conftest import ROOT, Cli
from tests.onnx_graphs import gated
from tests.processes import TWELLC, captured
from tests.runtimes import install
from twellc.compiling.manifest import read_manifest
from twellc.plugins.elf import expected_size

SOURCE = ROOT / "tests" / "plugins" / "other_plugin.cpp"
Compile = Callable[[Path, Path], Path]
# All that TensorRT's headers want of CUDA's.
CUDA = "#pragma once\ntypedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"


@pytest.fixture(scope="module")
def compile_library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Return a function that compiles C++ against the TensorRT headers that a build uses."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile a plugin library")
    if root := os.environ.get("TENSORRT_ROOT"):
        headers = Path(root) / "include"
    else:
        found = re.search(r"kernel-lens==[\d.]+", (ROOT / "plugins" / "cmake" / "TwellTensorRT.cmake").read_text())
        assert found is not None
        headers = install(request, found[0], found[0]) / "kernel_lens" / "include" / "tensorrt"
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda_runtime_api.h").write_text(CUDA)

    def compiled(source: Path, library: Path) -> Path:
        flags = ["-std=c++17", "-shared", "-fPIC", "-w", f"-I{folder}", f"-I{headers}"]
        subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
        return library

    return compiled


@pytest.fixture(scope="module")
def library(compile_library: Compile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(SOURCE, tmp_path_factory.mktemp("others") / "libother.so")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated block in bfloat16, and OtherCopy behind it."""
    made = gated("bf16")
    (y,) = made.graph.output
    node = helper.make_node(
        "OtherCopy", [y.name], ["copied"], domain="others", plugin_version="1", plugin_namespace="others"
    )
    made.graph.node.append(node)
    y.name = "copied"
    made.opset_import.append(helper.make_opsetid("others", 1))
    path = tmp_path_factory.mktemp("models") / "m.onnx"
    onnx.save(made, path)
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return captured([*TWELLC, *arguments])


def test_a_graph_with_a_plugin_of_others(model: Path, library: Path, tmp_path: Path, cli: Cli) -> None:
    plan = tmp_path / "m.plan"
    done = run("compile", model, "-o", plan, "--backend", "tensorrt-rtx", "--plugin-library", library)
    assert done.returncode == 0, done.stderr
    plugins = json.loads((tmp_path / "m.plan.json").read_text())["plugins"]
    sha256 = hashlib.sha256(library.read_bytes()).hexdigest()
    assert plugins["libraries"] == [{"names": ["OtherCopy"], "file": "libother.so", "sha256": sha256}]
    assert plugins["names"] == ["TwellGatedMlp"]
    assert "plugins=libtwell_plugins.so;libother.so" in plugins["register"]["triton"]
    assert len(read_manifest(plan).plan.plugin_layers) == 2
    shown = cli("inspect", plan)
    assert f"libother.so: plugins OtherCopy; sha256 {sha256}" in shown.stdout
    assert b"needs the TensorRT plugins in libother.so" in plan.read_bytes()
    refused = cli("check", model, plan)
    assert refused.exit_code == 2
    assert "holds plugins of other people" in refused.stderr and "OtherCopy (libother.so)" in refused.stderr


def test_without_its_library(model: Path, tmp_path: Path) -> None:
    done = run("compile", model, "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx")
    assert done.returncode == 2
    assert "OtherCopy" in done.stderr and "--plugin-library" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_api(model: Path, library: Path, tmp_path: Path) -> None:
    manifest = twellc.compile(model, tmp_path / "m.plan", backend="tensorrt-rtx", plugin_libraries=[str(library)])
    assert [each.names for each in manifest.plugins.libraries or ()] == [["OtherCopy"]]


@pytest.mark.slow
def test_what_is_no_plugin_library(model: Path, library: Path, compile_library: Compile, tmp_path: Path) -> None:
    """Each is one message, and nothing is written."""
    (tmp_path / "text.so").write_text("no library")
    whole = library.read_bytes()
    (tmp_path / "cut.so").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.cpp").write_text("int nothing;")
    creators = 'extern "C" void* const* getCreators(int& count) { count = 0; return nullptr; }'
    (tmp_path / "none.cpp").write_text(f'{creators} extern "C" void setLoggerFinder(void*) {{}}')
    (tmp_path / "missing.cpp").write_text('extern "C" void nobody(); extern "C" void call() { nobody(); }')
    for name in ("empty", "none", "missing"):
        compile_library(tmp_path / f"{name}.cpp", tmp_path / f"{name}.so")
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-Wl,-z,now", "-o", tmp_path / "missing.so", tmp_path / "missing.cpp"], check=True
    )
    before = set(tmp_path.iterdir())
    for name, message in {
        "gone.so": "gone.so: there is no such file; expected a shared library with TensorRT plugins",
        "text.so": "text.so: is not a shared library",
        "cut.so": f"cut.so: is cut off; got {len(whole) // 2} bytes; expected {expected_size(library)} bytes",
        "empty.so": "empty.so: is not a library of TensorRT plugins: it has no function getCreators",
        "none.so": "none.so: brings no plugin that tensorrt_rtx",
        "missing.so": "missing.so: cannot be loaded",
    }.items():
        arguments = ["-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx", "--plugin-library", tmp_path / name]
        done = run("compile", model, *arguments)
        assert done.returncode == 2, (name, done.stderr)
        assert f"Error: --plugin-library {tmp_path / message}" in done.stderr
        assert "Traceback" not in done.stderr
    assert set(tmp_path.iterdir()) == before


def test_options_that_do_not_fit(model: Path, library: Path, tmp_path: Path, cli: Cli) -> None:
    twice = cli("compile", model, "-o", tmp_path / "m.plan", *["--plugin-library", library] * 2)
    assert twice.exit_code == 2 and "is given twice" in twice.stderr
    none = cli("compile", model, "-o", tmp_path / "m.onnx", "--backend", "none", "--plugin-library", library)
    assert none.exit_code == 2 and "--plugin-library: no plan is built" in none.stderr
    over = cli("compile", model, "-o", library, "--overwrite", "--plugin-library", library)
    assert over.exit_code == 2 and "belongs to the model" in over.stderr
