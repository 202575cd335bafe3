"""`twellc.optimize(model, training=True)`: gradients, what is noted and counted, and what must go on working."""

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import twellc
from tests import models
from tests.models import Gated, Plain
from tests.twellc.eager.test_optimize import BLOCKS, BOTH, HUGGING_FACE, Ops, tokens
from tests.twellc.eager.test_written_out import FAMILIES
from twellc.base.errors import UserError
from twellc.eager.optimization import blocks_in_training
from twellc.training import L1Penalty, take_counts


def steps(model: Any, ids: Tensor, **options: Any) -> float:
    loss = model(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    return float(loss.detach())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(found: nn.Module, expected: nn.Module) -> None:
    one, other = gradients(found), gradients(expected)
    assert one.keys() == other.keys() and one
    for name, gradient in other.items():
        torch.testing.assert_close(one[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, at=name: f"{at}: {text}")


def in_training(name: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """Return a model of HUGGING_FACE for training, and the same without the ops: copies of what is made once."""
    model, dense = _in_training(name, **changes)
    return copy.deepcopy(model), copy.deepcopy(dense)


@functools.cache
def _in_training(name: str, **changes: Any) -> tuple[Any, Any]:
    make = HUGGING_FACE[name][0]
    no_dropout = {
        "t5": {"dropout_rate": 0.0},
        "gpt2": {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
        "opt": {"dropout": 0.0},
    }
    dense = make(**no_dropout.get(name, {}), **changes).train()
    model = copy.deepcopy(dense)
    assert twellc.optimize(model, training=True) is model
    return model, dense


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_gradients_of_hugging_face_models(name: str) -> None:
    model, dense = in_training(name)
    count = HUGGING_FACE[name][2]
    assert len(twellc.optimized_blocks(model)) == count
    with Ops() as ops:
        loss = steps(model, tokens())
    assert ops.counts == {"train_forward": count, "train_backward": count}
    assert loss == pytest.approx(steps(dense, tokens()), rel=1e-5)
    assert_same_gradients(model, dense)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ["gated", "plain", "squared", "threshold", "packed", "raw weights"])
@pytest.mark.parametrize("shape", [(2, 3), (4,), (0, 3)])
def test_forms_of_a_block(name: str, shape: tuple[int, ...]) -> None:
    dense = BLOCKS[name]().train()
    model = twellc.optimize(copy.deepcopy(dense), training=True)
    x = torch.randn(*shape, 16)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    with Ops() as ops:
        model(inputs[0]).square().sum().backward()
    assert ops.counts["train_forward"] == 1
    dense(inputs[1]).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-4)
    assert_same_gradients(model, dense)


def test_parameters_stay_as_they_are(tmp_path: Path) -> None:
    original, model = models.llama(), twellc.optimize(models.llama(), training=True).train()
    for (name, one), (other_name, other) in zip(model.named_parameters(), original.named_parameters(), strict=True):
        assert (name, one.stride()) == (other_name, other.stride()) and torch.equal(one, other)
    assert list(model.state_dict()) == list(original.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        steps(model, tokens())
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path)
    loaded = type(original).from_pretrained(tmp_path)
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)
    assert twellc.restore(model) is model
    assert [type(each) for each in model.modules()] == [type(each) for each in original.modules()]


def test_restore_where_another_class_is_derived() -> None:
    """As FSDP2 does."""
    block = twellc.optimize(Gated().train(), training=True)
    derived = type(block)
    block.__class__ = type("Sharded", (derived,), {})
    x = torch.randn(3, 16)
    expected = block(x)
    assert list(blocks_in_training(block)) == [""]
    twellc.restore(block)
    with Ops() as ops:
        torch.testing.assert_close(block(x), expected)
    assert not ops.counts and not twellc.optimized_blocks(block)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "opt"])
def test_the_last_call_decides_for_what(name: str) -> None:
    model, _ = in_training(name)
    with Ops() as ops, torch.no_grad():
        model.eval()(tokens())
    assert not ops.counts
    twellc.optimize(model)
    assert not blocks_in_training(model) and len(twellc.optimized_blocks(model)) == 2
    assert not all(parameter.is_contiguous() for parameter in model.parameters())
    twellc.optimize(model, training=True)
    assert len(blocks_in_training(model)) == 2
    assert all(parameter.is_contiguous() for parameter in model.parameters())


