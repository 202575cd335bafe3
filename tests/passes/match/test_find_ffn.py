"""Which graphs are feed-forward blocks, which are refused and why, and which are not blocks."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers.pytorch_utils import Conv1D

from tests import models
from tests.models import (
    D_FF,
    D_MODEL,
    Gated,
    Plain,
    Written,
    assert_rewrites,
    blocks_of,
    calls,
    canonical,
    canonicalize,
    eager,
    of,
    rewrite,
    run,
)
from tests.tolerance import assert_as_accurate, assert_same
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.precision import lower

Form = Callable[[nn.Module, Tensor], Tensor]


SHAPES = {"gate": (D_FF, D_MODEL), "up": (D_FF, D_MODEL), "down": (D_MODEL, D_FF)}


def weights(form: Form) -> nn.Module:
    """Bare weights, stored [out, in] and [in, out], for a form that writes its products itself."""
    stored = {name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in SHAPES.items()}
    turned = {f"{name}_t": torch.randn(shape[::-1]) / shape[1] ** 0.5 for name, shape in SHAPES.items()}
    return Written(form, **stored, **turned, **{f"b_{name}": torch.randn(shape[0]) for name, shape in SHAPES.items()})


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class Normed(nn.Module):
    """A gated block behind a norm; `make` makes its projections from their widths."""

    def __init__(self, make: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(D_MODEL), Gated(biases="gud")
        for name, widths in {"gate": (D_MODEL, D_FF), "up": (D_MODEL, D_FF), "down": (D_FF, D_MODEL)}.items():
            setattr(self.ffn, name, make(*widths))

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.norm(x))


def autocast_export(module: nn.Module, x: Tensor) -> ExportedProgram:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.export.export(module, (x,))


REPEATED: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], ExportedProgram]]] = {
    "decomposed": (Normed(), lambda module, x: torch.export.export(module, (x,)).run_decompositions()),
    "transformers' Conv1D": (
        Normed(lambda d_in, d_out: Conv1D(d_out, d_in)),
        lambda module, x: torch.export.export(module, (x,)),
    ),
    "autocast": (Normed(), autocast_export),
}


@pytest.mark.parametrize("case", REPEATED)
def test_each_projection_has_another_view(case: str) -> None:
    """Where a model in float32 is brought to bfloat16, these views are cast, and must still be the same tensor."""
    module, export = REPEATED[case]
    x = torch.randn(8, 16, D_MODEL)
    dense = lower(canonicalize(export(module.eval(), x)), torch.bfloat16)
    (block,) = find_ffn_blocks(dense)
    assert (block.variant, block.dtype, block.refusal) == ("gated", torch.bfloat16, "")
    result = rewrite(dense)
    assert calls(result)["gated_mlp"] == 1
    truth = eager(copy.deepcopy(module).double(), x.double())[0]
    assert_as_accurate(run(result, x)[0], run(dense, x)[0], truth)


def test_dynamic_dimensions() -> None:
    """The leading dimensions of x and y agree as symbols; a view of them stays outside of the block."""
    dynamic = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")},)
    assert_rewrites(Gated(before=rows), torch.randn(2, 3, 16), dynamic=dynamic, at=(torch.randn(5, 7, 16),))


def test_sizes_known_only_at_run_time() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return self.ffn(x[torch.nonzero(x[:, 0] > 0).squeeze(-1)])

    module, x = Written(forward, ffn=Gated()), torch.randn(9, 16)
    program = canonical(module, x)
    assert [block.refusal for block in find_ffn_blocks(program)] == [""]
    for rows_in in (x, x.abs(), -x.abs()):
        assert_same(run(rewrite(program), rows_in)[0], eager(module, rows_in)[0])


def test_sizes_beside_a_block_known_only_at_run_time() -> None:
    """DeBERTa reshapes and slices a table of positions whose size depends on values."""

    def forward(self: nn.Module, x: Tensor, count: Tensor) -> Tensor:
        size = count.item()
        torch._check(size >= 2)
        torch._check(size <= 8)
        table = torch.zeros(3, size) + torch.arange(size)
        shown = table.reshape(size, 3).view(3, -1).unbind(0)[1] + table.view(-1, 3).reshape(3, size)
        return self.ffn(x) + table[:, 1:].sum() + shown.sum() + (table @ table.view(3, size).t()).sum()

    at = torch.randn(9, 16), torch.tensor(5)
    assert_rewrites(Written(forward, ffn=Gated()), torch.randn(9, 16), torch.tensor(3), at=at)


@pytest.mark.parametrize(
    "form",
    [
        lambda s, x, m: s.ffn(x) + m[:, 1:].sum() - m[:, :-1].mean(),
        lambda s, x, m: s.ffn(x) + m.chunk(2, -1)[1].sum(),
        lambda s, x, m: s.ffn(x) + torch.split(m, m.shape[1] - 1, 1)[0].sum(),
    ],
)
def test_dynamic_dimensions_stay_dynamic(form: Callable[..., Tensor]) -> None:
    """Reading a graph must not give a dimension the size that it was traced with."""
    dynamic = (({0: torch.export.Dim("tokens")}, {1: 2 * torch.export.Dim("half", min=2)}),)
    at = torch.randn(3, 16), torch.randn(2, 12)
    assert_rewrites(Written(form, ffn=Gated()), torch.randn(5, 16), torch.randn(2, 8), dynamic=dynamic, at=at)


def chosen(x: Tensor) -> Tensor:
    return torch.nonzero(x[:, 0] > 0).squeeze(-1)


@pytest.mark.parametrize(
    "form",
    [
        lambda s, x: s.ffn(x) + torch.nonzero(x[:, 0] > 0).t()[:, :1].sum(),
        lambda s, x: s.ffn(x) + (chosen(x).unsqueeze(-1) + 1).sum(),
        lambda s, x: s.ffn(x[chosen(x)] + s.ffn.down.weight[:1, :16]),
        lambda s, x: s.ffn(torch.masked_select(x, x[:, :1] > 0).view(-1, 16)),
        lambda s, x: (x[:, :8] @ s.ffn(x[chosen(x)]).view(-1, 8).t()).sum(-1),
    ],
)
def test_operations_on_sizes_known_only_at_run_time(form: Form) -> None:
    assert_rewrites(Written(form, ffn=Gated()), torch.randn(9, 16))


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        (D_FF, lambda m, x: F.linear(torch.relu(F.linear(x, m.up) + m.b_up[:, None]), m.down)),
        (D_MODEL, lambda m, x: F.linear(torch.relu(F.linear(x, m.up)), m.down) + m.b_down.view(D_MODEL, 1)),
        (D_MODEL, lambda m, x: torch.addmm(m.b_down[:, None], torch.relu(x @ m.up_t), m.down_t)),
    ],
)
def test_a_number_for_each_row_is_not_a_bias(rows: int, form: Form) -> None:
    """Not even where there are as many rows as neurons."""
    module, x = weights(form), torch.randn(rows, D_MODEL)
    program = canonical(module, x)
    blocks = find_ffn_blocks(program)
    assert all(part is None or part.bias is None for block in blocks for part in (block.up, block.down))
    assert_same(run(rewrite(program))[0], eager(module, x)[0])


# ---- packed gate and up ----


def packed(form: Form, width: int = 2 * D_FF) -> nn.Module:
    """One projection for gate and up; `form` takes the module and its output."""
    return Written(lambda m, x: form(m, m.gate_up(x)), gate_up=nn.Linear(16, width), down=nn.Linear(D_FF, 16))


def gated_down(module: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return module.down(torch.relu(gate) * up)


def test_packed_parts_that_overlap() -> None:
    module = packed(lambda m, h: gated_down(m, h[..., :D_FF], h[..., 20 : 20 + D_FF]))
    _, (block,), result = assert_rewrites(module, torch.randn(2, 3, 16))
    assert (block.variant, block.d_ff) == ("gated", D_FF)
    assert calls(result) == {"gated_mlp": 1}
    assert sum(t.numel() for t in result.state_dict.values()) == sum(p.numel() for p in module.parameters())


def test_packed_with_a_part_that_is_read_elsewhere() -> None:
    def three(module: nn.Module, h: Tensor) -> Tensor:
        gate, up, rest = h.chunk(3, -1)
        return gated_down(module, gate, up) + rest.mean()

    (block,) = blocks_of(packed(three, 3 * D_FF))
    assert "is also read by" in block.refusal


def test_a_sliced_output_is_one_block() -> None:
    """As in a network that gives scale and shift of a norm: the whole down projection is the block."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        shift, scale = self.ffn(x).chunk(2, -1)
        return x * scale + shift

    _, (block,), _ = assert_rewrites(Written(forward, ffn=Plain(biases="ud", d_out=32)), torch.randn(5, 16))
    assert block.d_out == 32


