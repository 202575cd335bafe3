"""Fixtures for every test folder; models that are slow to make are made once a session."""

import gc
import importlib.util
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch is there. Tensors of tests are small, and tests run in a process for each core: more threads would only
# spin while they wait for each other. What tests start inherits this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import click.testing
import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import models
from tests.quick_torch import make_quick
from twellc.base.files import ENDING_SIGNALS
from twellc.base.torch_private import FakeTensorMode
from twellc.export.tensorrt_host import python_module
from twellc.options.source import CacheOptions, TracingOptions

ROOT = Path(__file__).resolve().parents[1]
# Models, each as loaded and as functionalised.
MOST_REMEMBERED = 16
# Seconds of a test that runs by default.
LONGEST_QUICK = 10


make_quick()


def _missing() -> dict[str, str]:
    """Return the markers of tests that cannot run here, each with the reason."""
    has_sae_lens = importlib.util.find_spec("sae_lens") or "TWELLC_SAE_LENS_PYTHON" in os.environ
    reasons = {
        "gpu": "" if torch.cuda.is_available() else "torch sees no GPU",
        "tensorrt": "" if python_module("tensorrt") and torch.cuda.is_available() else "no full TensorRT, or no GPU",
        "vllm": "" if importlib.util.find_spec("vllm") else "vLLM is not installed",
        "sae_lens": "" if has_sae_lens else "neither here nor in TWELLC_SAE_LENS_PYTHON is sae-lens installed",
    }
    return {marker: reason for marker, reason in reasons.items() if reason}


def pytest_report_header() -> list[str]:
    return [f"tests marked {marker} are left out: {reason}" for marker, reason in _missing().items()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, unless TWELLC_REQUIRE_<MARKER>=1; mark what a sample leaves out as slow."""
    missing = [marker for marker in _missing() if os.environ.get(f"TWELLC_REQUIRE_{marker.upper()}") != "1"]
    left_out = {item for item in items if any(item.get_closest_marker(marker) for marker in missing)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    matrices: dict[tuple[Any, ...], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            matrices.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in matrices.values():
        for case in _not_sampled(cases):
            case.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let collections of garbage pass over all that is imported: each took seconds, and every Trainer asks for some."""
    gc.collect()
    gc.freeze()


def _not_sampled(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return what the marker `sampled(count)` leaves out: it takes values of each parameter as evenly as it can."""
    marker = cases[0].get_closest_marker("sampled")
    assert marker is not None
    (count,) = marker.args
    left = random.Random(0).sample(cases, len(cases))
    taken: Counter[tuple[str, int]] = Counter()
    for _ in range(min(count, len(cases))):
        case = min(left, key=lambda case: sum(taken[value] for value in case.callspec.indices.items()))
        taken.update(case.callspec.indices.items())
        left.remove(case)
    return left


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Fail a test of more than ten seconds without the marker `slow`, if TWELLC_REQUIRE_QUICK=1."""
    outcome = yield
    report = outcome.get_result()
    quick = os.environ.get("TWELLC_REQUIRE_QUICK") == "1" and item.get_closest_marker("slow") is None
    if quick and report.passed and call.duration > LONGEST_QUICK:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {call.duration:.1f} s in {call.when}, without the marker slow"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail what cannot run here though an environment variable says that it must."""
    for marker, reason in _missing().items():
        if item.get_closest_marker(marker) is not None:
            pytest.fail(f"TWELLC_REQUIRE_{marker.upper()}=1, but {reason}")


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


@pytest.fixture(autouse=True, scope="module")
def _results_on_shapes() -> Iterator[None]:
    """Forget what torch remembers of operators on shapes: a million objects that a collection of garbage looks at."""
    yield
    FakeTensorMode.cache_clear()
    for each in gc.get_referrers(ShapeEnv):  # which stay for ever: they hold each other outside of Python
        if isinstance(each, ShapeEnv):
            each.fake_tensor_cache.clear()


@pytest.fixture(scope="session")
def bytelm() -> Path:
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

    def load(source: TracingOptions, sizes: Any = (), **options: bool) -> Any:
        traced_by = (source.trust_model, source.input_specs, source.padding, source.logits, sizes, *options.items())
        key = (*_files(source.model), *traced_by)
        return _remembered(loaded, key, lambda: load_model(source, sizes, **options))

    return load


@pytest.fixture(scope="session")
def load_with_cache_once() -> Callable[..., Any]:
    """Return `load_with_cache` with a memory, as `load_once` has it."""
    from twellc.loaders.cached import load_with_cache

    loaded: dict[Any, Any] = {}

    def load(path: Path, options: CacheOptions, logits: str, dtype: Any) -> Any:
        def make() -> Any:
            return load_with_cache(path, options, logits, dtype)

        if callable(dtype) and torch.cuda.is_available():  # there it notes what it chooses
            return make()
        own = (torch.bfloat16, torch.float16, torch.float32)
        chosen = [*map(dtype, own)] if callable(dtype) else [dtype]
        return _remembered(loaded, (*_files(path), options, logits, *chosen), make)

    return load


def _files(path: Path) -> list[Any]:
    """Return what says whether a model's files are the same as before."""
    files = sorted(path.glob("*")) if path.is_dir() else [path] if path.is_file() else []
    return [path, *((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files)]


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
    load_once: Callable[..., Any],
    load_with_cache_once: Callable[..., Any],
    functional_once: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
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
    for module in ("generation.directory", "compiling.translate_torch"):
        monkeypatch.setattr(f"twellc.{module}.load_with_cache", load_with_cache_once)
    from twellc.passes.pipeline import STEPS, Stage

    monkeypatch.setitem(STEPS, Stage.FUNCTIONAL, functional_once)


def run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compiling do in this process what it would do in others."""

    def run(function: Callable[..., Any], *arguments: Any, progress: Callable[[str], None]) -> Any:
        return function(*arguments, progress)

    monkeypatch.setattr("twellc.compiling.compiler.run_isolated", run)


@pytest.fixture
def compiles_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in this process: another one would import torch first."""
    run_here(monkeypatch)


@pytest.fixture
def cli(compiles_here: None) -> Cli:
    """Return a function that runs the command line in this process, and what it would do in others, too."""
    from twellc.cli import main

    def run(*arguments: object) -> click.testing.Result:
        result = click.testing.CliRunner().invoke(main, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
