"""The rewritten program: its ops and their operands, its parameters, and its values."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from tests.models import (
    Gated,
    Plain,
    Residual,
    Written,
    assert_rewrites,
    calls,
    canonical,
    eager,
    export,
    of,
    options_of,
    rewrite,
    run,
)
from tests.tolerance import assert_as_accurate, assert_same
from twellc.passes import pipeline
from twellc.passes.block_profile import BlockProfile, Calibration, shapes
from twellc.passes.decide import decide
from twellc.passes.graph.program import constants_of, tensor_of
from twellc.passes.match.find_ffn import find_ffn_blocks
from twellc.passes.match.shared_axis import Part
from twellc.passes.pipeline import PassOptions, run_for_ranks, run_passes
from twellc.passes.report import Earlier, Layer
from twellc.passes.rewrite_ffn import rewrite_ffn
from twellc.plugins.block import call_of
from twellc.plugins.ops import GATED_MLP, MLP, VARIANT_OF


def op_in(program: ExportedProgram) -> Node:
    """Return the only twell op of a program."""
    (node,) = (n for n in program.graph.nodes if n.target in (GATED_MLP, MLP))
    return node


def assert_operands(program: ExportedProgram, node: Node, expected: list[Any]) -> None:
    """Compare the constants behind the operands between x and residual; None where a bias is absent."""
    names = constants_of(program)
    for argument, wanted in zip(node.args[1:-7], expected, strict=True):
        assert (argument is None) == (wanted is None)
        if argument is not None:
            actual = tensor_of(program, names[argument])
            assert torch.equal(actual, wanted) and actual.is_contiguous()


@pytest.mark.parametrize("biases", ["", "u", "gud"])
@pytest.mark.parametrize("make", [Gated, Plain])
def test_operands(make: Any, biases: str) -> None:
    module = Residual(make(biases=biases, d_ff=24))
    result = rewrite(canonical(module), 4)
    node, ffn = op_in(result), module.ffn
    assert node.target is (GATED_MLP if make is Gated else MLP)
    assert node.args[-6:] == ("relu", 0.0, 4, 0, "none", 0.0)
    (add,) = (n for n in result.graph.nodes if n.target is torch.ops.aten.add.Tensor and n.args[1] == 1)
    assert node.args[0] is add
    gate = [ffn.gate.weight, ffn.gate.bias] if make is Gated else []
    assert_operands(result, node, [*gate, ffn.up.weight, ffn.up.bias, ffn.down.weight.t(), ffn.down.bias])


def test_before_and_after() -> None:
    module, x = nn.Sequential(Residual(Gated(biases="gud")), Residual(Plain())), torch.randn(2, 3, 16)
    before, _, after = assert_rewrites(module, x)
    assert calls(before) == {"linear": 5, "relu": 2, "mul": 1, "add": 4}, "the pass works on a copy"
    assert calls(after) == {"gated_mlp": 1, "mlp": 1, "add": 4}


def test_idempotent() -> None:
    once = rewrite(canonical(Residual(Gated())))
    twice = rewrite(once)
    assert find_ffn_blocks(once) == []
    assert [(n.op, n.name, str(n.target)) for n in twice.graph.nodes] == [
        (n.op, n.name, str(n.target)) for n in once.graph.nodes
    ]


def test_replaced_parameters_are_dropped() -> None:
    result = rewrite(canonical(Residual(Gated(biases="d"))))
    assert set(result.state_dict) == {
        "ffn.gate.weight",
        "ffn.up.weight",
        "ffn.down.weight_transposed",
        "ffn.down.bias",
    }
    targets = {spec.target for spec in result.graph_signature.input_specs if spec.target}
    assert targets == set(result.state_dict)


def test_nothing_to_rewrite() -> None:
    program = canonical(nn.Linear(16, 16), torch.randn(5, 16))
    result = rewrite_ffn(program, [])
    assert calls(result) == {"linear": 1}
    assert_same(run(result)[0], run(program)[0])


def test_only_the_chosen_blocks() -> None:
    program = canonical(nn.Sequential(Residual(Gated()), Residual(Gated())))
    result = rewrite_ffn(program, [(find_ffn_blocks(program)[1], options_of(find_ffn_blocks(program)[1]))])
    assert calls(result) == {"linear": 3, "relu": 1, "mul": 1, "gated_mlp": 1, "add": 4}
    assert_same(run(result)[0], run(program)[0])


def test_hot_neurons_of_each_block() -> None:
    program = canonical(nn.Sequential(Residual(Gated()), Residual(Plain()), Residual(Gated())))
    blocks = zip(find_ffn_blocks(program), [5, 0, 32], strict=True)
    result = rewrite_ffn(program, [(block, options_of(block, hot=hot)) for block, hot in blocks])
    assert [n.args[-3] for n in result.graph.nodes if n.target in (GATED_MLP, MLP)] == [5, 0, 32]
    assert_same(run(result)[0], run(program)[0])


def test_the_decision_says_how_many_are_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    def decided(*arguments: Any, **named: Any) -> list[Layer]:
        dense, *others = decide(*arguments, **named)
        return [replace(dense, decision="dense"), *(replace(layer, hot=16) for layer in others)]

    monkeypatch.setattr(pipeline, "decide", decided)
    program = export(nn.Sequential(Gated(), Gated()).bfloat16(), torch.randn(2, 3, 16).bfloat16())
    as_it_is = pipeline.run_passes(program, PassOptions(torch.bfloat16, "all"))
    assert [layer.hot for layer in as_it_is.layers] == [0, 0]  # the first neurons are not the hottest
    (layer,) = [layer for layer in as_it_is.layers if layer.decision == "twell"]
    counts = {name: np.ones(shape, np.int64) for name, shape in shapes(layer.d_ff).items()}
    calibration = Calibration({layer.module: BlockProfile(layer.module, "gated", "relu", **counts)})
    rewritten = pipeline.run_passes(program, PassOptions(torch.bfloat16, "all", calibration=calibration))
    assert [layer.hot for layer in rewritten.layers] == [0, 16]
    assert op_in(rewritten.program).args[-3] == 16


def test_arguments_named_like_builtins() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = Gated()

        def forward(self, input: Tensor, max: Tensor) -> Tensor:
            return self.ffn(input) + max

    _, _, result = assert_rewrites(Named(), torch.randn(5, 16), torch.randn(5, 16))
    assert [n.name for n in result.graph.find_nodes(op="placeholder")][-2:] == ["input", "max"]


def test_the_output_of_the_program_is_that_of_the_block() -> None:
    def forward(self: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.ffn(x)
        return y, x, y

    _, _, result = assert_rewrites(Written(forward, ffn=Gated()), torch.randn(5, 16))
    assert calls(result) == {"gated_mlp": 1}


# ---- weights with several readers ----


def share_everything() -> nn.Module:
    first, second = Gated(biases="d"), Gated(biases="d")
    second.gate.weight, second.up.weight, second.down.weight = first.gate.weight, first.up.weight, first.down.weight
    return nn.Sequential(Residual(first), Residual(second))


def share_down_with_a_linear() -> nn.Module:
    ffn = Gated()
    head = nn.Linear(40, 16, bias=False)
    head.weight = ffn.down.weight
    return Written(lambda self, x: self.head(torch.cat([self.ffn(x)] * 3, -1)[..., :40]), ffn=ffn, head=head)


def share_up_with_an_embedding() -> nn.Module:
    ffn, table = Gated(), nn.Embedding(40, 16)
    assert isinstance(ffn.up, nn.Linear)
    table.weight = ffn.up.weight
    return Written(
        lambda self, x: self.ffn(x + self.table(torch.arange(3))) @ self.table.weight.t(), ffn=ffn, table=table
    )


def gate_is_up() -> nn.Module:
    ffn = Gated()
    ffn.up.weight = ffn.gate.weight
    return ffn


def tied_down() -> nn.Module:
    return of(lambda ffn, x: torch.relu(ffn.up(x)) @ ffn.up.weight, Plain())


@pytest.mark.parametrize(
    "build", [share_everything, share_down_with_a_linear, share_up_with_an_embedding, gate_is_up, tied_down]
)
def test_shared_weights(build: Any) -> None:
    _, blocks, result = assert_rewrites(build(), torch.randn(2, 3, 16))
    assert len({block.module for block in blocks}) == len(blocks)
    assert sum(count for name, count in calls(result).items() if "mlp" in name) == len(blocks)


def test_a_shared_down_weight_is_transposed_once() -> None:
    result = rewrite(canonical(share_everything()))
    assert [name for name in result.state_dict if "transposed" in name] == ["1.ffn.down.weight_transposed"]


# ---- values ----


@pytest.mark.parametrize("build", [Gated, Plain])
def test_nan_in_x_reaches_its_row_of_y_only(build: Any) -> None:
    program = canonical(build(biases="d"), torch.randn(5, 16))
    x = torch.randn(5, 16)
    x[1, 3] = torch.nan
    (y,) = run(rewrite(program), x)
    assert y[1].isnan().all()
    assert y[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("active", [False, True])
@torch.no_grad()
def test_a_neuron_with_infinite_up(active: bool) -> None:
    """Where it is inactive, dense computes 0 * inf = NaN; the op does not look at it."""
    module, x = Gated(biases="gud"), torch.randn(5, 16)
    module.gate.weight[7], module.gate.bias[7], module.up.bias[7] = 0, 1 if active else -1, torch.inf
    (y,), expected = run(rewrite(canonical(module, x))), eager(module, x)[0]
    if active:
        assert y.isinf().all() and torch.equal(y.isinf(), expected.isinf())
    else:
        assert expected.isnan().all()
        module.up.bias[7] = 0
        assert_same(y, eager(module, x)[0])


# ---- norms ----


class OnePlus(nn.RMSNorm):
    """An RMSNorm as Gemma has it."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


