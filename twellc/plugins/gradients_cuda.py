"""Both directions of a training step on a GPU.

Hot neurons are computed by the dense products of torch, with a kernel between them; the others by the kernels of
plugins/kernels/training. Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twellc.base.dtypes import dtype_name
from twellc.plugins import library
from twellc.plugins.block import GATED, Operands, field_of, problem_of, tensors_of
from twellc.plugins.gradients_call import KEPT_DTYPES, Call, Kept
from twellc.plugins.kernel_calls import as_read, check_on_gpu, check_problem, launch, run_on
from twellc.plugins.meaning import widths_of


@dataclass(frozen=True)
class _Run:
    """A call with its tensors as the kernels read them, x and the like as [tokens, width].

    Attributes:
        call: The call.
        operands: The tensors.
        widths: d_model, d_ff and d_out.
        hot_rows: int32 [hot]: the rows of the hot neurons in the weights; None: the first ones.
        cold_rows: int32 [cold]: those of the others; None: all rows.
    """

    call: Call
    operands: Operands[Tensor]
    widths: dict[str, int]
    hot_rows: Tensor | None
    cold_rows: Tensor | None

    @property
    def x(self) -> Tensor:
        return self.operands.x

    @property
    def hot(self) -> int:
        """How many neurons are computed densely."""
        return self.call.step.hot

    @property
    def cold(self) -> int:
        """How many neurons are not."""
        return self.call.d_ff - self.hot

    @property
    def gated(self) -> bool:
        return self.operands.variant is GATED

    @property
    def first(self) -> str:
        """The name of the projection whose output is activated."""
        return "gate" if self.gated else "up"

    def problem(self, d_ff: int) -> library.Problem:
        """Return the problem for `d_ff` of the neurons."""
        widths = {**self.widths, "d_ff": d_ff}
        dtype = dtype_name(self.x.dtype)
        return problem_of(self.operands.variant, self.call.options, dtype, tokens=self.call.tokens, **widths)

    @property
    def hot_projections(self) -> list[str]:
        """The names of the projections that read x, in the order of the products' columns."""
        return ["gate", "up"] if self.gated else ["up"]

    @property
    def apart(self) -> bool:
        """Whether each projection of the hot neurons is a separate product; where all are hot, nothing is copied."""
        return self.cold == 0

    def projected(self, kept: Tensor) -> list[Tensor]:
        """Split a tensor with the layout of `Kept.hot`: into z [tokens, hot], and u in a gated block."""
        count = len(self.hot_projections)
        return list(kept.view(count, -1, self.hot) if self.apart else kept.chunk(count, dim=1))

    def hot_weights(self) -> tuple[list[Tensor], Tensor]:
        """Return the matrices to multiply x by, and the hot rows of w_down.

        The matrices are the projections, or one matrix with the hot rows of one projection after the other.
        """
        names, weights = self.hot_projections, self.operands.named()
        if self.apart:
            return [weights[f"w_{name}"] for name in names], weights["w_down"]
        first = self.x.new_empty(len(names) * self.hot, self.widths["d_model"])
        down = self.x.new_empty(self.hot, self.widths["d_out"])
        parts = zip(names, first.chunk(len(names)), strict=True)
        _copy_rows(
            self.x.device,
            [
                *(_copy(weights[f"w_{name}"], part, self.hot, from_rows=self.hot_rows) for name, part in parts),
                _copy(weights["w_down"], down, self.hot, from_rows=self.hot_rows),
            ],
        )
        return [first], down

    def hot_biases(self) -> list[Tensor | None]:
        """Return the biases for the products with `hot_weights`."""
        given = self.operands.named()
        biases = [given.get(f"b_{name}") for name in self.hot_projections]
        if self.apart:
            return list(biases)
        if all(each is None for each in biases):
            return [None]
        rows = (self.x.new_zeros(self.hot) if each is None else _rows(each, self.hot, self.hot_rows) for each in biases)
        return [torch.cat(list(rows))]


def _rows(values: Tensor, count: int, rows: Tensor | None) -> Tensor:
    return values[:count] if rows is None else values.index_select(0, rows)


def _copy(
    source: Tensor, target: Tensor, rows: int, *, from_rows: Tensor | None = None, to_rows: Tensor | None = None
) -> library.TrainCopy:
    pointers = _pointers(source=source, target=target, from_rows=from_rows, to_rows=to_rows)
    return library.TrainCopy(rows=rows, width=source.shape[1], **pointers)


def _copy_rows(device: torch.device, copies: list[library.TrainCopy]) -> None:
    array = (library.TrainCopy * len(copies))(*copies)
    run_on(device, library.load().twell_train_copy_rows, array, len(copies))


def _run_hot(run: _Run, tensors: library.TrainHot) -> None:
    run_on(run.x.device, library.load().twell_train_hot, run.problem(run.hot), tensors)


