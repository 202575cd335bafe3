"""Tiny models in float32: what is exact there needs no tolerance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import models


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Return a function that saves a tiny model of a class of transformers in float32, and returns it, too."""
    numbers = itertools.count()

    def make(name: str, **changes: Any) -> tuple[Path, Any]:
        import transformers

        options = {**models.SMALL, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
        options |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes}
        config = getattr(transformers, f"{name}Config")(**options)
        model = models._seeded(getattr(transformers, f"{name}ForCausalLM"), config).float()
        folder = tmp_path_factory.mktemp("families") / f"{name}-{next(numbers)}"
        return models.save(model, folder, torch.float32), model

    return make