def test_dropout_switched_on_later_runs_the_original_and_the_penalty_says_so() -> None:
    dropout = nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), dropout, nn.Linear(40, 16)).train()
    twellc.optimize(model, training=True)
    penalty = L1Penalty(model, 1.0)
    dropout.p = 0.5
    with Ops() as ops:
        model(torch.randn(3, 16))
    assert not ops.counts
    with pytest.raises(UserError, match="ran its original forward"):
        penalty(0)
    dropout.p = 0.0
    model(torch.randn(3, 16))
    assert float(penalty(0)) > 0  # what was missed is forgotten


def test_copies_have_counted_nothing() -> None:
    model = twellc.optimize(models.llama(), training=True).train()
    penalty = L1Penalty(model, 1.0)
    steps(model, tokens())
    made = copy.deepcopy(model)  # with a graph that no deepcopy takes
    assert all(int(fired.tokens) == 0 for fired in take_counts(made).values())
    assert all(int(fired.tokens) == 10 for fired in take_counts(model).values())
    assert float(penalty(0)) > 0
    steps(made, tokens())


TRANSFORMS = {
    "grad": lambda block, x: torch.func.grad(lambda x: block(x).square().sum())(x),
    "vmap": lambda block, x: torch.func.vmap(block)(x[:, None]),
    "jvp": lambda block, x: torch.func.jvp(block, (x,), (torch.ones_like(x),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_transforms_of_torch_run_the_original(name: str, frozen: bool) -> None:
    dense = Gated().train().requires_grad_(not frozen)
    model = twellc.optimize(copy.deepcopy(dense), training=True)
    x = torch.randn(3, 16)
    torch.testing.assert_close(TRANSFORMS[name](model, x), TRANSFORMS[name](dense, x))


def test_inference_mode_before_training() -> None:
    """In inference mode the original runs; what is made in it can be counted on later."""
    block = twellc.optimize(Gated().train(), training=True)
    with torch.inference_mode():
        take_counts(block), block(torch.randn(3, 16))
    for _ in range(9):  # after the choice of hot neurons, too
        block(torch.randn(5, 16)).sum().backward()
    assert [int(fired.tokens) for fired in take_counts(block).values()] == [45]


INTERCEPTIONS = {
    "hook": lambda inner, note: inner.register_forward_hook(lambda *_: note()),
    "backward hook": lambda inner, note: inner.register_full_backward_hook(lambda *_: note()),
    "backward pre-hook": lambda inner, note: inner.register_full_backward_pre_hook(lambda *_: note()),
    "another forward": lambda inner, note: setattr(inner, "forward", lambda x, old=inner.forward: (note(), old(x))[1]),
}


@pytest.mark.parametrize("name", INTERCEPTIONS)
def test_what_looks_into_a_block_sees_it(name: str) -> None:
    block, seen = twellc.optimize(Gated().train(), training=True), []
    INTERCEPTIONS[name](block.down, lambda: seen.append(name))
    block(torch.randn(3, 16)).sum().backward()
    assert seen == [name]


def hidden_of(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    h: dict[str, Tensor] = {}
    g: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if path.endswith(".mlp"):
            down, activation = module.down_proj, module.act_fn
        elif hasattr(module, "fc1"):
            down, activation = module.fc2, module.activation_fn
        else:
            continue
        down.register_forward_pre_hook(lambda _, args, at=path: h.update({at: args[0]}))
        activation.register_forward_hook(lambda *args, at=path: g.update({at: args[2]}))
    model(input_ids=ids)
    return h, g


def term_of(h: dict[str, Tensor]) -> Tensor:
    return torch.stack([each.abs().sum(-1).mean() for each in h.values()]).mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_penalty_counts_and_gradients(name: str, checkpointed: bool) -> None:
    model, dense = in_training(name)
    penalty = L1Penalty(model, 2.0, warm_up=3)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    h, g = hidden_of(dense, tokens())
    (model(input_ids=tokens(), labels=tokens(), use_cache=False).loss + penalty(1)).backward()
    (dense(input_ids=tokens(), labels=tokens()).loss + term_of(h)).backward()
    torch.testing.assert_close(penalty.value, term_of(h).detach())
    assert [penalty.coefficient(step) for step in (0, 1, 3, 9)] == [0.5, 1.0, 2.0, 2.0]
    assert_same_gradients(model, dense)
    counts = take_counts(model)
    assert list(counts) == list(g)
    for path, fired in counts.items():  # not twice where a forward was computed again
        assert torch.equal(fired.counts, (g[path] != 0).flatten(0, -2).sum(0)) and int(fired.tokens) == 10
        assert float(fired.density) == pytest.approx(float((g[path] != 0).double().mean()))
    assert all(int(fired.tokens) == 0 for fired in take_counts(model).values())


def test_reentrant_checkpointing_is_refused() -> None:
    model, _ = in_training()
    penalty = L1Penalty(model, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": True})
    model(input_ids=tokens(), labels=tokens(), use_cache=False)
    with pytest.raises(UserError, match="use_reentrant"):
        penalty(0)


def test_reentry_of_a_part_is_refused() -> None:
    """Else the L1 term would be that of the other layers."""
    model = nn.ModuleList([Plain(), Plain()]).train()
    twellc.optimize(model, training=True)
    penalty = L1Penalty(model, 1.0)
    x = torch.randn(3, 16, requires_grad=True)
    for _ in range(2):
        y = model[1](checkpoint(model[0], x, use_reentrant=True))
        with pytest.raises(UserError, match=r"layer 0: ran without gradients.*use_reentrant"):
            penalty(0)
        y.sum().backward()
    with torch.no_grad():
        model[0](x)  # as to measure in between
    model[1](model[0](x))
    assert penalty(0) > 0


def test_activation_checkpointing_of_calls_whose_backward_comes_later() -> None:
    """As layers that share a block: what a call keeps when it is computed again has the form that it had."""

    class Hot(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name() == "twell::train_forward":
                seen.append(args[-2])
            return func(*args, **(kwargs or {}))

    block = twellc.optimize(Plain(d_ff=512, biases="u").train(), training=True)
    with torch.no_grad():
        block.up.bias.fill_(-50)
    seen: list[int] = []
    for _ in range(4):
        seen.clear()
        with Hot():
            x = torch.randn(2, 16)
            for _ in range(4):
                x = checkpoint(block, x, use_reentrant=False)
            x.sum().backward()
        assert len(seen) == 8 and seen[:4] == seen[4:]
    assert seen == [0] * 8  # it has changed, between two steps


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "opt"])
def test_autocast(name: str) -> None:
    model, dense = in_training(name)
    penalty, losses = L1Penalty(model, 1e-3), []
    for each in (model, dense):
        with torch.autocast("cpu", dtype=torch.bfloat16), Ops() as ops:
            loss = each(input_ids=tokens(), labels=tokens()).loss
        losses.append(float(loss.detach()))
        loss.backward()
        assert ops.counts["train_forward"] == (2 if each is model else 0)
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert penalty(0).dtype == torch.float32
    for path, gradient in gradients(dense).items():
        found = gradients(model)[path]
        assert found.dtype == torch.float32
        if not path.endswith("k_proj.bias"):  # 0 but for rounding
            assert (found - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, path


def test_accumulation_and_frozen_parameters() -> None:
    model, dense = in_training()
    for each in (model, dense):
        each.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        for seed in range(2):
            steps(each, tokens() + seed)
    assert_same_gradients(model, dense)


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "opt"])
def test_compiled_model(name: str) -> None:
    model, dense = in_training(name)
    penalty = L1Penalty(model, 1.0)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        loss = compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss + 0 * penalty(0)
    loss.backward()
    steps(dense, tokens())
    assert_same_gradients(model, dense)
    counts = take_counts(compiled)
    assert list(counts) == list(blocks_in_training(model))
    assert all(int(fired.tokens) == 30 for fired in counts.values())


def test_what_the_ops_do_not_take_is_computed_densely_and_counted() -> None:
    """A float16 input for float32 weights fails as in the dense model; NaN passes through."""
    dense = Gated().train()
    model = twellc.optimize(copy.deepcopy(dense), training=True)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.randn(2, 16).half())
    x = torch.randn(2, 16)
    x[0, 0] = float("nan")
    assert model(x)[0].isnan().all() and not model(x)[1].isnan().any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: nn.Sequential(Gated()), lambda: nn.TransformerEncoderLayer(16, 2, 40, dropout=0.0)]
)
def test_an_exported_program_is_that_of_the_original(make: Any, strict: bool, training: bool) -> None:
    """And what is compiled before and after is that of the ops."""
    dense = make().train(training)
    model = twellc.optimize(copy.deepcopy(dense), training=True)
    assert len(twellc.optimized_blocks(model)) == 1
    penalty, x = L1Penalty(model, 1.0), torch.randn(2, 3, 16)

    def compiled() -> None:
        torch.compiler.reset()
        torch.compile(model, backend="eager")(x)
        if training:
            penalty(0)
            assert float(penalty.value or 0) > 0

    compiled()
    with torch.no_grad():
        program: Any = torch.export.export(model, (x,), strict=strict).module()
        assert torch.equal(program(x), dense(x))
    assert not any("twell" in str(node.target) for node in program.graph.nodes)
    compiled()


