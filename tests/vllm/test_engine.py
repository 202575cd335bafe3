"""Models in vLLM with the `twell` ops: the tokens of transformers, and what is refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import twellc
from tests import models
from tests.twellc.loaders.test_checkpoint import sparselm
from tests.vllm.conftest import DENSE, PROMPTS, TOKENS, TWELL, Answer, Ask
from twellc.base.transformers_private import nothing_fetched
from twellc.loaders.huggingface import open_directory
from twellc.plugins.fp8 import Fp8

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAYERS = models.SMALL["num_hidden_layers"]
BLOCKS_RUN = f"{LAYERS} of {LAYERS} feed-forward blocks are run by twellc"
# Widths of heads that vLLM's attention takes.
FAMILIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (models.llama, {"hidden_size": 64, "head_dim": 32}),
    "llama with biases": (models.llama, {"hidden_size": 64, "head_dim": 32, "mlp_bias": True}),
    "arcee": (models.arcee, {"hidden_size": 128}),
    "nemotron of 99 neurons": (models.nemotron, {"hidden_size": 128, "head_dim": 32, "intermediate_size": 99}),
    "jais2": (models.jais2, {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}),
    "persimmon": (models.persimmon, {"hidden_size": 128}),
    "gpt-neox": (models.gpt_neox, {"hidden_size": 128, "intermediate_size": 400}),
    "phi3": (models.phi3, {"hidden_size": 128, "intermediate_size": 336}),
    "opt": (models.opt, {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 320}),
}
several = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="there is one GPU")
SPARSELM = ["sparselm", "sparselm with bare weights"]
GATED = {"llama", "llama with biases", "phi3", *SPARSELM}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    """Return a function that makes a model of a family once, and what transformers answers."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[str, tuple[Path, list[list[int]]]] = {}

    def make(family: str) -> tuple[Path, list[list[int]]]:
        if family in SPARSELM and family not in known:
            llama, tokens = make("llama")
            known[family] = sparselm(llama, folder / family, bare_weights="bare" in family), tokens
        if family not in known:
            function, changes = FAMILIES[family]
            model = function(**changes).to(torch.bfloat16)
            known[family] = models.save(model, folder / family), generate(model)
        return known[family]

    return make


def ask_twell(ask: Ask, model: Path, **options: Any) -> Answer:
    """Serve a model by our class; skip the test if that fails and vLLM's own over transformers fails, too.

    vLLM 0.26 with transformers 5.17 can load neither GPT-NeoX nor scales of a cache, and cannot run Nemotron.
    """
    try:
        return ask(model, **TWELL, **options)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            ask(model, **DENSE, **options)
        pytest.skip("vLLM cannot serve this model over transformers without twellc either")


