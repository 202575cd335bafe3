"""The meaning of the `twell` ops, in dense torch operations, and the checks of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from twellc.plugins.block import (
    FLOAT32,
    NORM_TENSORS,
    SCALES,
    TENSORS,
    THRESHOLDS,
    BlockOptions,
    Operands,
    WeightOperands,
)
from twellc.plugins.fp8 import E4M3, Fp8, scale_blocks


def activate(z: Tensor, activation: str, threshold: float | Tensor) -> Tensor:
    """Apply a TwELL gate activation to pre-activations [..., d_ff]; NaN is kept.

    `threshold` is that of fatrelu, or float32 [d_ff], one for each neuron; values below 0 and NaN count as 0.
    """
    if activation == "fatrelu":
        if isinstance(threshold, Tensor):
            threshold = threshold.fmax(threshold.new_zeros(()))
        # Compared in float32 at least, as the kernels do: bfloat16 would round the threshold first.
        wide = z.float() if z.dtype in (torch.bfloat16, torch.float16) else z
        return torch.where(wide <= threshold, torch.zeros_like(z), z)
    r = torch.relu(z)
    return r * r if activation == "relu2" else r


def check_matrix(name: str, weight: Tensor) -> None:
    """Raise ValueError if a weight is not a matrix."""
    if weight.dim() != 2:
        raise ValueError(f"twell: {name} must have two dimensions, got {tuple(weight.shape)}")


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: str = "") -> None:
    """Raise ValueError for another shape, TypeError for another dtype; `like` names the tensor that sets the dtype."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"twell: {name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.dtype != dtype:
        expected = f"{dtype} like {like}" if like else f"{dtype}"
        raise TypeError(f"twell: {name} must be {expected}, got {tensor.dtype}")


def widths_of(operands: Operands[Tensor]) -> dict[str, int]:
    """Return d_model, d_ff and d_out, as the weights have them."""
    check_matrix("the first weight", operands.first[0])
    check_matrix("w_down", operands.w_down)
    (d_ff, d_model), d_out = operands.first[0].shape, operands.w_down.shape[1]
    return {"d_model": d_model, "d_ff": d_ff, "d_out": d_out}


def check_call(operands: Operands[Tensor], options: BlockOptions) -> None:
    """Raise ValueError for a shape that is not the block's or an option out of range, TypeError for another dtype."""
    widths, given, dtype = widths_of(operands), operands.named(), operands.first[0].dtype
    like = "the weights"
    if dtype == E4M3:
        dtype, like = operands.x.dtype, "x"
    check_floating(dtype)
    scaled = _check_scales(operands)
    for each in (*TENSORS, *NORM_TENSORS):
        tensor = given.get(each.name)
        if tensor is None:
            continue
        rows = operands.x.shape[:-1] if each.shape[0] == "..." else ()
        shape = (*rows, *(widths[name] for name in each.shape if name != "..."))
        own = (E4M3, "") if each.name in scaled else (dtype, like)
        check_tensor(each.name, tensor, shape, *own)
    options.check(operands.variant, widths["d_ff"])
    if operands.thresholds is not None:
        check_thresholds(operands.thresholds, options, widths["d_ff"])
    check_norm(options.norm, operands.norm_weight, operands.norm_bias)


def check_floating(dtype: torch.dtype) -> None:
    """Raise TypeError for a dtype of x that is not floating-point."""
    if not dtype.is_floating_point:
        raise TypeError(f"twell: x must be of a floating-point dtype, got {dtype}")


def check_norm(norm: str, weight: object, bias: object) -> None:
    """Raise ValueError for a weight or a bias that the norm does not have."""
    if norm == "none" and weight is not None:
        raise ValueError("twell: norm_weight has no meaning without a norm")
    if norm != "layer" and bias is not None:
        raise ValueError("twell: norm_bias has no meaning without a layer norm")


def normalised(x: Tensor, norm: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return norm(x), in the type of sums: see `linear_op.py`."""
    x = x.to(math_dtype(x.dtype))
    if norm == "none":
        return x
    if norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def norm_of(operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Return norm(x) of a block, likewise."""
    return normalised(operands.x, options.norm, *operands.norm, options.eps)


def without_norm(operands: Operands[Tensor], options: BlockOptions) -> tuple[Operands[Tensor], BlockOptions]:
    """Return a block without a norm that reads norm(x), rounded to the type of x."""
    if options.norm == "none":
        return operands, options
    x = norm_of(operands, options).to(operands.x.dtype)
    return replace(operands, x=x, norm_weight=None, norm_bias=None), replace(options, norm="none", eps=0.0)


def check_thresholds(thresholds: Tensor, options: BlockOptions, d_ff: int) -> None:
    """Raise ValueError or TypeError for thresholds of another shape or dtype, or that the activation does not have."""
    if (options.activation, options.threshold) != ("fatrelu", 0):
        got = f"activation {options.activation} with threshold {options.threshold:g}"
        raise ValueError(f"twell: {THRESHOLDS.name} are for fatrelu with threshold 0 alone, got {got}")
    check_tensor(THRESHOLDS.name, thresholds, (d_ff,), torch.float32)


def check_scale(name: str, scale: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError if a scale has none of the shapes that its matrix may have, TypeError if it is not float32."""
    if tuple(scale.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"twell: {name} must have shape {expected}, got {tuple(scale.shape)}")
    check_tensor(name, scale, tuple(scale.shape), torch.float32)


def _check_scales(operands: Operands[Tensor]) -> set[str]:
    """Return the names of the weights that have scales: all or none.

    Raises:
        ValueError: A scale is missing, or has another shape than a matrix may have, or gate and up have one for each
            neuron and for each block.
        TypeError: A scale, or a matrix without one, has another dtype.
    """
    given, scales = operands.named(), operands.scales()
    scaled: set[str] = set()
    if not scales and operands.first[0].dtype != E4M3:
        return scaled
    for name in SCALES:
        weight, scale = given.get(name.removesuffix("_scale")), scales.get(name)
        if (weight is None) != (scale is None):
            raise ValueError(f"twell: weights of {E4M3} have a scale each, and others none: {name} does not fit")
        if weight is None or scale is None:
            continue
        rows, columns = weight.shape
        blocks = scale_blocks(rows, columns)
        check_scale(name, scale, [(), (rows, 1), *([(1, columns)] if name == "w_down_scale" else []), blocks])
        scaled.add(name.removesuffix("_scale"))
    if len(gate_up_forms(operands) - {"tensor"}) > 1:
        raise ValueError("twell: w_gate_scale and w_up_scale must not be one of neurons and one of blocks")
    return scaled


def gate_up_forms(operands: Operands[Tensor]) -> set[str | None]:
    """Return the forms of the scales of gate and up."""
    return {Fp8(each, scale).form for each, scale in _gate_and_up(operands).values()}


def _gate_and_up(operands: Operands[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    scales, named = operands.scales(), operands.named()
    return {name: (named[name], scales[f"{name}_scale"]) for name in ("w_gate", "w_up") if f"{name}_scale" in scales}


def repeated_scales(operands: Operands[Tensor]) -> dict[str, tuple[int, int]]:
    """Return the scales of gate and up that are a single number where the other has several: the shape of these."""
    forms = gate_up_forms(operands)
    return {
        f"{name}_scale": scale_blocks(*each.shape) if "block" in forms else (len(each), 1)
        for name, (each, scale) in _gate_and_up(operands).items()
        if len(forms) > 1 and not scale.dim()
    }


def dequantize(operands: Operands[Tensor], dtype: torch.dtype = torch.float64) -> Operands[Tensor]:
    """Return the same with the weights that have scales dequantized to `dtype`."""
    scales, named = operands.scales(), operands.named()
    for name in scales:
        of = name.removesuffix("_scale")
        named[of] = Fp8(named[of], named.pop(name)).dequantize(dtype)
    return Operands(**named) if scales else operands


def cast(weights: WeightOperands[Tensor], dtype: torch.dtype) -> WeightOperands[Tensor]:
    """Return weights in another type, except FP8 weights, and operands that are float32 in every block."""
    named = weights.named()
    kept = {name for name, each in named.items() if name in FLOAT32 or each.dtype == E4M3}
    return WeightOperands(**{name: each if name in kept else each.to(dtype) for name, each in named.items()})


def scale_kinds(operands: Operands[Tensor]) -> tuple[str, str] | None:
    """Return the forms of the scales of gate and up, and of down, for `set_scales`; None if weights have no scales."""
    scales = operands.scales()
    if not scales:
        return None
    down = Fp8(operands.w_down, scales["w_down_scale"]).form
    several = gate_up_forms(operands) - {"tensor"}
    assert down is not None  # see `check_call`
    return next(iter(several), None) or "tensor", down


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums over elements of `dtype` are taken."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows W^T + b in the type of sums over the elements of the weight."""
    wide = math_dtype(weight.dtype)
    return torch.nn.functional.linear(rows.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def rectified(up: Tensor, options: BlockOptions) -> Tensor:
    """Return the factor of the gate: the up projection, for dReLU after its ReLU."""
    return torch.relu(up) if options.activation == "drelu" else up


def combined(
    z: Tensor, up: Tensor | None, options: BlockOptions, thresholds: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return g, u and h, named as in `hidden_of`, from the pre-activations z and the up projection."""
    g = activate(z, options.activation, options.threshold if thresholds is None else thresholds)
    g = g.to(math_dtype(z.dtype))
    if up is None:
        return g, None, g
    u = rectified(up, options)
    return g, u, torch.where(g == 0, torch.zeros_like(g), g * u)


def hidden_of(operands: Operands[Tensor], options: BlockOptions) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return z, g, u and h of all neurons, [..., d_ff]; plugins/kernels/README.md defines the names.

    z has the element type, the others that of sums; u, for dReLU after its ReLU, is None in a plain block.
    """
    x = norm_of(operands, options)
    z = project(x, *operands.first).to(operands.x.dtype)
    up = None if operands.w_gate is None else project(x, operands.w_up, operands.b_up)
    return z, *combined(z, up, options, operands.thresholds)


def output_of(h: Tensor, operands: Operands[Tensor]) -> Tensor:
    """Return y from h, rounded to the element type."""
    y = project(h, operands.w_down.t(), operands.b_down)
    return (y if operands.residual is None else operands.residual.to(y.dtype) + y).to(operands.x.dtype)
