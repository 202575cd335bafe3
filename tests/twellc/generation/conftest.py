"""Tiny models in float32: what is exact there needs no tolerance."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models
from tests.caches import IN_TORCH
from tests.twellc.generation.shared import made
from twellc.generation.model import CausalModel

Family = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Return a function that saves a tiny model of a family in float32, and returns it, too."""
    numbers = itertools.count()

    def make(name: str, **changes: Any) -> tuple[Path, Any]:
        model = (IN_TORCH.get(name) or models.family(name, **models.WIDE, pad_token_id=0))(**changes)
        folder = tmp_path_factory.mktemp("families") / f"{name}-{next(numbers)}"
        return models.save(model, folder, torch.float32), model

    return make


@pytest.fixture(scope="module")
def pair(family: Family) -> tuple[CausalModel, Any]:
    """A Llama in torch and that of transformers; nothing changes either."""
    folder, model = family("llama")
    return made(folder, model), model
