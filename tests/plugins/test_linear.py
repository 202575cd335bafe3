"""A linear layer with its norm and its residual: what it means, what is refused, its node, its kernels."""

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins import plugin_host
from tests.plugins.calls import GENERIC, assert_replays
from tests.plugins.plugin_host import host
from tests.tolerance import assert_as_accurate, assert_same
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.plugins import library
from twellc.plugins.fp8 import E4M3, Fp8, scale_blocks
from twellc.plugins.linear import ATTRIBUTES, TENSORS, LinearOperands, LinearOptions, call_of
from twellc.plugins.linear_op import LINEAR, run_linear
from twellc.plugins.onnx_node import linear_attributes, read_linear

__all__ = ["host"]
BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5
BEHIND = 1 << 20  # bytes behind a workspace, which stay as they are


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
    choose: bool = False


def make(case: Case, device: str = "cpu") -> tuple[LinearOperands[Tensor], LinearOptions]:
    generator = torch.Generator().manual_seed(case.tokens + case.inner)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale + mean).to(case.dtype).to(device)

    tensors = {"weight": draw(case.out, case.inner, scale=case.inner**-0.5)}
    if case.scale == "block":  # with scales far apart
        exponents = torch.randint(-4, 3, scale_blocks(case.out, case.inner), generator=generator)
        scales = (torch.rand(exponents.shape, generator=generator) + 1) * 2.0**exponents
        tensors = {"weight": tensors["weight"].mul_(8).to(E4M3), "weight_scale": scales.to(device)}
    elif case.scale:
        tensors["weight"], tensors["weight_scale"] = Fp8.quantize(tensors["weight"], case.scale)
    if case.norm != "none":
        tensors["norm_weight"] = draw(case.inner, scale=0.2, mean=1.0)
    if case.biases:
        tensors["bias"] = draw(case.out)
        tensors |= {"norm_bias": draw(case.inner, scale=0.2)} if case.norm == "layer" else {}
    if case.residual:
        tensors["residual"] = draw(case.tokens, case.out)
    x = draw(case.tokens, case.inner, scale=3.0, mean=0.5)
    options = LinearOptions(norm=case.norm, eps=EPS, splits=case.splits, choose=case.choose)
    return LinearOperands(x=x, **tensors), options


def dense(operands: LinearOperands[Tensor], norm: str, dtype: torch.dtype, *, in_bytes: bool = False) -> Tensor:
    """Compute a layer by torch's own functions, each of which rounds its result to `dtype`.

    `in_bytes`: what the norm gives is rounded once, then to FP8, and the result once.
    """
    wide = torch.float64 if in_bytes else dtype
    x, weight, rest = operands.x.to(wide), operands.weight.to(dtype), operands.map(lambda each: each.to(wide))
    if operands.weight_scale is not None:
        weight = Fp8(operands.weight, operands.weight_scale).dequantize(torch.float64).to(dtype)
    if norm == "rms":
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], rest.norm_weight, EPS)
    elif norm == "layer":
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], rest.norm_weight, rest.norm_bias, EPS)
    if in_bytes:
        assert operands.weight_scale is not None
        of_blocks = operands.weight_scale.shape == scale_blocks(*operands.weight.shape)
        rounded = x.to(dtype).float().unflatten(-1, (-1, 128 if of_blocks else x.shape[-1]))
        q, scale = Fp8.round_rows(rounded)
        x, weight = (q.double() * scale).flatten(-2), Fp8(operands.weight, operands.weight_scale).dequantize(wide)
    y = torch.nn.functional.linear(x, weight, rest.bias)
    return (y if rest.residual is None else y + rest.residual).to(dtype)


# ---- meaning ----

