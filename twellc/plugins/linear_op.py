"""The torch op of a linear layer with its norm before it and its residual behind it.

    torch.ops.twell.linear   y = residual + norm(x) W^T + b

Shapes: x [..., in], weight [out, in] (`torch.nn.Linear`'s), bias [out], norm_weight and norm_bias [in], residual and y
[..., out]. `norm` is one of

    none    x
    rms     x / sqrt(mean(x^2) + eps) * norm_weight
    layer   (x - mean(x)) / sqrt(var(x) + eps) * norm_weight + norm_bias

over the last dimension, with ones and zeros where these are None. `splits` are the widths of the outputs: there is one
output for each piece of the weight's rows; with more than one there can be no residual. With `choose` the output is
int64 [...] instead, `y.argmax(-1)`: the first of equal ones, and the first NaN where there is one. All tensors share
one dtype; or the weight is float8_e4m3fn, and `weight_scale` multiplies it, float32 [], [out, 1], or one for each block
of 128 x 128, [out / 128, in / 128], rounded up. See docs/weights.md.

The CPU implementation is the semantics: it computes in float32 (float64 for float64), and rounds y once, but not the
result of the norm. Dense models and the kernels may round this result once to the element type, and a weight in FP8
times its scale as well; with such a weight, they may also round the result of the norm to FP8. So their results differ
by no more than dense rounding. A NaN in a row of x reaches all of that row of y.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.torch_private import OpOverload
from twellc.plugins import library
from twellc.plugins.fp8 import E4M3, Fp8, scale_blocks
from twellc.plugins.linear import SCHEMA, TENSORS, LinearOperands, LinearOptions, call_of
from twellc.plugins.meaning import (
    as_read,
    check_norm,
    check_on_gpu,
    check_problem,
    check_tensor,
    launch,
    math_dtype,
    normalised,
)
from twellc.plugins.torch_library import define


def _check(operands: LinearOperands[Tensor], options: LinearOptions) -> None:
    """Raise ValueError for a shape that is not the layer's or an option out of range, TypeError for another dtype."""
    x, weight, scale = operands.x, operands.weight, operands.weight_scale
    if weight.dim() != 2 or x.dim() == 0:
        raise ValueError(
            f"twell: weight must have two dimensions, and x one or more, got {tuple(weight.shape)} and {tuple(x.shape)}"
        )
    if not x.dtype.is_floating_point or x.dtype == E4M3:
        raise TypeError(f"twell: x must be of a floating point type of 16 bits or more, got {x.dtype}")
    sizes = dict(zip(("out", "in"), weight.shape, strict=True))
    for each in TENSORS[:-1]:
        tensor = getattr(operands, each.name)
        if tensor is None:
            continue
        rows = x.shape[:-1] if each.shape[0] == "..." else ()
        shape = (*rows, *(sizes[name] for name in each.shape if name != "..."))
        is_scaled = tensor is weight and tensor.dtype == E4M3
        check_tensor(each.name, tensor, shape, *((E4M3, "") if is_scaled else (x.dtype, "x")))
    if (scale is None) == (weight.dtype == E4M3):
        raise ValueError(f"twell: a weight of {E4M3} has weight_scale, and others none")
    if scale is not None:
        by_row, by_block = (sizes["out"], 1), scale_blocks(*weight.shape)
        if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), by_row, by_block):
            expected, got = f"torch.float32 of shape (), {by_row} or {by_block}", f"{scale.dtype} {tuple(scale.shape)}"
            raise ValueError(f"twell: weight_scale must be {expected}, got {got}")
    options.check(operands, sizes["out"])
    check_norm(options.norm, operands.norm_weight, operands.norm_bias)


