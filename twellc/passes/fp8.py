"""FP8 weights in a program: those that it has, and which blocks are computed with such.

    before   linear(x, to(q, float32) * s)          q  float8_e4m3fn [rows, columns], s  [], [rows, 1], [1, columns], or
                                                       [rows, columns], equal within blocks of 128 x 128
    after    linear(x, w)                           w  a constant; q and s are known by its name

`dequantize` does this for every weight of a product, so that all other passes see constants of 16 or 32 bits. A block
whose matrices are known in FP8 by the time that it is rewritten gets these and their scales, if the kernels take
their scales; all other weights stay dequantised, and the report says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from twellc.base.dtypes import kernel_dtypes
from twellc.base.errors import first_few
from twellc.passes.fold_weights import computed_weights, sources_of
from twellc.passes.graph.constants import ProgramConstants
from twellc.passes.graph.program import editable, finish
from twellc.passes.match.activations import arguments, packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.match.find_linear import FoundLinear
from twellc.passes.match.linear import CASTS, VALUE_PRESERVING, Weight, operand
from twellc.passes.report import KEPT_WITH_BLOCKS, Weights, reads_fp8
from twellc.passes.rewrite_ffn import arranged_view, weights_of
from twellc.plugins.block import FLOAT32, SCALES, TensorField, WeightOperands
from twellc.plugins.fp8 import (
    BLOCK,
    E4M3,
    Fp8,
    refuse_infinite,
    refuse_nan,
    rows_of_blocks,
    scale_blocks,
    scale_of_each,
    stacked_scales,
)
from twellc.plugins.library import MAX_PACKED_D_FF

aten = torch.ops.aten

# What may become of logits before they are returned, besides a scale.
_OF_LOGITS = VALUE_PRESERVING | CASTS | {aten.argmax, aten.select, aten.slice, aten.tanh}
QUANTISED = "quantised"  # why weights are read in FP8 that the model has in 16
KEPT = Weights(8, "as the model has them")


# Returns a constant in FP8, in its shape; None if the model does not have it so.
Stored = Callable[[Weight], Fp8 | None]


@dataclass(frozen=True)
class Wish:
    """Which blocks are to be computed with FP8 weights that the model has in others.

    Attributes:
        quantise: Whether any are.
        most: The largest relative error of a block's output on samples; None for any.
        errors: These errors, by module; a block without one stays as it is if there is a largest one.
        linear: Whether linear layers outside of the blocks are, too.
    """

    quantise: bool = False
    most: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    linear: bool = False


# ---- what the model has ----


def dequantize(program: ExportedProgram) -> tuple[ExportedProgram, dict[str, Fp8]]:
    """Return the program without FP8 weights, and those that it had by the names of the constants for them.

    Weights whose scales have another shape, or are not finite, are left to `fold_weights`.

    Raises:
        UserError: A weight in FP8 is NaN, or overflows the float16 that it is dequantised to.
    """
    if not any(_is_fp8(node) for node in program.graph.nodes):
        return program, {}
    if next(_products(ProgramConstants(program)), None) is None:
        return program, {}
    program = editable(program)
    constants = ProgramConstants(program)
    known: dict[str, Fp8] = {}
    for node, source, found in list(_products(constants)):
        last = node
        while len(last.users) == 1 and packet(next(iter(last.users))) in CASTS:
            last = next(iter(last.users))
        sources = [each for each in sources_of(source) if each in constants.names]
        name, value = constants.names[sources[0]], constants.value(last).clone()
        refuse_nan(f"weight {name}", found.values)
        refuse_infinite(f"weight {name}", value)
        made = constants.add(f"{name}_folded", value, like=sources)
        made.meta = {**last.meta, "val": made.meta["val"]}
        constants.replace(last, made, computes=made)
        known[constants.names[made]] = found
    return finish(program), known


def _is_fp8(node: Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) == E4M3


def _products(constants: ProgramConstants) -> Iterator[tuple[Node, Node, Fp8]]:
    """Yield what multiplies an FP8 matrix by scales, that matrix, and both as tensors."""
    for node in computed_weights(constants):
        if packet(node) is not aten.mul:
            continue
        given = arguments(node)
        for matrix, factor in (given, given[::-1]):
            source = matrix
            while isinstance(source, Node) and packet(source) in CASTS:
                source = operand(source)
            if source is matrix or not isinstance(source, Node) or not _is_fp8(source):
                continue
            scale = constants.value(factor) if isinstance(factor, Node) else torch.tensor(factor)
            found = scaled(constants.value(source), scale)
            if found is not None and source.meta["val"].shape == node.meta["val"].shape:
                yield node, source, found
                break


def scaled(values: Tensor, scale: Tensor) -> Fp8 | None:
    """Return the matrix that values times scales are; None where scales are not finite, or of another shape."""
    scale = scale.float().reshape(()) if scale.numel() == 1 else scale.float()
    if scale.shape == values.shape and scale.dim() == 2:
        blocks = scale[::BLOCK, ::BLOCK].contiguous()
        scale = blocks if torch.equal(scale_of_each(blocks, scale.shape), scale) else scale
    found = Fp8(values, scale[None] if scale.dim() == 1 else scale)
    return found if found.form is not None and bool(scale.isfinite().all()) else None


def folded_in_fp8(program: ExportedProgram) -> list[str]:
    """Return the constants in FP8 that `fold_weights` dequantises: those that `dequantize` has left."""
    constants = ProgramConstants(program)
    found = (source for node in computed_weights(constants) for source in sources_of(node))
    return list(dict.fromkeys(constants.names[each] for each in found if _is_fp8(each) and each in constants.names))


def notes_on(
    known: Mapping[str, Fp8],
    folded: Iterable[str],
    blocks: Iterable[FfnBlock],
    layers: Iterable[FoundLinear] = (),
) -> list[str]:
    """Return what the user should know of weights that a model has in FP8, and that are not read so.

    Args:
        known: See `dequantize`.
        folded: See `folded_in_fp8`.
        blocks: The blocks that TwELL runs.
        layers: The linear layers that it runs with FP8 weights.
    """
    found = [block for block in blocks if reads_fp8(block.weights)]
    read = {weight.name for block in found for weight in weights_of(block, lambda each, _: each).named().values()}
    read |= {linear.weight.name for layer in layers for linear in layer.linears}
    return said_dequantised([*(name.removesuffix("_folded") for name in known if name not in read), *folded])


def said_dequantised(names: Sequence[str]) -> list[str]:
    """Return a note on weights that the model has in FP8 and that are dequantised; none where there are none."""
    if not names:
        return []
    return [f"{len(names)} weights that the model has in FP8 are dequantised: {first_few(names)}"]


# ---- what becomes of blocks ----


def judge(block: FfnBlock, stored: Stored, wish: Wish, ranks: int = 1) -> Weights | None:
    """Return in how many bits the weights of a block are read if TwELL runs it; None if there is nothing to report.

    Args:
        block: The block.
        stored: Returns a weight that the model has in FP8.
        wish: Which blocks are to be quantised.
        ranks: How many ranks share its neurons, each with every so many-th.
    """
    if block.refusal or block.dtype not in kernel_dtypes():
        return None
    if block.routing is not None:
        return Weights(16, "experts are not quantised") if wish.quantise else None
    found = _arranged(block, stored)
    known = [name for name, each in found.items() if each is not None]
    in_blocks = any(each is not None and each.form == "block" for each in found.values())
    fault = "the model has only some of them in FP8" if len(known) < len(found) else _fault(found)
    if in_blocks and ranks > 1:
        fault = f"ranks share its neurons, and {BLOCK} of them have scales together"
    if block.d_ff > MAX_PACKED_D_FF:
        fault = f"there are more than {MAX_PACKED_D_FF} neurons"
        return Weights(16, f"dequantised: {fault}" if known else fault) if known or wish.quantise else None
    if not fault:
        return KEPT_WITH_BLOCKS if in_blocks else KEPT
    if not wish.quantise:
        return Weights(16, f"dequantised: {fault}") if known else None
    return by_error(None if wish.most is None else wish.errors.get(block.module, math.nan), wish.most)


@dataclass
class Change:
    """By how much FP8 changes what a block computes, in all calls that were added.

    Attributes:
        difference: ||y8 - y||².
        size: ||y||².
    """

    difference: float = 0.0
    size: float = 0.0

    def add(self, y8: Tensor, y: Tensor) -> None:
        """Add a call: its result with weights in FP8, and as the model has them."""
        self.difference += float((y8.double() - y.double()).square().sum())
        self.size += float(y.double().square().sum())

    @property
    def error(self) -> float:
        """||y8 - y|| / ||y||; infinite where y is zero and y8 is not."""
        return math.sqrt(self.difference / self.size) if self.size else math.inf if self.difference else 0.0


def by_error(error: float | None, most: float | None) -> Weights:
    """Return in how many bits weights are read whose quantising changes a block's output by `error`; None: unknown."""
    if error is None or most is None or error <= most:
        return Weights(8, QUANTISED, error)
    if not math.isfinite(error):
        return Weights(16, "what FP8 changes could not be measured on the samples")
    return Weights(16, f"FP8 changes its output by {error:.2%}, more than --fp8-error {most:g}", error)