CASES = [
    Case(),
    Case(norm="none", residual=True),
    Case(norm="layer", splits=(16, 8, 24)),
    Case(norm="layer", biases=False, residual=True),
    Case(norm="none", biases=False, splits=(40, 8)),
    Case(norm="rms", splits=(48,), residual=True),
    Case(scale="tensor"),
    Case(scale="row", norm="none", residual=True),
    Case(inner=200, out=264, scale="block", splits=(8, 216, 40)),
    Case(inner=136, out=48, scale="block", norm="layer", residual=True),
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


# Elements of a row, of which the others are lower; and which one is chosen.
CHOICES: dict[str, tuple[dict[int, float], int]] = {
    "the first of equals": ({3: 2.0, 7: 2.0, 40: 2.0}, 3),
    "equal when rounded": ({5: 1.0, 6: 1.0001}, 5),
    "negative": ({9: -2.0, 30: -1.0}, 30),
    "an infinity": ({1: 7.0, 20: torch.inf}, 20),
    "a NaN": ({1: torch.inf, 33: torch.nan, 47: torch.nan}, 33),
    "none above the rest": ({}, 0),
}


def to_choose_from(elements: dict[int, float], tokens: int, dtype: torch.dtype) -> LinearOperands[Tensor]:
    """Return a layer of 48 outputs with these elements in each row: a sum of two, which is no element of 16 bits."""
    wide = torch.full((48,), -100.0)
    for index, element in elements.items():
        wide[index] = element
    high = wide.to(dtype)
    x, weight = torch.zeros(tokens, 64), torch.zeros(48, 64)
    x[:, 0], weight[:, 0] = 1.0, (wide - high.float()).nan_to_num()
    return LinearOperands(x=x.to(dtype), weight=weight.to(dtype), bias=high)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_choice(name: str, dtype: torch.dtype) -> None:
    elements, expected = CHOICES[name]
    (chosen,) = run_linear(to_choose_from(elements, 2, dtype), LinearOptions(choose=True))
    assert chosen.dtype == torch.int64 and chosen.tolist() == [expected] * 2


@pytest.mark.parametrize("case", [case for case in CASES if len(case.splits) < 2], ids=str)
def test_choice_of_random_elements(case: Case) -> None:
    operands, options = make(case)
    (y,), (chosen,) = (run_linear(operands, dataclasses.replace(options, choose=each)) for each in (False, True))
    assert torch.equal(chosen, y.argmax(-1))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 1, 3, 64)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    operands, options = make(Case(dtype=torch.float32))
    operands = dataclasses.replace(operands, x=torch.randn(shape))
    (y,) = run_linear(operands, options)
    assert y.shape == (*shape[:-1], 48)
    (chosen,) = run_linear(operands, dataclasses.replace(options, choose=True))
    assert chosen.shape == shape[:-1]
    assert_same(y, dense(operands, "rms", torch.float64).float())


@pytest.mark.parametrize("case", [case for case in CASES if not case.scale], ids=str)  # torch checks no E4M3
def test_opcheck(case: Case) -> None:
    operands, options = make(case)
    arguments = (*operands.arguments(), options.norm, options.eps, list(options.splits))
    utilities = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for choose in {False, len(case.splits) < 2}:
        named = {"weight_scale": operands.weight_scale, "choose": choose}
        torch.library.opcheck(LINEAR, arguments, named, test_utils=utilities)


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
        "weight_scale must be torch.float32 of shape (), (48, 1) or (1, 1), got torch.float32 (48,)",
    ),
    "norm": ({"norm": "group"}, "norm must be one of none, rms, layer, got 'group'"),
    "eps": ({"eps": -1.0}, "eps must be finite and at least 0, got -1.0"),
    "nan": ({"eps": float("nan")}, "eps must be finite and at least 0, got nan"),
    "sum": ({"splits": (24, 16)}, "splits must be at most 4 positive widths whose sum is 48, got (24, 16)"),
    "negative": ({"splits": (56, -8)}, "splits must be at most 4 positive widths"),
    "a choice of two": ({"splits": (24, 24), "choose": True}, "choose must be False with several outputs, got True"),
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
    options = LinearOptions(norm="rms", eps=0.5, splits=(1, 2), choose=True)
    assert call_of([*operands.arguments(), "rms", 0.5, [1, 2], True], {"weight_scale": "s"}) == (operands, options)
    assert call_of(["x", "w", None, None, None, "r"], {"weight_scale": "s"})[1] == LinearOptions()


@pytest.mark.parametrize("absent", ["bias", "norm_weight", "norm_bias", "residual", "weight_scale", ""])
def test_nodes_are_read_as_they_are_written(absent: str) -> None:
    names = [each.name for each in dataclasses.fields(LinearOperands) if each.name != absent]
    operands = LinearOperands(**{name: name for name in names})
    for splits, choose in (((), False), ((16, 32), False), ((), True)):
        options = LinearOptions(norm="layer", eps=0.25, splits=splits, choose=choose)
        attributes = linear_attributes(operands, options, 48)
        assert attributes.keys() == {*ATTRIBUTES, "plugin_version", "plugin_namespace"}
        stored = attributes | {"norm": b"layer"}
        assert read_linear(list(operands.named().values()), stored) == (operands, options)
        for broken in (["x"], [*operands.named().values(), "more"]):
            with pytest.raises(ValueError, match="not the fields and inputs of one"):
                read_linear(broken, stored)


