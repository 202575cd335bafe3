"""A linear layer with its norm and its residual: what it means, what is refused, its node, its kernels."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerance import assert_as_accurate, assert_same
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.plugins.linear import ATTRIBUTES, LinearOperands, LinearOptions, call_of
from twellc.plugins.linear_op import LINEAR, run_linear
from twellc.plugins.onnx_node import linear_attributes, read_linear
from twellc.plugins.quantise import quantise

BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int = 5
    inner: int = 64
    out: int = 48
    norm: str = "rms"
    splits: tuple[int, ...] = ()
    dtype: torch.dtype = BF16
    scale: str = ""
    biases: bool = True
    residual: bool = False


def make(case: Case, device: str = "cpu") -> tuple[LinearOperands[Tensor], LinearOptions]:
    generator = torch.Generator().manual_seed(case.tokens + case.inner)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + mean).to(case.dtype).to(device)

    tensors = {"weight": draw(case.out, case.inner, scale=case.inner**-0.5)}
    if case.scale:
        tensors["weight"], tensors["weight_scale"] = quantise(tensors["weight"], case.scale)
    if case.norm != "none":
        tensors["norm_weight"] = draw(case.inner, scale=0.2, mean=1.0)
    if case.biases:
        tensors["bias"] = draw(case.out)
        tensors |= {"norm_bias": draw(case.inner, scale=0.2)} if case.norm == "layer" else {}
    if case.residual:
        tensors["residual"] = draw(case.tokens, case.out)
    x = draw(case.tokens, case.inner, scale=3.0, mean=0.5)
    return LinearOperands(x=x, **tensors), LinearOptions(norm=case.norm, eps=EPS, splits=case.splits)


def dense(operands: LinearOperands[Tensor], norm: str, dtype: torch.dtype) -> Tensor:
    """Compute a layer by torch's own functions, each of which rounds its result to `dtype`."""
    x, weight, rest = operands.x.to(dtype), operands.weight.to(dtype), operands.map(lambda each: each.to(dtype))
    if operands.weight_scale is not None:
        weight = (operands.weight.double() * operands.weight_scale.double()).to(dtype)
    if norm == "rms":
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], rest.norm_weight, EPS)
    elif norm == "layer":
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], rest.norm_weight, rest.norm_bias, EPS)
    y = torch.nn.functional.linear(x, weight, rest.bias)
    return y if rest.residual is None else y + rest.residual


# ---- meaning ----

CASES = [
    Case(),
    Case(norm="none", residual=True),
    Case(norm="layer", splits=(16, 8, 24)),
    Case(norm="layer", biases=False, residual=True),
    Case(norm="none", biases=False, splits=(40, 8)),
    Case(norm="rms", splits=(48,), residual=True),
    Case(scale="tensor"),
    Case(scale="neuron", norm="none", residual=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, FP16])
def test_meaning(case: Case, dtype: torch.dtype) -> None:
    operands, options = make(dataclasses.replace(case, dtype=dtype))
    results, truth = run_linear(operands, options), dense(operands, case.norm, torch.float64)
    assert [each.shape[-1] for each in results] == list(case.splits or (case.out,))
    assert all(each.is_contiguous() for each in results)
    y = torch.cat(results, -1)
    if dtype in (BF16, FP16):
        assert_as_accurate(y, dense(operands, case.norm, dtype), truth)
    else:
        assert_same(y, truth.to(dtype))


def test_the_sum_is_rounded_once() -> None:
    """2049 is not a float16: rounded after the bias alone, y would be 0."""
    eye = torch.eye(8).half()
    y = run_linear(
        LinearOperands(
            x=torch.full((1, 8), 2048.0).half(),
            weight=eye,
            bias=torch.full((8,), 1.0).half(),
            residual=torch.full((1, 8), -2048.0).half(),
        ),
        LinearOptions(),
    )[0]
    assert torch.equal(y, torch.ones(1, 8).half())


@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
def test_nan_reaches_its_row(norm: str) -> None:
    operands, options = make(Case(norm=norm, splits=(24, 24)))
    operands.x[3, 7] = torch.nan
    for y in run_linear(operands, options):
        assert y[3].isnan().all() and int(y.isnan().any(-1).sum()) == 1


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 1, 3, 64)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    operands, options = make(Case(dtype=torch.float32))
    operands = dataclasses.replace(operands, x=torch.randn(shape))
    (y,) = run_linear(operands, options)
    assert y.shape == (*shape[:-1], 48)
    assert_same(y, dense(operands, "rms", torch.float64).float())


@pytest.mark.parametrize("case", [case for case in CASES if not case.scale], ids=str)  # torch checks no E4M3
def test_opcheck(case: Case) -> None:
    operands, options = make(case)
    arguments = (*operands.arguments(), options.norm, options.eps, list(options.splits))
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(LINEAR, arguments, {"weight_scale": operands.weight_scale}, test_utils=utilities)


