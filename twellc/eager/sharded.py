"""Feed-forward blocks that transformers has sharded among ranks, as `tp_plan="auto"` does.

    gate, up [d_ff / ranks, d_model]   «colwise»: rows are shared      down [d_out, d_ff / ranks]   «rowwise»: columns

Each weight is then a DTensor, and the forward of each Linear is wrapped, so that down adds the results of all ranks. A
block is as before, with this rank's neurons, and a sum over the ranks behind it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

_WRAPPER = "install_forward.<locals>.tp_forward"
_COLUMNS, _ROWS = "ColwiseParallel", "RowwiseParallel"


def is_sharded(parameter: Tensor) -> bool:
    """Whether a parameter is spread over ranks."""
    module = sys.modules.get("torch.distributed.tensor")  # loaded where something is sharded
    return module is not None and isinstance(parameter, module.DTensor)


def local_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter; the parameter itself if it is not spread."""
    if not is_sharded(parameter):
        return parameter
    with torch.no_grad():  # yields the tensor itself, not one that records gradients
        local: Tensor = parameter.to_local()  # type: ignore[attr-defined]
    return local


def local_twin(module: nn.Module) -> nn.Module | None:
    """Return a module that computes this rank's part of a sharded one; None for an unknown way of sharding.

    It shares the tensors. Its results are to be added over the ranks, but for the bias of the last projection.
    """
    if not any(map(is_sharded, module.parameters())) or not _is_known(module):
        return None
    return _twin(module)


def _is_known(module: nn.Module) -> bool:
    """Whether every sharded parameter belongs to a Linear that is sharded by rows or by columns."""
    for each in module.modules():
        own = {name: parameter for name, parameter in each.named_parameters(recurse=False) if is_sharded(parameter)}
        style = _style_of(each)
        if not own and style is None:
            continue
        placements = {name: parameter.placements for name, parameter in own.items()}  # type: ignore[attr-defined]
        if style == _COLUMNS:
            known = all(_is_split(each, 0) for each in placements.values())
        elif style == _ROWS:
            known = _is_split(placements.get("weight", ()), 1) and not any(
                placement.is_shard() for placement in placements.get("bias", ())
            )
        else:
            known = False
        if not known or type(each) is not nn.Linear:
            return False
    return True


def _is_split(placements: Any, dim: int) -> bool:
    return len(placements) == 1 and placements[0].is_shard(dim)


def _style_of(module: nn.Module) -> str | None:
    """Return the name of the style by which transformers has wrapped a module's forward; None if it has not."""
    forward = vars(module).get("forward")
    if forward is None or not getattr(forward, "__qualname__", "").endswith(_WRAPPER):
        return None
    style = inspect.getclosurevars(forward).nonlocals.get("self")
    name, layout = type(style).__name__, getattr(style, "output_layouts", None)
    if layout is None or not getattr(style, "use_local_output", False):
        return ""
    # A column-wise result stays split, and a row-wise one is added for all ranks.
    expected = layout.is_shard(-1) if name == _COLUMNS else layout.is_replicate()
    return name if expected else ""


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    state = vars(twin)
    if _style_of(module) is not None:
        del state["forward"]
    state["_parameters"] = {
        name: None if parameter is None else nn.Parameter(local_of(parameter), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    state["_modules"] = {name: None if child is None else _twin(child) for name, child in module._modules.items()}
    return twin


def sum_over_ranks(y: Tensor, w_down: Tensor) -> Tensor:
    """Add the parts of y that the ranks have computed by their parts of w_down."""
    from twellc.base.torch_private import collectives  # torch.distributed may be missing

    group = w_down.device_mesh.get_group()  # type: ignore[attr-defined]
    total: Tensor = collectives.wait_tensor(collectives.all_reduce(y, "sum", group))
    return total