class Two(torch.nn.Module):
    """A layer with two outputs, one that adds a residual, and its choice."""

    def __init__(self, *layers: tuple[LinearOperands[Tensor], LinearOptions]) -> None:
        super().__init__()
        self.layers = layers
        for index, (operands, _) in enumerate(layers):
            for name, tensor in operands.named().items():
                self.register_buffer(f"{name}_{index}", tensor)

    def operands(self, index: int, **given: Tensor) -> LinearOperands[Tensor]:
        known = self.layers[index][0].named()
        return LinearOperands(**{name: getattr(self, f"{name}_{index}") for name in known} | given)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = run_linear(self.operands(0, x=x), self.layers[0][1])
        added, options = self.operands(1, x=first, residual=x), self.layers[1][1]
        (chosen,) = run_linear(added, dataclasses.replace(options, choose=True))
        return *run_linear(added, options), second, chosen


@pytest.mark.parametrize("scale", ["", "row"])
def test_a_program_as_onnx_gives_the_same(scale: str, tmp_path: Path) -> None:
    first = make(Case(dtype=torch.float32, splits=(40, 8), norm="layer", scale=scale))
    second = make(Case(dtype=torch.float32, inner=40, out=64, norm="none", residual=True, scale=scale))
    module, x = Two(first, second).eval(), first[0].x
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    save_onnx(export_onnx(program, ["x"], ["y", "z", "chosen"], {}), tmp_path / "model.onnx")
    results = OnnxEvaluator(tmp_path / "model.onnx").run({"x": x})
    for result, expected in zip(results, module(x), strict=True):
        assert torch.equal(result, expected)


# ---- the C API ----


def problem_of(case: Case) -> library.LinearProblem:
    dtype = str(case.dtype).removeprefix("torch.")
    options = LinearOptions(norm=case.norm, eps=EPS, splits=case.splits, choose=case.choose)
    return options.problem(dtype, tokens=case.tokens, inner=case.inner, out=case.out, scale=case.scale or None)


def changed(**changes: Any) -> library.LinearProblem:
    problem = problem_of(Case())
    for name, value in changes.items():
        setattr(problem, name, (ctypes.c_int32 * 4)(*value) if name == "splits" else value)
    return problem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"tokens": 0}, None),
        ({"in": 2**30, "out": 2**30}, None),
        ({"splits": (8, 8, 8, 24)}, None),
        ({"weight_dtype": 2, "weight_scale": 1}, None),
        ({"weight_dtype": 2, "weight_scale": 4}, None),
        ({"tokens": -1}, "tokens"),
        ({"in": 12}, "in must be a positive multiple of 8"),
        ({"out": 0}, "out must be a positive multiple of 8"),
        ({"dtype": 2}, "dtype"),
        ({"weight_dtype": 1}, "weight_dtype must be the same as dtype"),
        ({"weight_scale": 1}, "weight_scale"),
        ({"weight_dtype": 2, "weight_scale": 2}, "weight_scale"),
        ({"weight_scale": 4}, "weight_scale"),
        ({"norm": 3}, "norm"),
        ({"eps": -1.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"splits": (48, 8)}, "splits"),
        ({"splits": (44, 4)}, "splits"),
        ({"splits": (24, 0, 24)}, "splits"),
        ({"choose": 1}, None),
        ({"choose": 2}, "choose must be 0 or 1"),
        ({"choose": 1, "splits": (24, 24)}, "choose must be 0 with several outputs"),
        ({"reserved": 1}, "reserved"),
        ({"struct_bytes": 48}, "struct_bytes"),
    ],
    ids=str,
)
def test_validate(changes: dict[str, Any], message: str | None) -> None:
    fault = library.load().twell_linear_validate(changed(**changes))
    assert fault is None if message is None else message in fault.decode()


def described(problem: library.LinearProblem, device: library.Device | None) -> list[str]:
    lib = library.load()
    return library.read_text(functools.partial(lib.twell_linear_describe, problem, device)).splitlines()


def kernels_of(case: Case, device: str = "") -> list[str]:
    """Return what runs on a GPU, by default the one that is here."""
    gpu = library.GPUS[device] if device else None
    return [line.partition(" | ")[0] for line in described(problem_of(case), gpu)]


def cublas_lt_version() -> int:
    """Return which cuBLASLt the library finds: torch has loaded it, if it has one; else 0."""
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        with contextlib.suppress(OSError):
            return int(ctypes.CDLL(name).cublasLtGetVersion())
    return 0


