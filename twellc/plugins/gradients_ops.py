"""Two torch ops for training, and the gradients of `gated_mlp` and `mlp`, which use them.

    torch.ops.twell.train_forward    y, the L1 term, how often each neuron fires, and tensors for the backward
    torch.ops.twell.train_backward   the gradients of x, weights and biases

The L1 term is the sum over the neurons of |h|, mean over the tokens, in float32. With dh = dy Wd[n] + (dl1 / tokens)
sign(h), the gradients of a token and one of its active neurons n are

    gated   du = dh g    dg = dh u    dz = dg act'(z)        plain   dz = dh act'(z)

and those of x, weights and biases follow as in a dense block (the equations: «Sparser, Faster, Lighter Transformer
Language Models», arXiv 2603.23198). act' is 1, or 2 z for relu2; for dReLU, du is 0 also where u is 0. An inactive
neuron has no gradients, but dense products, on a CPU and of hot neurons, give NaN where x or dy is not finite. Rounding
passes gradients on unchanged. There are no second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from twellc.base.torch_private import AutoDispatchBelowAutograd, OpOverload
from twellc.plugins import gradients_cpu, gradients_cuda
from twellc.plugins.block import BlockOptions, Operands, Variant
from twellc.plugins.block import call_of as block_call_of
from twellc.plugins.gradients_call import KEPT_DTYPES, Call, Gradients, Kept, Step, call_of, schemas
from twellc.plugins.gradients_modes import NO_SECOND, refuse_forward_mode, refuse_torch_func, register_autocast
from twellc.plugins.meaning import check_call, math_dtype, widths_of, without_norm
from twellc.plugins.torch_library import LIBRARY, define

_NUM_KEPT = len(Kept._fields)
# The tensors that may have gradients, in the order of the ops' arguments.
_NAMES = (*Gradients._fields, "residual")


def _check(call: Call) -> None:
    check_call(call.operands, call.options)
    step, d_ff = call.step, widths_of(call.operands)["d_ff"]
    if not 0 <= step.hot <= d_ff or (step.hot % 8 != 0 and step.hot != d_ff):
        raise ValueError(f"twell: hot must be d_ff = {d_ff} or a multiple of 8 below it, got {step.hot}")
    if step.pairs < 0:
        raise ValueError(f"twell: pairs must be at least 0, got {step.pairs}")
    if step.order is not None and (step.order.dtype != torch.int32 or tuple(step.order.shape) != (d_ff,)):
        raise ValueError(f"twell: order must be int32 [{d_ff}], got {step.order.dtype} {tuple(step.order.shape)}")


# ---- the ops: `cpu`, `cuda` and the two functions below have the same two directions ----


def _infer_forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Kept]:
    x, widths = call.operands.x, widths_of(call.operands)
    shapes = [(0,)] * _NUM_KEPT if x.device.type == "cpu" else gradients_cuda.shapes_kept(call)
    kept = (x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, KEPT_DTYPES, strict=True))
    y, l1 = x.new_empty((*x.shape[:-1], widths["d_out"])), x.new_empty((), dtype=math_dtype(x.dtype))
    return y, l1, x.new_empty(widths["d_ff"], dtype=torch.int32), Kept(*kept)


def _infer_backward(dy: Tensor, _: Tensor, __: Kept, call: Call, wanted: Sequence[str]) -> dict[str, Tensor]:
    given = call.operands.named()
    return {name: dy.new_empty(given[name].shape) for name in wanted}


def _forward_by(run: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        call = call_of(arguments)
        _check(call)
        y, l1, counts, kept = run(call)
        return y, l1, counts, *kept

    return forward


def _backward_by(run: Callable[..., Any]) -> Callable[..., Any]:
    def backward(dy: Tensor, dl1: Tensor, *others: Any) -> Gradients:
        kept, (for_x, for_weights, *arguments) = Kept(*others[:_NUM_KEPT]), others[_NUM_KEPT:]
        call = call_of(arguments)
        names = (name for name in call.operands.named() if name != "residual")
        wanted = [name for name in names if (for_x if name == "x" else for_weights)]
        found = run(dy, dl1, kept, call, wanted)
        return Gradients(*(found[name] if name in found else dy.new_empty(0) for name in Gradients._fields))

    return backward


_FORWARD, _BACKWARD = schemas()
TRAIN_FORWARD: OpOverload = define(
    _FORWARD,
    *(_forward_by(run) for run in (gradients_cpu.forward, gradients_cuda.forward, _infer_forward)),
    by_device=True,
)
TRAIN_BACKWARD: OpOverload = define(
    _BACKWARD,
    *(_backward_by(run) for run in (gradients_cpu.backward, gradients_cuda.backward, _infer_backward)),
    by_device=True,
)


# ---- differentiable functions ----


class _TrainStep(torch.autograd.Function):
    """`train_forward` with `train_backward` as its gradient.

    It is written out, as the function of `torch.library.register_autograd` takes the host a millisecond a block.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        with AutoDispatchBelowAutograd():
            y, l1, *others = TRAIN_FORWARD(*inputs)
        ctx.save_for_backward(*others[1:], *(each if isinstance(each, Tensor) else None for each in inputs))
        ctx.arguments = [None if isinstance(each, Tensor) else each for each in inputs]
        ctx.is_done = False  # for `TrainingState`
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*others)
        return y, l1, *others

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dl1: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.is_done = True
        saved, needed = ctx.saved_tensors, dict(zip(_NAMES, ctx.needs_input_grad, strict=False))
        kept, tensors = saved[:_NUM_KEPT], saved[_NUM_KEPT:]
        arguments = [other if tensor is None else tensor for tensor, other in zip(tensors, ctx.arguments, strict=True)]
        if dy is None and dl1 is None:
            return (None,) * len(arguments)
        operands = call_of(arguments).operands
        if dy is None:
            dy = operands.x.new_zeros((*operands.x.shape[:-1], operands.w_down.shape[1]))
        if dl1 is None:
            dl1 = dy.new_zeros((), dtype=math_dtype(dy.dtype))
        for_weights = any(needed[name] for name in Gradients._fields[1:])
        found = Gradients(*TRAIN_BACKWARD(dy, dl1, *kept, needed["x"], for_weights, *arguments))._asdict()
        found["residual"] = dy
        gradients = (found[name] if needed[name] else None for name in _NAMES)
        return *gradients, *(None for _ in range(len(arguments) - len(_NAMES)))


