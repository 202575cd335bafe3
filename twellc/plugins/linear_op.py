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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.torch_private import OpOverload
from twellc.plugins import library
from twellc.plugins.fp8 import E4M3, Fp8, scale_blocks
from twellc.plugins.kernel_calls import Given, KernelCall, Prepared, Reading, check_on_gpu, check_problem
from twellc.plugins.linear import ARGUMENTS, SCHEMA, TENSORS, LinearOperands, LinearOptions, call_of
from twellc.plugins.meaning import check_norm, check_tensor, math_dtype, normalised
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


def _results(
    operands: LinearOperands[Tensor], options: LinearOptions
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of each result."""
    x = operands.x
    if options.choose:
        return ((x.shape[:-1], torch.int64),)
    return tuple(((*x.shape[:-1], width), x.dtype) for width in options.widths(operands.weight.shape[0]))


def _infer(operands: LinearOperands[Tensor], options: LinearOptions) -> list[Tensor]:
    """Give the shapes and dtype of the results, for tracing."""
    _check(operands, options)
    return [operands.x.new_empty(shape, dtype=dtype) for shape, dtype in _results(operands, options)]


def _prepare(given: Given) -> Callable[[Given], list[Tensor]]:
    """Check a call, and return what computes it and those alike: the C API on the current stream, or torch.

    Torch's own operations compute calls of many tokens with weights of 16 bits.
    """
    operands, options = call_of((), given)
    _check(operands, options)
    named = operands.named()
    check_on_gpu(named)
    (out, inner), scale = operands.weight.shape, operands.weight_scale
    tokens = operands.x.shape[:-1].numel()
    form = None if scale is None else Fp8(operands.weight, scale).form
    problem = options.problem(dtype_name(operands.x.dtype), tokens=tokens, inner=inner, out=out, scale=form)
    check_problem(problem)
    # NOTE: a kernel reads weights before earlier launches have ended, so they must not be fresh copies.
    fixed = tuple(name for name in ("weight", "norm_weight", "norm_bias") if name in named)
    reading = Reading.of(named, {name: name for name in named})
    if (tokens > library.FEW_TOKENS_LINEAR and scale is None) or not reading.copied.keys().isdisjoint(fixed):
        return _by_torch
    lib = library.load()
    with torch.cuda.device(operands.x.device):
        workspace_bytes = lib.twell_linear_workspace_bytes(problem)
    results = _results(operands, options)
    return KernelCall(
        lib.twell_linear, problem, workspace_bytes, library.LinearTensors, reading, results, fixed, _by_torch
    )


def _by_torch(given: Given) -> list[Tensor]:
    """Compute the layer by torch's own operations, each of which rounds."""
    operands, options = call_of((), given)
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


_PREPARED = Prepared(_prepare)


def _launch(*arguments: Any, **named: Any) -> list[Tensor]:
    """Run the layer on a GPU."""
    given = {**dict(zip(ARGUMENTS, arguments, strict=False)), **named}
    return _PREPARED.of(given)(given)


def _implementation(run: Callable[[LinearOperands[Tensor], LinearOptions], list[Tensor]]) -> Callable[..., Any]:
    """Return the function that torch calls with the arguments of the op."""
    return lambda *arguments, **named: run(*call_of(arguments, named))


LINEAR: OpOverload = define(SCHEMA, _implementation(_compute), _launch, _implementation(_infer))


def run_linear(operands: LinearOperands[Tensor], options: LinearOptions) -> list[Tensor]:
    """Call the op."""
    arguments = (options.norm, options.eps, list(options.splits), options.choose)
    results: list[Tensor] = LINEAR(*operands.arguments(), *arguments, weight_scale=operands.weight_scale)
    return results