def test_which_kernels_run() -> None:
    many = "cublas_lt bits=16" if cublas_lt_version() else "linear_many"
    split = ["linear_split"] if cublas_lt_version() else []
    assert kernels_of(Case(tokens=8, inner=2048, out=6144), "H100") == ["linear_few tokens=8 queue=48"]
    assert kernels_of(Case(tokens=16, inner=4096, out=6144), "H100") == ["linear_few tokens=16 queue=32"]
    assert kernels_of(Case(tokens=8, inner=8192), "H100") == ["linear_few tokens=8 queue=32"]
    assert kernels_of(Case(tokens=9, inner=8192, norm="none"), "H100") == [many]
    assert kernels_of(Case(tokens=17, inner=2048, out=64), "H100") == ["norm", many]
    assert kernels_of(Case(tokens=17, inner=2048, out=64, norm="none"), "H100") == [many]
    assert kernels_of(Case(tokens=1, inner=32000, out=64), "H100") == ["norm", many]
    assert kernels_of(Case(tokens=512, norm="none", splits=(8, 40)), "H100") == [many, *split]
    assert kernels_of(Case(tokens=513, norm="none", splits=(8, 40)), "H100") == [many] * (2 if split else 1)
    assert kernels_of(Case(tokens=8, inner=2048), "RTX-4090") == ["linear_few tokens=8 queue=16"]
    assert kernels_of(Case(tokens=0), "H100") == []
    assert kernels_of(Case(tokens=8, choose=True), "H100") == ["linear_few tokens=8 queue=48", "linear_choose"]
    assert kernels_of(Case(tokens=17, inner=2048, out=64, choose=True), "H100") == ["norm", many, "linear_choose"]


def test_which_kernels_run_in_fp8() -> None:
    found = cublas_lt_version()
    few, twice = "linear_few tokens=8 queue=48", ["linear_few tokens=16 queue=48"] * 2
    split = ["linear_split"] if found else []
    widened = ["widen", "cublas_lt bits=16" if found else "linear_many"]
    product = ["quantise", "cublas_lt bits=8"] if found >= 120900 else widened
    rest, rest_of_long = ([few], widened) if found >= 120900 else ([], [])
    case = Case(tokens=99, scale="row", norm="none")
    by_block = Case(tokens=36, inner=2048, out=1552, scale="block", norm="none", splits=(1024, 512, 16))
    expected: list[tuple[Case, dict[str, Any], list[str]]] = [
        (case, {}, product),
        (case, {"tokens": 8}, [few]),
        (case, {"tokens": 32, "inner": 2048, "out": 2048}, twice),
        (case, {"tokens": 33, "inner": 2048, "out": 2048}, product),
        (case, {"tokens": 32, "inner": 2048, "out": 2064}, product),
        (case, {"tokens": 16, "inner": 8192}, ["linear_few tokens=8 queue=32"] * 2),
        (case, {"tokens": 9, "inner": 120000}, product),
        (case, {"splits": (16, 32)}, product + split),
        (case, {"splits": (40, 8), "tokens": 2048}, product + split),  # of outputs alone there is no product
        (case, {"out": 56}, widened),
        (case, {"tokens": 8, "inner": 72}, widened),
        (case, {"tokens": 8, "scale": "block"}, [few]),
        (by_block, {}, product + split),
        (by_block, {"tokens": 32}, twice),
        (by_block, {"tokens": 33}, product + rest + split),
        (by_block, {"tokens": 35, "inner": 38400, "out": 144, "splits": (128, 16)}, product + rest_of_long + split),
        (by_block, {"inner": 2176}, product + split),
        (by_block, {"inner": 2064}, widened + split),
        (by_block, {"splits": (528, 1024), "tokens": 2048}, product + split),
    ]
    for base, changes, kernels in expected:
        assert kernels_of(dataclasses.replace(base, **changes), "H100") == kernels, changes
    if found >= 120900:
        assert kernels_of(dataclasses.replace(by_block, tokens=1028), "H100") == [product[0], *product[1:] * 3]
    assert kernels_of(case, "RTX-4090") == widened


def test_every_configuration_is_known_and_launches_fit() -> None:
    found = set()
    for device, gpu in library.GPUS.items():
        for tokens, inner in itertools.product((1, 5, 8, 11, 16, 17), (8, 2048, 4096, 8192, 20000, 31000, 40000)):
            for scale, choose in itertools.product(("", "row"), (False, True)):
                case = Case(tokens=tokens, inner=inner, scale=scale, choose=choose)
                for line in described(problem_of(case), gpu):
                    kernel, _, launch = line.partition(" | ")
                    if not kernel.startswith("cublas_lt"):
                        shared = re.search(r" shared=(\d+)", launch)
                        assert shared is not None and int(shared[1]) <= gpu.shared_bytes
                        found.add(kernel)
                assert kernels_of(case, device)
    function: Any = library.load().twell_internal_configurations
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]
    known = {line for line in library.read_text(function).splitlines() if line.startswith("linear")}
    instead_of_cublas_lt = {"linear_many"}
    beside = {"linear_split"}
    assert known - instead_of_cublas_lt - beside <= found - {"widen", "norm", "quantise"} <= known


