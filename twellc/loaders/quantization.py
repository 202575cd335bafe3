"""The methods of quantisation that are read, and the refusals of all others. docs/add-a-weight-type.md adds one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few
from twellc.loaders.fp8 import CompressedTensors, Fbgemm, FineGrained, ModelOpt
from twellc.loaders.method import SCALE, TAKE_ORIGINAL, Matrix, Method

METHODS: list[Method] = [CompressedTensors(), FineGrained(), Fbgemm(), ModelOpt()]
# Methods that transformers knows, but cannot undo.
_LASTING = ("awq", "gptq", "modelopt", "modelopt_fp4", "auto-round", "aqlm", "hqq", "quanto", "quark", "vptq", "eetq")
# Scales of activations, and of the cache of keys and values, which `cache_scales.py` reads.
_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "output_scale", "q_scale")
_CACHES = ("k_scale", "v_scale")
# What other methods store beside weights, or in their place.
_OTHER_NAMES = re.compile(
    r"qweight|qzeros|absmax|SCB|(weight_)?g_idx|weight_(packed|shape|zero_point|scale_2|global_scale)|"
    r"input_global_scale|pre_quant_scale|svdquant_.*"
)


def refuse_settings(where: str, place: str, settings: object) -> None:
    """Fail for the settings of a quantisation, at a place of a file, if they are not of a method that is read."""
    known = settings if isinstance(settings, dict) else {}
    name = known.get("quant_method")
    method = next((each for each in METHODS if each.name == name), None)
    fault = method.fault(known) if method else str(name)
    if fault:
        got = f"{place}{f' of {name}' if name else ''}{f' with {fault}' if method else ''}"
        raise _not_read(where, got, name)


def take_matrices(path: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Matrix], list[str]]:
    """Return the tensors of a directory that are not quantised, the matrices that are, by their weights, and notes.

    Raises:
        UserError: Something is quantised by a method that is not read, or is not whole.
    """
    rest, matrices, notes = dict(tensors), dict[str, Matrix](), list[str]()
    for method in METHODS:
        matrices |= method.take(path, rest)
    _refuse_others(path, rest)
    kinds = {name: name.rpartition(".")[2] for name in rest} if matrices else {}
    unused = [name for name, kind in kinds.items() if kind in _ACTIVATIONS]
    if unused:
        what = "scales of activations are not used, as these keep their 16 bits"
        notes.append(f"{len(unused)} {what}: {first_few(unused)}")
    unused += [name for name, kind in kinds.items() if kind in _CACHES]
    return {name: tensor for name, tensor in rest.items() if name not in unused}, matrices, notes


def _refuse_others(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fail for weights that are integers or floats of a byte, and for tensors beside quantised weights."""
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        small = tensor.is_floating_point() and tensor.element_size() == 1
        integer = last == "weight" and not tensor.is_floating_point() and not tensor.is_complex()
        if small or integer or _OTHER_NAMES.fullmatch(last):
            raise _not_read(str(path), f"{name} of {dtype_name(tensor.dtype)}")
    for name in tensors:
        weight = SCALE.fullmatch(name)
        if weight:
            got = dtype_name(tensors[weight[1]].dtype) if weight[1] in tensors else f"no {weight[1]}"
            what = "is a scale without a quantised weight"
            raise UserError(f"{path}: {name}", what, got=got, fix="Get the checkpoint again.")


def _not_read(where: str, got: str, name: object = None) -> UserError:
    config = next((each.config for each in METHODS if each.name == name), "")
    fix = f"{TAKE_ORIGINAL}."
    if config:
        fix = (
            f'{TAKE_ORIGINAL}, or undo this: python -c "import transformers as t; '
            "t.AutoModelForCausalLM.from_pretrained('FOLDER', "
            f"quantization_config=t.{config}(dequantize=True)).save_pretrained('NEW')\"."
        )
    elif name not in _LASTING:
        fix = (
            f"{TAKE_ORIGINAL}; or load it with transformers, call dequantize() of the model, and write that with"
            " save_pretrained."
        )
    expected = f"16 or 32 bits, or {', '.join(each.reads for each in METHODS)}"
    return UserError(where, "this form of quantised weights is not read", got=got, expected=expected, fix=fix)
