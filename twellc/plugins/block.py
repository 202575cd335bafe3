"""The tensors, the options and the two variants of a feed-forward block. Importing this imports no torch.

    gated    y = residual + (act(x Wg^T + bg) * (x Wu^T + bu)) Wd + bd
    plain    y = residual +  act(x Wu^T + bu)                  Wd + bd

With a norm, x on the right means norm(x).

`Operands` and `BlockOptions` are two tables. The torch ops, the nodes in ONNX files, their evaluator and the calls of
the C API take names, types, defaults and order from here. The sources of the TensorRT plugins and `twell.h` spell them
again, and `tests/plugins/test_block.py` compares them. docs/add-an-option.md says how to add an option.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Generic, TypeVar

from twellc.plugins import library

T = TypeVar("T")
U = TypeVar("U")


# ---- variants ----


@dataclass(frozen=True)
class Variant:
    """One of the two forms of a block, with its names in other places.

    Attributes:
        name: `gated` or `plain`.
        op: The op in `torch.ops.twell`.
        node: The plugin, which is also the type of the node in ONNX.
        code: The number in `twell.h`.
    """

    name: str
    op: str
    node: str
    code: int

    @functools.cached_property
    def tensors(self) -> tuple[TensorField, ...]:
        """Its tensors, in the order in which the op and the node take them."""
        return tuple(each for each in TENSORS if self is not PLAIN or not each.gated_only)

    @functools.cached_property
    def scales(self) -> tuple[str, ...]:
        """Its scales, one for each matrix, in the order in which the op and the node take them."""
        names = {each.name for each in self.tensors}
        return tuple(name for name in SCALES if name.removesuffix("_scale") in names)

    @functools.cached_property
    def by_name(self) -> tuple[str, ...]:
        """Tensors that its op takes only by name, in order: they were added after the options."""
        return *self.scales, THRESHOLDS.name, *_NORM

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """Names of the arguments that its op takes by position, in order."""
        return *(each.name for each in self.tensors), *_OPTIONS

    @functools.cached_property
    def activations(self) -> tuple[str, ...]:
        """The activations that it may have."""
        return tuple(name for name in library.ACTIVATIONS if self is not PLAIN or name != "drelu")


GATED, PLAIN = (
    Variant(name, op, node, code)
    for (name, code), op, node in zip(library.VARIANTS.items(), ("gated_mlp", "mlp"), library.BLOCK_NAMES, strict=True)
)
VARIANTS = {each.name: each for each in (GATED, PLAIN)}
BY_NODE = {each.node: each for each in VARIANTS.values()}


# ---- tensors ----


@dataclass(frozen=True)
class TensorField:
    """A row of the table of tensors.

    Attributes:
        name: The name.
        shape: Names of the dimensions; `...` are the leading ones of x.
        meaning: The meaning.
        flag: The attribute of a node that says whether the tensor is there; empty where it always is.
        gated_only: Whether only gated blocks have it.
    """

    name: str
    shape: tuple[str, ...]
    meaning: str
    flag: str = ""
    gated_only: bool = False

    @property
    def by_neuron(self) -> bool:
        """Whether it has a row for each neuron."""
        return self.shape[0] == "d_ff"

    @property
    def in_out(self) -> bool:
        """Whether it is a weight stored [in, out] rather than [out, in]."""
        return self.shape == ("d_ff", "d_out")


TENSORS = (
    TensorField("x", ("...", "d_model"), "the input"),
    TensorField("w_gate", ("d_ff", "d_model"), "the gate projection, whose output is activated", gated_only=True),
    TensorField("b_gate", ("d_ff",), "its bias", "gate_bias", gated_only=True),
    TensorField("w_up", ("d_ff", "d_model"), "the up projection; of a plain block its output is activated"),
    TensorField("b_up", ("d_ff",), "its bias", "up_bias"),
    TensorField("w_down", ("d_ff", "d_out"), "the down projection, neuron by neuron: torch.nn.Linear's, transposed"),
    TensorField("b_down", ("d_out",), "its bias", "down_bias"),
    TensorField("residual", ("...", "d_out"), "added to the result", "residual"),
)


# Scales of FP8 weights (docs/weights.md): each multiplies a matrix of TENSORS, as it is stored.
SCALES = tuple(f"{each.name}_scale" for each in TENSORS if len(each.shape) == 2 and each.shape[0] == "d_ff")
SCALES_FLAG = "scales"  # the attribute of a node that says whether they are there
# Of fatrelu, in place of the option `threshold`. Float32, as z is compared with the model's numbers.
THRESHOLDS = TensorField("thresholds", ("d_ff",), "of fatrelu, one for each neuron; below 0 counts as 0", "thresholds")
FLOAT32 = (*SCALES, THRESHOLDS.name)  # operands of that type, whatever type the others have
# Tensors of the norm, which is one of the options.
NORM_TENSORS = (
    TensorField("norm_weight", ("d_model",), "multiplies normalised inputs; ones without it", "norm_weight"),
    TensorField("norm_bias", ("d_model",), "added to normalised inputs, in a layer norm", "norm_bias"),
)
_NORM = tuple(each.name for each in NORM_TENSORS)
_OPERANDS = (*(each.name for each in TENSORS), *FLOAT32, *_NORM)
_WEIGHTS = tuple(name for name in _OPERANDS if name not in ("x", "residual"))


@dataclass(frozen=True, kw_only=True)
class WeightOperands(Generic[T]):
    """The weights and biases of a block, as tensors of torch, nodes of a graph, or other handles.

    `TENSORS` gives the meaning of each. Without `w_gate` the block is plain. FP8 weights have scales, see `SCALES`;
    fatrelu may have `THRESHOLDS`, and a norm `NORM_TENSORS`.
    """

    w_gate: T | None = None
    b_gate: T | None = None
    w_up: T
    b_up: T | None = None
    w_down: T
    b_down: T | None = None
    w_gate_scale: T | None = None
    w_up_scale: T | None = None
    w_down_scale: T | None = None
    thresholds: T | None = None
    norm_weight: T | None = None
    norm_bias: T | None = None

    @property
    def variant(self) -> Variant:
        """The form of the block: no other place distinguishes gated and plain blocks."""
        return PLAIN if self.w_gate is None else GATED

    @property
    def first(self) -> tuple[T, T | None]:
        """The projection whose output is activated, and its bias."""
        return (self.w_up, self.b_up) if self.w_gate is None else (self.w_gate, self.b_gate)

    @property
    def norm(self) -> tuple[T | None, T | None]:
        """The weight and the bias of the norm."""
        return self.norm_weight, self.norm_bias

    def named(self) -> dict[str, T]:
        """Return those that are there, by name, in the order of `TENSORS`."""
        return {name: value for name in _WEIGHTS if (value := getattr(self, name)) is not None}

    def scales(self) -> dict[str, T]:
        """Return the scales that are there, by name."""
        return {name: value for name in SCALES if (value := getattr(self, name)) is not None}

    def by_name(self) -> dict[str, T]:
        """Return the tensors that a call of the op takes by name, as far as there are any: scales, thresholds, norm."""
        return {name: value for name in (*FLOAT32, *_NORM) if (value := getattr(self, name)) is not None}

    def map(self, function: Callable[[T], U]) -> WeightOperands[U]:
        """Return the same with each replaced by the function's result."""
        return WeightOperands(**{name: function(value) for name, value in self.named().items()})

    def of(self, x: T, residual: T | None = None) -> Operands[T]:
        """Return them together with the inputs of the block."""
        # NOTE: torch 2.11 does not compile vars() of a frozen dataclass.
        return Operands(**self.named(), x=x, residual=residual)


