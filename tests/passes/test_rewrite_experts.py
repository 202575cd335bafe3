"""Experts of transformers in traced programs: what is found, what the op gives, and what stays as it is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests import models
from tests.models import Written, calls, canonicalize, export, run
from tests.tolerance import assert_as_accurate, assert_same
from twellc.eager.experts import hidden_of, up_of
from twellc.passes.fp8 import Wish
from twellc.passes.match.activations import packet
from twellc.passes.match.find_ffn import FfnBlock, find_ffn_blocks
from twellc.passes.match.shared_axis import Part
from twellc.passes.pipeline import PassOptions, Rewritten, run_for_ranks, run_passes
from twellc.passes.rewrite_experts import rewrite_experts

FORMS = ("grouped_mm", "batched_mm")


def experts(gated: bool, **changes: Any) -> Any:
    """Return the experts of a layer: six of width 40, for x of width 24."""
    sizes: dict[str, Any] = {"hidden_size": 24, "head_dim": 8}
    if gated:
        model = models.mixtral(num_local_experts=6, intermediate_size=40, num_hidden_layers=1, **sizes, **changes)
        return model.model.layers[0].mlp.experts
    sizes |= {"n_routed_experts": 6, "moe_intermediate_size": 40, "layers_block_type": ["moe"]}
    return models.nemotron_h(**sizes, **changes).model.layers[0].mixer.experts


def transposed(layer: Any) -> None:
    """Store its weights input by input, as some models do."""
    layer.is_transposed = True
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(weight.mT.contiguous()))


def interleaved(layer: Any) -> None:
    """Let gate and up projections of a neuron follow each other."""
    layer._apply_gate = lambda z: torch.relu(z[..., ::2]) * z[..., 1::2]


def drelu(layer: Any) -> None:
    layer._apply_gate = lambda z: torch.relu(z.chunk(2, -1)[1]) * torch.relu(z.chunk(2, -1)[0])


# What experts compute, whether with a gate, and how they are traced.
KINDS: dict[str, tuple[bool, dict[str, Any], Callable[[Any], None] | None, str, torch.dtype]] = {
    "relu2": (False, {}, None, "grouped_mm", torch.bfloat16),
    "relu2, batched": (False, {}, transposed, "batched_mm", torch.float32),
    "relu": (False, {"mlp_hidden_act": "relu"}, transposed, "grouped_mm", torch.float32),
    "gated": (True, {}, None, "grouped_mm", torch.float32),
    "gated, batched": (True, {}, None, "batched_mm", torch.bfloat16),
    "gated relu2": (True, {"hidden_act": "relu2"}, transposed, "grouped_mm", torch.bfloat16),
    "interleaved": (True, {}, interleaved, "batched_mm", torch.float32),
    "drelu": (True, {}, drelu, "grouped_mm", torch.bfloat16),
}


def made(gated: bool, changes: dict[str, Any], change: Callable[[Any], None] | None, form: str) -> Any:
    layer = experts(gated, **changes).bfloat16()
    if change is not None:
        change(layer)
    layer.config._experts_implementation = form
    return layer


def drawn(layer: Any, tokens: int, top: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, ids and weights; an expert has no token, and some tokens have an expert twice."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, layer.num_experts - 1, (tokens, top), generator=generator)
    return torch.randn(tokens, 24, generator=generator).to(dtype), ids, torch.rand(tokens, top, generator=generator)


def traced(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> ExportedProgram:
    module = Written(lambda self, *given: self.experts(*given), experts=layer)
    tokens = Dim("tokens", min=2)
    return export(module, x, ids, weights, dynamic=(({0: tokens}, {0: tokens}, {0: tokens}),))


def in_bf16(program: ExportedProgram) -> Rewritten:
    return run_passes(program, PassOptions(torch.bfloat16))


def truth_of(layer: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return what the experts give, in float64, one token after the other."""
    up, down = (each.double() if layer.is_transposed else each.double().mT for each in (up_of(layer), layer.down_proj))
    y = torch.zeros(len(x), 24, dtype=torch.float64)
    for token, expert, weight in zip(*(each.flatten() for each in (places(ids), ids, weights)), strict=True):
        y[token] += weight * (hidden_of(layer, x[token].double()[None] @ up[expert]) @ down[expert])[0]
    return y


