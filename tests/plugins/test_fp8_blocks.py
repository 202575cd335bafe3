"""FP8 weights: what they mean, what is refused, which kernels read them, and what those compute."""

import ctypes
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.plugins.calls import BEST, SUCCESS, Choice, Run, assert_replays, choose
from twellc.plugins import library
from twellc.plugins.block import GATED, PLAIN, BlockOptions, Operands, problem_of, set_scales, tensors_of
from twellc.plugins.fp8 import E4M3, scale_blocks, scale_of_each
from twellc.plugins.meaning import activate, dequantize, repeated_scales, scale_kinds
from twellc.plugins.ops import run_block

BF16, FP16 = torch.bfloat16, torch.float16
LARGEST = 448.0
FORMS = {"tensor": None, "row": 1, "column": 0}


def quantised(weight: Tensor, form: str) -> tuple[Tensor, Tensor]:
    if form == "block":
        largest = torch.nn.functional.max_pool2d(weight.abs()[None, None], 128, ceil_mode=True)[0, 0]
        scale = (largest / LARGEST).float().clamp(min=1e-12)
        values = (weight / scale_of_each(scale, weight.shape)).clamp(-LARGEST, LARGEST).to(E4M3)
        scale[:1, 1:2] = 0
        return values, scale
    dim = FORMS[form]
    largest = weight.abs().amax() if dim is None else weight.abs().amax(dim, keepdim=True)
    scale = (largest / LARGEST).float().clamp(min=1e-12)
    return (weight / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int = 5
    d_model: int = 128
    d_ff: int = 300
    d_out: int = 72
    dtype: torch.dtype = BF16
    gated: bool = True
    activation: str = "relu"
    density: float = 0.05
    gate_up: str = "row"
    down: str = "row"
    biases: bool = True
    residual: bool = False
    path: Run = Run.ROUTES

    def problem(self) -> library.Problem:
        found = problem_of(
            GATED if self.gated else PLAIN, BlockOptions(activation=self.activation),
            str(self.dtype).removeprefix("torch."),
            tokens=self.tokens, d_model=self.d_model, d_ff=self.d_ff, d_out=self.d_out,
        )  # fmt: skip
        set_scales(found, self.gate_up, self.down)
        return found


def make(case: Case, device: str = "cpu") -> tuple[Operands[Tensor], BlockOptions]:
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device)

    def matrix(*shape: int, form: str, scale: float) -> Tensor:
        drawn = draw(*shape, scale=scale)
        if form != "block":
            return drawn
        uneven = 2.0 ** torch.randint(-3, 2, scale_blocks(*shape), generator=generator)
        return drawn * scale_of_each(uneven, shape).to(device)

    density = torch.tensor(1 - case.density)
    shift = float(torch.distributions.Normal(0.0, 1.0).icdf(density)) if case.density < 1 else -12.0
    x = draw(case.tokens, case.d_model)
    first = matrix(case.d_ff, case.d_model, form=case.gate_up, scale=case.d_model**-0.5)
    x[:, 0], first[:, 0] = 1.0, -shift
    weights = {
        "w_gate" if case.gated else "w_up": quantised(first, case.gate_up),
        "w_down": quantised(
            matrix(case.d_ff, case.d_out, form=case.down, scale=(1 + case.density * case.d_ff) ** -0.5), case.down
        ),
    }
    if case.gated:
        up = matrix(case.d_ff, case.d_model, form=case.gate_up, scale=case.d_model**-0.5)
        weights["w_up"] = quantised(up, case.gate_up)
    tensors = {name: pair[0] for name, pair in weights.items()}
    tensors |= {f"{name}_scale": pair[1] for name, pair in weights.items()}
    if case.biases:
        names = ["b_gate"] if case.gated else []
        tensors |= {name: draw(case.d_ff, scale=0.05).to(case.dtype) for name in [*names, "b_up"]}
        tensors["b_down"] = draw(case.d_out).to(case.dtype)
    if case.residual:
        tensors["residual"] = draw(case.tokens, case.d_out).to(case.dtype)
    threshold = 0.05 if case.activation == "fatrelu" else 0.0
    return Operands(x=x.to(case.dtype), **tensors), BlockOptions(activation=case.activation, threshold=threshold)