@dataclass(frozen=True, kw_only=True)
class Operands(WeightOperands[T]):
    """All tensors that a block reads; see `WeightOperands`."""

    x: T
    residual: T | None = None

    def named(self) -> dict[str, T]:
        """Return those that are there, by name, in the order of `TENSORS`."""
        return {name: value for name in _OPERANDS if (value := getattr(self, name)) is not None}

    @property
    def weights(self) -> WeightOperands[T]:
        """The weights and biases alone."""
        return WeightOperands(**super().named())

    def arguments(self) -> list[T | None]:
        """Return the arguments of the op: the tensors of its variant, None for absent ones."""
        return [getattr(self, each.name) for each in self.variant.tensors]

    def map(self, function: Callable[[T], U]) -> Operands[U]:
        """Return the same with each replaced by the function's result."""
        return Operands(**{name: function(value) for name, value in self.named().items()})


# ---- options ----


@dataclass(frozen=True)
class Option:
    """A row of the table of options.

    Attributes:
        name: The name of the ops' argument, the node's attribute, the plugin's field and the member of
            `twell_problem`.
        kind: str, float or int.
        default: The value where it is not given; None where it must be given.
        meaning: The meaning.
        choices: The possible values; empty for a range.
        least: The least value.
        most: The largest value: a number, or the name of a width; None for no limit.
    """

    name: str
    kind: type
    default: str | float | int | None
    meaning: str
    choices: tuple[str | int, ...] = ()
    least: float = 0
    most: float | str | None = None

    def fault(self, value: Any, choices: Sequence[str | int], widths: Mapping[str, int]) -> str:
        """Return a text of the values to expect; an empty one if the value is right.

        Args:
            value: The value.
            choices: The choices of the variant.
            widths: d_ff and other widths that `most` may name.
        """
        if choices:
            return "" if value in choices else f"one of {', '.join(map(str, choices))}"
        most = widths.get(self.most) if isinstance(self.most, str) else self.most
        if not math.isfinite(value) or value < self.least or (most is not None and value > most):
            name = f"{self.most} = " if isinstance(self.most, str) else ""
            return f"finite and at least {self.least:g}" if most is None else f"{self.least:g} to {name}{most}"
        return ""


