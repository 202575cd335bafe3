"""Neurons that are moved, or removed: what is kept, what stays as it is, and that results do not change."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.models import D_FF, D_MODEL, Gated, Plain, Residual, Written, block_profile, canonical, export, run
from twellc.decisions.advise import Advisor
from twellc.decisions.choose import Tokens, percent
from twellc.decisions.targets import choose_target
from twellc.passes.block_profile import BlockProfile, Calibration, hot_first
from twellc.passes.decide import Advise
from twellc.passes.graph.execution import Runner
from twellc.passes.match.activations import packet
from twellc.passes.match.find_ffn import FfnBlock
from twellc.passes.neurons import Staying
from twellc.passes.pipeline import PassOptions, Rewritten, run_passes
from twellc.passes.report import Choice
from twellc.plugins.ops import GATED_MLP, MLP

DEAD = (3, 5, 7, 11, 13, 20, 21, 22, 23, 24, 30, 39)


def profile(module: str, d_ff: int = D_FF, variant: str = "gated", dead: tuple[int, ...] = DEAD) -> BlockProfile:
    """Return a profile in which neurons fire for 1 to 97 tokens of 97, or never."""
    firing = np.arange(d_ff) * 37 % 97 + 1
    firing[list(dead)] = 0
    return block_profile(module, firing, {1: 97}, variant)


def calibration(*blocks: BlockProfile, **options: Any) -> Calibration:
    return Calibration({block.module: block for block in blocks}, **options)


def rewritten(module: nn.Module, known: Calibration | None, hot: int = 0) -> Rewritten:
    """Rewrite a module, of each of whose blocks `hot` neurons are to be hot."""
    return asked(module, known, hot)[1]


def asked(
    module: nn.Module, known: Calibration | None, hot: int = 8, advisor: Advise | None = None
) -> tuple[list[Staying], Rewritten]:
    """Rewrite a module; return which neurons of each block were decided about, and what was made."""
    found: list[Staying] = []

    def advise(block: FfnBlock, neurons: Staying) -> Choice:
        found.append(neurons)
        return advisor(block, neurons) if advisor is not None else Choice("twell", "matches", hot, 8, None)

    seeded = torch.Generator().manual_seed(0)
    x = torch.randn(models.BATCH, models.SEQUENCE, D_MODEL, generator=seeded).bfloat16()
    options = PassOptions(torch.bfloat16, "auto" if advisor else "all", calibration=known, advise=advise)
    return found, run_passes(export(module.bfloat16(), x), options)


def operands(found: Rewritten) -> list[Tensor | None]:
    """Return the weights and biases of the first twell op."""
    program = found.program
    node = next(node for node in program.graph.nodes if node.target in (GATED_MLP, MLP))
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    given = node.args[1 : 7 if node.target is GATED_MLP else 5]
    return [None if each is None else program.state_dict[names[each.name]] for each in given]


def assert_moved(found: Rewritten, plain: Rewritten, order: Tensor | None = None) -> None:
    """Compare the operands of two programs, those of `plain` in an order; the last one, a bias, has no neurons."""
    for index, (ours, theirs) in enumerate(zip(operands(found), operands(plain), strict=True)):
        assert ours is not None and theirs is not None
        is_moved = order is not None and index < len(operands(found)) - 1
        assert torch.equal(ours, theirs[order] if is_moved else theirs)


def biased(variant: str, **options: Any) -> nn.Module:
    return Residual(Gated(biases="gud", **options) if variant == "gated" else Plain(biases="ud", **options))


def order_of(block: BlockProfile, hot: int) -> Tensor:
    """Work out the order of a block's neurons: hot ones, others that fire, and those that never do."""
    hottest = sorted(range(block.d_ff), key=lambda neuron: (-block.firing[neuron], neuron))[:hot]
    others = [neuron for neuron in range(block.d_ff) if neuron not in hottest]
    fire = [neuron for neuron in others if block.firing[neuron]]
    return torch.tensor([*sorted(hottest), *fire, *(neuron for neuron in others if neuron not in fire)])


