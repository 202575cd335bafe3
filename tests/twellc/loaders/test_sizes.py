"""Sizes and inputs of Hugging Face models: of parts, of one size only, of images and audio."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import twellc
from tests import models
from tests.caches import mostly_slow
from tests.conftest import Cli
from tests.twellc.test_cli import failed
from twellc.base.errors import UserError
from twellc.checks import candidate
from twellc.export.shapes import ShapeRange, fixed_sizes
from twellc.loaders.huggingface_inputs import inputs_of, read_sizes, written_sizes
from twellc.loaders.model import load_model
from twellc.loaders.tracing import trace
from twellc.options.commands import CheckOptions
from twellc.options.source import TracingOptions
from twellc.passes.graph.execution import Runner

SMALL = {**models.SMALL, "num_hidden_layers": 1, "intermediate_size": 64, "hidden_act": "relu"}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "hidden_act": "relu",
}
VISION = TEXT | {"image_size": 32, "patch_size": 8}


def save(model: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    return models.save(model.eval(), folder, torch.float32)


@pytest.mark.parametrize("kind", ["words", "images"])
def test_an_encoder_and_a_decoder_of_different_sizes(kind: str, tmp_path: Path) -> None:
    """Token ids and places of each input are those of its part."""
    decoder = transformers.BertConfig(
        **SMALL, max_position_embeddings=40, is_decoder=True, add_cross_attention=True, pad_token_id=0
    )
    if kind == "words":
        encoder: Any = transformers.BertConfig(**SMALL | {"vocab_size": 80}, max_position_embeddings=24)
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        eager = transformers.EncoderDecoderModel(config).eval()
        inputs = {"input_ids": torch.randint(2, 80, (2, 24)), "decoder_input_ids": torch.randint(2, 80, (2, 40))}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        known: tuple[Any, int] = ({"sequence": (1, 24, 24)}, 80)
    else:
        encoder = transformers.ViTConfig(**{**VISION, "num_hidden_layers": 1, "intermediate_size": 64})
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        eager = transformers.VisionEncoderDecoderModel(config).eval()
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "decoder_input_ids": torch.randint(2, 80, (2, 9))}
        known = ({}, 96)
    model = load_model(TracingOptions(save(eager, tmp_path)))
    ranges = {model.dimension_names[symbol]: sizes for symbol, sizes in model.dimension_ranges.items()}
    assert (ranges, model.vocabulary) == ({"batch": (1, 1, 8), "decoder_sequence": (1, 40, 40)} | known[0], known[1])
    torch.testing.assert_close(Runner(model.program)(inputs)[0], eager(**inputs, use_cache=False).logits)


@pytest.fixture(scope="module")
def canine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It pads its sequence by a number that torch.export takes for a constant."""
    sizes = {**SMALL, "max_position_embeddings": 64, "local_transformer_stride": 16, "num_hash_buckets": 64}
    config = transformers.CanineConfig(**sizes)
    return save(transformers.CanineModel(config), tmp_path_factory.mktemp("models") / "canine")


def test_one_size(canine: Path) -> None:
    message = (
        r"the model does not take every size: dimension 1 of input_ids cannot vary.*\. Compile it for one size, such "
        r"as --optimization-profile input_ids:1x64:1x64:1x64\."
    )
    with pytest.raises(UserError, match=message) as refusal:
        load_model(TracingOptions(canine))
    assert "ontrol flow" not in str(refusal.value)
    model = load_model(TracingOptions(canine), sizes=(("input_ids", (0, 32)),))
    assert model.settings == {"sizes": "input_ids:0x32"} and set(model.dimension_names.values()) == {"batch"}
    eager = transformers.CanineModel.from_pretrained(canine).eval()
    ids = torch.randint(2, 96, (3, 32))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.testing.assert_close(Runner(model.program)(inputs)[0], eager(**inputs).last_hidden_state)
    with pytest.raises(
        UserError, match="does not take this size in dimension 1 of input_ids; got 65; expected 1 to 64"
    ):
        load_model(TracingOptions(canine), sizes=(("input_ids", (1, 65)),))
    with pytest.raises(UserError, match="does not take every size"):  # none that is known is fixed
        load_model(TracingOptions(canine), sizes=(("input_ids", (0, 0)), ("other", (3,))))


@pytest.mark.slow
def test_compile_and_check_at_one_size(cli: Cli, canine: Path, tmp_path: Path) -> None:
    graph, profile = tmp_path / "canine.onnx", "input_ids:2x32:2x32:2x32"
    result = cli("compile", canine, "--backend", "none", "--onnx", graph, "--optimization-profile", profile)
    assert result.exit_code == 0, result.stderr
    result = cli("check", canine, graph)
    assert result.exit_code == 0 and "within tolerance" in result.stdout
    manifest = twellc.compile(canine, backend="none", onnx=graph, optimization_profiles=[profile], overwrite=True)
    candidate._graph_made_again(CheckOptions(canine, graph), manifest, tmp_path, lambda step: None)
    varying = "input_ids:1x32:1x48:1x64"
    result = cli(
        "compile", canine, "--backend", "none", "--onnx", tmp_path / "b.onnx", "--optimization-profile", varying
    )
    failed(result, "does not take every size: dimension 1 of input_ids cannot vary")


