"""Scales of caches in FP8 in the files of a directory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from twellc import UserError
from twellc.loaders.cache_scales import stored_scales


def write(folder: Path, scales: dict[str, Any], **config: Any) -> Path:
    save_file({name: torch.tensor(value) for name, value in scales.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("prefixes", [("", ""), ("attn.", "attn."), ("k_proj.", "v_proj.")])
def test_names(prefixes: tuple[str, str], tmp_path: Path) -> None:
    """Those of vLLM's own checkpoints, of llm-compressor and of ModelOpt."""
    keys, values = prefixes
    named = {f"model.layers.{layer}.self_attn.{keys}k_scale": 0.5 + layer for layer in (0, 11)}
    named |= {f"model.layers.{layer}.self_attn.{values}v_scale": 0.25 + layer for layer in (0, 11)}
    named |= {"model.layers.0.self_attn.q_proj.weight_scale": 3.0}
    assert stored_scales(write(tmp_path, named)) == {0: (0.5, 0.25), 11: (11.5, 11.25)}


KEY, VALUE = "model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.v_scale"
INT8 = {"quantization_config": {"kv_cache_scheme": {"type": "int", "num_bits": 8}}}


@pytest.mark.parametrize(
    ("scales", "config", "message"),
    [
        ({KEY: 1.0}, {}, "layer 3 has a scale of its cache without the other one; got k_scale"),
        ({KEY: 0.0, VALUE: 1.0}, {}, "k_scale: is no scale; got 0.0"),
        ({KEY: float("nan"), VALUE: 1.0}, {}, "k_scale: is no scale; got nan"),
        ({KEY: [1.0, 2.0], VALUE: 1.0}, {}, "scales of the heads of a cache are not read; got 2 numbers"),
        ({KEY: 1.0, KEY.replace("attn.", "attn.attn."): 1.0}, {}, "is a second scale"),
        ({KEY: 1.0, VALUE: 1.0}, INT8, "are of another type of cache; got int of 8 bits; expected FP8"),
    ],
)
def test_others_are_refused(scales: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        stored_scales(write(tmp_path, scales, **config))
