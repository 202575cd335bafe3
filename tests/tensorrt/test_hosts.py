"""The host programs in examples/hosts run plans in real TensorRT."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import captured, environment
from tests.tensorrt.plans import compiled
from twellc import LLM, SamplingParams
from twellc.export.tensorrt_host import Host
from twellc.plugins.library import attention_library_path, library_path

pytestmark = pytest.mark.tensorrt

HOSTS = ROOT / "examples" / "hosts"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    variables = environment()
    return captured(command, env=variables)


@pytest.fixture(scope="module")
def plan(tensorrt: Host, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of one block, whose output for zeros is not zero."""
    return compiled(archive, tmp_path_factory.mktemp("hosts") / "gated.plan")


def core_library() -> Path:
    """Return TensorRT's own library, which its Python module has loaded into this process."""
    mapped = re.findall(r"/\S*/libnvinfer\.so\.\d+\S*", Path("/proc/self/maps").read_text())
    return Path(mapped[0])


def test_python_host(plan: Path, tensorrt: Host) -> None:
    done = run(sys.executable, "-P", HOSTS / "python" / "run_plan.py", plan, "--module", "tensorrt")
    assert done.returncode == 0, done.stdout + done.stderr
    first, output = done.stdout.splitlines()
    assert first == f"TwELL plugins: registered in tensorrt {tensorrt.version}"
    assert re.fullmatch(r"output \[\d+, 3, 16\]: mean -?[\d.e-]+", output)
    assert not output.endswith("mean 0")


def test_cpp_host(cpp_host: Path, plan: Path, tensorrt: Host) -> None:
    done = run(cpp_host, core_library(), library_path(), plan)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *tensors, last = done.stdout.splitlines()
    version = ".".join(tensorrt.version.split(".")[:3])
    assert first == f"TwELL plugins: registered in {core_library()}, version {version}"
    assert len(tensors) == 2 and all(re.fullmatch(r"\w+: [1-9]\d* bytes", tensor) for tensor in tensors)
    assert last == "done"


def test_cpp_host_refuses_what_is_no_plan(cpp_host: Path, tensorrt: Host, tmp_path: Path) -> None:
    plan = tmp_path / "broken.plan"
    plan.write_bytes(b"no plan")
    done = run(cpp_host, core_library(), library_path(), plan)
    assert done.returncode == 1
    assert done.stderr.endswith(f"{plan}: TensorRT refuses the plan\n")


def test_pycuda_host(plan: Path) -> None:
    if importlib.util.find_spec("pycuda") is None:
        pytest.skip("PyCUDA is not installed: pip install twellc[pycuda], which compiles it against a CUDA toolkit")
    done = run(sys.executable, "-P", HOSTS / "pycuda" / "run_plan.py", plan, "--module", "tensorrt")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "done"


# ---- a key-value cache ----


PROMPT = [0, *b"import os\n\n\ndef read_text(path):\n"]


@pytest.fixture(scope="module")
def answer(answering: Path, tensorrt: Host) -> list[int]:
    """What `LLM` answers to the prompt, in 64 tokens."""
    llm = LLM(answering)
    found = llm.generate([PROMPT], SamplingParams(max_tokens=64, ignore_eos=True))[0].outputs[0].token_ids
    assert llm.stats.graph
    return list(found)


def test_python_host_answers_as_llm_does(answering: Path, answer: list[int]) -> None:
    program, numbers = HOSTS / "python" / "generate.py", list(map(str, PROMPT))
    done = run(sys.executable, "-P", program, answering, *numbers, "--new", "64")
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.split())) == answer


def test_cpp_host_answers_as_llm_does(cpp_host: Path, answering: Path, answer: list[int]) -> None:
    libraries, numbers = f"{library_path()}:{attention_library_path()}", list(map(str, PROMPT))
    done = run(cpp_host.with_name("generate"), core_library(), libraries, answering, "64", *numbers)
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.splitlines()[-1].split())) == answer
    full = run(cpp_host.with_name("generate"), core_library(), libraries, answering, "230", *numbers)
    assert full.returncode == 1 and "do not fit into a cache of 256" in full.stderr
