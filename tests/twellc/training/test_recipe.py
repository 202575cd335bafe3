"""`twellc.training`: ReLU for SiLU and GELU, dead neurons, profiles of training, and the log."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import twellc
from tests import models
from tests.models import Gated, Plain, Written
from tests.twellc.eager.test_optimize import Ops, packed, tokens
from tests.twellc.eager.test_written_out import WIDTHS
from tests.twellc.training.test_optimize import assert_same_gradients
from twellc.base.errors import UserError
from twellc.eager.optimization import blocks_in_training
from twellc.eager.training_block import BlendedActivation
from twellc.firing.profile import FiringProfile
from twellc.training import (
    Blend,
    FiringWindow,
    L1Penalty,
    SparsityCallback,
    TrainingLog,
    reinitialise_dead,
    sparsify,
    take_counts,
)
from twellc.training.counts import Fired
from twellc.training.log import LoggedBlock, LoggedRun, LoggedStep, LogWriter

bart = models.family("Bart", "ForConditionalGeneration", **WIDTHS, vocab_size=96, max_position_embeddings=64)


DENSE = {
    "llama": (lambda: models.llama("silu"), "hidden_act", 2),
    "neox": (lambda: models.gpt_neox(hidden_act="gelu"), "hidden_act", 2),
    "gemma": (models.family("Gemma2", **models.WIDE, head_dim=8), "hidden_activation", 2),
    "t5": (lambda: models.t5(feed_forward_proj="gated-gelu"), "dense_act_fn", 2),
    "opt": (lambda: models.opt(activation_function="gelu"), "activation_function", 2),
    "bart": (lambda: bart(activation_function="gelu"), "activation_function", 3),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DENSE)
def test_sparsify_makes_what_is_saved_load_with_relu(name: str, tmp_path: Path) -> None:
    make, field, count = DENSE[name]
    model = make().eval()
    inputs = {"input_ids": tokens()} | ({"decoder_input_ids": tokens()} if name in ("t5", "bart") else {})
    with torch.no_grad():
        before = model(**inputs).logits
    blend = sparsify(model)
    assert len(blend.modules) == count and blend.share(0) == 1
    assert getattr(model.config, field) == "relu"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        after = model(**inputs).logits
        assert torch.equal(loaded(**inputs).logits, after) and not torch.allclose(after, before)
    assert len(twellc.optimized_blocks(twellc.optimize(loaded))) == count


def test_blend_moves_from_the_one_to_the_other() -> None:
    model, x = Gated(nn.SiLU()).train(), torch.randn(5, 16)
    silu, relu = Gated(nn.SiLU()), Gated(nn.ReLU())
    for other in (silu, relu):
        other.load_state_dict(model.state_dict(), strict=False)
    blend = sparsify(model, steps=4)
    twellc.optimize(model, training=True)
    penalty = L1Penalty(model, 1.0)
    for step, share in ((0, 0.0), (1, 0.25), (4, 1.0), (9, 1.0)):
        blend.set_step(step)
        z, u = model.gate(x), model.up(x)
        h = ((1 - share) * functional.silu(z) + share * torch.relu(z)) * u
        torch.testing.assert_close(model(x), model.down(h))
        penalty(0)
        torch.testing.assert_close(penalty.value, h.abs().sum(-1).mean().detach())
        (fired,) = take_counts(model).values()
        assert (float(fired.density) == 1) == (share < 1) and int(fired.tokens) == 5


def shares(model: nn.Module, share: float) -> None:
    for each in model.modules():
        if isinstance(each, BlendedActivation):
            each.share = share


@pytest.mark.parametrize("name", ["opt", pytest.param("bart", marks=pytest.mark.slow)])
def test_blend_of_blocks_that_are_written_out(name: str, tmp_path: Path) -> None:
    """In training, in eval mode, saved, and restored, a model is what it would be without the ops."""
    changes = {"activation_function": "gelu", "dropout": 0.0}
    model = (models.opt if name == "opt" else bart)(**changes)
    dense, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    blends = [sparsify(each, steps=4) for each in (model, dense)]
    twellc.optimize(model, training=True)
    penalty = L1Penalty(model, 1.0)
    assert list(blocks_in_training(model)) == blends[0].modules and len(blends[0].modules) == DENSE[name][2]
    inputs = {"input_ids": tokens(), "labels": tokens()}
    for step, share in ((0, 0.0), (1, 0.25), (4, 1.0)):
        for blend, each in zip(blends, (model, dense), strict=True):
            blend.set_step(step)
            each.train().zero_grad()
        sums: list[torch.Tensor] = []

        def note(*args: Any, sums: list[torch.Tensor] = sums) -> None:
            sums.append(args[2].abs().sum(-1).mean())

        activations = [each for each in dense.modules() if isinstance(each, BlendedActivation)]
        handles = [each.register_forward_hook(note) for each in activations]
        with Ops() as ops:
            (model(**inputs).loss + penalty(0)).backward()
        (dense(**inputs).loss + torch.stack(sums).mean()).backward()
        for handle in handles:
            handle.remove()
        assert set(ops.counts) == (set() if share < 1 else {"train_forward", "train_backward"})
        torch.testing.assert_close(penalty.value, torch.stack(sums).mean().detach())
        assert_same_gradients(model, dense)
        assert all((float(fired.density) == 1) == (share < 1) for fired in take_counts(model).values())
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(**inputs).logits, dense.eval()(**inputs).logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    twellc.restore(model)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, dense(**inputs).logits)
        assert torch.equal(model(**inputs).logits, dense(**inputs).logits)
    assert not twellc.optimized_blocks(model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [lambda: models.llama("silu"), lambda: models.opt(activation_function="gelu")])
def test_inference_on_the_way(make: Any) -> None:
    """The ops compute ReLU: they wait for it."""
    model = make().eval()
    sparsify(model, steps=4)
    dense = copy.deepcopy(model)
    twellc.optimize(model)
    for share in (0.5, 1.0, 0.5):
        for each in (model, dense):
            shares(each, share)
        with torch.no_grad(), Ops() as ops:
            found = model(tokens()).logits
        assert sum(ops.counts.values()) == (2 if share == 1 else 0)
        with torch.no_grad():
            torch.testing.assert_close(found, dense(tokens()).logits)


# Of the last one the block has a ReLU; what is SiLU stands before it.
NO_WAY: dict[str, tuple[Any, bool]] = {
    "both activated": (lambda m, x: m.down(m.act(m.gate(x)) * m.act(m.up(x))), True),
    "squared": (lambda m, x: m.down(m.act(m.up(x)).square()), True),
    "elsewhere": (lambda m, x: m.down(torch.relu(m.up(m.act(x)))), False),
}


@pytest.mark.parametrize("name", NO_WAY)
def test_what_has_no_way_to_relu(name: str) -> None:
    function, at_once = NO_WAY[name]
    layers = {"gate": nn.Linear(16, 40), "up": nn.Linear(16, 40), "down": nn.Linear(40, 16)}
    if name != "both activated":
        del layers["gate"]
    model = models.Residual(Written(function, **layers, act=nn.SiLU()))
    for steps in (4, 0):
        if at_once and steps == 0:
            assert sparsify(model).modules == ["ffn"]
        else:
            with pytest.raises(UserError, match="no feed-forward block with a SiLU or GELU to replace"):
                sparsify(model, steps=steps)
    assert type(model.ffn.act) is (nn.ReLU if at_once else nn.SiLU)


def test_layers_of_torch() -> None:
    """An encoder layer goes in eval mode by what its activation was when it was made."""
    decoder = nn.TransformerDecoderLayer(16, 2, 40, activation=nn.GELU())
    assert sparsify(decoder).modules == [""] and type(decoder.activation) is nn.ReLU
    with pytest.raises(UserError, match="no feed-forward block with a SiLU or GELU to replace"):
        sparsify(nn.TransformerEncoderLayer(16, 2, 40, activation=nn.GELU()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()], ids=["gelu", "tanh", "silu"])
@pytest.mark.parametrize("form", [Gated, Plain])
def test_forms_that_get_a_relu(activation: nn.Module, form: Any) -> None:
    model = form(activation)
    assert sparsify(model).modules == [""] and type(model.activation) is nn.ReLU
    assert len(blocks_in_training(twellc.optimize(model, training=True))) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DENSE)
def test_a_configuration_says_how_far_the_way_has_come(name: str) -> None:
    make, field, _ = DENSE[name]
    model = make()
    before = getattr(model.config, field)
    blend = sparsify(model, steps=4)
    said = []
    for step in (0, 1, 4):
        blend.set_step(step)
        said.append(getattr(model.config, field))
    assert said == [before, f"{before}, 1/4 of the way to relu", "relu"]


def test_an_exception_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated(nn.SiLU())
    monkeypatch.setattr("twellc.training.relu.blocks_at", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sparsify(model)
    assert type(model.activation) is nn.SiLU


@pytest.mark.parametrize("model", [Gated(nn.Sigmoid()), Gated(nn.ReLU()), models.opt(), nn.Linear(4, 4)], ids=str)
def test_no_activation_to_replace(model: nn.Module) -> None:
    kinds = [type(each) for each in model.modules()]
    with pytest.raises(UserError, match="no feed-forward block with a SiLU or GELU to replace"):
        sparsify(model)
    assert [type(each) for each in model.modules()] == kinds


def test_a_configuration_that_means_more_than_the_blocks() -> None:
    """Its head has the same activation, by the same word in the configuration."""
    import transformers

    class Headed(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.act = transformers.activations.ACT2FN[config.hidden_act]

    model = Headed(models.llama("silu").config)
    with pytest.raises(UserError, match=r"configuration cannot say .*another activation at act"):
        sparsify(model)
    assert model.config.hidden_act == "silu"
    assert type(model.model.layers[0].mlp.act_fn) is type(model.act)


def test_steps_of_a_blend() -> None:
    assert [Blend([], [], 4).share(step) for step in (0, 2, 4, 8)] == [0, 0.5, 1, 1]
    infinite = torch.tensor([float("inf")])
    assert BlendedActivation(nn.SiLU())(infinite) == infinite


def gate_of(how: str) -> tuple[Any, nn.Parameter, int]:
    """Return a block, the parameter of its gate, and the dimension of its neurons there."""
    if how == "gated":
        block: Any = Gated()
        return block, block.gate.weight, 0
    if how == "packed":
        block = Written(packed, both=nn.Linear(16, 80, bias=False), down=nn.Linear(40, 16))
        return block, block.both.weight, 0
    block = Written(lambda m, x: torch.relu(x @ m.up) @ m.down, up=torch.randn(16, 40), down=torch.randn(40, 16))
    return block, block.up, 1


@pytest.mark.parametrize("how", ["gated", "packed", "transposed"])
def test_reinitialise_dead(how: str) -> None:
    block, weight, dim = gate_of(how)
    twellc.optimize(block.train(), training=True)
    before = weight.detach().clone()
    counts = torch.ones(40, dtype=torch.int64)
    counts[[3, 17]] = 0
    fired = {"": Fired(counts, torch.tensor(9))}
    assert int(reinitialise_dead(block, fired, step=5, seed=1)) == 2
    moved = (weight != before).any(1 - dim).nonzero()[:, 0].tolist()
    assert moved == [3, 17]
    noise = (weight.detach() - 0.9 * before).select(dim, 3) / 0.1
    assert float(noise.std()) == pytest.approx(0.02, rel=0.5) and noise.abs().max() < 0.1
    drawn = weight.detach().clone()
    for step, seed, same in ((5, 1, True), (6, 1, False), (5, 2, False)):
        with torch.no_grad():
            weight.copy_(before)
        reinitialise_dead(block, fired, step=step, seed=seed)
        assert torch.equal(weight, drawn) == same


OUT_OF_RANGE: dict[str, Callable[[Any, Any], Any]] = {
    r"share: is out of range; got 1\.5": lambda m, fired: reinitialise_dead(m, fired, step=0, share=1.5),
    "std: is out of range; got -1": lambda m, fired: reinitialise_dead(m, fired, step=0, std=-1.0),
    "std: is out of range; got nan": lambda m, fired: reinitialise_dead(m, fired, step=0, std=float("nan")),
    "step: is out of range; got -1": lambda m, fired: reinitialise_dead(m, fired, step=-1),
    r"step: is out of range; got 1\.5": lambda m, fired: reinitialise_dead(m, fired, step=1.5),  # type: ignore[arg-type]
    "seed: is out of range": lambda m, fired: reinitialise_dead(m, fired, step=0, seed=None),  # type: ignore[arg-type]
    "fired: is not of this model": lambda m, _: reinitialise_dead(m, {}, step=0),
    "profile_steps: is out of range; got -1": lambda m, _: SparsityCallback(m, profile_steps=-1),
    "coefficient: is out of range; got 'a'": lambda m, _: L1Penalty(m, "a"),  # type: ignore[arg-type]
    "coefficient: is out of range; got -1": lambda m, _: L1Penalty(m, -1.0),
    "coefficient: is out of range; got inf": lambda m, _: L1Penalty(m, float("inf")),
    "coefficient: is out of range; got nan": lambda m, _: L1Penalty(m, float("nan")),
    "warm_up: is out of range; got nan": lambda m, _: L1Penalty(m, 1.0, warm_up=float("nan")),  # type: ignore[arg-type]
    "takes a torch.nn.Module; got 'a path'": lambda m, _: L1Penalty("a path", 1.0),  # type: ignore[arg-type]
    "step: is out of range; got -5; expected an integer from 0 on": lambda m, _: L1Penalty(m, 1.0)(-5),
    "steps: is out of range; got '3'": lambda m, _: sparsify(m, steps="3"),  # type: ignore[arg-type]
    "steps: is out of range; got -1": lambda m, _: sparsify(m, steps=-1),
}


def test_numbers_out_of_range() -> None:
    block = twellc.optimize(Gated().train(), training=True)
    fired = take_counts(block)
    for message, call in OUT_OF_RANGE.items():
        with pytest.raises(UserError, match=message):
            call(block, fired)


def test_a_penalty_whose_blocks_are_gone() -> None:
    block = twellc.optimize(Gated().train(), training=True)
    penalty = L1Penalty(block, 1.0)
    twellc.optimize(twellc.restore(block), training=True)(torch.randn(3, 16))
    with pytest.raises(UserError, match=r"its blocks are no longer those of the model.*Make a new L1Penalty"):
        penalty(0)
    penalty.close()
    with pytest.raises(UserError, match="L1 term: was closed"):
        penalty(0)


@pytest.mark.parametrize("weight", [None, nn.Parameter(torch.randn(40))])
def test_a_gate_that_is_not_where_it_was(weight: Any) -> None:
    """As where FullyShardedDataParallel has put a flat part in its place: its numbers are none of the neurons'."""
    block = twellc.optimize(Gated().train(), training=True)
    block(torch.randn(3, 16))
    fired = take_counts(block)
    block.gate.weight = weight
    with pytest.raises(UserError, match=r"its gate weight is not where it was.*fully_shard"):
        reinitialise_dead(block, fired, step=0)
    assert int(take_counts(block)[""].tokens) == 0


