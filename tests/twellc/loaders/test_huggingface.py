"""Loading Hugging Face directories."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import models
from tests.caches import mostly_slow
from twellc.base.errors import UserError
from twellc.loaders.loaded import LoadedModel
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner, example_inputs


def logits_of(model: LoadedModel, **inputs: torch.Tensor) -> torch.Tensor:
    return Runner(model.program)(inputs)[0]


def tokens(*shape: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 96, shape)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_llama(llama: Path, load_once: Callable[..., LoadedModel]) -> None:
    model = load_once(TracingOptions(llama))
    assert (model.kind, model.output_names, model.vocabulary) == ("Hugging Face directory", ["logits"], 96)
    assert model.language_model
    assert model.declared_activation == "relu"
    assert set(model.dimension_names.values()) == {"batch", "sequence"}
    assert set(model.dimension_ranges.values()) == {(1, 1, 8), (1, 64, 64)}
    inputs = tokens(3, 21)
    own = transformers.LlamaForCausalLM.from_pretrained(llama)(**inputs, use_cache=False).logits
    assert torch.equal(logits_of(model, **inputs), own)


@pytest.mark.parametrize(
    ("name", "options", "inputs"),
    [
        # Its config is that of an encoder-decoder model.
        (
            "UMT5EncoderModel",
            {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 1},
            ["input_ids", "attention_mask"],
        ),
        ("FNetModel", {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}, ["input_ids"]),
    ],
)
def test_models_without_some_of_the_inputs(
    name: str, options: dict[str, Any], inputs: list[str], tmp_path: Path
) -> None:
    model_class = getattr(transformers, name)
    eager = model_class(model_class.config_class(vocab_size=96, **options)).eval()
    model = load_model(TracingOptions(models.save(eager, tmp_path, torch.float32)))
    assert list(example_inputs(model.program)) == inputs
    given = {key: value for key, value in tokens(3, 7).items() if key in inputs}
    torch.testing.assert_close(logits_of(model, **given), eager(**given).last_hidden_state)


def tiny(name: str, **changes: Any) -> Any:
    """Make a model of transformers with the sizes that most of its configurations call alike, of 66 positions."""
    options = {**models.SMALL, "num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": 66}
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**{**options, **changes})).eval()


@pytest.mark.parametrize(
    ("name", "changes", "longest"),
    [
        ("RobertaForMaskedLM", {}, 64),
        pytest.param("XLMRobertaForSequenceClassification", {}, 64, marks=pytest.mark.slow),
        pytest.param("CamembertModel", {}, 64, marks=pytest.mark.slow),
        pytest.param("MPNetForMaskedLM", {}, 64, marks=pytest.mark.slow),
        pytest.param("IBertForMaskedLM", {}, 64, marks=pytest.mark.slow),  # its table is not a torch.nn.Embedding
        ("RobertaModel", {"pad_token_id": 4}, 61),
        # Positions from 0 on, beside a table of words with padding and as many rows; or a table with more rows.
        ("BertForMaskedLM", {"max_position_embeddings": 96}, 96),
        pytest.param("BigBirdForMaskedLM", {}, 66, marks=pytest.mark.slow),
        ("XGLMForCausalLM", {"d_model": 32, "attention_heads": 4, "num_layers": 1, "ffn_dim": 64}, 66),
    ],
)
def test_longest_sequence(name: str, changes: dict[str, Any], longest: int, tmp_path: Path) -> None:
    """The model itself takes as many tokens as the profile says; some take no more."""
    model = load_model(TracingOptions(models.save(tiny(name, **changes), tmp_path, torch.float32)))
    (sequence,) = (key for key, value in model.dimension_names.items() if value == "sequence")
    assert model.dimension_ranges[sequence] == (1, longest, longest)
    inputs = tokens(1, longest)
    inputs["input_ids"].clamp_(min=5)  # no padding
    assert logits_of(model, **inputs).isfinite().all()
    if longest < 66:
        eager = tiny(name, **changes)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
            eager(**{key: torch.cat([value, value[:, :1]], 1) for key, value in inputs.items()})


def test_longest_sequence_by_other_names(tmp_path: Path) -> None:
    """What config.json leaves out is what transformers takes for it; MPT calls it max_seq_len."""
    bert = models.save(tiny("BertForMaskedLM", max_position_embeddings=512), tmp_path / "bert", torch.float32)
    config = json.loads((bert / "config.json").read_text())
    del config["max_position_embeddings"]
    (bert / "config.json").write_text(json.dumps(config))
    mpt_config = transformers.MptConfig(d_model=32, n_heads=4, n_layers=1, max_seq_len=64, vocab_size=96)
    mpt = models.save(transformers.MptForCausalLM(mpt_config), tmp_path / "mpt", torch.float32)
    for folder, longest in ((bert, 512), (mpt, 64)):
        model = load_model(TracingOptions(folder))
        assert (1, min(longest, 128), longest) in model.dimension_ranges.values()


def test_the_precision_of_the_weights(opt: Path, load_once: Callable[..., LoadedModel]) -> None:
    model = load_once(TracingOptions(opt))
    assert {p.dtype for p in model.program.state_dict.values()} == {torch.float32}


def test_sharded_safetensors(llama: Path, tmp_path: Path, load_once: Callable[..., LoadedModel]) -> None:
    sharded = models.save(models.llama(), tmp_path / "model", max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    inputs = tokens(2, 5)
    assert torch.equal(
        logits_of(load_model(TracingOptions(sharded)), **inputs), logits_of(load_once(TracingOptions(llama)), **inputs)
    )


BART = {"d_model": 32, "num_layers": 1} | {
    f"{part}_{key}": value
    for part in ("encoder", "decoder")
    for key, value in {"layers": 1, "ffn_dim": 64, "attention_heads": 4}.items()
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
UNTRACEABLE: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "control flow": (
        "FSMTForConditionalGeneration",
        {**BART, "langs": ["en", "de"], "src_vocab_size": 96, "tgt_vocab_size": 96},
        "torch.export cannot trace the model (Could not guard on",
        "Control flow that depends on values cannot be exported: replace it by torch.where or torch.cond.",
    ),
    "lengths": (
        "BartForSequenceClassification",
        BART,
        "the model does not take every size: dimension 1 of decoder_input_ids must be that of dimension 1 of input",
        "Compile it for one size, such as --optimization-profile input_ids:1x128:1x128:1x128 "
        "--optimization-profile decoder_input_ids:1x128:",
    ),
    "a length": (
        "XLNetLMHeadModel",
        {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 64},
        "the model does not take every size: dimension 1 of input_ids must be 2 to 511.",
        "Compile it for one size, such as --optimization-profile input_ids:1x128:1x128:1x128.",
    ),
    "experts": (
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "dense_act_fn": "gelu"},
        "torch.export cannot trace the model",
        "Mixture-of-experts models cannot be exported as they are.",
    ),
}


@pytest.mark.parametrize("case", mostly_slow(UNTRACEABLE, "control flow", "lengths"))
def test_models_that_cannot_be_traced(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cause alone is said, in words of the inputs; the message leaves out the graph so far."""
    name, options, reason, fix = UNTRACEABLE[case]
    model_class = getattr(transformers, name)
    models.save(model_class(model_class.config_class(vocab_size=96, **options)), tmp_path, torch.float32)
    capsys.readouterr()
    with pytest.raises(UserError) as refusal:
        load_model(TracingOptions(tmp_path))
    assert "".join(capsys.readouterr()) == ""
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path}: {reason}") and fix in message
    assert ("Mixture-of-experts models cannot be exported as they are." in message) == (case == "experts")
