"""vLLM's own model classes, with the `twell` ops in them: each is here under its name with `Twell` before it.

A class is made when it is looked up. Its model is vLLM's own but for the layers of blocks and experts, which call the
ops; all else, such as the loading of weights, is inherited.

A block is found where a module of vLLM calls a column parallel layer, an activation and a row parallel layer after each
other, in all of the forward or in a part, as in OPT. The matcher sees these in a stand-in of three layers.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node, Tracer
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.registry import ModelRegistry

from twellc.base.errors import first_line
from twellc.eager.module_blocks import FoundBlock, functions_of
from twellc.vllm import PREFIX, blocks
from twellc.vllm.experts import find_experts
from twellc.vllm.taking import Candidate, take

LOG = logging.getLogger("twellc")
_FIRST = (ColumnParallelLinear, MergedColumnParallelLinear)


class _WithOps(nn.Module):
    """Mixed into a model class of vLLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        take(partial(_candidates, self, vllm_config.model_config.dtype), find_experts(self), vllm_config)


def __getattr__(name: str) -> type:
    """Make the class for a name: vLLM's, with the ops."""
    own = ModelRegistry.models.get(name.removeprefix(PREFIX))
    if own is None or not name.startswith(PREFIX):
        raise AttributeError(name)
    made = type(name, (_WithOps, own.load_model_cls()), {"__module__": __name__})
    globals()[name] = made
    return made


class _Chain(NamedTuple):
    """The names of the children of a module that form a block."""

    up: str
    activation: str
    down: str


def _candidates(model: nn.Module, dtype: torch.dtype) -> Iterator[Candidate]:
    """Yield the blocks of a model, refused ones too."""
    alike: dict[str, list[FoundBlock]] = {}
    for path, module in model.named_modules():
        for chain in _chains(path, module):
            up, activation, down = map(module.get_submodule, chain)
            stand_in = _StandIn(up, activation, down, dtype)
            form = f"{stand_in!r} {activation!r} {[each for each in vars(activation).items() if _is_plain(each[1])]}"
            if form not in alike:
                alike[form] = list(blocks.find(stand_in))
            for found in alike[form]:
                here = replace(found, path=path, block=replace(found.block, module=path))
                layers = partial(dict[str, Any], up=up, down=down)
                yield Candidate(here, layers, partial(_leave_out, module, chain.activation))


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str)


def _leave_out(module: nn.Module, activation: str, _: object) -> None:
    setattr(module, activation, nn.Identity())


class _StandIn(nn.Module):
    """Computes the same as the layers of a block on this rank, for the matcher; its weights are on no device."""

    def __init__(self, up: Any, activation: nn.Module, down: Any, dtype: torch.dtype) -> None:
        super().__init__()
        made: dict[str, Any] = {"device": "meta", "dtype": dtype}
        d_ff = up.output_size_per_partition
        self.up = nn.Linear(up.input_size, d_ff, bias=up.bias is not None, **made)
        self.down = nn.Linear(down.input_size_per_partition, down.output_size, bias=down.bias is not None, **made)
        # The meaning of vLLM's activation, in torch. In a tuple, so that it does not become a submodule.
        self._activation: tuple[Callable[[Tensor], Tensor]] = (getattr(activation, "forward_native", activation),)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self._activation[0](self.up(x)))
        return y


# ---- which layers follow each other ----


class _Leaves(Tracer):
    """Traces a forward without the forwards of the children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _chains(path: str, module: nn.Module) -> list[_Chain]:
    """Return the blocks that a module of vLLM computes."""
    children = dict(module.named_children())
    kinds = {type(child) for child in children.values()}
    if RowParallelLinear not in kinds or kinds.isdisjoint(_FIRST):
        return []
    # Other modules replace the children, as vLLM's code may fuse layers depending on their classes.
    skeleton = copy.copy(module)
    vars(skeleton)["_modules"] = {name: nn.Module() for name in children}
    try:
        nodes = list(_Leaves().trace(skeleton).nodes)
    except Exception as error:  # from code that cannot be traced
        LOG.debug("%s is not traced: %s", path, first_line(error))
        return []
    called = [node.target for node in nodes if node.op == "call_module"]
    chains = [_chain(module, node) for node in nodes if node.op == "call_module"]
    return [chain for chain in chains if chain and all(called.count(name) == 1 for name in chain)]


def _chain(module: nn.Module, last: Node) -> _Chain | None:
    """Return the block that ends with the call of a layer."""
    hidden = _only_input(last)
    z = None if hidden is None else _only_input(hidden)
    first = None if z is None else z.args[0] if z.target is operator.getitem and z.args[1:] == (0,) else z
    if hidden is None or z is None or not isinstance(first, Node) or first.op != "call_module":
        return None
    chain = _Chain(str(first.target), str(hidden.target), str(last.target))
    up, down = (getattr(module, name) for name in (chain.up, chain.down))
    readers = [user for user in first.users if user not in (z, hidden) and user.users]  # such as of a returned bias
    is_block = (
        (type(up) in _FIRST and type(down) is RowParallelLinear and chain.activation in functions_of(module))
        and (not readers and len(z.users) == len(hidden.users) == 1)
        and (not up.gather_output and down.input_is_parallel and not up.skip_bias_add and not down.skip_bias_add)
    )
    return chain if is_block else None


def _only_input(node: Node) -> Node | None:
    """Return the argument of a module's call, if there is only one."""
    (x,) = node.args if len(node.args) == 1 and not node.kwargs else (None,)
    return x if node.op == "call_module" and isinstance(x, Node) else None