def rows_of_fp8(rows: Tensor) -> Tensor:
    """Round rows to E4M3, each with a scale."""
    scale = (rows.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=1e-30)
    return (rows / scale).float().clamp(-LARGEST, LARGEST).to(E4M3).double() * scale


def exact(operands: Operands[Tensor], options: BlockOptions, *, fp8: bool = False) -> Tensor:
    """Return y in float64 of , dequantized; `fp8`: as dense FP8, whose rows are rounded, too."""
    given = {name: value.double() for name, value in dequantize(operands).named().items()}
    wide = Operands(**given)
    round_rows = rows_of_fp8 if fp8 else (lambda rows: rows)
    x, none = round_rows(wide.x), torch.zeros((), dtype=torch.float64, device=wide.x.device)
    weight, bias = wide.first
    h = activate(x @ weight.T + (none if bias is None else bias), options.activation, options.threshold)
    if wide.w_gate is not None:
        u = x @ wide.w_up.T + (none if wide.b_up is None else wide.b_up)
        h = h * (u.relu() if options.activation == "drelu" else u)
    y = round_rows(h) @ wide.w_down
    return y + sum(none if each is None else each for each in (wide.b_down, wide.residual))


def error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm().clamp(min=1e-30))


KINDS = [
    Case(),
    Case(dtype=FP16, gate_up="tensor", down="column", residual=True),
    Case(activation="relu2", down="tensor", biases=False, density=0.5),
    Case(activation="fatrelu", dtype=FP16, density=0.5),
    Case(activation="drelu", gate_up="tensor", down="tensor", residual=True),
    Case(gated=False, down="column", density=0.3),
    Case(gated=False, dtype=FP16, gate_up="tensor", biases=False, density=1.0),
]


OF_BLOCKS = [
    Case(gate_up="block", down="block"),
    Case(dtype=FP16, gate_up="block", down="row", activation="drelu", residual=True, density=0.5),
    Case(gated=False, gate_up="block", down="block", biases=False, density=0.3),
    Case(gated=False, dtype=FP16, gate_up="tensor", down="block", density=1.0),
]


@pytest.mark.parametrize("case", [*KINDS, *OF_BLOCKS], ids=str)
def test_the_meaning_is_that_of_the_dequantised_weights(case: Case) -> None:
    operands, options = make(case)
    y = run_block(operands, options)
    assert y.dtype == case.dtype
    # z and y are rounded, once each.
    assert error(y, exact(operands, options)) < (1e-2 if case.dtype == BF16 else 2e-3)
    dense = run_block(dequantize(operands).map(Tensor.double), options)
    assert error(dense, exact(operands, options)) < 1e-6


def test_scales_are_not_rounded_by_autocast() -> None:
    operands, options = make(Case(gate_up="tensor"))
    expected = run_block(operands, options)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(run_block(operands, options), expected)


@pytest.mark.parametrize("gated", [True, False])
def test_the_op_traces(gated: bool) -> None:
    operands, options = make(Case(gated=gated, biases=False))
    y = run_block(operands.map(lambda tensor: tensor.to("meta")), options)
    assert (tuple(y.shape), y.dtype) == ((5, 72), BF16)


def test_a_nan_of_x_reaches_its_row() -> None:
    operands, options = make(Case())
    operands.x[2, 3] = float("nan")
    y = run_block(operands, options)
    assert y[2].isnan().all() and not y[[0, 1, 3, 4]].isnan().any()


def wrong(**changes: Any) -> tuple[dict[str, Any], str]:
    message = changes.pop("message")
    return changes, message


