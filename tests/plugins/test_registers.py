"""No kernel may spill registers: ptxas compiles every one with spills as errors."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "plugins" / "kernels"
# As TWELL_CUDA_ARCHS in plugins/cmake/TwellCuda.cmake.
GENERIC = ("80", "90a", "120")


def compile_kernels(nvcc: Path, source: Path, architecture: str, output: Path) -> subprocess.CompletedProcess[str]:
    includes = [f"-I{KERNELS.parent / 'include'}", f"-I{KERNELS}"]
    command = [str(nvcc), "-std=c++17", "-O3", "-cubin", "-o", str(output), *includes]
    command += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}", "-Xptxas=-v,-warn-spills,-Werror"]
    return subprocess.run([*command, str(source)], check=False, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "architecture", "fewest"),
    [
        *itertools.product(("few_tokens/few.cu",), GENERIC, (6,)),
        *itertools.product(("one_or_two_tokens/one_or_two.cu",), GENERIC, (3,)),
        *itertools.product(("many_tokens/gate.cu", "many_tokens/up_down.cu"), GENERIC, (8,)),
        *itertools.product(("many_tokens/dense_generic.cu",), GENERIC, (4,)),
        *itertools.product(("many_tokens/schedule.cu",), GENERIC, (2,)),
        ("many_tokens/gate_sm90.cu", "90a", 24),
        ("few_tokens/few_sm90.cu", "90a", 8),
        ("many_tokens/dense_sm90.cu", "90a", 48),
        ("dense_block/hidden_sm90.cu", "90a", 42),
        ("many_tokens/chunks/hot_sm90.cu", "90a", 14),
    ],
)
def test_no_spills(source: str, architecture: str, fewest: int, nvcc: Path, tmp_path: Path) -> None:
    result = compile_kernels(nvcc, KERNELS / source, architecture, tmp_path / "kernels.cubin")
    assert result.returncode == 0, result.stderr
    kernels = result.stderr.count("Compiling entry function")
    assert kernels >= fewest
    functions = result.stderr.count("bytes spill stores")  # kernels, and device functions that were not inlined
    assert functions >= kernels
    assert result.stderr.count(" 0 bytes spill stores, 0 bytes spill loads") == functions


def test_spills_are_noticed(nvcc: Path, tmp_path: Path) -> None:
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
    result = compile_kernels(nvcc, source, "90a", tmp_path / "kernels.cubin")
    assert result.returncode != 0
    assert "spilled" in result.stderr
