"""Constants beside an activation: which go into the weights, with results equal to float64, and which must not."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.models import (
    D_FF,
    D_MODEL,
    Function,
    Gated,
    Plain,
    Written,
    assert_rewrites,
    calls,
    canonical,
    eager,
    export,
    functionalize,
    rewrite,
    run,
)
from tests.tolerance import assert_as_accurate, assert_same
from twellc.passes.fold_constants import fold_constants
from twellc.passes.graph.program import constants_of
from twellc.passes.match.find_ffn import find_ffn_blocks

Form = Callable[[Any, Tensor], Any]


def drawn_norm(kind: type[nn.Module], **options: bool) -> nn.Module:
    """Return a batch norm with statistics and weights that matter, negative ones among them."""
    norm = kind(D_FF, **options)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


class Constants(nn.Module):
    """A gated block with vectors, norms and convolutions at hand; `form` computes with them."""

    def __init__(self, form: Form, biases: str = "gud") -> None:
        super().__init__()
        self.form, self.ffn = form, Gated(biases=biases)
        self.norm, self.bare = drawn_norm(nn.BatchNorm1d), drawn_norm(nn.BatchNorm1d, affine=False)
        self.norm2d = drawn_norm(nn.BatchNorm2d)
        self.scale, self.shift = nn.Parameter(torch.randn(D_FF)), nn.Parameter(torch.randn(D_FF))
        self.log, self.one = nn.Parameter(torch.randn(D_FF) / 2), nn.Parameter(torch.tensor(-1.5))
        self.register_buffer("table", torch.rand(1, 1, D_FF) + 0.5)
        self.conv_up, self.conv_down = nn.Conv1d(D_MODEL, D_FF, 1), nn.Conv1d(D_FF, D_MODEL, 1, bias=False)
        self.image_up, self.image_down = nn.Conv2d(D_MODEL, D_FF, 1, bias=False), nn.Conv2d(D_FF, D_MODEL, 1)

    def forward(self, x: Tensor) -> Any:
        return self.form(self, x)


def gate(m: Any, x: Tensor) -> Tensor:
    return m.ffn.gate(x)


def up(m: Any, x: Tensor) -> Tensor:
    return m.ffn.up(x)


def by_rows(norm: Function) -> Function:
    return lambda t: norm(t.mT).mT


TOKENS, ROWS, SIGNAL, IMAGE = (2, 3, D_MODEL), (5, D_MODEL), (2, D_MODEL, 7), (2, D_MODEL, 3, 4)

# (variant, activation, shape of x, form)
FORMS: dict[str, tuple[str, str, tuple[int, ...], Form]] = {
    "batch norm": ("plain", "relu", ROWS, lambda m, x: m.ffn.down(torch.relu(m.norm(up(m, x))))),
    "batch norm without weights": ("plain", "relu", ROWS, lambda m, x: m.ffn.down(torch.relu(m.bare(up(m, x))))),
    "batch norm, transposed": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(by_rows(m.norm)(up(m, x))))),
    "batch norm of the gate": (
        "gated", "relu", ROWS, lambda m, x: m.ffn.down(torch.relu(m.norm(gate(m, x))) * up(m, x)),
    ),
    "batch norm of up": ("gated", "relu", ROWS, lambda m, x: m.ffn.down(torch.relu(gate(m, x)) * m.norm(up(m, x)))),
    "batch norm behind": ("plain", "relu", ROWS, lambda m, x: m.ffn.down(m.norm(torch.relu(up(m, x))))),
    "batch norm behind, transposed": (
        "plain", "relu", TOKENS, lambda m, x: m.ffn.down(by_rows(m.norm)(torch.relu(up(m, x)))),
    ),
    "batch norm behind the product": (
        "gated", "relu", ROWS, lambda m, x: m.ffn.down(m.norm(torch.relu(gate(m, x)) * up(m, x))),
    ),
    "batch norms everywhere": (
        "gated", "drelu", ROWS,
        lambda m, x: m.ffn.down(m.norm(torch.relu(m.bare(gate(m, x))) * torch.relu(m.norm(up(m, x))))),
    ),
    "convolutions": ("plain", "relu", SIGNAL, lambda m, x: m.conv_down(torch.relu(m.norm(m.conv_up(x))))),
    "convolutions, behind": ("plain", "relu", SIGNAL, lambda m, x: m.conv_down(m.norm(torch.relu(m.conv_up(x))))),
    "convolutions and a residual": (
        "plain", "relu", SIGNAL, lambda m, x: x + m.conv_down(torch.relu(m.norm(m.conv_up(x)) - m.shift[:, None])),
    ),
    "convolutions of images": ("plain", "relu", IMAGE, lambda m, x: m.image_down(torch.relu(m.norm2d(m.image_up(x))))),
    "images, a scale behind": (
        "plain", "relu2", IMAGE,
        lambda m, x: m.image_down(torch.relu(m.image_up(x)).square() * m.scale[:, None, None]),
    ),
    "a number is subtracted": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x) - 1.0))),
    "from a number": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(1 - up(m, x)))),
    "a vector is subtracted": ("plain", "relu2", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x) - m.shift) ** 2)),
    "from a vector": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(m.shift - up(m, x)))),
    "a vector is added, x * relu(x)": (
        "plain", "relu2", TOKENS, lambda m, x: m.ffn.down((h := up(m, x) + m.shift) * torch.relu(h)),
    ),
    "a stored number": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x) * m.one + m.one))),
    "negated": ("gated", "relu", TOKENS, lambda m, x: m.ffn.down(-torch.relu(-gate(m, x)) * -up(m, x))),
    "scaled before": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x) * m.scale / 3))),
    "scaled behind": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x)) / 8)),
    "scaled behind, a vector": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(m.scale * torch.relu(up(m, x)))),
    "scaled behind, computed": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x)) * m.log.exp())),
    "scaled behind, a table": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x)) * m.table)),
    "shifted behind": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x)) + m.shift - 0.5)),
    "scaled and squared": (
        "plain", "relu2", TOKENS, lambda m, x: m.ffn.down((m.scale * torch.relu(up(m, x))).square()),
    ),
    "FATReLU of scaled": (
        "plain", "fatrelu", TOKENS, lambda m, x: m.ffn.down(F.threshold(up(m, x) * m.scale + m.shift, 0.25, 0) * 2),
    ),
    "the gate scaled behind": (
        "gated", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(gate(m, x)) * m.scale * up(m, x)),
    ),
    "up scaled and shifted": (
        "gated", "relu", TOKENS, lambda m, x: m.ffn.down((up(m, x) * m.scale + 1) * torch.relu(gate(m, x))),
    ),
    "glu_mult_bias": ("gated", "relu", TOKENS, lambda m, x: m.ffn.down(up(m, x) * torch.relu(gate(m, x)) * m.scale)),
    "scaled everywhere": (
        "gated", "drelu", TOKENS,
        lambda m, x: m.ffn.down(
            (torch.relu(gate(m, x) * 2) * m.scale) * (torch.relu(up(m, x) + 1) / 3) * 0.7 + m.shift
        ),
    ),
    "views and dropout between": (
        "plain", "relu", TOKENS,
        lambda m, x: m.ffn.down(F.dropout(torch.relu(up(m, x).flatten(0, 1) - 1).view(2, 3, D_FF), training=False) * 2),
    ),
    "in float64": ("plain", "relu", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x).double() - 1).type_as(x))),
    "gate and up multiplied in float64": (
        "gated", "relu", TOKENS,
        lambda m, x: m.ffn.down((torch.relu(gate(m, x).double()) * up(m, x).double()).to(x.dtype)),
    ),
    "a ReLU spelt out in float64": (
        "plain", "relu", TOKENS,
        lambda m, x: m.ffn.down(torch.maximum(h := up(m, x).double(), torch.zeros_like(h)).to(x.dtype)),
    ),
    "squared in float64": (
        "plain", "relu2", TOKENS, lambda m, x: m.ffn.down(torch.relu(up(m, x).double()).square().to(x.dtype)),
    ),
    "FATReLU in float64": (
        "plain", "fatrelu", TOKENS,
        lambda m, x: m.ffn.down(torch.where((h := up(m, x).double()) > 0.3, h, 0.0).to(x.dtype)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    variant, activation, shape, function = FORMS[form]
    module, x = Constants(function), torch.randn(shape)
    program, blocks, result = assert_rewrites(module, x)
    assert [(block.variant, block.activation) for block in blocks] == [(variant, activation)]
    left = calls(result)
    assert left.pop("gated_mlp" if variant == "gated" else "mlp") == 1
    assert set(left) <= {"permute", "add"}, "what is folded is gone"
    truth = eager(copy.deepcopy(module).double(), x.double())[0]
    assert float(truth.std()) > 0.1  # else nothing is compared
    assert_same(run(result)[0], truth.float())
    assert_same(run(program)[0], truth.float())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("form", [form for form in FORMS if "float64" not in form])
def test_folding_is_exact_in_float64(form: str) -> None:
    """Nothing is lost: the order of sums and products is all that changes."""
    module, x = Constants(FORMS[form][3]).double(), torch.randn(FORMS[form][2], dtype=torch.float64)
    program = canonical(module, x)
    assert calls(program) != calls(functionalize(export(module, x)))
    assert_same(run(program)[0], eager(module, x)[0])


@pytest.mark.parametrize("form", ["shifted behind", "from a vector", "scaled everywhere", "convolutions"])
def test_no_biases(form: str) -> None:
    """Where there was none, there is one then."""
    assert_rewrites(Constants(FORMS[form][3], biases=""), torch.randn(FORMS[form][2]))


@pytest.mark.sampled(14)
@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.bfloat16) for form in FORMS), *((form, torch.float16) for form in list(FORMS)[:3])],
)
def test_low_precision(form: str, dtype: torch.dtype) -> None:
    """Folded weights are rounded once; the result is as near to float64 as that of the model."""
    module, x = Constants(FORMS[form][3]).to(dtype), torch.randn(*FORMS[form][2], dtype=dtype)
    program = canonical(module, x)
    (block,) = find_ffn_blocks(program)
    assert (block.dtype, block.refusal) == (dtype, "")
    truth = eager(copy.deepcopy(module).double(), x.double())[0]
    assert_as_accurate(run(rewrite(program))[0], eager(module, x)[0], truth)


def test_done_the_first_time() -> None:
    for form in FORMS:
        _, _, shape, function = FORMS[form]
        program = fold_constants(functionalize(export(Constants(function), torch.randn(shape))))
        assert fold_constants(program) is program


def test_a_second_call_reads_the_same_folded_weights() -> None:
    block = Written(lambda m, x: m.ffn.down(torch.relu(m.ffn.up(x) - 1) * m.scale), ffn=Plain(), scale=torch.rand(D_FF))
    module = Written(lambda m, x: m.block(m.block(x) + x), block=block)
    program, blocks, _ = assert_rewrites(module, torch.randn(2, 3, D_MODEL))
    assert sorted(constants_of(program).values()) == [
        "block.ffn.down.weight_folded", "block.ffn.up.bias_folded", "block.ffn.up.weight_folded",
    ]  # fmt: skip
    assert [each.module for each in blocks] == ["block.ffn", "block.ffn#2"]


def test_a_weight_that_is_read_elsewhere_keeps_its_place() -> None:
    module = Constants(lambda m, x: m.ffn.down(torch.relu(up(m, x)) * m.scale) + m.ffn.down.weight.sum(1))
    program, _, _ = assert_rewrites(module, torch.randn(2, 3, D_MODEL))
    assert {"ffn.down.weight", "ffn.down.weight_folded"} <= set(constants_of(program).values())


def test_a_packed_weight() -> None:
    def form(m: Any, x: Tensor) -> Tensor:
        gate, up = m.packed(x).chunk(2, -1)
        return m.down(torch.relu(gate * m.scale - 1) * up / 2)

    module = Written(form, packed=nn.Linear(16, 80), down=nn.Linear(40, 16), scale=torch.randn(40))
    _, (block,), _ = assert_rewrites(module, torch.randn(2, 3, D_MODEL))
    assert block.variant == "gated"


def test_a_stack_of_layers() -> None:
    """What scales one hidden tensor stands behind a product that is another block's."""
    layers = [nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 16)]
    module, x = nn.Sequential(*layers), torch.randn(5, 16)
    nn.init.uniform_(module[3].running_var, 0.5, 2)
    nn.init.normal_(module[3].running_mean)
    program = canonical(module, x)
    assert calls(program) == {"linear": 3, "relu": 2}
    assert_same(run(program)[0], eager(module, x)[0])


