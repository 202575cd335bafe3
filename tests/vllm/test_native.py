"""vLLM's own model classes with the `twell` ops: the tokens of transformers, of blocks and of experts.

On a CPU vLLM refuses experts without a gate; there these tests take the refusal back (`lifted.py`).
"""

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import models
from tests.vllm.conftest import PROMPTS, TOKENS, TWELL, Ask, native
from twellc.plugins.fp8 import Fp8

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "routed_scaling_factor": 2.5,
}
HYBRID = native("NemotronHForCausalLM")


def hybrid(*layers: str, **changes: Any) -> Any:
    """Make a Nemotron-H of these kinds of layers."""
    kinds = {"num_hidden_layers": len(layers), "layers_block_type": list(layers)}
    return models.nemotron_h(**{**SIZES, **kinds, **changes})


def same_but_for_ties(found: list[list[int]], folder: Path) -> None:
    """Assert that tokens are those of transformers, up to where float64 finds two that are about as likely."""
    own: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    wide: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    equal = 0
    for prompt, ours in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        tokens = own.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        theirs = tokens[0, len(prompt) :].tolist()
        assert len(ours) == len(theirs)
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), TOKENS)
        equal += place
        if place < TOKENS:
            with torch.no_grad():
                logits = wide(tokens[:, : len(prompt) + place], use_cache=False).logits[0, -1]
            assert (logits[ours[place]] - logits[theirs[place]]).abs() < 0.02 * logits.abs().max()
    assert equal >= TOKENS


MODELS: dict[str, Any] = {
    "dense": functools.partial(hybrid, "mamba", "mlp", "attention", "mlp"),
    "experts": functools.partial(hybrid, "mamba", "moe", "attention", "moe", "mlp"),
    "latent experts": functools.partial(hybrid, "mamba", "moe", "attention", moe_latent_size=64),
    "opt": functools.partial(models.opt, hidden_size=128, word_embed_proj_dim=128, ffn_dim=320),
    "nemotron": functools.partial(models.nemotron, hidden_size=128, head_dim=32),
}
OWN = {"opt": native("OPTForCausalLM"), "nemotron": native("NemotronForCausalLM")}
# Of blocks, shared experts among them, and of layers of experts.
COUNTS = {"dense": (2, 0), "experts": (3, 2), "latent experts": (1, 1), "opt": (2, 0), "nemotron": (2, 0)}
several = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="there is one GPU")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes a model of `MODELS` once, in the published names, and returns its folder."""
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(name: str) -> Path:
        return models.save(MODELS[name](), folder / name)

    return make


def runs(name: str, ranks: int = 1) -> dict[str, int]:
    """Return how often the log says that the ops run all blocks and experts of a model."""
    kinds = zip(("feed-forward blocks", "layers of experts"), COUNTS[name], strict=True)
    return {f"{count} of {count} {kind} are run by twellc": ranks for kind, count in kinds if count}


def said(log: str, sentences: Iterable[str]) -> dict[str, int]:
    return {sentence: log.count(sentence) for sentence in sentences}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {}),
        ("experts", {}),
        pytest.param("experts", {"enforce_eager": False}, marks=pytest.mark.gpu),
        ("latent experts", {"enforce_eager": False}),
        ("opt", {}),
        ("nemotron", {"enforce_eager": False}),
    ],
)
def test_tokens_are_those_of_transformers(made: Any, ask: Ask, name: str, options: dict[str, Any]) -> None:
    answer = ask(made(name), lift="experts" in name, **OWN.get(name, HYBRID), **options)
    same_but_for_ties(answer.tokens, made(name))
    assert said(answer.log, runs(name)) == runs(name)
    if not torch.cuda.is_available():  # there, graphs are replayed
        ops = zip(("twell::mlp", "twell::experts"), COUNTS[name], strict=True)
        assert answer.calls == {op: count * TOKENS for op, count in ops if count}


@several
@pytest.mark.parametrize(
    ("name", "options"), [("experts", {}), ("experts", {"enable_expert_parallel": True}), ("opt", {})]
)
def test_two_ranks(made: Any, ask: Ask, name: str, options: dict[str, Any]) -> None:
    """Two processes share each expert's neurons, or the experts."""
    answer = ask(made(name), ranks=2, lift="experts" in name, **OWN.get(name, HYBRID), **options)
    same_but_for_ties(answer.tokens, made(name))
    assert said(answer.log, runs(name, 2)) == runs(name, 2)


