"""No kernel may spill registers: what the built library's use, and what ptxas says of those that it does not hold."""

import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from twellc.plugins.elf import machine_code
from twellc.plugins.library import library_path

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
KERNELS = PLUGINS / "kernels"
# Those of TWELL_ALL_CUDA_ARCHS in plugins/cmake/TwellCuda.cmake, of which a library holds 90a by default.
GENERIC = ("80", "90a", "120")
# Sources, their architectures, and how many kernels they have at least.
SOURCES = {
    "experts/experts.cu": (GENERIC, 53),
    "experts/many.cu": (GENERIC, 24),
    "features/features.cu": (GENERIC, 3),
    "few_tokens/few.cu": (GENERIC, 6),
    "linear/linear.cu": (GENERIC, 24),
    "norm/norm.cu": (GENERIC, 2),
    "one_or_two_tokens/one_or_two.cu": (GENERIC, 3),
    "many_tokens/gate/gate.cu": (GENERIC, 8),
    "many_tokens/chunks/chunk.cu": (GENERIC, 2),
    "many_tokens/sparse/sparse.cu": (GENERIC, 6),
    "many_tokens/dense/dense_generic.cu": (GENERIC, 4),
    "many_tokens/schedule/schedule.cu": (GENERIC, 2),
    "many_tokens/gate/gate_sm90.cu": (("90a",), 24),
    "few_tokens/few_sm90.cu": (("90a",), 8),
    "experts/many_sm90.cu": (("90a",), 26),
    "matmul/dense_sm90.cu": (("90a",), 48),
    "matmul/dense_bytes_sm90.cu": (("90a",), 18),
    "dense_block/hidden_sm90.cu": (("90a",), 42),
    "dense_block/hidden_bytes_sm90.cu": (("90a",), 32),
    "dense_block/skipping_down_sm90.cu": (("90a",), 8),
    "many_tokens/chunks/hot_sm90.cu": (("90a",), 14),
}


def compile_kernels(
    nvcc: Path, source: Path, architecture: str, output: Path, ptxas: str = "-v,-warn-spills,-Werror"
) -> subprocess.CompletedProcess[str]:
    includes = [f"-I{PLUGINS / 'include'}", f"-I{KERNELS}"]
    command = [str(nvcc), "-std=c++17", "-O3", "-cubin", "-o", str(output), *includes]
    command += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}", f"-Xptxas={ptxas}"]
    return subprocess.run([*command, str(source)], check=False, capture_output=True, text=True)


@pytest.fixture(scope="session")
def cuobjdump() -> str | None:
    """An installed cuobjdump, or the one in Triton, which comes with torch."""
    triton = find_spec("triton")
    folders = [] if triton is None or triton.origin is None else [Path(triton.origin).parent / "backends/nvidia/bin"]
    return shutil.which("cuobjdump", path=os.pathsep.join([os.environ["PATH"], *map(str, folders)]))


def stack_bytes(cuobjdump: str, path: Path) -> dict[str, list[int]]:
    """Return by architecture how many bytes of stack each kernel and each device function uses: spills lie there.

    A cubin has one architecture, which is not named: "".
    """
    done = subprocess.run([cuobjdump, "-res-usage", str(path)], check=True, capture_output=True, text=True)
    parts = re.split(r"^arch = sm_(\w+)$", done.stdout, flags=re.MULTILINE)
    found: dict[str, list[int]] = {}
    for architecture, part in zip(["", *parts[1::2]], parts[::2], strict=True):
        if used := re.findall(r"\bSTACK:(\d+)", part):
            found.setdefault(architecture, []).extend(map(int, used))
    return found


@pytest.fixture(scope="session")
def built(cuobjdump: str | None) -> dict[str, list[int]]:
    """What the built library's kernels use, by architecture; nothing if sources were changed since."""
    library = library_path()
    sources = [path for name in ("include", "kernels", "cmake") for path in (PLUGINS / name).rglob("*")]
    if cuobjdump is None or any(path.stat().st_mtime > library.stat().st_mtime for path in sources if path.is_file()):
        return {}
    return stack_bytes(cuobjdump, library)


def test_no_spills_in_the_library(built: dict[str, list[int]]) -> None:
    if not built:
        pytest.skip("there is no cuobjdump, or no library of these sources: they are compiled instead")
    for architecture, used in built.items():
        sources = [count for each, count in SOURCES.values() if each is GENERIC or architecture in each]
        assert len(used) >= sum(sources) and not any(used), architecture


def test_machine_code_of_the_library(cuobjdump: str | None) -> None:
    if cuobjdump is None:
        pytest.skip("no cuobjdump")
    listed = subprocess.run([cuobjdump, "-lelf", str(library_path())], check=True, capture_output=True, text=True)
    found = {divmod(int(each), 10) for each in re.findall(r"\.sm_(\d+)", listed.stdout)}
    assert machine_code(library_path()) == found != set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "architecture"),
    [(source, each) for source, (architectures, _) in SOURCES.items() for each in architectures],
)
def test_no_spills(source: str, architecture: str, built: dict[str, list[int]], nvcc: Path, tmp_path: Path) -> None:
    if architecture in built:
        pytest.skip("the library holds this code, and was looked at")
    result = compile_kernels(nvcc, KERNELS / source, architecture, tmp_path / "kernels.cubin")
    assert result.returncode == 0, result.stderr
    kernels = result.stderr.count("Compiling entry function")
    assert kernels >= SOURCES[source][1]
    functions = result.stderr.count("bytes spill stores")  # kernels, and device functions that were not inlined
    assert functions >= kernels
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == functions


@pytest.mark.slow
def test_spills_are_noticed(nvcc: Path, cuobjdump: str | None, tmp_path: Path) -> None:
    source = tmp_path / "spills.cu"
    source.write_text(
        """
        __global__ void __launch_bounds__(1024, 2) sums(float const* in, float* out) {
            float values[100] = {};
            for (int i = 0; i < 1000; ++i)
        #pragma unroll
                for (int j = 0; j < 100; ++j) values[j] = values[j] * values[(j * 7 + 3) % 100] + in[i * 100 + j];
        #pragma unroll
            for (int j = 0; j < 100; ++j) out[threadIdx.x * 100 + j] = values[j];
        }
        """
    )
    cubin = tmp_path / "kernels.cubin"
    result = compile_kernels(nvcc, source, "90a", cubin)
    assert result.returncode != 0
    assert "spilled" in result.stderr
    if cuobjdump is not None:
        compile_kernels(nvcc, source, "90a", cubin, "-v")
        assert stack_bytes(cuobjdump, cubin)[""][0] > 0
