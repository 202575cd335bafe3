"""Rows of one batch: each is answered as transformers answers it alone, whatever reads the tokens so far."""

import inspect
import random
import re
from typing import Any

import pytest
import torch
import transformers

from tests.twellc.generation.conftest import Family
from tests.twellc.generation.shared import LENGTHS, by_a_plan, generate_alone, made, prompts
from twellc.base.errors import UserError
from twellc.generation.choice import Choice, Prompt

DRAWN: dict[str, Any] = {"do_sample": True, "seed": 7}


class Last(transformers.LogitsProcessor):  # type: ignore[misc]
    """Somebody's own: the parity of a text's length and its first token say what may follow."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = (torch.arange(scores.shape[-1]) + input_ids[:, :1] + input_ids.shape[1]) % 2 == 0
        return scores.masked_fill(~kept, -torch.inf)


class Repeated(transformers.StoppingCriteria):  # type: ignore[misc]
    """Somebody's own: ends a text where a token comes a second time, in the prompt or behind it."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([len(set(row.tolist())) < len(row) - 2 for row in input_ids])


def allowed(number: int, tokens: torch.Tensor) -> list[int]:
    """Let a prompt have other tokens than one beside it, and others behind other tokens."""
    assert tokens[0] != 0, "padding"
    return [*range(3 + number + int(tokens[-1]) % 5, 96, 3), 2]


CASES: dict[str, dict[str, Any]] = {
    "sequence_bias": {"sequence_bias": [[[5], 3.0], [[7, 9], 40.0]]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "penalty and n-grams": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(3, 96, 2)] + [[4, 6], [0, 8]]},
    "min_length": {"min_length": 16, "eos_token_id": [*range(2, 96, 2)]},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": [*range(2, 96, 2)]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "forced_bos_token_id": {"forced_bos_token_id": 33},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "forced_eos_token_id, max_length": {"forced_eos_token_id": 2, "max_new_tokens": None, "max_length": 18},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.6)},
    "suppress_tokens": {"suppress_tokens": [*range(3, 96, 2)]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [*range(3, 90)]},
    "renormalize_logits": {"renormalize_logits": True},
    "watermarking_config": {"watermarking_config": transformers.WatermarkingConfig(bias=8.0, context_width=2)},
    "watermarking_config of itself": {
        "watermarking_config": transformers.WatermarkingConfig(bias=8.0, seeding_scheme="selfhash")
    },
    "watermarking_config of SynthID": {
        **DRAWN,
        "watermarking_config": transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7, 11]),
    },
    "temperature": {**DRAWN, "temperature": 0.7},
    "top_k": {**DRAWN, "top_k": 3},
    "top_k of more than there are": {**DRAWN, "top_k": 2000},
    "top_p": {**DRAWN, "top_p": 0.5},
    "top_h": {**DRAWN, "top_h": 0.4},
    "min_p": {**DRAWN, "min_p": 0.3},
    "typical_p": {**DRAWN, "typical_p": 0.4},
    "epsilon_cutoff": {**DRAWN, "epsilon_cutoff": 0.02},
    "eta_cutoff": {**DRAWN, "eta_cutoff": 0.05},
    "all values": {**DRAWN, "temperature": 1.4, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    "drawn with a penalty": {**DRAWN, "repetition_penalty": 1.3, "top_k": 30},
    "max_length": {"max_new_tokens": None, "max_length": 15},
    "nothing said of lengths": {"max_new_tokens": None},
    "several answers": {**DRAWN, "num_return_sequences": 2},
    "several answers with a prefix": {**DRAWN, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed},
    "several answers with n-grams": {**DRAWN, "num_return_sequences": 2, "no_repeat_ngram_size": 1},
    "end tokens": {"eos_token_id": [*range(2, 96, 9)]},
    "transformers' processor": {
        "logits_processor": transformers.LogitsProcessorList([transformers.NoRepeatNGramLogitsProcessor(1)])
    },
    "somebody's processor": {"logits_processor": transformers.LogitsProcessorList([Last()]), "repetition_penalty": 1.2},
    "somebody's criterion": {"stopping_criteria": transformers.StoppingCriteriaList([Repeated()])},
    "a length as a criterion": {
        "stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(14)])
    },
}


@pytest.fixture(scope="module")
def models(family: Family) -> dict[str, Any]:
    """Transformers' own, and ours in torch and by a plan."""
    folder, model = family("llama")
    ours = made(folder, model, 4)
    plan = by_a_plan(folder, 6, model.generation_config, 96)
    return {"transformers": model, "torch": ours, "plan": plan}


@pytest.mark.parametrize("name", CASES)
def test_each_row_answers_as_alone(models: dict[str, Any], name: str) -> None:
    input_ids, seen = prompts()
    given = {"max_new_tokens": 14, **CASES[name]}
    expected = generate_alone(models["transformers"], input_ids, seen, **given)
    plain = generate_alone(models["transformers"], input_ids, seen, max_new_tokens=14)
    assert name in ("remove_invalid_values", "renormalize_logits") or not torch.equal(expected, plain)
    for form in ("torch", "plan"):
        assert torch.equal(models[form].generate(input_ids, attention_mask=seen, **given), expected), form