# ---- names ----


def test_names_are_paths_of_modules() -> None:
    def layer() -> nn.Module:
        parts = {"mlp": Gated(), "fc1": nn.Linear(16, 40), "fc2": nn.Linear(40, 16)}
        return Written(lambda s, x: s.fc2(torch.relu(s.fc1(x + s.mlp(x)))) + x, **parts)

    names = [block.module for block in blocks_of(nn.Sequential(layer(), layer()))]
    assert names == ["0.mlp", "0", "1.mlp", "1"]


def test_a_second_pair_of_layers_is_named_by_its_first() -> None:
    """Only a second call of the same has a number."""
    layers = [layer for _ in range(2) for layer in (nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16))]
    module = Written(lambda self, x: self.top(self.top(x) + x), top=nn.Sequential(*layers))
    assert [block.module for block in blocks_of(module)] == ["top", "top.3", "top#2", "top.3#2"]


def test_weights_at_the_root_of_the_model() -> None:
    def form(self: nn.Module, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.W_enc + self.b_enc) @ self.W_dec
        return torch.relu(y @ self.up) @ self.down

    shapes = {"W_enc": (16, 40), "b_enc": (40,), "W_dec": (40, 16), "up": (16, 40), "down": (40, 16)}
    module = Written(form, **{name: torch.randn(shape) for name, shape in shapes.items()})
    assert [block.module for block in blocks_of(module)] == ["W_dec", "down"]


