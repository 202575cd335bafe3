"""FP8 weights in Hugging Face directories, as other libraries store them: E4M3, and scales.

    compressed-tensors   float-quantized                    weight_scale       [out, 1], [1] or blocks
    transformers         fp8                                weight_scale_inv   [] or blocks
    transformers         fbgemm_fp8                         weight_scale       [out, 1]
    ModelOpt             FP8, FP8_PER_CHANNEL_PER_TOKEN     weight_scale       [], [out]
    twellc.optimize      saved by save_pretrained           scale              [out, 1], [1, in]

`weight` is float8_e4m3fn [out, in], and is worth its values times its scale, also where that is called inverse. Blocks
are of 128 x 128 elements: [out / 128, in / 128], rounded up. What the configuration says is in FP8 does not
matter: the tensors do. Activations are never rounded as a checkpoint says it.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.errors import UserError, first_few
from twellc.eager.fp8_linear import Fp8Linear
from twellc.eager.module_blocks import called_otherwise, find_blocks, matrices_of, reads_weight
from twellc.plugins.fp8 import BLOCK, E4M3, LARGEST, Fp8, refuse_infinite, refuse_nan

_BLOCK = [BLOCK, BLOCK]
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCALE = re.compile(r"(.*weight)_scale(_inv)?")
# Scales of activations and of the cache of keys and values.
_ACTIVATIONS = ("input_scale", "activation_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale")
# What other forms store beside weights, or in their place.
_OTHER_NAMES = re.compile(
    r"qweight|qzeros|absmax|SCB|(weight_)?g_idx|weight_(packed|shape|zero_point|scale_2|global_scale)|"
    r"input_global_scale|pre_quant_scale|svdquant_.*"
)
_FORMATS = ("float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "block")
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_READ = "16 or 32 bits, or E4M3 with scales: float-quantized of compressed-tensors, fp8, fbgemm_fp8, FP8 of ModelOpt"
_TAKE_ORIGINAL = "Take the checkpoint that this one was made from"
_CONFIGS = {"compressed-tensors": "CompressedTensorsConfig", "fp8": "FineGrainedFP8Config"}
# Methods that transformers knows, but cannot undo.
_LASTING = ("awq", "gptq", "modelopt", "modelopt_fp4", "auto-round", "aqlm", "hqq", "quanto", "quark", "vptq", "eetq")


# ---- what configurations say ----


def refuse_other_methods(where: str, place: str, settings: Any) -> None:
    """Fail for the settings of a quantisation that is not read, at a place of a file."""
    settings = settings if isinstance(settings, dict) else {}
    method = settings.get("quant_method")
    fault = _fault_of(settings, method)
    if fault:
        got = f"{place}{f' of {method}' if method else ''}{f' with {fault}' * (fault != str(method))}"
        raise _not_read(where, got, method)


def refuse_other_algorithms(where: str, settings: Mapping[str, Any]) -> None:
    """Fail for the hf_quant_config.json of ModelOpt if that is of a form that is not read."""
    quantization = settings.get("quantization")
    fault = _fault_of_algorithm(quantization) if isinstance(quantization, dict) else "no quantization"
    if fault:
        raise _not_read(where, fault, "modelopt")


def _fault_of(settings: dict[str, Any], method: object) -> str:
    """Return what in the settings of a method is not read; empty if all is."""
    if method == "compressed-tensors":
        return next(_faults_of_groups(settings), "")
    if method == "fp8":
        size = settings.get("weight_block_size")
        return "" if size in (None, _BLOCK) else f"weight_block_size {size}"
    if method == "modelopt":
        return _fault_of_algorithm(settings)
    return "" if method == "fbgemm_fp8" else str(method)


def _faults_of_groups(settings: dict[str, Any]) -> Iterator[str]:
    sparsity, groups = settings.get("sparsity_config") or {}, settings.get("config_groups")
    if settings.get("transform_config"):
        yield "transform_config"
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        yield f"sparsity_config of {sparsity['format']}"
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        yield "no config_groups"
        return
    for group in groups.values():
        weights = group.get("weights")
        form = group.get("format") or settings.get("format")
        if not isinstance(weights, dict):
            continue
        if form not in _FORMATS:
            yield f"format {form}"
        if (weights.get("type"), weights.get("num_bits")) != ("float", 8):
            yield f"weights of {weights.get('num_bits')} bits, {weights.get('type')}"
        if weights.get("strategy") not in _STRATEGIES:
            yield f"strategy {weights.get('strategy')}"
        if weights.get("strategy") == "block" and weights.get("block_structure") != _BLOCK:
            yield f"block_structure {weights.get('block_structure')}"
        if weights.get("symmetric") is False:
            yield "zero points"
        if weights.get("actorder"):
            yield f"actorder {weights['actorder']}"


def _fault_of_algorithm(settings: dict[str, Any]) -> str:
    algorithm, layers = settings.get("quant_algo"), settings.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" and isinstance(layers, dict):
        found = [each.get("quant_algo") if isinstance(each, dict) else each for each in layers.values()]
    else:
        found = [algorithm]
    others = [str(each) for each in found if each not in (None, *_ALGORITHMS)]
    return f"quant_algo {first_few(sorted(set(others)))}" if others else ""


def _not_read(where: str, got: str, method: object = None) -> UserError:
    fix = f"{_TAKE_ORIGINAL}."
    config = _CONFIGS.get(str(method))
    if config is not None:
        fix = (
            f'{_TAKE_ORIGINAL}, or undo this: python -c "import transformers as t; '
            "t.AutoModelForCausalLM.from_pretrained('FOLDER', "
            f"quantization_config=t.{config}(dequantize=True)).save_pretrained('NEW')\"."
        )
    elif method not in _LASTING:
        fix = (
            f"{_TAKE_ORIGINAL}; or load it with transformers, call dequantize() of the model, and write that with"
            " save_pretrained."
        )
    return UserError(where, "this form of quantised weights is not read", got=got, expected=_READ, fix=fix)


# ---- what files hold ----


def refuse_other_forms(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fail for weights that are integers, or floats of a byte but E4M3, and for what other forms store beside them."""
    for name, tensor in tensors.items():
        last = name.rpartition(".")[2]
        small = tensor.is_floating_point() and tensor.element_size() == 1 and tensor.dtype != E4M3
        integer = last == "weight" and not tensor.is_floating_point() and not tensor.is_complex()
        if small or integer or _OTHER_NAMES.fullmatch(last):
            raise _not_read(str(path), f"{name} of {dtype_name(tensor.dtype)}")


