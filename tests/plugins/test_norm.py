"""A block with the norm before it: what it means, what is refused, its node, its kernels."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

from tests.plugins.calls import assert_replays
from tests.plugins.test_fp8_blocks import error, exact, quantised
from tests.tolerance import assert_as_accurate, assert_same
from twellc.checks.evaluator import OnnxEvaluator, PluginNode, plugin_nodes
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.plugins import library
from twellc.plugins.block import GATED, PLAIN, BlockOptions, Operands, problem_of, set_scales
from twellc.plugins.meaning import activate, dequantize, widths_of
from twellc.plugins.ops import run_block

BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int = 5
    d_model: int = 64
    d_ff: int = 300
    d_out: int = 64
    norm: str = "rms"
    vectors: bool = True  # the norm's weight, and the bias of a layer norm
    gated: bool = True
    dtype: torch.dtype = BF16
    narrow: bool = False
    residual: bool = False
    shift: float = -2.0  # of all activations: 2 % are above 0, or with 0 half of them


def make(case: Case, device: str = "cpu") -> tuple[Operands[Tensor], BlockOptions]:
    generator = torch.Generator(device).manual_seed(case.tokens + case.d_model)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        return (drawn * scale + mean).to(case.dtype)

    first = "gate" if case.gated else "up"
    tensors = {f"w_{first}": draw(case.d_ff, case.d_model, scale=case.d_model**-0.5)}
    if case.gated:
        tensors["w_up"] = draw(case.d_ff, case.d_model, scale=case.d_model**-0.5)
    tensors["w_down"] = draw(case.d_ff, case.d_out, scale=0.1)
    if case.narrow:
        pairs = {name: quantised(each.float(), "row") for name, each in tensors.items()}
        tensors = {name: pair[0] for name, pair in pairs.items()}
        tensors |= {f"{name}_scale": pair[1] for name, pair in pairs.items()}
    tensors[f"b_{first}"] = draw(case.d_ff, scale=0.1, mean=case.shift)
    if case.vectors:
        tensors["norm_weight"] = draw(case.d_model, scale=0.2, mean=1.0)
        tensors |= {"norm_bias": draw(case.d_model, scale=0.2)} if case.norm == "layer" else {}
    if case.residual:
        tensors["residual"] = draw(case.tokens, case.d_out)
    x = draw(case.tokens, case.d_model, scale=3.0, mean=0.5)
    return Operands(x=x, **tensors), BlockOptions(activation="relu", norm=case.norm, eps=EPS)


def behind_norm(operands: Operands[Tensor], norm: str, dtype: torch.dtype) -> Operands[Tensor]:
    """Return dequantized weights, and x behind its norm, as torch computes it in `dtype`."""
    given = {name: each.to(dtype) for name, each in dequantize(operands).named().items()}
    weight, bias, x = given.pop("norm_weight", None), given.pop("norm_bias", None), given["x"]
    if norm == "rms":
        given["x"] = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, EPS)
    elif norm == "layer":
        given["x"] = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return Operands(**given)


def dense(operands: Operands[Tensor], norm: str, dtype: torch.dtype) -> Tensor:
    """Compute a block by torch's own functions, each of which rounds its result to `dtype`."""
    given, linear = behind_norm(operands, norm, dtype), torch.nn.functional.linear
    h = torch.relu(linear(given.x, *given.first))
    if given.w_gate is not None:
        h = h * linear(given.x, given.w_up, given.b_up)
    y = linear(h, given.w_down.t(), given.b_down)
    return y if given.residual is None else y + given.residual


# ---- meaning ----

CASES = [
    Case(),
    Case(norm="layer", residual=True),
    Case(norm="layer", vectors=False, gated=False),
    Case(norm="rms", vectors=False, residual=True, shift=0.0),
    Case(norm="rms", narrow=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16, FP16])
def test_meaning(case: Case, dtype: torch.dtype) -> None:
    operands, options = make(dataclasses.replace(case, dtype=dtype))
    y, truth = run_block(operands, options), dense(operands, case.norm, torch.float64)
    if dtype in (BF16, FP16):
        assert_as_accurate(y, dense(operands, case.norm, dtype), truth)
    else:
        assert_same(y, truth.to(dtype))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_nan_reaches_its_row(norm: str) -> None:
    operands, options = make(Case(norm=norm))
    operands.x[3, 7] = torch.nan
    y = run_block(operands, options)
    assert y[3].isnan().all() and int(y.isnan().any(-1).sum()) == 1


