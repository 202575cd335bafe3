"""Both directions of a training step on a GPU.

Hot neurons are computed by the dense products of torch, with a kernel between them; the others by the kernels of
plugins/kernels/training. Nothing here waits for the GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.plugins import library
from twellc.plugins.block import GATED, Operands, problem_of, tensors_of
from twellc.plugins.gradients.call import Call, Kept
from twellc.plugins.meaning import as_read, widths_of


@dataclass(frozen=True)
class _Run:
    """A call with its tensors as the kernels read them, x and what is like it [tokens, width].

    Attributes:
        hot: How many neurons are computed densely.
        order: int64 [d_ff], these first; None where that is the order of the weights.
    """

    call: Call
    operands: Operands[Tensor]
    hot: int
    order: Tensor | None

    @property
    def x(self) -> Tensor:
        return self.operands.x

    @property
    def cold(self) -> int:
        """How many neurons are sparse."""
        return self.call.d_ff - self.hot

    @property
    def gated(self) -> bool:
        return self.operands.variant is GATED

    def rows(self, weight: Tensor, *, cold: bool = False) -> Tensor:
        """Return the rows of the hot neurons, or of the others, of a tensor that has one for each neuron."""
        if self.order is None:
            return weight[self.hot :] if cold else weight[: self.hot]
        return weight[self.order[self.hot :] if cold else self.order[: self.hot]]

    def problem(self, d_ff: int) -> library.Problem:
        """Return the problem of so many of the neurons."""
        widths = {**widths_of(self.operands), "d_ff": d_ff}
        variant, dtype = self.operands.variant, dtype_name(self.x.dtype)
        return problem_of(variant, self.call.options, dtype, tokens=self.call.tokens, **widths)

    def neurons(self) -> Tensor | None:
        """Return int32 [cold]: which rows the sparse neurons have; None where they are all neurons in their order."""
        if self.order is not None:
            return self.order[self.hot :].int()
        if self.hot == 0:
            return None
        return torch.arange(self.hot, self.call.d_ff, dtype=torch.int32, device=self.x.device)

    def hot_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the hot rows of what x is multiplied by, z's and then u's, and their biases."""
        weights = [weight for weight in (self.operands.w_gate, self.operands.w_up) if weight is not None]
        biases = [self.operands.b_gate, self.operands.b_up] if self.gated else [self.operands.b_up]
        bias = None
        if any(each is not None for each in biases):
            bias = torch.cat([self.x.new_zeros(self.hot) if each is None else self.rows(each) for each in biases])
        return torch.cat([self.rows(weight) for weight in weights]), bias


def _run_of(call: Call) -> _Run:
    operands, widths = call.operands, widths_of(call.operands)
    dtype = dtype_name(operands.x.dtype)
    if dtype not in library.DTYPES:
        raise TypeError(f"twell: the CUDA kernels take {' or '.join(library.DTYPES)}, got {dtype}")
    for name, tensor in operands.named().items():
        if tensor.device != operands.x.device:
            raise ValueError(f"twell: {name} must be on {operands.x.device}, got {tensor.device}")
    for name in ("d_model", "d_out"):
        if widths[name] > library.MAX_TRAIN_WIDTH:
            raise ValueError(f"twell: {name} must be at most {library.MAX_TRAIN_WIDTH} in training, got {widths[name]}")
    flat = {name: each.reshape(-1, each.shape[-1]) for name, each in operands.named().items() if each.dim() != 1}
    read = Operands(**{name: as_read(each) for name, each in {**operands.named(), **flat}.items()})
    hot = call.step.hot
    # Which neurons are hot is all that the order says, so where all are it says nothing.
    run = _Run(call, read, hot, None if hot == call.d_ff else call.step.order)
    fault = library.load().twell_validate(ctypes.byref(run.problem(call.d_ff)))
    if fault:
        raise ValueError(f"twell: {fault.decode()}")
    return run


def _capacity(call: Call) -> int:
    """Return for how many pairs there is place."""
    if call.step.hot == call.d_ff:
        return 0
    cold = call.d_ff - call.step.hot
    return min(call.tokens * min(call.step.pairs, cold), library.MAX_PAIRS)


def shapes_kept(call: Call) -> tuple[tuple[Any, ...], ...]:
    """Return the shapes of `Kept`."""
    gated = call.operands.variant is GATED
    pairs, has_cold = _capacity(call), call.step.hot < call.d_ff
    return (
        (call.tokens + 2 if has_cold else 0,),
        (pairs,),
        (pairs if gated else 0,),
        (call.tokens, call.step.hot * (2 if gated else 1)),
    )


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pairs(kept: Kept, capacity: int, gated: bool) -> library.TrainPairs:
    return library.TrainPairs(
        row_begin=kept.row_begin.data_ptr(), words=kept.pairs.data_ptr(),
        ups=kept.ups.data_ptr() if gated else None, capacity=capacity,
    )  # fmt: skip


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"twell: the kernels failed with CUDA error {status}")