def test_a_module_that_is_called_twice() -> None:
    module = Written(lambda self, x: self.ffn(self.ffn(x) + x), ffn=Gated())
    _, blocks, result = assert_rewrites(module, torch.randn(5, 16))
    assert [block.module for block in blocks] == ["ffn", "ffn#2"]
    assert calls(result) == {"gated_mlp": 2, "add": 1}


# ---- refusals ----


def cast_and_back(t: Tensor) -> Tensor:
    return t.to(torch.bfloat16).to(torch.float32)


def up_of_each_number(self: nn.Module, x: Tensor) -> Tensor:
    return self.ffn.down(torch.relu(self.ffn.gate(x)).unsqueeze(-2) * self.each(x.unsqueeze(-1)))


def with_adapter(self: nn.Module, x: Tensor) -> Tensor:
    return self.ffn.down(torch.relu(self.b(self.a(x)) * 2 + self.ffn.up(x)))


def with_adapters(self: nn.Module, x: Tensor) -> Tensor:
    adapter = self.b(self.a(x))
    return self.ffn.down(torch.relu(self.ffn.gate(x) + adapter) * (self.ffn.up(x) + adapter))


ADJUSTED = "a projection is cast, scaled or added to (as by an unmerged LoRA) before the activation"
READ = "its intermediate tensor {} is also read by {}"
DIFFERENT = "gate and up projections read different tensors"
NO_UP = "the other factor of the gate is not a linear projection with constant weights"
CAST = "the hidden tensor is cast before the down projection"
NORMED = "a normalisation stands between the hidden tensor and the down projection"
SCALED = "the hidden tensor is scaled, or otherwise computed on, before the down projection"
LEADING = "the output has other leading dimensions than the input"
ADAPTER = {"a": nn.Linear(16, 8), "b": nn.Linear(8, D_FF)}
REFUSALS: dict[str, tuple[nn.Module, str]] = {
    "the hidden tensor is an output": (
        of(lambda f, x: (h := torch.relu(f.gate(x)) * f.up(x), f.down(h))),
        READ.format("mul", "output"),
    ),
    "up has a second reader": (
        of(lambda f, x: f.down(torch.relu(f.gate(x)) * (up := f.up(x))) + up.mean()),
        "is also read by mean",
    ),
    "the activation has a second reader": (
        of(lambda f, x: f.down((gate := torch.relu(f.gate(x))) * f.up(x)) + (gate > 0).sum()),
        READ.format("relu", "gt"),
    ),
    "a view has a second reader": (
        of(lambda f, x: f.down(h := torch.relu(f.up(x)).view(2, 3, D_FF)) + h.sum(), Plain()),
        "is also read by sum",
    ),
    "gate and up read different tensors": (of(lambda f, x: f.down(torch.relu(f.gate(x)) * f.up(x + 1))), DIFFERENT),
    "up reads each number of x by itself": (
        Written(up_of_each_number, ffn=Gated(), each=nn.Linear(1, D_FF)),
        DIFFERENT,
    ),
    "up's weight is computed": (
        of(lambda f, x: f.down(torch.relu(f.gate(x)) * F.linear(x, f.up.weight * x.mean()))),
        NO_UP,
    ),
    "the gate multiplies another tensor": (
        of(lambda f, x: f.down(torch.relu(f.gate(x)) * torch.sigmoid(x).mean(-1, keepdim=True))),
        NO_UP,
    ),
    "the hidden tensor is cast": (Gated(between=cast_and_back), CAST),
    "the hidden tensor of a plain block is cast": (Plain(between=cast_and_back), CAST),
    "a norm in a gated block": (Gated(between=nn.LayerNorm(D_FF)), NORMED),
    "an RMSNorm written out": (
        Gated(between=lambda t: t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6)),
        NORMED,
    ),
    "the hidden tensor is scaled": (Gated(between=lambda t: t * t[:, :1]), SCALED),
    "the hidden tensor is squared": (Gated(between=torch.square), SCALED),
    # as in ConvNeXt V2
    "a row statistic scales the hidden tensor": (Plain(between=lambda t: t * t.mean(-1, keepdim=True) + t), SCALED),
    "an adapter that is not merged": (Written(with_adapter, ffn=Plain(biases="u"), **ADAPTER), ADJUSTED),
    "adapters that are not merged": (Written(with_adapters, ffn=Gated(), **ADAPTER), ADJUSTED),
    "the activation is computed in a narrower precision": (Plain(lambda t: torch.relu(t.bfloat16()).float()), ADJUSTED),
    "the rows are repeated": (
        of(lambda f, x: f.down(torch.maximum(f.up(x), torch.zeros(4, 1, 1, 1))), Plain()),
        LEADING,
    ),
    "the rows are flattened inside": (of(lambda f, x: f.down(torch.relu(f.up(x)).view(-1, D_FF)), Plain()), LEADING),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str) -> None:
    module, reason = REFUSALS[case]
    x = torch.randn(2, 3, 16)
    program = canonical(module, x)
    (block,) = find_ffn_blocks(program)
    assert reason in block.refusal
    assert reason != ADJUSTED or (block.d_model, block.d_ff, block.d_out) == (16, D_FF, 16)
    assert "mlp" not in "".join(calls(rewrite(program)))


