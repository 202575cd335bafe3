"""The `twell` torch ops, which a rewritten program calls.

    torch.ops.twell.gated_mlp   y = residual + (act(x Wg^T + bg) * (x Wu^T + bu)) Wd + bd
    torch.ops.twell.mlp         y = residual +  act(x Wu^T + bu)                  Wd + bd

Shapes: x [..., d_model], w_gate and w_up [d_ff, d_model], w_down [d_ff, d_out] (neuron-major: the transpose of
`torch.nn.Linear.weight`), biases [d_ff], [d_ff], [d_out], residual and y [..., d_out]. All tensors share one dtype;
biases and residual may be None. Or all weights are float8_e4m3fn, and `w_gate_scale`, `w_up_scale` and `w_down_scale`,
float32, multiply them: docs/weights.md.

The CPU implementation is the semantics: the pre-activation is rounded to the element type, everything after it is
accumulated in float32 (or in float64 for float64 input) and rounded once. A neuron whose activation is 0 contributes
exactly 0, also where the dense block would compute 0 * inf = NaN; a NaN in x reaches y. The CUDA implementation calls
the plugin library, so it takes bfloat16 and float16 only.

`activation` is one of relu, relu2 (relu squared), fatrelu (z where z > threshold, else 0) and, for gated blocks, drelu
(relu of both gate and up). fatrelu may have `thresholds`, float32 [d_ff], one for each neuron, in the place of the one
threshold (JumpReLU); z is compared in float32, and a threshold below 0, or NaN, counts as 0. `compression` is the TwELL
compression factor; it changes speed and memory, never results.
`norm` and `eps` normalise each row of x first, as in `twell.linear` (`linear_op.py`), with `norm_weight` and
`norm_bias` [d_model]; the residual is not normalised.
`hot`, 0 to d_ff, is a hint about speed, where the neurons that are active most often come first: calls with many
tokens compute the first `hot` neurons as a dense product. Results stay the same within rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.torch_private import AutoDispatchBelowAutograd, OpOverload
from twellc.plugins import library
from twellc.plugins.block import (
    GATED,
    PLAIN,
    BlockOptions,
    Operands,
    Variant,
    call_of,
    field_of,
    problem_of,
    schema_of,
    set_scales,
)
from twellc.plugins.gradients_modes import is_transformed
from twellc.plugins.gradients_ops import register_gradients
from twellc.plugins.kernel_calls import Given, KernelCall, Prepared, Reading, as_read, check_on_gpu, check_problem
from twellc.plugins.meaning import (
    check_call,
    dequantize,
    hidden_of,
    output_of,
    repeated_scales,
    scale_kinds,
    widths_of,
    without_norm,
)
from twellc.plugins.torch_library import define


def _compute(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Compute the block with dense torch operations: the meaning of the op, and its CPU implementation."""
    check_call(operands, options)
    operands = dequantize(operands)
    return output_of(hidden_of(operands, options)[-1], operands)


def _prepare(variant: Variant, given: Given) -> Callable[[Given], list[Tensor]]:
    """Check a call, and return what computes it and those alike on the current stream of its GPU."""
    operands, options = call_of(variant, (), given)
    named = operands.named()
    check_on_gpu(named)
    check_call(operands, options)
    x, widths, kinds = operands.x, widths_of(operands), scale_kinds(operands)
    tokens = x.numel() // widths["d_model"]
    problem = problem_of(variant, options, dtype_name(x.dtype), tokens=tokens, **widths)
    reading = Reading.of(named, {name: field_of(variant, name) for name in named})
    if kinds is not None:
        set_scales(problem, *kinds)
        repeated = {name: partial(_repeated, shape) for name, shape in repeated_scales(operands).items()}
        if repeated:
            reading = replace(reading, copied={**reading.copied, **repeated})
    with torch.cuda.device(x.device):
        check_problem(problem)
        workspace_bytes = library.load().twell_workspace_bytes(problem)
    # NOTE: with a norm, kernels read weights before earlier launches have ended: these must not be fresh copies.
    fixed = tuple(name for name in named if name not in ("x", "residual")) if options.norm != "none" else ()
    normalises = partial(_launch_without_norm, variant)
    if not reading.copied.keys().isdisjoint(fixed):
        return normalises
    results = (((*x.shape[:-1], widths["d_out"]), x.dtype),)
    function = library.load().twell_mlp
    return KernelCall(function, problem, workspace_bytes, library.Tensors, reading, results, fixed, normalises)


def _repeated(shape: tuple[int, int], scale: Tensor) -> Tensor:
    return as_read(scale.expand(shape))


def _launch_without_norm(variant: Variant, given: Given) -> list[Tensor]:
    """Run the block on norm(x), which torch computes."""
    operands, options = without_norm(*call_of(variant, (), given))
    return _run_kernels(variant, {**operands.named(), **options.named()})


_PREPARED = {variant: Prepared(partial(_prepare, variant)) for variant in (GATED, PLAIN)}


def _run_kernels(variant: Variant, given: Given) -> list[Tensor]:
    return _PREPARED[variant].of(given)(given)


def _infer(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    check_call(operands, options)
    return operands.x.new_empty((*operands.x.shape[:-1], operands.w_down.shape[1]))


def _implementation(variant: Variant, run: Callable[[Operands[Tensor], BlockOptions], Tensor]) -> Callable[..., Tensor]:
    """Return the function that torch calls with the arguments of an op."""

    def call(*arguments: Any, **named: Any) -> Tensor:
        return run(*call_of(variant, arguments, named))

    return call


def _on_gpu(variant: Variant) -> Callable[..., Tensor]:
    """Return the same for a GPU: it runs the block through the C API."""
    names = variant.arguments

    def call(*arguments: Any, **named: Any) -> Tensor:
        return _run_kernels(variant, {**dict(zip(names, arguments, strict=False)), **named})[0]

    return call


OPS: dict[Variant, OpOverload] = {
    variant: define(
        schema_of(variant), _implementation(variant, _compute), _on_gpu(variant), _implementation(variant, _infer)
    )
    for variant in (GATED, PLAIN)
}
GATED_MLP, MLP = OPS.values()
for _variant, _op in OPS.items():
    register_gradients(_op, _variant)
VARIANT_OF = {op: variant for variant, op in OPS.items()}


def run_block(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Call the op of a block."""
    op = OPS[operands.variant]
    arguments, named = (*operands.arguments(), *options.arguments()), operands.by_name()
    records = torch.is_grad_enabled() and any(each.requires_grad for each in operands.named().values())
    if records or torch.compiler.is_compiling() or is_transformed():
        found: Tensor = op(*arguments, **named)
    else:  # autograd's part of the op does no more than this, but for another way through torch's dispatcher
        with AutoDispatchBelowAutograd():
            found = op(*arguments, **named)
    return found
