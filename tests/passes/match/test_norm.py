"""Which forms of a normalisation are read, and that what is read means what they compute."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from tests.models import Written, canonical, eager
from tests.tolerance import assert_same
from twellc.passes.graph.constants import ProgramConstants, fixed_nodes
from twellc.passes.graph.program import constants_of
from twellc.passes.match.norm import Norm, read_norm

Form = Callable[[Written, Tensor], Tensor]
D = 16
EPS = 1e-3  # large enough to matter


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def llama(m: Written, x: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    return m.w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def centred(x: Tensor) -> Tensor:
    return x - mean(x)


RMS: dict[str, Form] = {
    "Llama": llama,
    "Gemma": lambda m, x: x * torch.rsqrt(mean(x * x) + EPS) * (1 + m.w),
    "OLMo 2": lambda m, x: (m.w * (x.double() * torch.rsqrt(mean(x.double().square()) + EPS))).to(x.dtype),
    "a quotient": lambda m, x: x / torch.sqrt(mean(x**2) + EPS) * m.w,
    "powers": lambda m, x: m.w * (x * (x.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.5)),
    "no weight": lambda m, x: x * torch.rsqrt(EPS + mean(x * x)),
    "torch's": lambda m, x: nn.functional.rms_norm(x, (D,), m.w, EPS),
    "torch's, without eps": lambda m, x: nn.functional.rms_norm(x, (D,), m.w),
}
LAYER: dict[str, Form] = {
    "torch's": lambda m, x: nn.functional.layer_norm(x, (D,), m.w, m.b, EPS),
    "no bias": lambda m, x: nn.functional.layer_norm(x, (D,), 1 + m.w, None, EPS),
    "decomposed": lambda m, x: torch.native_layer_norm(x, (D,), m.w, m.b, EPS)[0],
    "written out": lambda m, x: centred(x) * torch.rsqrt(mean(centred(x) ** 2) + EPS) * m.w + m.b,
    "variance": lambda m, x: m.w * (centred(x) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS)) + m.b,
}


def read(form: Form, x: Tensor) -> tuple[ExportedProgram, Norm | None, Written]:
    module = Written(form, w=torch.randn(D, dtype=x.dtype), b=torch.randn(D, dtype=x.dtype))
    program = canonical(module, x)
    (output,) = program.graph.output_node().args[0]
    return program, read_norm(output, fixed_nodes(program.graph, constants_of(program))), module


@pytest.mark.parametrize(("kind", "name"), [*(("rms", name) for name in RMS), *(("layer", name) for name in LAYER)])
def test_forms(kind: str, name: str) -> None:
    x = 0.05 * torch.randn(2, 3, D)
    program, norm, module = read((RMS if kind == "rms" else LAYER)[name], x)
    assert norm is not None and norm.kind == kind and norm.x.op == "placeholder"
    value = ProgramConstants(program).value
    weight, bias = (None if each is None else value(each).float() for each in (norm.weight, norm.bias))
    if kind == "rms":
        expected = nn.functional.rms_norm(x, (D,), weight, norm.eps)
    else:
        expected = nn.functional.layer_norm(x, (D,), weight, bias, norm.eps)
    assert_same(eager(module, x)[0], expected)


OTHERS: dict[str, Form] = {
    "over another axis": lambda m, x: x * torch.rsqrt((x * x).mean(1, keepdim=True) + EPS),
    "over all": lambda m, x: nn.functional.layer_norm(x, (3, D), None, None, EPS),
    "of another tensor": lambda m, x: x * torch.rsqrt(mean((x + 1) ** 2) + EPS),
    "the sum of squares": lambda m, x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS),
    "the sample variance": lambda m, x: centred(x) * torch.rsqrt(x.var(-1, keepdim=True) + EPS),
    "the square root": lambda m, x: x * torch.sqrt(mean(x * x) + EPS),
    "not centred": lambda m, x: x * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + EPS),
    "a weight that x makes": lambda m, x: x * torch.rsqrt(mean(x * x) + EPS) * x[:1, :1],
    "an RMSNorm with a bias": lambda m, x: x * torch.rsqrt(mean(x * x) + EPS) * m.w + m.b,
    "narrowed first": lambda m, x: llama(m, x.half().float()).float(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none(name: str) -> None:
    _, norm, _ = read(OTHERS[name], torch.randn(2, 3, D))
    assert norm is None or (name == "narrowed first" and norm.x.op != "placeholder")
