"""Attention of Hugging Face models as it is traced, against transformers' own, and the choices of inputs and logits."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.fx import Graph, Node

from tests import models
from tests.caches import FAMILIES, mostly_slow
from tests.conftest import Cli
from tests.models import canonicalize
from twellc.base.errors import UserError
from twellc.loaders import attention
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner, example_inputs

GROUPED = {**models.SMALL, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
SINGLE = {**models.SMALL, "intermediate_size": 64, "max_position_embeddings": 64}
# Falcon's eager attention adds the position biases twice, so that one is compared with another function.
CAUSAL: dict[str, Callable[..., Any]] = {
    **{
        name: FAMILIES[name] for name in ("llama", "qwen3", "gemma2", "nemotron", "granite", "olmo2", "opt", "gpt-neox")
    },
    **{name: FAMILIES[name] for name in ("gpt2", "falcon", "phi3-window")},
    "falcon-alibi": functools.partial(FAMILIES["falcon"], alibi=True, attn_implementation="sdpa"),
    "smollm3": functools.partial(FAMILIES["smollm3"], num_hidden_layers=2, no_rope_layers=[1, 0]),
    "a window that is none": models.family("Mistral", **GROUPED, sliding_window=64),
    "new falcon": models.falcon,
}


def build(name: str, options: dict[str, Any]) -> Any:
    model_class = getattr(transformers, name)
    return strong(model_class(model_class.config_class(**options, attn_implementation="eager")).eval())


def strong(model: Any) -> Any:
    """Draw weights by which logits depend strongly on what each token sees."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def load(model: Any, folder: Path, padding: str | None = None, logits: str = "all") -> LoadedModel:
    return load_model(TracingOptions(models.save(model, folder, torch.float32), padding=padding, logits=logits))


def attentions(loaded: LoadedModel) -> list[Node]:
    """Return the attention nodes once the program is functionalised, which takes them apart or not."""
    return attentions_in(canonicalize(loaded.program).graph)


def attentions_in(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)