# ---- refusals ----

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"bias": torch.zeros(47)}, "bias must have shape (48,), got (47,)"),
    "x": ({"x": torch.zeros(5, 63)}, "x must have shape (5, 64), got (5, 63)"),
    "weight": ({"weight": torch.zeros(48)}, "weight must have two dimensions, and x one or more"),
    "residual": ({"residual": torch.zeros(4, 48)}, "residual must have shape (5, 48), got (4, 48)"),
    "dtype": ({"norm_weight": torch.zeros(64).half()}, "norm_weight must be torch.float32 like x, got torch.float16"),
    "integers": (
        {"x": torch.zeros(5, 64, dtype=torch.int32)},
        "x must be of a floating point type of 16 bits or more, got torch.int32",
    ),
    "scale of others": ({"weight_scale": torch.ones(())}, "a weight of torch.float8_e4m3fn has weight_scale"),
    "no scale": ({"weight": torch.zeros(48, 64).to(torch.float8_e4m3fn)}, "has weight_scale, and others none"),
    "scale": (
        {"weight": torch.zeros(48, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(48)},
        "weight_scale must be torch.float32 of shape () or (48, 1), got torch.float32 (48,)",
    ),
    "norm": ({"norm": "group"}, "norm must be one of none, rms, layer, got 'group'"),
    "eps": ({"eps": -1.0}, "eps must be finite and at least 0, got -1.0"),
    "nan": ({"eps": float("nan")}, "eps must be finite and at least 0, got nan"),
    "sum": ({"splits": (24, 16)}, "splits must be at most 4 positive widths whose sum is 48, got (24, 16)"),
    "negative": ({"splits": (56, -8)}, "splits must be at most 4 positive widths"),
    "many": ({"splits": (8,) * 6}, "splits must be at most 4 positive widths"),
    "two residuals": (
        {"splits": (24, 24), "residual": torch.zeros(5, 48)},
        "residual has no meaning with several outputs",
    ),
    "no norm": ({"norm": "none"}, "norm_weight has no meaning without a norm"),
    "rms with a bias": ({"norm_bias": torch.zeros(64)}, "norm_bias has no meaning without a layer norm"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_refusals(name: str, device: str) -> None:
    changes, message = WRONG[name]
    operands, options = make(Case(dtype=torch.float32))
    given = operands.named() | {key: value for key, value in changes.items() if isinstance(value, Tensor)}
    chosen = vars(options) | {key: value for key, value in changes.items() if not isinstance(value, Tensor)}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        run_linear(LinearOperands(**given).map(lambda each: each.to(device)), LinearOptions(**chosen))


# ---- nodes ----


def test_a_call_is_read_as_it_was_written() -> None:
    operands = LinearOperands(x="x", weight="w", residual="r", weight_scale="s")
    options = LinearOptions(norm="rms", eps=0.5, splits=(1, 2))
    assert call_of([*operands.arguments(), "rms", 0.5, [1, 2]], {"weight_scale": "s"}) == (operands, options)
    assert call_of(["x", "w", None, None, None, "r"], {"weight_scale": "s"})[1] == LinearOptions()


@pytest.mark.parametrize("absent", ["bias", "norm_weight", "norm_bias", "residual", "weight_scale", ""])
def test_nodes_are_read_as_they_are_written(absent: str) -> None:
    names = [each.name for each in dataclasses.fields(LinearOperands) if each.name != absent]
    operands = LinearOperands(**{name: name for name in names})
    for splits in ((), (16, 32)):
        options = LinearOptions(norm="layer", eps=0.25, splits=splits)
        attributes = linear_attributes(operands, options, 48)
        assert attributes.keys() == {*ATTRIBUTES, "plugin_version", "plugin_namespace"}
        stored = attributes | {"norm": b"layer"}
        assert read_linear(list(operands.named().values()), stored) == (operands, options)
        for broken in (["x"], [*operands.named().values(), "more"]):
            with pytest.raises(ValueError, match="not the fields and inputs of one"):
                read_linear(broken, stored)


class Two(torch.nn.Module):
    """A layer with two outputs, and one that adds a residual."""

    def __init__(self, *layers: tuple[LinearOperands[Tensor], LinearOptions]) -> None:
        super().__init__()
        self.layers = layers
        for index, (operands, _) in enumerate(layers):
            for name, tensor in operands.named().items():
                self.register_buffer(f"{name}_{index}", tensor)

    def operands(self, index: int, **given: Tensor) -> LinearOperands[Tensor]:
        known = self.layers[index][0].named()
        return LinearOperands(**{name: getattr(self, f"{name}_{index}") for name in known} | given)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = run_linear(self.operands(0, x=x), self.layers[0][1])
        return run_linear(self.operands(1, x=first, residual=x), self.layers[1][1])[0], second


@pytest.mark.parametrize("scale", ["", "neuron"])
def test_a_program_as_onnx_gives_the_same(scale: str, tmp_path: Path) -> None:
    first = make(Case(dtype=torch.float32, splits=(40, 8), norm="layer", scale=scale))
    second = make(Case(dtype=torch.float32, inner=40, out=64, norm="none", residual=True, scale=scale))
    module, x = Two(first, second).eval(), first[0].x
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    save_onnx(export_onnx(program, ["x"], ["y", "z"], {}), tmp_path / "model.onnx")
    results = OnnxEvaluator(tmp_path / "model.onnx").run({"x": x})
    for result, expected in zip(results, module(x), strict=True):
        assert torch.equal(result, expected)