def test_bitnet_is_refused_by_name() -> None:
    program = canonicalize(models.export(models.bitnet(), torch.ones(1, 4, dtype=torch.int64), use_cache=False))
    assert [(block.module, block.activation, block.refusal) for block in find_ffn_blocks(program)] == [
        (f"model.layers.{layer}.mlp", "relu2", NORMED) for layer in range(2)
    ]


def gated(s: nn.Module, x: Tensor) -> Tensor:
    return s.down(torch.relu(s.gate(x)) * s.up(x.to(s.up.weight.dtype)))


def test_mixed_dtypes_are_refused() -> None:
    up, down = nn.Linear(16, 40).double(), nn.Linear(40, 16).double()
    (block,) = blocks_of(Written(gated, gate=nn.Linear(16, 40), up=up, down=down))
    assert block.refusal == "its tensors have several dtypes (float32, float64)"


def test_broadcast_projections_are_refused() -> None:
    """One value for all neurons, from the gate, from up or as a bias, is not a projection of the block's width."""
    for gate, up in ((1, 40), (40, 1)):
        narrow = Written(gated, gate=nn.Linear(16, gate), up=nn.Linear(16, up), down=nn.Linear(40, 16))
        (block,) = blocks_of(narrow)
        assert block.refusal == "its hidden tensors have several widths (1, 40)"
    module = Written(
        lambda self, x: self.ffn.down(torch.relu(F.linear(x, self.ffn.up.weight, self.one))),
        ffn=Plain(),
        one=torch.ones(1),
    )
    (block,) = blocks_of(module)
    assert block.refusal == "the bias one is broadcast"


