"""`twellc.optimize` on blocks that are written out in a larger module, such as a decoder layer."""

import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves

import twellc
from tests import models
from tests.caches import mostly_slow
from tests.models import D_FF, D_MODEL, Written, scale_weights
from tests.tolerance import assert_as_accurate
from tests.twellc.eager.test_optimize import ops_of, tokens
from twellc.base.errors import UserError

PARTS = {"layers": 2, "ffn_dim": 96, "attention_heads": 4}
WIDTHS = {
    **{f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in PARTS.items()},
    **{"d_model": 32, "encoder_layers": 1, "activation_function": "relu"},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1},
}
# What makes a model, its inputs, and how many blocks it has.
Family = Callable[[], tuple[Any, dict[str, Any], int]]


def both(name: str, kind: str = "ForConditionalGeneration", **changes: Any) -> Family:
    """A model with an encoder and a decoder of texts."""
    make = models.family(name, kind, **WIDTHS, **(changes or {"vocab_size": 96, "max_position_embeddings": 64}))
    return lambda: (make(), {"input_ids": tokens(), "decoder_input_ids": tokens(length=4)}, 3)


def alone(name: str, **options: Any) -> Family:
    tokens_of = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 64}
    make = models.family(name, **{**models.SMALL, **tokens_of, **options})
    return lambda: (make(), {"input_ids": tokens()}, 2)


def of_speech(name: str, *shape: int, **changes: Any) -> Family:
    """A model of features of that shape."""
    make, generator = (
        models.family(name, "ForConditionalGeneration", **WIDTHS, vocab_size=96, **changes),
        torch.Generator(),
    )
    features = torch.randn(2, *shape, generator=generator.manual_seed(2))
    return lambda: (make(), {"input_features": features, "decoder_input_ids": tokens(length=4)}, 3)


def torch_encoder() -> tuple[Any, dict[str, Any], int]:
    """Torch's own, which in eval mode is one fused kernel unless something prevents it."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 96, batch_first=True), 2)
    return model, {"src": torch.randn(2, 5, 32)}, 2


FAMILIES = {
    "opt": lambda: (models.opt(), {"input_ids": tokens()}, 2),
    "opt with norms behind": lambda: (models.opt(do_layer_norm_before=False), {"input_ids": tokens()}, 2),
    "opt, squared": lambda: (models.opt(activation_function="relu2"), {"input_ids": tokens()}, 2),
    "xglm": alone("XGLM", ffn_dim=96, activation_function="relu"),
    "biogpt": alone("BioGpt", intermediate_size=96, hidden_act="relu"),
    "trocr": alone("TrOCR", decoder_ffn_dim=96, activation_function="relu", cross_attention_hidden_size=32),
    "bart": both("Bart"),
    "mbart": both("MBart"),
    "marian": both("Marian", "MTModel"),
    "pegasus": both("Pegasus"),
    "m2m_100": both("M2M100"),
    "blenderbot": both("Blenderbot"),
    "plbart": both("PLBart"),
    "mvp": both("Mvp"),
    "fsmt": both("FSMT", langs=["en", "de"], src_vocab_size=96, tgt_vocab_size=96),
    "speech_to_text": of_speech(
        *("Speech2Text", 64, 16), conv_channels=32, input_feat_per_channel=16, input_channels=1
    ),
    "whisper": of_speech("Whisper", 16, 64, num_mel_bins=16, max_source_positions=32, max_target_positions=32),
    # Its activation is a function, with dropout behind it.
    "torch": lambda: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 96), 2),
        {"tgt": torch.randn(5, 2, 32), "memory": torch.randn(4, 2, 32)},
        2,
    ),
    "torch's encoder": torch_encoder,
}


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "opt, squared", "bart", "torch's encoder"))
def test_families(name: str) -> None:
    model, inputs, count = FAMILIES[name]()
    dtype = torch.float32 if name == "xglm" else torch.float64  # in float64 its attention fails
    model.to(dtype).eval()
    inputs = {key: each.to(dtype) if each.is_floating_point() else each for key, each in inputs.items()}
    expected, _ = ops_of(copy.deepcopy(model), **inputs)
    twellc.optimize(model)
    assert len(twellc.optimized_blocks(model)) == count
    found, counts = ops_of(model, **inputs)
    assert counts == {"mlp": count}
    one, other = (each if isinstance(each, Tensor) else each.logits for each in (found, expected))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class Flagged(nn.Module):
    """A layer that computes other things where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(D_MODEL, D_FF), nn.Linear(D_FF, D_MODEL), nn.ReLU()
        scale_weights(self)

    def forward(self, x: Tensor, how: str = "") -> Any:
        hidden = self.fc1(x)
        if how == "shift":
            hidden = hidden - 1
        if how == "mean":
            x = x + hidden.mean(-1, keepdim=True)
        if how == "in place":
            hidden.mul_(2)
        if how == "none":
            return x + self.fc2(hidden)
        hidden = self.act(hidden)
        if how == "clamp":
            hidden = torch.cat([hidden, hidden])[: len(x)].clamp(max=0.5)
        if how == "hidden":
            return x + self.fc2(hidden), hidden
        if how == "hidden alone":
            return hidden
        if how == "hidden in a dictionary":
            return {"parts": [x + self.fc2(hidden), (hidden,)]}
        if how == "data":
            hidden.data = hidden.data * 2
        if how == "copy":
            hidden = copy.copy(hidden)
        if how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                y: Tensor = x + self.fc2(hidden)
            return y
        if how == "twice":
            return x + self.fc2(hidden) + self.fc2(self.act(self.fc1(x + 1)))
        return x + self.fc2(hidden)