def take_fp8(path: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Fp8], list[str]]:
    """Return the tensors of no matrix in FP8, these matrices by the names of their weights, and notes.

    Raises:
        UserError: A weight has no scale, or not one that is read, or is NaN; or a scale has no weight.
    """
    weights = {name: tensor for name, tensor in tensors.items() if tensor.dtype == E4M3}
    scales = {name: found[1] for name in tensors if (found := _SCALE.fullmatch(name))}
    own = {f"{name.removesuffix('weight')}scale": name for name in weights}
    scales |= {name: weight for name, weight in own.items() if name in tensors}
    for name, weight in scales.items():
        if weight not in weights:
            what = "is a scale without a weight in E4M3"
            got = dtype_name(tensors[weight].dtype) if weight in tensors else f"no {weight}"
            raise UserError(f"{path}: {name}", what, got=got, fix="Get the checkpoint again.")
    scaled = {}
    for weight, tensor in weights.items():
        names = sorted(name for name, each in scales.items() if each == weight)
        if len(names) != 1:
            got = " and ".join(names) or "none"
            expected = f"{weight}_scale or {weight}_scale_inv" if weight.endswith("weight") else "a linear layer"
            what = "is a weight in E4M3 that needs one scale"
            raise UserError(f"{path}: {weight}", what, got=got, expected=expected, fix=f"{_TAKE_ORIGINAL}.")
        scaled[weight] = _matrix_of(f"{path}: {names[0]}", tensor, tensors[names[0]])
        refuse_nan(f"{path}: {weight}", tensor)
    rest = {name: tensor for name, tensor in tensors.items() if name not in weights and name not in scales}
    unused = [name for name in rest if weights and name.rpartition(".")[2] in _ACTIVATIONS]
    notes = []
    if unused:
        notes.append(
            f"{len(unused)} scales of activations and caches are not used, as these keep their 16 bits: "
            f"{first_few(unused)}"
        )
    return {name: tensor for name, tensor in rest.items() if name not in unused}, scaled, notes