def _stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Kept]:
    """Return y, the L1 term, the tokens for which each neuron is active, and what the backward needs."""
    run = _run_of(call)
    with torch.cuda.device(run.x.device):
        return _forward(run)


def _forward(run: _Run) -> tuple[Tensor, Tensor, Tensor, Kept]:
    call, operands, x = run.call, run.operands, run.x
    kept = Kept(
        *(
            x.new_empty(shape, dtype=dtype)
            for shape, dtype in zip(
                shapes_kept(call), (torch.int64, torch.int32, torch.int16, torch.int16), strict=True
            )
        )
    )
    y = x.new_empty((*call.operands.x.shape[:-1], operands.w_down.shape[1]))
    counts = torch.zeros(call.d_ff, dtype=torch.int64, device=x.device)
    if call.tokens == 0:
        return y, torch.zeros((), device=x.device), counts, kept
    l1 = torch.zeros((), device=x.device)
    hot_y = None
    if run.hot:
        hot_y, hot_l1, hot_counts = _forward_hot(run, kept.hot)
        l1 = l1 + hot_l1
        counts[: run.hot] = hot_counts
    if run.cold:
        row_l1, cold_counts = _forward_cold(run, kept, hot_y, y)
        l1 = l1 + row_l1.sum()
        counts[run.hot :] = cold_counts
    else:
        assert hot_y is not None
        total = hot_y if operands.residual is None else hot_y + operands.residual
        y.copy_(total.view(y.shape))
    if run.order is not None:
        counts = torch.empty_like(counts).scatter_(0, run.order, counts)
    return y, l1 / call.tokens, counts, kept