# ---- in FP8 ----

QUANTISED = ("up_proj.weight", "down_proj.weight")


def in_fp8(model: Path, folder: Path) -> Path:
    """Write a model as ModelOpt does in E4M3, but for attention and Mamba; return the folder of what that is worth."""
    tensors = load_file(model / "model.safetensors")
    worth = {name: tensor.float() for name, tensor in tensors.items()}
    linear = {name.removesuffix(".weight") for name in tensors if "proj" in name or "conv1d" in name}
    for name in [each for each in tensors if each.endswith(QUANTISED)]:
        linear.remove(name.removesuffix(".weight"))
        matrix = Fp8.quantize(tensors[name], "tensor")
        tensors |= {name: matrix.values, f"{name}_scale": matrix.scale}
        tensors[name.replace("weight", "input_scale")] = torch.tensor(0.01)
        worth[name] = matrix.dequantize(torch.float32)
    config = json.loads((model / "config.json").read_text())
    quantised = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", *sorted(linear)]}
    for path, held, changes in (
        (folder / "fp8", tensors, {"quantization_config": {"producer": {"name": "modelopt"}, **quantised}}),
        (folder / "worth", worth, {}),
    ):
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        save_file(held, path / "model.safetensors", {"format": "pt"})
    return folder / "worth"


def test_a_checkpoint_of_modelopt(made: Any, ask: Ask, tmp_path: Path) -> None:
    """The ops read the checkpoint's bytes and scales, of blocks and of experts."""
    worth = in_fp8(made("experts"), tmp_path)
    answer = ask(tmp_path / "fp8", lift=True, **HYBRID)
    same_but_for_ties(answer.tokens, worth)
    expected = {**runs("experts"), "3 of them read FP8 weights": 1, "2 of them read FP8 weights": 1}
    assert said(answer.log, expected) == expected


# ---- what stays vLLM's ----


def test_experts_of_another_kind(ask: Ask, tmp_path: Path) -> None:
    """They are served by vLLM's own kernels, and the log says so once."""
    folder = models.save(models.mixtral(hidden_size=128, hidden_act="silu"), tmp_path / "mixtral")
    answer = ask(folder, **native("MixtralForCausalLM"))
    same_but_for_ties(answer.tokens, folder)
    reason = "2 of 2 layers of experts stay dense (model.layers.0.block_sparse_moe.experts.routed_experts, "
    assert answer.log.count(reason) == 1 and "their activation is silu; experts need relu2 without a gate" in answer.log


def test_with_lora_all_stays_dense(made: Any, ask: Ask) -> None:
    answer = ask(made("dense"), enable_lora=True, **HYBRID)
    same_but_for_ties(answer.tokens, made("dense"))
    assert answer.calls == {} and "all feed-forward blocks stay dense: LoRA is switched on" in answer.log


@pytest.mark.gpu
@several
def test_experts_that_are_balanced(made: Any, ask: Ask) -> None:
    """They stay vLLM's own; blocks beside them are run by the op."""
    answer = ask(made("experts"), ranks=2, enable_expert_parallel=True, enable_eplb=True, **HYBRID)
    same_but_for_ties(answer.tokens, made("experts"))
    assert said(answer.log, ["3 of 3 feed-forward blocks", "load balancing across experts is switched on"]) == {
        "3 of 3 feed-forward blocks": 2,
        "load balancing across experts is switched on": 2,
    }


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_the_class_over_transformers_names_the_right_one(made: Any, ask: Ask, name: str) -> None:
    said = (
        "TwellForCausalLM: it serves no mixtures of experts, and no Mamba; got nemotron_h. Take vLLM's own class: "
        '--hf-overrides \'{"architectures": ["TwellNemotronHForCausalLM"]}\'.'
    )
    with pytest.raises(RuntimeError, match=re.escape(said)):
        ask(made(name), **TWELL)