def generate(model: Any) -> list[list[int]]:
    """Return what transformers generates; no choice is so close that rounding would make it."""
    answers = []
    for prompt in PROMPTS:
        found = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for scores in found.scores:
            first, second = scores[0].topk(2).values
            assert first - second > 2**-7 * scores.abs().max()
        answers.append(found.sequences[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("family", [*FAMILIES, *SPARSELM])
def test_tokens_are_those_of_transformers(made: Any, ask: Ask, family: str) -> None:
    model, tokens = made(family)
    # A SparseLM needs no other name of its class: vLLM has none.
    answer = ask(model) if family in SPARSELM else ask_twell(ask, model)
    assert answer.tokens == tokens
    assert answer.calls == {"twell::gated_mlp" if family in GATED else "twell::mlp": LAYERS * TOKENS}
    assert BLOCKS_RUN in answer.log


def test_compiled_with_one_cache(made: Any, ask: Ask, tmp_path: Path) -> None:
    """Code that vLLM has compiled and kept is that of the model as it is: with the ops or without them."""
    model, tokens = made("llama")
    for options in (DENSE, TWELL, TWELL, DENSE):
        answer = ask(model, environ={"VLLM_CACHE_ROOT": str(tmp_path)}, enforce_eager=False, **options)
        assert answer.tokens == tokens
        assert (BLOCKS_RUN in answer.log) == (options is TWELL)
        if not torch.cuda.is_available():  # there, graphs are replayed
            assert answer.calls == ({"twell::gated_mlp": LAYERS * TOKENS} if options is TWELL else {})


@several
@pytest.mark.parametrize("family", ["llama", "llama with biases", "arcee", SPARSELM[1]])
def test_two_ranks(made: Any, ask: Ask, family: str) -> None:
    """Two processes share the neurons; vLLM shares out the layers of OPT's attention wrongly, also without us."""
    model, tokens = made(family)
    answer = ask(model, ranks=2, **({} if family in SPARSELM else TWELL))
    assert answer.tokens == tokens
    assert answer.log.count(BLOCKS_RUN) == 2


@several
def test_neurons_that_ranks_cannot_share(made: Any, ask: Ask) -> None:
    model, tokens = made("nemotron of 99 neurons")
    answer = ask(model, ranks=2, **TWELL)
    assert answer.tokens == tokens
    assert refusal("its 99 neurons cannot be shared out evenly among 2 ranks") in answer.log


@several
def test_two_ranks_compiled(made: Any, ask: Ask) -> None:
    model, tokens = made("llama with biases")
    assert ask(model, ranks=2, enforce_eager=False, **TWELL).tokens == tokens


# ---- in FP8 ----

FP8 = {**TWELL, "additional_config": {"twellc": {"weights": "fp8:blocks"}}}
IN_FP8 = f"{LAYERS} of them read FP8 weights"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama with biases", {}),
        ("llama with biases", {"enforce_eager": False}),
        pytest.param("llama with biases", {"ranks": 2}, marks=several),
        ("phi3", {}),
        ("opt", {}),
    ],
)
def test_quantised_blocks(made: Any, ask: Ask, family: str, options: dict[str, Any]) -> None:
    model, _ = made(family)
    own = transformers.AutoModelForCausalLM.from_pretrained(model)
    twellc.optimize(own, weights="fp8:blocks")
    answer = ask(model, **options, **FP8)
    assert answer.tokens == generate(own)
    assert answer.log.count(BLOCKS_RUN) == answer.log.count(IN_FP8) == options.get("ranks", 1)


def in_fp8(model: Path, folder: Path, strategy: str, ignored: list[str]) -> Path:
    """Write a model's projections as compressed-tensors does: FP8_DYNAMIC by channel, FP8 by tensor."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    dynamic = strategy == "channel"
    inputs = {**weights, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", *(f"re:.*{each}.*" for each in ignored)],
    }
    tensors = load_file(model / "model.safetensors")
    for name in [
        each for each in tensors if each.endswith("_proj.weight") and not any(map(each.__contains__, ignored))
    ]:
        tensors[name], scale = Fp8.quantize(tensors[name], "row" if dynamic else "tensor")
        tensors[f"{name}_scale"] = scale if dynamic else scale.reshape(1)
        if not dynamic:
            tensors[name.replace("weight", "input_scale")] = torch.tensor([0.01])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_a_checkpoint_with_blocks_in_fp8(made: Any, ask: Ask, tmp_path: Path, strategy: str) -> None:
    """The op reads the checkpoint's bytes: tokens are those of the model that transformers makes of it."""
    model, _ = made("llama with biases")
    folder = in_fp8(model, tmp_path / "fp8", strategy, ["self_attn"])
    with nothing_fetched():
        own, _, _ = open_directory(folder)
    answer = ask(folder, **TWELL)
    assert answer.tokens == generate(own) and answer.calls == {"twell::gated_mlp": LAYERS * TOKENS}
    assert BLOCKS_RUN in answer.log and IN_FP8 in answer.log


