"""Causal language models with a key-value cache mean what they mean with that of transformers, in every family."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests import models
from tests.caches import FAMILIES, IN_TORCH, SQUARED, calling, feed, mostly_slow, steps, transformers_own
from tests.tolerance import assert_as_accurate, assert_same
from tests.twellc.loaders.test_checkpoint import sparselm
from twellc.base.errors import UserError
from twellc.base.torch_private import FakeTensorMode
from twellc.checks.evaluator import OnnxEvaluator
from twellc.export.onnx_export import export_onnx, opset_of, save_onnx
from twellc.loaders.cached import load_with_cache
from twellc.loaders.loaded import LoadedModel
from twellc.options.source import CacheOptions
from twellc.passes.graph.execution import Runner
from twellc.passes.pipeline import PassOptions, Rewritten, run_passes

LENGTH, CHUNK = 10, 4
# Rows of unequal lengths, of which one takes a chunk more than the others, and one is a single token.
PROMPTS = [7, 3, 1]


def ids(vocabulary: int = 96) -> Tensor:
    return torch.randint(2, vocabulary, (len(PROMPTS), LENGTH))


def load(folder: Path, dtype: torch.dtype | str | None = torch.float32, logits: str = "last") -> LoadedModel:
    return load_with_cache(folder, CacheOptions(LENGTH, len(PROMPTS), CHUNK), logits, dtype)


def to_onnx(loaded: LoadedModel, rewritten: Rewritten, folder: Path) -> OnnxEvaluator:
    names = list(loaded.input_names.values())
    graph = export_onnx(
        rewritten.program, names, loaded.output_names, loaded.dimension_names, opset_of(rewritten.attention)
    )
    save_onnx(graph, folder / "m.onnx")
    return OnnxEvaluator(folder / "m.onnx")


def check_steps(loaded: LoadedModel, own: object, tmp_path: Path | None = None, vocabulary: int = 96) -> None:
    """Compare the traced program with a model of transformers in float32, and the ONNX graph that is made of it."""
    tokens, taken = ids(vocabulary), steps(PROMPTS, LENGTH, CHUNK)
    assert loaded.cache is not None
    expected = transformers_own(own, tokens, taken)
    program = calling(Runner(loaded.program), loaded.cache, len(tokens), torch.float32, list(loaded.input_names))
    assert_same(feed(program, tokens, taken), expected)
    if tmp_path is not None:
        rewritten = run_passes(loaded.program, PassOptions(attention=("operator",)))
        evaluator = to_onnx(loaded, rewritten, tmp_path)
        assert_same(feed(calling(evaluator.run, loaded.cache, len(tokens), torch.float32), tokens, taken), expected)


@pytest.mark.parametrize(
    "family", mostly_slow(FAMILIES | SQUARED, "llama", "phi3-window", "falcon", "gemma2", "nemotron-h")
)
def test_families(tmp_path: Path, family: str) -> None:
    model = (FAMILIES | SQUARED)[family]()
    check_steps(load(models.save(model, tmp_path / "model", torch.float32)), model, tmp_path)


@pytest.mark.parametrize("kind", mostly_slow(("longrope", "dynamic"), "longrope"))
def test_rotary_frequencies_that_change(tmp_path: Path, kind: str) -> None:
    """They stay as they are up to the length at which they would change."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LENGTH}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = models.llama(rope_parameters=rope)
    folder = models.save(model, tmp_path / "model", torch.float32)
    check_steps(load(folder), model)
    if kind == "longrope":
        with pytest.raises(UserError, match=f"--kv-cache {LENGTH + 1}: is longer than .*at most {LENGTH}"):
            load_with_cache(folder, CacheOptions(LENGTH + 1), "last", None)


@pytest.mark.slow
def test_bytelm(bytelm: Path) -> None:
    own = transformers.AutoModelForCausalLM.from_pretrained(bytelm, dtype=torch.float32)
    check_steps(load(bytelm), own, vocabulary=256)


def test_sparselm(llama: Path, tmp_path: Path) -> None:
    own = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    check_steps(load(sparselm(llama, tmp_path / "sparselm", bare_weights=True)), own)


