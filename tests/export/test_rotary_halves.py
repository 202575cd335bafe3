"""Rotary positions are written by halves where not plugins alone read them, and not a bit of a result changes."""

import collections
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn

from tests.conftest import Cli
from tests.models import Gated, canonical, export, llama, save, scale_weights
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, save_onnx
from twellc.export.rotary_halves import RotaryHalves
from twellc.passes.pipeline import PassOptions, run_passes


class Rotated(nn.Module):
    """Heads of x [batch, tokens, d_model] with rotary positions, then a norm of each or attention, then a block.

    Args:
        form: How halves are taken and turned: `slices` as in Llama, `chunks`, `other sign` as in NanoChat, `wide`
            with cos and sin in float32 as in Olmo2, `wide x` with x in float32, too.
        then: `norm`, `softmax` of products with keys, or `nothing`.
        part: The share of a head that is rotated.
    """

    def __init__(self, form: str, then: str, part: float = 1.0, d_model: int = 128, head: int = 32) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(d_model, d_model, bias=False) for _ in range(2))
        self.block = Gated(d_model=d_model, d_ff=320)
        self.form, self.then, self.head, self.rotated = form, then, head, int(part * head)
        scale_weights(self)

    def turned(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        first, second = x.chunk(2, -1) if self.form == "chunks" else (x[..., :half], x[..., half:])
        return torch.cat((second, -first) if self.form == "other sign" else (-second, first), -1)

    def rotate(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.head)).transpose(1, 2)
        places = torch.arange(3, 3 + x.shape[2], dtype=torch.float32, device=x.device)
        angles = places[:, None] * 0.3 ** torch.arange(0, self.rotated, 2, device=x.device)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        if not self.form.startswith("wide"):
            cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        rotated, rest = x[..., : self.rotated], x[..., self.rotated :]
        rotated = rotated.to(cos.dtype) if self.form == "wide x" else rotated
        return torch.cat(((rotated * cos + self.turned(rotated) * sin).to(x.dtype), rest), -1)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.rotate(self.query(x)), self.rotate(self.key(x))
        if self.then == "norm":
            wide = query.float() if query.dtype != torch.float64 else query
            query = (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)
        elif self.then == "softmax":
            query = (query @ key.transpose(-1, -2)).softmax(-1) @ key
        return self.block(query.transpose(1, 2).flatten(2))


def exported(
    module: nn.Module, x: Tensor, path: Path, monkeypatch: pytest.MonkeyPatch | None = None
) -> onnx.ModelProto:
    """Return the graph of a module; with `monkeypatch` without the pass."""
    if monkeypatch is not None:
        unchanged = lambda self, model: onnx_ir.passes.PassResult(model, modified=False)  # noqa: E731
        monkeypatch.setattr(RotaryHalves, "call", unchanged)
    save_onnx(export_onnx(canonical(module, x), ["x"], ["y"], {}), path)
    if monkeypatch is not None:
        monkeypatch.undo()
    return onnx.load(path)


def turned(model: onnx.ModelProto) -> int:
    """Count the tensors of two halves of which one is negated."""
    negated = {node.output[0] for node in model.graph.node if node.op_type == "Neg"}
    return sum(node.op_type == "Concat" and bool(negated & set(node.input)) for node in model.graph.node)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("part", "dtype"), [(1.0, torch.float32), (0.5, torch.bfloat16)])
