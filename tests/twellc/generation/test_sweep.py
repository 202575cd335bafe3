"""Random calls of `LLM`, one after another: each prompt is answered as transformers answers it alone."""

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from tests import models
from tests.twellc.generation.conftest import Family
from tests.twellc.generation.shared import answer_alone, by_a_plan
from twellc import LLM, SamplingParams

END, LENGTH, ROWS = 0, 40, 4
# Transformers' own, and ours by its name: one in torch, one by a plan.
Pair = tuple[Any, LLM]


@pytest.fixture(scope="module")
def pairs(family: Family) -> Callable[[str, bool], Pair]:
    """Return what loads a family, once, in torch or as a plan."""

    @functools.cache
    def saved(name: str) -> tuple[Path, Any]:
        folder, model = family(name, vocab_size=models.VOCABULARY, eos_token_id=END)
        models.make_tokenizer(folder)
        model.generation_config.update(eos_token_id=None, pad_token_id=0)
        return folder, model

    @functools.cache
    def load(name: str, planned: bool) -> Pair:
        folder, model = saved(name)
        llm = LLM(folder, device="cpu", max_model_len=LENGTH)
        if planned:
            llm.model = by_a_plan(folder, ROWS, llm.model.generation_config, models.VOCABULARY)
        return model, llm

    return load


@pytest.mark.parametrize("calls", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_random_calls(pairs: Callable[[str, bool], Pair], calls: int) -> None:
    chosen = random.Random(calls)
    # A plan is traced anew for each family; all of them in torch only where there are many calls.
    forms = [("llama", False), ("llama", True), ("phi3-window", False), ("opt", False)]
    if calls > 6:
        forms += [("opt", True), *((name, False) for name in ("gpt-neox", "gemma2", "qwen3-window", "olmo2"))]
    for number in range(calls):
        form = chosen.choice(forms)
        model, llm = pairs(*form)
        prompts = [
            [chosen.randrange(3, 30) for _ in range(chosen.choice((1, 2, 5, 11, 24)))]
            for _ in range(chosen.randint(1, ROWS))
        ]
        expected, found = of_llm(chosen, model, llm, prompts)
        assert found == expected, f"call {number}: {form}, {prompts}"


def of_llm(chosen: random.Random, model: Any, llm: LLM, prompts: list[list[int]]) -> tuple[Any, Any]:
    """Call `LLM.generate` or its stream; return transformers' answers and ours, with why they end."""
    processors = LogitsProcessorList([])
    if chosen.random() < 0.4:
        processors.append(NoRepeatNGramLogitsProcessor(chosen.randint(1, 3)))
    if chosen.random() < 0.4:
        words = [[token] for token in range(3, models.VOCABULARY, chosen.randint(2, 5))] + [[4, 5]]
        processors.append(NoBadWordsLogitsProcessor(words))
    stops = [chosen.randrange(3, models.VOCABULARY) for _ in range(chosen.choice((0, 0, 8)))]
    ignored, most = chosen.random() < 0.5, chosen.choice((1, 7, 14))
    penalty = chosen.choice((1.0, 1.0, 1.3, 0.8))
    params = SamplingParams(
        max_tokens=most, repetition_penalty=penalty, stop_token_ids=stops or None, ignore_eos=ignored
    )
    given: Any = prompts
    if chosen.random() < 0.5:
        outputs = llm.generate(given, params, logits_processor=processors)
        found = [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]
    else:
        tokens: dict[str, list[int]] = {}
        reasons: dict[str, Any] = {}
        for piece in llm.generate_stream(given, params, logits_processor=processors):
            tokens.setdefault(piece.request_id, []).extend(piece.outputs[0].token_ids)
            reasons[piece.request_id] = piece.outputs[0].finish_reason
        found = [(tokens[str(row)], reasons[str(row)]) for row in range(len(prompts))]
    ends = [*stops, *([] if ignored else [END])]
    options = {"max_new_tokens": most, "repetition_penalty": penalty, "eos_token_id": ends or None}
    expected = []
    for prompt in prompts:
        (answer,) = answer_alone(model, torch.tensor(prompt), logits_processor=processors, do_sample=False, **options)
        expected.append((answer, "stop" if answer[-1] in ends else "length"))
    return expected, found
