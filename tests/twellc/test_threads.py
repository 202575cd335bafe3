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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import twellc
from tests import caches, models
from tests.processes import at_once
from twellc import LLM, SamplingParams
from twellc.generation.directory import TorchBackend
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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["qwen3", "falcon", "gemma2", "gpt-neox-japanese"])
def test_nothing_of_other_models_is_replaced(name: str) -> None:
    """Not while a step runs either, however the model computes attention; and the model is as before afterwards."""
    names = ("sdpa", "eager")
    registers = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    before = [[register.get(each) for each in names] for register in registers]
    model = caches.FAMILIES[name]()
    config, asked = model.config, model.config._attn_implementation
    seen: list[Any] = []
    encoder = _encoder()
    expected = encoder()

    def look(*_: Any) -> None:
        seen.append([[register.get(each) for each in names] for register in registers])
        assert torch.equal(encoder(), expected)

    backend = TorchBackend(model, name)
    model.get_output_embeddings().register_forward_hook(look)
    backend.begin(2, 8)
    backend.fill(torch.ones(2, 4, dtype=torch.int64), 0)
    backend.decode(torch.ones(2, dtype=torch.int64), torch.tensor([4, 2]))
    assert seen == [before] * 3
    assert model.config is config and config._attn_implementation == asked and not hasattr(config, "twellc_masks")
    assert all(module.config is config for module in model.modules() if hasattr(module, "config"))


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
