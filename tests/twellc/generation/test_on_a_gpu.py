"""Decoding in CUDA graphs: the same tokens as transformers' own loop, drawn ones too."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedConfig

import twellc
from tests import models
from tests.processes import at_once
from tests.twellc.generation.conftest import Family
from tests.twellc.generation.shared import generate_alone
from twellc.generation import directory
from twellc.generation.directory import load_directory
from twellc.generation.llm import LLM
from twellc.generation.model import CausalModel
from twellc.generation.sampling import SamplingParams
from twellc.options.commands import LLMOptions
from twellc.plugins import library
from twellc.plugins.cache_op import attends_by_cudnn

pytestmark = pytest.mark.gpu
LENGTHS = (30, 12, 1)
END = 2
DRAWN: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01}


@pytest.fixture
def pair(family: Family) -> tuple[CausalModel, Any]:
    """Ours and transformers' own, dense in float32: what is left is decoding."""
    folder, model = family("llama")
    ours = loaded(folder)
    model.generation_config = ours.generation_config
    return ours, model.cuda()


def loaded(folder: Path, dtype: str = "fp32", layers: str = "none", **options: Any) -> CausalModel:
    backend, *_ = load_directory(folder, LLMOptions(device="cuda", dtype=dtype, layers=layers, **options))
    config: Any = PreTrainedConfig
    settings = GenerationConfig(pad_token_id=0, eos_token_id=END)
    return CausalModel(backend, config(vocab_size=backend.vocabulary), settings)


def prompts(*lengths: int) -> dict[str, torch.Tensor]:
    width = max(lengths)
    seen = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"inputs": (torch.randint(3, 96, seen.shape) * seen).cuda(), "attention_mask": seen.cuda()}


def assert_likeliest(tokens: torch.Tensor, plain: Any, model: Any) -> None:
    """Check greedy answers to `prompts(*LENGTHS)`: each token is the likeliest in float64, as far as bfloat16 tells.

    Args:
        tokens: Prompts and answers.
        plain: The model in bfloat16: how far it is off, without any cache.
        model: The model; it becomes one in float64.
    """
    wide = model.double().cuda()
    for row, length in enumerate(LENGTHS):
        own = tokens[row : row + 1, max(LENGTHS) - length :].cuda()
        ends = (own[0, length:] == END).nonzero().flatten().tolist()
        own = own[:, : length + ends[0] + 1] if ends else own  # behind the end there is padding
        with torch.no_grad():
            truth = wide(own).logits[0, length - 1 : -1]
            error = float((plain(own).logits[0, length - 1 : -1].double() - truth).abs().max())
        chosen = truth.gather(1, own[0, length:, None])[:, 0]
        assert float((truth.max(-1).values - chosen).max()) <= 4 * error


@pytest.mark.parametrize("batch", [(9,), (7, 12, 1)])
def test_graphs_decode_as_transformers_does(pair: tuple[CausalModel, Any], batch: tuple[int, ...]) -> None:
    ours, model = pair
    for _ in range(2):  # with the graph of the first call, too
        given: dict[str, Any] = {**prompts(*batch), "max_new_tokens": 24}
        assert torch.equal(ours.generate(**given), model.generate(**given, do_sample=False).cpu())
        assert ours.decoder.stats.graph and ours.decoder.stats.gap_us is not None
        expected = generate_alone(model, given["inputs"], given["attention_mask"], 11, max_new_tokens=24, **DRAWN)
        assert torch.equal(ours.generate(**given, **DRAWN, seed=11), expected)
        assert ours.decoder.stats.graph


