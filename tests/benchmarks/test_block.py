"""What needs no GPU of benchmarks/block.py and layers.py: what they draw, and their tables."""

from typing import Any

import click
import numpy as np
import pytest
import torch

from tests.conftest import ROOT


def trained(draw: Any, layer: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list[Any]]:
    """Draw a trained layer, narrower than it is, since the width of x does not matter."""
    monkeypatch.setattr(draw, "weight_sets", lambda *_: 2)
    neurons = draw.Neurons("trained", layer=layer)
    x, sets = draw.make_inputs(tokens, 128, 5632, torch.bfloat16, neurons, "gated", "cpu")
    return x, sets


@pytest.mark.parametrize(
    ("layer", "density", "dead", "hottest_512"),
    [(0, 0.0269, 149, 0.24), (1, 0.0125, 2079, 0.60), (2, 0.0054, 3476, 0.82), (3, 0.0088, 1243, 0.66)],
)
def test_trained_rates(draw: Any, layer: int, density: float, dead: int, hottest_512: float) -> None:
    rates = draw.Neurons("trained", layer=layer).rates()
    assert rates.shape == (5632,) and rates.dtype == torch.float32
    assert float(rates.min()) >= 0 and float(rates.max()) <= 1
    assert float(rates.mean()) == pytest.approx(density, abs=5e-5)
    assert int((rates == 0).sum()) == dead
    hottest = rates.sort(descending=True).values[:512].sum() / rates.sum()
    assert float(hottest) == pytest.approx(hottest_512, abs=0.005)
    # The figures are those of the page that says where the rates are from.
    page = (ROOT / "benchmarks" / "data" / "README.md").read_text()
    assert f"| {layer} | {density:.2%} | {dead}, ".replace("%", " %") in page


