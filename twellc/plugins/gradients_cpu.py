"""Both directions of a training step in dense torch operations: their meaning, and their CPU implementation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twellc.plugins.block import PLAIN
from twellc.plugins.gradients_call import KEPT_DTYPES, Call, Kept
from twellc.plugins.meaning import hidden_of, math_dtype, output_of


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Kept]:
    """Return y, the L1 term, the tokens for which each neuron is active, and nothing for the backward."""
    _, g, _, h = hidden_of(call.operands, call.options)
    l1 = h.abs().sum() / max(call.tokens, 1)
    counts = (g != 0).sum(tuple(range(g.dim() - 1)), dtype=torch.int32)
    return output_of(h, call.operands), l1, counts, Kept(*(g.new_empty(0, dtype=dtype) for dtype in KEPT_DTYPES))


def backward(dy: Tensor, dl1: Tensor, _: Kept, call: Call, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradients of these names, of x, weights and biases."""
    operands, activation = call.operands, call.options.activation
    wide = math_dtype(dy.dtype)
    z, g, u, h = (None if each is None else each.reshape(-1, call.d_ff) for each in hidden_of(operands, call.options))
    assert z is not None and g is not None and h is not None
    x, rows = operands.x.reshape(-1, operands.x.shape[-1]).to(wide), dy.reshape(-1, dy.shape[-1]).to(wide)
    active, none = g != 0, torch.zeros_like(g)
    dh = rows @ operands.w_down.to(wide).t() + dl1.to(wide) / max(call.tokens, 1) * h.sign()
    dg = dh if u is None else dh * u
    dz = torch.where(active, dg * (2 * z.to(wide)) if activation == "relu2" else dg, none)
    dx = dz @ operands.first[0].to(wide)
    first = "up" if operands.variant is PLAIN else "gate"
    gradients = {"w_down": h.t() @ rows, "b_down": rows.sum(0), f"w_{first}": dz.t() @ x, f"b_{first}": dz.sum(0)}
    if u is not None:
        fires = active & ~(u <= 0) if activation == "drelu" else active
        du = torch.where(fires, dh * g, none)
        dx = dx + du @ operands.w_up.to(wide)
        gradients |= {"w_up": du.t() @ x, "b_up": du.sum(0)}
    gradients["x"] = dx.reshape(operands.x.shape)
    return {name: gradients[name].to(dy.dtype) for name in wanted}