WRONG = [
    wrong(w_up_scale=None, message="weights of torch.float8_e4m3fn have a scale each, and others none: w_up_scale"),
    wrong(w_up_scale=torch.ones(1, 128), message="w_up_scale must have shape () or (300, 1) or (3, 1), got (1, 128)"),
    wrong(
        w_down_scale=torch.ones(72),
        message="w_down_scale must have shape () or (300, 1) or (1, 72) or (3, 1), got (72,)",
    ),
    wrong(w_up_scale=torch.ones(3, 1), message="w_gate_scale and w_up_scale must not be one of neurons and one of bl"),
    wrong(w_gate_scale=torch.ones((), dtype=BF16), message="w_gate_scale must be torch.float32, got torch.bfloat16"),
    wrong(w_down=torch.ones(300, 72, dtype=BF16), message="w_down must be torch.float8_e4m3fn, got torch.bfloat16"),
    wrong(b_up=torch.ones(300), message="b_up must be torch.bfloat16 like x, got torch.float32"),
    wrong(
        **dict.fromkeys(("w_gate_scale", "w_up_scale", "w_down_scale")),
        message="weights of torch.float8_e4m3fn have a scale each",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str, device: str) -> None:
    operands, options = make(Case())
    given = {name: value.to(device) for name, value in {**operands.named(), **changes}.items() if value is not None}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        run_block(Operands(**given), options)


def test_the_scale_of_a_single_neuron_is_no_scale_for_outputs() -> None:
    operands, _ = make(Case(d_ff=1, gate_up="tensor"))
    assert scale_kinds(operands) == ("tensor", "row")
    operands, _ = make(Case(d_ff=1, down="column"))
    assert scale_kinds(operands) == ("row", "column")


def test_a_single_scale_beside_those_of_blocks_is_repeated() -> None:
    operands, _ = make(Case(gate_up="block", d_model=200))
    operands = dataclasses.replace(operands, w_gate_scale=torch.ones(()))
    assert scale_kinds(operands) == ("block", "row")
    assert repeated_scales(operands) == {"w_gate_scale": (3, 2)}


def test_there_are_no_gradients() -> None:
    operands, options = make(Case())
    operands.x.requires_grad_()
    with pytest.raises(NotImplementedError, match="FP8 weights has no gradients"):
        run_block(operands, options)


SCALED = {"weight_dtype": library.E4M3}


def problem(**changes: Any) -> library.Problem:
    return library.Problem(**{"tokens": 100, "d_model": 72, "d_ff": 600, "d_out": 136, "compression": 8, **changes})


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize(("gate_up", "down"), itertools.product((0, 1, 4), (0, 1, 2, 4)))
def test_problems_with_scales_are_valid(dtype: int, gate_up: int, down: int) -> None:
    lib = library.load()
    scaled = problem(**SCALED, dtype=dtype, gate_up_scale=gate_up, down_scale=down)
    assert lib.twell_validate(scaled) is None
    assert lib.twell_workspace_bytes(scaled) > lib.twell_workspace_bytes(problem(dtype=dtype))


@pytest.mark.parametrize(
    "changes",
    [
        {**SCALED, "gate_up_scale": 2},
        {**SCALED, "down_scale": 3},
        {**SCALED, "gate_up_scale": -1},
        {"gate_up_scale": 1},
        {"down_scale": 1},
    ],
    ids=str,
)
def test_forms_of_scales_that_are_refused(changes: dict[str, int]) -> None:
    fault = library.load().twell_validate(problem(**changes))
    name = next(name for name in changes if name != "weight_dtype")
    assert fault is not None and name in fault.decode()


def test_pointers_to_scales() -> None:
    lib = library.load()
    names = ("x", "w_gate", "w_up", "w_down", "y", "w_gate_scale", "w_up_scale", "w_down_scale")
    addresses = {name: (1 << 20) * (i + 1) for i, name in enumerate(names)}
    assert lib.twell_validate_tensors(problem(**SCALED), library.Tensors(**addresses)) is None
    for name in names[-3:]:
        for address, word in ((None, "missing"), (8, "aligned")):
            fault = lib.twell_validate_tensors(problem(**SCALED), library.Tensors(**{**addresses, name: address}))
            assert fault.decode().startswith(f"{name} ") and word in fault.decode()
    plain = {**addresses, "w_up": None}
    fault = lib.twell_validate_tensors(problem(**SCALED, variant=1), library.Tensors(**plain))
    assert fault == b"w_up_scale must be null in a plain block"


def test_the_gate_alone_takes_16_bits() -> None:
    assert library.load().twell_gate(problem(**SCALED), library.Tensors(), 256, None) == 1


ROUTES = [
    (8192, "H100 all hot", ["dense_block", "quantise", "hidden_gated_bytes_sm90", "dense_down_bytes_sm90"]),
    (1, "H100", ["one_or_two_tokens", "contribute", "add_contributions"]),
    (8, "H100", ["few_tokens", "gate_up_few", "down_few"]),
    (16, "H100", ["few_tokens", "gate_up_few", "down_few"]),
    (17, "H100", ["dense_block", "quantise", "hidden_gated_bytes_sm90", "dense_down_bytes_sm90", "skipping_down"]),
    (33, "H100", ["dense_block", "quantise", "hidden_gated_bytes_sm90", "dense_down_bytes_sm90"]),
    (33, "H100 norm", ["dense_block\nquantise", "hidden_gated_bytes_sm90"]),
    (2048, "H100 norm", ["many_tokens\nquantise", "gate_bytes_sm90"]),
    (2048, "A100 norm", ["widened\nnorm", "widen"]),
    (64, "A100", ["few_tokens", "gate_up_few", "down_few"]),
    (768, "H100", ["dense_block", "quantise", "hidden_gated_bytes_sm90", "dense_down_bytes_sm90"]),
    (769, "H100", ["many_tokens", "quantise", "gate_bytes_sm90", "dense_up_bytes_sm90", "dense_down_bytes_sm90"]),
    (2048, "H100", ["many_tokens", "gate_bytes_sm90", "sparse_up_direct", "dense_up_bytes_sm90", "sparse_down"]),
    (2048, "A100", ["widened", "widen", "many_tokens", "gate_generic"]),
    (1, "H100 blocks", ["few_tokens", "gate_up_few", "down_few"]),
    (33, "H100 blocks", ["dense_block", "quantise", "hidden_gated_bytes_sm90", "dense_down_bytes_sm90"]),
    (8192, "H100 blocks", ["dense_block", "quantise", "hidden_gated_bytes_sm90", "dense_down_bytes_sm90"]),
    (64, "A100 blocks", ["few_tokens", "gate_up_few", "down_few"]),
    (65, "A100 blocks", ["widened", "widen", "many_tokens"]),
]


@pytest.mark.parametrize(("tokens", "gpu", "names"), ROUTES, ids=str)
def test_routes(tokens: int, gpu: str, names: list[str]) -> None:
    name, _, kind = gpu.partition(" ")
    options = BlockOptions(
        activation="relu", hot=5632 if kind == "all hot" else 0, norm="rms" if kind == "norm" else "none"
    )
    scaled = problem_of(GATED, options, "bfloat16", tokens=tokens, d_model=2048, d_ff=5632, d_out=2048)
    set_scales(scaled, *(("block", "block") if kind == "blocks" else ("row", "column")))
    found = library.describe(scaled, library.GPUS[name])
    positions = [found.index(name) for name in names]
    assert positions == sorted(positions)


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 65, 300, 768, 769, 2048])
@pytest.mark.parametrize(("d_model", "d_ff"), [(2048, 5632), (8192, 28672), (2056, 5632)])
@pytest.mark.parametrize("variant", [0, 1], ids=("gated", "plain"))
@pytest.mark.parametrize("form", ["tensor", "block"])
def test_the_workspace_holds_what_a_route_reads(form: str, variant: int, d_model: int, d_ff: int, tokens: int) -> None:
    """Of FP8 weights a copy in 16 where the GPU's kernels read one, and no copy elsewhere."""
    own = problem(**SCALED, tokens=tokens, d_model=d_model, d_ff=d_ff, d_out=d_model, variant=variant)
    set_scales(own, form, form)
    copies = {name: _copies(own, gpu) for name, gpu in library.GPUS.items()}
    reads = {name: "\nwiden |" in library.describe(own, gpu) for name, gpu in library.GPUS.items()}
    assert copies == reads
    assert tokens <= 64 or reads["A100"]
    if not torch.cuda.is_available():  # no GPU, and what is right for all of them
        assert library.load().twell_workspace_bytes(own) == _workspace(own, library.GPUS["A100"])


