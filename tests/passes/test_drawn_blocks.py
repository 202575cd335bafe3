"""Drawn blocks: any spelling of products, halves and activations, biases, norm and residual, against float64."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models import D_MODEL, calls, canonical, canonicalize, eager, export, rewrite, run
from tests.tolerance import assert_as_accurate, assert_same
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.pipeline import PassOptions, run_passes

EPS = 1e-5
THRESHOLD = 0.25
LOW = (torch.bfloat16, torch.float16)


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def shifted(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


# A product of x with a weight w [out, in], whose transpose is t, and a bias or None.
Product = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
PRODUCTS: dict[str, Product] = {
    "linear": lambda x, w, t, b: F.linear(x, w, b),
    "linear and add": lambda x, w, t, b: shifted(F.linear(x, t.t()), b),
    "matmul": lambda x, w, t, b: shifted(x @ t, b),
    "mT": lambda x, w, t, b: shifted(x @ w.mT, b),
    "T": lambda x, w, t, b: shifted(x @ w.T, b),
    "permute": lambda x, w, t, b: shifted(x @ w.permute(1, 0), b),
    "transpose": lambda x, w, t, b: shifted(x @ w.transpose(-1, -2), b),
    "bias first": lambda x, w, t, b: x @ t if b is None else b + x @ t,
    "add_": lambda x, w, t, b: x @ t if b is None else (x @ t).add_(b),
    "einsum": lambda x, w, t, b: shifted(torch.einsum("...d,fd->...f", x, w), b),
    "einsum, weight first": lambda x, w, t, b: shifted(torch.einsum("df,...d->...f", t, x), b),
    "tensordot": lambda x, w, t, b: shifted(torch.tensordot(x, t, 1), b),
    "tensordot of axes": lambda x, w, t, b: shifted(torch.tensordot(x, w, ([x.dim() - 1], [1])), b),
    "inner": lambda x, w, t, b: shifted(torch.inner(x, w), b),
    # Of two dimensions.
    "mm": lambda x, w, t, b: shifted(x.mm(t), b),
    "addmm": lambda x, w, t, b: x.mm(t) if b is None else torch.addmm(b, x, t),
    # Of three.
    "bmm": lambda x, w, t, b: shifted(torch.bmm(x, t.unsqueeze(0).expand(len(x), *t.shape)), b),
    "baddbmm": lambda x, w, t, b: (
        torch.bmm(x, t[None].expand(len(x), -1, -1)) if b is None else torch.baddbmm(b, x, t.expand(len(x), -1, -1))
    ),
}
FLAT, STACKED = {"mm", "addmm"}, {"bmm", "baddbmm"}
# How a packed product [..., 2 d_ff] falls into gate and up.
HALVES: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda h: h.chunk(2, -1),
    "split": lambda h: h.split(h.shape[-1] // 2, dim=-1),
    "split with sizes": lambda h: h.split([h.shape[-1] // 2] * 2, dim=h.dim() - 1),
    "tensor_split": lambda h: h.tensor_split(2, -1),
    "slices": lambda h: (h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]),
    "interleaved": lambda h: (h[..., ::2], h[..., 1::2]),
    "narrow": lambda h: (h.narrow(-1, 0, h.shape[-1] // 2), h.narrow(-1, h.shape[-1] // 2, h.shape[-1] // 2)),
    "a view and select": lambda h: [h.view(*h.shape[:-1], 2, h.shape[-1] // 2)[..., place, :] for place in (0, 1)],
    "a view and unbind": lambda h: h.unflatten(-1, (2, h.shape[-1] // 2)).unbind(-2),
    "interleaved, a view and select": lambda h: [
        h.view(*h.shape[:-1], h.shape[-1] // 2, 2)[..., place] for place in (0, -1)
    ],
    "interleaved, a view and unbind": lambda h: h.reshape(*h.shape[:-1], h.shape[-1] // 2, 2).unbind(-1),
}
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "relu": (torch.relu, lambda z: z.clamp(min=0), lambda z: torch.where(z > 0, z, 0.0)),
    "relu2": (
        lambda z: torch.relu(z) ** 2,
        lambda z: torch.relu(z).pow(2),
        lambda z: torch.relu(z).square(),
        lambda z: (r := torch.relu(z)) * r,
    ),
    "fatrelu": (lambda z: F.threshold(z, THRESHOLD, 0.0), lambda z: z * (z > THRESHOLD)),
    "drelu": (torch.relu,),
}
# What changes no number of the hidden tensor.
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda h: h,
    "contiguous and clone": lambda h: h.contiguous().clone(),
    "dropout in eval": lambda h: F.dropout(h, 0.5, training=False),
    "squeeze and unsqueeze": lambda h: h.unsqueeze(0).squeeze(0),
    "flatten and unflatten": lambda h: h.flatten(0, -2).view(h.shape) if h.dim() > 1 else h,
    "a cast to the same dtype": lambda h: h.to(h.dtype),
    "a cast to a wider dtype and back": lambda h: h.double().to(h.dtype),
}


@dataclass(frozen=True)
class Drawn:
    """A block: how it is spelt, and what it computes."""

    packed: str | None  # of HALVES, for a gate and up in one product
    gated: bool
    activation: str
    spelling: int
    up_first: bool
    biases: str
    products: tuple[str, str, str]
    turned: tuple[bool, bool, bool]  # weights that are stored [in, out]
    between: str
    d_ff: int
    shape: tuple[int, ...]
    residual: str
    norm: str

    @property
    def flat(self) -> bool:
        return not FLAT.isdisjoint(self.products)

    @property
    def variant(self) -> str:
        return "gated" if self.gated else "plain"


def products_beside(*names: str) -> Any:
    """Return a strategy for spellings of products that take operands of as many dimensions as these."""
    others = FLAT if not STACKED.isdisjoint(names) else STACKED
    return st.sampled_from([name for name in PRODUCTS if name not in others])


@st.composite
def drawn(draw: Callable[..., Any], **given: Any) -> Drawn:
    """Draw a block, of which some parts are given."""
    packed = given.get("packed")
    gated = packed is not None or draw(st.booleans())
    activation = draw(st.sampled_from([name for name in ACTIVATIONS if gated or name != "drelu"]))
    parts: dict[str, Any] = {
        "packed": packed,
        "gated": gated,
        "activation": activation,
        "spelling": draw(st.integers(0, len(ACTIVATIONS[activation]) - 1)),
        "up_first": draw(st.booleans()),
        "biases": "".join(name for name in "gud" if draw(st.booleans())),
        "products": draw(st.tuples(*[products_beside(*given.get("products", ()))] * 3)),
        "turned": draw(st.tuples(*[st.booleans()] * 3)),
        "between": draw(st.sampled_from(sorted(BETWEEN))),
        "d_ff": draw(st.sampled_from((40, 1, 7, 24))),
        "shape": draw(st.sampled_from(((2, 3), (5,), (2, 1, 3), (), (0,)))),
        "residual": "none",
        "norm": "none",
    }
    return Drawn(**{**parts, **given})


class Block(nn.Module):
    """A drawn block with weights."""

    def __init__(self, spec: Drawn) -> None:
        super().__init__()
        self.spec = spec
        seeded = torch.Generator().manual_seed(spec.d_ff)

        def parameter(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(shape, generator=seeded))

        sizes = {"gate": (spec.d_ff, D_MODEL), "up": (spec.d_ff, D_MODEL), "down": (D_MODEL, spec.d_ff)}
        for place, (name, (d_out, d_in)) in enumerate(sizes.items()):
            if name == "gate" and not spec.gated:
                continue
            count = 2 if spec.packed and name == "gate" else 1
            shape = (count * d_out, d_in)
            weight = parameter(*(shape[::-1] if spec.turned[place] else shape), scale=(2 / d_in) ** 0.5)
            if not (spec.packed and name == "up"):
                setattr(self, f"w_{name}", weight)
                setattr(self, f"b_{name}", parameter(count * d_out, scale=0.5) if name[0] in spec.biases else None)
        if spec.norm != "none":
            self.norm = (nn.LayerNorm if spec.norm == "layer" else nn.RMSNorm)(D_MODEL, eps=EPS)
            nn.init.normal_(self.norm.weight)

    def product(self, x: Tensor, name: str) -> Tensor:
        place = ("gate", "up", "down").index(name)
        stored, bias = getattr(self, f"w_{name}"), getattr(self, f"b_{name}")
        w, t = (stored.t(), stored) if self.spec.turned[place] else (stored, stored.t())
        return PRODUCTS[self.spec.products[place]](x, w, t, bias)

    def forward(self, x: Tensor) -> Tensor:
        spec, given = self.spec, x if self.spec.norm == "none" else self.norm(x)
        given = rows(given) if spec.flat else given
        activation = ACTIVATIONS[spec.activation][spec.spelling]
        if spec.packed:
            halves = HALVES[spec.packed](self.product(given, "gate"))
            gate, up = reversed(halves) if spec.up_first else halves
        else:
            gate, up = self.product(given, "gate") if spec.gated else None, self.product(given, "up")
        h = activation(gate if spec.gated else up)
        if spec.gated:
            factor = torch.relu(up) if spec.activation == "drelu" else up
            h = factor * h if spec.up_first else h * factor
        y = self.product(BETWEEN[spec.between](h), "down")
        if spec.residual == "none":
            return y
        return x + y.view(x.shape) if spec.residual == "x + y" else y.view(x.shape) + x


def truth(block: Block, x: Tensor) -> Tensor:
    """The formula, in float64."""
    spec, held = block.spec, {name: each.detach().double() for name, each in block.named_parameters()}
    x = x.double()
    given = x
    if spec.norm != "none":
        centred = x - x.mean(-1, keepdim=True) if spec.norm == "layer" else x
        given = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * held["norm.weight"]

    def product(operand: Tensor, name: str) -> Tensor:
        w = held[f"w_{name}"]
        w = w if spec.turned[("gate", "up", "down").index(name)] else w.t()
        return operand @ w + held.get(f"b_{name}", torch.zeros(w.shape[1]).double())

    if spec.packed:
        both, d_ff = product(given, "gate"), spec.d_ff
        halves = (both[..., ::2], both[..., 1::2]) if "interleaved" in spec.packed else both.split(d_ff, -1)
        gate, up = halves[::-1] if spec.up_first else halves
    else:
        gate, up = product(given, "gate") if spec.gated else None, product(given, "up")
    z = up if gate is None else gate
    least = THRESHOLD if spec.activation == "fatrelu" else 0
    h = torch.where(z > least, z, 0) ** (2 if spec.activation == "relu2" else 1)
    if gate is not None:
        h = h * (up.clamp(min=0) if spec.activation == "drelu" else up)
    return product(h, "down") + (x if spec.residual != "none" else 0)


# Without shrinking: each example takes as long as an export.
quick = settings(
    max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def assert_read(spec: Drawn, decomposed: bool = False) -> None:
    """Match and rewrite a block in float64, where nothing but the order of sums may change."""
    module, x = Block(spec).double(), torch.randn(*spec.shape, D_MODEL).double()
    program = canonical(module, x)
    if decomposed:
        program = canonicalize(torch.export.export(module.eval(), (x,)).run_decompositions())
    (block,) = find_ffn_blocks(program)
    assert (block.refusal, block.variant, block.activation) == ("", spec.variant, spec.activation)
    assert (block.d_model, block.d_ff, block.d_out) == (D_MODEL, spec.d_ff, D_MODEL)
    assert block.threshold == (THRESHOLD if spec.activation == "fatrelu" else 0)
    result = rewrite(program)
    left = calls(result)
    assert left.pop("gated_mlp" if spec.gated else "mlp") == 1
    assert set(left) <= {"view", "reshape", "unsqueeze", "squeeze", "permute", "clone"}, left
    expected = truth(module, x)
    assert_same(run(result)[0], rows(expected) if spec.flat else expected)


@pytest.mark.parametrize("product", PRODUCTS)
@given(data=st.data())
@quick
def test_products(product: str, data: st.DataObject) -> None:
    """Each spelling in each place, beside others."""
    gate, other = (data.draw(products_beside(product)) for _ in range(2))
    products = data.draw(st.sampled_from(((gate, product, other), (gate, other, product))))
    given: dict[str, Any] = {"shape": (2, 3), "d_ff": 40} if product in STACKED else {}
    if "add" in product or "bias" in product:
        given["biases"] = "gud"
    assert_read(data.draw(drawn(products=products, **given)))


@pytest.mark.parametrize("product", ["einsum", "tensordot", "inner", "bmm", "baddbmm", "matmul", "addmm"])
@given(data=st.data())
@quick
def test_decomposed_products(product: str, data: st.DataObject) -> None:
    """What `run_decompositions` with torch's own table makes of a product: views, permutations and mm or bmm."""
    given: dict[str, Any] = {"products": (product,) * 3, "biases": "gud", "d_ff": 40, "shape": (2, 3)}
    assert_read(data.draw(drawn(**given)), decomposed=True)


