"""Trace a module alone, with made-up inputs."""

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

from twellc.base.changes import Change, Changed
from twellc.base.errors import first_line
from twellc.base.torch_private import without_notes
from twellc.base.transformers_private import attention_of_others
from twellc.eager.training_block import as_relu
from twellc.passes.graph.program import quiet_torch
from twellc.passes.pipeline import PassOptions, Rewritten, Stage, run_until

LOG = logging.getLogger("twellc")
# Leading dimensions for traces: the sizes differ, and torch.export keeps dimensions of such sizes dynamic.
_LEADING = (2, 3)


def trace_alone(
    path: str, module: nn.Module, rank: int, *, training: bool = False, alone: bool = True
) -> Iterator[Rewritten]:
    """Trace a module with x of each width among its weights; yield the traces, with their blocks.

    Args:
        path: The path of the module, for the log.
        module: The module.
        rank: The number of dimensions of x.
        training: Whether to trace in training mode.
        alone: Whether forward takes x alone. Else its other required arguments are None, or tensors like x.
    """
    matrices = [each for each in module.parameters() if each.dim() == 2]
    # The input widths of Linear layers come first.
    widths = [each.shape[-1] for each in matrices] + [each.shape[0] for each in matrices]
    needed = [] if alone else _needed(module)
    for width in dict.fromkeys(widths):
        sizes = (*_LEADING[: rank - 1], width)
        x = torch.zeros(sizes, dtype=matrices[0].dtype, device=matrices[0].device)
        choices: list[dict[str, Any]] = [dict.fromkeys(needed)]
        choices += [{name: torch.zeros_like(x) for name in needed}] * bool(needed)
        for others in choices:
            try:
                with quiet_torch(), torch.no_grad(), without_notes():
                    found = run_until(traced(module, x, others, training), PassOptions(), Stage.FIND)
            except Exception as error:  # torch.export raises any error of the module's code
                LOG.debug("%s is not traced with x of width %d: %s", path, width, first_line(error))
            else:
                yield found


def traced(module: nn.Module, x: Tensor, others: dict[str, Any], training: bool) -> ExportedProgram:
    """Trace a module with x and other arguments by name; all sizes but those of last dimensions are dynamic."""
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


def _traceable(module: nn.Module) -> Changed:
    """Hide the computations of traces from hooks, and let torch itself compute the attention of transformers."""
    changes: list[Change] = []
    for each in module.modules():
        changes += [(each, name, OrderedDict()) for name in ("_forward_hooks", "_forward_pre_hooks")]
        changes += attention_of_others(each)
    return Changed(*changes)


@contextmanager
def in_mode(module: nn.Module, training: bool, *, runs: bool = False) -> Iterator[None]:
    """Put a module in training or eval mode; in training, a blended activation is the ReLU that it becomes.

    At the end undo the mode and all changes by forward, except values of parameters.

    Args:
        module: The module.
        training: Whether in training mode.
        runs: Whether forward computes, and is not only traced: then it may change the values of buffers, too.
    """
    with as_it_was(module, runs=runs), as_relu(module):
        module.train(training)
        yield


@contextmanager
def as_it_was(module: nn.Module, *, runs: bool = True) -> Iterator[None]:
    """Undo changes in a module from running it, such as in buffers, hooks and training mode; see `in_mode`."""
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
    """Return attributes with copies of sets, such as the names of buffers that a state dict leaves out."""
    return {name: each.copy() if type(each) is set else each for name, each in attributes.items()}
