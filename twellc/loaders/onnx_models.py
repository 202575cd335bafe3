"""ONNX files as models: their inputs and their precision."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import sympy

from twellc.base.dtypes import BY_ONNX
from twellc.base.errors import UserError
from twellc.loaders.onnx_file import load_onnx
from twellc.options.declared_inputs import InputDeclaration, refuse_inputs
from twellc.passes.onnx.graph import dtype_of
from twellc.passes.sizes.inputs import InputSpec, ModelInputs
from twellc.plugins.library import PLUGIN_NAMESPACE

KIND = "ONNX file"
# Sizes to tune unnamed dimensions for: the first of several is usually a batch.
_BATCH_HINT, _HINT = 1, 128
_TERM = re.compile(r"[A-Za-z_]\w*|[0-9]{1,9}", re.ASCII)
_PAST, _NEW, _TOTAL = "past_sequence_length", "sequence_length", "total_sequence_length"


def open_model(path: Path, declared: tuple[InputDeclaration, ...]) -> onnx.ModelProto:
    """Load an ONNX file, for which no inputs may be declared.

    Raises:
        UserError: There are some, or it cannot be loaded.
    """
    refuse_inputs(declared, f"{path}, an {KIND}")
    return load_onnx(path)


def model_inputs(path: Path, model: onnx.ModelProto) -> ModelInputs:
    """Return the inputs of an ONNX model; dimensions with the same name share a symbol.

    Raises:
        UserError: An input is not a tensor, or its element type or rank is not known.
    """
    specs = []
    hints: dict[str, int] = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dtype = dtype_of(kind.elem_type) if value.type.HasField("tensor_type") else None
        if dtype is None or not kind.HasField("shape"):
            raise UserError(str(path), f"input {value.name} is not a tensor of a known element type and rank")
        shape: list[int | sympy.Expr] = []
        for axis, dim in enumerate(kind.shape.dim):
            if dim.HasField("dim_value") and dim.dim_value > 0:
                shape.append(dim.dim_value)
                continue
            size = _size_of(dim.dim_param or f"{value.name}[{axis}]")
            dynamic = sum(not isinstance(before, int) for before in shape)
            for symbol in size.free_symbols:
                hints.setdefault(str(symbol), _HINT if dynamic or axis == len(kind.shape.dim) - 1 else _BATCH_HINT)
            shape.append(size)
        specs.append(InputSpec(value.name, dtype, tuple(shape)))
    return ModelInputs(specs, {}, hints, _conditions(specs))


def _size_of(name: str) -> sympy.Expr:
    """Return what the name of a dimension says: a symbol, or a sum such as `past_sequence_length + 1`."""
    terms = [part.strip() for part in name.split("+")]
    if not all(_TERM.fullmatch(term) for term in terms) or not any(map(str.isidentifier, terms)):
        return _symbol(name)
    return sum((_symbol(term) if term.isidentifier() else sympy.Integer(term) for term in terms), sympy.Integer(0))


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


def _conditions(specs: list[InputSpec]) -> list[sympy.Basic]:
    """Return what names of dimensions say that optimum gives decoders with past keys and values.

    A mask is as long as past and new tokens; of these a model may take one at a time.
    """
    names = {str(symbol) for spec in specs for dim in spec.shape for symbol in getattr(dim, "free_symbols", ())}
    if not {_TOTAL, _PAST} <= names:
        return []
    tokens = next((spec.shape[-1] for spec in specs if spec.name == "input_ids" and len(spec.shape) == 2), None)
    new = _symbol(_NEW) if _NEW in names else tokens
    return [] if new is None else [sympy.Eq(_symbol(_TOTAL), _symbol(_PAST) + new)]


def choose_onnx_dtype(model: onnx.ModelProto, requested: str | None) -> str:
    """Return the dtype of the plugins: the model's own low precision, else the requested one or bf16.

    Raises:
        UserError: The model is in another low precision than the requested one.
    """
    low = low_precisions(model)
    if requested is not None and low and requested not in low:
        what = "an ONNX graph keeps the precision that it was written in"
        fix = "Export the model in the other precision, or leave --dtype out."
        raise UserError(f"--dtype {requested}", what, got=" and ".join(low), fix=fix)
    return requested or (low[0] if len(low) == 1 else "bf16")


def low_precisions(model: onnx.ModelProto) -> list[str]:
    """Return which of `bf16` and `fp16` matrices of a model are in."""
    constants = (each for node in model.graph.node if node.op_type == "Constant" for each in node.attribute)
    stored = [*model.graph.initializer, *(each.t for each in constants if each.name == "value")]
    found = {tensor.data_type for tensor in stored if len(tensor.dims) == 2}
    return sorted(BY_ONNX[kind].option for kind in found if kind in BY_ONNX and BY_ONNX[kind].option)


def refuse_rewritten(path: Path, model: onnx.ModelProto) -> None:
    """Fail if the model has `twell` nodes already."""
    if any(node.domain == PLUGIN_NAMESPACE for node in model.graph.node):
        what = "is rewritten already: it has twell nodes"
        fix = "`twellc inspect` shows its nodes; `twellc check MODEL FILE` checks it."
        raise UserError(str(path), what, expected="the graph that it was made from", fix=fix)


def integer_range(graph: onnx.GraphProto, name: str) -> tuple[int, int]:
    """Return the range of an integer input: rows of the table that it picks from, else 0 and 1."""
    rows = {tensor.name: tensor.dims[0] for tensor in graph.initializer if tensor.dims}
    names, largest = {name}, 1
    for node in graph.node:
        if (
            node.op_type in ("Cast", "Identity", "Unsqueeze", "Reshape", "Squeeze", "Flatten")
            and node.input[0] in names
        ):
            names.update(node.output)
        if node.op_type == "Gather" and len(node.input) == 2 and node.input[1] in names and node.input[0] in rows:
            largest = rows[node.input[0]] - 1 if largest == 1 else min(largest, rows[node.input[0]] - 1)
    return 0, max(largest, 0)
