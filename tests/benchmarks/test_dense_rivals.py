"""Dense models that `generate.py` compares with compute what they compute without a cache."""

from typing import Any

import torch

from tests import models


def test_logits(dense_rivals: Any) -> None:
    model = models.llama()
    rival = dense_rivals.DenseBackend(model, "dense", 16, False, False)
    ids = torch.randint(3, 96, (2, 7))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    for _ in range(2):
        rival.begin(2, 7)
        torch.testing.assert_close(rival.fill(ids[:, :3], 0), expected[:, 2])
        torch.testing.assert_close(rival.fill(ids[:, 3:5], 3), expected[:, 4])
        for place in (5, 6):
            found = rival.decode(ids[:, place], torch.full((2,), place))
            torch.testing.assert_close(found, expected[:, place])


def test_a_cache_in_fp8(dense_rivals: Any) -> None:
    model = models.llama().to(torch.bfloat16)
    rival = dense_rivals.DenseBackend(model, "dense", 16, False, False, fp8_cache=True)
    ids = torch.randint(3, 96, (2, 7))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1].float()
    rival.begin(2, 7)
    rival.fill(ids[:, :6], 0)
    error = (rival.decode(ids[:, 6], torch.full((2,), 6)).float() - expected).norm() / expected.norm()
    assert 0 < error < 0.1
