"""Plans as backends. No TensorRT runs here: a stand-in executes the traced program that a plan is built from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from tests import models
from tests.twellc.generation.alone import generate_alone
from tests.twellc.generation.test_families import fails_anywhere
from twellc import LLM, SamplingParams, UserError
from twellc.base.caches import KeyValueCache
from twellc.generation import llm as llm_module
from twellc.generation.model import CausalModel
from twellc.generation.plan import PlanBackend, _size, profile_for
from twellc.loaders.cached import load_with_cache
from twellc.options.source import CacheOptions
from twellc.passes.graph.execution import Runner

LENGTH, CHUNK, BATCH = 40, 5, 3


class StandIn:
    """Runs the traced program on a CPU, writes what it says of the caches where they are bound; see `PlanCalls`."""

    def __init__(self, loaded: Any) -> None:
        self.device = torch.device("cpu")
        self.calls: list[tuple[int, ...]] = []
        self._loaded, self._caches = loaded, dict[str, Tensor]()
        self._run = Runner(loaded.program)

    def bind(self, caches: dict[str, Tensor]) -> None:
        for pair in self._loaded.cache.pairs if caches else ():
            assert caches[pair.input] is caches[pair.output]
            assert list(caches[pair.input].shape[1:]) == pair.shape[1:] and not caches[pair.input].any()
        self._caches = caches

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        self.calls.append(tuple(inputs["input_ids"].shape))
        assert inputs["input_ids"].shape[1] <= CHUNK
        assert all(inputs[name].dtype == torch.int64 for name in inputs)
        ends = inputs["write_index"] + inputs["token_count"]
        assert int(ends.max()) <= LENGTH and int(inputs["write_index"].min()) >= 0
        given = {**inputs, **self._caches}
        named = {name: given[self._loaded.input_names[name]] for name in self._loaded.input_names}
        logits, *caches = self._run(named)
        for name, tensor in zip(self._loaded.output_names[1:], caches, strict=True):
            self._caches[name].copy_(tensor)
        return logits


@pytest.fixture(scope="module", params=["last", "all"])
def loaded(request: pytest.FixtureRequest, talker: Path) -> Any:
    return load_with_cache(talker, CacheOptions(LENGTH, BATCH, CHUNK), request.param, torch.float32)


@pytest.fixture
def backend(loaded: Any) -> PlanBackend:
    return PlanBackend("a stand-in", loaded.cache, StandIn(loaded))


def test_tokens_are_those_of_transformers(backend: PlanBackend, talker: Path) -> None:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(talker)
    settings = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.generation_config = settings
    ours = CausalModel(backend, PreTrainedConfig(), settings)
    for lengths in ((7, 12, 1), (3,), (17, 2)):
        width = max(lengths)
        seen = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
        given: dict[str, Any] = {"attention_mask": seen, "max_new_tokens": 20}
        input_ids = torch.randint(3, models.VOCABULARY, seen.shape) * seen
        assert torch.equal(ours.generate(input_ids, **given), model.generate(input_ids, **given, do_sample=False))
        drawn: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 30}
        expected = generate_alone(model, input_ids, seen, 2, max_new_tokens=20, **drawn)
        assert torch.equal(ours.generate(input_ids, **given, **drawn, seed=2), expected)


def test_chunks_of_prompts(backend: PlanBackend) -> None:
    """All tokens but the last in chunks, then a step for each new one."""
    ours = CausalModel(backend, PreTrainedConfig(), GenerationConfig())
    ours.generate(torch.randint(3, 99, (2, 13)), max_new_tokens=3)
    assert backend._calls.calls == [(2, 5)] * 3 + [(2, 1)] * 3  # type: ignore[attr-defined]


def test_few_sizes() -> None:
    """Four an octave, and never less than there are tokens."""
    sizes = [_size(tokens) for tokens in range(1, 2049)]
    assert all(size >= tokens for tokens, size in enumerate(sizes, 1))
    assert sorted(set(sizes))[:10] == [16, 20, 24, 28, 32, 40, 48, 56, 64, 80] and len(set(sizes)) == 29


def test_limits(backend: PlanBackend) -> None:
    ours = CausalModel(backend, PreTrainedConfig(), GenerationConfig(pad_token_id=0))
    full = ours.generate(torch.randint(3, 99, (1, LENGTH)), max_new_tokens=9)
    assert full.shape == (1, LENGTH + 1)
    with pytest.raises(
        UserError, match=f"the prompt: is longer than the cache; got {LENGTH + 1} tokens; expected {LENGTH}"
    ):
        ours.generate(torch.ones(1, LENGTH + 1, dtype=torch.int64), max_new_tokens=1)
    with pytest.raises(UserError, match=r"does not take so many prompts at once; got 4; expected 3 at most\..*--batch"):
        ours.generate(torch.ones(4, 2, dtype=torch.int64), max_new_tokens=1)


def test_memory_that_ends(backend: PlanBackend) -> None:
    fails_anywhere(CausalModel(backend, PreTrainedConfig(), GenerationConfig(pad_token_id=0)))


def test_llm(loaded: Any, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands beside the plan is read; the plan itself is a stand-in."""
    plan = tmp_path / "m.plan"
    plan.write_bytes(b"")
    text = tmp_path / "m.plan.text"
    text.symlink_to(talker)
    cache = dataclasses.replace(loaded.cache, text=text.name)

    def load_plan(path: Path, device: object) -> tuple[PlanBackend, KeyValueCache]:
        assert path == plan and device == "auto"
        return PlanBackend("a stand-in", cache, StandIn(loaded)), cache

    monkeypatch.setattr(llm_module, "load_plan", load_plan)
    params = SamplingParams(max_tokens=16)
    ours, theirs = LLM(plan), LLM(talker, device="cpu")
    assert ours.generate(["fox", "the lazy"], params) == theirs.generate(["fox", "the lazy"], params)
    messages = [{"role": "user", "content": "fox"}]
    assert ours.chat(messages, params)[0].outputs == theirs.chat(messages, params)[0].outputs
    assert ours.stats.backend == "a stand-in"
    for given, message in (
        ({"compiled": True}, "compiled: is of directories alone"),
        ({"max_model_len": 7}, f"max_model_len: is not that of the plan; got 7; expected {LENGTH}"),
    ):
        with pytest.raises(UserError, match=message):
            LLM(plan, **given)
    text.unlink()
    with pytest.raises(UserError, match=r"m\.plan\.text: has no tokenizer"):
        LLM(plan)


