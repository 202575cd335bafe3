"""Every spelling of an activation, in a gated and in a plain block: matched, rewritten, and of the same values."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.models import (
    Function,
    Gated,
    Plain,
    Written,
    assert_rewrites,
    blocks_of,
    calls,
    canonical,
    eager,
    of,
    rewrite,
    run,
)
from tests.tolerance import assert_same
from twellc.passes.match.find_ffn import FfnBlock, find_ffn_blocks
from twellc.passes.precision import lower
from twellc.plugins.ops import GATED_MLP, MLP


def relu2_by_mul(t: Tensor) -> Tensor:
    positive = torch.relu(t)
    return positive * positive


def masked_in_place(t: Tensor) -> Tensor:
    copy = t.clone()
    return copy.masked_fill_(copy < 0, 0.0)


def written(make_mask: Function) -> Function:
    """Return a function that writes zeros into a copy."""

    def function(t: Tensor) -> Tensor:
        copy = t.clone()
        copy[make_mask(copy)] = 0
        return copy

    return function


def above(stored: Tensor, form: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """Return something of t and of a stored tensor."""
    return Written(lambda s, t: form(t, s.stored), {"stored": stored})


def slope(*slopes: float) -> nn.Module:
    """Return a PReLU with fixed slopes, which `Plain` must not draw anew."""
    return above(torch.tensor(slopes), lambda t, slopes: F.prelu(t.flatten(0, 1), slopes).view(t.shape))


# x >= t is x > the float32 before t.
BELOW = float(torch.nextafter(torch.tensor(0.25), torch.tensor(0.0)))

THRESHOLDS = torch.linspace(0.1, 0.5, 40)
# Where t is above a bound, and where it is not.
COMPARISONS: dict[str, tuple[Callable[[Tensor, float], Tensor], Callable[[Tensor, float], Tensor]]] = {
    ">": (lambda t, bound: t > bound, lambda t, bound: t <= bound),
    ">=": (lambda t, bound: t >= bound, lambda t, bound: t < bound),
    "swapped": (lambda t, bound: torch.full((), bound) < t, lambda t, bound: torch.full_like(t, bound) >= t),
    "not": (lambda t, bound: ~(t <= bound), lambda t, bound: torch.logical_not(t > bound)),
}
# What keeps t where it is above, by either mask.
MASKED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "where": lambda t, keep, drop: torch.where(keep, t, 0.0),
    "where, zeros_like": lambda t, keep, drop: torch.where(keep, t, torch.zeros_like(t)),
    "where, 0 first": lambda t, keep, drop: torch.where(drop, 0.0, t),
    "where, a constant": lambda t, keep, drop: torch.where(drop, torch.tensor(0.0), t),
    "where of relu": lambda t, keep, drop: torch.where(keep, torch.relu(t), 0.0),
    "x * mask": lambda t, keep, drop: t * keep,
    "a mask that is cast": lambda t, keep, drop: keep.to(t.dtype) * t,
    "a mask by type_as": lambda t, keep, drop: t * keep.type_as(t),
    "an integer mask": lambda t, keep, drop: t * keep.int(),
    "a mask by where": lambda t, keep, drop: torch.where(keep, 1.0, 0.0) * t,
    "a mask by where, tensors": lambda t, keep, drop: t * torch.where(drop, torch.zeros_like(t), torch.ones_like(t)),
    "1 - mask": lambda t, keep, drop: (1 - drop.float()) * t,
    "1.0 - mask, a tensor": lambda t, keep, drop: t * torch.sub(torch.ones(()), drop.to(t.dtype)),
    "relu(x) * mask": lambda t, keep, drop: torch.relu(t) * keep,
    "relu(x * mask)": lambda t, keep, drop: torch.relu(t * keep),
    "masked_fill": lambda t, keep, drop: t.masked_fill(drop, 0.0),
    "masked_fill, a tensor": lambda t, keep, drop: t.masked_fill(drop, torch.tensor(0.0)),
    "index_put": lambda t, keep, drop: torch.index_put(t, (drop,), torch.tensor(0.0)),
    "masked_scatter": lambda t, keep, drop: t.masked_scatter(drop, torch.zeros_like(t)),
}


def masked() -> dict[str, tuple[str, float, Function]]:
    """Return each use of a mask by two comparisons, with a bound of 0 and another one in turns."""
    found: dict[str, tuple[str, float, Function]] = {}
    for number, (use, keeping) in enumerate(MASKED.items()):
        for place, comparison in enumerate(list(COMPARISONS)[number % 2 :: 2]):
            bound = (0.0, 0.25)[(number // 2 + place) % 2]

            def function(t: Tensor, use: Any = keeping, by: str = comparison, bound: float = bound) -> Tensor:
                return use(t, *(each(t, bound) for each in COMPARISONS[by]))  # type: ignore[no-any-return]

            least = BELOW if comparison == ">=" and bound else bound
            found[f"{use}, {comparison}"] = ("fatrelu" if bound else "relu", least, function)
    return found


SPELLINGS: dict[str, tuple[str, float, Function]] = {
    **masked(),
    "relu": ("relu", 0, torch.relu),
    "in place": ("relu", 0, nn.ReLU(inplace=True)),
    "clamp": ("relu", 0, lambda t: torch.clamp(t, min=0)),
    "clamp to infinity": ("relu", 0, lambda t: t.clamp(0, math.inf)),
    "clamp_min": ("relu", 0, lambda t: t.clamp_min(0.0)),
    "clamp, a tensor": ("relu", 0, lambda t: t.clamp(min=torch.tensor(0.0))),
    "clip": ("relu", 0, lambda t: torch.clip(t, min=0)),
    "hardtanh": ("relu", 0, lambda t: F.hardtanh(t, 0.0, math.inf)),
    "maximum, zeros_like": ("relu", 0, lambda t: torch.maximum(t, torch.zeros_like(t))),
    "maximum, operands swapped": ("relu", 0, lambda t: torch.maximum(torch.zeros_like(t), t)),
    "maximum, zeros": ("relu", 0, lambda t: torch.maximum(t, torch.zeros(t.shape[-1]))),
    "maximum, new_zeros": ("relu", 0, lambda t: torch.maximum(t, t.new_zeros(()))),
    "maximum, a constant": ("relu", 0, lambda t: torch.maximum(t, torch.tensor(0.0))),
    "max": ("relu", 0, lambda t: torch.max(t, torch.zeros_like(t))),
    "maximum, full": ("relu", 0, lambda t: torch.maximum(t, torch.full((1,), 0.0))),
    "threshold 0": ("relu", 0, lambda t: F.threshold(t, 0.0, 0.0)),
    "where, compared with zeros": ("relu", 0, lambda t: torch.where(t > torch.zeros_like(t), t, torch.zeros_like(t))),
    "x * (x > 0), a mask of floats": ("relu", 0, lambda t: (t > torch.zeros_like(t)).float() * t),
    "square of x * (x > 0)": ("relu2", 0, lambda t: (t * (t > 0)).square()),
    "square": ("relu2", 0, lambda t: torch.relu(t).square()),
    "** 2": ("relu2", 0, lambda t: torch.relu(t) ** 2),
    "mul by itself": ("relu2", 0, relu2_by_mul),
    "square of clamp": ("relu2", 0, lambda t: t.clamp(min=0).square()),
    "x * relu(x)": ("relu2", 0, lambda t: t * torch.relu(t)),
    "relu(x) * x": ("relu2", 0, lambda t: torch.relu(t) * t),
    "x * relu(x), a copy and views": ("relu2", 0, lambda t: t.clone() * torch.relu(t.flatten(0, 1)).view(t.shape)),
    "x * clamp(x)": ("relu2", 0, lambda t: t * t.clamp(min=0)),
    "x * (x * (x > 0))": ("relu2", 0, lambda t: t * (t * (t > 0))),
    "threshold": ("fatrelu", 0.25, lambda t: F.threshold(t, 0.25, 0.0)),
    "masked_fill_": ("relu", 0, masked_in_place),
    "threshold_": ("relu", 0, lambda t: torch.threshold_(t.clone(), 0.0, 0.0)),
    "fmax": ("relu", 0, lambda t: torch.fmax(torch.zeros_like(t), t)),
    "maximum, an integer": ("relu", 0, lambda t: torch.maximum(t, torch.tensor(0))),
    "maximum, a buffer": ("relu", 0, above(torch.zeros(()), torch.maximum)),
    "maximum, a buffer of zeros": ("relu", 0, above(torch.zeros(40), torch.maximum)),
    "max, a parameter": ("relu", 0, above(torch.zeros(1, 1, 40), lambda t, zero: torch.max(zero, t))),
    "leaky_relu of slope 0": ("relu", 0, nn.LeakyReLU(0.0)),
    "rrelu of slope 0": ("relu", 0, lambda t: F.rrelu(t, 0.0, 0.0)),
    "elu of alpha 0": ("relu", 0, nn.ELU(0.0)),
    "prelu of slope 0": ("relu", 0, slope(0.0)),
    "prelu of slopes 0": ("relu", 0, slope(*[0.0] * 40)),
    "x[x < 0] = 0": ("relu", 0, written(lambda t: t < 0)),
    "x[~(x > 0)] = 0": ("relu", 0, written(lambda t: ~(t > 0))),
    "x[x < t] = 0": ("fatrelu", BELOW, written(lambda t: t < 0.25)),
    "heaviside": ("relu", 0, lambda t: t * torch.heaviside(t, torch.tensor(0.5))),
    "heaviside, zeros": ("relu", 0, lambda t: torch.heaviside(t, t.new_zeros(1)) * t),
    "sign and clamp": ("relu", 0, lambda t: t * torch.sign(t).clamp(min=0)),
    "sign of relu": ("relu", 0, lambda t: torch.sign(torch.relu(t)) * t),
    "relu(x) * (x > -1)": ("relu", 0, lambda t: torch.relu(t) * (t > -1)),
    "x * (x > t), equal thresholds": ("fatrelu", 0.25, above(torch.full((40,), 0.25), lambda t, s: t * (t > s))),
    "where, equal thresholds": ("fatrelu", 0.25, above(torch.full((40,), 0.25), lambda t, s: torch.where(t > s, t, 0))),
    "a stored threshold": ("fatrelu", 0.25, above(torch.tensor(0.25), lambda t, s: torch.relu(t) * (t > s))),
    "x * (x > t), each neuron's": ("fatrelu", 0, above(THRESHOLDS, lambda t, s: t * (t > s))),
    "where, each": ("fatrelu", 0, above(THRESHOLDS, lambda t, s: torch.where(s >= t, 0.0, t))),
    "relu(x) * (x > t), each": (
        "fatrelu",
        0,
        above(THRESHOLDS - 0.3, lambda t, s: torch.relu(t) * (t > s).to(t.dtype)),
    ),
    "masked_fill, each": ("fatrelu", 0, above(THRESHOLDS, lambda t, s: t.masked_fill(t <= s, 0.0))),
    "relu(x * (x > t)), each": ("fatrelu", 0, above(THRESHOLDS - 0.3, lambda t, s: torch.relu(t * (t > s)))),
    "relu(relu(x))": ("relu", 0, lambda t: torch.relu(torch.where(t > 0, t, 0.0))),
    "relu(x) * (relu(x) > t)": ("fatrelu", 0.25, lambda t: torch.relu(t) * (torch.relu(t) > 0.25)),
    "relu(x) * (relu(x) > -1)": ("relu", 0, lambda t: torch.relu(t) * (torch.relu(t) > -1)),
    "relu(x) * (relu(x) > t), each": (
        "fatrelu",
        0,
        above(THRESHOLDS - 0.3, lambda t, s: torch.relu(t) * (torch.relu(t) > s)),
    ),
    "(x + |x|) / 2": ("relu", 0, lambda t: (t + t.abs()) / 2),
    "0.5 * (|x| + x)": ("relu", 0, lambda t: 0.5 * (torch.abs(t) + t)),
    "x - clamp(x, max=0)": ("relu", 0, lambda t: t - t.clamp(max=0)),
    "x - clamp_max(x)": ("relu", 0, lambda t: t - t.clamp_max(0)),
    "x - min(x, 0)": ("relu", 0, lambda t: t - torch.min(t, torch.zeros_like(t))),
    "-min(-x, 0)": ("relu", 0, lambda t: -torch.minimum(torch.tensor(0.0), -t)),
    "x + relu(-x)": ("relu", 0, lambda t: t + torch.relu(-t)),
    "relu, cast and cast back": ("relu", 0, lambda t: torch.relu(t).double().type_as(t)),
}


VARIANTS = ("gated", "plain")


class Table(nn.Module):
    """A block with each of many activations, all over the same input: one export for all of them."""

    def __init__(self, *blocks: tuple[str, Function]) -> None:
        super().__init__()
        made = (Gated(each, biases="g") if variant == "gated" else Plain(each, biases="u") for variant, each in blocks)
        self.blocks = nn.ModuleList(made)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(block(x) for block in self.blocks)


class Exported:
    """A table with its blocks and its outputs before and after the rewrite, by variant and spelling."""

    def __init__(self, functions: dict[str, Function], cases: list[tuple[str, str]] | None = None) -> None:
        cases = cases or list(itertools.product(VARIANTS, functions))
        module = Table(*((variant, functions[spelling]) for variant, spelling in cases))
        x = torch.randn(2, 3, 16)
        self.program = canonical(module, x)
        blocks = {block.module: block for block in find_ffn_blocks(self.program)}
        self.rewritten = rewrite(self.program)
        pairs = zip(eager(module, x), run(self.rewritten), strict=True)
        self.outputs: dict[tuple[str, str], tuple[Tensor, Tensor]] = dict(zip(cases, pairs, strict=True))
        found = [blocks.pop(f"blocks.{index}", None) for index in range(len(cases))]
        self.blocks: dict[tuple[str, str], FfnBlock | None] = dict(zip(cases, found, strict=True))
        assert blocks == {}


# One variant of each, in turns: the other one reads activations likewise.
CASES = list(zip(itertools.cycle(VARIANTS), SPELLINGS, strict=False))


@pytest.fixture(scope="module")
def matched() -> Exported:
    return Exported({spelling: function for spelling, (_, _, function) in SPELLINGS.items()}, CASES)


@pytest.mark.parametrize(("variant", "spelling"), CASES)
def test_spelling(matched: Exported, spelling: str, variant: str) -> None:
    name, threshold, _ = SPELLINGS[spelling]
    block = matched.blocks[variant, spelling]
    assert block is not None
    assert (block.variant, block.activation, block.threshold, block.refusal) == (variant, name, threshold, "")
    expected, actual = matched.outputs[variant, spelling]
    assert_same(actual, expected)


def test_nothing_else_is_left(matched: Exported) -> None:
    """Neither projections nor what belonged to an activation: comparisons, zeros, casts."""
    wanted = [(name, threshold, 8) for name, threshold, _ in SPELLINGS.values()]
    assert calls(matched.rewritten) == {"gated_mlp": len(wanted[::2]), "mlp": len(wanted[1::2])}
    assert find_ffn_blocks(matched.rewritten) == []
    for op, own in ((GATED_MLP, wanted[::2]), (MLP, wanted[1::2])):
        nodes = matched.rewritten.graph.find_nodes(op="call_function", target=op)
        assert [node.args[-6:-3] for node in nodes] == own


@pytest.mark.parametrize(("threshold", "name"), [(0, "relu"), (0.25, "fatrelu")])
def test_a_mask_does_not_keep_its_precision(threshold: float, name: str) -> None:
    """In a float32 model that is brought to bfloat16, its mask would stay float32 and make the hidden tensor so."""
    module = Gated(lambda t: t * (t > threshold).float())
    dense = lower(canonical(module), torch.bfloat16)
    (block,) = find_ffn_blocks(dense)
    assert (block.activation, block.dtype, block.refusal) == (name, torch.bfloat16, "")


def test_drelu() -> None:
    module = of(lambda f, x: f.down(torch.relu(f.gate(x)) * f.up(x).clamp(min=0)), Gated(biases="gud"))
    _, (block,), result = assert_rewrites(module, torch.randn(5, 16))
    assert (block.variant, block.activation) == ("gated", "drelu")
    assert calls(result) == {"gated_mlp": 1}


def test_x_times_relu_of_another_tensor() -> None:
    """Not the square of a ReLU: a gated block, and its like with a gate that is broadcast."""
    module, x = Gated(), torch.randn(5, 16)
    (block,) = blocks_of(module, x)
    assert (block.variant, block.activation) == ("gated", "relu")
    for function in (
        lambda t: t * torch.relu(t + 1),
        lambda t: t * torch.relu(-t),
        lambda t: t * torch.relu(t.flip(0)),
        lambda t: t * F.threshold(t, 0.25, 0.0),
        lambda t: t[:, None] * torch.relu(t),
    ):
        for block in [*blocks_of(Gated(function), x), *blocks_of(Plain(function), x)]:
            assert block.activation != "relu2" or block.refusal


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_x_times_relu_of_what_is_not_finite(value: float) -> None:
    """As the square of a ReLU but for minus infinity: the neuron does not fire, where its product with 0 is NaN."""
    module, x = Plain(lambda t: t * torch.relu(t), biases="u"), torch.randn(5, 16)
    nn.init.constant_(module.up.bias[:1], value)
    expected, (actual,) = eager(module, x)[0], run(rewrite(canonical(module, x)))
    if value == -math.inf:
        assert expected.isnan().all()
        nn.init.constant_(module.up.bias[:1], -1e30)
        assert_same(actual, eager(module, x)[0])
    else:
        assert torch.equal(actual.nan_to_num(), expected.nan_to_num()) and not actual.isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threshold", [0.01, 0.03, 0.1])
def test_threshold_between_two_low_precision_numbers(dtype: torch.dtype, threshold: float) -> None:
    """aten.threshold compares with the exact threshold, comparisons with the rounded one; both must be kept."""
    functions: dict[str, Function] = {
        "threshold": lambda t: F.threshold(t, threshold, 0.0),
        "where >": lambda t: torch.where(t > threshold, t, 0.0),
        "where >=": lambda t: torch.where(t >= threshold, t, 0.0),
        "masked_fill <": lambda t: t.masked_fill(t < threshold, 0.0),
        "x * (x > t)": lambda t: t * (t > threshold),
        "x * (x >= t)": lambda t: t * (t >= threshold),
        "x * (x > t), widened": lambda t: t * (t.float() > threshold),
        "where >, widened": lambda t: torch.where(t.float() > threshold, t.float(), 0.0).to(t.dtype),
    }
    module = Table(*itertools.product(VARIANTS, functions.values())).to(dtype)
    for block in module.blocks[len(functions) :]:
        nn.init.eye_(block.up.weight)
        nn.init.zeros_(block.up.bias)
        nn.init.eye_(block.down.weight)
    near = torch.tensor(threshold).to(dtype)
    x = torch.zeros(5, 16, dtype=dtype)
    x[:, 0] = torch.stack(
        [near * 0.98, torch.nextafter(near, near * 0), near, torch.nextafter(near, near + 1), near * 2]
    )
    program = canonical(module, x)
    found = [block.activation for block in find_ffn_blocks(program) if not block.refusal]
    assert found == ["fatrelu"] * 2 * len(functions)
    for actual, expected in list(zip(run(rewrite(program)), eager(module, x), strict=True))[len(functions) :]:
        assert torch.equal(actual, expected)


NEEDED = "{gate}activation is {name}; TwELL needs a ReLU family"
EACH_NEURON = "{gate}activation is FATReLU with a threshold for each neuron; x > a stored vector is needed"
BELOW_0 = "a threshold of its FATReLU is below 0"
# Activations whose zeros TwELL cannot use, or that have none: named in the refusal.
REFUSED: dict[str, Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu ": nn.GELU("tanh"),
    "relu6": F.relu6,
    "relu6 ": nn.ReLU6(),
    "relu6  ": lambda t: t.clamp(0, 6),
    "relu up to 1": lambda t: t.clamp(0.0, 1.0),
    "relu up to 2": lambda t: t.clamp(0.0, 2.0),
    "relu up to 2 ": lambda t: F.hardtanh(t, 0.0, 2.0),
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": F.celu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "softplus": F.softplus,
    "prelu": nn.PReLU(),
    "prelu ": slope(0.0, *[0.25] * 39),
    "rrelu": F.rrelu,
}
# Thresholds that differ: listed, since a ReLU is in it, and dense.
EACH: dict[str, tuple[str, Function]] = {
    "computed": (EACH_NEURON, above(torch.linspace(-2, 0, 40), lambda t, s: torch.relu(t) * (t > s.exp()).float())),
    "x >= t": (EACH_NEURON, above(THRESHOLDS, lambda t, s: t * (t >= s))),
    "below 0": (BELOW_0, above(THRESHOLDS - 0.3, lambda t, s: t * (t > s))),
    "NaN": ("a threshold of its FATReLU is NaN", above(THRESHOLDS * math.nan, lambda t, s: torch.relu(t) * (t > s))),
}
# Forms with a ReLU in them that is not all: listed with the operations.
OTHERWISE: dict[str, Function] = {
    "relu, nan_to_num": lambda t: torch.nan_to_num(torch.relu(t)),
    "relu, clamp": lambda t: torch.relu(t).clamp(max=6),
    "relu, hardtanh": lambda t: F.hardtanh(torch.relu(t), -1.0, 2.0),
    "relu, pow": lambda t: torch.relu(t) ** 3,
    "relu, log1p": lambda t: torch.log1p(torch.relu(t)),
    "relu, tanh": lambda t: torch.tanh(torch.relu(t)),
    "relu, add, square": lambda t: (torch.relu(t) + 1).square(),
}
DENSE: dict[str, tuple[str, Function]] = {
    **{name: (NEEDED.replace("{name}", name.strip()), function) for name, function in REFUSED.items()},
    **EACH,
    **{
        operations: (f"no form that twellc rewrites: linear, {operations}{{mul}}, linear", function)
        for operations, function in OTHERWISE.items()
    },
}


@pytest.fixture(scope="module")
def dense() -> Exported:
    return Exported({spelling: function for spelling, (_, function) in DENSE.items()})


@pytest.mark.parametrize("variant", ["gated", "plain"])
@pytest.mark.parametrize("spelling", DENSE)
def test_dense(dense: Exported, spelling: str, variant: str) -> None:
    block = dense.blocks[variant, spelling]
    assert block is not None
    is_gated = variant == "gated"
    assert block.variant == variant and (spelling not in REFUSED or block.activation == spelling.strip())
    assert block.refusal == DENSE[spelling][0].format(gate="gate " * is_gated, mul=", mul" * is_gated)
    expected, actual = dense.outputs[variant, spelling]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "spelling",
    ["x[x < 0] = 0", "(x + |x|) / 2", "heaviside", "1 - mask, >=", "x - min(x, 0)", "x * mask, >=", "x * mask, not"],
)
def test_what_is_spelt_out_lets_what_is_not_a_number_through(spelling: str) -> None:
    module, x = Plain(SPELLINGS[spelling][2]), torch.randn(2, 3, 16)
    x[1, 2, 3] = math.nan
    expected, (actual,) = eager(module, x)[0], run(rewrite(canonical(module, x)))
    assert torch.equal(actual.isnan(), expected.isnan()) and actual.isnan().any() and not actual.isnan().all()
    assert_same(actual[~actual.isnan()], expected[~expected.isnan()])


def test_gates_that_are_refused() -> None:
    """silu(gate) * relu(up) has no sparse gate on the gate's side alone; a gate that is shifted has no zeros."""

    two = of(lambda f, x: f.down(F.silu(f.gate(x)) * torch.relu(f.up(x))))
    for module, refusal in (
        (Gated(lambda t: torch.relu(t) + 1), "no form that twellc rewrites: linear, relu, add, mul, linear"),
        (Gated(torch.sigmoid), "gate activation is sigmoid; TwELL needs a ReLU family"),
        (two, "gate activation is silu times relu; TwELL needs a ReLU family"),
    ):
        assert [block.refusal for block in blocks_of(module)] == [refusal]


