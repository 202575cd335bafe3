"""FP8 weights in Hugging Face directories: E4M3, and scales.

    compressed-tensors   float-quantized                    weight_scale       [out, 1], [1] or blocks
    transformers         fp8                                weight_scale_inv   [] or blocks
    transformers         fbgemm_fp8                         weight_scale       [out, 1]
    ModelOpt             FP8, FP8_PER_CHANNEL_PER_TOKEN     weight_scale       [], [out]
    twellc.optimize      saved by save_pretrained           scale              [out, 1], [1, in]

`weight` is float8_e4m3fn [out, in], and its scale multiplies it, also where that is called inverse. Blocks are of 128 x
128 elements: [out / 128, in / 128], rounded up. Activations are never rounded as a checkpoint says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few
from twellc.loaders.method import SCALE, TAKE_ORIGINAL, Method
from twellc.plugins.fp8 import BLOCK, E4M3, Fp8, refuse_nan

_BLOCK = [BLOCK, BLOCK]
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Fp8Method(Method):
    """E4M3 with a scale for each weight. Subclasses say which settings are not read."""

    def fault(self, settings: Mapping[str, Any]) -> str:
        """See `Method`."""
        return next(self._faults(settings), "")

    def _faults(self, settings: Mapping[str, Any]) -> Iterator[str]:
        yield from ()

    def take(self, path: Path, tensors: dict[str, Tensor]) -> dict[str, Fp8]:
        """See `Method`. It fails for a weight that is NaN, or has not one scale that is read."""
        found = {}
        weights = [name for name, each in tensors.items() if each.dtype == E4M3 and not SCALE.fullmatch(name)]
        for weight in weights:
            known = [f"{weight.removesuffix('weight')}scale"]
            if weight.endswith("weight"):
                known += [f"{weight}_scale", f"{weight}_scale_inv"]
            names = sorted(name for name in known if name in tensors)
            if len(names) != 1:
                got = " and ".join(names) or "none"
                expected = f"{weight}_scale or {weight}_scale_inv" if weight.endswith("weight") else "a linear layer"
                what = "is a weight in E4M3 that needs one scale"
                raise UserError(f"{path}: {weight}", what, got=got, expected=expected, fix=f"{TAKE_ORIGINAL}.")
            found[weight] = _matrix_of(f"{path}: {names[0]}", tensors.pop(weight), tensors.pop(names[0]))
            refuse_nan(f"{path}: {weight}", found[weight].values)
        return found


class CompressedTensors(_Fp8Method):
    """Of compressed-tensors and llm-compressor."""

    name, reads, config = "compressed-tensors", "float-quantized of compressed-tensors", "CompressedTensorsConfig"

    def _faults(self, settings: Mapping[str, Any]) -> Iterator[str]:
        sparsity, groups = settings.get("sparsity_config") or {}, settings.get("config_groups")
        if settings.get("transform_config"):
            yield "transform_config"
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            yield f"sparsity_config of {sparsity['format']}"
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            yield "no config_groups"
            return
        for group in groups.values():
            if isinstance(group.get("weights"), dict):
                yield from self._faults_of_group(group.get("format") or settings.get("format"), group["weights"])

    def _faults_of_group(self, form: object, weights: dict[str, Any]) -> Iterator[str]:
        if form not in ("float-quantized", "naive-quantized"):
            yield f"format {form}"
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            yield f"weights of {weights.get('num_bits')} bits, {weights.get('type')}"
        if weights.get("strategy") not in ("tensor", "channel", "block"):
            yield f"strategy {weights.get('strategy')}"
        if weights.get("strategy") == "block" and weights.get("block_structure") != _BLOCK:
            yield f"block_structure {weights.get('block_structure')}"
        if weights.get("symmetric") is False:
            yield "zero points"
        if weights.get("actorder"):
            yield f"actorder {weights['actorder']}"


class FineGrained(_Fp8Method):
    """Of transformers' `FineGrainedFP8Config`, and of DeepSeek."""

    name = reads = "fp8"
    config = "FineGrainedFP8Config"

    def _faults(self, settings: Mapping[str, Any]) -> Iterator[str]:
        size = settings.get("weight_block_size")
        if size not in (None, _BLOCK):
            yield f"weight_block_size {size}"


class Fbgemm(_Fp8Method):
    """Of transformers' `FbgemmFp8Config`."""

    name = reads = "fbgemm_fp8"


class ModelOpt(_Fp8Method):
    """Of ModelOpt; it may say so in hf_quant_config.json alone."""

    name, reads = "modelopt", "FP8 of ModelOpt"

    def _faults(self, settings: Mapping[str, Any]) -> Iterator[str]:
        algorithm, layers = settings.get("quant_algo"), settings.get("quantized_layers")
        found = [algorithm]
        if algorithm == "MIXED_PRECISION" and isinstance(layers, dict):
            found = [each.get("quant_algo") if isinstance(each, dict) else each for each in layers.values()]
        others = {str(each) for each in found if each not in (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN")}
        if others:
            yield f"quant_algo {first_few(sorted(others))}"


def _matrix_of(where: str, weight: Tensor, scale: Tensor) -> Fp8:
    """Return a matrix of its bytes and a scale.

    Raises:
        UserError: The scale has another shape or dtype, or is not finite and positive; `where` names it.
    """
    if scale.dtype not in _SCALE_DTYPES:
        expected = " or ".join(map(dtype_name, _SCALE_DTYPES))
        got, fix = dtype_name(scale.dtype), f"{TAKE_ORIGINAL}."
        raise UserError(where, "is a scale of a type that is not read", got=got, expected=expected, fix=fix)
    if weight.dim() != 2:
        got = f"a weight {list(weight.shape)}"
        raise UserError(where, "is a scale of several matrices", got=got, expected="[out, in]", fix=f"{TAKE_ORIGINAL}.")
    rows, columns = weight.shape
    wide = scale.float().reshape(()) if scale.numel() == 1 else scale.float()
    found = Fp8(weight, wide[:, None] if wide.dim() == 1 else wide)
    if found.form is None or scale.dim() > 2:
        blocks = [math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)]
        expected = f"[], [{rows}], [{rows}, 1], [1, {columns}] or, for blocks of {BLOCK} x {BLOCK}, {blocks}"
        got = f"{list(scale.shape)} for a weight {list(weight.shape)}"
        raise UserError(where, "is a scale of a shape that is not read", got=got, expected=expected)
    bad = wide[~(wide.isfinite() & (wide > 0))]
    if len(bad):
        what = f"{len(bad)} of {wide.numel()} scales are not finite and positive"
        raise UserError(where, what, got=str(float(bad[0])), fix="Get the checkpoint again.")
    return found
