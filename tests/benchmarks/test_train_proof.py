"""What benchmarks/train_proof.py measures: the models themselves."""

import json
import math
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest
import torch
import transformers
from torch import Tensor


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


def held_out_of(model: Any, train_proof: Any, corpus: Any) -> dict[str, Any]:
    """Measure in float32, from logits and from what the down projections read, on the windows of the proof."""
    bits: list[Tensor] = []
    active: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0].flatten(0, 1) != 0)
        )
        for layer, seen in zip(model.model.layers, active, strict=True)
    ]
    generator, data, window = torch.Generator().manual_seed(5), corpus.held_out, corpus.recipe.window
    for _ in range(train_proof._HELD_OUT_WINDOWS):
        for first in torch.randint(len(data) - window - 1, (corpus.recipe.batch,), generator=generator).tolist():
            ids = data[first : first + window + 1].long()
            with torch.no_grad():
                shares = model(input_ids=ids[None, :-1]).logits[0].double().log_softmax(-1)
            bits.append(-shares[torch.arange(window), ids[1:]].mean() / math.log(2))
    for hook in hooks:
        hook.remove()
    fired = [torch.cat(seen) for seen in active]
    return {
        "bits": float(torch.stack(bits).mean()),
        "density": [float(each.double().mean()) for each in fired],
        "dead": [float((~each.any(0)).double().mean()) for each in fired],
    }


@pytest.mark.slow
def test_held_out_losses_are_those_of_the_models_that_were_kept(train_proof: Any, tmp_path: Path) -> None:
    """Of the dense model, of the one that was fine-tuned, and of one that is made sparse at once."""
    options = ["--smoke", "--device", "cpu", "--part", "fine-tune", "--out", tmp_path, "--json", tmp_path / "r.json"]
    with torch.random.fork_rng(devices=[]):
        done = click.testing.CliRunner().invoke(train_proof.main, list(map(str, options)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [each["name"] for each in results] == ["SiLU, dense", "ReLU, twell"]
    with click.Context(train_proof.main) as context:
        context.default_map = {"smoke": True}
        corpus = train_proof._corpus("cpu")
    for name, result in zip(("silu", "relu"), results, strict=True):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        expected = held_out_of(model, train_proof, corpus)
        for what in expected:
            assert result["held_out"][what] == pytest.approx(expected[what], rel=0.02, abs=0.02), (name, what)
        at_once = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, hidden_act="relu")
        if name == "silu":
            train_proof.sparsify(model)
        found, expected = train_proof.evaluate(model, corpus), held_out_of(at_once, train_proof, corpus)
        assert found["bits"] == pytest.approx(expected["bits"], rel=0.01)
        assert found["density"] == pytest.approx(expected["density"], abs=0.02)


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
