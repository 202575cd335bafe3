"""Features of sparse autoencoders: the active neurons of each token with their values, without a dense tensor.

    encode    x [..., d_model]  ->  features: of each token the neurons whose act(x W^T + b) is not 0, and its values
    decode    features          ->  y [..., d_out] = sum of value * w_dec[neuron] + b_dec

docs/features.md has an example. On a GPU both run kernels of the plugin library, in bfloat16 and float16; on a CPU they
are computed in pieces. The pre-activation is rounded to the element type, as in a `twell` block. y is a sum in float32,
rounded once. The same call on the same device gives the same bits. Nothing is recorded for gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.plugins import library
from twellc.plugins.block import PLAIN, BlockOptions, Operands, problem_of, tensors_of
from twellc.plugins.meaning import (
    activate,
    as_read,
    check_call,
    check_on_gpu,
    check_problem,
    check_status,
    math_dtype,
    widths_of,
)

# On a CPU: neurons, tokens and entries of a piece.
_NEURONS, _TOKENS, _ENTRIES = 4096, 256, 4096
# On a GPU two parts of the tokens are in memory, half a byte for each token and neuron: each is a sixth of them, but
# has so many tokens at least, and so many tokens * d_ff at most.
_PART, _FEWEST_TOKENS, _MOST_PAIRS = 6, 128, 1 << 30
# Where all is kept, which takes five times the memory, a fifth of a part is encoded at once.
_KEPT = 5


@dataclass(frozen=True)
class Features:
    """Active neurons of tokens, those of one token after those of another, in ascending order.

    Attributes:
        indices: Which neurons, int32 [entries].
        values: Their activations, in the dtype of x [entries].
        offsets: Where each token's entries begin, and where the last one's end, int64 [tokens + 1].
        d_ff: How many neurons there are.
        leading: The dimensions of x but the last, of which the product is `tokens`.
    """

    indices: Tensor
    values: Tensor
    offsets: Tensor
    d_ff: int
    leading: torch.Size

    def to_sparse_csr(self) -> Tensor:
        """Return them as a sparse tensor [tokens, d_ff] of torch, in the layout `torch.sparse_csr`."""
        narrow = len(self.indices) <= torch.iinfo(torch.int32).max
        rows = self.offsets.int() if narrow else self.offsets
        columns = self.indices if narrow else self.indices.long()
        return torch.sparse_csr_tensor(rows, columns, self.values, (len(self.offsets) - 1, self.d_ff))


@torch.no_grad()
def encode(
    x: Tensor,
    w_enc: Tensor,
    b_enc: Tensor | None = None,
    *,
    activation: str = "relu",
    threshold: float = 0.0,
    thresholds: Tensor | None = None,
) -> Features:
    """Return which neurons are active for each token, and their activations.

    On a GPU it waits for the number of active neurons, so it cannot be captured in a CUDA graph.

    Args:
        x: [..., d_model], in the dtype of the weights.
        w_enc: [d_ff, d_model], up to 2^20 neurons.
        b_enc: [d_ff], or None.
        activation: relu, relu2 or fatrelu.
        threshold: Of fatrelu, which keeps what is above it.
        thresholds: Of fatrelu (JumpReLU), float32 [d_ff]: one for each neuron. Below 0 counts as 0.

    Raises:
        ValueError: A shape does not fit, an option is out of range, or the kernels do not take the widths.
        TypeError: A dtype does not fit; on a GPU, one other than bfloat16 and float16.
    """
    w_dec = w_enc.new_empty((w_enc.shape[0], 8), device="meta")
    operands = Operands(x=x, w_up=w_enc, b_up=b_enc, w_down=w_dec, thresholds=thresholds)
    options = BlockOptions(activation=activation, threshold=threshold)
    check_call(operands, options)
    rows = operands.x.reshape(-1, x.shape[-1])
    run = _encode_on_gpu if x.is_cuda else _encode_on_cpu
    return Features(*run(operands, rows, options), w_enc.shape[0], x.shape[:-1])


@torch.no_grad()
def decode(features: Features | tuple[Tensor, Tensor], w_dec: Tensor, b_dec: Tensor | None = None) -> Tensor:
    """Return y [..., d_out], the sum of each token's rows of w_dec times their values.

    A value of 0 adds exactly 0. An index that is not 0 to d_ff - 1 makes its token's y NaN, unless its value is 0.

    Args:
        features: What `encode` gave; or indices, of an integer dtype, and values, both [..., k], as `torch.topk` gives.
        w_dec: [d_ff, d_out], in the dtype of the values.
        b_dec: [d_out], or None.

    Raises:
        ValueError: A shape does not fit, or the kernels do not take the widths.
        TypeError: A dtype does not fit; on a GPU, one other than bfloat16 and float16.
    """
    if isinstance(features, Features):
        indices, values, offsets, leading = features.indices, features.values, features.offsets, features.leading
        d_ff, per_token = features.d_ff, 0
    else:
        (indices, values), offsets = features, None
        leading, d_ff, per_token = values.shape[:-1], len(w_dec), values.shape[-1]
        if indices.shape != values.shape or indices.is_floating_point():
            got = f"{tuple(indices.shape)} of {indices.dtype} and {tuple(values.shape)}"
            raise ValueError(f"twell: indices, of integers, and values must have one shape [..., k], got {got}")
    # A block whose input nobody reads: what it demands of w_down and b_down, and of one dtype.
    x = values.new_empty((0, 8), device="meta")
    operands = Operands(x=x, w_up=w_dec.new_empty((d_ff, 8), device="meta"), w_down=w_dec, b_down=b_dec)
    check_call(operands, BlockOptions(activation="relu"))
    run = _decode_on_gpu if values.is_cuda else _decode_on_cpu
    y = run(operands, (indices.reshape(-1), values.reshape(-1)), offsets, per_token, math.prod(leading))
    return y.reshape(*leading, w_dec.shape[1])


# ---- on a CPU ----


def _encode_on_cpu(operands: Operands[Tensor], x: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, values and offsets of all tokens."""
    wide, found = math_dtype(x.dtype), []
    for first in range(0, len(operands.w_up), _NEURONS):
        own = slice(first, first + _NEURONS)
        weight = operands.w_up[own].to(wide)
        bias = None if operands.b_up is None else operands.b_up[own].to(wide)
        threshold = options.threshold if operands.thresholds is None else operands.thresholds[own]
        for begin in range(0, len(x), _TOKENS):
            z = torch.nn.functional.linear(x[begin : begin + _TOKENS].to(wide), weight, bias).to(x.dtype)
            g = activate(z, options.activation, threshold)
            token, neuron = g.nonzero(as_tuple=True)
            found.append((token + begin, (neuron + first).int(), g[token, neuron]))
    tokens, indices, values = map(torch.cat, zip(*found, strict=True)) if found else _nothing(x)
    order = tokens.argsort(stable=True)
    counts = tokens.bincount(minlength=len(x))
    return indices[order], values[order], torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _nothing(x: Tensor) -> Iterator[Tensor]:
    return iter((x.new_empty(0, dtype=torch.int64), x.new_empty(0, dtype=torch.int32), x.new_empty(0)))


