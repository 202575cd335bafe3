"""`twellc check` finds no fault with what `compile` makes of the families."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.caches import FAMILIES, IN_TORCH
from tests.twellc.checks.runs import run_check, translate
from tests.twellc.loaders.test_sizes import MODELS
from twellc.base.errors import UserError

CAUSAL = {**FAMILIES, **IN_TORCH, "gptj": models.gptj, "mixtral": models.mixtral, "bitnet": models.bitnet}
BERT: dict[str, Any] = {**models.SMALL, "intermediate_size": 96, "hidden_act": "relu", "max_position_embeddings": 64}
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": models.family("Bert", "ForMaskedLM", **BERT),
    "roberta": models.family("Roberta", "ForMaskedLM", **BERT),
    "t5": models.t5,
    "m2m100": models.m2m100,
    "switch": models.switch,
    **{name: make for name, (make, _, _) in MODELS.items()},
}
FORMS: dict[str, dict[str, Any]] = {"as it is": {}, "linear": {"linear": "twell"}, "fp8": {"weights": "fp8"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kv_cache", [None, 24])
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(name: str, kv_cache: int | None, form: str, tmp_path: Path) -> None:
    compiled_and_checked(CAUSAL[name](), tmp_path, **FORMS[form], kv_cache=kv_cache)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name: str, form: str, tmp_path: Path) -> None:
    compiled_and_checked(ENCODERS[name](), tmp_path, **FORMS[form])


def compiled_and_checked(model: Any, folder: Path, **options: Any) -> None:
    """Check what `compile` makes of a model, if it takes it with these options."""
    saved, graph = models.save(model, folder / "model"), folder / "m.onnx"
    try:
        translate(saved, graph, **options)
    except UserError as refused:
        pytest.skip(f"compile refuses it: {refused}")
    result = run_check(saved, graph)
    assert result.within, (result.causes, result.first_divergence)