# What the forms need for their own kernels: the low precision.
@pytest.mark.parametrize("family", mostly_slow(("llama", "gemma2", "falcon"), "llama"))
def test_forms_in_low_precision(tmp_path: Path, family: str) -> None:
    model = FAMILIES[family]()
    folder = models.save(model, tmp_path / "model", torch.bfloat16)
    loaded, tokens, taken = load(folder, None), ids(), steps(PROMPTS, LENGTH, CHUNK)
    assert loaded.cache is not None
    assert loaded.cache.dtype == "bf16"
    plain = transformers_own(model, tokens, taken)
    truth = transformers_own(model.double(), tokens, taken)

    def check(run: Any, names: list[str] | None = None) -> None:
        call = calling(run, loaded.cache, len(tokens), torch.bfloat16, names)
        assert_as_accurate(feed(call, tokens, taken), plain, truth)

    for forms in (("cudnn", "matmul"), ("matmul",)):
        rewritten = run_passes(loaded.program, PassOptions(attention=forms, layers="all"))
        form, mask = ("as written", "tensor") if family == "gemma2" else (forms[0], "causal")
        assert {(block.form, block.mask) for block in rewritten.attention} == {(form, mask)}
        check(Runner(rewritten.program), list(loaded.input_names))
        check(to_onnx(loaded, rewritten, tmp_path).run)


def test_all_logits(tmp_path: Path) -> None:
    model = models.llama()
    loaded, tokens = load(models.save(model, tmp_path / "model", torch.float32), logits="all"), ids()
    assert loaded.cache is not None
    call = calling(Runner(loaded.program), loaded.cache, len(tokens), torch.float32, list(loaded.input_names))
    counts = torch.full((len(tokens),), CHUNK)
    first = call(tokens[:, :CHUNK], torch.zeros_like(counts), counts)
    second = call(tokens[:, CHUNK : 2 * CHUNK], counts, counts)
    with torch.no_grad():
        assert_same(torch.cat([first, second], 1), model(tokens[:, : 2 * CHUNK]).logits)


def test_a_row_without_tokens_keeps_its_caches(tmp_path: Path) -> None:
    loaded = load(models.save(models.llama(), tmp_path / "model", torch.float32))
    assert loaded.cache is not None
    caches = [torch.randn(2, *pair.shape[1:]) for pair in loaded.cache.pairs]
    inputs = [torch.ones(2, 3, dtype=torch.int64), torch.tensor([4, 4]), torch.tensor([0, 3]), *caches]
    logits, *after = Runner(loaded.program)(dict(zip(loaded.input_names, inputs, strict=True)))
    assert logits.isfinite().all()
    for before, now in zip(caches, after, strict=True):
        assert torch.equal(now[0], before[0])
        changed = (now[1] != before[1]).any(-1).any(0)
        assert changed.nonzero().flatten().tolist() == [4, 5, 6]


def test_what_is_known(llama: Path) -> None:
    loaded = load(llama, None)
    cache = loaded.cache
    assert cache is not None
    assert (cache.length, cache.batch, cache.prefill_chunk, cache.logits) == (LENGTH, len(PROMPTS), CHUNK, "last")
    assert (cache.layers, cache.kv_heads, cache.head_dim, cache.dtype) == (2, 2, 8, "bf16")
    assert (cache.vocabulary, cache.end_tokens, cache.position_limit) == (96, [2], 64)
    names = [(pair.input, pair.output) for pair in cache.pairs]
    assert names[:2] == [(f"past_key_values.0.{part}", f"present.0.{part}") for part in ("key", "value")]
    assert [pair.shape for pair in cache.pairs] == [[-1, 2, LENGTH, 8]] * 4
    # Modules keep their paths.
    layers = run_passes(loaded.program, PassOptions()).layers
    assert [layer.module for layer in layers] == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_layers_without_state_take_no_place(tmp_path: Path) -> None:
    """Those with a cache keep their numbers in the model."""
    cache = load(models.save(SQUARED["nemotron-h"](), tmp_path / "model", torch.float32)).cache
    assert cache is not None
    assert cache.layers == 2
    assert [pair.input for pair in cache.pairs] == [
        f"past_key_values.{layer}.{part}" for layer in (1, 3) for part in ("key", "value")
    ]


