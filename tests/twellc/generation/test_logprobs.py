"""Log probabilities, penalties and several answers of `LLM`, beside what transformers computes of the same model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests import models
from tests.twellc.generation.shared import by_a_plan
from twellc import LLM, SamplingParams, UserError
from twellc.generation.logprobs import MODES

PROMPTS = [[5, 9, 7, 21, 8, 30, 11], [4], [12, 13, 14, 15]]


@pytest.fixture(scope="module")
def model(talker: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(talker, dtype=torch.float64)


@pytest.fixture(scope="module")
def llm(talker: Path) -> LLM:
    return LLM(talker, device="cpu", dtype="fp32")


def row(found: Any, tokens: int) -> torch.Tensor:
    """Return all values of a place, by token."""
    assert sorted(found) == list(range(tokens))
    return torch.tensor([found[token].logprob for token in range(tokens)], dtype=torch.float64)


@pytest.mark.parametrize("chunk", [None, 4])
def test_all_values_are_those_of_transformers(llm: LLM, model: Any, chunk: int | None) -> None:
    """Of prompts and answers, in a batch of unequal lengths and alone; ranks and texts, too."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
    llm.model.decoder.most_tokens = chunk
    outputs = llm.generate(PROMPTS, params)
    llm.model.decoder.most_tokens = None
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        answer = output.outputs[0]
        tokens = torch.tensor([prompt + answer.token_ids])
        expected = model(tokens).logits[0].log_softmax(-1)
        found = [*(output.prompt_logprobs or ())[1:], *(answer.logprobs or ())]
        assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
        assert len(found) == tokens.shape[1] - 1
        for place, each in enumerate(found):
            torch.testing.assert_close(row(each, expected.shape[-1]), expected[place], atol=2e-5, rtol=0)
            assert each is not None and sorted(each.values(), key=lambda one: -one.logprob)[0].rank == 1
        own = sum(expected[len(prompt) - 1 + place, token] for place, token in enumerate(answer.token_ids))
        assert answer.cumulative_logprob == pytest.approx(float(own), abs=1e-4)
        (alone,) = llm.generate([prompt], params)
        for ours, theirs in zip(alone.outputs[0].logprobs or (), answer.logprobs or (), strict=True):
            torch.testing.assert_close(row(ours, len(ours)), row(theirs, len(ours)), atol=2e-5, rtol=0)


def test_as_many_as_are_asked_for(llm: LLM, talker: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(talker)
    biased = {3: 50.0}
    for count in (0, 2):
        params = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=count, prompt_logprobs=count, logit_bias=biased)
        (output,) = llm.generate("the lazy", params)
        prompt, answer = output.prompt_logprobs, output.outputs[0].logprobs
        assert prompt is not None and answer is not None
        for token, each in zip(output.prompt_token_ids[1:], prompt[1:], strict=True):
            assert each is not None and token in each and count <= len(each) <= count + 1
            assert all(each[one].decoded_token == tokenizer.decode([one]) for one in each)
        for each in answer:  # of what the model computes, not of what is chosen from
            assert 3 in each and each[3].logprob < -0.1
            assert sorted(one.rank or 0 for one in each.values())[:count] == list(range(1, count + 1))
    (plain,) = llm.generate("the lazy", SamplingParams(max_tokens=2))
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None
    streamed = list(llm.generate_stream("the lazy", SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1)))
    assert streamed[0].prompt_logprobs and not any(each.prompt_logprobs for each in streamed[1:])
    assert all(len(each.outputs[0].logprobs or ()) == len(each.outputs[0].token_ids) for each in streamed)


@pytest.mark.parametrize("mode", MODES)
def test_modes(talker: Path, model: Any, mode: str) -> None:
    llm = LLM(talker, device="cpu", dtype="fp32", logprobs_mode=mode)
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=-1, temperature=0.5, top_k=3, seed=1)
    found = llm.generate([PROMPTS[0]], params)[0].outputs[0].logprobs
    expected = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    if mode.startswith("processed"):
        expected = expected / 0.5
        expected = expected.masked_fill(expected < expected.topk(3).values[-1], -torch.inf)
    if mode.endswith("logprobs"):
        expected = expected.log_softmax(-1)
    assert found is not None
    torch.testing.assert_close(row(found[0], len(expected)), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-0.5, 0.9)])
