"""Linear layers as `twell` ops: what is found in each family, and that the program computes the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from tests.caches import FAMILIES
from tests.models import Gated, Written, canonical, eager, export, run
from tests.tolerance import assert_as_accurate, assert_same
from twellc.passes import decide
from twellc.passes.graph.program import constants_of, tensor_of
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.match.find_linear import find_linear
from twellc.passes.match.shared_axis import Part
from twellc.passes.pipeline import PassOptions, run_for_ranks, run_passes
from twellc.passes.report import Linear, Weights
from twellc.passes.rewrite_linear import rewrite_linear
from twellc.plugins.linear import call_of
from twellc.plugins.linear_op import LINEAR

QKV, OUT, LOGITS = [32, 16, 16], [32], [96]
# Of a layer and behind the last one: widths, norm and whether with a residual.
FOUND: dict[str, list[tuple[list[int], str, bool]]] = {
    "llama": [(QKV, "rms", False), (OUT, "none", True), (LOGITS, "rms", False)],
    "qwen3": [(QKV, "rms", False), (OUT, "none", True), (LOGITS, "rms", False)],
    "gemma2": [(QKV, "rms", False), (OUT, "none", False), (LOGITS, "rms", False)],
    "olmo2": [(QKV, "none", False), (OUT, "none", False), (LOGITS, "rms", False)],
    "opt": [([32, 32, 32], "layer", False), (OUT, "none", True), (LOGITS, "layer", False)],
    "gpt2": [([32, 32, 32], "layer", False), (OUT, "none", True), (LOGITS, "layer", False)],
    "phi3": [(QKV, "rms", False), (OUT, "none", True), (LOGITS, "rms", False)],
}


class Logits(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = FAMILIES[name](**({} if name == "gpt2" else {"num_hidden_layers": 1}))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


IDS = torch.randint(3, 96, (2, 5))


def rewritten(program: ExportedProgram) -> ExportedProgram:
    """Rewrite all linear layers outside of blocks, whatever their dtype."""
    parts = [part for each in find_ffn_blocks(program) for part in (each.gate, each.up, each.down) if part]
    return rewrite_linear(program, find_linear(program, {node.name for part in parts for node in part.nodes}))


def ops_in(program: ExportedProgram) -> list[Node]:
    return program.graph.find_nodes(op="call_function", target=LINEAR)


@pytest.mark.parametrize("name", FOUND)
def test_families(name: str) -> None:
    module = Logits(name)
    program = canonical(module, IDS)
    after = rewritten(program)
    assert len(ops_in(after)) == 3
    truth = eager(module, IDS)[0]
    assert_same(run(after, IDS)[0], truth)
    assert rewritten(after) is after, "nothing is left"

    module.bfloat16()
    exact = run_passes(export(module, IDS), PassOptions(layers="none", linear="twell"))
    found = [(row.widths, row.norm, row.residual) for row in exact.linear]
    assert found == FOUND[name]
    assert {row.decision for row in exact.linear} == {"twell"}
    (plain,) = eager(module, IDS)
    assert_as_accurate(run(exact.program, IDS)[0], plain, eager(module.double(), IDS)[0])


def count(program: ExportedProgram) -> int:
    return sum(tensor_of(program, name).numel() for name in constants_of(program).values())


def test_joined_weights_take_the_place_of_their_parts() -> None:
    """Biases, too, with zeros where there is none; a single weight stays the model's own."""
    q, k, v = nn.Linear(16, 16), nn.Linear(16, 8, bias=False), nn.Linear(16, 8)
    module = Written(lambda m, x: [m.q(x), m.k(x), m.v(x), m.o(torch.tanh(x))], q=q, k=k, v=v, o=nn.Linear(16, 24))
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    program = canonical(module.double(), x)
    after = rewritten(program)
    joined, single = ops_in(after)
    names = constants_of(after)
    weight, bias = (tensor_of(after, names[node]) for node in joined.args[1:3])
    assert torch.equal(weight, torch.cat([each.weight for each in (q, k, v)]))
    assert torch.equal(bias, torch.cat([q.bias, torch.zeros(8), v.bias]))
    assert names[single.args[1]] == "o.weight"
    assert count(after) == count(program) + 8
    for actual, expected in zip(run(after, x), eager(module, x), strict=True):
        assert_same(actual, expected)


VALUES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the last row": lambda m, x: m.o(m.norm(x)[:, -1:]),
    "a row of each": lambda m, x: m.o(m.norm(x).gather(1, torch.tensor([[[1]], [[0]]]).expand(-1, 1, 16))),
    "flattened": lambda m, x: (x.view(-1, 16) + m.o(m.norm(x).view(-1, 16))).view(x.shape),
    "a sum of two": lambda m, x: m.o(m.norm(x)) + m.o(torch.tanh(x)),
    "one behind the other": lambda m, x: (y := x + m.o(m.norm(x))) + m.o(m.norm(y)),
    "beside a block": lambda m, x: x + m.o(y := m.norm(x)) + m.ffn(y),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_values(name: str, norm: type[nn.Module]) -> None:
    module = Written(VALUES[name], norm=norm(16), o=nn.Linear(16, 16), ffn=Gated()).double()
    nn.init.normal_(module.norm.weight)
    x, larger = (torch.randn(2, rows, 16, dtype=torch.float64) for rows in (3, 5))
    after = rewritten(canonical(module, x, dynamic=(({1: Dim("rows", max=64)},),)))
    dense = after.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert ops_in(after) and len(dense) == 3 * name.startswith("beside")
    assert_same(run(after, larger)[0], eager(module, larger)[0])


