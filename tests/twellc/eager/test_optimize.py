"""`twellc.optimize` on eager modules: real, tiny Hugging Face models, and what must go on working."""

import copy
import functools
import inspect
import io
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import twellc
from tests import models
from tests.models import Gated, Plain, Written
from twellc.base.errors import UserError


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "twell":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def ops_of(module: nn.Module, *inputs: Any, **named: Any) -> tuple[Any, dict[str, int]]:
    """Run a module as for inference; return its result and how often each `twell` op ran."""
    with torch.no_grad(), Ops() as ops:
        result = module(*inputs, **named)
    return result, dict(ops.counts)


def tokens(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(1))


def same(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models have the same classes, attributes, parameters and strides."""
    modules = zip(first.modules(), second.modules(), strict=True)
    tensors = zip(first.parameters(), second.parameters(), strict=True)
    return all(type(a) is type(b) and set(vars(a)) == set(vars(b)) for a, b in modules) and all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in tensors
    )


HUGGING_FACE = {
    "llama": (models.llama, "gated_mlp", 2),
    "neox": (models.gpt_neox, "mlp", 2),
    "t5": (models.t5, "mlp", 2),
    "gpt2": (models.gpt2, "mlp", 1),
    "nemotron": (models.nemotron, "mlp", 2),
    "opt": (models.opt, "mlp", 2),
}
# Models whose blocks are submodules, and written out.
BOTH = ["llama", "opt"]


@functools.cache
def _optimized(name: str) -> Any:
    return twellc.optimize(HUGGING_FACE[name][0]())


def optimized(name: str) -> Any:
    """Return a copy of an optimized model that is made once."""
    return copy.deepcopy(_optimized(name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_generates_the_same_tokens(name: str) -> None:
    make, op, count = HUGGING_FACE[name]
    model, ids = make(), tokens()
    options = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    assert twellc.optimize(model) is model
    assert [layer.decision for layer in twellc.optimized_blocks(model)] == ["twell"] * count
    with Ops() as ops:
        found = model.generate(ids, **options)
    assert set(ops.counts) == {op}
    assert torch.equal(found, expected)


def test_model_without_relu_warns_why() -> None:
    model = models.llama("silu")
    kinds = [type(each) for each in model.modules()]
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.mlp: gate activation is silu; TwELL needs a ReLU family"):
        twellc.optimize(model)
    assert [type(each) for each in model.modules()] == kinds


def packed(module: Any, x: Tensor) -> Tensor:
    gate, up = module.both(x).chunk(2, -1)
    return module.down(torch.relu(gate) * up)


BLOCKS = {
    "gated": lambda: Gated(biases="gud"),
    "plain": lambda: Plain(biases="ud"),
    "swapped": lambda: Gated(swap=True, d_out=24),
    "squared": lambda: Plain(lambda x: torch.relu(x).square()),
    "threshold": lambda: Gated(nn.Threshold(0.2, 0.0)),
    "sequential": lambda: nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, 24)),
    "packed": lambda: Written(packed, both=nn.Linear(16, 80), down=nn.Linear(40, 16)),
    "in a wrapper": lambda: nn.Sequential(nn.Dropout(0.1), Gated()),
    "raw weights": lambda: Written(
        lambda m, x: torch.relu(x @ m.up) @ m.down, up=torch.randn(16, 40), down=torch.randn(40, 16)
    ),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (4,), (0, 3)])
def test_forms_of_a_block(name: str, shape: tuple[int, ...]) -> None:
    module = BLOCKS[name]().eval()
    x = torch.randn(*shape, 16)
    with torch.no_grad():
        expected = module(x)
    found, counts = ops_of(twellc.optimize(module), x)
    assert sum(counts.values()) == 1
    torch.testing.assert_close(found, expected)


def test_forward_mode_runs_the_original() -> None:
    block, x = twellc.optimize(Gated().eval().requires_grad_(False)), torch.randn(3, 16)
    _, tangent = torch.func.jvp(block, (x,), (torch.ones_like(x),))
    _, expected = torch.func.jvp(twellc.restore(block), (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, expected)
    assert tangent.any()


# What F.linear takes, too.
OTHER_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:2]]),
    "sparse": Tensor.to_sparse,
    "meta": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_tensors_that_are_no_arrays_run_the_original(name: str, training: bool) -> None:
    dense = Gated(biases="gud").train(training)
    block = twellc.optimize(copy.deepcopy(dense), training=training)
    if name == "meta":
        dense, block = dense.to("meta"), block.to("meta")
    x = OTHER_TENSORS[name](torch.randn(3, 16))
    with torch.set_grad_enabled(training):
        found, expected = block(x), dense(x)
    assert type(found) is type(expected) and found.is_nested == expected.is_nested
    for one, other in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("computed", [False, True])
def test_what_is_not_a_block_is_left(computed: bool) -> None:
    weights = {"up": torch.randn(16, 40), "down": torch.randn(40, 16)}
    module: Any = (
        Written(lambda m, x: torch.relu(x @ (m.up * 2)) @ m.down, **weights) if computed else Plain(d_model=12)
    )
    with pytest.warns(UserWarning, match="no submodule"):
        twellc.optimize(module.eval())
    assert not twellc.optimized_blocks(module)


def test_state_dict_round_trip() -> None:
    original, model = models.llama(), optimized("llama")
    state = model.state_dict()
    assert list(state) == list(original.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in original.state_dict().items())
    other = models.llama()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    assert not torch.equal(other(tokens()).logits, original(tokens()).logits)
    for assign in (False, True):
        model = optimized("llama")
        model.load_state_dict(other.state_dict(), assign=assign)
        found, counts = ops_of(model, tokens())
        assert counts == {"gated_mlp": 2}
        torch.testing.assert_close(found.logits, other(tokens()).logits, rtol=1e-4, atol=1e-4)
    original.load_state_dict(model.state_dict())
    torch.testing.assert_close(original(tokens()).logits, other(tokens()).logits)


def test_weights_are_not_copied() -> None:
    block = twellc.optimize(Gated().eval())
    assert block.down.weight.t().is_contiguous()
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in Gated().named_parameters()]
    assert not list(block.buffers())
    with torch.no_grad():
        block.down.weight.zero_()
    assert ops_of(block, torch.randn(3, 16))[0].abs().max() == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "to", "double and back"])
@pytest.mark.parametrize("name", BOTH)
def test_copies_keep_the_op_and_the_strides(name: str, how: str) -> None:
    model = optimized(name)
    expected, _ = ops_of(model, tokens())
    if how == "deepcopy":
        made = copy.deepcopy(model)
        with torch.no_grad():
            block_of(model)[0].weight.zero_()
    elif how == "pickle":
        stream = io.BytesIO()
        torch.save(model, stream)
        made = torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    elif how == "to":
        model.to(torch.bfloat16)
        assert ops_of(model, tokens())[1] == {HUGGING_FACE[name][1]: 2}
        made = model.to(torch.float32)
        expected = ops_of(made, tokens())[0]
    else:
        made = model.double().float()
    assert block_of(made)[1].weight.t().is_contiguous()
    found, counts = ops_of(made, tokens())
    assert counts == {HUGGING_FACE[name][1]: 2}
    assert torch.equal(found.logits, expected.logits)


def block_of(model: Any) -> tuple[Any, Any]:
    if hasattr(model.model, "decoder"):
        return model.model.decoder.layers[0].fc1, model.model.decoder.layers[0].fc2
    return model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj


@pytest.mark.parametrize("name", BOTH)
def test_restore(name: str) -> None:
    model, original = optimized(name), HUGGING_FACE[name][0]()
    assert list(model.state_dict()) == list(original.state_dict())
    assert twellc.restore(model) is model
    assert same(model, original)
    assert ops_of(model, tokens())[1] == {}
    assert twellc.optimized_blocks(twellc.optimize(model)) != []


def test_shared_memory_stays_shared() -> None:
    block = Gated(biases="d").eval().share_memory()
    twellc.optimize(block)
    assert block.down.weight.t().is_contiguous() and all(each.is_shared() for each in block.parameters())
    twellc.restore(block)
    assert block.down.weight.is_contiguous() and all(each.is_shared() for each in block.parameters())
    assert not any(each.is_shared() for each in twellc.optimize(Gated().eval()).parameters())


@pytest.mark.parametrize("name", BOTH)
def test_optimizing_again_changes_nothing(name: str) -> None:
    model = optimized(name)
    kinds = [type(each) for each in model.modules()]
    if name == "opt":  # by which FSDP finds it
        assert type(model.model.decoder.layers[0]).__name__ == "OPTDecoderLayer"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twellc.optimize(model)
    assert [type(each) for each in model.modules()] == kinds
    assert ops_of(model, tokens())[1] == {HUGGING_FACE[name][1]: 2}


@pytest.mark.parametrize("training", [False, True])
def test_optimizing_again_with_another_compression(training: bool) -> None:
    first, second = "model.layers.0.mlp", "model.layers.1.mlp"
    model = twellc.optimize(models.llama().train(training), layers=r"layers\.0", compression=4, training=training)

    def compressions() -> dict[str, int]:
        assert [each.module for each in twellc.optimized_blocks(model)] in ([first], [first, second])
        held = {path: getattr(each, "_twellc", ()) for path, each in model.named_modules()}
        for (block,) in filter(None, held.values()):
            assert block.training is None or block.training.options == block.options
        return {path: blocks[0].options.compression for path, blocks in held.items() if blocks}

    twellc.optimize(model, training=training)
    assert compressions() == {first: 4, second: 8}
    twellc.optimize(model, layers=r"layers\.0", compression=1, training=training)  # it may name what is taken
    assert compressions() == {first: 1, second: 8}
    twellc.optimize(model, compression=2, training=training)
    assert compressions() == {first: 2, second: 2}
    twellc.optimize(model, layers="none", compression=1, training=training)
    assert compressions() == {first: 2, second: 2}
    with pytest.raises(twellc.UserError, match=r"--layers: matches no feed-forward block; got 'zzz'; .*layers\.0\.mlp"):
        twellc.optimize(model, layers="zzz", training=training)


def test_gradients_in_eval_mode() -> None:
    block = twellc.optimize(Gated().eval())
    x = torch.randn(3, 16)
    with Ops() as ops:
        block(x).sum().backward()
    assert not ops.counts
    assert block.down.weight.grad is not None
    block.requires_grad_(False)
    with Ops() as ops:
        block(x)
    assert ops.counts == {"gated_mlp": 1}


def test_submodule_with_a_hook_is_left() -> None:
    model = models.llama()
    seen: list[Tensor] = []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda _, __, y: seen.append(y))
    twellc.optimize(model)
    assert [layer.module for layer in twellc.optimized_blocks(model)] == ["model.layers.1.mlp"]
    ops_of(model, tokens())
    assert len(seen) == 1


HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "of a child": lambda block, note: block.up.register_forward_hook(note),
    "of all modules": lambda block, note: nn.modules.module.register_module_forward_hook(note),
    "of the block itself": lambda block, note: block.register_forward_hook(note),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_come_later_are_called(name: str) -> None:
    """The block's own does not look into it."""
    block = twellc.optimize(Gated().eval())
    x, seen = torch.randn(3, 16), list[Any]()
    hook = HOOKS[name](block, lambda module, _, __: seen.append(type(module)))
    try:
        assert ops_of(block, x)[1] == ({"gated_mlp": 1} if "itself" in name else {})
    finally:
        hook.remove()
    assert len(seen) == 1 if "all" not in name else seen.count(nn.Linear) == 3
    assert ops_of(block, x)[1] == {"gated_mlp": 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [lambda: Gated().eval(), lambda: models.opt().model.decoder.layers[0].eval()])
@pytest.mark.parametrize("training", [False, True])
def test_parameters_of_the_forward_stay(make: Any, training: bool) -> None:
    """torch.export and transformers' Trainer look at them."""
    block = make()
    before = inspect.signature(block.forward)
    twellc.optimize(block, training=training)
    assert len(twellc.optimized_blocks(block)) == 1
    assert inspect.signature(block.forward) == before
    assert inspect.signature(type(block).forward) == inspect.signature(twellc.restore(block).__class__.forward)


def test_exported_by_the_name_of_its_argument() -> None:
    block, x = twellc.optimize(Gated().eval()), torch.randn(3, 16)
    program = torch.export.export(block, (x,), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    torch.testing.assert_close(program.module()(x[:2]), block(x[:2]))


class Locked(nn.Sequential):
    """What of it cannot be copied is left out."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16))
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


def test_state_of_a_class_that_says_it_itself() -> None:
    model, x = twellc.optimize(Locked().eval()), torch.randn(3, 16)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(twellc.optimized_blocks(copied)) == 1
        assert not hasattr(copied, "lock")
        assert torch.equal(ops_of(copied, x)[0], ops_of(model, x)[0])


def test_a_class_from_which_none_can_be_derived() -> None:
    class Registered(nn.Sequential):
        def __init_subclass__(cls, *, kind: str) -> None:
            super().__init_subclass__()

    class Kind(Registered, kind="a"):
        pass

    def sequential(kind: Any) -> Any:
        return kind(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16))

    model = nn.Sequential(sequential(nn.Sequential), sequential(Kind)).eval()
    twellc.optimize(model)
    assert [each.module for each in twellc.optimized_blocks(model)] == ["0"]
    with pytest.warns(UserWarning, match="the model itself: no class can be derived from Kind"):
        twellc.optimize(sequential(Kind).eval())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: twellc.optimize("model"), "twellc.optimize: takes a torch.nn.Module; got 'model'"),  # type: ignore[type-var]
        (lambda: twellc.restore(None), "twellc.restore: takes a torch.nn.Module; got None"),  # type: ignore[type-var]
        (lambda: twellc.optimized_blocks(3), "twellc.optimized_blocks: takes a torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: twellc.optimize(Gated(), layers=["a"]), r"layers: must be a string; got \['a'\]"),  # type: ignore[arg-type]
        (lambda: twellc.optimize(Gated(), compression=8.0), r"no such compression; got 8\.0"),  # type: ignore[arg-type]
        (lambda: twellc.optimize(Gated(), compression=True), "no such compression; got True"),
        (lambda: twellc.optimize(Gated(), compression=3), "no such compression; got 3"),
        (lambda: twellc.optimize(Gated(), layers="decoder"), "one of '', the model itself"),
    ],
)
def test_what_is_given_in_the_wrong_place(call: Any, message: str) -> None:
    with pytest.raises(twellc.UserError, match=message):
        call()


def test_tied_weights_stay_tied() -> None:
    first = Gated()
    second = Gated()
    second.down.weight = first.down.weight
    pair = twellc.optimize(nn.Sequential(first, second, first).eval())
    assert pair[0].down.weight is pair[1].down.weight
    assert pair[0] is pair[2]
    x = torch.randn(2, 3, 16)
    found, counts = ops_of(pair, x)
    assert counts == {"gated_mlp": 3}
    with torch.no_grad():
        torch.testing.assert_close(found, twellc.restore(pair)(x), rtol=1e-5, atol=1e-3)
    assert pair[0].down.weight is pair[1].down.weight


def test_layers_choose() -> None:
    def pair() -> Any:
        return nn.Sequential(Gated(), Gated()).eval()

    model = twellc.optimize(pair(), layers="1")
    assert [layer.module for layer in twellc.optimized_blocks(model)] == ["1"]
    assert not twellc.optimized_blocks(twellc.optimize(pair(), layers="none"))
    blocks, kinds = twellc.optimized_blocks(model), [type(each) for each in model.modules()]
    for layers, message in (("decoder", "matches no feed-forward block"), ("(", "not a regular expression")):
        for each in (model, pair()):
            with pytest.raises(UserError, match=message):
                twellc.optimize(each, layers=layers, training=each is model)
    assert twellc.optimized_blocks(model) == blocks and [type(each) for each in model.modules()] == kinds


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "eager"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("opt", "eager"), ("llama", "aot_eager"))),
    ],
)
def test_torch_compile(name: str, backend: str) -> None:
    model, op = optimized(name), HUGGING_FACE[name][1]
    expected, _ = ops_of(model, tokens())
    targets: list[str] = []

    def recording(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=recording, fullgraph=True)
    with torch.no_grad():
        found = compiled(tokens(), use_cache=False)
    assert sum(f"twell.{op}" in target for target in targets) == 2
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


def under_autocast(block: Any, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return ops_of(block, x)[1]


def with_adapter(block: Any, x: Tensor) -> Any:
    block.up = nn.Sequential(block.up, nn.Dropout(0.0))  # as LoRA does
    return ops_of(block, x)[1]


ORIGINAL: dict[str, Callable[[Any, Tensor], Any]] = {
    "autocast": under_autocast,
    "a child that was replaced": with_adapter,
    "a wider input": lambda block, x: ops_of(block, x[None, None])[1],
    "training": lambda block, x: ops_of(block.train(), x)[1],
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_the_original_runs(name: str) -> None:
    assert ORIGINAL[name](twellc.optimize(Gated().eval()), torch.randn(3, 16)) == {}


def test_argument_by_name() -> None:
    block = twellc.optimize(Gated().eval())
    assert ops_of(block, x=torch.randn(3, 16))[1] == {"gated_mlp": 1}
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        block()