@pytest.mark.parametrize(("then", "count"), [("norm", 1), ("softmax", 2)])
@pytest.mark.parametrize("form", ["slices", "chunks", "other sign", "wide", "wide x"])
def test_in_front_of_a_sum(
    form: str, then: str, count: int, part: float, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Rotated(form, then, part).to(dtype), torch.randn(2, 5, 128).to(dtype)
    before = exported(module, x, tmp_path / "before.onnx", monkeypatch)
    after = exported(module, x, tmp_path / "after.onnx")
    assert (turned(before), turned(after)) == (count, 0)
    counts = [collections.Counter(node.op_type for node in model.graph.node) for model in (before, after)]
    # Of each rotation two products and a sum more, cos and sin in two halves each, and nothing that is of no use.
    slices = 4 + 2 * count * (form == "chunks")  # x is split already
    assert {kind: counts[1][kind] - counts[0][kind] for kind in ("Add", "Concat", "Mul", "Neg", "Slice")} == {
        "Add": count, "Concat": 0, "Mul": 2 * count, "Neg": 0, "Slice": slices,
    }  # fmt: skip
    results = [OnnxEvaluator(tmp_path / f"{name}.onnx").run({"x": x})[0] for name in ("before", "after")]
    assert torch.equal(*results)


def test_what_plugins_alone_read_stays(tmp_path: Path) -> None:
    """What follows is the plugin of a block, whose products are its own business."""
    x = torch.randn(2, 5, 128).bfloat16()
    rewritten = run_passes(export(Rotated("slices", "nothing").bfloat16(), x), PassOptions(layers="all"))
    save_onnx(export_onnx(rewritten.program, ["x"], ["y"], {}), tmp_path / "m.onnx")
    assert turned(onnx.load(tmp_path / "m.onnx")) == 1


def test_a_llama_over_caches_stays(cli: Cli, tmp_path: Path) -> None:
    """Its queries and keys go into plugins: the plans that were measured do not change."""
    folder = save(llama(), tmp_path / "llama", torch.bfloat16)
    sizes = ["--kv-cache", "64", "--backend", "none", "--attention", "cudnn"]
    done = cli("compile", folder, *sizes, "--onnx", tmp_path / "m.onnx")
    assert done.exit_code == 0, done.output
    assert turned(onnx.load(tmp_path / "m.onnx")) == 2 * llama().config.num_hidden_layers


def graph(form: str, then: str) -> onnx.ModelProto:
    """A rotation of x [2, 3, 8] as a text of operators, then another operator and a sum."""
    forms = {
        "plain": "p = Mul(x, cos)  t = Concat<axis=-1>(n, a)  q = Mul(t, sin)  r = Add(p, q)",
        "swapped": "p = Mul(cos, x)  t = Concat<axis=2>(n, a)  q = Mul(sin, t)  r = Add(q, p)",
        "other sign": "p = Mul(x, cos)  m = Neg(a)  t = Concat<axis=-1>(b, m)  q = Mul(t, sin)  r = Sub(p, q)",
        "minus one": "p = Mul(x, cos)  m = Mul(b, minus)  t = Concat<axis=-1>(m, a)  q = Mul(t, sin)  r = Sum(p, q)",
        "sign in sin": "p = Mul(x, cos)  t = Concat<axis=-1>(b, a)  q = Mul(t, sin)  r = Add(p, q)",
        "three factors": "p = Mul(x, cos)  t = Concat<axis=-1>(n, a)  u = Mul(t, minus)  q = Mul(u, sin)"
        "  r = Add(p, q)",
        "casts": "p = Mul(x, cos)  t = Concat<axis=-1>(n, a)  u = Mul(t, sin)  q = Cast<to=1>(u)  r = Add(p, q)",
        "one angle": "p = Mul(x, cos)  t = Concat<axis=-1>(n, a)  q = Mul(t, minus)  r = Add(p, q)",
        "alternating": "p = Mul(x, cos)  e = Slice(x, i0, end, axis, i2)  o = Slice(x, i1, end, axis, i2)  m = Neg(o)"
        "  mu = Unsqueeze(m, last)  eu = Unsqueeze(e, last)  pairs = Concat<axis=-1>(mu, eu)"
        "  t = Reshape(pairs, shape)  q = Mul(t, sin)  r = Add(p, q)",
    }
    between = {"": "z = Identity(r)", "Clip": "z = Clip(r)", "Max": "z = Max(r, x)", "Softmax": "z = Softmax(r)"}
    between |= {name: f"z = {name}(r)" for name in ("Tanh", "Sigmoid", "Exp")}
    body = "a, b = Split<axis=-1, num_outputs=2>(x)  n = Neg(b)  cos = Cos(w)  sin = Sin(w)"
    body += f"  {forms[form]}  {between[then]}  y = ReduceSum<keepdims=0>(z, axis)"
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[2,3,8] x, float[3,8] w) => (float[2,3] y, float[2,3,8] r)'
        "<int64[1] i0 = {0}, int64[1] i1 = {1}, int64[1] i2 = {2}, int64[1] end = {8}, int64[1] axis = {2},"
        " int64[1] last = {-1}, int64[3] shape = {2, 3, 8}, float[1] minus = {-1.0}>"
        "{" + body.replace("  ", "\n") + "}"
    )  # fmt: skip
    if then:
        del model.graph.output[1:]  # else the rotation is a result of the graph, too
    return onnx.shape_inference.infer_shapes(model)


FORMS = ["plain", "swapped", "other sign", "minus one", "sign in sin", "three factors", "casts", "one angle"]


@pytest.mark.parametrize(
    ("form", "then"),
    [(form, "") for form in (*FORMS, "alternating")]
    + [("plain", then) for then in ("Tanh", "Sigmoid", "Exp", "Clip", "Max", "Softmax")],
)
def test_other_spellings(form: str, then: str) -> None:
    before = graph(form, then)
    result = RotaryHalves()(onnx_ir.serde.deserialize_model(before))
    after = onnx_ir.serde.serialize_model(result.model)
    onnx.checker.check_model(after, full_check=True)
    # What is joined now is sums, and nothing that was joined before.
    joined = {name for node in after.graph.node if node.op_type == "Concat" for name in node.input}
    makers = {name: node.op_type for node in after.graph.node for name in node.output}
    assert {makers[name] for name in joined} <= {"Add", "Sub", "Sum", "Unsqueeze"}
    inputs = {"x": np.random.default_rng(1).normal(size=(2, 3, 8)), "w": np.random.default_rng(2).normal(size=(3, 8))}
    given = {name: value.astype(np.float32) for name, value in inputs.items()}
    results = [ReferenceEvaluator(model).run(None, given) for model in (before, after)]
    for ours, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, expected)
    assert result.modified


def test_unknown_sizes_stay() -> None:
    model = graph("plain", "")
    del model.graph.value_info[:]
    assert not RotaryHalves()(onnx_ir.serde.deserialize_model(model)).modified


def test_of_an_onnx_file(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Rotated("slices", "norm").bfloat16(), torch.randn(2, 5, 128).bfloat16()
    before = exported(module, x, tmp_path / "m.onnx", monkeypatch)
    done = cli(
        "compile", tmp_path / "m.onnx", "--backend", "none", "--onnx", tmp_path / "after.onnx", "--layers", "all"
    )
    assert done.exit_code == 0, done.output
    after = onnx.load(tmp_path / "after.onnx")
    assert (turned(before), turned(after)) == (1, 0)
    assert any(node.op_type == "TwellGatedMlp" for node in after.graph.node)
    assert cli("check", tmp_path / "m.onnx", tmp_path / "after.onnx").exit_code == 0