def test_plans_that_do_not_answer(archive: Path, tmp_path: Path) -> None:
    import twellc

    plan = tmp_path / "m.plan"
    twellc.compile(archive, plan, backend="tensorrt-rtx")
    with pytest.raises(UserError, match=r"m\.plan: has no key-value cache, so it can score a text and not answer"):
        LLM(plan)
    with pytest.raises(UserError, match=r"other\.plan: there is no such file or folder"):
        LLM(tmp_path / "other.plan")


def test_a_plan_that_cannot_run_here(bytelm: Path, tmp_path: Path) -> None:
    """TensorRT-RTX builds without a GPU, and runs neither without one nor on Hopper."""
    import twellc
    from twellc.export.tensorrt_host import why_not_here

    if not why_not_here("tensorrt-rtx"):
        pytest.skip("TensorRT-RTX runs plans here")
    plan = tmp_path / "m.plan"
    manifest = twellc.compile(bytelm, plan, backend="tensorrt-rtx", kv_cache=64, batch=2, prefill_chunk=8)
    assert manifest.cache is not None and manifest.cache.text == "m.plan.text"
    largest = [profile["input_ids"].max for profile in manifest.profiles]
    assert largest == [(2, 8), (2, 1), (1, 1)]
    assert [profile_for(*call, largest) for call in ((2, 8), (1, 2), (2, 1), (1, 1))] == [0, 0, 1, 2]
    of_many = [(32, 8), (32, 1), (8, 1), (1, 1)]
    assert [profile_for(rows, 1, of_many) for rows in (1, 2, 8, 9, 32)] == [3, 2, 2, 1, 1]
    with pytest.raises(UserError, match="--device cpu: a plan runs on a GPU; expected auto, cuda or cuda:N"):
        LLM(plan, device="cpu")
    with pytest.raises(UserError, match=r"m\.plan: the plan cannot run here: .*\. Give the model's directory"):
        LLM(plan)
