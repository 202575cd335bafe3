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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.torch_private import OpOverload
from twellc.plugins import library
from twellc.plugins.block import (
    GATED,
    PLAIN,
    BlockOptions,
    Operands,
    Variant,
    call_of,
    problem_of,
    schema_of,
    set_scales,
    tensors_of,
)
from twellc.plugins.gradients_ops import register_gradients
from twellc.plugins.meaning import (
    as_read,
    check_call,
    check_on_gpu,
    check_problem,
    dequantize,
    hidden_of,
    launch,
    output_of,
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


@dataclass(frozen=True)
class _Prepared:
    """Facts about calls with the same options, shapes and types: working them out takes longer than a launch.

    Attributes:
        problem: The problem for the C API.
        workspace_bytes: The size of the workspace.
        expanded: The scales of gate and up that are a single number, and must be repeated for each neuron.
    """

    problem: library.Problem
    workspace_bytes: int
    expanded: tuple[str, ...]


_MOST_PREPARED = 4096
_PREPARED: dict[tuple[Any, ...], _Prepared] = {}


def _prepare(operands: Operands[Tensor], options: BlockOptions) -> _Prepared:
    """Check a call for the current GPU."""
    check_call(operands, options)
    x, widths, kinds = operands.x, widths_of(operands), scale_kinds(operands)
    tokens = x.numel() // widths["d_model"]
    problem = problem_of(operands.variant, options, dtype_name(x.dtype), tokens=tokens, **widths)
    if kinds is not None:
        set_scales(problem, *kinds)
    check_problem(problem)
    single = (name for name, each in operands.scales().items() if not each.dim() and name != "w_down_scale")
    expanded = tuple(single) if kinds is not None and kinds[0] == "row" else ()
    return _Prepared(problem, library.load().twell_workspace_bytes(problem), expanded)


def _launch(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Run the block on the GPU through the C API, on the current stream."""
    x, named = operands.x, operands.named()
    check_on_gpu(named)
    with torch.cuda.device(x.device):
        key = (options, x.device, *((name, each.shape, each.dtype) for name, each in named.items()))
        prepared = _PREPARED.get(key)
        if prepared is None:
            prepared = _prepare(operands, options)
            if len(_PREPARED) >= _MOST_PREPARED:
                _PREPARED.clear()
            _PREPARED[key] = prepared
        given = named | {name: named[name].expand(len(operands.w_up), 1) for name in prepared.expanded}
        read = {name: as_read(each) for name, each in given.items()}  # kept alive until the kernels are launched
        copies = {name for name, each in given.items() if read[name] is not each}
        # NOTE: with a norm, kernels read weights before earlier launches have ended: these must not be fresh copies.
        if options.norm != "none" and copies - {"x", "residual"}:
            return _launch(*without_norm(operands, options))
        y = x.new_empty((*x.shape[:-1], operands.w_down.shape[1]))
        pointers = Operands(**{name: each.data_ptr() for name, each in read.items()})
        tensors = tensors_of(pointers, y.data_ptr())
        launch(library.load().twell_mlp, prepared.workspace_bytes, prepared.problem, tensors)
    return y


def _infer(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    check_call(operands, options)
    return operands.x.new_empty((*operands.x.shape[:-1], operands.w_down.shape[1]))


def _implementation(variant: Variant, run: Callable[[Operands[Tensor], BlockOptions], Tensor]) -> Callable[..., Tensor]:
    """Return the function that torch calls with the arguments of an op."""

    def call(*arguments: Any, **named: Any) -> Tensor:
        return run(*call_of(variant, arguments, named))

    return call


OPS: dict[Variant, OpOverload] = {
    variant: define(schema_of(variant), *(_implementation(variant, run) for run in (_compute, _launch, _infer)))
    for variant in (GATED, PLAIN)
}
GATED_MLP, MLP = OPS.values()
for _variant, _op in OPS.items():
    register_gradients(_op, _variant)
VARIANT_OF = {op: variant for variant, op in OPS.items()}


def run_block(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Call the op of a block."""
    y: Tensor = OPS[operands.variant](*operands.arguments(), *options.arguments(), **operands.by_name())
    return y
