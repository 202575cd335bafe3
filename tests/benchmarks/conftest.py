"""The benchmarks as modules: they are scripts, and import each other from their folder."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="session")
def benchmark_module() -> Callable[[str], Any]:
    def load(name: str) -> Any:
        folder = str(ROOT / "benchmarks")
        sys.path.insert(0, folder)
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(folder)

    return load


def _script(name: str) -> Any:
    @pytest.fixture(scope="session", name=name)
    def script(benchmark_module: Callable[[str], Any]) -> Any:
        return benchmark_module(name)

    return script


block, dense_rivals, draw, engine = map(_script, ("block", "dense_rivals", "draw", "engine"))
harness, layers = map(_script, ("harness", "layers"))
train_proof, trained, when_it_pays = map(_script, ("train_proof", "trained", "when_it_pays"))