@pytest.mark.parametrize("packed", HALVES)
@given(data=st.data())
@quick
def test_halves(packed: str, data: st.DataObject) -> None:
    assert_read(data.draw(drawn(packed=packed)))


@given(data=st.data())
@quick
def test_halves_that_torch_decomposes(data: st.DataObject) -> None:
    """What it makes of unbind is slices of one."""
    given: dict[str, Any] = {"packed": "a view and unbind", "products": ("linear",) * 3, "d_ff": 40, "shape": (2, 3)}
    assert_read(data.draw(drawn(**given)), decomposed=True)


@pytest.mark.parametrize("residual", ["none", "x + y", "y + x"])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@given(data=st.data())
@quick
def test_lowered(norm: str, residual: str, data: st.DataObject) -> None:
    """By all passes, from any precision to a low one, as accurate as the model in that precision by itself."""
    spec = data.draw(drawn(norm=norm, residual=residual, shape=(2, 3), d_ff=40))
    source, target = (data.draw(st.sampled_from(each)) for each in ((torch.float32, *LOW), LOW))
    module, x = Block(spec).to(source), 2 * torch.randn(2, 3, D_MODEL).to(source)
    found = run_passes(export(module, x), PassOptions(target, "all", linear="twell"))
    (layer,) = found.layers
    assert (layer.decision, layer.variant, layer.activation) == ("twell", spec.variant, spec.activation)
    if source == target:  # else they are computed in float32
        assert layer.residual == (residual != "none") and layer.norm == norm
    expected = truth(module, x)
    expected = rows(expected) if spec.flat and residual == "none" else expected
    plain = eager(copy.deepcopy(module).to(target), x.to(target))[0]
    coarser = torch.bfloat16 if source == torch.bfloat16 else target
    assert_as_accurate(run(found.program, x)[0].to(coarser), plain.to(coarser), expected)