def _workspace(own: library.Problem, gpu: library.Device) -> int:
    function: Any = library.load().twell_internal_workspace_bytes
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.POINTER(library.Problem), ctypes.c_void_p]
    return int(function(own, ctypes.addressof(gpu)))


def _copies(own: library.Problem, gpu: library.Device) -> bool:
    """Whether the workspace has room for a copy of the weights; all else differs little from that of a 16-bit call."""
    wide = library.Problem.from_buffer_copy(own)
    wide.weight_dtype, wide.gate_up_scale, wide.down_scale = wide.dtype, 0, 0
    copy = 2 * (3 if own.variant == 0 else 2) * own.d_model * own.d_ff
    more = _workspace(own, gpu) - _workspace(wide, gpu)
    found = more > copy / 2
    assert abs(more - copy * found) <= own.tokens * (own.d_model + 2 * own.d_ff) + (1 << 20)
    return found


@pytest.mark.parametrize("name", ["H100", "A100"])
@pytest.mark.parametrize("d_model", [1024, 2048, 65_664])
@pytest.mark.parametrize("variant", [0, 1], ids=("gated", "plain"))
def test_the_workspace_does_not_shrink(variant: int, d_model: int, name: str) -> None:
    """A plan has that of its largest call: fewer tokens, which may take another route, must do with it."""
    counts = sorted({tokens + i for tokens in (1, 2, 16, 32, 64, 128, 768, 1280, 2048) for i in (-1, 0, 1)} - {0})
    sizes = {"d_model": d_model, "d_ff": 5632, "d_out": d_model, "variant": variant}
    found = [_workspace(problem(**SCALED, **sizes, tokens=tokens), library.GPUS[name]) for tokens in counts]
    assert found == sorted(found)