def places(ids: Tensor) -> Tensor:
    return torch.arange(len(ids))[:, None].expand_as(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_op_gives(kind: str) -> None:
    """Beside float64, for other sizes than were traced; a NaN reaches the output of its token, and of no other."""
    *how, dtype = KINDS[kind]
    layer = made(*how)
    done = in_bf16(traced(copy.deepcopy(layer).to(dtype), *drawn(layer, 5, 2, dtype)))
    (row,) = done.layers
    assert (row.experts, row.top, row.d_model, row.d_ff, row.d_out) == (6, 2, 24, 40, 24)
    assert (row.variant, row.decision, row.reason) == ("gated" if how[0] else "plain", "twell", "matches")
    assert calls(done.program).keys() - {"_to_copy"} == {"experts", *["remainder"] * (how[3] == "batched_mm")}
    x, ids, weights = drawn(layer, 23, 2, torch.bfloat16)
    (found,) = run(done.program, x.to(dtype), ids, weights)
    assert found.dtype == dtype
    with torch.no_grad():
        assert_as_accurate(found.bfloat16(), layer(x, ids, weights), truth_of(layer, x, ids, weights))
    x[3, 5] = torch.nan
    with_nan = run(done.program, x.to(dtype), ids, weights)[0].isnan()
    assert with_nan[3].all() and not with_nan[:3].any() and not with_nan[4:].any()


@pytest.mark.parametrize(("form", "number", "meant"), [("batched_mm", -2, 4), ("grouped_mm", 9, None)])
def test_numbers_of_no_expert(form: str, number: int, meant: int | None) -> None:
    """Batched products look up matrices, from the last one where a number is below 0; sorted rows are left out."""
    layer = made(False, {}, None, form).float()
    x, ids, weights = drawn(layer, 5, 3, torch.bfloat16)
    x, others, factors = x.float(), ids.clone(), weights.clone()
    ids[1, 2], others[1, 2] = number, meant or 0
    factors[1, 2] *= meant is not None
    program = traced(layer, x, others, weights)
    (expected,) = run(program, x, others, factors)
    assert_same(run(program, x, ids, weights)[0], expected)
    done = in_bf16(program).program
    assert torch.equal(run(done, x, ids, weights)[0], run(done, x, others, factors)[0])


def with_zeros(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute experts as transformers 5.12 does: rows of numbers that are no expert's are set to 0."""
    layer, top = module.experts, ids.shape[1]
    numbers, order = ids.reshape(-1).sort()
    none = (numbers >= layer.num_experts).unsqueeze(-1)
    ends = torch.histc(numbers.float(), layer.num_experts, 0, layer.num_experts - 1).cumsum(0, dtype=torch.int32)
    rows = x[order // top].masked_fill(none, 0.0)
    hidden = torch._grouped_mm(rows, layer.up_proj.mT, offs=ends).relu().square()
    y = torch._grouped_mm(hidden, layer.down_proj.mT, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.size(0))
    return y.masked_fill(none, 0.0)[back].view(-1, top, 24).sum(1).to(x.dtype)


def test_other_releases() -> None:
    layer = made(*KINDS["relu2"][:-1])
    x, ids, weights = drawn(layer, 9, 2, torch.bfloat16)
    module = Written(with_zeros, experts=layer)
    done = in_bf16(export(module, x, ids, weights))
    assert calls(done.program) == {"experts": 1}
    ids[3, 1] = 6
    truth = truth_of(layer, x, ids.clamp(max=5), weights * (ids < 6))
    with torch.no_grad():
        assert_as_accurate(run(done.program, x, ids, weights)[0], module(x, ids, weights), truth)


def test_ranks_and_bits() -> None:
    """Each rank computes experts whole, with weights in 16 bits, beside its share of a block."""
    layer = made(*KINDS["relu2"][:-1])
    module = Written(
        lambda self, *given: self.ffn(self.experts(*given)),
        experts=layer,
        ffn=models.Plain(d_model=24, d_ff=32).bfloat16(),
    )
    x, ids, weights = drawn(layer, 1, 1, torch.bfloat16)  # sizes that are all 1 are no vectors
    options = PassOptions(torch.bfloat16, weights=Wish(True), part=Part(0, 2))
    program = export(module, x, ids, weights)
    for rank in run_for_ranks(program, options):
        assert calls(rank.program)["experts"] == calls(rank.program)["mlp"] == 1
        assert any("stays whole on every rank: it is a mixture of experts" in note for note in rank.notes)
        reasons = [row.reason for row in rank.layers]
        assert reasons == [
            "matches; weights in 16 bits, experts are not quantised",
            "matches; weights in 8 bits, quantised",
        ]
    whole = run_passes(program, PassOptions(torch.bfloat16)).program
    wide = torch.nn.functional.linear(truth_of(layer, x, ids, weights), module.ffn.up.weight.double()).relu()
    truth = torch.nn.functional.linear(wide, module.ffn.down.weight.double())
    with torch.no_grad():
        assert_as_accurate(run(whole, x, ids, weights)[0], module(x, ids, weights), truth)


def block_of(layer: Any, form: str) -> tuple[ExportedProgram, FfnBlock]:
    layer.config._experts_implementation = form
    program = canonicalize(traced(layer, *drawn(layer, 5, 2, torch.float32)))
    (block,) = find_ffn_blocks(program)
    return program, block


@pytest.mark.parametrize("form", FORMS)
def test_refused(form: str) -> None:
    """Each with its reason; the activation's input is known of a ReLU's."""
    _, block = block_of(experts(True, hidden_act="silu"), form)
    assert block.refusal == "gate activation is silu; TwELL needs a ReLU family" and block.pre is None
    layer, stored = experts(False), torch.rand(40)
    layer.act_fn = models.of(lambda _, z: torch.relu(z) * (z > stored), nn.Identity())
    assert "for each neuron" in block_of(layer, form)[1].refusal


def test_too_many_at_once() -> None:
    """The kernels number the pairs of a token and an expert; a profile decides how many there may be."""
    layer = made(*KINDS["relu2"][:-1])
    program = traced(layer, *drawn(layer, 5, 2, torch.bfloat16))
    for tokens, reason in (
        (1 << 19, "matches"),
        ((1 << 19) + 1, "a call sends 524289 tokens to 2 experts each; the kernels take at most 1048576"),
    ):
        options = PassOptions(torch.bfloat16, calls=lambda x, most=tokens: (16, most))
        (row,) = run_passes(program, options).layers
        assert row.reason == reason and row.matched == (reason == "matches")


def test_not_experts() -> None:
    """What only looks like it: rows of other tokens, or of other experts, and another sum."""
    layer = made(*KINDS["relu2"][:-1])
    x, ids, weights = drawn(layer, 5, 2, torch.bfloat16)
    program = canonicalize(traced(layer, x, ids, weights))
    assert rewrite_experts(program, []) is program
    for name, argument in {"floor_divide": 3, "histc": 7, "sum": [0]}.items():
        changed = canonicalize(traced(layer, x, ids, weights))
        (node,) = (each for each in changed.graph.nodes if str(packet(each)) == f"aten.{name}")
        node.update_arg(1, argument)
        assert not any(block.routing for block in find_ffn_blocks(changed)), name