def _pointers(**tensors: Tensor | None) -> dict[str, int]:
    """Return the addresses of the tensors that are there, by name."""
    return {name: each.data_ptr() for name, each in tensors.items() if each is not None}


def _run_of(call: Call) -> _Run:
    operands, widths = call.operands, widths_of(call.operands)
    check_on_gpu(operands.named())
    named = operands.named()
    for name in ("d_model", "d_out"):
        if widths[name] > library.MAX_TRAIN_WIDTH:
            raise ValueError(f"twell: {name} must be at most {library.MAX_TRAIN_WIDTH} in training, got {widths[name]}")
    for name in ("x", "residual"):
        if name in named:
            named[name] = named[name].reshape(-1, named[name].shape[-1])
    hot, order = call.step.hot, call.step.order
    cold = call.d_ff - hot
    hot_rows = cold_rows = None
    if order is not None and cold:
        hot_rows, cold_rows = order[:hot], order[hot:]
    elif hot and cold:
        cold_rows = torch.arange(hot, call.d_ff, dtype=torch.int32, device=operands.x.device)
    read = Operands(**{name: as_read(each) for name, each in named.items()})
    run = _Run(call, read, widths, hot_rows, cold_rows)
    check_problem(run.problem(call.d_ff))
    return run


def _capacity(call: Call) -> int:
    """Return the number of pairs that have room."""
    cold = call.d_ff - call.step.hot
    return min(call.tokens * min(call.step.pairs, cold), library.MAX_PAIRS)


def shapes_kept(call: Call) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of `Kept`."""
    gated = call.operands.variant is GATED
    pairs, has_cold = _capacity(call), call.step.hot < call.d_ff
    return (
        (call.tokens + 2 if has_cold else 0,),
        (pairs,),
        (pairs if gated else 0,),
        (call.tokens, call.step.hot * (2 if gated else 1)),
    )


def _pairs(run: _Run, kept: Kept) -> library.TrainPairs:
    pointers = _pointers(row_begin=kept.row_begin, words=kept.pairs, ups=kept.ups if run.gated else None)
    return library.TrainPairs(capacity=_capacity(run.call), **pointers)


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Kept]:
    """Return y, the L1 term, the tokens for which each neuron is active, and the tensors for the backward."""
    run = _run_of(call)
    with torch.cuda.device(run.x.device):
        return _forward(run)


def _forward(run: _Run) -> tuple[Tensor, Tensor, Tensor, Kept]:
    call, x, device = run.call, run.x, run.x.device
    shapes = zip(shapes_kept(call), KEPT_DTYPES, strict=True)
    kept = Kept(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes))
    y = x.new_empty((*call.operands.x.shape[:-1], run.widths["d_out"]))
    counts = torch.zeros(call.d_ff, dtype=torch.int32, device=device)
    if call.tokens == 0:
        return y, torch.zeros((), device=device), counts, kept
    # Parts of the sum of |h|: of the hot neurons' kernel, then of each token's sparse neurons.
    hot_parts = library.load().twell_train_hot_parts(run.problem(run.hot)) if run.hot else 0
    parts = torch.empty(hot_parts + (call.tokens if run.cold else 0), device=device)
    hot_y = _forward_hot(run, kept.hot, parts, counts) if run.hot else None
    if run.cold:
        _forward_cold(run, kept, hot_y, y, parts[hot_parts:], counts)
    elif hot_y is not None:
        residual = run.operands.residual
        y = (hot_y if residual is None else hot_y + residual).view(y.shape)
    return y, parts.sum() / call.tokens, counts, kept


def _forward_hot(run: _Run, kept: Tensor, parts: Tensor, counts: Tensor) -> Tensor:
    """Return the hot neurons' part of y, with b_down if there are no others."""
    x, kept = run.x, kept.view(run.x.dtype)
    (weights, down), b_down = run.hot_weights(), run.operands.b_down
    parts_of_x = run.projected(kept)
    for weight, bias, product in zip(weights, run.hot_biases(), parts_of_x if run.apart else [kept], strict=True):
        if bias is None:
            torch.mm(x, weight.t(), out=product)
        else:
            torch.addmm(bias, x, weight.t(), out=product)
    h = x.new_empty(run.call.tokens, run.hot)
    z, u = parts_of_x[0], parts_of_x[1] if run.gated else None
    pointers = _pointers(z=z, u=u, h=h, neurons=run.hot_rows, counts=counts, l1_parts=parts)
    _run_hot(run, library.TrainHot(stride=z.stride(0), **pointers))
    return h @ down if run.cold or b_down is None else torch.addmm(b_down, h, down)