@pytest.mark.parametrize(
    ("norm", "changes", "message"),
    [
        ("none", {"norm_weight": torch.ones(64, dtype=BF16)}, "norm_weight has no meaning without a norm"),
        ("rms", {"norm_bias": torch.ones(64, dtype=BF16)}, "norm_bias has no meaning without a layer norm"),
        ("rms", {"norm_weight": torch.ones(8, dtype=BF16)}, r"norm_weight must have shape \(64,\), got \(8,\)"),
        ("rms", {"norm_weight": torch.ones(64)}, "norm_weight must be torch.bfloat16 like the weights"),
        ("batch", {}, "norm must be one of none, rms, layer, got 'batch'"),
    ],
)
def test_what_does_not_fit_is_refused(norm: str, changes: dict[str, Any], message: str) -> None:
    operands, options = make(Case(vectors=False))
    with pytest.raises((ValueError, TypeError), match=message):
        run_block(dataclasses.replace(operands, **changes), dataclasses.replace(options, norm=norm))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_gradients(norm: str) -> None:
    operands, options = make(Case(norm=norm, dtype=torch.float64, residual=True))
    tensors = operands.map(Tensor.requires_grad_).named().values()
    dy = torch.randn(5, 64, dtype=torch.float64)
    found = torch.autograd.grad(run_block(operands, options), tensors, dy)
    wanted = torch.autograd.grad(dense(operands, norm, torch.float64), tensors, dy)
    for actual, expected in zip(found, wanted, strict=True):
        assert_same(actual, expected)


class Called(torch.nn.Module):
    """A block whose residual is what it normalises."""

    def __init__(self, operands: Operands[Tensor], options: BlockOptions) -> None:
        super().__init__()
        self.names, self.options = list(operands.weights.named()), options
        for name, tensor in operands.weights.named().items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return run_block(Operands(x=x, residual=x, **{name: getattr(self, name) for name in self.names}), self.options)


@pytest.mark.parametrize("case", [Case(dtype=torch.float32), Case(dtype=torch.float32, norm="layer", narrow=True)])
def test_a_program_as_onnx_gives_the_same(case: Case, tmp_path: Path) -> None:
    operands, options = make(case)
    module, path = Called(operands, options).eval(), tmp_path / "model.onnx"
    program = torch.export.export(module, (operands.x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    save_onnx(export_onnx(program, ["x"], ["y"], {}), path)
    expected = module(operands.x)
    assert torch.equal(OnnxEvaluator(path).run({"x": operands.x})[0], expected)
    (node,) = plugin_nodes(onnx.load(path))
    assert isinstance(node, PluginNode)
    assert torch.equal(node.run(operands.x, operands.x), expected)
    first, bias = (each.double() for each in dequantize(operands).first if each is not None)
    z = torch.nn.functional.linear(behind_norm(operands, case.norm, torch.float64).x, first, bias)
    assert node.active(operands.x) == int(activate(z, "relu", 0.0).count_nonzero())


# ---- the C API ----


def problem(case: Case, **changes: Any) -> library.Problem:
    options = BlockOptions(activation="relu", norm=case.norm, eps=EPS)
    sizes = {"tokens": case.tokens, "d_model": case.d_model, "d_ff": case.d_ff, "d_out": case.d_out}
    found = problem_of(GATED if case.gated else PLAIN, options, str(case.dtype).removeprefix("torch."), **sizes)
    if case.narrow:
        set_scales(found, "row", "row")
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"norm": 3}, "norm must be"), ({"norm": -1}, "norm must be"), ({"eps": -1.0}, "eps must be")],
)
def test_validate(changes: dict[str, Any], message: str) -> None:
    lib = library.load()
    assert lib.twell_validate(problem(Case())) is None
    assert lib.twell_validate(problem(Case(), **changes)).decode().startswith(message)


def test_pointers_to_a_norm() -> None:
    lib = library.load()
    names = ("x", "w_gate", "w_up", "w_down", "y", "norm_weight", "norm_bias")
    addresses = {name: (1 << 20) * (i + 1) for i, name in enumerate(names)}

    def fault(norm: str, **changes: int | None) -> str:
        found = lib.twell_validate_tensors(problem(Case(norm=norm)), library.Tensors(**{**addresses, **changes}))
        return "" if found is None else found.decode()

    assert fault("layer") == fault("layer", norm_weight=None, norm_bias=None) == fault("rms", norm_bias=None) == ""
    assert fault("rms") == "norm_bias is for a layer norm alone"
    assert fault("none", norm_bias=None) == "norm_weight is for a norm alone"
    assert fault("layer", norm_weight=8) == "norm_weight must be aligned to 16 bytes"
    assert lib.twell_gate(problem(Case()), library.Tensors(**addresses), 256, None) == 1


def kernels_of(case: Case) -> list[str]:
    lines = library.describe(problem(case), library.GPUS["H100"]).splitlines()
    return [line.partition(" ")[0] for line in lines if not line.startswith("route")]


