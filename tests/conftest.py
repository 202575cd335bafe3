"""Fixtures for every test folder; models that are slow to make are made once a session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is there. Tensors of tests are small, and tests run in a process for each core: more threads would only
# spin while they wait for each other. What tests start inherits this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import click.testing
import pytest
import torch

from tests import models
from tests.quick_torch import make_quick
from twellc.base.files import ENDING_SIGNALS
from twellc.options.source import TracingOptions

ROOT = Path(__file__).resolve().parents[1]
# Models, each as loaded and as functionalised.
MOST_REMEMBERED = 16


make_quick()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU; fail them where TWELLC_REQUIRE_GPU=1 says that there must be one."""
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("TWELLC_REQUIRE_GPU") == "1":
        pytest.fail("TWELLC_REQUIRE_GPU=1, but torch sees no GPU")
    pytest.skip("torch sees no GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Give signals their handlers back: a command ignores those that would end it once its outputs are there."""
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def bytelm() -> Path:
    """The trained example model."""
    return ROOT / "examples" / "bytelm"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ReLU Llama in bfloat16: gated blocks."""
    return models.save(models.llama(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny OPT in float32: blocks without a gate, with biases."""
    return models.save(models.opt(), tmp_path_factory.mktemp("models") / "opt", torch.float32)


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 in float32: an encoder and a decoder."""
    return models.save(models.t5(), tmp_path_factory.mktemp("models") / "t5", torch.float32)


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ReLU Llama in float32 with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "talker"
    model = models.llama(vocab_size=models.VOCABULARY, max_position_embeddings=256, bos_token_id=None, eos_token_id=0)
    models.save(model, folder, torch.float32)
    models.make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A torch.export archive of one gated block in bfloat16 between two additions, with a dynamic batch."""
    path = tmp_path_factory.mktemp("models") / "gated.pt2"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        block = models.Gated(biases="gud", d_ff=320).to(torch.bfloat16)
        example = torch.randn(models.BATCH, models.SEQUENCE, models.D_MODEL).to(torch.bfloat16)
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.export.save(models.export(models.Residual(block), example, dynamic=({0: batch},)), path)
    return path


Cli = Callable[..., click.testing.Result]


@pytest.fixture(scope="session")
def load_once() -> Callable[..., Any]:
    """Return `load_model` with a memory: nothing changes a loaded model, since every pass works on a copy."""
    from twellc.loaders.model import load_model

    loaded: dict[Any, Any] = {}

    def load(source: TracingOptions, sizes: Any = (), cached: bool = False) -> Any:
        path = source.model
        traced_by = (source.trust_model, source.inputs, source.padding, source.logits, sizes, cached)
        files = sorted(path.glob("*")) if path.is_dir() else [path] if path.is_file() else []
        key = (path, *((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files), *traced_by)
        return _remembered(loaded, key, lambda: load_model(source, sizes, cached))

    return load


@pytest.fixture(scope="session")
def functional_once() -> tuple[Any, ...]:
    """Return the steps of the stage FUNCTIONAL with a memory: they take as long as tracing."""
    from twellc.passes.pipeline import STEPS, Stage

    return tuple(replace(step, run=_once(step.run)) for step in STEPS[Stage.FUNCTIONAL])


def _once(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step with a memory; it must not depend on the options."""
    known: dict[Any, Any] = {}

    def once(passed: Any, options: Any) -> Any:
        # With what was given, so that no other program gets its id.
        _, found = _remembered(known, id(passed.program), lambda: (passed, run(passed, options)))
        return found

    return once


def _remembered(memory: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    """Return what the memory holds, which is made if it is not there; the oldest is forgotten."""
    found = memory.pop(key, None) or make()
    memory[key] = found
    if len(memory) > MOST_REMEMBERED:
        del memory[next(iter(memory))]
    return found


@pytest.fixture
def remembered_models(
    load_once: Callable[..., Any], functional_once: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load and trace each model once, for all tests with this fixture."""
    for module in (
        "benchmarking.bench",
        "checks.checking",
        "inspection.models",
        "firing.run",
        "compiling.translate_torch",
    ):
        monkeypatch.setattr(f"twellc.{module}.load_model", load_once)
    from twellc.passes.pipeline import STEPS, Stage

    monkeypatch.setitem(STEPS, Stage.FUNCTIONAL, functional_once)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return a function that runs the command line in this process, and what it would do in others, too."""
    from twellc.cli import main

    def run_here(function: Callable[..., Any], *arguments: Any, progress: Callable[[str], None]) -> Any:
        return function(*arguments, progress)

    monkeypatch.setattr("twellc.compiling.compiler.run_isolated", run_here)

    def run(*arguments: object) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(main, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
