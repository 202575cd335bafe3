"""Dense forms of a feed-forward block, to compare twellc with.

    eager      torch's own products, one after the other
    compiled   the same through torch.compile
    packed     gate and up in one product, one compiled kernel for the activation, as serving engines do
    FP8        packed, with weights, x and the hidden tensor in E4M3, one scale each; x and the hidden tensor are
               quantised by compiled kernels, with scales that were calibrated beforehand; in a model that is compiled
               as a whole these are the kernels of the norm before the block and of the activation
    … tuned    the same, compiled as a whole with max-autotune: torch then chooses among its own kernels, too
    INT4       packed, with weights of 4 bits, a scale for 128 inputs of a neuron, rounded to nearest; x and the hidden
               tensor stay in bf16

The fastest of the first three is the baseline of every speed-up. FP8 and INT4 are not, as they round more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from twellc.base.torch_private import dynamo, scaled_mm
from twellc.plugins.fp8 import E4M3, LARGEST, Fp8
from twellc.plugins.meaning import activate

EAGER, COMPILED, PACKED, FP8 = "dense eager", "dense compiled", "dense packed", "dense FP8"
FP8_TUNED, INT4 = "dense FP8 tuned", "dense INT4"
BASELINES = (EAGER, COMPILED, PACKED)
# They round more than the model's dtype does.
LOSSY = (FP8, FP8_TUNED, INT4)

_FP8_CAPABILITY = (8, 9)
# cuBLAS takes FP8 matrices whose sizes are multiples of this.
_FP8_MULTIPLE = 16
# torch's product with weights of 4 bits: its capability, the inputs of a scale, the tiles of 16 inputs packed together.
_INT4_CAPABILITY = (8, 0)
_INT4_GROUP = 128
_INT4_TILES = 8
_MATRIX = 2  # dimensions of a matrix, which torch compiles for any number of rows


@dataclass(frozen=True)
class Block:
    """A block with weights as `torch.nn.Linear` has them.

    Attributes:
        gate: [d_ff, d_model]; of a plain block, which has no `up`, the up projection.
        up: [d_ff, d_model], or None.
        down: [d_out, d_ff].
        gate_bias, up_bias, down_bias: [d_ff], [d_ff], [d_out], or None.
        activation: relu, relu2, fatrelu or drelu.
        threshold: Of fatrelu: one, or float32 [d_ff].
    """

    gate: Tensor
    up: Tensor | None
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "relu"
    threshold: float | Tensor = 0.0

    def dense(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model] by two or three products."""
        return functional.linear(self.hidden(x), self.down, self.down_bias)

    def hidden(self, x: Tensor) -> Tensor:
        """Compute the hidden tensor [..., d_ff] of x [..., d_model]."""
        g = functional.linear(x, self.gate, self.gate_bias)
        u = None if self.up is None else functional.linear(x, self.up, self.up_bias)
        return combine(g, u, self.activation, self.threshold)

    def active(self, x: Tensor) -> Tensor:
        """Return which gate activations are not zero, bool [..., d_ff]."""
        return activate(functional.linear(x, self.gate, self.gate_bias), self.activation, self.threshold) != 0

    def double(self) -> Block:
        """Return the block in float64."""
        return self._with(Tensor.double)

    def copy(self) -> Block:
        """Return the block with copies of the weights."""
        return self._with(Tensor.clone)

    def _with(self, change: Callable[[Tensor], Tensor]) -> Block:
        tensors: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **tensors)


def combine(gate: Tensor, up: Tensor | None, activation: str, threshold: float | Tensor) -> Tensor:
    """Return the hidden tensor from the pre-activations of gate and up, all of one shape."""
    g = activate(gate, activation, threshold)
    if up is None:
        return g
    return g * (torch.relu(up) if activation == "drelu" else up)


def _combine_packed(gate_up: Tensor, gated: bool, activation: str, threshold: float | Tensor) -> Tensor:
    """Return the hidden tensor from the result of one product: [..., 2 d_ff] for gate and up, else [..., d_ff]."""
    gate, up = gate_up.chunk(2, -1) if gated else (gate_up, None)
    return combine(gate, up, activation, threshold)


def _to_fp8(x: Tensor, per_unit: Tensor) -> Tensor:
    return (x.float() * per_unit).clamp(-LARGEST, LARGEST).to(E4M3)


def _quantise(x: Tensor, per_unit: Tensor) -> Tensor:
    """Return x [tokens, width] in FP8, with rows of zeros up to a multiple of 16 tokens."""
    extra = -len(x) % _FP8_MULTIPLE
    return _to_fp8(functional.pad(x, (0, 0, 0, extra)) if extra else x, per_unit)


def _combine_fp8(gate_up: Tensor, gated: bool, activation: str, threshold: float | Tensor, per_unit: Tensor) -> Tensor:
    return _to_fp8(_combine_packed(gate_up, gated, activation, threshold), per_unit)