@pytest.mark.slow
def test_mamba_at_one_size(tmp_path: Path) -> None:
    """Of more tokens than a chunk has, which are no multiple of it."""
    model = models.nemotron_h(layers_block_type=["mamba", "attention", "mlp"])
    folder = save(model, tmp_path)
    message = r"dimension 1 of input_ids cannot vary\. Compile it for one size, .* vLLM .* TwellNemotronHForCausalLM"
    with pytest.raises(UserError, match=message):
        load_model(TracingOptions(folder))
    program = load_model(TracingOptions(folder), sizes=(("input_ids", (0, 40)),)).program
    ids = torch.randint(2, 96, (3, 40))
    torch.testing.assert_close(Runner(program)({"input_ids": ids})[0], model(ids, use_cache=False).logits)


def test_models_that_take_every_size_are_not_fixed(llama: Path) -> None:
    model = load_model(TracingOptions(llama), sizes=(("input_ids", (1, 8)),))
    assert "sizes" not in model.settings and set(model.dimension_names.values()) == {"batch", "sequence"}


def test_fixed_sizes_of_profiles() -> None:
    def given(name: str, *shapes: tuple[int, ...]) -> tuple[str, ShapeRange]:
        return name, ShapeRange(*shapes)

    one, several = given("x", (1, 8), (1, 8), (1, 8)), given("x", (1, 8), (2, 8), (4, 8))
    assert fixed_sizes([one]) == (("x", (1, 8)),)
    assert fixed_sizes([several]) == (("x", (0, 8)),)
    others = [given("x", (1, 9), (1, 9), (1, 9)), given("y", (3,), (3,), (3,))]
    assert fixed_sizes([one, *others]) == (("x", (1, 0)), ("y", (3,)))
    assert fixed_sizes([given("x", (1,), (2,), (3,))]) == () == fixed_sizes([])
    for sizes in ((), (("x", (1, 8)),), (("x", (0, 8)), ("a.b", (3,)))):
        assert read_sizes(written_sizes(sizes)) == sizes
    assert read_sizes("None") == () == read_sizes("x:y,z")


class Odd(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "most":
                return (x if x.shape[1] <= 20 else -x).relu()
            case "least":
                return (x if x.shape[1] >= 12 else -x).relu()
            case "equal":
                return x[:, : y.shape[1]] + y if x.shape[1] == y.shape[1] else y
            case "another":
                return (x if x.shape[1] == 16 else -x).relu()
            case "values":
                return x if x.sum() > 0 else -x
        raise RuntimeError("expected scalar type torch.bfloat16 but found torch.float32")


WORDS = {
    "most": "the model does not take every size: dimension 1 of x must be 2 to 20. Fix the sizes.",
    "least": "the model does not take every size: dimension 1 of x must be 12 to 4096. Fix the sizes.",
    "equal": "the model does not take every size: dimension 1 of y must be that of dimension 1 of x. Fix the sizes.",
    "another": "the model does not take every size: dimension 1 of x cannot vary. Fix the sizes.",
    "values": "Control flow that depends on values cannot be exported: replace it by torch.where or torch.cond.",
    "dtypes": "Its code mixes dtypes: save the model in float32",
}


@pytest.mark.parametrize("kind", WORDS)
def test_what_torch_says_in_words_of_the_inputs(kind: str) -> None:
    inputs = {"x": torch.randn(2, 16), "y": torch.randn(2, 16 if kind == "equal" else 9)}
    batch, n, m = torch.export.Dim("batch"), torch.export.Dim("n", max=4096), torch.export.Dim("m", max=4096)
    shapes = {"x": {0: batch, 1: n}, "y": {0: batch, 1: m}}
    with pytest.raises(UserError) as refusal:
        trace("model", Odd(kind), (), inputs, shapes, "Fix the model.", "Fix the sizes.")
    message = str(refusal.value)
    assert WORDS[kind] in message
    assert "Fix the model." not in message


clip = models.family(
    "CLIP",
    "Model",
    text_config={**TEXT, "vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 95, "pad_token_id": 0},
    vision_config=VISION,
    projection_dim=32,
)


def whisper() -> Any:
    """With the weights that transformers draws itself."""
    parts = {"layers": 1, "attention_heads": 4, "ffn_dim": 96}
    config = transformers.WhisperConfig(
        **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in parts.items()},
        **{"vocab_size": 96, "num_mel_bins": 16, "d_model": 32, "max_source_positions": 20, "max_target_positions": 24},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        **{"activation_function": "relu", "suppress_tokens": None, "begin_suppress_tokens": None},
    )
    return transformers.WhisperForConditionalGeneration(config)


wav2vec2 = models.family(
    "Wav2Vec2",
    "ForCTC",
    **{**TEXT, "vocab_size": 96, "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3)},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2},
)
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