def test_the_workspace_does_not_shrink() -> None:
    lib = library.load()
    outputs: list[tuple[tuple[int, ...], bool]] = [((), False), ((), True), ((8, 40), False), ((16, 32), False)]
    kinds = itertools.product((64, 72, 40000), ("none", "rms"), ("", "row", "block"), outputs)
    for inner, norm, scale, (splits, choose) in kinds:
        case = Case(inner=inner, norm=norm, scale=scale, splits=splits, choose=choose)
        cases = [dataclasses.replace(case, tokens=tokens) for tokens in (*range(40), 512, 513, 1024, 1025, 4096)]
        sizes = [lib.twell_linear_workspace_bytes(problem_of(each)) for each in cases]
        assert sizes == sorted(sizes)
    assert lib.twell_linear_workspace_bytes(problem_of(Case(tokens=16, splits=(8, 40)))) == 0


def test_weights_are_widened_in_parts() -> None:
    """A layer in FP8 takes no memory for its weights in 16, but 32 MiB where no product reads the bytes."""
    case = Case(tokens=512, inner=4096, out=128256, scale="row", norm="none")
    rows = case.tokens * case.inner + 4 * (case.tokens + case.out) + 3 * 256
    assert library.load().twell_linear_workspace_bytes(problem_of(case)) <= (32 << 20) + (32 << 20) + rows
    kernels = kernels_of(case, "A100")
    assert kernels[::2] == ["widen"] * 32 and len(kernels) == 64 and "widen" not in kernels[1::2]
    few = library.load().twell_linear_workspace_bytes(problem_of(dataclasses.replace(case, tokens=16)))
    assert few < 1 << 20


def test_numbers_of_the_sources() -> None:
    plugins = Path(__file__).resolve().parents[2] / "plugins"
    few = re.search(r"kMostTokensLinearFew = (\d+);", (plugins / "kernels" / "linear" / "linear.h").read_text())
    assert few is not None and int(few[1]) == library.FEW_TOKENS_LINEAR
    header = (plugins / "include" / "twell" / "twell.h").read_text()
    assert f"#define TWELL_MAX_SPLITS {library.MAX_SPLITS}\n" in header
    for struct, mirror in (
        ("twell_linear_problem", library.LinearProblem),
        ("twell_linear_tensors", library.LinearTensors),
    ):
        body = re.findall(r"struct \{([^{}]*)\} " + struct, re.sub(r"//[^\n]*", "", header))[0]
        members = re.findall(r"(\w+)(?:\[TWELL_MAX_SPLITS\])?;", body)
        assert members == [name for name, *_ in mirror._fields_]
    source = (plugins / "tensorrt" / "linear_plugin.cpp").read_text()
    flags = re.findall(r'nullptr|"\w+"', source.partition(" kFlags = {")[2].partition(";")[0])
    names = re.findall(r'\{"(\w+)", ', source.partition(" roles_of(")[2].partition("}};")[0])
    flags = ["" if each == "nullptr" else each.strip('"') for each in flags]
    assert list(zip(names, flags, strict=True)) == [(each.name, each.flag) for each in TENSORS]
    (norms,) = re.findall(r"kNorms\[\] = \{(.*)\};", (plugins / "tensorrt" / "options.cpp").read_text())
    assert tuple(re.findall(r'"(\w+)"', norms)) == tuple(library.NORMS)


def test_numbers_of_cublas_lt() -> None:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(each) for each in spec.submodule_search_locations or []] if spec is not None else []
    header = next((found for each in folders for found in each.glob("*/include/cublasLt.h")), None)
    if header is None:
        pytest.skip("no package has cublasLt.h")
    text = header.read_text() + header.with_name("cublas_api.h").read_text()
    source = Path(__file__).resolve().parents[2] / "plugins" / "kernels" / "linear" / "cublas_lt.cu"
    numbers = re.findall(r"\bk\w+ = (\d+)[,;] +// (CUBLAS\w+)", source.read_text())
    assert len(numbers) == 20
    for number, name in numbers:
        assert re.search(rf"\b{name} *= *{number},", text), name


