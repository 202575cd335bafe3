"""Hugging Face directories with weights in E4M3: what is read, kept and dequantised, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import numpy_helper
from safetensors.torch import load_file, save_file
from torch import Tensor

import twellc
from tests import models
from twellc.base.errors import UserError
from twellc.eager.fp8_linear import Fp8Linear
from twellc.generation.directory import load_directory
from twellc.loaders.cached import load_with_cache
from twellc.loaders.huggingface import open_directory
from twellc.loaders.model import load_model
from twellc.loaders.precision import choose_dtype
from twellc.options.commands import LLMOptions
from twellc.options.source import CacheOptions, TracingOptions
from twellc.plugins.fp8 import E4M3, Fp8

Tensors = dict[str, Tensor]
GATE = "model.layers.0.mlp.gate_proj"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "transform_config": {},
    "sparsity_config": {},
}


def blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale = 0.01 + torch.rand(rows, columns) / 100
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / wide).to(E4M3), scale


def by_output(weight: Tensor) -> tuple[Tensor, Tensor]:
    return Fp8.quantize(weight, "row")


def by_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    return Fp8.quantize(weight, "tensor")


# Settings in config.json and hf_quant_config.json, the suffix of scales and the shape that they have.
FORMS: dict[str, tuple[Any, Any, str, Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], Tensor]]] = {
    "FP8_DYNAMIC": (COMPRESSED, None, "weight_scale", by_output, lambda scale: scale.bfloat16()),
    "FP8": (COMPRESSED, None, "weight_scale", by_tensor, lambda scale: scale.reshape(1)),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": None, "modules_to_not_convert": ["lm_head", GATE]},
        None,
        "weight_scale_inv",
        by_tensor,
        torch.clone,
    ),
    "fbgemm_fp8": ({"quant_method": "fbgemm_fp8"}, None, "weight_scale", by_output, torch.clone),
    "ModelOpt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        "weight_scale",
        by_tensor,
        torch.clone,
    ),
    "ModelOpt by channel": (
        None,
        {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
        "weight_scale",
        by_output,
        lambda scale: scale[:, 0],
    ),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, "weight_scale_inv", blocks, torch.clone),
}


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write(folder: Path, form: str) -> Tensors:
    """Store the projections of a directory's layers in FP8; return all its tensors, dequantized."""
    config, second, suffix, make, stored = FORMS[form]
    edit(folder, quantization_config=config)
    if second is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **second}))
    tensors, dequantized = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        dequantized[name] = tensor
        if name.endswith("_proj.weight"):
            weight, scale = make(tensor.float())
            scale = stored(scale)
            tensors |= {name: weight, name.replace("weight", suffix): scale.contiguous()}
            rows, columns = tensor.shape
            wide = scale.float()
            if form == "blocks":
                wide = wide.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            dequantized[name] = (weight.float() * (wide[:, None] if wide.shape == (rows,) else wide)).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return dequantized


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.llama(hidden_size=32, intermediate_size=320).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("form", FORMS)
def test_blocks_keep_their_bytes(form: str, folder: Path) -> None:
    dequantized, stored = write(folder, form), load_file(folder / "model.safetensors")
    model, config, notes = open_directory(folder)
    assert "quantization_config" not in config and not hasattr(model.config, "quantization_config")
    layers = {path: each for path, each in model.named_modules() if isinstance(each, Fp8Linear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        assert torch.equal(layer.weight.float(), stored[f"{path}.weight"].float())
        assert layer.scale.dtype == torch.float32
    found = {
        **model.state_dict(),
        **{f"{path}.weight": each.matrix.dequantize(torch.bfloat16) for path, each in layers.items()},
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in dequantized.items())
    assert notes == ["14 matrices stay in FP8, E4M3, where an op of twellc reads them"]


@pytest.mark.usefixtures("compiles_here")
def test_scales_of_blocks_stay(tmp_path: Path) -> None:
    """In the loaded model, the plan's graph and what `check` compares."""
    folder, graph = tmp_path / "model", tmp_path / "model.onnx"
    models.llama(hidden_size=256, num_attention_heads=4, num_key_value_heads=2).bfloat16().save_pretrained(folder)
    dequantized, stored = write(folder, "blocks"), load_file(folder / "model.safetensors")
    model, _, notes = open_directory(folder)
    layers = {path: each for path, each in model.named_modules() if isinstance(each, Fp8Linear)}
    assert len(layers) == 14 and notes == ["14 matrices stay in FP8, E4M3, where an op of twellc reads them"]
    for path, layer in layers.items():
        assert torch.equal(layer.matrix.dequantize(torch.bfloat16), dequantized[f"{path}.weight"])
    manifest = twellc.compile(folder, backend="none", onnx=graph, linear="twell")
    said = "weights in 8 bits, as the model has them, with scales for blocks of 128 x 128"
    assert [str(row.weights) for row in manifest.layers] == [said] * 2
    assert [str(row.weights) for row in manifest.linear or []] == [said] * 4 + ["None"]
    held = {each.name: numpy_helper.to_array(each) for each in onnx.load(graph).graph.initializer}
    of_q, of_k, of_v = (stored[f"model.layers.1.self_attn.{each}_proj.weight_scale_inv"] for each in "qkv")
    of_down = stored["model.layers.1.mlp.down_proj.weight_scale_inv"].t()
    for scale in (torch.cat([of_q, of_k, of_v]), of_down):
        assert any(np.array_equal(each, scale.numpy()) for each in held.values())
    checked = twellc.check(folder, graph)
    assert checked.within, checked.causes
    kernels = twellc.inspect(folder, tokens=1, gpu="H100").kernels
    assert kernels is not None and [each.route for each in kernels.blocks] == ["few_tokens"] * 2


@pytest.mark.parametrize("form", ["FP8_DYNAMIC", "blocks"])
def test_generation_runs_blocks_in_fp8(form: str, folder: Path) -> None:
    write(folder, form)
    backend, _, notes = load_directory(folder, LLMOptions(device="cpu"))
    assert "2 feed-forward blocks (2 in FP8) by the twell ops" in backend.name
    backend, _, notes = load_directory(folder, LLMOptions(device="cpu", layers="layers.1"))
    assert "1 feed-forward blocks (1 in FP8) by the twell ops" in backend.name
    assert any("dequantised" in note for note in notes), notes


def test_a_program_has_the_bytes(folder: Path) -> None:
    write(folder, "FP8_DYNAMIC")
    stored, rewritten = load_file(folder / "model.safetensors"), twellc.rewrite(folder, linear="twell")
    assert [layer.weights and layer.weights.bits for layer in rewritten.layers] == [8, 8]
    narrow = [row.weights is not None and row.weights.bits == 8 for row in rewritten.linear]
    assert narrow == [True] * 4 + [False] and rewritten.linear[-1].modules == ["lm_head"]
    said = "{} weights that the model has in FP8 are dequantised: "
    for layers, linear, count in (("none", "tensorrt", 14), ("all", "tensorrt", 8), ("all", "auto", 0)):
        notes = twellc.inspect(folder, layers=layers, linear=linear).description.notes
        assert any(note.startswith(said.format(count)) for note in notes) == (count > 0)
    held = [each for each in rewritten.program.state_dict.values() if each.dtype == E4M3]
    for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
        weight = stored[f"model.layers.1.mlp.{name}"].float()
        matrix = weight.T if name.startswith("down") else weight
        assert any(each.shape == matrix.shape and torch.equal(each.float(), matrix) for each in held)
    joined = torch.cat([stored[f"model.layers.1.self_attn.{each}_proj.weight"].float() for each in "qkv"])
    assert any(torch.equal(each.float(), joined) for each in held)


def test_what_was_quantised_here_is_read_again(folder: Path) -> None:
    model, _, _ = open_directory(folder)
    twellc.restore(twellc.optimize(model, weights="fp8:blocks")).save_pretrained(folder)
    again, _, notes = open_directory(folder)
    assert notes == ["6 matrices stay in FP8, E4M3, where an op of twellc reads them"]
    ids = torch.arange(7)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.get_submodule("model.layers.1.mlp.down_proj").scale.shape == (1, 320)


def test_a_program_keeps_its_precision(folder: Path) -> None:
    write(folder, "FP8_DYNAMIC")
    file = folder / "model.safetensors"
    wide = {name: each.half() for name, each in load_file(file).items() if each.dtype == torch.bfloat16}
    save_file(load_file(file) | wide, file)
    edit(folder, dtype="float16")
    assert choose_dtype(load_model(TracingOptions(folder)), None) == ("fp16", [])


def test_a_cache_in_float16(folder: Path) -> None:
    write(folder, "FP8_DYNAMIC")
    found = load_with_cache(folder, CacheOptions(8), "last", "fp16")
    assert sum(each.dtype == E4M3 for each in found.program.state_dict.values()) == 14


def test_a_block_with_a_matrix_in_16_bits(folder: Path) -> None:
    """It is dequantised; and scales of activations and of the cache are not used."""
    dequantized = write(folder, "ModelOpt")
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{GATE}.weight_scale"]
    tensors |= {
        f"{GATE}.weight": dequantized[f"{GATE}.weight"],
        "model.layers.0.self_attn.k_proj.k_scale": torch.ones(()),
        "model.layers.0.self_attn.k_proj.input_scale": torch.ones(()),
    }
    save_file(tensors, folder / "model.safetensors")
    model, _, notes = open_directory(folder)
    layers = [path for path, each in model.named_modules() if isinstance(each, Fp8Linear) and ".mlp." in path]
    assert {path[:14] for path in layers} == {"model.layers.1"}
    assert any(note.startswith("1 scales of activations are not used") for note in notes)


def test_logits_that_are_stored_for_the_embedding_too(tmp_path: Path) -> None:
    models.llama(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weight, scale = Fp8.quantize(tensors.pop("model.embed_tokens.weight"), "row")
    save_file(tensors | {"lm_head.weight": weight, "lm_head.weight_scale": scale}, tmp_path / "model.safetensors")
    model, _, notes = open_directory(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, (weight.float() * scale).bfloat16())
    assert notes == ["1 matrices in E4M3 are dequantised to bfloat16: lm_head.weight"]


def test_logits_that_are_stored_beside_the_embedding(tmp_path: Path) -> None:
    """A configuration may tie what the files have twice: the embedding of 16 bits is the better one, and stays."""
    models.llama(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    weight, scale = Fp8.quantize(embedding, "row")
    save_file(tensors | {"lm_head.weight": weight, "lm_head.weight_scale": scale}, tmp_path / "model.safetensors")
    model, _, _ = open_directory(tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, embedding)


def llava() -> Any:
    sees = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sees, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**models.WIDE | {"intermediate_size": 320}, hidden_act="relu")
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    )


# What has other names in files than in modules, or is merged on its way: how many linear layers keep their bytes.
WRAPPED: dict[str, tuple[Callable[[], Any], int]] = {
    "text and images": (llava, 22),
    "merged experts": (models.mixtral, 8),
    "encoder and decoder": (models.m2m100, 32),
    "in the other order": (models.gpt2, 0),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_matrices_are_where_transformers_puts_them(kind: str, tmp_path: Path) -> None:
    make, count = WRAPPED[kind]
    made = make().bfloat16()
    made.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    chosen = [name for name, each in tensors.items() if each.dim() == 2 and "embed" not in name and name != "lm_head"]
    stored = {name: Fp8.quantize(tensors[name], "tensor") for name in chosen if name.endswith("weight")}
    dequantized = {name: (weight.float() * scale).bfloat16() for name, (weight, scale) in stored.items()}
    save_file(tensors | dequantized, file, metadata={"format": "pt"})
    expected = type(made).from_pretrained(tmp_path, dtype="auto").state_dict()
    narrow = {name: weight for name, (weight, _) in stored.items()}
    save_file(tensors | narrow | {f"{name}_scale": scale for name, (_, scale) in stored.items()}, file)
    model, _, _ = open_directory(tmp_path)
    layers = {path: each for path, each in model.named_modules() if isinstance(each, Fp8Linear)}
    found = model.state_dict() | {
        f"{path}.weight": each.matrix.dequantize(torch.bfloat16) for path, each in layers.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len([path for path in layers if "lm_head" not in path]) == count


@pytest.mark.parametrize("linear", ["tensorrt", "twell"])
def test_weights_that_overflow_float16(folder: Path, linear: str) -> None:
    write(folder, "FP8_DYNAMIC")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{GATE}.weight_scale"][:] = 1000.0
    save_file(tensors, folder / "model.safetensors")
    assert twellc.inspect(folder, linear=linear).layers
    with pytest.raises(UserError, match=rf"{GATE}\.weight: its values overflow float16"):
        twellc.inspect(folder, linear=linear, dtype="fp16")
    with pytest.raises(UserError, match=rf"{GATE}\.weight: its weights in E4M3 times their scales overflow float16"):
        load_directory(folder, LLMOptions(device="cpu", dtype="fp16"))


def test_layers_whose_weight_the_model_looks_at(tmp_path: Path) -> None:
    """T5 casts the hidden tensor to the type of `wo.weight`: its blocks are dequantised."""
    models.t5().bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("wi.weight", "wo.weight", "q.weight"))]:
        tensors[name], tensors[f"{name}_scale"] = Fp8.quantize(tensors[name], "row")
    save_file(tensors, tmp_path / "model.safetensors")
    model, _, _ = open_directory(tmp_path)
    layers = {path.rpartition(".")[2] for path, each in model.named_modules() if isinstance(each, Fp8Linear)}
    assert layers == {"q"}
    assert {layer.reason for layer in twellc.rewrite(tmp_path).layers} == {"matches"}