def compile_rival(function: Callable[..., Any], dynamic: bool | None = False, **settings: Any) -> Callable[..., Any]:
    """Return a function through torch.compile, to compare twellc with: as one graph, with its own compiled code.

    By default torch goes on eagerly, without a warning, behind code that it cannot trace, and after the eighth size of
    one function in all callers. Here both are errors. Each rival has its own code object, so sizes of others do not
    count.

    Args:
        function: A function or a module.
        dynamic: As `torch.compile` takes it; False compiles for exactly the sizes of each call.
        settings: Other arguments of `torch.compile`.
    """

    def run(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    run.__code__ = run.__code__.replace()
    return torch.compile(run, fullgraph=True, dynamic=dynamic, **settings)


@functools.cache
def _compiled(function: Callable[..., Tensor], *_sizes: Any, dynamic: bool | None = None) -> Callable[..., Tensor]:
    """Return a function through torch.compile, for some sizes."""
    # In torch's cache there may be a kernel that was compiled for another number of tokens, by another run.
    return compile_rival(function, dynamic, options={"fx_graph_cache": False})


def _sizes(values: Sequence[Any], tokens: int) -> Iterator[Any]:
    """Yield the sizes and values to compile for: all but the number of tokens, the rows of matrices."""
    yield tokens == 1
    for value in values:
        if isinstance(value, Tensor):
            yield value.dtype, value.shape[1:] if value.dim() == _MATRIX else value.shape
        else:
            yield value


def _fused(function: Callable[..., Tensor], rows: Tensor, *rest: Any) -> Tensor:
    """Call a function of rows [tokens, width] as one compiled kernel; it serves all numbers of tokens above one."""
    if torch.compiler.is_compiling():
        return function(rows, *rest)
    for matrix in (rows, *rest):
        if isinstance(matrix, Tensor) and matrix.dim() == _MATRIX:
            dynamo.maybe_mark_dynamic(matrix, 0)
            dynamo.mark_static(matrix, 1)
    return _compiled(function, *_sizes((rows, *rest), len(rows)))(rows, *rest)


def fused_dense(block: Block, x: Tensor) -> Tensor:
    """Compute y [..., d_out] of x [..., d_model] by a product a weight and one compiled kernel for the activation."""
    rows = x.reshape(-1, x.shape[-1])
    g = functional.linear(rows, block.gate, block.gate_bias)
    u = None if block.up is None else functional.linear(rows, block.up, block.up_bias)
    h = _fused(combine, g, u, block.activation, block.threshold)
    y = functional.linear(h, block.down, block.down_bias)
    return y.reshape(*x.shape[:-1], y.shape[-1])


class Packed:
    """A block with gate and up in one product."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._weight, self._bias = packed_weights(block)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model]."""
        block, rows = self._block, x.reshape(-1, x.shape[-1])
        gate_up = functional.linear(rows, self._weight, self._bias)
        h = _fused(_combine_packed, gate_up, block.up is not None, block.activation, block.threshold)
        y = functional.linear(h, block.down, block.down_bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def packed_weights(block: Block) -> tuple[Tensor, Tensor | None]:
    """Return gate and up in one matrix [2 d_ff, d_model], and their biases in one vector, or None without any."""
    if block.up is None:
        return block.gate, block.gate_bias
    weight = torch.cat([block.gate, block.up])
    if block.gate_bias is None and block.up_bias is None:
        return weight, None
    parts = (block.gate_bias, block.up_bias)
    return weight, torch.cat([block.gate.new_zeros(len(block.gate)) if part is None else part for part in parts])


class DenseFp8:
    """A block in FP8, with gate and up in one product."""

    def __init__(self, block: Block, x: Tensor) -> None:
        """Quantise the weights, and calibrate the scales of x and of the hidden tensor on x [..., d_model]."""
        self._block = block
        weight, self._bias = packed_weights(block)
        self._weight, self._down = Fp8.quantize(weight, "tensor"), Fp8.quantize(block.down, "tensor")
        self._x_scale, self._h_scale = (_scale(each.abs().amax()) for each in (x, block.hidden(x)))
        self._x_per_unit, self._h_per_unit = 1 / self._x_scale, 1 / self._h_scale

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model]."""
        block, rows = self._block, x.reshape(-1, x.shape[-1])
        x8 = _fused(_quantise, rows.detach(), self._x_per_unit)
        gate_up = fp8_product(Fp8(x8, self._x_scale), self._weight, x.dtype, self._bias)
        h8 = _fused(_combine_fp8, gate_up, block.up is not None, block.activation, block.threshold, self._h_per_unit)
        y = fp8_product(Fp8(h8, self._h_scale), self._down, x.dtype, block.down_bias)
        return y[: len(rows)].reshape(*x.shape[:-1], y.shape[-1])


class DenseFp8Linear:
    """A linear layer in FP8, a scale for each row of weight and x, for a model that is compiled as a whole."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Quantise the weight [out, in]."""
        self._weight, self._bias = Fp8.quantize(weight, "row"), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [..., out] of x [..., in]."""
        y = fp8_product(rounded_rows(x.reshape(-1, x.shape[-1])), self._weight, x.dtype, self._bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])


class DenseFp8Rows:
    """A block of two `DenseFp8Linear`, with gate and up in one."""

    def __init__(self, block: Block) -> None:
        """Quantise the weights."""
        self._block = block
        self._first, self._down = DenseFp8Linear(*packed_weights(block)), DenseFp8Linear(block.down, block.down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model]."""
        block = self._block
        return self._down(_combine_packed(self._first(x), block.up is not None, block.activation, block.threshold))


def takes_fp8(block: Block) -> bool:
    """Whether GPU and widths allow for FP8."""
    widths = (*block.gate.shape, len(block.down))
    return torch.cuda.get_device_capability() >= _FP8_CAPABILITY and all(width % _FP8_MULTIPLE == 0 for width in widths)


def rounded_rows(x: Tensor) -> Fp8:
    """Round rows to E4M3, each with a scale, [tokens, 1]: where this is compiled, in one kernel with what is before."""
    scale = _scale(x.abs().amax(-1, keepdim=True))
    return Fp8(_to_fp8(x, 1 / scale), scale)


def _scale(largest: Tensor) -> Tensor:
    return (largest.float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)


def fp8_product(rows: Fp8, weight: Fp8, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Compute rows W^T + bias [tokens, out] of weights [out, in] by cuBLAS."""
    values, scale = weight.t()
    result: Tensor = scaled_mm(rows.values, values, rows.scale, scale, bias=bias, out_dtype=dtype, use_fast_accum=True)
    return result


class Int4:
    """A block with weights of 4 bits, with gate and up in one product; x is bf16."""

    def __init__(self, block: Block) -> None:
        """Quantise the weights."""
        self._block = block
        weight, self._bias = packed_weights(block)
        self._weight, self._down = _packed_int4(weight), _packed_int4(block.down)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute y [..., d_out] of x [..., d_model]."""
        block, rows = self._block, x.reshape(-1, x.shape[-1])
        gate_up = _int4_product(rows, self._weight, self._bias)
        h = _fused(_combine_packed, gate_up, block.up is not None, block.activation, block.threshold)
        y = _int4_product(h, self._down, block.down_bias)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def takes_int4(block: Block) -> bool:
    """Whether GPU, type and widths allow for weights of 4 bits."""
    widths = (*block.gate.shape, len(block.down))
    return (
        torch.cuda.get_device_capability() >= _INT4_CAPABILITY
        and block.gate.dtype == torch.bfloat16
        and all(width % _INT4_GROUP == 0 for width in widths)
    )


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [rows, columns] to q · scale with q of -8 to 7.

    Returns:
        q + 8, uint8 [rows, columns], and the scales, bf16 [rows, columns / 128].
    """
    groups = weight.float().reshape(len(weight), -1, _INT4_GROUP)
    scale = (groups.abs().amax(-1) / 7).clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7) + 8
    return q.flatten(1).to(torch.uint8), scale


def _packed_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as torch's product of 4 bits takes it: its elements, and scales and zeros."""
    q, scale = quantise_int4(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack(q[:, ::2] << 4 | q[:, 1::2], _INT4_TILES)
    return packed, torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()


def _int4_product(rows: Tensor, weight: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.aten._weight_int4pack_mm(rows, weight[0], _INT4_GROUP, weight[1])
    return y if bias is None else y + bias


def compiled_dense(block: Block) -> Callable[[Tensor], Tensor]:
    """Return the block through torch.compile, for exactly the sizes of each call; blocks of one form share it."""
    weights = (block.gate, block.up, block.down, block.gate_bias, block.up_bias, block.down_bias)
    rest = (*weights, block.activation, block.threshold)
    forms = [(value.shape, value.dtype) if isinstance(value, Tensor) else value for value in rest]
    return lambda x: _compiled(_dense, x.shape, x.dtype, *forms, dynamic=False)(x, *rest)


def _dense(x: Tensor, *weights: Any) -> Tensor:
    return Block(*weights).dense(x)


def dense_forms(
    block: Block, x: Tensor, with_compiled: bool = True, with_lossy: bool = True, max_autotune: bool = False
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the dense forms of a block by name, as far as GPU and widths allow for them.

    Args:
        block: The block.
        x: The tensor to calibrate FP8 on, [..., d_model].
        with_compiled: Whether to include the form that is compiled as a whole.
        with_lossy: Whether to include the forms in FP8 and INT4.
        max_autotune: Whether to include FP8 compiled with max-autotune.
    """
    forms: dict[str, Callable[[Tensor], Tensor]] = {EAGER: block.dense}
    if with_compiled:
        forms[COMPILED] = compiled_dense(block)
    forms[PACKED] = Packed(block)
    if with_lossy and takes_fp8(block):
        forms[FP8] = DenseFp8(block, x)
        if max_autotune:
            forms[FP8_TUNED] = tuned(forms[FP8])
    if with_lossy and takes_int4(block):
        forms[INT4] = Int4(block)
    return forms


def tuned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function through torch.compile with max-autotune, for exactly the sizes of each call."""
    return compile_rival(function, mode="max-autotune-no-cudagraphs")