class _Straight(torch.autograd.Function):
    """ReLU whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class _Through(nn.Module):
    """A block whose activation has a gradient of its own, alone or in a layer."""

    def __init__(self, residual: bool, elsewhere: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 40), nn.Linear(40, 16)
        self.residual, self.elsewhere = residual, elsewhere

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(_Straight.apply(x) if self.elsewhere else x)
        y: Tensor = self.fc2(torch.relu(hidden) if self.elsewhere else _Straight.apply(hidden))
        return x + y if self.residual else y


@pytest.mark.parametrize("residual", [False, True])
def test_a_gradient_that_is_not_that_of_the_forward(residual: bool, caplog: pytest.LogCaptureFixture) -> None:
    dense, x = nn.Sequential(_Through(residual)), torch.randn(2, 5, 16)
    model = copy.deepcopy(dense)
    with caplog.at_level("INFO", "twellc"), pytest.warns(UserWarning, match="no submodule is a feed-forward block"):
        twellc.optimize(model, training=True)
    assert "it calls _Straight, a torch.autograd.Function" in caplog.text
    for each in (dense, model):
        each(x).square().sum().backward()
    for one, other in zip(dense.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert len(twellc.optimized_blocks(twellc.optimize(dense.eval()))) == 1  # inference has no gradients
    if residual:  # elsewhere in the layer it may stand
        layer = nn.Sequential(_Through(residual, elsewhere=True))
        assert len(twellc.optimized_blocks(twellc.optimize(layer, training=True))) == 1


def test_no_block_in_training_and_no_forward() -> None:
    with pytest.raises(UserError, match=r"LlamaForCausalLM: has no feed-forward block in training.*optimize"):
        L1Penalty(models.llama(), 1.0)
    penalty = L1Penalty(twellc.optimize(models.llama(), training=True), 1.0)
    with pytest.raises(UserError, match="no block has noted one"):
        penalty(0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Gated(between=nn.Dropout(0.1)),
        lambda: Plain(between=lambda h: nn.functional.dropout(h, 0.1)),
        lambda: nn.TransformerEncoderLayer(16, 2, 40, dropout=0.1),
    ],
)
def test_dropout_inside_of_a_block_is_called_that(make: Any) -> None:
    model = make().train()
    said = r"the model itself: dropout inside of it is switched on; its probability must be 0"
    with pytest.warns(UserWarning, match=said):
        twellc.optimize(model, training=True)
    with pytest.raises(UserError, match=rf"has no feed-forward block in training \({said}"):
        L1Penalty(model, 1.0)


def test_penalty_is_a_mean_over_blocks_that_saw_tokens_frozen_ones_too() -> None:
    blocks = twellc.optimize(nn.Sequential(Gated(), Gated(), Gated()).train(), training=True)
    penalty, x = L1Penalty(blocks, 1.0), torch.randn(6, 16)
    each = []
    for block in blocks:
        block(x)
        each.append(float(penalty(0)))
    blocks[0](x), blocks[1](x), blocks[2](x[:0])
    assert float(penalty(0)) == pytest.approx((each[0] + each[1]) / 2)
    blocks[2](x[:0])
    assert float(penalty(0)) == 0
    blocks[0].requires_grad_(False)
    blocks[0](x), blocks[1](x)
    assert float(penalty(0)) == pytest.approx((each[0] + each[1]) / 2)


def test_modules_that_are_named_as_wrappers_name_theirs() -> None:
    """Only a wrapper's part of a path is left out: two blocks must not have one name."""
    inner = nn.ModuleDict({"module": nn.ModuleDict({"mlp": Gated()}), "mlp": Gated()})
    model = nn.ModuleDict({"part": nn.DataParallel(twellc.optimize(inner.train(), training=True))})
    assert list(take_counts(model)) == ["part.module.mlp", "part.mlp"]