def test_a_cache_in_fp8(made: Any, ask: Ask, tmp_path: Path) -> None:
    """vLLM's attention keeps its cache in E4M3 under our class as under its own, with the checkpoint's scales."""
    model, folder = made("llama")[0], tmp_path / "model"
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    config["quantization_config"] = {
        **{"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "compressed"},
        **{"config_groups": {}, "kv_cache_scheme": scheme, "ignore": []},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(model / "model.safetensors")
    names = [f"model.layers.{layer}.self_attn.{each}_scale" for layer in range(LAYERS) for each in "kv"]
    save_file(tensors | {name: torch.tensor([0.01]) for name in names}, folder / "model.safetensors")
    answer = ask_twell(ask, folder, kv_cache_dtype="fp8")
    expected = ask(folder, kv_cache_dtype="fp8", **DENSE)
    assert answer.tokens == expected.tokens and "Using fp8 data type to store kv cache" in answer.log
    assert answer.calls == {"twell::gated_mlp": LAYERS * TOKENS}


# On a CPU vLLM 0.32 lacks what makes one scale of those of q, k and v.
@pytest.mark.parametrize("strategy", ["channel", pytest.param("tensor", marks=pytest.mark.gpu)])
def test_a_checkpoint_in_fp8(made: Any, ask: Ask, tmp_path: Path, strategy: str) -> None:
    """Its blocks are run by the op, and attention by vLLM's own layers in E4M3."""
    folder = in_fp8(made("llama")[0], tmp_path / "fp8", strategy, [])
    answer, dense = ask(folder, **TWELL), ask(folder, **DENSE)
    assert answer.calls.keys() == {"twell::gated_mlp"} and dense.calls == {}
    assert BLOCKS_RUN in answer.log and IN_FP8 in answer.log
    assert [each[0] for each in answer.tokens] == [each[0] for each in dense.tokens]


def test_linear_layers_are_not_quantised(made: Any, ask: Ask) -> None:
    model, _ = made("llama")
    said = "--additional-config: vLLM computes the linear layers outside of blocks; got 'fp8'; .* Take fp8:blocks"
    with pytest.raises(RuntimeError, match=said):
        ask(model, **{**FP8, "additional_config": {"twellc": {"weights": "fp8"}}})


@pytest.mark.parametrize("settings", [{"weights": "int8"}, {"fp8_error": 0.1}, "fp8"])
def test_other_settings_are_refused(made: Any, ask: Ask, settings: Any) -> None:
    model, _ = made("llama")
    said = re.escape(
        f"--additional-config: twellc knows no such settings; got {json.dumps({'twellc': settings})}; expected"
    )
    with pytest.raises(RuntimeError, match=said):
        ask(model, **{**FP8, "additional_config": {"twellc": settings}})


# ---- refused ----

ALL_STAY = "all feed-forward blocks stay dense: "


def refusal(reason: str) -> str:
    return f"{LAYERS} of {LAYERS} feed-forward blocks stay dense (layers.0.mlp, layers.1.mlp): {reason}"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "LoRA": ({"enable_lora": True}, ALL_STAY + "LoRA is switched on, which needs the results of each layer"),
    "float32": ({"dtype": "float32"}, refusal("computes in float32; the kernels take bfloat16 and float16")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_blocks_stay_dense(made: Any, ask: Ask, name: str) -> None:
    options, message = REFUSED[name]
    model, tokens = made("llama")
    answer = ask(model, **options, **TWELL)
    assert answer.calls == {} and answer.tokens == tokens
    assert message in answer.log


def test_batch_invariance_is_refused(made: Any, ask: Ask) -> None:
    model, _ = made("llama")
    try:
        log = ask(model, environ={"VLLM_BATCH_INVARIANT": "1"}, **TWELL).log
    except RuntimeError as error:  # vLLM's own kernels for it need a GPU
        log = str(error)
    assert ALL_STAY + "VLLM_BATCH_INVARIANT is set; " in log


def test_other_activations_stay_dense(ask: Ask, tmp_path: Path) -> None:
    model = models.llama("silu", hidden_size=64, head_dim=32, intermediate_size=448).to(torch.bfloat16)
    answer = ask(models.save(model, tmp_path / "silu"), **TWELL)
    assert answer.calls == {} and answer.tokens == generate(model)
    assert refusal("gate activation is silu; TwELL needs a ReLU family") in answer.log


def test_quantised_layers_stay_as_they_are(made: Any, ask: Ask, tmp_path: Path) -> None:
    """One layer's projections in int8, those of the other as they are."""
    model, _ = made("llama")
    config = json.loads((model / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {**weights, "strategy": "token"}}
    group["input_activations"]["dynamic"] = True
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*layers\.1\.mlp.*"],
    }
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if "layers.0.mlp" in name:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[f"{name}_scale"] = scale
            tensors[name] = (tensor / scale).round().to(torch.int8)
        else:
            tensors[name] = tensor
    folder = tmp_path / "int8"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    answer = ask(folder, **TWELL)
    assert answer.calls == {"twell::gated_mlp": TOKENS}
    assert "1 of 2 feed-forward blocks stay dense (layers.0.mlp): its layers are quantised" in answer.log
    assert "1 of 2 feed-forward blocks are run by twellc" in answer.log


def test_switched_off(made: Any, ask: Ask) -> None:
    model, _ = made("llama")
    with pytest.raises(RuntimeError, match="TwellForCausalLM"):
        ask(model, environ={"VLLM_PLUGINS": "another"}, **TWELL)