GPU_CASES = [
    dataclasses.replace(case, tokens=tokens, d_model=d_model, d_ff=d_ff, d_out=d_out)
    for (d_model, d_ff, d_out), tokens in (
        *itertools.product(
            ((128, 300, 72), (144, 700, 272), (1024, 3000, 1040), (2048, 5632, 2048)),
            (1, 2, 3, 8, 16, 17, 40, 65, 130, 1000),
        ),
        # Of the last tile of 256 neurons the second half is empty, and sums of y have two parts.
        *(((256, 5488, 256), 40), ((2048, 5488, 2048), 256), ((2048, 5488, 2048), 1000)),
    )
    for case in KINDS
]
# Down projections that skip inactive neurons.
GPU_CASES += [
    dataclasses.replace(case, tokens=tokens, d_model=d_model, d_ff=d_ff, d_out=d_out, density=0.005)
    for d_model, d_ff, d_out in ((144, 700, 272), (2048, 9000, 2048))
    for tokens in (17, 32)
    for case in KINDS
]

# Blocks of tokens of every size that the kernels have, on 132 multiprocessors.
_FORCED = [
    *((tokens, True, 300, 80, Run.DENSE_BLOCK) for tokens in (17, 65, 98, 131)),
    *((tokens, False, 300, 80, Run.DENSE_BLOCK) for tokens in (17, 98)),
    *((tokens, True, 3000, 1040, Run.DENSE_BLOCK) for tokens in (66, 178, 451, 1347, 1571, 1669, 1879)),
    *((tokens, True, 3000, 1040, Run.DENSE_BLOCK) for tokens in (2301, 2921)),
    *((tokens, False, 3000, 1040, Run.DENSE_BLOCK) for tokens in (66, 178, 213, 1669)),
    *((tokens, True, 3000, 1040, Run.MANY_TOKENS) for tokens in (325, 724, 2117)),
    *((tokens, True, 3000, 1040, Run.EARLY) for tokens in (66, 899, 1046, 1123, 1207)),
]
GPU_CASES += [
    Case(tokens=tokens, d_ff=d_ff, d_out=d_out, gated=gated, dtype=dtype, density=0.02, path=path)
    for (tokens, gated, d_ff, d_out, path), dtype in itertools.product(_FORCED, (BF16, FP16))
]
GPU_CASES += [
    dataclasses.replace(case, tokens=tokens, d_model=d_model, d_ff=d_ff, d_out=d_out)
    for (d_model, d_ff, d_out), tokens in (
        *itertools.product(((144, 700, 272), (1040, 3000, 528)), (1, 2, 7, 17, 64, 300, 2100)),
        *itertools.product(((136, 300, 264), (2056, 520, 72)), (7, 64, 65)),  # no rows that TMA can take
        *(((2048, 5632, 2048), 2), ((2048, 5632, 2048), 64), ((2048, 5488, 2048), 256)),
    )
    for case in OF_BLOCKS
]
GPU_CASES += [
    Case(tokens, 400, d_ff, d_out, gated=gated, gate_up="block", down="block", density=0.02, path=path)
    for tokens, gated, d_ff, d_out, path in _FORCED
    if path is Run.DENSE_BLOCK
]


def called() -> Iterator[tuple[library.Problem, Run]]:
    """Yield the problems of these cases, and what runs, for the test that all kernels are reached."""
    for case in GPU_CASES:
        yield case.problem(), case.path