NO_BLOCK: dict[str, Function] = {
    "nothing": lambda t: t,
    "tanh": torch.tanh,
    "abs": torch.abs,
    "exp": torch.exp,
    "hardtanh": F.hardtanh,
    "clamp from below zero": lambda t: t.clamp(min=-1),
    "clamp from above zero": lambda t: t.clamp(min=1e-3),
    "clamp without a bound below": lambda t: t.clamp(max=0),
    "minimum": lambda t: torch.minimum(t, torch.zeros_like(t)),
    "maximum with ones": lambda t: torch.maximum(t, torch.ones_like(t)),
    "threshold below zero": lambda t: F.threshold(t, -0.5, 0.0),
    "threshold at infinity": lambda t: F.threshold(t, math.inf, 0.0),
    "threshold to another value": lambda t: F.threshold(t, 0.5, 1.0),
    "where keeps the negative": lambda t: torch.where(t < 0, t, 0.0),
    "where keeps another tensor": lambda t: torch.where(t > 0, t + 1, 0.0),
    "where above infinity": lambda t: torch.where(t > math.inf, t, 0.0),
    "where above NaN": lambda t: torch.where(t > math.nan, t, 0.0),
    "x * (x < 0)": lambda t: t * (t < 0),
    "x * (y > 0)": lambda t: t * (t + 1 > 0),
    "x * (x > -1)": lambda t: t * (t > -1),
    "x * (x > 0) in a wider precision": lambda t: (t * (t > 0).double()).float(),
    "where with ones": lambda t: torch.where(t > 0, t, torch.ones_like(t)),
    "softplus of ReLU's like": lambda t: (t + t.square().sqrt()) / 3,
    "mean with another's absolute value": lambda t: (t + (t + 1).abs()) / 2,
    "x - min(y, 0)": lambda t: t - (t + 1).clamp(max=0),
    "heaviside at infinity": lambda t: t * torch.heaviside(t, torch.tensor(math.inf)),
    "a mask of other numbers": lambda t: t * torch.where(t > 0, 2.0, 0.0),
    "zeros at chosen places": written(lambda t: t < -1),
    "adds where it writes": lambda t: torch.index_put(t, (t < 0,), torch.tensor(0.0), accumulate=True),
    "a threshold of other numbers of x": lambda t: t * (t > t.mean(-1, keepdim=True)),
}


@pytest.fixture(scope="module")
def unmatched() -> Exported:
    return Exported(NO_BLOCK)


@pytest.mark.parametrize("variant", ["gated", "plain"])
@pytest.mark.parametrize("spelling", NO_BLOCK)
def test_no_block(unmatched: Exported, spelling: str, variant: str) -> None:
    """What has no zeros, or zeros at other places, must neither match nor be reported."""
    assert unmatched.blocks[variant, spelling] is None
