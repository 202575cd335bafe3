"""Several models in the threads of one process: each computes what it computes alone."""

import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import twellc
from tests import caches, models
from tests.processes import at_once
from twellc import LLM, SamplingParams
from twellc.passes.graph.program import quiet_torch


def _encoder() -> Callable[[], torch.Tensor]:
    """Return a call of an encoder that is given no mask, which a mask of a decoder would change."""
    model = models._seeded(transformers.BertModel, transformers.BertConfig(**models.SMALL, intermediate_size=64))
    assert model.config._attn_implementation == "sdpa"
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size

    def call() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(ids).last_hidden_state
        return found

    return call


def _answers(llm: LLM, seed: int) -> Callable[[], Any]:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=seed)
    return lambda: [each.outputs for each in llm.generate([[5, 6, 7, 8, 9], [11, 12]], params)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("families", "compiles"), [(["gemma2"], False), pytest.param(["qwen3", "gemma2"], True, marks=pytest.mark.slow)]
)
def test_decoders_an_encoder_and_a_compiler(tmp_path: Path, families: list[str], compiles: bool) -> None:
    folders = [models.save(caches.FAMILIES[name](vocab_size=256), tmp_path / name, torch.float32) for name in families]
    calls = [*(_answers(LLM(folder, device="cpu"), seed) for seed, folder in enumerate(folders)), _encoder()]

    def compiler() -> bytes:
        twellc.compile(folders[0], backend="none", onnx=tmp_path / "model.onnx", overwrite=True)
        return (tmp_path / "model.onnx").read_bytes()

    expected = [call() for call in calls]
    compiled = compiler() if compiles else b""
    found: list[list[Any]] = [[] for _ in calls]
    over = threading.Event()

    def repeat(call: Callable[[], Any], results: list[Any]) -> None:
        while not (over.is_set() and results):
            results.append(call())

    threads = [threading.Thread(target=repeat, args=each) for each in zip(calls, found, strict=True)]
    for thread in threads:
        thread.start()
    try:
        assert compiles is False or compiler() == compiled
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for before, results in zip(expected, found, strict=True):
        for result in results:
            assert torch.equal(result, before) if isinstance(before, torch.Tensor) else result == before


def test_silence_is_of_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """What torch prints is held back, not what other threads print; afterwards all is as it was."""
    before, filters = sys.stderr, list(warnings.filters)

    def quiet(own: str) -> None:
        with quiet_torch():
            sys.stderr.write(own)
            other = threading.Thread(target=lambda: sys.stderr.write(f"other {own}\n"))
            other.start()
            other.join()

    at_once(lambda number: quiet(str(number)), 8)
    assert sys.stderr is before and warnings.filters == filters
    assert sorted(capsys.readouterr().err.split("\n")) == ["", *(f"other {number}" for number in range(8))]