def test_the_example_of_the_docstring() -> None:
    firing = np.array([3, 0, 1, 9, 0, 8])
    assert hot_first(firing, 2).tolist() == [3, 5, 0, 2, 1, 4]
    assert hot_first(firing, 1).tolist() == [3, 0, 2, 5, 1, 4]
    assert hot_first(firing, 0).tolist() == list(range(6))
    assert hot_first(firing, 6).tolist() == list(range(6))
    assert hot_first(np.array([1, 1, 0, 1]), 2).tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_hot_ones_come_first(variant: str) -> None:
    """Every weight and bias of a neuron moves with it, and y is the same but for the order of sums."""
    module, block = biased(variant), profile("ffn", variant=variant)
    found, plain = rewritten(module, calibration(block), 8), rewritten(module, None)
    assert_moved(found, plain, order_of(block, 8))
    (layer,) = found.layers
    assert (layer.reason, layer.hot) == ("matches; 12 never fired", 8)
    assert layer.neurons is not None
    assert (layer.neurons.kept, layer.neurons.dead, layer.neurons.tokens) == (D_FF, 0, 97)
    assert layer.neurons.rate_bound == pytest.approx(1 - 0.05 ** (1 / 97))
    torch.testing.assert_close(run(found.program)[0], run(plain.program)[0], rtol=2e-2, atol=2e-2)
    assert plain.layers[0].neurons is None


@pytest.mark.parametrize("known", [calibration(profile("ffn")), None])
def test_without_hot_ones_all_stay(known: Calibration | None) -> None:
    """A profile alone moves nothing; and without one nobody knows which are hot."""
    module = biased("gated")
    found, plain = rewritten(module, known, 0 if known else 8), rewritten(module, None)
    assert_moved(found, plain)
    assert found.layers[0].hot == 0
    assert found.layers[0].reason == ("matches; 12 never fired" if known else "matches")


def test_packed_and_stored_the_other_way_round() -> None:
    """A packed gate and up, and a weight [in, out]: the rows of each move."""

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = (x @ self.both).chunk(2, -1)
        return nn.functional.linear(torch.relu(gate) * up, self.down)

    module = Written(forward, both=torch.randn(D_MODEL, 2 * D_FF), down=torch.randn(D_MODEL, D_FF))
    names = [layer.module for layer in rewritten(module, None).layers]
    found = rewritten(module, calibration(profile(names[0])), 8)
    order = order_of(profile(names[0]), 8)
    gate, _, up, _, down, _ = operands(found)
    both = module.both.detach().t()  # type: ignore[union-attr, operator]
    assert torch.equal(gate, both[:D_FF][order]) and torch.equal(up, both[D_FF:][order])  # type: ignore[arg-type]
    assert torch.equal(down, module.down.detach().t()[order])  # type: ignore[arg-type, union-attr, operator]


def twice(self: Any, x: Tensor) -> Tensor:
    return self.ffn(self.ffn(x) + 1)  # type: ignore[no-any-return]


def test_shared_weights_stay() -> None:
    """Two calls read them; in another order for one they would need a copy."""
    known = calibration(profile("ffn"), profile("ffn#2"), prune_dead=True)
    found = rewritten(Written(twice, ffn=Gated()), known, 8)
    assert len(found.layers) == 2
    for layer in found.layers:
        assert layer.neurons is not None and layer.hot == 0
        assert (layer.neurons.kept, layer.neurons.dead, layer.neurons.never) == (D_FF, 0, len(DEAD))
        assert "neurons as they are, since its weight ffn." in layer.reason and "also read elsewhere" in layer.reason


def test_weights_that_the_model_returns_stay() -> None:
    module = Written(lambda self, x: (self.ffn(x), self.ffn.gate.weight * 2), ffn=Gated())
    (layer,) = rewritten(module, calibration(profile("ffn"))).layers
    assert layer.neurons is not None and layer.neurons.reason == "its weight ffn.gate.weight is also read elsewhere"


@pytest.mark.parametrize("known", [profile("another"), profile("ffn", d_ff=48), profile("ffn", variant="plain")])
def test_a_block_that_the_profile_does_not_know(known: BlockProfile) -> None:
    (layer,) = rewritten(Residual(Gated()), calibration(known, prune_dead=True), 8).layers
    assert layer.neurons is not None and (layer.neurons.kept, layer.hot) == (D_FF, 0)
    assert layer.neurons.reason == "the profile does not know the block"


def test_dense_blocks_are_left_alone() -> None:
    module = Residual(Gated(nn.functional.silu))
    (layer,) = rewritten(module, calibration(profile("ffn"))).layers
    assert layer.decision == "dense" and layer.neurons is None