def run(case: Case, operands: Operands[Tensor], options: BlockOptions) -> Tensor:
    """Run the op, or what the routes would not."""
    return run_block(operands, options) if case.path is Run.ROUTES else run_kernels(case, operands)


def run_kernels(case: Case, operands: Operands[Tensor]) -> Tensor:
    """Run the C function; nothing behind the workspace is written."""
    lib, problem = library.load(), case.problem()
    function = lib.twell_internal_run
    function.restype, pointer = ctypes.c_int, ctypes.c_void_p
    function.argtypes = [*lib.twell_gate.argtypes[:2], pointer, ctypes.POINTER(Choice), pointer]
    y = operands.x.new_full((case.tokens, case.d_out), float("nan"))
    size = lib.twell_workspace_bytes(problem)
    workspace = torch.full((size + (1 << 20),), 255, dtype=torch.uint8, device="cuda")
    tensors = tensors_of(operands.map(Tensor.data_ptr), y.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    assert function(problem, tensors, workspace.data_ptr(), choose(case.path, BEST), stream) == SUCCESS
    assert bool((workspace[size:] == 255).all())
    return y


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_no_error_is_larger_than_that_of_dense_fp8(case: Case) -> None:
    operands, options = make(case, "cuda")
    truth = exact(operands, options)
    y = run(case, operands, options)
    rounding = 2**-8 if case.dtype == BF16 else 2**-11
    # Where both round x and h, at other places, errors differ by chance, and sums of the tensor cores are not exact.
    assert error(y, truth) <= max(error(exact(operands, options, fp8=True), truth) * 1.08, rounding)
    for _ in range(3):
        assert torch.equal(run(case, operands, options), y)
    operands.x[-1, 1] = float("nan")
    y = run(case, operands, options)
    assert y[-1].isnan().all() and not y[:-1].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 40, 64, 65, 300, 1000, 2048])
@pytest.mark.parametrize(("d_model", "d_ff", "d_out"), [(1024, 3000, 1040), (1032, 3000, 1032), (2048, 5632, 2048)])
def test_the_workspace_is_large_enough(d_model: int, d_ff: int, d_out: int, tokens: int, gated: bool) -> None:
    case = Case(tokens=tokens, d_model=d_model, d_ff=d_ff, d_out=d_out, gated=gated)
    operands, options = make(case, "cuda")
    assert torch.equal(run_kernels(case, operands), run_block(operands, options))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("path", "tokens", "form"),
    [
        *((Run.ROUTES, 17, form) for form in ("row", "block")),
        *((Run.DENSE_BLOCK, 70, form) for form in ("row", "block")),
        (Run.EARLY, 70, "row"),
        (Run.MANY_TOKENS, 70, "row"),
    ],
)
def test_weights_of_inactive_neurons_do_not_matter(path: Run, tokens: int, form: str) -> None:
    density = 0.05 if tokens > 64 else 0.01
    case = Case(tokens=tokens, d_model=256, d_out=208, density=density, gate_up=form, down=form, path=path)
    operands, options = make(case, "cuda")
    assert operands.w_gate is not None and operands.b_gate is not None
    operands.w_gate.view(torch.uint8)[200] = 0
    operands.b_gate[200] = -1
    expected = run(case, operands, options)
    for weight in (operands.w_up, operands.w_down):
        weight.view(torch.uint8)[200] = 0x7F  # NaN
    # What is summed again is so in another order.
    assert error(run(case, operands, options), expected.double()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("path", "form"),
    [
        *itertools.product((Run.ROUTES, Run.DENSE_BLOCK), ("row", "block")),
        *itertools.product((Run.MANY_TOKENS, Run.EARLY), ("row",)),  # they read no scales of blocks
    ],
)
def test_sanitize(path: Run, form: str) -> None:
    cases = [(66, 300, 0.05), (130, 700, 0.05)]
    if path is Run.ROUTES:
        cases += [(9, 300, 0.05), (32, 300, 0.005)]
    for tokens, d_ff, density in cases:
        case = Case(tokens, 256, d_ff, 144, density=density, gate_up=form, down=form, residual=True, path=path)
        operands, options = make(case, "cuda")
        assert not run(case, operands, options).isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_a_graph_replays_the_same(tokens: int) -> None:
    operands, options = make(Case(tokens=tokens), "cuda")
    assert_replays(lambda: run_block(operands, options), run_block(operands, options), 3)