def _forward_hot(run: _Run, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the hot neurons add to y (with b_down if there are no others), their sum of |h| and their counts."""
    x, lib, problem = run.x, library.load(), run.problem(run.hot)
    weight, bias = run.hot_weights()
    z = kept.view(x.dtype)
    if bias is None:
        torch.mm(x, weight.t(), out=z)
    else:
        torch.addmm(bias, x, weight.t(), out=z)
    h = x.new_empty(run.call.tokens, run.hot)
    counts = torch.empty(run.hot, dtype=torch.int32, device=x.device)
    parts = torch.empty(lib.twell_train_hot_parts(ctypes.byref(problem)), device=x.device)
    tensors = library.TrainHot(
        z=z.data_ptr(), h=h.data_ptr(), counts=counts.data_ptr(), l1_parts=parts.data_ptr(), dh=None, dz=None, dl1=None
    )
    _check(lib.twell_train_hot(ctypes.byref(problem), ctypes.byref(tensors), _stream()))
    down, b_down = run.rows(run.operands.w_down), run.operands.b_down
    y = h @ down if run.cold or b_down is None else torch.addmm(b_down, h, down)
    return y, parts.sum(), counts


def _forward_cold(run: _Run, kept: Kept, hot_y: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
    """Write y, and return each token's sum of |h| of the sparse neurons, and their counts."""
    x, lib, problem, operands = run.x, library.load(), run.problem(run.cold), run.operands
    capacity, neurons = _capacity(run.call), run.neurons()
    row_l1 = torch.empty(run.call.tokens, device=x.device)
    counts = torch.empty(run.cold, dtype=torch.int32, device=x.device)
    # The gate's rows are read in order, by tensor cores; those of the other weights one by one, where they are.
    first, bias = operands.first
    ordered = {**operands.named()}
    name = "w_gate" if run.gated else "w_up"
    ordered[name] = as_read(run.rows(first, cold=True))
    if bias is not None:
        ordered[name.replace("w_", "b_")] = as_read(run.rows(bias, cold=True))
    read = Operands(**ordered)
    given = library.TrainForward(
        neurons=_pointer(neurons), pairs=_pairs(kept, capacity, run.gated), hot=_pointer(hot_y),
        row_l1=row_l1.data_ptr(), counts=counts.data_ptr(),
    )  # fmt: skip
    tensors = tensors_of(read.map(Tensor.data_ptr), y.data_ptr())
    size = lib.twell_train_forward_bytes(ctypes.byref(problem), capacity)
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
    _check(
        lib.twell_train_forward(
            ctypes.byref(problem), ctypes.byref(tensors), ctypes.byref(given), workspace.data_ptr(), size, _stream()
        )
    )
    return row_l1, counts


def backward(dy: Tensor, dl1: Tensor, kept: Kept, call: Call, *, for_x: bool, for_weights: bool) -> dict[str, Tensor]:
    """Return the gradients of x, and of weights and biases, as far as they are asked for."""
    run = _run_of(call)
    with torch.cuda.device(run.x.device):
        return _backward(run, as_read(dy.reshape(-1, dy.shape[-1])), dl1.float().contiguous(), kept, for_x, for_weights)


def _backward(run: _Run, dy: Tensor, dl1: Tensor, kept: Kept, for_x: bool, for_weights: bool) -> dict[str, Tensor]:
    names = [name for name in run.operands.named() if name not in ("x", "residual")]
    make = torch.zeros_like if run.call.tokens == 0 else torch.empty_like
    found = {name: make(getattr(run.operands, name)) for name in names if for_weights}
    if for_x:
        found["x"] = make(run.x)
    if run.call.tokens != 0:
        hot_dx = _backward_hot(run, dy, dl1, kept.hot, found) if run.hot else None
        if run.cold:
            _backward_cold(run, dy, dl1, kept, hot_dx, found)
        elif hot_dx is not None:
            found["x"] = hot_dx
        if "b_down" in found:
            found["b_down"] = dy.sum(0)
    if for_x:
        found["x"] = found["x"].view(run.call.operands.x.shape)
    return found


def _backward_hot(run: _Run, dy: Tensor, dl1: Tensor, kept: Tensor, found: dict[str, Tensor]) -> Tensor | None:
    """Write the hot rows of the weights' gradients, and return what the hot neurons add to dx."""
    x, lib, problem = run.x, library.load(), run.problem(run.hot)
    dh = dy @ run.rows(run.operands.w_down).t()
    h, z = torch.empty_like(dh), kept.view(x.dtype)
    dz = torch.empty_like(z)
    tensors = library.TrainHot(
        z=z.data_ptr(), h=h.data_ptr(), counts=None, l1_parts=None, dh=dh.data_ptr(), dz=dz.data_ptr(),
        dl1=dl1.data_ptr(),
    )  # fmt: skip
    _check(lib.twell_train_hot(ctypes.byref(problem), ctypes.byref(tensors), _stream()))
    if "w_down" in found:
        _put(run, found, "w_down", h.t() @ dy)
        names = ("gate", "up") if run.gated else ("up",)
        for name, rows in zip(names, (dz.t() @ x).split(run.hot), strict=True):
            _put(run, found, f"w_{name}", rows)
        if "b_gate" in found or "b_up" in found:
            for name, sums in zip(names, dz.sum(0).split(run.hot), strict=True):
                _put(run, found, f"b_{name}", sums)
    return dz @ run.hot_weights()[0] if "x" in found else None


def _put(run: _Run, found: dict[str, Tensor], name: str, rows: Tensor) -> None:
    """Store the rows of the hot neurons in a gradient."""
    if name not in found:
        return
    if run.order is None:
        found[name][: run.hot] = rows
    else:
        found[name].index_copy_(0, run.order[: run.hot], rows)


def _backward_cold(
    run: _Run, dy: Tensor, dl1: Tensor, kept: Kept, hot_dx: Tensor | None, found: dict[str, Tensor]
) -> None:
    """Write dx, and the rows of the sparse neurons of the weights' gradients."""
    lib, problem, operands = library.load(), run.problem(run.cold), run.operands
    capacity, neurons = _capacity(run.call), run.neurons()
    pointers = {name: each.data_ptr() for name, each in found.items() if name not in ("x", "b_down")}
    if not run.gated:
        pointers = {name.replace("_up", "_gate"): each for name, each in pointers.items()}
    given = library.TrainBackward(
        neurons=_pointer(neurons), pairs=_pairs(kept, capacity, run.gated), dy=dy.data_ptr(), dl1=dl1.data_ptr(),
        hot=_pointer(hot_dx), dx=_pointer(found.get("x")), **pointers,
    )  # fmt: skip
    tensors = tensors_of(operands.map(Tensor.data_ptr), 0)
    size = lib.twell_train_backward_bytes(ctypes.byref(problem), capacity)
    workspace = torch.empty(size, dtype=torch.uint8, device=run.x.device)
    _check(
        lib.twell_train_backward(
            ctypes.byref(problem), ctypes.byref(tensors), ctypes.byref(given), workspace.data_ptr(), size, _stream()
        )
    )
