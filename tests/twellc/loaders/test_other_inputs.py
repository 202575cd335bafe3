"""Hugging Face models of images and audio: their inputs, their blocks, and results that are right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests import models
from tests.caches import mostly_slow
from tests.conftest import Cli
from twellc.base.errors import UserError
from twellc.loaders.huggingface_inputs import inputs_of
from twellc.loaders.model import load_model
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_act": "relu",
}
VISION = TEXT | {"image_size": 32, "patch_size": 8}


def clip() -> Any:
    words = TEXT | {"vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 95, "bos_token_id": 1}
    config = transformers.CLIPConfig(text_config=words | {"pad_token_id": 0}, vision_config=VISION, projection_dim=32)
    return transformers.CLIPModel(config)


def whisper() -> Any:
    sizes = {
        f"{side}_{what}": size
        for side in ("encoder", "decoder")
        for what, size in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 96))
    }
    config = transformers.WhisperConfig(
        vocab_size=96,
        num_mel_bins=16,
        d_model=32,
        max_source_positions=20,
        max_target_positions=24,
        activation_function="relu",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
    )
    return transformers.WhisperForConditionalGeneration(config)


def wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        **TEXT,
        vocab_size=96,
        conv_dim=(32, 32),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2ForCTC(config)


# Model, its inputs, and how many of its blocks are rewritten.
MODELS: dict[str, tuple[Callable[[], Any], set[str], int]] = {
    "vit": (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)), {"pixel_values"}, 2),
    "deit": (lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**VISION)), {"pixel_values"}, 2),
    "clip": (clip, {"input_ids", "attention_mask", "pixel_values"}, 4),
    "whisper": (whisper, {"input_features", "decoder_input_ids"}, 2),
    "wav2vec2": (wav2vec2, {"input_values"}, 2),
}


@pytest.mark.parametrize("name", mostly_slow(MODELS, "vit", "wav2vec2"))
def test_compile_and_check(cli: Cli, tmp_path: Path, name: str) -> None:
    make, inputs, rewritten = MODELS[name]
    torch.manual_seed(0)
    folder, graph = models.save(make(), tmp_path / "model", torch.float32), tmp_path / "m.onnx"
    done = cli("compile", folder, "--backend", "none", "--onnx", graph)
    assert done.exit_code == 0, done.output
    assert f"{rewritten} of {rewritten} feed-forward blocks rewritten" in done.output
    model = load_model(TracingOptions(folder))
    if name == "vit":  # images have the size of the configuration; their number is dynamic
        assert (set(model.dimension_names.values()), model.vocabulary) == ({"batch"}, None)
        images = torch.randn(5, 3, 32, 32)
        eager = transformers.ViTForImageClassification.from_pretrained(folder)
        torch.testing.assert_close(Runner(model.program)({"pixel_values": images})[0], eager(images).logits)
    names = {spec.arg.name for spec in model.program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    assert names == inputs
    checked = cli("check", folder, graph)
    assert checked.exit_code == 0, checked.output


def test_inputs_are_known_without_a_trace(tmp_path: Path) -> None:
    for make, inputs, _ in MODELS.values():
        assert set(inputs_of(tmp_path, make(), masked=True)) == inputs


@pytest.mark.parametrize("name", ["vit", pytest.param("whisper", marks=pytest.mark.slow)])
def test_plan(cli: Cli, tmp_path: Path, name: str) -> None:
    folder = models.save(MODELS[name][0](), tmp_path / "model", torch.float32)
    done = cli("compile", folder, "-o", tmp_path / "m.plan", "--backend", "tensorrt-rtx")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("option", [("--padding", "mask"), ("--logits", "last")])
def test_choices_of_causal_models_are_refused(cli: Cli, tmp_path: Path, option: tuple[str, str]) -> None:
    folder = models.save(MODELS["vit"][0](), tmp_path / "model", torch.float32)
    done = cli("compile", folder, "--backend", "none", "--onnx", tmp_path / "m.onnx", *option)
    assert done.exit_code == 2 and " ".join(option) in done.output


def test_unknown_inputs(tmp_path: Path) -> None:
    config = transformers.PatchTSTConfig(num_input_channels=1, context_length=32, d_model=32, num_hidden_layers=1)
    models.save(transformers.PatchTSTModel(config), tmp_path)
    with pytest.raises(UserError, match="does not know the inputs of this architecture"):
        load_model(TracingOptions(tmp_path))
