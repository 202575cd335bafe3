"""Mixtures of experts of transformers: recognise the block that an expert is, and run experts by `twell::experts`.

The experts of a layer are one module with weights of three dimensions. Its forward looks up, by a name in the
configuration, the function that computes them; ours is registered there under the name `twellc`. Experts that the op
runs get a copy of the configuration with this name. The configuration of the model keeps the name of the function that
computes experts where the op does not.

Weights [experts, d_out, d_ff] of down projections get other strides, as those of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from twellc.base.devices import is_sm90
from twellc.base.transformers_private import (
    config_with_experts,
    experts_computed_as,
    experts_of,
    is_forward_of_experts,
    register_experts,
)
from twellc.eager.changes import store
from twellc.eager.mixed import are_changed, forms_of, inner_modules, is_plain, is_taken
from twellc.eager.module_blocks import has_hooks
from twellc.eager.tracing import trace_alone
from twellc.eager.training_block import blended_of
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.linear import Linear
from twellc.passes.report import Layer
from twellc.plugins.experts_op import EXPERTS, exceeded_limit
from twellc.plugins.library import MAX_EXPERTS_OF_TOKEN

NAME = "twellc"
# Devices where the op runs. On a CPU transformers computes 64 tokens in bfloat16 up to five times as fast as the op's
# CPU implementation, so experts there stay as they are, with their strides.
DEVICES = frozenset({"cuda"})
# Tokens of an expert, on average. With more of them nearly every neuron fires for one of them, and a dense grouped
# product is faster. On compute capability 9.0 the op's own is as fast as that of transformers up to 96: on an H200,
# with Nemotron 3 Nano's sizes, torch's two products alone take 1.29, 1.01, 0.90 times as long at 24, 96, 384 tokens.
_MOST_TOKENS, _MOST_TOKENS_SM90 = 24, 96
_TAKEN = "_twellc_experts"


# ---- an expert as a block ----


class _OneExpert(nn.Module):
    """Computes the first of some experts, for the matcher."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        matrices = (each[0].detach() for each in (up_of(experts), experts.down_proj))
        self.up, self.down = (nn.Parameter(each.t() if experts.is_transposed else each, False) for each in matrices)
        self._experts = (experts,)  # in a tuple, so that it does not become a submodule

    def forward(self, x: Tensor) -> Tensor:
        z = nn.functional.linear(x, self.up)
        return nn.functional.linear(hidden_of(self._experts[0], z), self.down)


def up_of(experts: Any) -> nn.Parameter:
    """Return the weights of the first product of experts."""
    up: nn.Parameter = experts.gate_up_proj if experts.has_gate else experts.up_proj
    return up


def hidden_of(experts: Any, z: Tensor) -> Tensor:
    """Return the hidden tensor of experts from their first product [rows, d_ff] or [rows, 2 d_ff]."""
    hidden: Tensor = experts._apply_gate(z) if experts.has_gate else experts.act_fn(z)
    return hidden


def expert_blocks(model: nn.Module) -> Iterator[tuple[str, Any, FfnBlock | str]]:
    """Yield path and module of the experts of each layer, with the block that each is, or the reason why not."""
    alike: dict[str, FfnBlock | str] = {}
    for path, experts in experts_of(model).items():
        form = f"{experts!r} {[(tuple(each.shape), each.dtype) for each in experts.parameters()]}"
        if form not in alike:
            alike[form] = _expert(path, experts)
        block = alike[form]
        yield path, experts, block if isinstance(block, str) else replace(block, module=path)


def _expert(path: str, experts: Any) -> FfnBlock | str:
    for found in trace_alone(path, _OneExpert(experts), 2):
        for block in found.blocks:
            return block.refusal or block
    return "no feed-forward block was found in them"


# ---- for optimize ----


@dataclass(frozen=True)
class FoundExperts:
    """The experts of a layer: their module, and the block that each of them is, perhaps with a refusal."""

    module: Any
    block: FfnBlock