# ---- kernels ----

SIZES = [
    *((64, 64), (8, 8), (64, 8), (72, 200), (128, 40), (1016, 248), (1024, 1544), (2048, 2048), (2048, 6144)),
    *((4096, 2056), (5120, 1288), (8192, 1032), (11008, 520), (31000, 72), (40000, 64)),
]
TOKENS = [*range(1, 18), 20, 31, 33, 40, 128, 129, 300]


def gpu_cases() -> Iterator[Case]:
    generator = random.Random(5)
    for index, tokens in enumerate(TOKENS * 12):
        inner, out = SIZES[index % len(SIZES)]
        splits = generator.choice([(), (out,), *([(8, out - 8), (out - 8, 8)] if out > 8 else [])])
        if out >= 64 and generator.random() < 0.5:
            splits = (8, out // 16 * 8, 16, out - 24 - out // 16 * 8)
        yield Case(
            tokens=tokens,
            inner=inner,
            out=out,
            norm=generator.choice(["none", "rms", "layer"]),
            splits=splits,
            dtype=generator.choice([BF16, FP16]),
            scale=generator.choice(["", "", "tensor", "row"]),
            biases=generator.random() < 0.5,
            residual=len(splits) < 2 and generator.random() < 0.7,
        )


IN_BYTES = [
    Case(17, 2048, 6144, "rms", (2048, 2048, 2048), BF16, "row", biases=False),
    Case(17, 2048, 2048, "none", (), FP16, "tensor", residual=True),
    Case(64, 2048, 2048, "none", (), BF16, "row", biases=False, residual=True),
    Case(64, 4096, 6144, "rms", (4096, 1024, 1024), BF16, "tensor"),
    Case(300, 1040, 528, "layer", (272, 256), BF16, "row"),
    Case(301, 64, 80, "layer", (), FP16, "row", residual=True),
    Case(2048, 2048, 6144, "rms", (), FP16, "tensor", residual=True),
    Case(2048, 31008, 80, "rms", (), BF16, "row"),
    Case(9, 40000, 64, "none", (), BF16, "tensor", biases=False),
]


def relative(y: Tensor, other: Tensor) -> float:
    return float((y.double() - other).norm() / other.double().norm())


def run_kernels(case: Case, operands: LinearOperands[Tensor], *, generic: bool = False) -> list[Tensor]:
    """Run the C function, whatever the number of tokens; memory holds NaN before.

    `generic`: without cuBLASLt, which torch has loaded.
    """
    lib, problem = library.load(), problem_of(case)
    widths = case.splits or (case.out,)
    results = [operands.x.new_full((case.tokens, width), float("nan")) for width in widths]
    if case.choose:
        results = [torch.full((case.tokens,), -1, device="cuda")]
    size = lib.twell_linear_workspace_bytes(problem)
    workspace = torch.full((size + BEHIND,), 255, dtype=torch.uint8, device="cuda")
    pointers = (ctypes.c_void_p * library.MAX_SPLITS)(*map(Tensor.data_ptr, results))
    tensors = library.LinearTensors(**operands.map(Tensor.data_ptr).named(), y=pointers)
    stream = torch.cuda.current_stream().cuda_stream
    if generic:
        function = lib.twell_internal_linear
        function.argtypes = [*lib.twell_linear.argtypes[:3], ctypes.c_int32, ctypes.c_void_p]
        assert function(problem, tensors, workspace.data_ptr(), GENERIC, stream) == 0
    else:
        assert lib.twell_linear(problem, tensors, workspace.data_ptr(), size, stream) == 0
    assert bool((workspace[size:] == 255).all()), "written behind the workspace"
    return results


def assert_choice(case: Case, operands: LinearOperands[Tensor], *, generic: bool = False) -> None:
    whole = dataclasses.replace(case, splits=())  # of parts cuBLASLt may add up in another order
    (y,), (chosen,) = (
        run_kernels(dataclasses.replace(whole, choose=choose), operands, generic=generic) for choose in (False, True)
    )
    assert torch.equal(chosen, y.argmax(-1))


def random_cases() -> Iterator[Case]:
    """Yield cases of any size, 64 to 8192 wide and with outputs of odd multiples of 8."""
    generator = random.Random(7)
    for tokens in (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 23):
        inner, out = 8 * generator.randint(8, 1024), 16 * generator.randint(0, 200) + 8
        norm, scale = generator.choice(["none", "rms", "layer"]), generator.choice(["", "", "row"])
        yield Case(tokens, inner, out, norm, scale=scale, residual=generator.random() < 0.5)


BY_BLOCK = [
    *(Case(tokens, 2048, 1544, "rms", (1024, 512, 8), BF16, "block") for tokens in (1, 2, 7, 9, 16, 17, 64, 300, 2100)),
    *(Case(tokens, 1040, 264, "none", (), FP16, "block", residual=True) for tokens in (1, 7, 16, 17, 100, 300)),
    *(Case(tokens, 72, 200, "layer", (), BF16, "block") for tokens in (2, 64)),  # rows of bytes that no kernel reads
    Case(5, 16, 136, "none", (), BF16, "block", biases=False),
    Case(3, 11008, 520, "none", (), BF16, "block", residual=True),
    Case(16, 8192, 4104, "rms", (), FP16, "block", biases=False),
    Case(2, 40000, 264, "rms", (), FP16, "block"),
    Case(33, 4104, 12296, "none", (4096, 8200), BF16, "block", biases=False),
    Case(130, 1000, 264, "rms", (), FP16, "block", residual=True),
    Case(32, 2048, 1544, "rms", (), FP16, "block"),  # read twice
    # Where cuBLASLt has products of the bytes, of four tokens at a time.
    *(Case(tokens, 2048, 1552, "rms", (1024, 512, 16), BF16, "block") for tokens in (33, 64, 99, 130, 300, 2100)),
    Case(132, 11264, 2048, "layer", (), BF16, "block", residual=True),
    # Likewise, with rows of scales that are padded.
    Case(130, 11008, 528, "none", (), BF16, "block", residual=True),
    Case(64, 128, 272, "rms", (128, 144), FP16, "block"),
    Case(35, 38400, 256, "rms", (), FP16, "block"),  # linear_few has no room for a row
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", BY_BLOCK, ids=str)
def test_scales_of_blocks(case: Case) -> None:
    check_kernels(case)


IN_PARTS = [
    Case(17, 2056, 16008, scale="row", splits=(3000, 9008, 4000)),
    Case(40, 8200, 5000, "none", scale="tensor", residual=True),
    Case(300, 4096, 12288, scale="row", residual=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", IN_PARTS, ids=str)
def test_parts_of_a_weight(case: Case) -> None:
    """Of weights that are widened in parts, which begin within outputs."""
    check_kernels(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", random_cases(), ids=str)
def test_random_sizes(case: Case) -> None:
    test_kernels(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
@pytest.mark.sampled(120)
def test_kernels(case: Case) -> None:
    check_kernels(case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", IN_BYTES, ids=str)
def test_products_of_fp8(case: Case) -> None:
    if "cublas_lt bits=8" not in kernels_of(case):
        pytest.skip("neither this GPU nor this cuBLASLt has products with a scale for each row")
    check_kernels(case)


def check_kernels(case: Case) -> None:
    """Check accuracy, that bits stay the same, and that a NaN reaches its row alone."""
    operands, _ = make(case, "cuda")
    truth = dense(operands, case.norm, torch.float64)
    whole = operands.x.clone()
    kernels = kernels_of(case)
    is_product = case.tokens > 16 or kernels[-1].startswith(("linear_many", "cublas_lt"))
    for generic in (True, False) if is_product else (False,):
        in_bytes = not generic and "cublas_lt bits=8" in kernels
        operands.x.copy_(whole)
        plain = dense(operands, case.norm, case.dtype, in_bytes=in_bytes)
        if in_bytes and case.scale == "block" and (rest := case.tokens % 4):  # rows that are not rounded
            plain[-rest:] = dense(operands, case.norm, case.dtype)[-rest:]
        results = run_kernels(case, operands, generic=generic)
        y = torch.cat(results, -1)
        assert_as_accurate(y, plain, truth)
        if in_bytes:  # this product it was, and no widened one; where it is its own error is little larger
            assert relative(y, plain) < 0.3 * relative(plain, truth)
            assert relative(y, truth) < 1.05 * relative(plain, truth)
        for result, again in zip(results, run_kernels(case, operands, generic=generic), strict=True):
            assert torch.equal(result, again)
        assert_choice(case, operands, generic=generic)
        operands.x[-1, -1] = torch.nan
        broken = torch.cat(run_kernels(case, operands, generic=generic), -1)
        assert broken[-1].isnan().all() and torch.equal(broken[:-1], y[:-1])
        assert_choice(case, operands, generic=generic)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_choice_by_the_kernels(name: str, dtype: torch.dtype) -> None:
    elements, expected = CHOICES[name]
    for tokens in (1, 16, 17):
        operands = to_choose_from(elements, tokens, dtype).map(Tensor.cuda)
        case = Case(tokens=tokens, norm="none", dtype=dtype, choose=True)
        for generic in (False, True):
            assert run_kernels(case, operands, generic=generic)[0].tolist() == [expected] * tokens
        assert run_linear(operands, LinearOptions(choose=True))[0].tolist() == [expected] * tokens


@pytest.mark.gpu
@pytest.mark.parametrize("out", [8, 24, 32000, 50264])
@pytest.mark.parametrize(("dtype", "scale"), [(BF16, ""), (FP16, ""), (BF16, "row"), (FP16, "tensor")])
def test_choice_of_a_vocabulary(out: int, dtype: torch.dtype, scale: str) -> None:
    for tokens in (1, 3, 16, 17):
        operands, options = make(Case(tokens=tokens, out=out, dtype=dtype, scale=scale), "cuda")
        (y,), (chosen,) = (run_linear(operands, dataclasses.replace(options, choose=each)) for each in (False, True))
        assert torch.equal(chosen, y.argmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(tokens=3), Case(tokens=20), Case(tokens=3, inner=72, scale="row")], ids=str)
def test_the_op_on_a_gpu(case: Case) -> None:
    operands, options = make(case, "cuda")
    (y,) = run_linear(operands, options)
    assert_as_accurate(y, dense(operands, case.norm, case.dtype), dense(operands, case.norm, torch.float64))
    strided = dataclasses.replace(operands, x=operands.x.t().contiguous().t(), weight=operands.weight.t().clone().t())
    assert_as_accurate(
        run_linear(strided, options)[0],
        dense(operands, case.norm, case.dtype),
        dense(operands, case.norm, torch.float64),
    )
    scale = None if operands.weight_scale is None else operands.weight_scale[:-1]
    with pytest.raises(ValueError, match="out must be a positive multiple of 8"):
        LINEAR(operands.x, operands.weight[:-1], None, None, None, None, weight_scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(splits=(16, 8, 24)),
        Case(tokens=40, norm="layer", residual=True, dtype=FP16),
        Case(scale="row"),
        Case(inner=208, out=264, scale="block"),
        Case(choose=True),
    ],
    ids=str,
)
def test_the_plugin_runs_the_kernels(host: ctypes.CDLL, case: Case) -> None:
    operands, options = make(case, "cuda")
    fields = {
        name: value for name, value in linear_attributes(operands, options, case.out).items() if name[:6] != "plugin"
    }
    plugin = plugin_host.create_plugin(host, library.library_path(), 2, fields)
    expected = run_kernels(case, operands)
    results = [torch.full_like(each, -1) for each in expected]
    size = library.load().twell_linear_workspace_bytes(problem_of(case))
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    inputs = list(operands.named().values())
    assert plugin_host.enqueue(host.enqueue, plugin, inputs, results[0], workspace, *results[1:]) == 0
    host.destroy(plugin)
    assert all(map(torch.equal, results, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 13, 16])
@pytest.mark.parametrize("scale", ["", "row"])
def test_launches_that_overlap(tokens: int, scale: str) -> None:
    """A chain of layers, in a graph and out of it, gives what they give one at a time."""
    wide, narrow = Case(tokens, 512, 2048, scale=scale), Case(tokens, 2048, 512, "none", scale=scale, residual=True)
    layers = [make(case, "cuda") for case in (wide, narrow) * 4]
    start = layers[0][0].x

    def chain(*, alone: bool) -> Tensor:
        x = before = start
        for operands, options in layers:
            residual = None if operands.residual is None else before
            (y,) = run_linear(dataclasses.replace(operands, x=x, residual=residual), options)
            before, x = (x, y) if residual is None else (before, y)
            if alone:
                torch.cuda.synchronize()
        return x

    expected = chain(alone=True)
    assert not expected.isnan().any()
    assert torch.equal(chain(alone=False), expected)
    assert_replays(lambda: chain(alone=False), expected, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", ["", "row", "block"])
@pytest.mark.parametrize("tokens", [1, 9, 33])
def test_sanitize(tokens: int, scale: str) -> None:
    for norm, inner, out, splits in (("layer", 72, 40, (8, 32)), ("rms", 2048, 264, ()), ("none", 128, 64, ())):
        case = Case(tokens=tokens, inner=inner, out=out, norm=norm, splits=splits, scale=scale, residual=not splits)
        operands, _ = make(case, "cuda")
        assert not torch.cat(run_kernels(case, operands, generic=True), -1).isnan().any()
        assert_choice(case, operands, generic=True)