def layer(function: Callable[[Any, Tensor], Any], **members: nn.Module) -> Any:
    linears = {"fc1": nn.Linear(D_MODEL, D_FF), "fc2": nn.Linear(D_FF, D_MODEL), "act": nn.ReLU()}
    made = Written(function, **{**linears, "drop": nn.Dropout(0.3), **members})
    scale_weights(made)
    return made.eval()


def plain(m: Any, x: Tensor) -> Tensor:
    y: Tensor = x + m.fc2(m.act(m.fc1(x)))
    return y


@functools.cache
def _taken() -> Any:
    return twellc.optimize(layer(plain))


def taken_layer() -> Any:
    """Return a copy of an optimized layer that is made once."""
    return copy.deepcopy(_taken())


def check(model: nn.Module, x: Tensor, count: int = 1, *arguments: Any) -> Any:
    """Compare an optimized module with the original, exactly in float64, and say how often the op has to run."""
    x = x.double()
    original = twellc.restore(copy.deepcopy(model)).double()
    model.double()
    expected, _ = ops_of(original, x.clone(), *arguments)
    found, counts = ops_of(model, x.clone(), *arguments)
    assert sum(counts.values()) == count
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return found


X = torch.randn(2, 3, D_MODEL, generator=torch.Generator().manual_seed(3))

