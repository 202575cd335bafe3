"""Trace a module alone, with inputs that are made up."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from twellc.base.errors import first_line
from twellc.base.transformers_private import attention_of_others
from twellc.eager.training_block import as_relu
from twellc.passes.graph.program import quiet_torch
from twellc.passes.pipeline import PassOptions, Rewritten, Stage, run_until

LOG = logging.getLogger("twellc")
# Leading dimensions to trace with: sizes that differ, and from which torch.export keeps a dimension dynamic.
_LEADING = (2, 3)


def trace_alone(
    path: str, module: nn.Module, rank: int, *, training: bool = False, alone: bool = True
) -> Iterator[Rewritten]:
    """Trace a module with x of each of the widths of its weights; yield what it computes, with its blocks.

    Args:
        path: Its path, for the log.
        module: The module.
        rank: The number of dimensions of x.
        training: Whether in training mode.
        alone: Whether x is all that its forward takes. Else other arguments that it needs are None, or as x is.
    """
    matrices = [each for each in module.parameters() if each.dim() == 2]
    # The widths of Linear's inputs first.
    widths = [each.shape[-1] for each in matrices] + [each.shape[0] for each in matrices]
    needed = [] if alone else _needed(module)
    for width in dict.fromkeys(widths):
        sizes = (*_LEADING[: rank - 1], width)
        x = torch.zeros(sizes, dtype=matrices[0].dtype, device=matrices[0].device)
        choices: list[dict[str, Any]] = [dict.fromkeys(needed)]
        choices += [{name: torch.zeros_like(x) for name in needed}] * bool(needed)
        for others in choices:
            try:
                with quiet_torch(), torch.no_grad():
                    found = run_until(traced(module, x, others, training), PassOptions(), Stage.FIND)
            except Exception as error:  # torch.export raises what the module's code raises
                LOG.debug("%s is not traced with x of width %d: %s", path, width, first_line(error))
            else:
                yield found


def traced(module: nn.Module, x: Tensor, others: dict[str, Any], training: bool) -> ExportedProgram:
    """Trace a module with x and other arguments by name; sizes but those of the last dimensions are dynamic."""
    shapes: Any = ShapesCollection()  # type: ignore[no-untyped-call]
    for each in (x, *others.values()):
        if each is not None:
            shapes[each] = dict.fromkeys(range(each.dim() - 1), Dim.DYNAMIC)
    with in_mode(module, training), _traceable(module):
        return torch.export.export(module, (x,), others, dynamic_shapes=shapes, strict=False)


def _needed(module: nn.Module) -> list[str]:
    """Return the required arguments of a module's forward besides the first."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = list(inspect.signature(module.forward).parameters.values())[1:]
    return [each.name for each in taken if each.default is each.empty and each.kind in kinds]


@contextmanager
def _traceable(module: nn.Module) -> Iterator[None]:
    """Hide what is computed to find blocks from hooks, and let torch itself compute the attention of transformers."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    before: list[tuple[Any, str, Any]] = [
        (each, name, getattr(each, name)) for each in module.modules() for name in names
    ]
    after: list[Any] = [OrderedDict() for _ in before]
    for each in module.modules():
        for config, name, kind, ours in attention_of_others(each):
            before.append((config, name, kind))
            after.append(ours)
    try:
        for (owner, name, _), value in zip(before, after, strict=True):
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def in_mode(module: nn.Module, training: bool, *, runs: bool = False) -> Iterator[None]:
    """Put a module in training or eval mode; in training, a blended activation is what it becomes: a ReLU.

    Then it is what it was, whatever its forward has changed in it but values of parameters.

    Args:
        module: The module.
        training: Whether in training mode.
        runs: Whether its forward computes, and is not only traced: then it may change what is in buffers, too.
    """
    with as_it_was(module, runs=runs), as_relu(module):
        module.train(training)
        yield


@contextmanager
def as_it_was(module: nn.Module, *, runs: bool = True) -> Iterator[None]:
    """Put back what running a module changes in it, such as buffers, hooks and training mode; see `in_mode`."""
    held = [(vars(each), _with_own_sets(vars(each))) for each in module.modules()]
    held += [(each, each.copy()) for _, before in held for each in before.values() if type(each) in (dict, OrderedDict)]
    buffers = [(each, each.clone()) for each in module.buffers() if not each.is_inference()] if runs else []
    try:
        yield
    finally:
        for now, before in held:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for buffer, values in buffers:
            buffer.data.copy_(values)


def _with_own_sets(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes with copies of sets, such as that of the names of buffers that a state dict leaves out."""
    return {name: each.copy() if type(each) is set else each for name, each in attributes.items()}