def test_calls_between_two_penalties_count_by_their_tokens() -> None:
    block = twellc.optimize(Gated().train(), training=True)
    penalty = L1Penalty(block, 1.0)
    one, other = torch.randn(6, 16), torch.randn(2, 16)
    block(one), block(other)
    together = float(penalty(0))
    block(torch.cat([one, other]))
    assert together == pytest.approx(float(penalty(0)), rel=1e-5)


@pytest.mark.slow
def test_dropout_inside_of_the_block() -> None:
    """Behind the activation, as BART has it; behind the block it does not matter."""
    model, inputs, _ = FAMILIES["bart"]()
    layers = (*model.model.encoder.layers, *model.model.decoder.layers)
    for layer in layers:
        layer.activation_dropout = 0.1
    with pytest.warns(UserWarning, match=r"no submodule.*dropout inside of it is switched on"):
        twellc.optimize(model, training=True)
    for layer in layers:
        layer.activation_dropout = 0.0
    twellc.optimize(model, training=True)
    penalty = L1Penalty(model.train(), 1.0)
    for dropout, count in ((0.0, 3), (0.1, 2)):
        layers[0].activation_dropout = dropout
        with Ops() as ops:
            model(**inputs)
        assert ops.counts["train_forward"] == count
        if count == 3:
            penalty(0)
    with pytest.raises(UserError, match=r"model\.encoder\.layers\.0.*ran its original forward"):
        penalty(0)