@pytest.mark.parametrize(("hot", "taken"), [(0, 0), (8, 8), (36, 32)])
@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_dead_neurons_are_removed(variant: str, hot: int, taken: int) -> None:
    """40 less 12 are 28, and 32 the next multiple of 8: four of the dead fill up. No more are hot than are kept."""
    module, block = biased(variant), profile("ffn", variant=variant)
    unseen = profile("ffn", variant=variant, dead=())
    found = rewritten(module, calibration(block, prune_dead=True, unseen={"ffn": unseen}), hot)
    gone = np.array(DEAD)[4:]
    (layer,) = found.layers
    assert layer.neurons is not None
    assert (layer.neurons.kept, layer.neurons.dead, layer.neurons.never) == (32, 8, 12)
    assert layer.neurons.lost == pytest.approx(unseen.firing[gone].sum() / unseen.nonzeros)
    assert layer.neurons.lost_of == 97
    assert layer.reason == "matches; 8 of 12 that never fired removed (approximate)"
    assert layer.hot == taken
    order = order_of(block, taken) if 0 < taken < 32 else torch.arange(D_FF)
    kept = order[~torch.isin(order, torch.from_numpy(gone))]
    assert_moved(found, rewritten(module, None), kept)
    shapes = [None if each is None else tuple(each.shape) for each in operands(found)]
    assert shapes == [(32, D_MODEL), (32,)] * (2 if variant == "gated" else 1) + [(32, D_MODEL), (D_MODEL,)]
    # The same block with neurons that do nothing in their place.
    down = module.ffn.down.weight  # type: ignore[union-attr]
    with torch.no_grad():
        down[:, torch.from_numpy(gone)] = 0  # type: ignore[index]
    theirs = run(rewritten(module, None).program)[0]
    torch.testing.assert_close(run(found.program)[0], theirs, rtol=2e-2, atol=2e-2)


def test_some_neurons_are_always_left() -> None:
    block = profile("ffn", dead=tuple(range(D_FF)))
    found = rewritten(Residual(Gated()), calibration(block, prune_dead=True))
    assert [tuple(each.shape) for each in operands(found) if each is not None] == [(8, D_MODEL)] * 3


# ---- neurons that cannot fire ----

CANNOT = (0, *range(5, 25), 39)


def unable(variant: str, activation: Any = torch.relu, biases: str = "gud", bias: float = -1.0) -> nn.Module:
    """Return a module in which some neurons have no weights before the activation, and a bias."""
    made = Gated(activation, biases=biases) if variant == "gated" else Plain(activation, biases=biases)
    part = made.gate if isinstance(made, Gated) else made.up
    with torch.no_grad():
        part.weight[list(CANNOT)] = 0
        if part.bias is not None:
            part.bias[list(CANNOT)] = bias
            part.bias[CANNOT[3]] = 0.0
    return Residual(made)


