import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.models import Written, export, functionalize
from twellc.passes.attention import AS_WRITTEN, CUDNN, MATMUL, OPERATOR, rewrite_attention
from twellc.passes.graph.execution import Runner
from twellc.passes.report import Attention

aten = torch.ops.aten
BATCH, TOKENS, WIDTH = 2, 6, 16
FORMS = [(MATMUL,), (OPERATOR,), (CUDNN, MATMUL)]


class _Layer(nn.Module):
    """Projections, attention as `attend` writes it, output projection."""

    def __init__(self, attend: Callable[..., Tensor], heads: int = 4, kv_heads: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.q = nn.Linear(32, heads * width)
        self.k, self.v = (nn.Linear(32, kv_heads * width) for _ in range(2))
        self.out = nn.Linear(heads * width, 32)
        self.attend, self.heads, self.kv_heads, self.width = attend, heads, kv_heads, width

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.view(*y.shape[:2], heads, self.width).transpose(1, 2)

        q, k, v = split(self.q(x), self.heads), split(self.k(x), self.kv_heads), split(self.v(x), self.kv_heads)
        masks = () if mask is None else (mask,)
        y: Tensor = self.out(self.attend(q, k, v, *masks).transpose(1, 2).reshape(*x.shape[:2], -1))
        return y


def _repeated(x: Tensor, heads: int) -> Tensor:
    batch, kv_heads, tokens, width = x.shape
    wide = x[:, :, None].expand(batch, kv_heads, heads // kv_heads, tokens, width)
    return wide.reshape(batch, heads, tokens, width)


@functools.cache
def _operator(**options: Any) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        return nn.functional.scaled_dot_product_attention(q, k, v, *mask, **{**options, "enable_gqa": grouped})

    return attend


def _repeating(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (_repeated(each, q.shape[1]) for each in (k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def _spelt_out(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
    k, v = (_repeated(each, q.shape[1]) for each in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    for each in mask:
        scores = scores + each
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(nn.functional.dropout(weights, 0.1, training=False), v)


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.transpose(2, 3) / 50) * 50, -1) @ v


def _in_three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Products over [batch · heads, …] and a softmax over [batch, heads, …], as Bloom and DeBERTa-v2 have them."""
    rows = [each.flatten(0, 1) for each in (q, k, v)]
    scores = torch.bmm(rows[0], rows[1].transpose(1, 2)).view(*q.shape[:3], k.shape[2])
    weights = torch.softmax(scores, -1).view(-1, q.shape[2], k.shape[2])
    return torch.bmm(weights, rows[2]).view(q.shape)


_PROGRAMS: dict[Any, ExportedProgram] = {}


def _program(module: nn.Module, dtype: torch.dtype, *masks: Tensor) -> ExportedProgram:
    """Trace a module; of equal layers, which have equal weights in each test, one only: no pass changes a program."""
    if not isinstance(module, _Layer):
        return _traced(module, dtype, *masks)
    key = (module.attend, module.heads, module.kv_heads, module.width, dtype, *((m.shape, m.dtype) for m in masks))
    if key not in _PROGRAMS:
        _PROGRAMS[key] = _traced(module, dtype, *masks)
    module.to(dtype)
    return _PROGRAMS[key]


def _traced(module: nn.Module, dtype: torch.dtype, *masks: Tensor) -> ExportedProgram:
    batch, tokens = (torch.export.Dim(name, min=1, max=64) for name in ("batch", "tokens"))

    def dynamic(mask: Tensor) -> dict[int, Any]:
        sizes = {0: batch} if mask.shape[0] == BATCH else {}
        return sizes | {axis: tokens for axis in (2, 3) if mask.shape[axis] == TOKENS}

    example = (torch.randn(BATCH, TOKENS, 32, dtype=dtype), *masks)
    shapes = ({0: batch, 1: tokens}, *map(dynamic, masks))
    program = torch.export.export(module.to(dtype).eval(), example, dynamic_shapes=shapes, strict=False)
    return functionalize(program)


def _operators(program: ExportedProgram) -> Counter[str]:
    return Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")


def _error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth.double()).norm() / truth.double().norm())


def _rewritten(
    module: nn.Module, forms: tuple[str, ...], *masks: Tensor, dtype: torch.dtype = torch.bfloat16
) -> tuple[ExportedProgram, Attention]:
    """Rewrite the one attention block of a module and compare, at other sizes than it was traced with."""
    program = _program(module, dtype, *masks)
    result, (block,) = rewrite_attention(program, forms)
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    for batch, tokens in ((3, 9), (1, 1)):

        def resized(mask: Tensor, batch: int = batch, tokens: int = tokens) -> Tensor:
            sizes = [batch if mask.shape[0] == BATCH else 1, mask.shape[1], *(
                tokens if size == TOKENS else 1 for size in mask.shape[2:])]  # fmt: skip
            made = torch.rand(sizes) > 0.3
            made[..., 0] = True
            return made if mask.dtype == torch.bool else torch.randn(sizes, dtype=dtype).masked_fill(~made, -torch.inf)

        values = [torch.randn(batch, tokens, 32, dtype=dtype), *map(resized, masks)]
        inputs = dict(zip(names, values, strict=True))
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        with torch.no_grad():
            truth = module.double()(*wide.values())
            module.to(dtype)
        (plain,), (ours,) = Runner(program)(inputs), Runner(result)(inputs)
        assert _error(ours, truth) <= 1.5 * _error(plain, truth) + (1e-6 if dtype == torch.float32 else 1e-3)
    return result, block


@pytest.mark.sampled(12)
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_operator_in_every_form(forms: tuple[str, ...], kv_heads: int, causal: bool, dtype: torch.dtype) -> None:
    module = _Layer(_operator(is_causal=causal), kv_heads=kv_heads)
    program, block = _rewritten(module, forms, dtype=dtype)
    mask = "causal" if causal else "none"
    assert (block.heads, block.kv_heads, block.width, block.mask) == (4, kv_heads, WIDTH, mask)
    assert (block.form, block.reason) == (forms[0], "")
    found = _operators(program)
    if forms[0] == CUDNN:
        assert found["twell.attention.default"] == 1
        assert found["aten.transpose.int"] == 0, "projections are read, and the output projection reads, without"
    elif forms[0] == MATMUL:
        # Keys and values of one head are repeated: TensorRT 10.6 fuses nothing else.
        assert found["aten.matmul.default"] == 2 and found["aten.expand.default"] == (2 if kv_heads == 1 else 0)
        assert "aten.scaled_dot_product_attention.default" not in found
    else:
        (node,) = program.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
        assert node.args[3] is None and node.args[5] is causal
        assert node.kwargs == {"scale": 1.0, "enable_gqa": kv_heads != 4}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (2, 1, 6, 6), (1, 4, 6, 6), (1, 1, 6, 6), (2, 4, 1, 6)])
@pytest.mark.parametrize("kind", [torch.bool, torch.bfloat16])
def test_masks_that_the_model_computes(
    forms: tuple[str, ...], kv_heads: int, shape: tuple[int, ...], kind: torch.dtype
) -> None:
    module = _Layer(_operator(), kv_heads=kv_heads)
    _, block = _rewritten(module, forms, torch.ones(shape, dtype=kind))
    assert block.mask == "tensor" and block.form == forms[-1]
    assert ("takes no mask" in block.reason) == (len(forms) == 2)


def test_a_row_that_is_masked_whole_is_finite() -> None:
    module = _Layer(_operator())
    program = _program(module, torch.bfloat16, torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool))
    result, _ = rewrite_attention(program, (MATMUL,))
    mask = torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.bool)
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    x = torch.randn(BATCH, TOKENS, 32, dtype=torch.bfloat16)
    (y,) = Runner(result)(dict(zip(names, (x, mask), strict=True)))
    assert y.isfinite().all()


@pytest.mark.parametrize("forms", FORMS)
def test_repeated_keys_are_read_as_they_were(forms: tuple[str, ...]) -> None:
    program, block = _rewritten(_Layer(_repeating, kv_heads=2), forms)
    assert (block.kv_heads, block.form) == (2, forms[0])
    assert _operators(program)["aten.expand.default"] == 0


@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_that_is_spelt_out(forms: tuple[str, ...], kv_heads: int) -> None:
    _, block = _rewritten(_Layer(_spelt_out, kv_heads=kv_heads), forms)
    assert (block.kv_heads, block.mask, block.form) == (kv_heads, "none", forms[0])


def test_attention_that_is_spelt_out_with_a_mask() -> None:
    _, block = _rewritten(_Layer(_spelt_out), (MATMUL,), torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bfloat16))
    assert (block.mask, block.form) == ("tensor", MATMUL)


def test_masks_are_made_once() -> None:
    two = nn.Sequential(*(_Layer(_operator(is_causal=True), kv_heads=2) for _ in range(2)))
    program, blocks = rewrite_attention(_program(two, torch.bfloat16), (MATMUL,))
    found = _operators(program)
    assert [block.module for block in blocks] == ["0", "1"]
    assert found["aten.le.Tensor"] == found["aten.where.self"] == found["aten.repeat.default"] == 1


@pytest.mark.parametrize(("width", "exact"), [(16, True), (32, False)])
def test_the_scale_is_rounded_once(width: int, exact: bool) -> None:
    """1/4 needs no casts; the root of 1/32 in bfloat16 would be 0.25 % off."""
    program, _ = _rewritten(_Layer(_operator(), width=width), (MATMUL,))
    casts = _operators(program)["aten._to_copy.default"]
    assert casts == (0 if exact else 2)
    scales = [node.args[1] for node in program.graph.find_nodes(op="call_function", target=aten.mul.Tensor)]
    assert scales == [width**-0.5]


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (_capped, "stands between its products"),
        (lambda q, k, v: torch.softmax(q @ k.flip(1).transpose(2, 3).abs(), -1) @ v, "not transposed right before"),
        (_operator(dropout_p=0.1), "it has dropout"),
        (
            lambda q, k, v: torch.einsum(
                "bhij,bhjw->bhiw", torch.softmax(torch.einsum("bhiw,bhjw->bhij", q, k), -1), v
            ),
            "written as einsum",
        ),
        (  # as XGLM keeps masked scores finite
            lambda q, k, v: (
                torch.softmax(torch.max(q @ k.transpose(2, 3), torch.full((), -1e4, dtype=q.dtype)), -1) @ v
            ),
            "aten.max stands between its products",
        ),
        (_in_three_dimensions, "its scores have 3 dimensions, not [batch, heads, queries, keys]"),
    ],
)
def test_other_attention_stays_and_says_why(attend: Callable[..., Tensor], reason: str) -> None:
    program = _program(_Layer(attend), torch.bfloat16)
    result, (block,) = rewrite_attention(program, (CUDNN, MATMUL))
    assert block.form == AS_WRITTEN and reason in block.reason
    kept = _operators(result)
    assert all(kept[name] == count for name, count in _operators(program).items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("masked", [True, False])
def test_layers_of_torch_itself(masked: bool) -> None:
    """Their results go through other permutations than those of Hugging Face models, and then into views."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if masked else None
            y: Tensor = self.layers(x, mask=mask, is_causal=masked)
            return y

    program = _program(Encoder(), torch.bfloat16)
    for forms in FORMS:
        result, blocks = rewrite_attention(program, forms)
        assert [(block.form, block.mask) for block in blocks] == [(forms[0], "causal" if masked else "none")] * 2
        exported = result.run_decompositions()  # as the exporter does, which traces every view again
        for shape in ((3, 9, 32), (1, 2, 32)):
            x = torch.randn(shape, dtype=torch.bfloat16)
            (plain,), (ours,) = (Runner(each)({"x": x}) for each in (program, exported))
            assert _error(ours, plain) < 1e-2


def test_a_softmax_that_others_read_stays() -> None:
    module = Written(lambda _, q: (weights := torch.softmax(q @ q.transpose(2, 3), -1), weights @ q))
    program = functionalize(export(module, torch.randn(1, 2, 3, 8)))
    _, (block,) = rewrite_attention(program, (MATMUL,))
    assert block.form == AS_WRITTEN and "another reader" in block.reason


def test_a_width_that_varies_stays() -> None:
    """Its scale depends on a size, so the queries cannot be scaled either."""
    module = Written(lambda _, q: nn.functional.scaled_dot_product_attention(q, q, q))
    x, width = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16), torch.export.Dim("width", min=2, max=64)
    program = functionalize(export(module, x, dynamic=(({3: width},),)))
    _, (block,) = rewrite_attention(program, (MATMUL,))
    assert block.form == AS_WRITTEN and "depends on a size" in block.reason


def test_a_softmax_outside_of_attention_is_not_reported() -> None:
    router = Written(lambda _, x, experts: torch.softmax(x, -1) @ experts)
    program = functionalize(export(router, torch.randn(1, 2, 3, 4), torch.randn(1, 2, 4, 8)))
    assert rewrite_attention(program, (MATMUL,))[1] == []


@pytest.mark.parametrize(("width", "dtype"), [(12, torch.bfloat16), (264, torch.bfloat16), (16, torch.float32)])
def test_what_cudnn_does_not_take(width: int, dtype: torch.dtype) -> None:
    _, block = _rewritten(_Layer(_operator(is_causal=True), width=width), (CUDNN, MATMUL), dtype=dtype)
    assert block.form == MATMUL and "cuDNN's form takes" in block.reason


def _narrow_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = nn.functional.scaled_dot_product_attention(q, k, v[..., : v.shape[3] // 2], is_causal=True)
    return torch.cat((y, y), -1)


@pytest.mark.parametrize("forms", FORMS)
def test_values_that_are_narrower_than_keys(forms: tuple[str, ...]) -> None:
    """As in DeepSeek's models; TensorRT-RTX refuses them in ONNX's Attention."""
    _, block = _rewritten(_Layer(_narrow_values), forms)
    assert block.form == MATMUL
    if OPERATOR in forms:
        assert f"heads of one width, not keys of {WIDTH} and values of {WIDTH // 2}" in block.reason


def test_a_program_without_attention_is_unchanged() -> None:
    program = functionalize(export(nn.Linear(3, 4), torch.randn(2, 3)))
    result, blocks = rewrite_attention(program, (MATMUL,))
    assert blocks == [] and _operators(result) == _operators(program)
