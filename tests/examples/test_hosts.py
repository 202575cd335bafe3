"""The host programs in examples/hosts, each as far as this machine lets it run."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.processes import captured
from tests.runtimes import cpp_host, lean_folder
from twellc.plugins.library import attention_library_path, library_path

__all__ = ["cpp_host", "lean_folder"]

HOSTS = ROOT / "examples" / "hosts"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A file that is not a plan: a host gets as far as opening it."""
    path = tmp_path / "broken.plan"
    path.write_bytes(b"no plan")
    return path


def test_python_host_registers_and_says_why_it_cannot_open_a_plan(plan: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    done = captured([sys.executable, HOSTS / "python" / "run_plan.py", plan, "--module", trt.__name__])
    assert done.stdout == f"TwELL plugins: registered in tensorrt_rtx_bindings {trt.__version__}\n"
    # Without a GPU it is CUDA that is missing; with one, the plan is not what it should be.
    start = f"{plan}: tensorrt_rtx_bindings {trt.__version__} cannot open the plan: "
    assert done.returncode == 1 and done.stderr.startswith(start) and len(done.stderr) > len(start) + 10
    assert "no reason" not in done.stderr and "Traceback" not in done.stderr


def test_python_host_without_its_tensorrt(plan: Path) -> None:
    done = captured([sys.executable, HOSTS / "python" / "run_plan.py", plan, "--module", "tensorrt_of_nobody"])
    assert (done.returncode, done.stderr) == (1, "No module named 'tensorrt_of_nobody'\n")


def test_python_host_that_generates(plan: Path) -> None:
    program = HOSTS / "python" / "generate.py"
    done = captured([sys.executable, program, plan, "1", "2", "--module", "tensorrt-rtx"])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"{plan}: the plan cannot be opened (") or "tensorrt-rtx" in done.stderr
    assert captured([sys.executable, program, plan]).returncode == 2


PROGRAMS: dict[str, tuple[str, ...]] = {"run_plan": (), "generate": ("3", "1", "2")}
RUNTIMES = {"rtx": "1.7.1", "lean10": "10.16.1", "lean11": "11.4.0"}


@pytest.fixture
def core(lean_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    def find(runtime: str) -> Path:
        if runtime == "rtx":
            return Path(pytest.importorskip("tensorrt_rtx_libs").__file__).with_name("libtensorrt_rtx.so.1")
        return lean_folder(runtime) / "tensorrt_lean_libs" / f"libnvinfer_lean.so.{runtime.removeprefix('lean')}"

    return find


@pytest.mark.slow
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_cpp_host_registers_and_says_why_it_stops(
    cpp_host: Path, core: Callable[[str], Path], plan: Path, program: str, runtime: str
) -> None:
    library = core(runtime)
    done = captured([cpp_host.with_name(program), library, library_path(), plan, *PROGRAMS[program]])
    assert done.stdout == f"TwELL plugins: registered in {library}, version {RUNTIMES[runtime]}\n"
    assert done.returncode == 1
    # The headers are those of TensorRT 10, so with another the program must stop before it uses them.
    if runtime != "lean10":
        expected = f"this program was compiled with the headers of TensorRT 10; compile it with those of {library}\n"
        assert done.stderr == expected
    elif not torch.cuda.is_available():
        assert done.stderr.startswith("no usable GPU: ")
    else:
        assert done.stderr.endswith(f"{plan}: TensorRT refuses the plan\n")


@pytest.mark.slow
def test_cpp_host_registers_all_libraries_that_a_plan_needs(
    cpp_host: Path, core: Callable[[str], Path], plan: Path
) -> None:
    """A plan with a key-value cache needs two; the host asks each library in turn."""
    attention = attention_library_path()
    if attention is None:
        pytest.skip("no libtwell_attention.so was built")
    for libraries in (f"{library_path()}:{attention}", f"{attention}"):
        done = captured([cpp_host.with_name("generate"), core("rtx"), libraries, plan, *PROGRAMS["generate"]])
        assert done.stdout == f"TwELL plugins: registered in {core('rtx')}, version 1.7.1\n"
    done = captured([cpp_host, core("rtx"), f"{library_path()}:{plan.with_name('libnothing.so')}", plan])
    assert done.returncode == 1 and "libnothing.so: cannot open shared object file" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_cpp_host_needs_three_files(cpp_host: Path, plan: Path, program: str) -> None:
    built = cpp_host.with_name(program)
    assert captured([built]).returncode == 2
    done = captured([built, plan.with_name("libnvinfer.so.10"), library_path(), plan, *PROGRAMS[program]])
    assert done.returncode == 1 and "libnvinfer.so.10: cannot open shared object file" in done.stderr


@pytest.mark.gpu
def test_pycuda_calls_the_kernels() -> None:
    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("PyCUDA is not installed: pip install twellc[pycuda], which compiles it against a CUDA toolkit")
    done = captured([sys.executable, HOSTS / "pycuda" / "call_kernels.py"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of the neurons fire; relative error" in done.stdout