def fp8_of(
    block: FfnBlock, stored: Stored, tensor: Callable[[Weight], Tensor], order: Tensor | None
) -> dict[str, Tensor]:
    """Return the matrices of a block in FP8 and their scales, as the op takes them, by name.

    Args:
        block: A block that is to be read in FP8, see `judge`.
        stored: Its FP8 weights in the model; if some are missing or of another form, all are quantised.
        tensor: Returns a constant of the program.
        order: The neurons to keep in their new order, int64 [kept]; None keeps all where they are.

    Raises:
        UserError: It cannot be quantised; see `Fp8.quantize`.
    """
    found = _arranged(block, stored)
    is_stored = not _fault(found) and all(each is not None for each in found.values())
    if not is_stored:
        for name, (weight, role) in _matrices(block).items():
            view = arranged_view(tensor(weight).detach(), weight, role.in_out)[1]
            found[name] = Fp8.quantize(view, "row", f"layer {block.module}: {name}")
    result: dict[str, Tensor] = {}
    gate_up = {each.form for name, each in found.items() if each is not None and name != "w_down"}
    for name in list(found):
        each = found.pop(name)  # not all of them twice at once
        assert each is not None
        values, scale = each.values.contiguous(), each.scale
        if name != "w_down" and len(gate_up) > 1:
            scale = scale.expand(scale_blocks(*values.shape) if "block" in gate_up else (len(values), 1))
        if order is not None:
            assert each.form != "block", "see `neurons.staying` and `judge`"
            own = order.to(values.device)
            values = values.view(torch.uint8).index_select(0, own).view(E4M3)
            scale = scale.index_select(0, own) if scale.shape[:1] == each.values.shape[:1] else scale
        result[name] = values.clone() if is_stored and values.data_ptr() == each.values.data_ptr() else values
        result[f"{name}_scale"] = scale.clone(memory_format=torch.contiguous_format)
    return result


