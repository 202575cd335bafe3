"""The `twell` torch ops: what a rewritten program calls.

    torch.ops.twell.gated_mlp   y = residual + (act(x Wg^T + bg) * (x Wu^T + bu)) Wd + bd
    torch.ops.twell.mlp         y = residual +  act(x Wu^T + bu)                  Wd + bd

Shapes: x [..., d_model], w_gate and w_up [d_ff, d_model], w_down [d_ff, d_out] (neuron-major: the transpose of
`torch.nn.Linear.weight`), biases [d_ff], [d_ff], [d_out], residual and y [..., d_out]. All tensors share one dtype;
biases and residual may be None.

The CPU implementation is the semantics: the pre-activation is rounded to the element type, everything after it is
accumulated in float32 (or in float64 for float64 input) and rounded once. A neuron whose activation is 0 contributes
exactly 0, also where the dense block would compute 0 * inf = NaN; a NaN in x reaches y. The CUDA implementation calls
the plugin library, so it takes bfloat16 and float16 only.

`activation` is one of relu, relu2 (relu squared), fatrelu (z where z > threshold, else 0) and, for gated blocks, drelu
(relu of both gate and up). `compression` is the TwELL compression factor; it changes speed and memory, never results.
`hot`, 0 to d_ff, is a hint about speed, where the neurons that are active most often come first: calls with many
tokens compute so many, the first ones, as a dense product. It changes no result but for rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.plugins import library
from twellc.plugins.block import (
    GATED,
    PLAIN,
    TENSORS,
    BlockOptions,
    Operands,
    Variant,
    call_of,
    problem_of,
    schema_of,
    tensors_of,
)


def activate(z: Tensor, activation: str, threshold: float) -> Tensor:
    """Apply a TwELL gate activation to pre-activations of any shape; NaN is kept."""
    if activation == "fatrelu":
        # Compared in float32 at least, as the kernels do: bfloat16 would round the threshold first.
        wide = z.float() if z.dtype in (torch.bfloat16, torch.float16) else z
        return torch.where(wide <= threshold, torch.zeros_like(z), z)
    r = torch.relu(z)
    return r * r if activation == "relu2" else r


def _widths(operands: Operands[Tensor]) -> dict[str, int]:
    """Return d_model, d_ff and d_out, as the weights have them."""
    weights = {"the first weight": operands.first[0], "w_down": operands.w_down}
    for name, weight in weights.items():
        if weight.dim() != 2:
            raise ValueError(f"twell: {name} must have two dimensions, got {tuple(weight.shape)}")
    (d_ff, d_model), d_out = operands.first[0].shape, operands.w_down.shape[1]
    return {"d_model": d_model, "d_ff": d_ff, "d_out": d_out}


def _check(operands: Operands[Tensor], options: BlockOptions) -> None:
    widths, given, dtype = _widths(operands), operands.named(), operands.first[0].dtype
    leading = operands.x.shape[:-1]
    for each in TENSORS:
        tensor = given.get(each.name)
        if tensor is None:
            continue
        rows = leading if each.shape[0] == "..." else ()
        shape = (*rows, *(widths[name] for name in each.shape if name != "..."))
        if tuple(tensor.shape) != shape:
            raise ValueError(f"twell: {each.name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise TypeError(f"twell: {each.name} must be {dtype} like the weights, got {tensor.dtype}")
    options.check(operands.variant, widths["d_ff"])


def _compute(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Compute the block with dense torch operations: the meaning of the op, and its CPU implementation."""
    _check(operands, options)
    x, residual, activation = operands.x, operands.residual, options.activation
    math_dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide_bias = None if bias is None else bias.to(math_dtype)
        return torch.nn.functional.linear(rows.to(math_dtype), weight.to(math_dtype), wide_bias)

    g = activate(project(x, *operands.first).to(x.dtype), activation, options.threshold).to(math_dtype)
    h = g
    if operands.w_gate is not None:
        up = project(x, operands.w_up, operands.b_up)
        h = torch.where(g == 0, torch.zeros_like(g), g * (torch.relu(up) if activation == "drelu" else up))
    y = project(h, operands.w_down.t(), operands.b_down)
    return (y if residual is None else residual.to(math_dtype) + y).to(x.dtype)


def _as_read(tensor: Tensor) -> Tensor:
    """Return the tensor as the kernels read it: contiguous, and in memory from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _launch(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Run the block on the GPU through the C API, on the current stream."""
    _check(operands, options)
    x, widths, dtype = operands.x, _widths(operands), dtype_name(operands.x.dtype)
    if dtype not in library.DTYPES:
        raise TypeError(f"twell: the CUDA kernels take {' or '.join(library.DTYPES)}, got {dtype}")
    for name, tensor in operands.named().items():
        if tensor.device != x.device:
            raise ValueError(f"twell: {name} must be on {x.device}, got {tensor.device}")
    tokens = x.numel() // widths["d_model"]
    problem = problem_of(operands.variant, options, dtype, tokens=tokens, **widths)
    lib = library.load()
    fault = lib.twell_validate(ctypes.byref(problem))
    if fault:
        raise ValueError(f"twell: {fault.decode()}")
    read = operands.map(_as_read)  # kept until the kernels are launched
    y = x.new_empty((*x.shape[:-1], widths["d_out"]))
    tensors = tensors_of(read.map(Tensor.data_ptr), y.data_ptr())
    workspace = torch.empty(lib.twell_workspace_bytes(ctypes.byref(problem)), dtype=torch.uint8, device=x.device)
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        status = lib.twell_mlp(
            ctypes.byref(problem), ctypes.byref(tensors), workspace.data_ptr(), workspace.numel(), stream
        )
    if status:
        raise RuntimeError(f"twell: the kernels failed with CUDA error {status}")
    return y


def _infer(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    _check(operands, options)
    return operands.x.new_empty((*operands.x.shape[:-1], operands.w_down.shape[1]))


def _implementation(variant: Variant, run: Callable[[Operands[Tensor], BlockOptions], Tensor]) -> Callable[..., Tensor]:
    """Return what torch calls with the arguments of an op."""

    def call(*arguments: Any, **named: Any) -> Tensor:
        return run(*call_of(variant, arguments, named))

    return call


_LIBRARY = torch.library.Library("twell", "DEF")
for _variant in (GATED, PLAIN):
    _LIBRARY.define(schema_of(_variant), tags=torch.Tag.pt2_compliant_tag)
    for _key, _run in (("CPU", _compute), ("CUDA", _launch), ("Meta", _infer)):
        _LIBRARY.impl(_variant.op, _implementation(_variant, _run), _key)

GATED_MLP: torch._ops.OpOverload = torch.ops.twell.gated_mlp.default
MLP: torch._ops.OpOverload = torch.ops.twell.mlp.default
OPS = {GATED: GATED_MLP, PLAIN: MLP}
VARIANT_OF = {op: variant for variant, op in OPS.items()}


def run_block(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Call the op of a block."""
    y: Tensor = OPS[operands.variant](*operands.arguments(), *options.arguments())
    return y