@dataclass(frozen=True)
class TakenExperts:
    """The state of a module of experts that the op computes.

    Attributes:
        layer: The row in a report.
        config: The configuration that the module had, which is that of the model.
        threshold: The threshold of fatrelu, else 0.
        gate, up: The rows of the first weights that are the gate and the up projection: start, stop and step.
        forms: The forms of the inner modules when the op took over.
    """

    layer: Layer
    config: Any
    threshold: float
    gate: tuple[int, int, int] | None
    up: tuple[int, int, int] | None
    forms: Any

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register the function, for a model that another process reads."""
        vars(self).update(state)
        register_experts(NAME, _compute)


def taken_experts(module: nn.Module) -> list[tuple[str, Any, TakenExperts]]:
    """Return the experts that the op computes, each with path and module."""
    held = [(path, each, vars(each).get(_TAKEN)) for path, each in module.named_modules()]
    return [(path, each, taken) for path, each, taken in held if taken is not None]


def find_experts(module: nn.Module, *, training: bool) -> tuple[list[FoundExperts], list[str]]:
    """Return the experts of a model that the op does not run yet, and reasons for modules that are no blocks at all."""
    found, others = [], []
    for path, experts, block in expert_blocks(module):
        if _TAKEN in vars(experts) and not training:
            continue
        reason = _refusal(experts, block, training)
        if isinstance(block, str):
            others.append(f"{path}: {reason}")
        else:
            found.append(FoundExperts(experts, replace(block, refusal=reason, dtype=torch.bfloat16)))
    return found, others


def _refusal(experts: Any, block: FfnBlock | str, training: bool) -> str:
    """Return why the op cannot run experts; an empty text where it can."""
    held = [up_of(experts), experts.down_proj]
    if any(type(each) is not nn.Parameter for each in held):
        return "their weights are quantised, or spread over ranks"
    if isinstance(block, str):
        return block
    if training:
        return "experts run by the op for inference alone"
    if experts.down_proj.device.type not in DEVICES:
        return f"they are on {experts.down_proj.device.type}, not on a GPU: move the model there first"
    if experts.has_bias or any(part is not None and part.bias for part in (block.gate, block.up, block.down)):
        return "experts with biases"
    if getattr(experts, "has_post_expert_norm", False):
        return "a norm follows each expert"
    if experts.is_transposed:
        return "their weights are stored input by input"
    if getattr(experts, "_is_expert_parallel", False):
        return "they are spread over ranks"
    if block.gate is not None and None in (_rows(block.gate), _rows(block.up)):
        return "gate and up projection are no slices of their weights"
    if block.thresholds is not None:
        return "a threshold for each neuron"
    if not experts.down_proj.dtype.is_floating_point or experts.down_proj.dtype.itemsize == 1:
        return f"their weights are {experts.down_proj.dtype}"
    if any(map(has_hooks, experts.modules())) or "forward" in vars(experts) or not is_forward_of_experts(experts):
        return "something looks into their forward, or has replaced it"
    if getattr(experts.config, "sub_configs", None):
        return "their configuration is that of several models"
    return exceeded_limit(len(experts.down_proj), block.d_ff, (block.d_model, block.d_ff, block.d_out))


def take_experts(found: FoundExperts, layer: Layer, undo: ExitStack) -> None:
    """Let the experts of a layer be computed by the op."""
    experts, block = found.module, found.block
    register_experts(NAME, _compute)
    store(experts.down_proj, by_neuron=True, undo=undo)
    forms = forms_of(inner_modules(experts))
    taken = TakenExperts(layer, experts.config, block.threshold, _rows(block.gate), _rows(block.up), forms)
    undo.callback(_set, experts, experts.config, None)
    _set(experts, config_with_experts(experts.config, NAME), taken)


def take_experts_off(module: nn.Module, undo: ExitStack) -> None:
    """Let experts be computed as before, with their usual strides."""
    for _, experts, taken in taken_experts(module):
        undo.callback(_set, experts, experts.config, taken)
        _set(experts, taken.config, None)
        store(experts.down_proj, by_neuron=False, undo=undo)


def _rows(part: Linear | None) -> tuple[int, int, int] | None:
    return None if part is None else part.weight.rows


def _set(experts: Any, config: Any, taken: TakenExperts | None) -> None:
    experts.config = config
    if taken is None:
        vars(experts).pop(_TAKEN, None)
    else:
        vars(experts)[_TAKEN] = taken


# ---- the computation of experts ----


def _compute(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute experts by the op; where it cannot, as transformers would.

    Args:
        experts: Their module.
        x: [tokens, d_model].
        ids: The experts of each token, [tokens, k]; a number outside of the experts means none.
        weights: The factor of each expert, [tokens, k].
    """
    taken: TakenExperts | None = vars(experts).get(_TAKEN)
    if taken is None:  # a configuration names us without `optimize`
        return experts_computed_as(None, experts, x, ids, weights)
    if not _runs(experts, taken, x, ids):
        return experts_computed_as(taken.config, experts, x, ids, weights)
    first, layer = up_of(experts), taken.layer
    gate = first[:, slice(*taken.gate)] if taken.gate else None
    up = first[:, slice(*taken.up)] if taken.up else first
    down = experts.down_proj.mT
    y: Tensor = EXPERTS(x, up, gate, down, ids, weights.float(), layer.activation, taken.threshold)
    return y


def _runs(experts: Any, taken: TakenExperts, x: Tensor, ids: Tensor) -> bool:
    """Whether the op computes the same as transformers."""
    inner = inner_modules(experts)
    held = [up_of(experts), experts.down_proj]
    if x.device.type not in DEVICES or not is_plain(x) or not is_taken(x) or x.dim() != 2:
        return False
    if experts.training or any(each.training for each in inner) or getattr(experts, "_is_expert_parallel", False):
        return False
    per_expert = ids.numel() / experts.num_experts
    if per_expert > _MOST_TOKENS and (per_expert > _MOST_TOKENS_SM90 or not is_sm90(x.device)):
        return False
    if ids.shape[1] > MAX_EXPERTS_OF_TOKEN or ids.dtype not in (torch.int32, torch.int64):
        return False
    if are_changed(inner, taken.forms) or blended_of(inner) is not None:
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, *held)):
        return False
    if any(type(each) is not nn.Parameter or each.dtype != x.dtype or each.device != x.device for each in held):
        return False
    # The kernels load 16 bytes at a time; torch's memory is aligned to that, but a view of it need not be.
    if any(each.storage_offset() * each.element_size() % 16 for each in held):
        return False
    # Replaced parameters, as by load_state_dict(assign=True), have lost the strides.
    return bool(held[0].stride(2) == held[1].stride(1) == 1)
