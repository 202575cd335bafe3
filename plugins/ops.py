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
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from twellc.plugins import library


def activate(z: Tensor, activation: str, threshold: float) -> Tensor:
    """Apply a TwELL gate activation to pre-activations of any shape; NaN is kept."""
    if activation == "fatrelu":
        # Compared in float32 at least, as the kernels do: bfloat16 would round the threshold first.
        wide = z.float() if z.dtype in (torch.bfloat16, torch.float16) else z
        return torch.where(wide <= threshold, torch.zeros_like(z), z)
    r = torch.relu(z)
    return r * r if activation == "relu2" else r


def _check(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    w_up: Tensor | None,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    residual: Tensor | None,
    activation: str,
    hot: int,
) -> None:
    for name, weight in (("the first weight", w_gate), ("w_down", w_down)):
        if weight.dim() != 2:
            raise ValueError(f"twell: {name} must have two dimensions, got {tuple(weight.shape)}")
    (d_ff, d_model), d_out = w_gate.shape, w_down.shape[1]
    expected = {
        "x": (x, (*x.shape[:-1], d_model)),
        "w_down": (w_down, (d_ff, d_out)),
        "w_up": (w_up, (d_ff, d_model)),
        "b_gate": (b_gate, (d_ff,)),
        "b_up": (b_up, (d_ff,)),
        "b_down": (b_down, (d_out,)),
        "residual": (residual, (*x.shape[:-1], d_out)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"twell: {name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != w_gate.dtype:
            raise TypeError(f"twell: {name} must be {w_gate.dtype} like the weights, got {tensor.dtype}")
    allowed = [name for name in library.ACTIVATIONS if name != "drelu" or w_up is not None]
    if activation not in allowed:
        raise ValueError(f"twell: activation must be one of {', '.join(allowed)}, got {activation!r}")
    if not 0 <= hot <= d_ff:
        raise ValueError(f"twell: hot must be 0 to d_ff = {d_ff}, got {hot}")


def _compute(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    w_up: Tensor | None,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    residual: Tensor | None,
    activation: str,
    threshold: float,
    compression: int,
    hot: int = 0,
) -> Tensor:
    """Compute the block with dense torch operations: the meaning of the op, and its CPU implementation."""
    _check(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, activation, hot)
    math_dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype

    def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide_bias = None if bias is None else bias.to(math_dtype)
        return torch.nn.functional.linear(rows.to(math_dtype), weight.to(math_dtype), wide_bias)

    g = activate(project(x, w_gate, b_gate).to(x.dtype), activation, threshold).to(math_dtype)
    h = g
    if w_up is not None:
        up = project(x, w_up, b_up)
        h = torch.where(g == 0, torch.zeros_like(g), g * (torch.relu(up) if activation == "drelu" else up))
    y = project(h, w_down.t(), b_down)
    return (y if residual is None else residual.to(math_dtype) + y).to(x.dtype)


def _as_read(tensor: Tensor) -> Tensor:
    """Return the tensor as the kernels read it: contiguous, and in memory from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _launch(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    w_up: Tensor | None,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    residual: Tensor | None,
    activation: str,
    threshold: float,
    compression: int,
    hot: int = 0,
) -> Tensor:
    """Run the block on the GPU through the C API, on the current stream."""
    _check(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, activation, hot)
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in library.DTYPES:
        raise TypeError(f"twell: the CUDA kernels take {' or '.join(library.DTYPES)}, got {dtype}")
    inputs = {
        name: None if tensor is None else _as_read(tensor)
        for name, tensor in zip(_TENSORS, (x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual), strict=True)
    }
    for name, tensor in inputs.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"twell: {name} must be on {x.device}, got {tensor.device}")
    (d_ff, d_model), d_out = w_gate.shape, w_down.shape[1]
    y = x.new_empty((*x.shape[:-1], d_out))
    problem = library.Problem(
        tokens=x.numel() // d_model,
        d_model=d_model,
        d_ff=d_ff,
        d_out=d_out,
        compression=compression,
        dtype=library.DTYPES[dtype],
        variant=library.VARIANTS["plain" if w_up is None else "gated"],
        activation=library.ACTIVATIONS[activation],
        threshold=threshold,
        hot=hot,
    )
    lib = library.load()
    fault = lib.twell_validate(ctypes.byref(problem))
    if fault:
        raise ValueError(f"twell: {fault.decode()}")
    pointers = {name: None if tensor is None else tensor.data_ptr() for name, tensor in inputs.items()}
    tensors = library.Tensors(**pointers, y=y.data_ptr())
    workspace = torch.empty(lib.twell_workspace_bytes(ctypes.byref(problem)), dtype=torch.uint8, device=x.device)
    with torch.cuda.device(x.device):
        stream = torch.cuda.current_stream().cuda_stream
        status = lib.twell_mlp(
            ctypes.byref(problem), ctypes.byref(tensors), workspace.data_ptr(), workspace.numel(), stream
        )
    if status:
        raise RuntimeError(f"twell: the kernels failed with CUDA error {status}")
    return y


def _infer(
    x: Tensor,
    w_gate: Tensor,
    b_gate: Tensor | None,
    w_up: Tensor | None,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    residual: Tensor | None,
    activation: str,
    threshold: float,
    compression: int,
    hot: int = 0,
) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    _check(x, w_gate, b_gate, w_up, b_up, w_down, b_down, residual, activation, hot)
    return x.new_empty((*x.shape[:-1], w_down.shape[1]))


_TENSORS = ("x", "w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down", "residual")
_OPTIONS = "str activation, float threshold, int compression, int hot=0"
_LIBRARY = torch.library.Library("twell", "DEF")
_LIBRARY.define(
    "gated_mlp(Tensor x, Tensor w_gate, Tensor? b_gate, Tensor w_up, Tensor? b_up, Tensor w_down, Tensor? b_down, "
    f"Tensor? residual, {_OPTIONS}) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.define(
    f"mlp(Tensor x, Tensor w_up, Tensor? b_up, Tensor w_down, Tensor? b_down, Tensor? residual, {_OPTIONS}) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _without_gate(
    run: Callable[..., Tensor],
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None,
    residual: Tensor | None,
    activation: str,
    threshold: float,
    compression: int,
    hot: int = 0,
) -> Tensor:
    """Call `run` for a plain block: the projection whose output is activated stands in the place of the gate."""
    return run(x, w_up, b_up, None, None, w_down, b_down, residual, activation, threshold, compression, hot)


for _key, _run in (("CPU", _compute), ("CUDA", _launch), ("Meta", _infer)):
    _LIBRARY.impl("gated_mlp", _run, _key)
    _LIBRARY.impl("mlp", functools.partial(_without_gate, _run), _key)

GATED_MLP: torch._ops.OpOverload = torch.ops.twell.gated_mlp.default
MLP: torch._ops.OpOverload = torch.ops.twell.mlp.default
