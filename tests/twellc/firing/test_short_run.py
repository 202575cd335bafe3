"""The short run that `compile` and `inspect` measure densities in: what it counts, and where it ends."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import twellc
from tests.models import D_MODEL, Gated, Written, export
from twellc.firing import short_run
from twellc.loaders.cached import load_with_cache
from twellc.loaders.model import load_model
from twellc.options.source import CacheOptions, TracingOptions
from twellc.passes.pipeline import PassOptions, Stage, run_until


@pytest.mark.parametrize("cached", [False, True])
def test_a_sample_text(bytelm: Path, cached: bool) -> None:
    """The densities are those of transformers' modules on the same bytes."""
    loaded = load_with_cache(bytelm, CacheOptions(160), "last", None) if cached else load_model(TracingOptions(bytelm))
    found = run_until(loaded.program, PassOptions(torch.bfloat16), Stage.FIND)
    runs, why = short_run.run_shortly(loaded, found)
    model = AutoModelForCausalLM.from_pretrained(bytelm, dtype=torch.bfloat16)
    gates: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            module.act_fn.register_forward_hook(lambda _, x, y, name=name: gates.update({name: y}))
    ids = [model.config.bos_token_id] if model.config.bos_token_id is not None else []
    with torch.no_grad():
        model(torch.tensor([(ids + list(short_run._TEXT.encode()))[:128]]))
    assert why == "" and set(runs) == set(gates) and len(gates) == 4
    for name, run in runs.items():
        assert (run.tokens, run.inputs) == (128, "a sample text")
        assert run.density == pytest.approx(float((gates[name] != 0).double().mean()), rel=0.02), name


def spread(x: Tensor, *sizes: int) -> Tensor:
    """Return a tensor of these sizes, not a view, that is computed from x."""
    return x.sum().expand(sizes).clone()


def pinned(x: Tensor) -> Tensor:
    """Return the sum of single elements of tensors of 4 MB each, which they keep alive."""
    return torch.cat([spread(x * number, 1 << 21)[:1] for number in range(40)]).sum()


ENDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "large": (lambda x: spread(x, 1 << 28).sum(), "it takes too much memory"),
    "products": (lambda x: (spread(x, 1000, 5000) @ spread(x, 5000, 1100)).sum(), "it takes too long"),
    "pinned": (pinned, "it takes too much memory"),
    "repeated": (lambda x: (spread(x, 60, 1, 1, 9000) @ spread(x, 1, 60, 9000, 1)).sum(), "it takes too much memory"),
    "unknown": (lambda x: torch.linalg.matrix_exp(x[:16].float()).sum().to(x.dtype), "how much aten.linalg_matrix_exp"),
    "values": (lambda x: x[x[:, 0] > 0].sum(), "how much aten."),
}


@pytest.mark.parametrize("name", ENDS)
def test_it_ends_in_front_of_what_is_not_bounded(name: str, tmp_path: Path) -> None:
    """Of an archive that nobody trusts: the block before it is measured, that behind it is not."""
    trouble, why = ENDS[name]
    module = Written(
        lambda own, x: own.second(own.first(x) + trouble(own.first(x)) * 0), first=Gated(), second=Gated()
    ).bfloat16()
    torch.export.save(export(module, torch.randn(16, D_MODEL).bfloat16()), tmp_path / "m.pt2")
    found = twellc.inspect(tmp_path / "m.pt2")
    runs = {layer.module: layer.short_run for layer in found.layers}
    assert runs["first"] is not None and runs["first"].inputs == "random numbers" and runs["second"] is None
    (note,) = (note for note in found.description.notes if "was not measured of second: " in note)
    assert why in note


def test_the_clock_ends_it(bytelm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_run, "_SECONDS", 0.0)
    found = twellc.inspect(bytelm)
    assert all(layer.short_run is None and layer.expectation is None for layer in found.layers)
    assert any(note.endswith(": it takes too long") for note in found.description.notes)


def test_random_tokens_are_rows_of_the_table(tmp_path: Path) -> None:
    """An archive does not say what its integers are, and its example inputs are not looked at."""
    module = Written(lambda own, x: own.ffn(own.table(x)), table=nn.Embedding(5, D_MODEL), ffn=Gated()).bfloat16()
    torch.export.save(export(module, torch.zeros(2, 30, dtype=torch.int64)), tmp_path / "m.pt2")
    (layer,) = twellc.inspect(tmp_path / "m.pt2").layers
    assert layer.short_run is not None
    assert (layer.short_run.tokens, layer.short_run.inputs) == (60, "random tokens")