class Without(LogitsProcessor):  # type: ignore[misc]
    """Somebody's own, which looks at the tokens so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, input_ids[:, -3:], -torch.inf)


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "processor": {"logits_processor": LogitsProcessorList([Without()])},
    "warm": {"do_sample": True, "temperature": 1.5, "top_k": 0, "seed": 1},
    "cold": {"do_sample": True, "temperature": 0.5, "top_k": 0, "seed": 1},
    "of 5": {"do_sample": True, "top_k": 5, "seed": 2},
    "of 90": {"do_sample": True, "top_k": 90, "seed": 2},
    "likely": {**DRAWN, "seed": 3},
    "penalty and drawn": {**DRAWN, "repetition_penalty": 1.3, "seed": 3},
}


@pytest.mark.parametrize("order", range(4))
def test_any_order_of_calls(family: Family, order: int) -> None:
    """Each call answers as in a model that has answered nothing before, also where the number of rows changes."""
    folder, _ = family("llama")
    ours, other = loaded(folder), loaded(folder)
    batches = [prompts(7, 12), prompts(9), prompts(3, 8)]
    expected: dict[tuple[str, int], torch.Tensor] = {}
    chosen = random.Random(order)
    for _ in range(60):
        name, number = chosen.choice([*CALLS]), chosen.randrange(len(batches))
        given: dict[str, Any] = {**batches[number], **CALLS[name], "max_new_tokens": 12}
        if (name, number) not in expected:
            fresh = CausalModel(other.decoder.backend, other.config, ours.generation_config)
            expected[name, number] = fresh.generate(**given)
        assert torch.equal(ours.generate(**given), expected[name, number]), name


def test_values_of_sampling_take_no_memory(pair: tuple[CausalModel, Any]) -> None:
    ours, _ = pair
    given: dict[str, Any] = {**prompts(7, 12), "max_new_tokens": 4, "do_sample": True}

    def answer(number: int) -> None:
        share = number / 1000
        ours.generate(**given, temperature=0.5 + share, top_k=1 + number % 60, top_p=0.99 - share, min_p=share / 10)
        assert ours.decoder.stats.graph

    for number in range(5):
        answer(number)
    reserved = torch.cuda.memory_reserved()
    for number in range(5, 500):
        answer(number)
    assert torch.cuda.memory_reserved() <= reserved + (2 << 20)  # the smallest piece that torch asks for


def test_rows_draw_as_alone(pair: tuple[CausalModel, Any]) -> None:
    """What stands beside a row changes rounding at most: here the rows are all alike, and in graphs."""
    ours, _ = pair
    given: dict[str, Any] = {"max_new_tokens": 16, **DRAWN}
    row = torch.randint(3, 96, (1, 9)).cuda()
    several = ours.generate(row.expand(3, -1), attention_mask=torch.ones(3, 9), seed=5, **given)
    assert ours.decoder.stats.graph and torch.equal(several, several[:1].expand(3, -1))
    without_seed = ours.generate(row.expand(3, -1), attention_mask=torch.ones(3, 9), **given)
    assert not torch.equal(without_seed[0], without_seed[1])
    answers = ours.generate(row, seed=5, num_return_sequences=3, **given)
    assert not torch.equal(answers[0], answers[1])


def test_seeds(pair: tuple[CausalModel, Any]) -> None:
    ours, _ = pair
    given: dict[str, Any] = {**prompts(5, 5), "max_new_tokens": 24, **DRAWN}
    first, again, other = (ours.generate(**given, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(ours.generate(**given), ours.generate(**given))


def test_a_processor_outside_of_the_graph(pair: tuple[CausalModel, Any]) -> None:
    ours, model = pair
    given: dict[str, Any] = {"max_new_tokens": 24, "repetition_penalty": 1.5}
    padded = prompts(7, 12)  # whose padding transformers 5.17 penalises, too
    assert torch.equal(ours.generate(**padded, **given), generate_alone(model, *padded.values(), **given))
    assert not ours.decoder.stats.graph


def test_a_row_that_ended_harms_nobody(pair: tuple[CausalModel, Any]) -> None:
    """The cache of one row is full long before that of the other."""
    ours, _ = pair
    steps = list(ours.steps(**_ids(prompts(60, 2)), max_new_tokens=100, ignore_eos=True))
    assert len(steps) == 65 - 2 and [step.ended[0] for step in steps].index(True) == 4
    alone = list(ours.steps(**_ids(prompts(2)), max_new_tokens=100, ignore_eos=True))
    assert len(alone) == 63


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_models_in_threads(family: Family, dtype: str) -> None:
    """Each records graphs while the other one computes, and records; in bfloat16 they share plans of cuDNN."""
    folder, _ = family("llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    several = [loaded(folder, dtype) for _ in range(2)]
    batches = [{**prompts(*[7] * rows), "max_new_tokens": 24} for rows in (1, 2, 3, 4)]
    expected = [several[0].generate(**given) for given in batches]
    found: list[list[tuple[torch.Tensor, bool]]] = [[], []]

    def answer(number: int) -> None:
        ours = several[number]
        for given in 3 * batches:  # another number of rows, other graphs
            found[number].append((ours.generate(**given), ours.decoder.stats.graph))

    at_once(answer, 2)
    for each in found:
        assert len(each) == 3 * len(batches)
        for (tokens, graph), tokens_alone in zip(each, 3 * expected, strict=True):
            assert graph and torch.equal(tokens, tokens_alone)


def _ids(given: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": given["inputs"], "attention_mask": given["attention_mask"]}


@pytest.mark.slow
def test_compiled_steps(family: Family) -> None:
    folder, model = family("llama")
    ours = loaded(folder, compiled=True)
    given: dict[str, Any] = {**prompts(7, 12), "max_new_tokens": 24}
    model.generation_config = ours.generation_config
    assert torch.equal(ours.generate(**given), model.cuda().generate(**given, do_sample=False).cpu())
    assert ours.decoder.stats.graph


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_by_the_kernels(bytelm: Path, compiled: bool) -> None:
    """Each greedy token is the likeliest in float64, or as near to it as bfloat16 tells."""
    from transformers import LlamaForCausalLM

    llm = LLM(bytelm, device="cuda", compiled=compiled)
    assert "4 feed-forward blocks and 9 linear layers by the twell ops" in llm.model.decoder.backend.name
    texts = ["import os\n\n\ndef ", "class A", "    for line in "]
    outputs = llm.generate(texts, SamplingParams(max_tokens=64))
    wide: Any = LlamaForCausalLM.from_pretrained(bytelm, dtype=torch.float64)
    wide.cuda()
    with torch.no_grad():
        for output in outputs:
            prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
            tokens = torch.tensor([prompt + answer]).cuda()
            logits = wide(tokens).logits[0, len(prompt) - 1 : -1]
            chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
            assert float((logits.max(-1).values - chosen).max()) < 0.15
    assert llm.stats.graph


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_that_are_written_out(family: Family, compiled: bool) -> None:
    """OPT in bfloat16 by the kernels, in CUDA graphs, against float64."""
    folder, model = family("opt", hidden_size=128, word_embed_proj_dim=128, ffn_dim=320)
    ours = loaded(folder, "bf16", "all", compiled=compiled)
    assert "2 feed-forward blocks" in ours.decoder.backend.name
    tokens = ours.generate(**prompts(*LENGTHS), max_new_tokens=24)
    assert ours.decoder.stats.graph
    assert_likeliest(tokens, copy.deepcopy(model).bfloat16().cuda(), model)


@pytest.mark.parametrize("without", ["nothing", "cudnn", "library"])
def test_attention_of_groups(family: Family, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64, two a head of keys, in bfloat16 against float64: by cuDNN with lengths; by torch with a mask.

    A build without cuDNN's headers has no library that appends to caches, either.
    """
    folder, model = family("llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    if without == "nothing" and not attends_by_cudnn():
        pytest.skip("cuDNN is not at hand")
    if without != "nothing":
        monkeypatch.setattr(directory, "attends_by_cudnn", lambda: False)
    if without == "library":
        monkeypatch.setattr(library, "load_attention", lambda: None)
    ours, plain = loaded(folder, "bf16"), copy.deepcopy(model).bfloat16().cuda()
    tokens = ours.generate(**prompts(*LENGTHS), max_new_tokens=24)
    assert ours.decoder.stats.graph
    assert_likeliest(tokens, plain, model)


@pytest.mark.parametrize("rows", [8, 24])
def test_linear_layers_by_the_number_of_rows(family: Family, rows: int) -> None:
    """Up to 16 by the ops, more by torch: each as accurate as the dense model in bfloat16."""
    folder, model = family("llama", hidden_size=256, num_attention_heads=4)
    ours, plain = loaded(folder, "bf16", "all"), copy.deepcopy(model).bfloat16().cuda()
    assert "2 feed-forward blocks and " in ours.decoder.backend.name and " linear layers" in ours.decoder.backend.name
    given = prompts(*(LENGTHS * rows)[:rows])
    tokens = ours.generate(**given, max_new_tokens=24)
    assert_likeliest(tokens[: len(LENGTHS)], plain, model)


def test_a_model_in_float32_runs_in_bfloat16(talker: Path) -> None:
    llm = LLM(talker)
    assert llm.notes == ["the model is in float32; on the GPU it runs in bfloat16"]
    assert llm.model.decoder.backend._cache.dtype == "bf16"  # type: ignore[attr-defined]
    assert models.SMALL["num_hidden_layers"] == 2 and "2 feed-forward blocks" in llm.model.decoder.backend.name


def test_blocks_in_fp8(family: Family, tmp_path: Path) -> None:
    folder, model = family("llama", vocab_size=models.VOCABULARY)
    models.make_tokenizer(folder)
    (tmp_path / "text").write_text("some words to measure on")
    measured: dict[str, Any] = {"fp8_error": 0.5, "text": tmp_path / "text"}
    ours = loaded(folder, "bf16", "all", weights="fp8:blocks", **measured)
    assert "2 feed-forward blocks (2 in FP8) and " in ours.decoder.backend.name
    tokens = ours.generate(**prompts(*LENGTHS), max_new_tokens=20)
    dense = twellc.restore(twellc.optimize(model.bfloat16().cuda(), weights="fp8:blocks"))
    with torch.no_grad():
        assert_likeliest(tokens, dense, copy.deepcopy(dense))
