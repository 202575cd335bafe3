"""Switch Transformers: the experts of a layer as one module, which torch.export can trace.

transformers keeps a module for each expert, and calls in a loop those that have tokens. Here the weights of a layer's
experts are two parameters, and its tokens are sorted by expert, in the form that `passes/match/experts.py` reads. The
router stays as it is; so the tokens that it drops, where an expert has no room for them, get 0.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from twellc.base.errors import UserError
from twellc.base.transformers_private import activation_classes, grouped_product_op, layers_with_loops


class StackedExperts(nn.Module):
    """Computes what the experts of a layer do, each of which is `wo(act(wi(x)))`.

    Attributes:
        up_proj: [experts, d_ff, d_model].
        down_proj: [experts, d_model, d_ff].
    """

    def __init__(self, experts: list[Any]) -> None:
        """Take the weights of experts over, which have none afterwards."""
        super().__init__()
        self.up_proj, self.down_proj = _stacked(experts, "wi"), _stacked(experts, "wo")
        self.act = experts[0].act

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute y [tokens, d_model].

        Args:
            x: [tokens, d_model].
            chosen: int64 [tokens, 1, experts], 1 for the expert of a token; all 0 for a token that is dropped.
            weights: The factor of what a token's expert gives, [tokens, 1].
        """
        count, product = len(self.up_proj), grouped_product_op()
        ids = (chosen * torch.arange(-count, 0, device=x.device)).sum(-1) + count  # `count` of tokens that are dropped
        numbers, order = ids.reshape(-1).sort()
        dropped = (numbers >= count).unsqueeze(-1)
        ends = torch.histc(numbers.float(), count, 0, count - 1).cumsum(0, dtype=torch.int32)
        hidden = self.act(product(x[order // 1], self.up_proj.mT, ends))  # a token has 1 expert
        rows = product(hidden, self.down_proj.mT, ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0), device=x.device)
        y: Tensor = rows.masked_fill(dropped, 0.0)[back].view(-1, 1, x.shape[1]).sum(1)
        return y.to(x.dtype)


def _stacked(experts: list[Any], name: str) -> nn.Parameter:
    layers = [getattr(each, name) for each in experts]
    stack = torch.stack([each.weight.detach() for each in layers])
    for each in layers:
        del each.weight
    return nn.Parameter(stack, requires_grad=False)


def stack_experts(name: str, model: nn.Module) -> None:
    """Replace the experts of a model in eval mode that run in a loop, if they have ReLU or squared ReLU.

    Args:
        name: What to call the model in the message.
        model: A model.

    Raises:
        UserError: It is NLLB-MoE, of which transformers computes something else than its router says.
    """
    switch, nllb = layers_with_loops(model)
    if nllb:
        what = "transformers (5.3 to 5.24) computes NLLB-MoE by its experts 0 and 1 alone, whatever the router says"
        raise UserError(name, what, fix="Take a dense NLLB, such as M2M100ForConditionalGeneration reads.")
    known = tuple(type(activation_classes()[activation]) for activation in ("relu", "relu2"))
    for layer in switch:
        experts = list(layer.experts.values())
        if isinstance(experts[0].act, known):
            classifier = layer.router.classifier.to(layer.router.dtype)
            classifier.to = lambda _, done=classifier: done  # each call brings it to that: torch.export cannot trace it
            layer.experts = StackedExperts(experts)


def with_stacked_experts(name: str, model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its tensors, but for such experts; itself if none run in a loop."""
    if not any(layers_with_loops(model)):
        return model
    copied = copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})
    stack_experts(name, copied)
    return copied
