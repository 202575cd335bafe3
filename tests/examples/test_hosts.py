"""The host programs in examples/hosts, each as far as this machine lets it run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.processes import environment
from twellc.plugins.library import attention_library_path, library_path

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ROOT / "examples" / "hosts"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=300)


# ---- Python ----


def test_python_host_registers_and_says_why_it_cannot_open_a_plan(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    plan = tmp_path / "broken.plan"
    plan.write_bytes(b"no plan")
    done = run(sys.executable, HOSTS / "python" / "run_plan.py", plan, "--module", trt.__name__)
    assert done.stdout == f"TwELL plugins: registered in tensorrt_rtx_bindings {trt.__version__}\n"
    assert done.returncode == 1
    # Without a GPU it is CUDA that is missing; with one, the plan is not what it should be.
    start = f"{plan}: tensorrt_rtx_bindings {trt.__version__} cannot open the plan: "
    assert done.stderr.startswith(start)
    assert len(done.stderr) > len(start) + 10
    assert "no reason" not in done.stderr
    assert "Traceback" not in done.stderr


def test_python_host_without_its_tensorrt(tmp_path: Path) -> None:
    done = run(sys.executable, HOSTS / "python" / "run_plan.py", tmp_path / "x.plan", "--module", "tensorrt_of_nobody")
    assert (done.returncode, done.stderr) == (1, "No module named 'tensorrt_of_nobody'\n")


def test_python_host_that_generates(tmp_path: Path) -> None:
    """As far as it gets without a GPU: to the plan, which it cannot open."""
    plan = tmp_path / "broken.plan"
    plan.write_bytes(b"no plan")
    program = HOSTS / "python" / "generate.py"
    done = run(sys.executable, program, plan, "1", "2", "--module", "tensorrt-rtx")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"{plan}: the plan cannot be opened (") or "tensorrt-rtx" in done.stderr
    assert run(sys.executable, program, plan).returncode == 2


# ---- C++, which is compiled ----


PROGRAMS: dict[str, tuple[str, ...]] = {"run_plan": (), "generate": ("3", "1", "2")}


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "version"), [("rtx", "1.7.1"), ("lean10", "10.16.1"), ("lean11", "11.4.0")])
@pytest.mark.parametrize("program", PROGRAMS)
def test_cpp_host_registers_and_says_why_it_stops(
    cpp_host: Path, lean_folder: Callable[[str], Path], tmp_path: Path, program: str, runtime: str, version: str
) -> None:
    if runtime == "rtx":
        core = Path(pytest.importorskip("tensorrt_rtx_libs").__file__).with_name("libtensorrt_rtx.so.1")
    else:
        core = lean_folder(runtime) / "tensorrt_lean_libs" / f"libnvinfer_lean.so.{runtime.removeprefix('lean')}"
    plan = tmp_path / "broken.plan"
    plan.write_bytes(b"no plan")
    done = run(cpp_host.with_name(program), core, library_path(), plan, *PROGRAMS[program])
    assert done.stdout == f"TwELL plugins: registered in {core}, version {version}\n"
    assert done.returncode == 1
    # The headers are those of TensorRT 10, so with another the program must stop before it uses them.
    if runtime != "lean10":
        expected = f"this program was compiled with the headers of TensorRT 10; compile it with those of {core}\n"
        assert done.stderr == expected
    elif not torch.cuda.is_available():
        assert done.stderr.startswith("no usable GPU: ")
    else:
        assert done.stderr.endswith(f"{plan}: TensorRT refuses the plan\n")


@pytest.mark.slow
def test_cpp_host_registers_all_libraries_that_a_plan_needs(cpp_host: Path, tmp_path: Path) -> None:
    """A plan with a key-value cache needs two; whatever a library is, it is asked."""
    core = Path(pytest.importorskip("tensorrt_rtx_libs").__file__).with_name("libtensorrt_rtx.so.1")
    attention = attention_library_path()
    if attention is None:
        pytest.skip("no libtwell_attention.so was built")
    for libraries in (f"{library_path()}:{attention}", f"{attention}"):
        done = run(cpp_host.with_name("generate"), core, libraries, tmp_path / "x.plan", *PROGRAMS["generate"])
        assert done.stdout == f"TwELL plugins: registered in {core}, version 1.7.1\n"
    done = run(cpp_host, core, f"{library_path()}:{tmp_path / 'libnothing.so'}", tmp_path / "x.plan")
    assert done.returncode == 1 and "libnothing.so: cannot open shared object file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_cpp_host_needs_three_files(cpp_host: Path, tmp_path: Path, program: str) -> None:
    built, others = cpp_host.with_name(program), PROGRAMS[program]
    assert run(built).returncode == 2
    done = run(built, tmp_path / "libnvinfer.so.10", library_path(), tmp_path / "x.plan", *others)
    assert done.returncode == 1
    assert "libnvinfer.so.10: cannot open shared object file" in done.stderr


# ---- PyCUDA ----


@pytest.mark.gpu
def test_pycuda_calls_the_kernels() -> None:
    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("PyCUDA is not installed: pip install twellc[pycuda], which compiles it against a CUDA toolkit")
    done = run(sys.executable, HOSTS / "pycuda" / "call_kernels.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the neurons fire; relative error" in done.stdout
