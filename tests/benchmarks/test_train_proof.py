"""What benchmarks/train_proof.py measures: the models themselves."""

import math
from typing import Any

import pytest
import torch


def test_evaluation_is_that_of_the_model(train_proof: Any, trained: Any) -> None:
    model = trained.make_model(trained.SMOKE)
    data = torch.arange(5000).remainder(7).to(torch.uint8)
    corpus = train_proof.Corpus(data, data, trained.SMOKE)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[:64] = 0
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(100)  # so that a wrong hidden tensor would be seen
    found = train_proof.evaluate(model, corpus)
    windows = data[: 7 * 64 * 11].view(-1, 64 * 11)[:, : 64 + 1].long()
    with torch.no_grad():
        expected = float(train_proof.entropy_of(model, windows)) / math.log(2)
    assert found["bits"] == pytest.approx(expected, rel=0.02)
    assert found["dead"][0] >= 0.25 and 0.3 < found["density"][0] < 0.45 < found["density"][1] < 0.55


def test_curves_are_compared_by_their_means(train_proof: Any) -> None:
    one, other = [1.0] * 100, [1.0] * 50 + [2.0] * 50
    assert train_proof.smoothed(other) == [1.0, 2.0] and train_proof.spread(one, other) == 0.5
    runs = [
        {"part": "curves", "name": name, "bits": bits, "held_out": {"density": [share, share]}}
        for name, bits, share in (
            ("dense, seed 0", one, 0.1),
            ("dense, seed 1", other, 0.2),
            ("twell, seed 0", one, 0.1),
        )
    ]
    assert train_proof.verdict(runs[:2]) is None
    assert train_proof.verdict(runs) == {
        "bits_apart_two_seeds": 0.5,
        "bits_apart_twell": 0.0,
        "within": True,
        "mean_density": {"dense, seed 0": 0.1, "dense, seed 1": 0.2, "twell, seed 0": 0.1},
    }
