"""The torch op of a mixture of experts: each token goes through a few of many feed-forward blocks without biases.

    torch.ops.twell.experts   y[t] = sum over i of weights[t, i] * down_e(h), e = ids[t, i]
                              h = act(gate_e x[t]) * up_e x[t], or without a gate act(up_e x[t])

Shapes: x [tokens, d_model], up and gate [experts, d_ff, d_model], down [experts, d_ff, d_out] (neuron by neuron: the
transpose of `torch.nn.Linear`'s), ids [tokens, top] of int32 or int64, weights [tokens, top] float32, or float64 as x
may be, y [tokens, d_out]. An id outside of 0 to experts - 1 adds nothing, whatever its weight is. Matrices may be
strided, for example up and gate as views of one tensor [experts, 2 * d_ff, d_model]; on a GPU their rows are
contiguous, and start at multiples of 16 bytes.

Activations, and the rounding of the pre-activation z, are those of blocks (`twell.mlp` and `twell.gated_mlp`).
Matrices share the dtype of x, or are float8_e4m3fn: then each has a scale, float32 of shape [] (one for all),
[experts, 1, 1], [experts, d_ff, 1] or, of down alone, [experts, 1, d_out]. fatrelu with threshold 0 may have
`thresholds`, float32 [experts, d_ff].

The CPU implementation is the semantics: it computes in float32 (float64 for float64), and rounds y once. The kernels
round h once to the element type, as a dense block does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.base.torch_private import OpOverload
from twellc.plugins import library
from twellc.plugins.block import GATED, PLAIN
from twellc.plugins.fp8 import E4M3, Fp8
from twellc.plugins.kernel_calls import Given, KernelCall, Prepared, Reading, check_on_gpu, check_problem
from twellc.plugins.meaning import activate, check_tensor, math_dtype
from twellc.plugins.torch_library import define

_MATRICES = ("gate", "up", "down")
# Tensors in float32, whatever type x has; weights may be float64 as x is.
FLOAT32 = ("weights", *(f"{name}_scale" for name in _MATRICES), "thresholds")


class _Sizes(NamedTuple):
    tokens: int
    top: int
    experts: int
    d_ff: int
    d_model: int
    d_out: int


@dataclass(frozen=True)
class _Call:
    """The arguments of the op, in its order."""

    x: Tensor
    up: Tensor
    gate: Tensor | None
    down: Tensor
    ids: Tensor
    weights: Tensor
    activation: str
    threshold: float = 0.0
    up_scale: Tensor | None = None
    gate_scale: Tensor | None = None
    down_scale: Tensor | None = None
    thresholds: Tensor | None = None

    def named(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def matrices(self) -> dict[str, Tensor]:
        """The matrices that are there, by name."""
        return {name: value for name in _MATRICES if (value := getattr(self, name)) is not None}

    @property
    def sizes(self) -> _Sizes:
        (tokens, top), (experts, d_ff, d_model) = self.ids.shape, self.up.shape
        return _Sizes(tokens, top, experts, d_ff, d_model, self.down.shape[2])


_ARGUMENTS = tuple(each.name for each in fields(_Call))


def exceeded_limit(
    experts: int, d_ff: int, widths: Sequence[int], *, top: int = 1, tokens: int = 0, multiple: int = 8
) -> str:
    """Return the limit of the kernels that experts exceed, or an empty text.

    Args:
        experts: How many there are.
        d_ff: How many neurons each has.
        widths: The lengths of rows of matrices, which are multiples of 16 bytes.
        top: To how many experts a token is sent.
        tokens: How many there are in a call.
        multiple: How many elements of a matrix 16 bytes hold.
    """
    limits = {
        f"there are {experts} experts": (experts, library.MAX_EXPERTS),
        f"a token is sent to {top} experts": (top, library.MAX_EXPERTS_OF_TOKEN),
        f"a call sends {tokens} tokens to {top} experts each": (tokens * top, library.MAX_EXPERT_PAIRS),
        f"an expert has {d_ff} neurons": (d_ff, library.MAX_EXPERT_D_FF),
        f"a width is {max(widths)}": (max(widths), library.MAX_EXPERT_WIDTH),
    }
    for what, (size, most) in limits.items():
        if size > most:
            return f"{what}; the kernels take at most {most}"
    odd = [each for each in widths if each % multiple]
    return f"a width is {odd[0]}; the kernels need multiples of {multiple} (16-byte rows)" if odd else ""


def _check(call: _Call) -> None:
    """Raise ValueError for a wrong shape or an option out of range, TypeError for another dtype."""
    for name, dimensions in {"x": 2, "up": 3, "down": 3, "ids": 2}.items():
        tensor: Tensor = getattr(call, name)
        if tensor.dim() != dimensions:
            raise ValueError(f"twell: {name} must have {dimensions} dimensions, got {tuple(tensor.shape)}")
    sizes, dtype = call.sizes, call.x.dtype
    shapes = {
        "x": (sizes.tokens, sizes.d_model),
        "gate": (sizes.experts, sizes.d_ff, sizes.d_model),
        "down": (sizes.experts, sizes.d_ff, sizes.d_out),
        "weights": (sizes.tokens, sizes.top),
        "thresholds": (sizes.experts, sizes.d_ff),
    }
    if not dtype.is_floating_point or dtype == E4M3:
        raise TypeError(f"twell: x must be of a floating point type of 16 bits or more, got {dtype}")
    scaled = call.up.dtype == E4M3
    of_matrices = (E4M3, "up") if scaled else (dtype, "x")
    for name, tensor in call.named().items():
        wide = name == "weights" and tensor.dtype == dtype == torch.float64
        others = (torch.float32 if name in FLOAT32 and not wide else tensor.dtype, "")
        own = of_matrices if name in call.matrices else others
        check_tensor(name, tensor, shapes.get(name, tuple(tensor.shape)), *own)
    if call.ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"twell: ids must be torch.int32 or torch.int64, got {call.ids.dtype}")
    _check_scales(call, scaled=scaled)
    variant = PLAIN if call.gate is None else GATED
    if call.activation not in variant.activations:
        expected = ", ".join(variant.activations)
        raise ValueError(f"twell: activation must be one of {expected}, got {call.activation!r}")
    fatrelu = call.activation == "fatrelu"
    if not (math.isfinite(call.threshold) and call.threshold >= 0) or (call.threshold and not fatrelu):
        expected = "finite and at least 0" if fatrelu else f"0 with activation {call.activation}"
        raise ValueError(f"twell: threshold must be {expected}, got {call.threshold:g}")
    if call.thresholds is not None and (not fatrelu or call.threshold):
        got = f"activation {call.activation} with threshold {call.threshold:g}"
        raise ValueError(f"twell: thresholds are for fatrelu with threshold 0 alone, got {got}")


def _check_scales(call: _Call, *, scaled: bool) -> None:
    for name in _MATRICES:
        matrix, scale = getattr(call, name), getattr(call, f"{name}_scale")
        if (scale is not None) != (scaled and matrix is not None):
            raise ValueError(f"twell: weights of {E4M3} have a scale each, and others none: see {name}_scale")
        if scale is not None and _scale_form(scale, matrix, is_down=name == "down") is None:
            experts, rows, columns = matrix.shape
            shapes = [(), (experts, 1, 1), (experts, rows, 1), *([(experts, 1, columns)] if name == "down" else [])]
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"twell: {name}_scale must have shape {expected}, got {tuple(scale.shape)}")
    forms = {
        _scale_form(scale, call.up, is_down=False) for scale in (call.gate_scale, call.up_scale) if scale is not None
    }
    if len(forms) > 1:
        raise ValueError("twell: gate_scale and up_scale must have one shape")


def _scale_form(scale: Tensor, matrix: Tensor, *, is_down: bool) -> str | None:
    """Return the form of a scale, of `library.SCALE_FORMS`; None if it has none of these."""
    experts, rows, columns = matrix.shape
    shape = tuple(scale.shape)
    if shape == ():
        return "tensor"
    if shape == (experts, 1, 1):
        return "expert"
    if shape == (experts, rows, 1):
        return "row"
    return "column" if is_down and shape == (experts, 1, columns) else None


def _compute(*arguments: object, **named: object) -> Tensor:
    """Compute the experts with dense torch operations: the meaning of the op, and its CPU implementation.

    The experts that have tokens are computed one after another.
    """
    call = _Call(*arguments, **named)  # type: ignore[arg-type]
    _check(call)
    sizes, dtype = call.sizes, call.x.dtype
    wide = torch.float64 if call.up.dtype == E4M3 else math_dtype(dtype)
    x = call.x.to(wide)
    # NOTE: a row for each pair of a token and its expert, so that sums are always in the order of ids.
    pairs = x.new_zeros(sizes.tokens * sizes.top, sizes.d_out)
    of_pairs = call.ids.reshape(-1)
    for expert in sorted({id_ for id_ in of_pairs.tolist() if 0 <= id_ < sizes.experts}):
        chosen = (of_pairs == expert).nonzero()[:, 0]
        rows = x[chosen // max(sizes.top, 1)]
        up = rows @ _dequantized(call, "up", expert, wide).T
        first = up if call.gate is None else rows @ _dequantized(call, "gate", expert, wide).T
        threshold = call.threshold if call.thresholds is None else call.thresholds[expert]
        h = activate(first.to(dtype), call.activation, threshold).to(wide)
        if call.gate is not None:
            up = up.relu() if call.activation == "drelu" else up
            h = torch.where(h == 0, torch.zeros_like(h), h * up)
        pairs[chosen] = h @ _dequantized(call, "down", expert, wide)
    taken = (call.ids >= 0) & (call.ids < sizes.experts)
    weights = torch.where(taken, call.weights, 0).to(wide)
    return (pairs.view(sizes.tokens, sizes.top, sizes.d_out) * weights[..., None]).sum(1).to(dtype)


def _dequantized(call: _Call, name: str, expert: int, wide: torch.dtype) -> Tensor:
    """Return a matrix of an expert, times its scale."""
    matrix: Tensor = getattr(call, name)[expert]
    scale: Tensor | None = getattr(call, f"{name}_scale")
    if scale is None:
        return matrix.to(wide)
    return Fp8(matrix, scale[expert] if scale.dim() else scale).dequantize(wide)


def _infer(*arguments: object, **named: object) -> Tensor:
    """Give the shape and dtype of the result, for tracing."""
    call = _Call(*arguments, **named)  # type: ignore[arg-type]
    _check(call)
    return call.x.new_empty(call.sizes.tokens, call.sizes.d_out)


def _prepare(given: Given) -> KernelCall:
    """Check a call, and return what computes it and those alike, through the C API on the current stream."""
    call = _Call(**given)
    _check(call)
    named = call.named()
    check_on_gpu(named)
    _check_rows(given)
    problem = _problem(call)
    check_problem(problem)
    reading = Reading.of(named, {name: name for name in named})
    reading = replace(reading, copied={name: copy for name, copy in reading.copied.items() if name not in _MATRICES})
    lib = library.load()
    with torch.cuda.device(call.x.device):
        workspace_bytes = lib.twell_experts_workspace_bytes(problem)
    results, fixed = (((call.sizes.tokens, call.sizes.d_out), call.x.dtype),), tuple(call.matrices)
    return KernelCall(
        lib.twell_experts, problem, workspace_bytes, library.ExpertsTensors, reading, results, fixed, _check_rows
    )


def _check_rows(given: Given) -> list[Tensor]:
    """Raise ValueError if the kernels cannot read a matrix in place: a copy at each call would cost too much."""
    for name in _MATRICES:
        matrix: Tensor | None = given.get(name)
        if matrix is None:
            continue
        vector = 16 // matrix.element_size()
        if matrix.stride(2) != 1 or any(step % vector for step in matrix.stride()[:2]) or matrix.data_ptr() % 16:
            raise ValueError(
                f"twell: rows of {name} must be contiguous and start at multiples of 16 bytes, got strides "
                f"{matrix.stride()}; make it contiguous once"
            )
    return []


_PREPARED = Prepared(_prepare)


def _launch(*arguments: Any, **named: Any) -> Tensor:
    """Run the experts on a GPU."""
    given = {**dict(zip(_ARGUMENTS, arguments, strict=False)), **named}
    return _PREPARED.of(given)(given)[0]


def _problem(call: _Call) -> library.ExpertsProblem:
    """Return the problem for the C API."""
    sizes = call.sizes
    code = library.DTYPES[dtype_name(call.x.dtype)]
    forms = {}
    if call.up_scale is not None and call.down_scale is not None:
        forms = {
            "gate_up_scale": library.SCALE_FORMS[_scale_form(call.up_scale, call.up, is_down=False) or "tensor"],
            "down_scale": library.SCALE_FORMS[_scale_form(call.down_scale, call.down, is_down=True) or "tensor"],
        }
    return library.ExpertsProblem(
        **sizes._asdict(),
        dtype=code,
        weight_dtype=library.E4M3 if forms else code,
        variant=library.VARIANTS["plain" if call.gate is None else "gated"],
        activation=library.ACTIVATIONS[call.activation],
        threshold=call.threshold,
        id_bytes=call.ids.element_size(),
        **forms,
        **{name: library.ExpertStrides(*matrix.stride()[:2]) for name, matrix in call.matrices.items()},
    )


SCHEMA = (
    "experts(Tensor x, Tensor up, Tensor? gate, Tensor down, Tensor ids, Tensor weights, str activation, "
    "float threshold=0.0, *, Tensor? up_scale=None, Tensor? gate_scale=None, Tensor? down_scale=None, "
    "Tensor? thresholds=None) -> Tensor"
)
EXPERTS: OpOverload = define(SCHEMA, _compute, _launch, _infer)