class Checkpointed(nn.Module):
    """A layer that checkpoints its block, or the down projection alone."""

    def __init__(self, reentrant: bool, between: bool) -> None:
        super().__init__()
        self.before, self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 40), nn.Linear(40, 16)
        self.reentrant, self.between = reentrant, between

    def run(self, part: Any, x: Tensor) -> Tensor:
        checkpoints = self.training and not torch.compiler.is_compiling()
        y: Tensor = checkpoint(part, x, use_reentrant=self.reentrant) if checkpoints else part(x)
        return y

    def down(self, hidden: Tensor) -> Tensor:
        y: Tensor = self.fc2(torch.relu(hidden))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.between:
            return x + self.run(self.down, self.fc1(x))
        x = self.before(x)
        return x + self.run(lambda x: self.down(self.fc1(x)), x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_checkpoints_its_block_alone(reentrant: bool) -> None:
    """What is computed again is outside of the layer's forward, where its projections are what they were."""
    dense = Checkpointed(reentrant, between=False).train()
    layer = twellc.optimize(copy.deepcopy(dense), training=True)
    assert len(twellc.optimized_blocks(layer)) == 1
    penalty, x = L1Penalty(layer, 1.0), torch.randn(2, 3, 16)
    for each in (layer, dense):
        each(x).square().sum().backward()
    assert_same_gradients(layer, dense)
    with pytest.raises(UserError, match="ran its original forward"):
        penalty(0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_between_the_projections(reentrant: bool) -> None:
    """Its gradients could not be right."""
    layer = twellc.optimize(Checkpointed(reentrant, between=True).train(), training=True)
    assert len(twellc.optimized_blocks(layer)) == 1
    with pytest.raises(UserError, match="its down projection runs in a checkpoint, and its up projection outside"):
        layer(torch.randn(2, 3, 16, requires_grad=True))