def _compute(operands: LinearOperands[Tensor], options: LinearOptions) -> list[Tensor]:
    """Compute the layer with dense torch operations: the meaning of the op, and its CPU implementation."""
    _check(operands, options)
    weight = operands.weight
    if operands.weight_scale is not None:
        weight = Fp8(weight, operands.weight_scale).dequantize(torch.float64)
    wide = math_dtype(weight.dtype)
    x = normalised(operands.x, options.norm, operands.norm_weight, operands.norm_bias, options.eps).to(wide)
    weight = weight.to(wide)
    bias = None if operands.bias is None else operands.bias.to(wide)
    y = torch.nn.functional.linear(x, weight, bias)
    if operands.residual is not None:
        y = y + operands.residual
    widths, dtype = options.widths(weight.shape[0]), operands.x.dtype
    if options.choose:
        return [y.to(dtype).argmax(-1)]
    return [each.to(dtype, memory_format=torch.contiguous_format, copy=True) for each in y.split(widths, -1)]


def _infer(operands: LinearOperands[Tensor], options: LinearOptions) -> list[Tensor]:
    """Give the shapes and dtype of the results, for tracing."""
    _check(operands, options)
    x, widths = operands.x, options.widths(operands.weight.shape[0])
    if options.choose:
        return [x.new_empty(x.shape[:-1], dtype=torch.int64)]
    return [x.new_empty((*x.shape[:-1], width)) for width in widths]


def _launch(operands: LinearOperands[Tensor], options: LinearOptions) -> list[Tensor]:
    """Run the layer on the GPU: through the C API on the current stream, or by torch's own operations.

    Torch computes calls of many tokens with weights of 16 bits.
    """
    results = _infer(operands, options)
    check_on_gpu(operands.named())
    (out, inner), scale = operands.weight.shape, operands.weight_scale
    tokens = operands.x.shape[:-1].numel()
    form = None if scale is None else Fp8(operands.weight, scale).form
    problem = options.problem(dtype_name(operands.x.dtype), tokens=tokens, inner=inner, out=out, scale=form)
    check_problem(problem)
    if tokens > library.FEW_TOKENS_LINEAR and scale is None:
        return _by_torch(operands, options)
    read = operands.map(as_read)  # kept alive until the kernels are launched
    # NOTE: a kernel reads weights before earlier launches have ended, so they must not be fresh copies.
    weights = ("weight", "norm_weight", "norm_bias")
    if any(getattr(read, name) is not getattr(operands, name) for name in weights):
        return _by_torch(operands, options)
    y = (ctypes.c_void_p * library.MAX_SPLITS)(*map(Tensor.data_ptr, results))
    tensors = library.LinearTensors(**read.map(Tensor.data_ptr).named(), y=y)
    lib = library.load()
    with torch.cuda.device(operands.x.device):
        launch(lib.twell_linear, lib.twell_linear_workspace_bytes(problem), problem, tensors)
    return results


def _by_torch(operands: LinearOperands[Tensor], options: LinearOptions) -> list[Tensor]:
    """Compute the layer by torch's own operations, each of which rounds."""
    x, weight, functional = operands.x, operands.weight, torch.nn.functional
    if options.norm == "rms":
        x = functional.rms_norm(x, x.shape[-1:], operands.norm_weight, options.eps)
    elif options.norm == "layer":
        x = functional.layer_norm(x, x.shape[-1:], operands.norm_weight, operands.norm_bias, options.eps)
    if operands.weight_scale is not None:
        weight = Fp8(weight, operands.weight_scale).dequantize(x.dtype)
    y = functional.linear(x, weight, operands.bias)
    y = y if operands.residual is None else y + operands.residual
    if options.choose:
        return [y.argmax(-1)]
    return [each.contiguous() for each in y.split(options.widths(weight.shape[0]), -1)]


LINEAR: OpOverload = define(
    SCHEMA,
    *(lambda *arguments, run=run, **named: run(*call_of(arguments, named)) for run in (_compute, _launch, _infer)),
)


def run_linear(operands: LinearOperands[Tensor], options: LinearOptions) -> list[Tensor]:
    """Call the op."""
    arguments = (options.norm, options.eps, list(options.splits), options.choose)
    results: list[Tensor] = LINEAR(*operands.arguments(), *arguments, weight_scale=operands.weight_scale)
    return results