TAKEN: dict[str, Callable[[], Any]] = {
    "a module": lambda: layer(plain),
    "in place": lambda: layer(plain, act=nn.ReLU(inplace=True)),
    "a function": lambda: layer(lambda m, x: x + m.fc2(functional.relu(m.fc1(x)))),
    "a function in place": lambda: layer(lambda m, x: x + m.fc2(torch.relu_(m.fc1(x)))),
    "a method": lambda: layer(lambda m, x: x + m.fc2(m.fc1(x).relu())),
    "in place without a result": lambda: layer(lambda m, x: [h := m.fc1(x), h.relu_(), x + m.fc2(h)][2]),
    "squared": lambda: layer(lambda m, x: x + m.fc2(m.act(m.fc1(x)).square())),
    "dropout": lambda: layer(lambda m, x: x + m.fc2(functional.dropout(m.drop(m.act(m.fc1(x))), 0.1, m.training))),
    "rows": lambda: layer(lambda m, x: x + m.fc2(m.act(m.fc1(x.reshape(-1, D_MODEL)))).view(x.shape)),
    "a norm before it": lambda: layer(lambda m, x: m.fc2(m.act(m.fc1(x / x.norm())))),
    "two results": lambda: layer(lambda m, x: (m.fc2(m.act(m.fc1(x))), m.fc1(x))),
    "its input changed": lambda: layer(lambda m, x: m.fc2(m.act(m.fc1(x.mul_(2))))),
    "a result of other dimensions": lambda: layer(lambda m, x: m.fc2(m.act(m.fc1(x))).flatten(0, 1)),
    "as wide as x": lambda: layer(plain, fc1=nn.Linear(D_MODEL, D_MODEL), fc2=nn.Linear(D_MODEL, D_MODEL)),
    "its activation elsewhere, too": lambda: layer(lambda m, x: x + m.fc2(m.act(m.fc1(m.act(x))))),
    "up elsewhere, too": lambda: layer(lambda m, x: x + m.fc2(m.act(m.fc1(x))) + m.fc1(x + 1).mean(-1, keepdim=True)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    model = TAKEN[name]()
    twellc.optimize(model)
    assert [each.module for each in twellc.optimized_blocks(model)] == [""]
    for x in (X, X[:, :0], X[0] if name != "rows" else X):
        check(model, x)


@torch.jit.script
def scripted(z: Tensor) -> Tensor:
    return torch.relu(z)


def changed(m: Any, x: Tensor) -> Tensor:
    hidden = m.fc1(x)
    x.add_(1)
    y: Tensor = x + m.fc2(m.act(hidden))
    return y


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "gated": (
        lambda: layer(lambda m, x: x + m.fc2(m.act(m.fc1(x)) * m.fc3(x)), fc3=nn.Linear(D_MODEL, D_FF)),
        "with a gate",
    ),
    "threshold": (lambda: layer(plain, act=nn.Threshold(0.2, 0.0)), "with threshold between its projections"),
    "clamp": (lambda: layer(lambda m, x: x + m.fc2(m.fc1(x).clamp(min=0))), "with clamp between its projections"),
    "x changed in place": (lambda: layer(changed), "with add, relu between its projections"),
    "another activation": (lambda: layer(plain, act=nn.GELU()), "activation is gelu"),
    "a script": (lambda: layer(lambda m, x: x + m.fc2(scripted(m.fc1(x)))), "that takes only a tensor"),
    "vmap": (lambda: layer(lambda m, x: x + m.fc2(torch.func.vmap(torch.relu)(m.fc1(x)))), "that takes only a tensor"),
    "its type is asked": (
        lambda: layer(lambda m, x: [h := m.fc1(x), x + m.fc2(m.act(h if isinstance(h, Tensor) else h[0]))][1]),
        "that takes only a tensor",
    ),
    "another reader": (lambda: layer(lambda m, x: [h := m.act(m.fc1(x)), m.fc2(h) + h.sum()][1]), "is also read by"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = LEFT[name]
    model = make()
    kinds = [type(each) for each in model.modules()]
    with caplog.at_level(logging.INFO, "twellc"), pytest.warns(UserWarning, match=reason):
        twellc.optimize(model)
    assert any("stays dense" in record.message and reason in record.message for record in caplog.records)
    assert [type(each) for each in model.modules()] == kinds
    check(model, X, 0)


WAYS = {"": 1, "hidden": 1, "hidden in a dictionary": 1, "twice": 2}
WAYS |= dict.fromkeys(("shift", "mean", "in place", "none", "clamp", "hidden alone", "data", "copy", "autocast"), 0)


@pytest.mark.parametrize("how", WAYS)
def test_other_ways_through_a_forward(how: str) -> None:
    """What was not seen when the block was found gives the same results, too."""
    found = check(twellc.optimize(Flagged().eval()), X, WAYS[how], how)
    assert all(type(each) is Tensor for each in tree_leaves(found))


def test_x_that_changes_behind_the_up_projection() -> None:
    """On a way through the forward that was not seen when the block was found."""

    def compute(m: Any, x: Tensor) -> Any:
        z = x * 2
        hidden = m.fc1(z)
        if m.changes:
            z.mul_(0.5)
        return z + m.fc2(m.act(hidden))

    model = layer(compute)
    model.changes = False
    twellc.optimize(model)
    check(model, X)
    model.changes = True
    with torch.no_grad(), pytest.raises(UserError, match="what its up projection reads was changed in place"):
        model(X.double())


def test_operators_on_a_hidden_tensor() -> None:
    def compute(m: Any, x: Tensor) -> Any:
        h = m.fc1(x)
        if m.how == "":
            return x + m.fc2(m.act(h))
        numbers = [h + 1, 1 - h, h * h, x.sum() * h, h / 2, 2 / h, h // 0.5, 1 // h, h % 0.3, h @ h.mT, -h, abs(h)]
        others = [h**2, h[0], h > 0, h <= x.sum(), h == 0, len(h), [*h], h.shape, torch.stack([h, h])]
        return [*numbers, *others, torch.isfinite(h).all(), m.act(h) + 1, m.act(m.act(h))]

    model = layer(compute)
    model.how = ""
    twellc.optimize(model)
    model.how = "all"
    check(model, X, 0)


@pytest.mark.slow
def test_nested_tensors() -> None:
    """Torch's encoder makes them of rows with padding; the op does not take them."""
    model, inputs, _ = torch_encoder()
    padding = torch.arange(5) >= torch.tensor([[5], [3]])
    model.eval()
    expected, _ = ops_of(copy.deepcopy(model), **inputs, src_key_padding_mask=padding)
    found, counts = ops_of(twellc.optimize(model), **inputs, src_key_padding_mask=padding)
    assert not counts
    torch.testing.assert_close(found, expected)
    restored = twellc.restore(copy.deepcopy(model)).layers[0]
    assert restored.activation_relu_or_gelu == 1 and model.layers[0].activation_relu_or_gelu == 0


def test_projections_alone_are_what_they_were() -> None:
    model = taken_layer()
    with torch.no_grad():
        hidden = model.fc1(X)
        assert type(hidden) is Tensor
        assert torch.equal(hidden, functional.linear(X, model.fc1.weight, model.fc1.bias))
        y, expected = model.fc2(model.act(hidden)), functional.linear(hidden.relu(), model.fc2.weight, model.fc2.bias)
        torch.testing.assert_close(y, expected)
        assert torch.equal(model.fc1(input=X), hidden)


def test_threads() -> None:
    """One runs the layer, another one calls its projection."""
    inside, done = threading.Event(), threading.Event()

    def slow(m: Any, x: Tensor) -> Tensor:
        inside.set()
        done.wait(60)
        return plain(m, x)

    model = taken_layer()
    model.function = slow
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(ops_of(model, X)))
    thread.start()
    assert inside.wait(60)
    hidden = model.fc1(X)
    done.set()
    thread.join()
    assert type(hidden) is Tensor and hidden.shape[-1] == D_FF
    (found, counts), expected = results[0], plain(model, X)
    assert counts == {"mlp": 1}
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["fc1", "act", "fc2", "drop"])
def test_hook_that_comes_later_is_called(name: str) -> None:
    model = taken_layer()
    seen: list[Any] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, given, y: seen.extend((*given, y)))
    check(model, X, 0)
    assert len(seen) == (0 if name == "drop" else 4) and all(type(each) is Tensor for each in seen)
    hook.remove()
    check(model, X)


def test_hooks_of_the_layer_and_of_other_modules() -> None:
    """As transformers installs them, on its first call that is asked for hidden states."""
    model = models.opt()
    expected = model(tokens(), output_hidden_states=True).hidden_states
    assert model.model.decoder.layers[0]._forward_hooks
    twellc.optimize(model)
    found, counts = ops_of(model, tokens(), output_hidden_states=True)
    assert counts == {"mlp": 2}
    torch.testing.assert_close(found.hidden_states, expected, rtol=1e-4, atol=1e-5)


def test_attention_that_is_not_traced() -> None:
    """As flash attention and vLLM's; while blocks are found torch's stands for it."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls: list[int] = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Any:
        calls.append(int(query.sum() > 0))
        return sdpa_attention_forward(module, query, key, value, *args, **named)

    AttentionInterface.register("of a test", attention)
    model = models.opt()
    model.config._attn_implementation = "of a test"
    twellc.optimize(model)
    assert not calls and model.config._attn_implementation == "of a test"
    assert ops_of(model, tokens())[1] == {"mlp": 2}
    assert len(calls) == 2


def test_layers_with_hooks_on_a_projection_are_left() -> None:
    model = models.opt()
    model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_: None)
    assert [each.module for each in twellc.optimized_blocks(twellc.optimize(model))] == ["model.decoder.layers.1"]


def with_adapter(model: Any) -> None:
    model.fc1 = Written(lambda m, x: m.base(x) + m.low(x), base=model.fc1, low=nn.Linear(D_MODEL, D_FF)).eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "adapter": with_adapter,
    "activation": lambda model: setattr(model, "act", nn.GELU()),
    "parametrization": lambda model: nn.utils.parametrize.register_parametrization(model.fc2, "weight", nn.Tanh()),
    "forward": lambda model: setattr(model.fc1, "forward", lambda x, before=model.fc1.forward: before(x) + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_children_that_are_changed_are_used(name: str) -> None:
    model = taken_layer()
    original = twellc.restore(taken_layer())
    for each in (model, original):
        torch.manual_seed(0)
        CHANGES[name](each)
        each.double().eval()
    found, counts = ops_of(model, X.double())
    assert counts == {}
    torch.testing.assert_close(found, ops_of(original, X.double())[0])
    assert not torch.allclose(found, ops_of(taken_layer().double(), X.double())[0])


def test_weights_of_another_kind() -> None:
    """As those are that torchao has quantized."""
    for model in (taken_layer(), twellc.optimize(models.Plain(biases="u").eval())):
        first = model.fc1 if hasattr(model, "fc1") else model.up
        weight = first.weight.detach()
        expected, counts = ops_of(model, X)
        assert counts == {"mlp": 1}
        first.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
        found, counts = ops_of(model, X)
        assert counts == {}
        torch.testing.assert_close(found.a, expected)


def test_an_activation_that_layers_share() -> None:
    act = nn.ReLU()
    model = nn.Sequential(layer(plain, act=act), act, layer(plain, act=act)).eval()
    twellc.optimize(model)
    assert [each.module for each in twellc.optimized_blocks(model)] == ["0", "2"]
    assert type(act) is nn.ReLU
    check(model, X, 2)


def test_projections_that_layers_share() -> None:
    first = layer(plain)
    model = nn.Sequential(first, layer(plain, fc1=first.fc1), first)
    twellc.optimize(model)
    assert model[0].fc1 is model[1].fc1
    check(model, X, 3)


def test_two_blocks_in_a_layer() -> None:
    def two(m: Any, x: Tensor) -> Tensor:
        x = plain(m, x)
        y: Tensor = x + m.fc4(m.act(m.fc3(x)))
        return y

    model = nn.Sequential(layer(two, fc3=nn.Linear(D_MODEL, 24), fc4=nn.Linear(24, D_MODEL)))
    twellc.optimize(model)
    assert [each.module for each in twellc.optimized_blocks(model)] == ["0", "0.fc3"]
    check(model, X, 2)
    twellc.restore(model)
    twellc.optimize(model, layers="fc3")
    assert [each.module for each in twellc.optimized_blocks(model)] == ["0.fc3"]
    check(model, X)


def test_a_projection_of_two_blocks() -> None:
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 16)).eval()
    twellc.optimize(model)
    assert len(twellc.optimized_blocks(model)) == 1
    check(model, X)


def test_the_original_runs_where_the_op_cannot() -> None:
    model = taken_layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert ops_of(model, X)[1] == {}
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None and model.fc1.weight.grad is not None
    assert ops_of(model.train(), X)[1] == {}
    assert ops_of(model.eval(), X[None])[1] == {}
    assert ops_of(model, X)[1] == {"mlp": 1}


def test_exported() -> None:
    model = taken_layer()
    with torch.no_grad():
        program = torch.export.export(model, (X,))
    assert sum("twell.mlp" in str(node.target) for node in program.graph.nodes) == 1
    torch.testing.assert_close(program.module()(X), ops_of(model, X)[0])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    """In bfloat16: eager, in a CUDA graph, and compiled; as accurate as the dense model."""
    model = models.opt(hidden_size=128, word_embed_proj_dim=128, ffn_dim=320).cuda()
    ids = tokens(3, 7).cuda()
    wide, model = copy.deepcopy(model).double(), model.bfloat16()
    truth, _ = ops_of(wide, ids)
    dense, _ = ops_of(model, ids)
    twellc.optimize(model)
    found, counts = ops_of(model, ids)
    assert counts == {"mlp": 2}
    assert_as_accurate(found.logits, dense.logits, truth.logits)
    decoder_layer, x = model.model.decoder.layers[0], torch.randn(2, 5, 128, device="cuda").bfloat16()
    expected, _ = ops_of(decoder_layer, x)
    with torch.no_grad():
        graph, kept = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            y = decoder_layer(kept)
        kept.zero_()
        graph.replay()
        kept.copy_(x)
        graph.replay()
        assert torch.equal(y, expected)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False)
    assert_as_accurate(compiled.logits, dense.logits, truth.logits)