def both_forms(
    block: FfnBlock, stored: Stored, tensor: Callable[[Weight], Tensor]
) -> tuple[WeightOperands[Tensor], WeightOperands[Tensor]]:
    """Return the weights of a block as the op takes them: in FP8, and as the program has them, in views of it.

    Args, errors: See `fp8_of`.
    """

    def view(weight: Weight, role: TensorField) -> Tensor:
        found = tensor(weight).detach()
        return arranged_view(found.float() if role.name in FLOAT32 else found, weight, role.in_out)[1]

    wide = weights_of(block, view)
    return WeightOperands(**{**wide.named(), **fp8_of(block, stored, tensor, None)}), wide


def _arranged(block: FfnBlock, stored: Stored) -> dict[str, Fp8 | None]:
    """Return the FP8 matrices of a block, as the op reads them; None if the model has none."""

    def arrange(weight: Weight, role: TensorField) -> Fp8 | None:
        found = stored(weight)
        if found is None:
            return None
        values, scale = arranged_view(found.values, weight, role.in_out)[1], found.scale
        if found.form == "block":
            scale = scale.t() if weight.in_out else scale  # [out, in]
            rows = (0, len(values.t() if role.in_out else values), 1) if weight.rows is None else weight.rows
            own = rows_of_blocks(rows)
            scale = scale[slice(*own)] if own is not None else scale[:0]  # of these the form is None
            scale = scale.t() if role.in_out else scale
        elif scale.dim():
            # Scales take the way of the matrix, as one of its size, and are then one along the axis that shares them.
            wide = arranged_view(scale.expand(found.values.shape), weight, role.in_out)[1]
            shared = scale.shape.index(1)
            scale = wide.narrow(shared if weight.in_out == role.in_out else 1 - shared, 0, 1)
        return Fp8(values, scale)

    return {name: arrange(*each) for name, each in _matrices(block).items()}