def test_without_tokens_nothing_is_dead() -> None:
    block = twellc.optimize(Gated().train(), training=True)
    before = block.gate.weight.detach().clone()
    assert int(reinitialise_dead(block, take_counts(block), step=0)) == 0
    assert torch.equal(block.gate.weight, before)


def test_profile_of_training_is_that_of_twellc_profile(tmp_path: Path) -> None:
    """Of weights that do not move, and data without padding."""
    folder = models.save(models.llama(), tmp_path / "model")
    model: Any = type(models.llama()).from_pretrained(folder)
    twellc.optimize(model.train(), training=True)
    window = FiringWindow(model)
    ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(5))
    model(input_ids=ids[:2]), model(input_ids=ids[2:])
    window.close()
    model(input_ids=ids)
    found = window.profile(folder, "ids")
    np.save(tmp_path / "ids.npy", ids.numpy())
    expected = twellc.profile(folder, tmp_path / "ids.npy")
    assert list(found.blocks) == list(expected.blocks)
    assert found.model.sha256 == expected.model.sha256 and found.model.dtype == expected.model.dtype == "bf16"
    assert (found.data[0].sequences, found.tokens) == (4, 32)
    for path, block in expected.blocks.items():
        for name in ("firing", "rows", "tiles", "positions"):  # the traced model may round otherwise
            apart = abs(getattr(found.blocks[path], name) - getattr(block, name)).sum()
            assert apart <= (0 if path == "model.layers.0.mlp" else 0.01 * block.nonzeros), (path, name)
    file = tmp_path / "p.profile"
    found.write(file)
    assert FiringProfile.read(file).tokens == 32