def _refuse(ctx: Any, *_: Any) -> None:
    raise NotImplementedError(NO_SECOND)


def _forward_with_gradients(*inputs: Any) -> tuple[Tensor, ...]:
    refuse_forward_mode(inputs)
    if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
        refuse_torch_func()
        found: tuple[Tensor, ...] = _TrainStep.apply(*inputs)
    else:
        with AutoDispatchBelowAutograd():
            found = TRAIN_FORWARD(*inputs)
    return found


LIBRARY.impl("train_forward", _forward_with_gradients, "Autograd")
torch.library.register_autograd(TRAIN_BACKWARD, _refuse, lib=LIBRARY)
register_autocast(LIBRARY, TRAIN_FORWARD)


def register_gradients(op: OpOverload, variant: Variant) -> None:
    """Make an op of a block differentiable: where autograd records, `train_forward` computes it."""

    def call(*arguments: Any, **named: Any) -> Tensor:
        given = (*arguments, *named.values())
        refuse_forward_mode(given)
        if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in given):
            operands, options = block_call_of(variant, arguments, named)
            of = "FP8 weights" if operands.scales() else "a threshold for each neuron"
            if operands.scales() or operands.thresholds is not None:
                raise NotImplementedError(f"twell: a block with {of} has no gradients: use torch.no_grad()")
            operands, options = without_norm(operands, options)
            hot = options.hot if options.hot == operands.w_up.shape[0] else options.hot // 8 * 8
            return train_forward(operands, options, Step(hot=hot))[0]
        with AutoDispatchBelowAutograd():
            y: Tensor = op(*arguments, **named)
        return y

    LIBRARY.impl(variant.op, call, "Autograd")
    register_autocast(LIBRARY, op)


def train_forward(operands: Operands[Tensor], options: BlockOptions, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Return y [..., d_out], the L1 term, and the tokens for which each neuron is active, int32 [d_ff].

    y and the L1 term are differentiable.
    """
    y, l1, counts, *_ = TRAIN_FORWARD(*Call(operands=operands, options=options, step=step).arguments())
    return y, l1, counts