def _forward_cold(run: _Run, kept: Kept, hot_y: Tensor | None, y: Tensor, row_l1: Tensor, counts: Tensor) -> None:
    """Write y and each token's sum of |h| of the sparse neurons, and count how often each of these is active."""
    lib, problem, named = library.load(), run.problem(run.cold), run.operands.named()
    if run.cold_rows is not None:
        # Tensor cores read the gate's rows in order; rows of other weights are read one by one, in place.
        weight, bias = run.operands.first
        named[f"w_{run.first}"] = weight.new_empty(run.cold, weight.shape[1])
        _copy_rows(run.x.device, [_copy(weight, named[f"w_{run.first}"], run.cold, from_rows=run.cold_rows)])
        if bias is not None:
            named[f"b_{run.first}"] = bias.index_select(0, run.cold_rows)
    pointers = _pointers(neurons=run.cold_rows, hot=hot_y, row_l1=row_l1, counts=counts)
    given = library.TrainForward(pairs=_pairs(run, kept), **pointers)
    tensors = tensors_of(Operands(**named).map(Tensor.data_ptr), y.data_ptr())
    size = lib.twell_train_forward_bytes(problem, _capacity(run.call))
    launch(run.x.device, lib.twell_train_forward, size, problem, tensors, given)


def backward(dy: Tensor, dl1: Tensor, kept: Kept, call: Call, wanted: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradients of these names: of x, or of all weights and biases, or of both."""
    run = _run_of(call)
    with torch.cuda.device(run.x.device):
        return _backward(run, as_read(dy.reshape(-1, dy.shape[-1])), dl1.float().contiguous(), kept, wanted)


def _backward(run: _Run, dy: Tensor, dl1: Tensor, kept: Kept, wanted: Sequence[str]) -> dict[str, Tensor]:
    named = run.operands.named()
    make = torch.zeros_like if run.call.tokens == 0 else torch.empty_like
    found = {name: make(named[name]) for name in wanted}
    if run.call.tokens != 0:
        hot_dx = _backward_hot(run, dy, dl1, kept.hot, found) if run.hot else None
        if run.cold:
            _backward_cold(run, dy, dl1, kept, hot_dx, found)
        elif hot_dx is not None:
            found["x"] = hot_dx
        if "b_down" in found:
            torch.sum(dy, 0, out=found["b_down"])
    if "x" in found:
        found["x"] = found["x"].view(run.call.operands.x.shape)
    return found


def _backward_hot(run: _Run, dy: Tensor, dl1: Tensor, kept: Tensor, found: dict[str, Tensor]) -> Tensor | None:
    """Write the hot rows of the weights' gradients, and return the hot neurons' part of dx."""
    x, (weights, down) = run.x, run.hot_weights()
    dh = dy @ down.t()
    h, kept = torch.empty_like(dh), kept.view(x.dtype)
    gradients = torch.empty_like(kept)
    (z, *up), (dz, *dup) = run.projected(kept), run.projected(gradients)
    pointers = _pointers(z=z, h=h, dh=dh, dz=dz, dl1=dl1, u=up[0] if up else None, du=dup[0] if dup else None)
    _run_hot(run, library.TrainHot(stride=z.stride(0), **pointers))
    products = [dz, *dup] if run.apart else [gradients]
    if "w_down" in found:
        names = [f"w_{name}" for name in run.hot_projections]
        if run.apart:
            torch.mm(h.t(), dy, out=found["w_down"])
            for name, product in zip(names, products, strict=True):
                torch.mm(product.t(), x, out=found[name])
        else:
            rows = dict(zip(names, (gradients.t() @ x).chunk(len(names)), strict=True), w_down=h.t() @ dy)
            copies = [_copy(part, found[name], run.hot, to_rows=run.hot_rows) for name, part in rows.items()]
            _copy_rows(run.x.device, copies)
        for name, part in zip(run.hot_projections, [dz, *dup], strict=True):
            if f"b_{name}" in found:
                _put(found[f"b_{name}"], part.sum(0), run.hot_rows)
    if "x" not in found:
        return None
    dx = products[0] @ weights[0]
    return dx if len(products) == 1 else dx.addmm_(products[1], weights[1])


def _put(values: Tensor, part: Tensor, rows: Tensor | None) -> None:
    """Store the values of the hot neurons."""
    if rows is None:
        values[: len(part)] = part
    else:
        values.index_copy_(0, rows.long(), part)


def _backward_cold(
    run: _Run, dy: Tensor, dl1: Tensor, kept: Kept, hot_dx: Tensor | None, found: dict[str, Tensor]
) -> None:
    """Write dx, and the sparse neurons' rows of the weights' gradients."""
    lib, problem = library.load(), run.problem(run.cold)
    variant = run.operands.variant
    weights = {field_of(variant, name): each for name, each in found.items() if name not in ("x", "b_down")}
    pointers = _pointers(neurons=run.cold_rows, dy=dy, dl1=dl1, hot=hot_dx, dx=found.get("x"), **weights)
    given = library.TrainBackward(pairs=_pairs(run, kept), **pointers)
    tensors = tensors_of(run.operands.map(Tensor.data_ptr), 0)
    size = lib.twell_train_backward_bytes(problem, _capacity(run.call))
    launch(run.x.device, lib.twell_train_backward, size, problem, tensors, given)
