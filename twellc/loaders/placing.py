"""Where quantised matrices of a checkpoint go in the model that transformers makes, and which of them stay in FP8."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.errors import first_few
from twellc.eager.fp8_linear import Fp8Linear
from twellc.eager.module_blocks import called_otherwise, find_blocks, matrices_of, reads_weight
from twellc.loaders.method import Matrix
from twellc.plugins.fp8 import LARGEST, Fp8, refuse_infinite

# The forms of scales that ops read, of a matrix [out, in].
_FORMS = ("tensor", "row", "block")
_FORMS_OF_DOWN = (*_FORMS, "column")


def refuse_overflow(path: Path, matrices: Mapping[str, Matrix], dtype: torch.dtype) -> None:
    """Fail for matrices that overflow float16, if a model is made in that."""
    for name, each in matrices.items() if dtype == torch.float16 else ():
        fits = isinstance(each, Fp8) and float(each.scale.max()) * LARGEST <= torch.finfo(dtype).max
        if not fits:
            refuse_infinite(f"{path}: {name}", each.dequantize(dtype))


def stand_ins(matrices: Mapping[str, Matrix], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what transformers is given in the place of matrices, to see where it puts each of them.

    Element [i, j] is number 2 i + j of a short random vector: next to no memory, and a matrix that is
    transposed, permuted, merged or cut on its way is another one.
    """
    made = {}
    for seed, (name, each) in enumerate(matrices.items()):
        rows, columns = each.shape
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


def kept_layers(
    model_class: Any, config: Any, matrices: Mapping[str, Matrix], places: Mapping[str, str]
) -> dict[str, str]:
    """Return the linear layers that stay in FP8: the names of their weights, by path.

    They are all that have such weights, but of a feed-forward block all or none.

    Args:
        model_class: The class of transformers.
        config: Its configuration.
        matrices: The quantised matrices.
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
                name = "" if dequantised else places.get(f"{path}.weight", "")
                forms = _FORMS_OF_DOWN if operand.transposed else _FORMS
                layers[path] = name if _fits(matrices.get(name), parameter, forms) else None
            if None not in layers.values():
                kept |= {path: name for path, name in layers.items() if name is not None}
            of_blocks |= layers.keys()
    for first, layer in empty.named_modules():
        if type(layer) is not torch.nn.Linear or reads_weight(empty, first):
            continue
        for path in same(first):
            name = places.get(f"{path}.weight", "")
            if path not in of_blocks and _fits(matrices.get(name), layer.weight, _FORMS):
                kept[path] = name
    return kept


def _fits(matrix: Matrix | None, parameter: Tensor | None, forms: Collection[str]) -> bool:
    """Whether an op reads a matrix in the place of a parameter, with scales of these forms."""
    return (
        isinstance(matrix, Fp8) and parameter is not None and matrix.shape == parameter.shape and matrix.form in forms
    )


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


def put(
    model: Any, kept: Mapping[str, str], matrices: Mapping[str, Matrix], places: Mapping[str, str]
) -> dict[str, str]:
    """Put matrices in the place of their stand-ins, in FP8 for linear layers; return those of `kept` that are.

    Others have the weight of another module, as an embedding that is stored as the logits' weight alone: dequantised.
    """
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    put = {}
    for place, name in places.items():
        path, parameter, each = place.rpartition(".")[0], model.get_parameter(place), matrices[name]
        if path in kept and isinstance(each, Fp8) and owners[id(parameter)] == 1:
            model.set_submodule(path, Fp8Linear(each, model.get_submodule(path).bias))
            put[path] = name
        else:
            parameter.data = each.dequantize(parameter.dtype)
    return put


def notes_on(matrices: Mapping[str, Matrix], kept: Mapping[str, str], dtype: torch.dtype) -> list[str]:
    """Say how many of the matrices stay in FP8 if an op reads them, and which are dequantised."""
    names, left = set(kept.values()), dict[str, list[str]]()
    for name, each in matrices.items():
        if name not in names:
            left.setdefault(each.kind, []).append(name)
    notes = [f"{len(names)} matrices stay in FP8, E4M3, where an op of twellc reads them"] if names else []
    for kind, others in left.items():
        notes.append(f"{len(others)} matrices in {kind} are dequantised to {dtype_name(dtype)}: {first_few(others)}")
    return notes
