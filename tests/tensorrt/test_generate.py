"""Plans with a key-value cache answer in real TensorRT, through `LLM` and `twellc generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import at_once
from tests.tensorrt.plans import compiled, twellc
from twellc import LLM, SamplingParams, UserError
from twellc.export.tensorrt_host import Host

pytestmark = [pytest.mark.tensorrt, pytest.mark.xdist_group("generate")]

TEXTS = ["import os\n\n\ndef ", "class A", "    for line in open(path):\n        "]
# How far below the likeliest logit in float64 the one of a greedy token may be: what bfloat16 does not tell apart.
NEAR = 0.15


@pytest.fixture(scope="module")
def llm(answering: Path) -> LLM:
    return LLM(answering)


def distance(bytelm: Path, outputs: list[Any]) -> float:
    """Return how far at most the logit of a token is below the likeliest, in float64."""
    from transformers import LlamaForCausalLM

    wide: Any = LlamaForCausalLM.from_pretrained(bytelm, dtype=torch.float64)
    wide.cuda()
    farthest = 0.0
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        tokens = torch.tensor([prompt + answer]).cuda()
        with torch.no_grad():
            logits = wide(tokens).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        farthest = max(farthest, float((logits.max(-1).values - chosen).max()))
    return farthest


def test_greedy_answers_are_likeliest_in_float64(llm: LLM, bytelm: Path) -> None:
    params = SamplingParams(max_tokens=128, ignore_eos=True)
    outputs = llm.generate(TEXTS, params)
    assert llm.stats.graph and all(len(output.outputs[0].token_ids) == 128 for output in outputs)
    assert distance(bytelm, outputs) < NEAR
    # One at a time, and in another order: rows do not know of each other.
    for output in (llm.generate(text, params)[0] for text in reversed(TEXTS)):
        assert distance(bytelm, [output]) < NEAR


@pytest.mark.parametrize("linear", ["twell", "tensorrt"])
def test_plans_that_give_tokens(linear: str, bytelm: Path, tmp_path: Path) -> None:
    """Four sequences and one, by two profiles: with `twell` by the plugin that chooses, else by TensorRT's argmax."""
    options = (
        "--kv-cache",
        "256",
        "--prefill-chunk",
        "16",
        "--max-batch-size",
        "4",
        "--logits",
        "greedy",
        "--linear",
        linear,
    )
    greedy = LLM(compiled(bytelm, tmp_path / "m.plan", *options))
    params = SamplingParams(max_tokens=128, ignore_eos=True)
    outputs = greedy.generate(TEXTS, params) + greedy.generate(TEXTS[0], params)
    assert greedy.stats.graph and distance(bytelm, outputs) < NEAR
    with pytest.raises(UserError, match="needs logits, and the plan gives the likeliest tokens alone"):
        greedy.generate(TEXTS, SamplingParams(temperature=1.0))


def test_a_cache_filled_to_its_last_place(llm: LLM, bytelm: Path) -> None:
    prompt = [0, *(b"import os\n" * 20)]
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=500, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 257 - len(prompt) and output.outputs[0].finish_reason == "length"
    assert distance(bytelm, [output]) < NEAR
    with pytest.raises(UserError, match="the prompt: is longer than the cache; got 257 tokens; expected 256 at most"):
        llm.generate([[1] * 257])
    with pytest.raises(UserError, match=r"takes at most 4 prompts per call; got 5\..*--max-batch-size"):
        llm.generate(["a"] * 5)


def test_draws_repeat(llm: LLM) -> None:
    params = {"max_tokens": 40, "temperature": 1.0, "top_k": 40, "top_p": 0.95}
    first, again, other = (llm.generate(TEXTS, SamplingParams(**params, seed=seed)) for seed in (1, 1, 2))
    assert llm.stats.graph
    assert first == again and first != other


def test_two_threads(answering: Path) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    models = [LLM(answering), LLM(answering)]
    expected = [model.generate(text, params) for model, text in zip(models, TEXTS, strict=False)]
    found: dict[int, Any] = {}

    def answer(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[number] = [models[number].generate(TEXTS[number], params) for _ in range(4)]

    at_once(answer, 2)
    assert all(found[number] == [expected[number]] * 4 for number in range(2))


def test_the_command(answering: Path, llm: LLM) -> None:
    done = twellc("generate", answering, "--prompt", TEXTS[0], "--max-tokens", "40", "--stats")
    assert done.returncode == 0, done.stderr
    assert done.stdout == llm.generate(TEXTS[0], SamplingParams(max_tokens=40))[0].outputs[0].text + "\n"
    assert "each one CUDA graph" in done.stderr


def test_linear_layers_by_the_plugin(tensorrt: Host, bytelm: Path, tmp_path: Path) -> None:
    plan = tmp_path / "linear.plan"
    options = ("--kv-cache", "256", "--prefill-chunk", "16", "--max-batch-size", "4", "--linear", "twell")
    done = twellc("compile", bytelm, "-o", plan, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TwellLinear" in json.loads((tmp_path / "linear.plan.json").read_text())["plugins"]["names"]
    linear, params = LLM(plan), SamplingParams(max_tokens=128, ignore_eos=True)
    assert distance(bytelm, linear.generate(TEXTS, params)) < NEAR
    assert distance(bytelm, linear.generate(TEXTS[0], params)) < NEAR
    assert linear.stats.graph


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two GPUs")
def test_on_the_second_gpu(llm: LLM, answering: Path) -> None:
    params = SamplingParams(max_tokens=64)
    expected = llm.generate(TEXTS, params)
    second = LLM(answering, device="cuda:1")
    assert [second.generate(TEXTS, params) for _ in range(2)] == [expected] * 2
    assert second.stats.graph and second.model.device == torch.device("cuda:1")
    assert llm.generate(TEXTS, params) == expected