CHOICES: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "behind a norm": (lambda m, x: m.o(m.norm(x)).argmax(-1), True),
    "of one row, in float64": (lambda m, x: m.o(m.norm(x)[:, -1:]).double().argmax(2)[:, 0], True),
    "of a sum": (lambda m, x: (x + m.o(torch.tanh(x))).argmax(-1), True),
    "of something else": (lambda m, x: torch.tanh(m.o(x)).argmax(-1), False),
    "beside its reader": (lambda m, x: (y := m.o(x)).argmax(-1) + y.sum(-1).long(), False),
    "over another dimension": (lambda m, x: m.o(x).argmax(1), False),
    "over all": (lambda m, x: m.o(x).argmax(), False),
    "with the dimension kept": (lambda m, x: m.o(x).argmax(-1, keepdim=True), False),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    function, is_taken = CHOICES[name]
    dtype = torch.float32 if name.endswith("float64") else torch.float64
    module = Written(function, norm=nn.RMSNorm(16), o=nn.Linear(16, 16)).to(dtype)
    x = torch.randn(2, 3, 16, dtype=dtype)
    after = rewritten(canonical(module, x))
    (call,) = ops_in(after)
    assert call_of(call.args, call.kwargs)[1].choose == is_taken
    assert len(after.graph.find_nodes(op="call_function", target=torch.ops.aten.argmax.default)) == 1 - is_taken
    assert torch.equal(run(after, x)[0], eager(module, x)[0])


def test_nan_reaches_its_row() -> None:
    module = Written(lambda m, x: x + m.o(m.norm(x)), norm=nn.RMSNorm(16), o=nn.Linear(16, 16))
    x = torch.randn(2, 3, 16)
    x[1, 2, 5] = torch.nan
    y = run(rewritten(canonical(module, x)), x)[0].isnan()
    assert y[1, 2].all() and y.sum() == 16


def decided(
    linear: str, ranks: int = 1, calls: tuple[int, ...] = (1,), width: int = 24, weights: Weights | None = None
) -> Linear:
    module = Written(lambda m, x: x + m.o(torch.relu(x)).sum(-1, keepdim=True), o=nn.Linear(16, width)).bfloat16()
    x = torch.randn(2, 3, 16).bfloat16()
    found = find_linear(canonical(module, x))
    (row,) = decide.decide_linear(found, linear, lambda node: calls, ranks, weights=lambda layer: weights)
    return row


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"linear": "twell"}, "matches"),
        ({"linear": "twell", "width": 20}, "a width is 20; the kernels need a positive multiple of 8 (16-byte rows)"),
        ({"linear": "twell", "ranks": 2}, "ranks share the model"),
        ({"linear": "tensorrt"}, "--linear tensorrt"),
        ({"linear": "auto", "calls": (2048, 16)}, "matches"),
        ({"linear": "auto", "calls": (2048, 17)}, "no profile has at most 16 tokens a call"),
        ({"linear": "auto", "calls": (2048, 512), "weights": Weights(8, "so")}, "matches; weights in 8 bits, so"),
        (
            {"linear": "auto", "calls": (2048, 511), "weights": Weights(8, "so")},
            "no profile has at most 16 tokens a call, nor has each 512 or more",
        ),
        ({"linear": "auto", "calls": (2048,), "weights": Weights(16, "so")}, "no profile has at most 16 tokens a call"),
    ],
)
def test_decisions(given: dict[str, Any], reason: str) -> None:
    row = decided(**given)
    assert (row.decision == "twell") == reason.startswith("matches")
    assert (row.reason, row.matched) == (reason, row.widths == [24])


def test_ranks_leave_them() -> None:
    module = Written(VALUES["beside a block"], norm=nn.RMSNorm(16), o=nn.Linear(16, 16), ffn=Gated()).bfloat16()
    program = export(module, torch.randn(2, 3, 16).bfloat16())
    done = next(run_for_ranks(program, PassOptions(layers="all", linear="twell", part=Part(0, 2))))
    assert "linear layers outside of feed-forward blocks stay as they are: ranks share the model" in done.notes
    assert [row.reason for row in done.linear] == ["ranks share the model"]


def test_float32_stays() -> None:
    module = Written(lambda m, x: m.o(x), o=nn.Linear(16, 16))
    (row,) = run_passes(export(module), PassOptions(linear="twell")).linear
    assert (row.decision, row.reason) == ("tensorrt", "computes in float32; the kernels take bfloat16 and float16")