def test_experts_reach_the_passes(tmp_path: Path) -> None:
    """Chosen by groups, with a bias, in a latent space, as the best ones without a look at values."""
    folder = models.save(IN_TORCH["nemotron-h-experts"](), tmp_path / "model", torch.bfloat16)
    layers = run_passes(load(folder, None).program, PassOptions()).layers
    assert ("model.layers.0.mixer.experts", "twell") in [(layer.module, layer.decision) for layer in layers]


def test_a_layer_that_caches_nothing_and_has_a_state(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x.cumsum(1)))
    with pytest.raises(UserError, match="computes other logits over a cache than without one"):
        load(llama)


MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (models.t5, r"--kv-cache: .*, a T5ForConditionalGeneration: is not a causal language model"),
        (models.rwkv, r"--kv-cache: .*, a RwkvForCausalLM: its cache is not one of keys and values alone"),
        (functools.partial(FAMILIES["falcon"], alibi=True), "does not run over a cache"),
        (
            models.family("Bamba", **models.WIDE, **MAMBA),
            "got layers of linear_attention; .*as TwellBambaForCausalLM",
        ),
    ],
    ids=["t5", "rwkv", "alibi", "hybrid"],
)
def test_other_models(tmp_path: Path, make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(models.save(make(), tmp_path / "model", torch.bfloat16), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CacheOptions(8, batch=65537), "--max-batch-size: is too large; got 65537; expected 65536 at most"),
        (CacheOptions(65), r"--kv-cache 65: is longer than what the model was made for; .*at most 64"),
    ],
)
def test_sizes_that_are_too_large(llama: Path, options: CacheOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_with_cache(llama, options, "last", None)


def test_a_weight_that_does_not_fit(tmp_path: Path) -> None:
    model = models.llama()
    model.model.embed_tokens.weight.data[3, 3] = 1e6
    with pytest.raises(UserError, match=r"does not fit into float16; got model\.embed_tokens\.weight"):
        load(models.save(model, tmp_path / "model", torch.float32), "fp16")


SIZES = {"vocab_size": 96, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64}
xglm = models.family("XGLM", **SIZES, d_model=32, ffn_dim=96, activation_function="relu")
ctrl = models.family("CTRL", "LMHeadModel", vocab_size=96, n_embd=32, dff=96, n_layer=2, n_head=4, n_positions=64)


@pytest.mark.parametrize("make", [xglm, pytest.param(ctrl, marks=pytest.mark.slow)], ids=["xglm", "ctrl"])
def test_tables_have_the_dtype_of_the_weights(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Sinusoids are a buffer: XGLM's make all behind them float32 unless they are converted, which CTRL does itself."""
    model = make()
    folder, tokens, taken = models.save(model, tmp_path, torch.float32), ids(), steps(PROMPTS, LENGTH, CHUNK)
    loaded = load(folder, None)
    assert loaded.notes == ["the model is in float32; compiled in bfloat16 (--dtype changes it)"]
    assert loaded.cache is not None
    call = calling(Runner(loaded.program), loaded.cache, len(tokens), torch.bfloat16, list(loaded.input_names))
    low = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    plain, truth = (transformers_own(each, tokens, taken) for each in (low, model))
    assert_as_accurate(feed(call, tokens, taken), plain, truth.double())


def test_a_layer_more_has_no_new_shapes(tmp_path: Path) -> None:
    """torch computes each once: it knows before the first layer that all caches have the same sizes."""

    def new_shapes(layers: int) -> int:
        model = models.llama(num_hidden_layers=layers)
        folder = models.save(model, tmp_path / str(layers), torch.float32)
        FakeTensorMode.cache_clear()
        known = FakeTensorMode.cache_info().misses
        load(folder, logits="asked")
        return int(FakeTensorMode.cache_info().misses - known)

    few, many = new_shapes(2), new_shapes(6)
    assert many - few <= 4 * 3, "of a layer: its caches with the new tokens, attention over them, and what comes of it"