def test_which_kernels_run() -> None:
    large = Case(tokens=1, d_model=2048, d_ff=5632, d_out=2048)
    for tokens, narrow in itertools.product((1, 2), (False, True)):
        case = dataclasses.replace(large, tokens=tokens, narrow=narrow)
        assert kernels_of(case) == ["norm_contribute", "add_contributions"]
    for tokens in (3, 40, 700, 3000):
        case = dataclasses.replace(large, tokens=tokens)
        assert kernels_of(case) == ["norm", *kernels_of(dataclasses.replace(case, norm="none"))]
    wide = Case(d_ff=70_000, gated=False)
    assert kernels_of(wide)[0] == "norm" and "norm" not in kernels_of(wide)[1:]


def test_the_workspace_holds_the_rows() -> None:
    lib = library.load()
    for narrow, d_ff in ((False, 300), (True, 300), (False, 70_000)):
        case, sizes = Case(narrow=narrow, d_ff=d_ff, gated=d_ff < 65_536), []
        for tokens in (1, 2, 3, 17, 200, 3000):
            own = dataclasses.replace(case, tokens=tokens)
            sizes.append(lib.twell_workspace_bytes(problem(own)))
            plain = lib.twell_workspace_bytes(problem(dataclasses.replace(own, norm="none")))
            assert sizes[-1] == plain + -(-tokens * case.d_model * 2 // 256) * 256
        assert sizes == sorted(sizes)


# ---- kernels ----


def gpu_cases() -> Iterator[Case]:
    sizes = ((72, 300, 136), (2048, 5632, 2048), (4096, 1024, 512))
    for (d_model, d_ff, d_out), tokens in itertools.product(sizes, (1, 2, 7, 40, 100, 700)):
        base = Case(tokens, d_model, d_ff, d_out)
        yield base
        yield dataclasses.replace(base, norm="layer", dtype=FP16, residual=True)
        yield dataclasses.replace(base, norm="layer", gated=False, vectors=False)
        yield dataclasses.replace(base, narrow=True, residual=True)
    for tokens, narrow in itertools.product((1, 2), (False, True)):
        base = Case(tokens, 1000, 2000, 1000, shift=0.0, narrow=narrow)
        yield from (dataclasses.replace(base, norm=norm) for norm in ("rms", "layer"))
        yield dataclasses.replace(base, d_model=8, d_ff=24)


@pytest.mark.gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_kernels(case: Case) -> None:
    operands, options = make(case, "cuda")
    y, truth = run_block(operands, options), dense(operands, case.norm, torch.float64)
    if case.narrow:
        wide = behind_norm(operands, case.norm, torch.float64)
        of_fp8 = error(exact(wide, dataclasses.replace(options, norm="none", eps=0.0), fp8=True), truth)
        assert error(y, truth) <= max(1.08 * of_fp8, 2**-8)
    else:
        assert_as_accurate(y, dense(operands, case.norm, case.dtype), truth)
    for _ in range(3):
        assert torch.equal(run_block(operands, options), y)
    operands.x[-1, -1] = torch.nan
    broken = run_block(operands, options)
    assert broken[-1].isnan().all() and not broken[:-1].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(tokens=1), Case(tokens=20), Case(tokens=1, narrow=True)], ids=str)
def test_weights_that_are_copied_first(case: Case) -> None:
    operands, options = make(case, "cuda")
    (d_ff, d_model), expected = operands.first[0].shape, run_block(operands, options)
    spread = torch.empty(d_ff, 2 * d_model, dtype=operands.w_up.dtype, device="cuda")[:, ::2]
    spread.copy_(operands.w_up)
    for _ in range(20):
        y = run_block(dataclasses.replace(operands, w_up=spread), options)
        assert error(y, expected.double()) < 2**-7


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 40, 100, 3000])
@pytest.mark.parametrize("narrow", [False, True])
def test_launches_that_overlap(tokens: int, narrow: bool) -> None:
    """A chain of blocks, in a graph and out of it, gives what they give one at a time."""
    sizes = [(512, 2048, 1024), (1024, 3000, 512)]
    cases = [Case(tokens, *size, norm=norm, narrow=narrow) for norm in ("rms", "layer") * 2 for size in sizes]
    blocks = [make(case, "cuda") for case in cases]
    start = blocks[0][0].x

    def chain(*, alone: bool) -> Tensor:
        before, x = None, start
        for operands, options in blocks:
            residual = before if before is not None and before.shape[-1] == operands.w_down.shape[-1] else None
            before, x = x, run_block(dataclasses.replace(operands, x=x, residual=residual), options)
            if alone:
                torch.cuda.synchronize()
        return x

    expected = chain(alone=True)
    assert not expected.isnan().any()
    assert torch.equal(chain(alone=False), expected)
    assert_replays(lambda: chain(alone=False), expected, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_sanitize(tokens: int) -> None:
    for norm, narrow in (("layer", False), ("rms", True)):
        operands, options = make(Case(tokens, 72, 300, 40, norm=norm, narrow=narrow, shift=0.0), "cuda")
        assert widths_of(operands)["d_model"] == 72
        assert not run_block(operands, options).isnan().any()