def test_penalties_are_openai_s(llm: LLM, model: Any, presence: float, frequency: float) -> None:
    """Over the tokens of the answer, and not those of the prompt; each row by its own."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, presence_penalty=presence, frequency_penalty=frequency)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        answer: list[int] = []
        for token in output.outputs[0].token_ids:
            logits = model(torch.tensor([prompt + answer])).logits[0, -1]
            for known in set(answer):
                logits[known] -= presence + frequency * answer.count(known)
            assert token == int(logits.argmax())
            answer.append(token)
    assert llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True)) != llm.generate(PROMPTS, params)


def test_several_answers(llm: LLM) -> None:
    greedy = SamplingParams(max_tokens=5, n=3, logprobs=1, prompt_logprobs=0)
    alone = SamplingParams(max_tokens=5, logprobs=1, prompt_logprobs=0)
    for output, one in zip(llm.generate(PROMPTS, greedy), llm.generate(PROMPTS, alone), strict=True):
        assert [each.index for each in output.outputs] == [0, 1, 2] and output.finished
        assert len(output.prompt_logprobs or ()) == len(output.prompt_token_ids)
        assert all(each.token_ids == one.outputs[0].token_ids for each in output.outputs)
    drawn = SamplingParams(max_tokens=8, n=4, temperature=2, seed=3, ignore_eos=True)
    found = llm.generate(PROMPTS, drawn)
    assert found == llm.generate(PROMPTS, drawn) and found[1].outputs == llm.generate(PROMPTS[1:2], drawn)[0].outputs
    assert len({tuple(each.token_ids) for each in found[0].outputs}) > 1
    with pytest.raises(UserError, match=r"prompts\[1\]: is longer than the cache"):
        llm.generate([[5], [5] * 5000], SamplingParams(n=2))


def test_a_row_of_nan_stays_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = llm.model.decoder.backend
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    expected = llm.generate(PROMPTS, params)
    plain = backend._run

    def spoilt(*given: Any) -> torch.Tensor:
        logits: torch.Tensor = plain(*given).clone()
        logits[1] = torch.nan
        return logits

    monkeypatch.setattr(backend, "_run", spoilt)
    found = llm.generate(PROMPTS, params)
    assert [found[0], found[2]] == [expected[0], expected[2]]
    assert found[1].outputs[0].cumulative_logprob != found[1].outputs[0].cumulative_logprob


def test_a_stream_that_is_given_up(llm: LLM) -> None:
    """Between the chunks of a prompt, and between steps."""
    llm.model.decoder.most_tokens = 4
    for chunks, steps in ((2, 0), (6, 3)):
        asked: list[int] = []

        def stopped(most: int = chunks, asked: list[int] = asked) -> bool:
            asked.append(1)
            return len(asked) > most

        found = list(llm.generate_stream([[5] * 13], SamplingParams(max_tokens=9, ignore_eos=True), stopped=stopped))
        assert len(found) == steps
    llm.model.decoder.most_tokens = None


@pytest.fixture
def of_a_plan(talker: Path) -> Any:
    """Return what makes an `LLM` over a plan's stand-in that gives some logits."""

    def make(logits: str) -> LLM:
        llm = LLM(talker, device="cpu", dtype="fp32")
        llm.model = by_a_plan(talker, 3, llm.model.generation_config, models.VOCABULARY, logits)
        return llm

    return make


def test_plans_give_what_they_can(of_a_plan: Any, llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    for ours, theirs in zip(of_a_plan("all").generate(PROMPTS, params), llm.generate(PROMPTS, params), strict=True):
        for one, other in zip(
            [*(ours.prompt_logprobs or ())[1:], *(ours.outputs[0].logprobs or ())],
            [*(theirs.prompt_logprobs or ())[1:], *(theirs.outputs[0].logprobs or ())],
            strict=True,
        ):
            assert one is not None and other is not None and one.keys() == other.keys()
            assert all(abs(one[token].logprob - other[token].logprob) < 2e-5 for token in one)
    last = of_a_plan("last")
    assert last.generate(PROMPTS, SamplingParams(max_tokens=2, logprobs=1))[0].outputs[0].logprobs
    with pytest.raises(UserError, match="prompt_logprobs: the plan gives the logits behind prompts, and none within"):
        last.generate(PROMPTS, SamplingParams(prompt_logprobs=0))
    greedy = of_a_plan("greedy")
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(UserError, match=f"^{name}: needs logits, and the plan gives the likeliest tokens alone"):
            greedy.generate(PROMPTS, SamplingParams(**{name: 1}))  # type: ignore[arg-type]


def test_no_tokenizer(llama: Path, talker: Path) -> None:
    """Answers are token ids; the first text is refused."""
    skipped = LLM(talker, device="cpu", skip_tokenizer_init=True)
    params = SamplingParams(max_tokens=4, logprobs=1)
    ids = skipped.generate([PROMPTS[0]], params)[0].outputs[0]
    assert ids.token_ids == LLM(talker, device="cpu").generate([PROMPTS[0]], params)[0].outputs[0].token_ids
    assert ids.text == "" and skipped.get_tokenizer() is None
    assert all(each.decoded_token is None for row in ids.logprobs or () for each in row.values())
    without = LLM(llama, device="cpu")
    assert without.notes[-1] == "there is no tokenizer: prompts and answers are token ids"
    assert len(without.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
    for given, options in (("a", {}), ([1], {"stop": "a"}), ([1], {"bad_words": ["a"]})):
        with pytest.raises(
            UserError, match=r"has no tokenizer; expected tokenizer\.json\. Put the files of the model's"
        ):
            without.generate(given, SamplingParams(**options))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="has no tokenizer"):
        without.chat([{"role": "user", "content": "a"}])
    with pytest.raises(UserError, match="tokenizer: is not read with skip_tokenizer_init=True"):
        LLM(llama, tokenizer=talker, device="cpu", skip_tokenizer_init=True)