ACTIVATIONS: dict[str, Any] = {
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
    "fatrelu": lambda z: nn.functional.threshold(z, 0.5, 0.0),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("values", ["finite", "nan", "inf", "-inf", "large"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("variant", ["gated", "plain"])
def test_removing_them_changes_nothing(variant: str, activation: str, values: str) -> None:
    """Whatever x is: the one that stays makes NaN of NaN and of infinity, as all of them did."""
    bias = 0.25 if activation == "fatrelu" else -1.0
    module = unable(variant, ACTIVATIONS[activation], bias=bias)
    x = torch.randn(models.BATCH, models.SEQUENCE, D_MODEL, dtype=torch.bfloat16)
    if values == "large":
        x *= 1e37
    elif values != "finite":
        x[0, 0, 3] = float(values)
    found = rewritten(module, None)
    (layer,) = found.layers
    assert layer.neurons is not None
    assert (layer.neurons.unable, layer.neurons.kept, layer.neurons.dead) == (16, 24, 0)
    assert layer.reason == "matches; 16 that cannot fire removed"
    name = next(iter(models.example_inputs(found.program)))
    ours, theirs = (Runner(program)({name: x})[0] for program in (found.program, with_all(module)))
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2, equal_nan=True)
    dense = Runner(found.dense)({name: x})[0]
    if values in ("nan", "inf", "-inf"):
        assert ours[0, 0].isnan().all() and dense[0, 0].isnan().all()
        assert not ours[1].isnan().any()


def with_all(module: nn.Module) -> Any:
    """Return the rewritten program with all neurons: an order that keeps them is given."""
    return models.rewrite(canonical(module, torch.randn(models.BATCH, models.SEQUENCE, D_MODEL).bfloat16()))


def test_what_proves_nothing() -> None:
    """A positive bias fires; a zero row of up or a zero column of down adds inf * 0 where the gate overflows."""
    assert rewritten(unable("gated", bias=0.1), None).layers[0].neurons is None
    made = Gated()
    with torch.no_grad():
        made.up.weight[:20] = 0
        made.down.weight[:, 20:] = 0
    assert rewritten(Residual(made), None).layers[0].neurons is None
    nan = unable("gated")
    with torch.no_grad():
        nan.ffn.gate.bias.fill_(torch.nan)  # type: ignore[union-attr, operator]
    assert rewritten(nan, None).layers[0].neurons is None


def test_without_a_bias_and_with_a_profile() -> None:
    """The one that stays is not removed as dead either."""
    dead = tuple(sorted({*CANNOT, *DEAD}))
    found = rewritten(unable("gated", biases=""), calibration(profile("ffn", dead=dead), prune_dead=True))
    (layer,) = found.layers
    assert layer.neurons is not None
    kept = D_FF - len(dead) + 1
    assert layer.neurons.kept == -(-kept // 8) * 8
    assert layer.neurons.unable + layer.neurons.dead == D_FF - layer.neurons.kept
    gate = operands(found)[0]
    assert gate is not None and bool((gate == 0).all(1).any())


# ---- decisions are about what stays ----


@pytest.mark.parametrize("prune", [True, False])
def test_neurons_that_cannot_fire_are_not_decided_about(prune: bool) -> None:
    dead = tuple(sorted({*CANNOT, *DEAD}))
    known = profile("ffn", dead=dead)
    (neurons,), passed = asked(unable("gated"), calibration(known, prune_dead=prune))
    (layer,) = passed.layers
    assert len(neurons.kept) == layer.kept < D_FF
    assert neurons.rates is not None and np.array_equal(neurons.rates, known.rates[neurons.kept])
    gate = operands(passed)[0]
    assert gate is not None and len(gate) == layer.kept
    (neurons,), passed = asked(unable("gated"), None)
    assert len(neurons.kept) == passed.layers[0].kept == 24 and neurons.rates is None


def test_one_weight_among_many_is_enough_to_fire() -> None:
    """The first weights of a row may all be zero."""
    ffn = Gated(d_model=80)
    with torch.no_grad():
        ffn.gate.weight[:17] = 0
        ffn.gate.weight[16, 70] = 2.0
    x = torch.randn(models.BATCH, models.SEQUENCE, 80, dtype=torch.bfloat16)
    found = run_passes(export(Residual(ffn).bfloat16(), x), PassOptions(layers="all"))
    gate = operands(found)[0]
    assert gate is not None and len(gate) < D_FF and (gate[:, 70] == 2).any()


@pytest.mark.parametrize("build", ["shared", "unable", "both"])
def test_the_report_tells_what_was_really_removed(build: str) -> None:
    """The reason, the row of the report and the graph speak of the same neurons."""
    builds = {"shared": Written(twice, ffn=Gated()), "unable": unable("gated", biases=""), "both": unable("gated")}
    module = builds[build]
    dead = tuple(range(20)) if build != "unable" else ()
    known = calibration(*(profile(name, dead=dead) for name in ("ffn", "ffn#2")), prune_dead=build != "unable")
    advisor = Advisor(choose_target("h200", None), lambda block: [Tokens(1, 64, 64)])
    _, passed = asked(module, known, advisor=advisor)
    gate = operands(passed)[0]
    for layer in passed.layers:
        block = known.blocks[layer.module]
        assert gate is not None and layer.kept == len(gate)
        assert layer.neurons is not None and layer.neurons.density is not None
        assert (f" of the {layer.kept} neurons left" in layer.reason) == (layer.kept < D_FF), layer.reason
        assert layer.reason.startswith(percent(layer.neurons.density)), layer.reason
        assert (layer.kept == D_FF) == (build == "shared")
        if build == "shared":
            assert layer.neurons.density == pytest.approx(block.density, rel=1e-5)


def test_the_graph_has_the_same_form() -> None:
    """Moving them adds no operation."""
    found, plain = (rewritten(biased("gated"), known, 8) for known in (calibration(profile("ffn")), None))
    assert models.calls(found.program) == models.calls(plain.program)
    assert len(found.program.state_dict) == len(plain.program.state_dict)
    assert all(packet(node) is not torch.ops.aten.index_select for node in found.program.graph.nodes)
