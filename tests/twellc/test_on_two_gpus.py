"""What runs on the second GPU gives what it gives on the first, also while another runs there."""

from pathlib import Path
from typing import Any

import pytest
import torch

import twellc
from tests.processes import at_once
from twellc import LLM, SamplingParams
from twellc.plugins.cache_op import CACHED_ATTENTION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two GPUs"),
]
TEXTS = ["import os\n", "def f(a, b):\n    return", "class A:\n"]
CALLS = (
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, repetition_penalty=1.3),
    SamplingParams(max_tokens=40, temperature=1.0, top_k=40, top_p=0.95, seed=1),
)


def answers(llm: LLM) -> list[Any]:
    return [[output.outputs for output in llm.generate(TEXTS, params)] for params in CALLS]


@pytest.fixture(scope="module")
def first(bytelm: Path) -> LLM:
    return LLM(bytelm, device="cuda:0")


@pytest.fixture(scope="module")
def expected(first: LLM) -> list[Any]:
    return answers(first)


@pytest.fixture(scope="module")
def second(bytelm: Path) -> LLM:
    return LLM(bytelm, device="cuda:1")


def test_generation(second: LLM, expected: list[Any]) -> None:
    """With and without graphs; the thread's device stays the first."""
    for _ in range(2):
        assert answers(second) == expected
    assert second.stats.graph and second.stats.gap_us is not None and torch.cuda.current_device() == 0
    assert second.model.device == torch.device("cuda:1")


def test_generation_where_another_gpu_is_current(first: LLM, expected: list[Any], bytelm: Path) -> None:
    with torch.cuda.device(1):
        assert answers(first) == expected
        assert LLM(bytelm).model.device == torch.device("cuda:1")


def test_both_at_once(first: LLM, second: LLM, expected: list[Any]) -> None:
    found: list[list[Any]] = [[], []]

    def answer(number: int) -> None:
        llm = (first, second)[number]
        for rows in (1, 3, 2, 3):  # other graphs
            llm.generate(TEXTS[:rows], CALLS[0])
            found[number].append(answers(llm))

    at_once(answer, 2)
    for each in found:
        assert len(each) == 4 and all(found_there == expected for found_there in each)


def test_attention() -> None:
    """cuDNN's has a plan for each device."""
    q, keys, values = (torch.randn(2, *sizes, 64).bfloat16() for sizes in ((1, 4), (2, 32), (2, 32)))
    counts = torch.ones(2, dtype=torch.int32), torch.tensor([7, 32], dtype=torch.int32)
    expected = CACHED_ATTENTION(q, keys, values, *counts, 0.125)
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        given = [each.to(device) for each in (q, keys, values, *counts)]
        found = CACHED_ATTENTION(*given, 0.125)
        torch.testing.assert_close(found.cpu().float(), expected.float(), rtol=0.02, atol=0.02)


def model_on_second(bytelm: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(bytelm, dtype=torch.bfloat16).to("cuda:1")  # type: ignore[arg-type]


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def test_optimize(bytelm: Path) -> None:
    model, tokens = model_on_second(bytelm), torch.randint(0, 256, (2, 64), device="cuda:1")
    with torch.no_grad():
        expected = model(tokens).logits
        twellc.optimize(model)
        assert far(model(tokens).logits, expected) < 0.03


def test_training(bytelm: Path) -> None:
    """Long enough that the device's choice of hot neurons is read, and used."""
    model, tokens = model_on_second(bytelm), torch.randint(0, 256, (2, 512), device="cuda:1")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach(), model.model.layers[0].mlp.gate_proj.weight.grad.clone()

    loss, gradient = step()
    twellc.optimize(model, training=True)
    for _ in range(24):
        found_loss, found_gradient = step()
        assert float((found_loss - loss).abs()) < 0.02 and far(found_gradient, gradient) < 0.08