def _matrix_of(where: str, weight: Tensor, scale: Tensor) -> Fp8:
    """Return a matrix of its bytes and a scale.

    Raises:
        UserError: The scale has another shape or dtype, or is not finite and positive; `where` names it.
    """
    if scale.dtype not in _SCALE_DTYPES:
        expected = " or ".join(map(dtype_name, _SCALE_DTYPES))
        got, fix = dtype_name(scale.dtype), f"{_TAKE_ORIGINAL}."
        raise UserError(where, "is a scale of a type that is not read", got=got, expected=expected, fix=fix)
    if weight.dim() != 2:
        got = f"a weight {list(weight.shape)}"
        raise UserError(
            where, "is a scale of several matrices", got=got, expected="[out, in]", fix=f"{_TAKE_ORIGINAL}."
        )
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


def refuse_overflow(path: Path, scaled: Mapping[str, Fp8], dtype: torch.dtype) -> None:
    """Fail for matrices that overflow float16, if a model is made in that."""
    for name, each in scaled.items() if dtype == torch.float16 else ():
        if float(each.scale.max()) * LARGEST > torch.finfo(dtype).max:  # else none can be
            refuse_infinite(f"{path}: {name}", each.dequantize(dtype))


# ---- what the model keeps ----


def stand_ins(scaled: Mapping[str, Fp8], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what transformers is given in the place of FP8 matrices, to see where it puts each of them.

    Element [i, j] is number 2 i + j of a short random vector: next to no memory, and what is transposed, permuted,
    merged or cut on its way is another matrix.
    """
    made = {}
    for seed, (name, each) in enumerate(scaled.items()):
        rows, columns = each.values.shape
        drawn = torch.randn(2 * rows + columns, generator=torch.Generator().manual_seed(seed))
        made[name] = drawn.to(dtype).as_strided((rows, columns), (2, 1))
    return made


def places_of(model: torch.nn.Module, given: Mapping[str, Tensor]) -> dict[str, str]:
    """Return which stand-in each parameter of a model is: the names of the matrices, by path of the parameter."""
    by_start = {_start(tensor): name for name, tensor in given.items()}
    places = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = by_start.get(_start(parameter)) if parameter.dim() == 2 else None
        if name is not None and _is_same(parameter, given[name]):
            places[path] = name
    return places


def _start(matrix: Tensor) -> tuple[float, ...]:
    return tuple(matrix[0, :8].tolist()) if matrix.numel() else ()


def _is_same(parameter: Tensor, given: Tensor) -> bool:
    if parameter.data_ptr() == given.data_ptr() and parameter.stride() == given.stride():
        return parameter.shape == given.shape
    return torch.equal(parameter, given.to(parameter.dtype))  # a copy in another precision


def kept_layers(model_class: Any, config: Any, scaled: Mapping[str, Fp8], places: Mapping[str, str]) -> dict[str, str]:
    """Return the linear layers that stay in FP8: the names of their weights, by path.

    They are all that have such weights, but of a feed-forward block all or none.

    Args:
        model_class: The class of transformers.
        config: Its configuration.
        scaled: The FP8 matrices.
        places: Where they are in the model, see `places_of`.
    """
    with torch.device("meta"):
        empty = model_class(copy.deepcopy(config)).eval()
    same = _without_repetitions(empty)
    kept: dict[str, str] = {}
    of_blocks: set[str] = set()

    for found in find_blocks(empty, ranks=(3,)):
        if found.block.refusal or found.weights is None:
            continue
        dequantised = bool(called_otherwise(found))
        for module in same(found.path):
            layers: dict[str, str | None] = {}
            for operand in matrices_of(found.weights).values():
                path, parameter = ".".join(filter(None, (module, operand.layer))), operand.parameter(found.module)
                name = None if dequantised else places.get(f"{path}.weight")
                fits = name is not None and parameter is not None and _fits(scaled[name], parameter, operand.transposed)
                layers[path] = name if fits else None
            if None not in layers.values():
                kept |= {path: name for path, name in layers.items() if name is not None}
            of_blocks |= layers.keys()
    for first, layer in empty.named_modules():
        if type(layer) is not torch.nn.Linear or reads_weight(empty, first):
            continue
        for path in same(first):
            name = places.get(f"{path}.weight")
            if path not in of_blocks and name is not None and _fits(scaled[name], layer.weight):
                kept[path] = name
    return kept


def _fits(scaled: Fp8, parameter: Tensor, is_down: bool = False) -> bool:
    """Whether an op reads an FP8 matrix in the place of a parameter: scales by input are for w_down alone."""
    forms = ("tensor", "row", "column") if is_down else ("tensor", "row")
    return scaled.values.shape == parameter.shape and scaled.form in forms


def _without_repetitions(model: torch.nn.Module) -> Callable[[str], list[str]]:
    """Leave one of the layers in each list of a model that are alike; return what gives the paths of a path in all."""
    alike: dict[str, list[str]] = {}
    for path, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.ModuleList) or any(path.startswith(f"{each}.") for each in alike):
            continue
        groups: dict[str, list[str]] = {}
        for name, child in module.named_children():
            groups.setdefault(repr(child), []).append(name)
        for names in groups.values():
            alike[f"{path}.{names[0]}"] = [f"{path}.{name}" for name in names]
            for name in names[1:]:
                del module._modules[name]

    def paths(path: str) -> list[str]:
        for first, others in alike.items():
            if f"{path}.".startswith(f"{first}."):
                return [f"{other}{path.removeprefix(first)}" for other in others]
        return [path]

    return paths


def put_fp8(
    model: Any, kept: Mapping[str, str], scaled: Mapping[str, Fp8], places: Mapping[str, str]
) -> dict[str, str]:
    """Put matrices in the place of their stand-ins, in FP8 for linear layers; return those of `kept` that are.

    Others have the weight of another module, as an embedding that is stored as the logits' weight alone: dequantised.
    """
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    put = {}
    for place, name in places.items():
        path, parameter, each = place.rpartition(".")[0], model.get_parameter(place), scaled[name]
        if path in kept and owners[id(parameter)] == 1:
            model.set_submodule(path, Fp8Linear(each, model.get_submodule(path).bias))
            put[path] = name
        else:
            parameter.data = each.dequantize(parameter.dtype)
    return put


def notes_on(scaled: Mapping[str, Fp8], kept: Mapping[str, str], dtype: torch.dtype) -> list[str]:
    """Say which of the FP8 matrices stay that if an op reads them, and which are dequantised."""
    names = set(kept.values())
    blocks = [name for name, each in scaled.items() if each.form == "block"]
    others = [name for name, each in scaled.items() if name not in names and name not in blocks]
    what = "matrices stay in FP8, E4M3, where an op of twellc reads them"
    notes = [f"{len(names)} {what}"] if names else []
    if others:
        what = f"{len(others)} other matrices in E4M3" if names else f"all {len(others)} matrices in E4M3"
        notes.append(f"{what} are dequantised to {dtype_name(dtype)}: {first_few(others)}")
    if blocks:
        what = f"{len(blocks)} matrices in E4M3 with scales for blocks of {BLOCK} x {BLOCK}"
        notes.append(f"{what} are dequantised to {dtype_name(dtype)}: {first_few(blocks)}")
    return notes