def test_dynamic_dimensions() -> None:
    module = Constants(lambda m, x: m.ffn.down(torch.relu(by_rows(m.norm)(gate(m, x))) * up(m, x) * m.scale + 1))
    dynamic = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")},)
    at = (torch.randn(5, 7, D_MODEL),)
    assert calls(assert_rewrites(module, torch.randn(2, 3, D_MODEL), dynamic=dynamic, at=at).after) == {"gated_mlp": 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_output(value: float) -> None:
    module, x = Constants(lambda m, x: m.ffn.down(torch.relu(up(m, x) - 1) * m.table)), torch.randn(2, 3, D_MODEL)
    x[1, 2, 3] = value
    expected, (actual,) = eager(module, x)[0], run(rewrite(canonical(module, x)), x)
    assert torch.equal(actual.isfinite(), expected.isfinite()) and not actual.isfinite().all()


# ---- what stays ----


def tokens_differ(m: Any, x: Tensor) -> Tensor:
    return m.ffn.down(torch.relu(up(m, x)) * m.shift[:3, None])


def also_an_output(m: Any, x: Tensor) -> Any:
    hidden = torch.relu(up(m, x)) * m.scale
    return m.ffn.down(hidden), hidden


def projection_read_twice(m: Any, x: Tensor) -> Any:
    projected = up(m, x)
    return m.ffn.down(torch.relu(projected - 1)), projected


def rows_and_neurons(m: Any, x: Tensor) -> Tensor:
    """As many rows as neurons: a column is a number for each row."""
    return m.ffn.down(torch.relu(up(m, x.expand(2, D_FF, D_MODEL)) - m.shift[:, None]))


LEFT: dict[str, Form] = {
    "numbers of tokens": tokens_differ,
    "numbers of rows, as many as neurons": rows_and_neurons,
    "a factor that x gives": lambda m, x: m.ffn.down(torch.relu(up(m, x)) * x.mean()),
    "infinite": lambda m, x: m.ffn.down(torch.relu(up(m, x)) * float("inf")),
    "by zero": lambda m, x: m.ffn.down(torch.relu(up(m, x)) / 0.0),
    "the gate is shifted": lambda m, x: m.ffn.down((torch.relu(gate(m, x)) + 1) * up(m, x)),
    "a reciprocal": lambda m, x: m.ffn.down(2 / torch.relu(up(m, x))),
    "shifted before the square": lambda m, x: m.ffn.down((torch.relu(up(m, x)) + 1).square()),
    "a hidden tensor that is an output": also_an_output,
    "a projection that is an output": projection_read_twice,
    "x * relu(x + 1)": lambda m, x: m.ffn.down((h := up(m, x)) * torch.relu(h + 1)),
    "x * relu(-x)": lambda m, x: m.ffn.down((h := up(m, x)) * torch.relu(-h)),
    "relu(x) * relu(x - 1)": lambda m, x: m.ffn.down(torch.relu(h := up(m, x)) * torch.relu(h - 1)),
    "relu(x) * (relu(x) + 1)": lambda m, x: m.ffn.down((h := torch.relu(up(m, x))) * (h + 1)),
    "scaled and not": lambda m, x: m.ffn.down((h := torch.relu(up(m, x))) * 2 + h),
    "a bounded ReLU": lambda m, x: m.ffn.down(F.relu6(up(m, x) - 1) / 6),
    "no ReLU": lambda m, x: m.ffn.down(torch.tanh(up(m, x) * m.scale) * m.scale),
    "a narrow cast": lambda m, x: m.ffn.down(torch.relu(up(m, x).bfloat16()).float()),
    "attention's scale": lambda m, x: torch.softmax(gate(m, x) * 0.1 @ up(m, x).mT, -1),
    "a batch norm in training": lambda m, x: m.ffn.down(
        torch.relu(F.batch_norm(up(m, x).mT, None, None, training=True).mT)
    ),
    "of another shape": lambda m, x: m.ffn.down(torch.relu(up(m, x)) * m.scale.expand(4, 1, 1, D_FF)),
}


@pytest.mark.parametrize("form", LEFT)
def test_left(form: str) -> None:
    module, x = Constants(LEFT[form]), torch.randn(2, 3, D_MODEL) if "many" not in form else torch.randn(1, 1, D_MODEL)
    program = functionalize(export(module, x))
    assert fold_constants(program) is program
    assert all(block.refusal for block in find_ffn_blocks(canonical(module, x)))


def test_weights_that_would_not_fit_stay() -> None:
    """A model in float32 may be brought to float16, in which these would overflow, or vanish."""
    for factor in (1e9, 1e-9):
        module = Constants(lambda m, x, factor=factor: m.ffn.down(torch.relu(up(m, x)) * factor))
        program = functionalize(export(module, torch.randn(2, 3, D_MODEL)))
        assert fold_constants(program) is program
    module = Constants(lambda m, x: m.ffn.down(torch.relu(up(m, x)) * 1e-9)).bfloat16()
    (block,) = find_ffn_blocks(canonical(module, torch.randn(2, 3, D_MODEL).bfloat16()))
    assert block.refusal == ""


def test_neurons_that_a_norm_has_switched_off() -> None:
    """Of a pruned network, with factors of zero, and of nearly that."""
    module, x = Constants(lambda m, x: m.ffn.down(torch.relu(m.norm(up(m, x))))), torch.randn(5, D_MODEL)
    with torch.no_grad():
        module.norm.weight[:20], module.norm.weight[20:30] = 0, 1e-12
    assert_rewrites(module, x)