def test_profile_of_experts_that_no_token_reached_and_of_what_is_still_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    experts = twellc.optimize(nn.ModuleList([Gated(), Gated(), Gated()]).train(), training=True)
    window = FiringWindow(experts)
    experts[2](torch.randn(6, 16)), experts[0](torch.randn(2, 16))
    first = window.profile(tmp_path, "data")
    assert {path: block.tokens for path, block in first.blocks.items()} == {"0": 2, "2": 6}
    experts[1](torch.randn(4, 16)), experts[0](torch.randn(3, 16))
    assert {path: block.tokens for path, block in first.blocks.items()} == {"0": 2, "2": 6}
    second = window.profile(tmp_path, "data")
    assert {path: block.tokens for path, block in second.blocks.items()} == {"0": 5, "1": 4, "2": 6}


def test_profile_of_empty_sequences(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    block = twellc.optimize(Gated().train(), training=True)
    window = FiringWindow(block)
    for shape in ((2, 0, 16), (0, 3, 16), (2, 3, 16)):
        block(torch.randn(shape))
    profile = window.profile(tmp_path, "data")
    assert (profile.tokens, profile.data[0].sequences) == (6, 4)


def test_profiles_that_there_are_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    block = twellc.optimize(Gated().train(), training=True)
    window = FiringWindow(block)
    with pytest.raises(UserError, match="no step was counted"):
        window.profile(tmp_path, "data")
    block(torch.full((2, 16), float("nan")))
    with pytest.raises(UserError, match="activations were NaN"):
        window.profile(tmp_path, "data")


BLOCKS = [LoggedBlock("a", 8), LoggedBlock("b", 16)]


def record(step: int, **changes: Any) -> LoggedStep:
    values: dict[str, Any] = {"step": step, "loss": 2.0, "l1": 1.0, "coefficient": 0.1, "tokens": 64, "relu": 1.0}
    values |= {"density": [0.5, 0.25], "dead": [0.0, 0.125], "reinitialised": 0}
    return LoggedStep(**{**values, **changes})


def test_paths_may_be_texts(tmp_path: Path) -> None:
    """As everywhere else in the API."""
    folder, log = models.save(models.llama(), tmp_path / "model"), tmp_path / "log.jsonl"
    model = twellc.optimize(models.llama().train(), training=True)
    callback = SparsityCallback(model, log=str(log), began_with=str(folder))
    window = FiringWindow(model)
    callback.on_train_begin(None, SimpleNamespace(global_step=0), None)
    model(input_ids=torch.randint(3, 96, (2, 8)))
    assert TrainingLog.read(str(log)) == TrainingLog.read(log)
    assert TrainingLog.read(log).run.sha256 == window.profile(str(folder), "ids").model.sha256


def test_log_round_trip_and_going_on(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    writer = LogWriter(path, "m", "ab", BLOCKS, 0)
    records = [record(10), record(20, loss=float("nan")), record(30, eval_loss=1.5)]
    for each in records:
        writer.add(each)
    found = TrainingLog.read(path)
    assert (found.model, [each.step for each in found.steps]) == ("m", [10, 20, 30])
    assert found.steps[0] == records[0] and found.steps[2] == records[2] and found.steps[1].loss != found.steps[1].loss
    LogWriter(path, "m", "ab", BLOCKS, 20).add(record(25))
    assert [each.step for each in TrainingLog.read(path).steps] == [10, 20, 25]
    with pytest.raises(UserError, match="another model"):
        LogWriter(path, "m", "cd", BLOCKS, 20)
    with pytest.raises(UserError, match="another model"):
        LogWriter(path, "m", "ab", BLOCKS[:1], 20)
    assert [each.step for each in TrainingLog.read(path).steps] == [10, 20, 25]
    LogWriter(path, "m", "cd", BLOCKS, 0, overwrite=True)
    assert TrainingLog.read(path).steps == []


START = '{"format": "twellc training log", "version": '
RUN = json.dumps(LoggedRun("twellc training log", 1, "", "", "", BLOCKS).to_json()) + "\n"
DAMAGED = {
    "": "is not a log",
    "{": "lines of JSON",
    '{"format": "x"}': "is not a log",
    f"{START}9}}": "another version",
    f"{START}1}}": "damaged",
    json.dumps(LoggedRun("twellc training log", 1, "", "", "", []).to_json()): "it has no blocks",
    RUN + json.dumps(record(1, dead=[0.5]).to_json()): "line 2 has other blocks",
    RUN + json.dumps({**record(1).to_json(), "density": [2, 0]}): "damaged",
}


def test_damaged_logs(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for lines, message in DAMAGED.items():
        path.write_text(lines)
        with pytest.raises(UserError, match=message):
            TrainingLog.read(path)
    with pytest.raises(UserError, match="there is no such file"):
        TrainingLog.read(tmp_path / "none")


def test_a_line_that_was_cut_short(tmp_path: Path) -> None:
    """The run was ended as it wrote it: it goes on without."""
    path = tmp_path / "log.jsonl"
    writer = LogWriter(path, "m", "ab", BLOCKS, 0)
    for step in (1, 2):
        writer.add(record(step))
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert [each.step for each in TrainingLog.read(path).steps] == [1]
    LogWriter(path, "m", "ab", BLOCKS, 2).add(record(2))
    assert path.read_text() == whole
    path.write_text(whole.replace('"step": 1, ', '"step" 1, '))
    with pytest.raises(UserError, match="lines of JSON"):
        TrainingLog.read(path)