# ---- what is not a block ----


NO_BLOCKS: dict[str, nn.Module] = {
    "a sum instead of a product": of(lambda f, x: f.down(torch.relu(f.gate(x)) + f.up(x))),
    "a gate without activation": of(lambda f, x: f.down(f.gate(x) * f.up(x))),
    "an adapter beside another activation": Written(
        lambda s, x: s.ffn.down(torch.tanh(s.ffn.up(x) + s.a(x))), ffn=Plain(), a=nn.Linear(16, D_FF)
    ),
    "a residual before the activation": Written(
        lambda s, x: s.down(torch.relu(x + s.up(x))), up=nn.Linear(16, 16), down=nn.Linear(16, 16)
    ),
    "two linears": nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 16)),
    "an added tensor": Plain(between=lambda t: t + t.mean()),
    "no down projection": of(lambda f, x: torch.relu(f.gate(x)) * f.up(x)),
    "no up projection": of(lambda f, x: f.down(torch.relu(x.repeat(1, 1, 3)[..., :D_FF]))),
    "a computed down weight": of(lambda f, x: F.linear(torch.relu(f.gate(x)), f.down.weight * x.mean())),
    "a computed gate weight": of(lambda f, x: f.down(torch.relu(F.linear(x, f.gate.weight * x.mean())) * f.up(x))),
    "a product of activations": of(lambda f, x: torch.relu(f.gate(x)) @ torch.relu(f.up(x)).mT),
    "a convolution": nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 3, 1)),
    "sigmoid attention over a projection": Plain(torch.sigmoid),
}


@pytest.mark.parametrize("case", NO_BLOCKS)
def test_no_block(case: str) -> None:
    assert blocks_of(NO_BLOCKS[case], torch.randn(2, 3, 16)) == []


def test_weights_that_change_are_not_constants() -> None:
    """A buffer that the program writes to cannot become a weight of the op."""

    def forward(s: nn.Module, x: Tensor) -> Tensor:
        y = s.ffn.down(torch.relu(F.linear(x, s.fast)))
        s.fast.mul_(0.5)
        return y

    assert blocks_of(Written(forward, {"fast": torch.randn(D_FF, D_MODEL)}, ffn=Plain())) == []