def _matrices(block: FfnBlock) -> dict[str, tuple[Weight, TensorField]]:
    """Return the matrices of a block, by name."""
    found = weights_of(block, lambda weight, role: (weight, role)).named()
    return {name: each for name, each in found.items() if f"{name}_scale" in SCALES}


def _fault(found: Mapping[str, Fp8 | None]) -> str:
    """Say why the kernels do not take scales; empty where they do."""
    for name, each in found.items():
        if name != "w_down" and each is not None and each.form == "column":
            return f"{name} has a scale for each input"
        if each is not None and each.form is None:
            return f"{name} is a part of a matrix that does not begin with a block of {BLOCK}"
    if {"row", "block"} <= {each.form for name, each in found.items() if each is not None and name != "w_down"}:
        return "w_gate and w_up have scales of different forms"
    return ""


# ---- what becomes of linear layers ----


def judge_linear(layer: FoundLinear, stored: Stored, wish: Wish) -> Weights | None:
    """Return in how many bits the weights of linear layers are read if TwELL runs them; see `judge`."""
    found = [(each.weight, stored(each.weight)) for each in layer.linears]
    known = [_as_linear_reads(weight, each) for weight, each in found if each is not None]
    fault = ""
    if any(each.form == "column" for each in known):
        fault = "a weight has a scale for each input"
    elif len(known) < len(found):
        fault = "the model has only some of them in FP8"
    elif stacked_scales(known) is None:
        fault = f"they are computed together, and blocks of {BLOCK} rows do not begin with each of them"
    if not fault:
        return KEPT_WITH_BLOCKS if any(each.form == "block" for each in known) else KEPT
    if not wish.linear:
        return Weights(16, f"dequantised: {fault}") if known else None
    if wish.most is not None:
        return Weights(16, "what FP8 changes is measured of blocks alone")
    if any(len(each.weight.node.users) > 1 for each in layer.linears):
        return Weights(16, "another layer reads one of them, too")
    if any(map(_is_returned, layer.outputs)):
        return Weights(16, "the model returns its result, as logits are")
    return Weights(8, QUANTISED)


def _is_returned(node: Node) -> bool:
    """Whether a program returns a node, or rows of it, as logits: scaled or capped by numbers, or the largest ones."""

    def is_way(user: Node) -> bool:
        by_number = len([each for each in arguments(user) if isinstance(each, Node)]) == 1
        return packet(user) in _OF_LOGITS or (packet(user) in (aten.mul, aten.div) and by_number)

    return any(user.op == "output" or (is_way(user) and _is_returned(user)) for user in node.users)


def linear_in_fp8(layer: FoundLinear, stored: Stored, tensor: Callable[[Weight], Tensor]) -> Fp8:
    """Return the weight [out, in] of linear layers that are to be read in FP8, with scales for outputs or blocks.

    Args:
        layer: The layers.
        stored: Returns a weight that is to be kept; None of one that is to be quantised.
        tensor: Returns a constant of the program.

    Raises:
        UserError: It cannot be quantised; see `Fp8.quantize`.
    """
    known = [
        _as_linear_reads(each.weight, stored(each.weight) or quantised_linear(each.weight, tensor))
        for each in layer.linears
    ]
    scale = stacked_scales(known)
    assert scale is not None, "judge_linear has refused the layer"
    return Fp8(torch.cat([each.values.view(torch.uint8) for each in known]).view(E4M3), scale)


def quantised_linear(weight: Weight, tensor: Callable[[Weight], Tensor]) -> Fp8:
    """Return the weight of a linear layer in FP8, in the shape of its constant, with a scale for each output."""
    matrix = tensor(weight).detach()
    matrix = matrix.squeeze() if matrix.dim() > 2 else matrix
    return Fp8.quantize(matrix, "column" if weight.in_out else "row", f"linear layer {weight.name}")


def _as_linear_reads(weight: Weight, known: Fp8) -> Fp8:
    """Return a weight in FP8 as [out, in]."""
    return known.t() if weight.in_out else known
