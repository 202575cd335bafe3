"""Scales of a key-value cache in FP8 that a Hugging Face directory holds, as vLLM reads them.

    model.layers.3.self_attn.k_scale, …self_attn.attn.k_scale, …self_attn.k_proj.k_scale     of the keys of layer 3
    the same with v                                                                         of its values

Each is one number: what is stored in E4M3 times it is the key. A layer has both, or none. Where config.json, or
hf_quant_config.json of ModelOpt, names another type of cache, the scales are of that.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from torch import Tensor

from twellc.base.errors import UserError
from twellc.loaders.checkpoint import read_json, read_stored

_NAME = re.compile(r"(?:.*\.)?(\d+)\.(?:[^\d.][^.]*\.)*(k|v)_scale")  # the last number is that of the layer


def stored_scales(path: Path) -> dict[int, tuple[float, float]]:
    """Return the scales of keys and of values of a directory, by the numbers of layers; none where it has none.

    Raises:
        UserError: One is not a positive number, stands twice or without the other one, or is of another type of cache.
    """
    found: dict[int, dict[str, float]] = {}
    for name, tensor in read_stored(path).items():
        parts = _NAME.fullmatch(name)
        if parts is None:
            continue
        of_layer = found.setdefault(int(parts[1]), {})
        if parts[2] in of_layer:
            what = "is a second scale of the same layer's cache"
            raise UserError(f"{path}: {name}", what, fix="Get the checkpoint again.")
        of_layer[parts[2]] = _number(f"{path}: {name}", tensor)
    for layer, scales in found.items():
        if len(scales) != 2:
            what, got = f"layer {layer} has a scale of its cache without the other one", f"{', '.join(scales)}_scale"
            raise UserError(str(path), what, got=got, expected="k_scale and v_scale", fix="Get the checkpoint again.")
    if found:
        _refuse_other_types(path)
    return {layer: (scales["k"], scales["v"]) for layer, scales in found.items()}


def _refuse_other_types(path: Path) -> None:
    config = read_json(path / "config.json")
    settings = config.get("quantization_config") or config.get("compression_config") or {}
    scheme = settings.get("kv_cache_scheme") or {}
    kind = (scheme.get("type", "float"), scheme.get("num_bits", 8))
    file = path / "hf_quant_config.json"
    modelopt = read_json(file).get("quantization") or {} if file.is_file() else {}
    algorithm = modelopt.get("kv_cache_quant_algo") or "FP8"
    if kind != ("float", 8) or algorithm != "FP8":
        got = algorithm if algorithm != "FP8" else f"{kind[0]} of {kind[1]} bits"
        what = "its scales of keys and values are of another type of cache"
        raise UserError(str(path), what, got=got, expected="FP8", fix="Leave out --kv-cache-dtype.")


def _number(where: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        got, expected = f"{tensor.numel()} numbers", "one for the layer"
        raise UserError(where, "scales of the heads of a cache are not read", got=got, expected=expected)
    scale = float(tensor)
    if not 0 < scale < math.inf:
        raise UserError(where, "is no scale", got=str(scale), expected="a positive number")
    return scale