def test_all_processors_are_tried(models: dict[str, Any]) -> None:
    """All that transformers makes of arguments, but the one that runs a model."""
    text = inspect.getsource(transformers.GenerationMixin._get_logits_processor)
    names = set(re.findall(r"append\(\s*(\w+)\(", text)) - {"UnbatchedClassifierFreeGuidanceLogitsProcessor"}
    assert len(names) > 20
    tried: set[str] = set()
    for case in CASES.values():
        given = {key: value for key, value in case.items() if key != "seed"}
        prompt, _ = models["torch"]._prompt(0, torch.tensor([5, 6]), False, {"max_new_tokens": 4, **given})
        tried |= {type(each).__name__ for each in prompt.processors}
    assert names <= tried


def test_objects_of_transformers_that_know_a_prompt(models: dict[str, Any]) -> None:
    """Where they are given to a call, each prompt has its own number and its own state."""
    (input_ids, seen), numbers = prompts(), list[int]()

    def kept(number: int, tokens: torch.Tensor) -> list[int]:
        numbers.append(number)
        return allowed(number, tokens)

    given = {"attention_mask": seen, "max_new_tokens": 9}
    by_argument = models["torch"].generate(input_ids, prefix_allowed_tokens_fn=allowed, **given)
    processors = transformers.LogitsProcessorList([transformers.PrefixConstrainedLogitsProcessor(kept, 1)])
    assert torch.equal(models["torch"].generate(input_ids, logits_processor=processors, **given), by_argument)
    assert set(numbers) == {0, 1, 2}
    mark = transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7, 11])
    by_argument = models["torch"].generate(input_ids, watermarking_config=mark, **given)
    processors = transformers.LogitsProcessorList([mark.construct_processor(96, "cpu")])
    assert torch.equal(models["torch"].generate(input_ids, logits_processor=processors, **given), by_argument)


def test_values_of_sampling_are_read_from_the_device() -> None:
    """Scores are bit for bit those of transformers, and a graph for some values is one for others."""
    chosen, logits, keys = random.Random(3), 4 * torch.randn(3, 3000), set[Any]()
    for _ in range(60):
        processors = transformers.LogitsProcessorList(
            [
                transformers.TemperatureLogitsWarper(chosen.uniform(0.1, 3)),
                transformers.TopKLogitsWarper(chosen.choice((1, 64, 900, 4000))),
                transformers.TopPLogitsWarper(chosen.uniform(0.05, 0.999)),
                transformers.MinPLogitsWarper(chosen.uniform(0.001, 0.3)),
            ]
        )
        row = torch.tensor([[5, 6]])
        prompts = [Prompt(row, processors, transformers.StoppingCriteriaList(), frozenset(), 4) for _ in range(3)]
        choice = Choice(prompts, True, 0, [False] * 3, torch.device("cpu"), True)
        keys.add(choice.key)
        values = torch.tensor(choice.values, dtype=torch.float64)
        assert torch.equal(choice.scores(logits, values), processors(row, logits))  # type: ignore[arg-type]
    assert None not in keys and len(keys) == 3, "one for small k, one for larger ones, one for all"


def test_draws_without_a_seed(models: dict[str, Any]) -> None:
    """Rows that are alike draw other tokens; with a seed each draws as it would alone."""
    ours, rows = models["torch"], torch.full((3, 4), 9)
    tokens = ours.generate(rows, max_new_tokens=12, do_sample=True)
    assert not torch.equal(tokens[0], tokens[1])
    assert torch.equal(*ours.generate(rows[:2], max_new_tokens=12, do_sample=True, seed=1))
    assert not torch.equal(*ours.generate(rows[:1], max_new_tokens=12, do_sample=True, seed=1, num_return_sequences=2))


def test_nothing_to_draw_from(models: dict[str, Any]) -> None:
    given: dict[str, Any] = {"do_sample": True, "max_new_tokens": 3, "suppress_tokens": [*range(96)]}
    with pytest.raises(UserError, match=r"logits processors: leave no token that could be drawn; got .* in row 0"):
        models["torch"].generate(torch.tensor([[5, 6]]), **given)


def test_padding_that_transformers_finds(models: dict[str, Any]) -> None:
    """Without a mask padding is what transformers takes for it."""
    input_ids, seen = prompts()
    expected = models["torch"].generate(input_ids, attention_mask=seen, max_new_tokens=5, no_repeat_ngram_size=1)
    assert torch.equal(models["torch"].generate(input_ids, max_new_tokens=5, no_repeat_ngram_size=1), expected)
    assert LENGTHS != (12, 12, 12)