@pytest.mark.parametrize("layer", [0, 2])
def test_neurons_fire_at_the_trained_rates(draw: Any, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = draw.Neurons("trained", layer=layer).rates()
    x, sets = trained(draw, layer, 512, monkeypatch)
    active = sets[0].block.active(x).float()
    assert not active[:, rates == 0].any()
    assert float(active.mean()) == pytest.approx(float(rates.mean()), rel=0.1)
    hot = rates > 0.1
    assert float(active[:, hot].mean()) == pytest.approx(float(rates[hot].mean()), rel=0.1)
    # Rows are as unequal as those of the other distributions, and what rotates is drawn anew.
    assert float(active.sum(1).quantile(0.99)) > 2.5 * float(active.sum(1).mean())
    assert not torch.equal(sets[0].block.gate[:, 3], sets[1].block.gate[:, 3])


def test_one_token_has_the_layers_density(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = draw.Neurons("trained", layer=1).rates()
    counts = [float(sets[0].block.active(x).sum()) for x, sets in (trained(draw, 1, 1, monkeypatch) for _ in range(8))]
    assert sum(counts) / len(counts) == pytest.approx(float(rates.sum()), rel=0.15)


def test_offsets(draw: Any) -> None:
    rates = torch.tensor([0.0, 1e-6, 0.01, 0.3, 0.9])
    activity = torch.rand(1000) * 0.02 + 1e-4
    offsets = draw.offsets(rates, activity)
    fires = torch.special.ndtr(offsets[:, None] - draw.quantile(activity)).mean(1)
    torch.testing.assert_close(fires, rates, rtol=0.02, atol=1e-9)


def test_columns_compute_the_same(draw: Any, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = draw.Neurons("trained", layer=3).rates()
    x, sets = trained(draw, 3, 8, monkeypatch)
    found = layers.columns(sets, rates, (512, 5000, 5632))
    assert list(found) == ["as is", "split 512", "split 5000", "pruned", "pruned split 512"]
    widths = {name: len(own[0][0].block.gate) for name, own in found.items()}
    assert widths["split 512"] == 5632 and widths["pruned"] == 4392  # 4389 fire
    assert [hot for _, hot in found["split 512"]] == [512, 512]
    alive, dead = (np.flatnonzero(which.numpy()) for which in (rates > 0, rates == 0))
    exact = sets[0].block.double().dense(x.double())
    for name, own in found.items():
        weights = own[0][0]
        torch.testing.assert_close(weights.block.double().dense(x.double()), exact, msg=name)
        torch.testing.assert_close(layers.run_twell(x, weights, 0).double(), exact, rtol=0.05, atol=0.05)
        assert torch.equal(weights.block.down.t(), weights.down_by_neuron)
    fires = found["split 512"][0][0].block.active(x).float().mean(0)
    assert fires[:512].mean() > 4 * fires[512:1024].mean() and not fires[-1243:].any()
    assert torch.equal(found["pruned"][0][0].block.gate, sets[0].block.gate[np.sort(np.r_[alive, dead[:3]])])


@pytest.fixture
def results(layers: Any) -> list[dict[str, Any]]:
    """Two layers as they are measured, with round times."""
    names = (
        "dense eager",
        "dense packed",
        "dense FP8",
        layers.PACKED_ALIVE,
        "as is",
        "split 256",
        "split 512",
        "pruned",
    )
    found = []
    for layer, own in enumerate([(300, 200, 120, 150, 100, 125, 80, 50), (100, 110, 80, 90, 125, 100, 160, 100)]):
        times = {name: {"median_us": float(value)} for name, value in zip(names, own, strict=True)}
        counts = {"tokens": 2048, "alive": 4400, "mean_nonzeros": 49.0, "max_nonzeros": 200}
        found.append({"layer": layer, **counts, "times": times})
    return found


def test_layers_together(layers: Any, results: list[dict[str, Any]]) -> None:
    found = layers.together(results)
    assert found["dense_us"] == 300  # 200 packed, 100 eager
    assert found["chosen"] == {"exact": ["split 512", "dense eager"], "pruned": ["pruned", "dense eager"]}
    all_as = {"all as is": 225, "all split 256": 225, "all split 512": 240, "all pruned": 150}
    assert found["speed_up"] == {name: 300 / us for name, us in {**all_as, "exact": 180, "pruned": 150}.items()}
    assert found["least_layer"]["all as is"] == 0.8 and found["least_layer"]["exact"] == 1.0
    assert found["over dense FP8"] == {"exact": 200 / 180, "pruned": 200 / 150}


def test_page_of_layers(layers: Any, harness: Any, results: list[dict[str, Any]]) -> None:
    rows = [harness.row_of(layers.columns_of(results[0]), each) for each in results]
    page = "\n".join([*rows, layers.markdown([layers.together(results)])])
    for line in (
        "| 2048 | 300.0 | 1.67 | 1.3 yes | 1.00 yes | 2.00 | 1.6 yes | 1.00 yes | 1.11, 1.33 | 1.33, 1.60 |",
        "| 2048 | 1.33 (0.80) | 1.33 (1.00) | 1.25 (0.62) | 2.00 (1.00) |",
        "| 0 | 49 / 200 | 4400 | 300.0 | 200.0 | 120.0 | 150.0 "
        "| 100.0 (2.00) | 125.0 (1.60) | 80.0 (2.50) | 50.0 (4.00) |",
    ):
        assert line in page.splitlines(), page


def test_table_row(block: Any, harness: Any) -> None:
    times = {"dense eager": 30.0, "dense packed": 20.0, "cuBLAS gate": 8.0, "gate": 10.0, "mlp": 10.0}
    result: dict[str, Any] = {"tokens": 4, "mean_nonzeros": 28.0, "max_nonzeros": 60}
    result["times"] = {name: {"median_us": value} for name, value in times.items()}
    row = harness.row_of(block.COLUMNS, result)
    assert row == "| 4 | 28.0 / 60 | 30.0 | - | 20.0 | - | - | 8.0 | 10.0 (1.25) | 10.0 | 2.00 | - |"
    result["times"]["dense FP8"] = {"median_us": 9.0}
    assert harness.row_of(block.COLUMNS, result).endswith("| 2.00 | 0.90 |")


def test_parts_of_the_suite(block: Any) -> None:
    parts = [block.settings_of(f"{number}/3") for number in (1, 2, 3)]
    assert sorted(map(str, sum(parts, ()))) == sorted(map(str, block.SUITE))
    for wrong in ("", "0/3", "4/3", "a/3", "1"):
        with pytest.raises(click.BadParameter, match="is not a part of the suite"):
            block.settings_of(wrong)
