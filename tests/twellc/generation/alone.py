"""What transformers' own `generate` answers to each prompt of a batch by itself."""

from __future__ import annotations

import functools
from typing import Any

import torch


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