TAKES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "residual": lambda m, x: x + m.ffn(m.norm(x)),
    "none": lambda m, x: torch.tanh(m.ffn(m.norm(x))),
    "flattened": lambda m, x: x + m.ffn(m.norm(x).view(-1, 16)).view(x.shape),
    "one behind the other": lambda m, x: (y := x + m.other(m.last(x))) + m.ffn(m.norm(y)),
}
LEAVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the norm is the residual": lambda m, x: (y := m.norm(x)) + m.ffn(y),
    "beside a linear layer": lambda m, x: x + m.ffn(y := m.norm(x)) + m.o(y),
    "another width": lambda m, x: x + m.ffn(m.norm(x.view(-1, 8)).view(x.shape)),
}


def with_norm(name: str, norm: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    form = {**TAKES, **LEAVES}[name]
    parts = {"norm": norm(8 if "width" in name else 16), "last": norm(16), "ffn": Gated(biases="gud"), "other": Plain()}
    module = Written(form, **parts, o=nn.Linear(16, 16)).bfloat16()
    for each in (module.norm, module.last):
        nn.init.normal_(each.weight, 0.5)
    return module, torch.randn(2, 3, 16).bfloat16() * 3


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, OnePlus])
@pytest.mark.parametrize("name", [*TAKES, *LEAVES])
def test_a_block_takes_the_norm_before_it(name: str, norm: type[nn.Module]) -> None:
    module, x = with_norm(name, norm)
    result = run_passes(export(module, x), PassOptions(layers="all", linear="twell"))
    ops = [node for node in result.program.graph.nodes if node.target in VARIANT_OF]
    kind = "none" if name in LEAVES else "layer" if norm is nn.LayerNorm else "rms"
    assert [layer.norm for layer in result.layers] == [kind] * len(ops)
    for node in ops:
        operands, options = call_of(VARIANT_OF[node.target], node.args, node.kwargs)
        assert options.norm == kind and (options.eps > 0) == (name in TAKES)
        assert (operands.norm_weight is None) == (name in LEAVES)
    assert any("norm" in each or "rsqrt" in each for each in calls(result.program)) == (name in LEAVES)
    plain = eager(module, x)[0]
    assert_as_accurate(run(result.program, x)[0], plain, eager(module.double(), x.double())[0])


@pytest.mark.parametrize("linear", ["auto", "tensorrt"])
def test_norms_stay_where_linear_layers_do(linear: str) -> None:
    module, x = with_norm("residual", nn.RMSNorm)
    (layer,) = run_passes(export(module, x), PassOptions(layers="all", linear=linear)).layers
    assert layer.norm == "none"


def test_norms_that_an_earlier_run_took() -> None:
    module, x = with_norm("residual", nn.RMSNorm)
    program = export(module, x)
    for taken, norm in ((["ffn"], "rms"), ([], "none")):
        options = PassOptions(layers="all", linear="twell", earlier=Earlier(linear_taken=taken))
        (layer,) = run_passes(program, options).layers
        assert layer.norm == norm


def test_ranks_leave_norms() -> None:
    module, x = with_norm("residual", nn.RMSNorm)
    done = next(run_for_ranks(export(module, x), PassOptions(layers="all", linear="twell", part=Part(0, 2))))
    assert [layer.norm for layer in done.layers] == ["none"]
