"""Prompts, models that answer them in torch and by a plan, and what transformers' own `generate` answers to each."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from twellc.generation.directory import load_directory
from twellc.generation.model import CausalModel
from twellc.generation.plan import PlanBackend
from twellc.loaders.cached import load_with_cache
from twellc.loaders.loaded import LoadedModel
from twellc.options.commands import LLMOptions
from twellc.options.source import CacheOptions
from twellc.passes.graph.execution import Runner

LENGTHS = (7, 12, 1)
CPU = LLMOptions(device="cpu")


def prompts(*lengths: int) -> tuple[Tensor, Tensor]:
    width = max(lengths or LENGTHS)
    seen = torch.tensor([[0] * (width - length) + [1] * length for length in lengths or LENGTHS])
    return torch.randint(3, 96, seen.shape) * seen, seen


def made(folder: Path, model: Any, chunk: int = 1 << 20) -> CausalModel:
    """Return the model under test, and give transformers' own the same settings."""
    backend, *_ = load_directory(folder, CPU)
    backend.chunk = chunk
    settings = GenerationConfig(pad_token_id=0, eos_token_id=2)
    model.generation_config = settings
    config: Any = PreTrainedConfig
    return CausalModel(backend, config(vocab_size=backend.vocabulary), settings)


class StandIn:
    """Runs the traced program on a CPU, writes what it says of the caches where they are bound; see `PlanCalls`."""

    def __init__(self, loaded: LoadedModel) -> None:
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
        cache = self._loaded.cache
        assert inputs["input_ids"].shape[1] <= cache.prefill_chunk
        assert all(inputs[name].dtype == torch.int64 for name in inputs)
        ends = inputs["write_index"] + inputs["token_count"]
        assert int(ends.max()) <= cache.length and int(inputs["write_index"].min()) >= 0
        given = {**inputs, **self._caches}
        named = {name: given[self._loaded.input_names[name]] for name in self._loaded.input_names}
        logits, *caches = self._run(named)
        for name, tensor in zip(self._loaded.output_names[1:], caches, strict=True):
            self._caches[name].copy_(tensor)
        return logits


def by_a_plan(
    folder: Path, rows: int, settings: GenerationConfig, vocabulary: int, logits: str = "last"
) -> CausalModel:
    """Return a model of a folder that a stand-in for a plan computes."""
    loaded = load_with_cache(folder, CacheOptions(40, rows, 5), logits, torch.float32)
    config: Any = PreTrainedConfig
    backend = PlanBackend("a stand-in", loaded.cache, StandIn(loaded))
    return CausalModel(backend, config(vocab_size=vocabulary), settings)


def answer_alone(model: Any, tokens: torch.Tensor, seed: int | None = None, **options: Any) -> list[list[int]]:
    """Return transformers' answers to one prompt without padding, int64 [tokens]: as many as it is asked for."""
    if seed is not None:
        torch.manual_seed(seed)
    found = model.generate(tokens[None], attention_mask=torch.ones_like(tokens)[None], **options)
    answers: list[list[int]] = found[:, len(tokens) :].tolist()
    return answers


def _of_prompt(allowed: Any, number: int, _: int, tokens: torch.Tensor) -> Any:
    return allowed(number, tokens)


def generate_alone(
    model: Any, input_ids: torch.Tensor, seen: torch.Tensor, seed: int | None = None, **options: Any
) -> torch.Tensor:
    """Return prompts [batch, tokens], padded on the left, with the answers that each has alone, as `generate` does."""
    prompts = [tokens[mask.bool()] for tokens, mask in zip(input_ids, seen, strict=True)]
    alone = []
    for number, tokens in enumerate(prompts):
        given = dict(options)
        if "prefix_allowed_tokens_fn" in given:  # alone each would be the first
            given["prefix_allowed_tokens_fn"] = functools.partial(
                _of_prompt, options["prefix_allowed_tokens_fn"], number
            )
        alone.append(answer_alone(model, tokens, seed, **given))
    width = max(len(answer) for answers in alone for answer in answers)
    padded = [[answer + [0] * (width - len(answer)) for answer in answers] for answers in alone]
    rows = torch.tensor([answer for answers in padded for answer in answers])
    return torch.cat([input_ids.cpu().repeat_interleave(len(alone[0]), 0), rows], dim=1)