def _option(meaning: str, default: Any = MISSING, **limits: Any) -> Any:
    return field(default=default, metadata={"meaning": meaning, **limits})


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """The options of a block. Each field is a row of the table `OPTIONS`, in the order in which the ops take them."""

    activation: str = _option(
        "applied to the gate (in a plain block to the up projection)", choices=tuple(library.ACTIVATIONS)
    )
    threshold: float = _option("of fatrelu, which keeps values above it; 0 for others", 0.0)
    compression: int = _option(
        "the TwELL compression factor: speed and memory, never results", 8, choices=library.COMPRESSIONS
    )
    hot: int = _option("neurons, the first ones, that calls with many tokens compute densely", 0, most="d_ff")
    norm: str = _option("applied to each row of x first", "none", choices=tuple(library.NORMS))
    eps: float = _option("added by the norm to the mean of squares, or to the variance", 0.0)

    def named(self) -> dict[str, Any]:
        """Return them by name, in order."""
        return {name: getattr(self, name) for name in _OPTIONS}

    def arguments(self) -> list[Any]:
        """Return them as arguments of the op."""
        return list(self.named().values())

    def check(self, variant: Variant, d_ff: int) -> None:
        """Raise ValueError if an option has an impossible value."""
        for each in OPTIONS:
            value = getattr(self, each.name)
            choices = variant.activations if each.name == "activation" else each.choices
            expected = each.fault(value, choices, {"d_ff": d_ff})
            if expected:
                raise ValueError(f"twell: {each.name} must be {expected}, got {value!r}")


def _row(each: Field[Any]) -> Option:
    kind = {"str": str, "float": float, "int": int}[str(each.type)]
    return Option(each.name, kind, None if each.default is MISSING else each.default, **each.metadata)


OPTIONS = tuple(map(_row, fields(BlockOptions)))
_OPTIONS = tuple(each.name for each in OPTIONS)
DEFAULT_COMPRESSION = BlockOptions.compression


def compression_of(*candidates: int | None) -> int:
    """Return the first compression factor that is given, or the default."""
    return next((each for each in candidates if each is not None), DEFAULT_COMPRESSION)


# ---- calls ----


def schema_of(variant: Variant) -> str:
    """Return the schema of the variant's op, as `torch.library` reads it."""
    tensors = [f"Tensor{'?' if each.flag else ''} {each.name}" for each in variant.tensors]
    options = [
        f"{each.kind.__name__} {each.name}{'' if each.default is None else f'={json.dumps(each.default)}'}"
        for each in OPTIONS
    ]
    by_name = [f"Tensor? {name}=None" for name in variant.by_name]
    return f"{variant.op}({', '.join([*tensors, *options, '*', *by_name])}) -> Tensor"


def call_of(variant: Variant, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Operands[Any], BlockOptions]:
    """Return the operands and options of a call of the variant's op, from its arguments by position and by name."""
    given = {**dict(zip(variant.arguments, arguments, strict=False)), **named}
    options = {name: given.pop(name) for name in _OPTIONS if name in given}
    return Operands(**given), BlockOptions(**options)


def problem_of(
    variant: Variant, options: BlockOptions, dtype: str, *, tokens: int, d_model: int, d_ff: int, d_out: int
) -> library.Problem:
    """Return the problem for the C API; `dtype` is bfloat16 or float16."""
    return library.Problem(
        tokens=tokens,
        d_model=d_model,
        d_ff=d_ff,
        d_out=d_out,
        dtype=library.DTYPES[dtype],
        variant=variant.code,
        **{
            **options.named(),
            "activation": library.ACTIVATIONS[options.activation],
            "norm": library.NORMS[options.norm],
        },
    )


def set_scales(problem: library.Problem, gate_up: str, down: str) -> None:
    """Set FP8 weights in a problem, with the forms of the scales, of `library.SCALE_FORMS`: of gate and up, of down."""
    problem.weight_dtype = library.E4M3
    problem.gate_up_scale, problem.down_scale = library.SCALE_FORMS[gate_up], library.SCALE_FORMS[down]


def field_of(variant: Variant, name: str) -> str:
    """Return the name of a tensor in the C API, which calls the first projection of any block `gate`."""
    return name.replace("_up", "_gate") if variant is PLAIN else name


def tensors_of(operands: Operands[int], y: int) -> library.Tensors:
    """Return the pointers for the C API."""
    return library.Tensors(**{field_of(operands.variant, name): each for name, each in operands.named().items()}, y=y)
