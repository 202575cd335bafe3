"""Trial runs of a module before `twellc.optimize` changes it, for two facts that a trace does not show.

`passes_hidden` tries whether the module's code takes an object in place of the hidden tensor, so that only the neurons
that fire need be computed. `own_gradient` looks for a torch.autograd.Function in it, whose gradient the ops of a
training step would not compute.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from twellc.base.changes import Changed
from twellc.base.errors import first_line
from twellc.base.torch_private import FakeTensorMode
from twellc.eager.hidden import Deferred, Hidden, holds_hidden, real
from twellc.eager.module_blocks import FoundBlock
from twellc.eager.tracing import LOG, as_it_was, in_mode, traced
from twellc.passes.graph.program import quiet_torch


def passes_hidden(found: FoundBlock, *, training: bool) -> bool:
    """Whether the placeholder of the hidden tensor reaches the down projection: some functions take only tensors.

    Args:
        found: A block that is written out, and not refused.
        training: Whether to run in training mode.
    """
    module, (up, down) = found.module, _projections(found)
    received: list[Hidden] = []

    def defer(x: Tensor) -> Hidden:
        dense = functools.partial(type(up).forward, up, x)
        return Hidden(Deferred(dense, lambda _: None, down, found.block.activation, blends=False))

    def receive(hidden: Any) -> Any:
        if isinstance(hidden, Hidden) and hidden.is_whole(down):
            received.append(hidden)
        return type(down).forward(down, real(hidden))

    original = module.forward

    @functools.wraps(original)
    def forward(*arguments: Any, **named: Any) -> Any:
        return real(original(*arguments, **named))

    try:
        with quiet_torch(), torch.no_grad(), _scripts_refuse_hidden(), as_it_was(module, runs=False):
            module.forward, up.forward, down.forward = forward, defer, receive
            traced(module, *found.inputs, training)
    except Exception as error:  # from the module's code
        LOG.debug("%s takes only a tensor between its projections: %s", found.path, first_line(error))
        return False
    return bool(received)


def own_gradient(found: FoundBlock) -> str:
    """Return the name of a torch.autograd.Function that a block in training calls; an empty text without one.

    A trace has its forward alone, so the ops would compute another gradient. Functions of torch itself, such as that of
    checkpoints, are known. In a module with a block that is written out, only code between the two projections matters.
    """
    seen: set[Any] = set()
    waiting: list[Any] = []
    x, others = found.inputs
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.enable_grad(), in_mode(found.module, True):
            if found.is_written_out:
                up, down = _projections(found)
                up.register_forward_hook(lambda _, __, result: seen.add(result.grad_fn))
                down.register_forward_pre_hook(lambda _, given: waiting.append(given[0].grad_fn))
            named = {name: each if each is None else fake.from_tensor(each) for name, each in others.items()}
            result = found.module(fake.from_tensor(x), **named)
            waiting += [] if found.is_written_out else [result.grad_fn]
    except Exception as error:  # from the module's code
        LOG.debug("the trial for gradients other than torch's failed: %s", first_line(error))
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith("torch."):
            return str(function.__qualname__)
    return ""


def _projections(found: FoundBlock) -> list[Any]:
    """Return the up and the down projection of a block that is written out."""
    assert found.weights is not None
    return [found.module._modules[each.layer] for each in (found.weights.w_up, found.weights.w_down)]


def _scripts_refuse_hidden() -> Changed:
    """Let functions of torch.jit.script accept only tensors also in a trace, where they run as Python."""
    kind: Any = torch.jit.ScriptFunction
    call = kind.__call__

    def refusing(function: Any, *arguments: Any, **named: Any) -> Any:
        if holds_hidden([*arguments, *named.values()]):
            raise TypeError(f"{function.name} is a function of torch.jit.script")
        return call(function, *arguments, **named)

    return Changed((kind, "__call__", refusing))