def _decode_on_cpu(
    operands: Operands[Tensor], entries: tuple[Tensor, Tensor], offsets: Tensor | None, per_token: int, tokens: int
) -> Tensor:
    """Return y [tokens, d_out]."""
    w_dec, (indices, values) = operands.w_down, entries
    wide = math_dtype(values.dtype)
    if offsets is None:
        rows = torch.arange(tokens).repeat_interleave(per_token)
    else:
        rows = torch.arange(tokens).repeat_interleave(offsets.diff())
    known = (indices >= 0) & (indices < len(w_dec))
    y = torch.zeros(tokens, w_dec.shape[1], dtype=wide)
    factors = values.to(wide).where(known, math.nan)
    for place in torch.split((values != 0).nonzero()[:, 0], _ENTRIES):
        read = w_dec[indices[place].where(known[place], 0).long()].to(wide)
        y.index_add_(0, rows[place], read * factors[place, None])
    return (y if operands.b_down is None else y + operands.b_down.to(wide)).to(values.dtype)


# ---- on a GPU ----


def _encode_on_gpu(operands: Operands[Tensor], x: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_encode_on_cpu` does. While the gate of a part runs, the lists of the one before are asked for."""
    named = {name: each for name, each in operands.named().items() if name != "w_down"}
    check_on_gpu(named)
    read = {name: as_read(each) for name, each in named.items() if name != "x"} | {"w_down": operands.w_down}
    lists = _Lists()
    with torch.cuda.device(x.device):
        waiting: _Part | None = None
        for rows in torch.split(as_read(x), _tokens_of_part(len(x), len(operands.w_up))):
            of_part = Operands(**read, x=rows)
            started = None if lists.overflowed else _Part(of_part, options)
            lists.finish(waiting)
            if started is None:
                lists.keep_all(of_part, options)
            waiting = started
        lists.finish(waiting)
    return lists.joined()


def _tokens_of_part(tokens: int, d_ff: int) -> int:
    most = max(_FEWEST_TOKENS, min(-(-tokens // _PART), _MOST_PAIRS // d_ff))
    parts = max(1, -(-tokens // most))
    return max(1, -(-tokens // parts))


class _Part:
    """Some of the tokens: the gate has been asked for their packed tiles, and for how many entries each has."""

    def __init__(self, operands: Operands[Tensor], options: BlockOptions, keeps_all: bool = False) -> None:
        x, lib = operands.x, library.load()
        self.operands, self.options, self._keeps_all = operands, options, keeps_all
        self._problem = problem_of(PLAIN, options, dtype_name(x.dtype), tokens=len(x), **widths_of(operands))
        check_problem(self._problem)
        self._groups = lib.twell_feature_groups(self._problem)
        self._workspace = x.new_empty(lib.twell_encode_bytes(self._problem, keeps_all), dtype=torch.uint8)
        counts = x.new_empty(len(x) * self._groups + 1, dtype=torch.int64)
        counts[:1] = 0  # so that sums say where each group begins
        tensors = tensors_of(operands.map(lambda each: 0 if each.is_meta else each.data_ptr()), 0)
        first = counts.data_ptr() + counts.element_size()
        check_status(lib.twell_encode(self._problem, tensors, keeps_all, first, *self._memory()))
        self._begins = counts.cumsum(0)
        self._known = torch.empty(2, dtype=torch.int64, pin_memory=x.is_cuda)
        self._known.copy_(torch.stack([self._begins[-1], counts.amin()]), non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def _memory(self) -> tuple[int, int, int]:
        stream: int = torch.cuda.current_stream().cuda_stream
        return self._workspace.data_ptr(), len(self._workspace), stream

    def lists(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return indices, values and offsets; None if a tile has overflowed, so that not all was kept."""
        self._event.synchronize()
        total, least = self._known.tolist()
        if least < 0:
            return None
        x = self.operands.x
        indices, values = x.new_empty(total, dtype=torch.int32), x.new_empty(total)
        if total:
            places = self._begins.data_ptr(), indices.data_ptr(), values.data_ptr()
            status = library.load().twell_list_features(self._problem, self._keeps_all, *places, *self._memory())
            check_status(status)
        return indices, values, self._begins[:: self._groups].contiguous()


class _Lists:
    """The lists of the parts so far."""

    def __init__(self) -> None:
        self.overflowed = False
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []

    def finish(self, part: _Part | None) -> None:
        """Add the lists of a part, of which all is encoded again if a tile has overflowed."""
        found = None if part is None else part.lists()
        if found is not None:
            self._parts.append(found)
        elif part is not None:
            self.overflowed = True
            self.keep_all(part.operands, part.options)

    def keep_all(self, operands: Operands[Tensor], options: BlockOptions) -> None:
        """Add the lists of some tokens, whatever their tiles have."""
        for rows in torch.split(operands.x, -(-len(operands.x) // _KEPT)):
            found = _Part(replace(operands, x=rows), options, keeps_all=True).lists()
            assert found is not None
            self._parts.append(found)

    def joined(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the lists of all parts as one."""
        if len(self._parts) == 1:
            return self._parts[0]
        indices, values, offsets = zip(*self._parts, strict=True)
        ends, begin = [offsets[0]], len(indices[0])
        for each, own in zip(offsets[1:], indices[1:], strict=True):
            ends.append(each[1:] + begin)
            begin += len(own)
        return torch.cat(indices), torch.cat(values), torch.cat(ends)


def _decode_on_gpu(
    operands: Operands[Tensor], entries: tuple[Tensor, Tensor], offsets: Tensor | None, per_token: int, tokens: int
) -> Tensor:
    """Return what `_decode_on_cpu` does."""
    indices, values = entries
    given = (
        {"w_down": operands.w_down}
        if operands.b_down is None
        else {"w_down": operands.w_down, "b_down": operands.b_down}
    )
    check_on_gpu({"x": values, "indices": indices, **given})
    options = BlockOptions(activation="relu")
    problem = problem_of(PLAIN, options, dtype_name(values.dtype), tokens=tokens, **widths_of(operands))
    read = {name: as_read(each) for name, each in given.items()}
    y = values.new_empty(tokens, operands.w_down.shape[1])
    tensors = library.Tensors(**{name: each.data_ptr() for name, each in read.items()}, y=y.data_ptr())
    indices, values = indices.int().contiguous(), values.contiguous()
    with torch.cuda.device(values.device):
        check_problem(problem)
        begins, stream = None if offsets is None else offsets.data_ptr(), torch.cuda.current_stream().cuda_stream
        lists = indices.data_ptr(), values.data_ptr(), begins, per_token
        check_status(library.load().twell_decode(problem, tensors, *lists, stream))
    return y
