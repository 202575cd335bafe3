"""Plans as backends. No TensorRT runs here: a stand-in executes the traced program that a plan is built from."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedConfig

import twellc
from tests.twellc.generation.shared import StandIn, prompts
from tests.twellc.generation.test_families import fails_anywhere
from twellc import LLM, SamplingParams, UserError
from twellc.base.caches import KeyValueCache
from twellc.generation import llm as llm_module
from twellc.generation.model import CausalModel
from twellc.generation.plan import PlanBackend, _size, profile_for
from twellc.loaders.cached import load_with_cache
from twellc.options.source import CacheOptions

pytestmark = pytest.mark.usefixtures("compiles_here")

LENGTH, CHUNK, BATCH = 40, 5, 3


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, talker: Path) -> Any:
    """What computes the last logits, unless a test asks for others."""
    logits = getattr(request, "param", "last")
    return load_with_cache(talker, CacheOptions(LENGTH, BATCH, CHUNK), logits, torch.float32)


@pytest.fixture
def backend(loaded: Any) -> PlanBackend:
    return PlanBackend("a stand-in", loaded.cache, StandIn(loaded))


@pytest.mark.parametrize("loaded", ["greedy", "all"], indirect=True)
def test_plans_that_give_tokens_or_all_logits(backend: PlanBackend, talker: Path) -> None:
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(talker)
    settings = GenerationConfig(eos_token_id=0, pad_token_id=0)
    model.generation_config = settings
    ours = CausalModel(backend, PreTrainedConfig(), settings)
    input_ids, seen = prompts(7, 12, 1)
    given: dict[str, Any] = {"attention_mask": seen, "max_new_tokens": 20}
    assert torch.equal(ours.generate(input_ids, **given), model.generate(input_ids, **given))
    if not backend.chooses:
        return
    what = "needs logits, and the plan gives the likeliest tokens alone"
    for name, asked in (("temperature", {"do_sample": True}), ("repetition_penalty", {"repetition_penalty": 1.5})):
        with pytest.raises(UserError, match=f"^{name}: {what}"):
            ours.generate(input_ids, **given, **asked)
    with pytest.raises(UserError, match=f"^logits: {what}"):
        ours(input_ids, seen)


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


def test_the_narrowest_profile() -> None:
    largest = [(2, 8), (2, 1), (1, 1)]
    assert [profile_for(*call, largest) for call in ((2, 8), (1, 2), (2, 1), (1, 1))] == [0, 0, 1, 2]
    of_many = [(32, 8), (32, 1), (8, 1), (1, 1)]
    assert [profile_for(rows, 1, of_many) for rows in (1, 2, 8, 9, 32)] == [3, 2, 2, 1, 1]


def test_limits(backend: PlanBackend) -> None:
    ours = CausalModel(backend, PreTrainedConfig(), GenerationConfig(pad_token_id=0))
    full = ours.generate(torch.randint(3, 99, (1, LENGTH)), max_new_tokens=9)
    assert full.shape == (1, LENGTH + 1)
    with pytest.raises(
        UserError, match=f"the prompt: is longer than the cache; got {LENGTH + 1} tokens; expected {LENGTH}"
    ):
        ours.generate(torch.ones(1, LENGTH + 1, dtype=torch.int64), max_new_tokens=1)
    with pytest.raises(UserError, match=r"takes at most 3 prompts per call; got 4\..*--max-batch-size"):
        ours.generate(torch.ones(4, 2, dtype=torch.int64), max_new_tokens=1)


def test_memory_that_ends(backend: PlanBackend) -> None:
    fails_anywhere(CausalModel(backend, PreTrainedConfig(), GenerationConfig(pad_token_id=0)), 3)


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
        LLM(plan).generate("fox")


def test_plans_that_do_not_answer(archive: Path, tmp_path: Path) -> None:
    plan = tmp_path / "m.plan"
    twellc.compile(archive, plan, backend="tensorrt-rtx")
    with pytest.raises(UserError, match=r"m\.plan: has no key-value cache, so it can score a text and not answer"):
        LLM(plan)
    with pytest.raises(UserError, match=r"other\.plan: there is no such file or folder"):
        LLM(tmp_path / "other.plan")


@pytest.mark.slow
def test_a_plan_that_cannot_run_here(bytelm: Path, tmp_path: Path) -> None:
    """TensorRT-RTX builds without a GPU, and runs neither without one nor on Hopper."""
    import twellc
    from twellc.export.tensorrt_host import why_not_here

    if not why_not_here("tensorrt-rtx"):
        pytest.skip("TensorRT-RTX runs plans here")
    plan = tmp_path / "m.plan"
    manifest = twellc.compile(bytelm, plan, backend="tensorrt-rtx", kv_cache=64, max_batch_size=2, prefill_chunk=8)
    assert manifest.cache is not None and manifest.cache.text == "m.plan.text"
    largest = [profile["input_ids"].max for profile in manifest.profiles]
    assert largest == [(2, 8), (2, 1), (1, 1)]
    with pytest.raises(UserError, match="--device cpu: a plan runs on a GPU; expected auto, cuda or cuda:N"):
        LLM(plan, device="cpu")
    with pytest.raises(UserError, match=r"m\.plan: the plan cannot run here: .*\. Give the model's directory"):
        LLM(plan)