def masks_of(nodes: list[Node]) -> set[Any]:
    return {node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask") for node in nodes}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Both are float32, of attention in another order; one token more or less that is seen changes whole units."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", mostly_slow(CAUSAL, "llama", "gemma2", "opt", "falcon-alibi"))
def test_causal(family: str, tmp_path: Path) -> None:
    """Every place at several sizes, one token included; with a mask real places, as transformers computes them."""
    model = strong(CAUSAL[family](**{"attn_implementation": "eager"} if "alibi" not in family else {}))
    loaded = load(model, tmp_path)
    assert list(example_inputs(loaded.program)) == ["input_ids"]
    assert loaded.settings == {"padding": "none", "logits": "all"}
    canonical = canonicalize(loaded.program)
    for shape in ((1, 1), (3, 2), (2, 23)):
        ids = torch.randint(2, 96, shape)
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        assert_same(Runner(loaded.program)({"input_ids": ids})[0], expected)
        assert_same(Runner(canonical)({"input_ids": ids})[0], expected)
    if family in ("llama", "opt", "gpt-neox", "a window that is none"):
        check_no_mask(canonical.graph, model.config)
    # Padding on the right, on the left and none, in rows of one batch.
    loaded = load(model, tmp_path, "mask")
    assert list(example_inputs(loaded.program)) == ["input_ids", "attention_mask"]
    assert loaded.settings == {"padding": "mask", "logits": "all"}
    ids = torch.randint(2, 96, (3, 13))
    mask = torch.ones_like(ids)
    mask[0, -4:], mask[1, :5] = 0, 0
    expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = Runner(loaded.program)({"input_ids": ids, "attention_mask": mask})[0]
    assert_same(found[mask == 1], expected[mask == 1])
    one = {"input_ids": ids[:1, :1], "attention_mask": mask[:1, :1]}
    assert_same(Runner(loaded.program)(one)[0], model(**one, use_cache=False).logits)
    if family == "llama":
        check_one_small_mask(attentions(loaded))


def check_no_mask(graph: Graph, config: Any) -> None:
    """Check that attention is causal without a mask, and that nothing is of tokens x tokens."""
    nodes = attentions_in(graph)
    assert len(nodes) == config.num_hidden_layers
    assert masks_of(nodes) == {None}
    for node in nodes:
        names = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal")
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        assert arguments["is_causal"] is True
        assert arguments.get("dropout_p", 0.0) == 0.0
        heads, groups = (node.args[i].meta["val"].shape[1] for i in (0, 1))
        assert (heads, groups) == (4, getattr(config, "num_key_value_heads", 4))
        assert arguments.get("enable_gqa", False) == (heads != groups)
    sequence = str(next(node for node in graph.nodes if node.name == "input_ids").meta["val"].shape[1])
    shapes = [node.meta["val"].shape for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert all([str(size) for size in shape].count(sequence) < 2 for shape in shapes)


def check_one_small_mask(nodes: list[Node]) -> None:
    """Check that all layers share one mask of causal places and padding."""
    (mask,) = masks_of(nodes)
    causal, padding = mask.args
    assert mask.meta["val"].dtype == torch.bool
    assert [str(size) for size in causal.meta["val"].shape[:2]] == ["1", "1"]
    assert str(padding.meta["val"].shape[2]) == "1"
    values = [(node, node.meta["val"]) for node in mask.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    masks = [(node, value.shape) for node, value in values if value.dtype != torch.float32 and value.dim() == 4]
    assert [node for node, shape in masks if shape[2] == shape[3]] == [causal, mask]


def test_masks_of_windows_are_shared_by_kind(tmp_path: Path) -> None:
    """Qwen3 with two kinds of layers."""
    options: dict[str, Any] = {**GROUPED, "head_dim": 8, "num_hidden_layers": 4, "use_sliding_window": True}
    options |= {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = build("Qwen3ForCausalLM", options)
    loaded = load(model, tmp_path)
    kinds = masks_of(attentions(loaded))
    assert len(kinds) == 2 and None in kinds
    ids = torch.randint(2, 96, (2, 17))
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    assert_same(Runner(loaded.program)({"input_ids": ids})[0], expected)


def test_encoder(tmp_path: Path) -> None:
    """Its mask is the padding alone, and rows without any real token spoil no other."""
    model = build("BertForMaskedLM", SINGLE)
    loaded = load(model, tmp_path)
    assert list(example_inputs(loaded.program)) == ["input_ids", "attention_mask"]
    assert loaded.settings == {}
    (mask,) = masks_of(attentions(loaded))
    assert mask is not None and [str(size) for size in mask.meta["val"].shape[1:3]] == ["1", "1"]
    ids, padding = torch.randint(2, 96, (4, 11)), torch.ones(4, 11, dtype=torch.int64)
    padding[0, -4:], padding[1, :5], padding[3] = 0, 0, 0
    expected = model(input_ids=ids, attention_mask=padding).logits
    found = Runner(loaded.program)({"input_ids": ids, "attention_mask": padding})[0]
    assert_same(found[padding == 1], expected[padding == 1])


@pytest.mark.parametrize(
    "name", ["T5ForConditionalGeneration", pytest.param("BartForConditionalGeneration", marks=pytest.mark.slow)]
)
def test_encoder_and_decoder(name: str, tmp_path: Path) -> None:
    """T5 has position biases; the decoder of either is causal, and sees the encoder's real tokens only."""
    t5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2}
    bart = {"vocab_size": 96, "d_model": 32, "max_position_embeddings": 64} | {
        f"{part}_{key}": value
        for part in ("encoder", "decoder")
        for key, value in {"layers": 2, "ffn_dim": 64, "attention_heads": 4}.items()
    }
    model = build(name, {**(t5 if name.startswith("T5") else bart), "decoder_start_token_id": 0})
    loaded = load(model, tmp_path)
    assert list(example_inputs(loaded.program)) == ["input_ids", "attention_mask", "decoder_input_ids"]
    assert loaded.output_names == ["logits", "encoder_last_hidden_state"]
    assert set(loaded.dimension_names.values()) == {"batch", "sequence", "decoder_sequence"}
    inputs = {"input_ids": torch.randint(2, 96, (3, 9)), "decoder_input_ids": torch.randint(2, 96, (3, 12))}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, -3:] = 0
    assert_same(Runner(loaded.program)(inputs)[0], model(**inputs, use_cache=False).logits)


def test_requests_of_older_releases() -> None:
    """They give the positions of queries in place of their number."""
    request = {"mask_function": lambda row, head, query, key: key <= query + 1, "batch_size": 2, "kv_length": 4}
    given: tuple[dict[str, Any], ...] = ({"q_length": 3}, {"cache_position": torch.arange(3)})
    now, before = (attention._traced_mask(False, 8, False, {**request, **each}) for each in given)
    assert now is not None and before is not None and torch.equal(now, before)


def test_transformers_is_as_it_was(tmp_path: Path) -> None:
    """Also after a model that cannot be traced."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    load(build("LlamaForCausalLM", GROUPED), tmp_path / "llama")
    xlnet = {"vocab_size": 96, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64}
    with pytest.raises(UserError, match="does not take every size"):
        load(build("XLNetLMHeadModel", xlnet), tmp_path / "xlnet")
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
    assert ALL_MASK_ATTENTION_FUNCTIONS["eager"] is eager_mask


@pytest.mark.parametrize("padding", mostly_slow(("none", "mask"), "none"))
def test_logits_of_the_last_place(padding: str, tmp_path: Path) -> None:
    """The vocabulary's matrix meets one place of each row."""
    model = build("LlamaForCausalLM", GROUPED)
    loaded = load(model, tmp_path, padding, "last")
    assert loaded.settings == {"padding": padding, "logits": "last"}
    for shape in ((1, 1), (3, 9)):
        ids = torch.randint(2, 96, shape)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = model(**inputs, use_cache=False).logits[:, -1:]
        assert_same(Runner(loaded.program)(inputs)[0], expected)
    graph = canonicalize(loaded.program).graph
    wide = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        if node.meta["val"].shape[-1] == 96
    ]
    assert [node.meta["val"].shape[1] for node in wide] == [1]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder": ("BertForMaskedLM", SINGLE, "only a causal Hugging Face model leaves the choice"),
    "language model of an encoder": ("BertLMHeadModel", SINGLE, "only a causal Hugging Face model leaves the choice"),
    "no logits": ("LlamaModel", GROUPED, "the model cannot compute the logits of some places only"),
    "other logits": (
        "LlamaForSequenceClassification",
        {**GROUPED, "pad_token_id": 0},
        "the model cannot compute the logits of some places only",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_without_logits_of_places(case: str, tmp_path: Path) -> None:
    name, options, reason = REFUSED[case]
    with pytest.raises(UserError, match=f"--logits last: {reason}; got .*, a {name}"):
        load(build(name, options), tmp_path, None, "last")


@pytest.mark.parametrize("padding", ["none", "mask"])
def test_padding_of_an_encoder(padding: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--padding {padding}: only a causal Hugging Face model leaves the choice"):
        load(build("BertForMaskedLM", SINGLE), tmp_path, padding)


def test_a_causal_model_that_takes_no_mask(tmp_path: Path) -> None:
    """Its forward has no such argument: the default is what it takes, and either choice is a mistake."""
    options = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1, "num_heads": 2}
    model = build("xLSTMForCausalLM", options)
    with pytest.raises(UserError, match="--padding none: the model takes no attention_mask"):
        load(model, tmp_path, "none")


@pytest.mark.parametrize("option", [("--padding", "none"), ("--logits", "last")])
def test_choices_for_other_kinds_of_models(cli: Cli, archive: Path, tmp_path: Path, option: tuple[str, str]) -> None:
    torch.save(models.Gated(), tmp_path / "module.pt")
    assert (
        cli("compile", archive, "--backend", "none", "--onnx", tmp_path / "m.onnx", "--layers", "none").exit_code == 0
    )
    pickled = ["--trust-model", "--input-spec", "input:float32[2,16]"]
    for model, more in ((archive, []), (tmp_path / "module.pt", pickled), (tmp_path / "m.onnx", [])):
        result = cli("compile", model, "--backend", "none", "--onnx", tmp_path / "n.onnx", *option, *more)
        assert result.exit_code == 2
        assert f"{' '.join(option)}: only a causal Hugging Face model leaves the choice; got {model}" in result.stderr
        assert not (tmp_path / "n.onnx").exists()
