"""A directory with its cache in FP8."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import models
from tests.caches import FAMILIES
from tests.tolerance import assert_as_accurate
from tests.twellc.generation.test_directory import LENGTH, PROMPTS, feed
from twellc import LLM, SamplingParams, UserError
from twellc.base.transformers_private import cache_over
from twellc.compiling.cache_scales import choose_scales
from twellc.generation.directory import load_directory
from twellc.loaders.cached import load_with_cache
from twellc.options.commands import LLMOptions
from twellc.options.source import CacheOptions

E4M3 = torch.float8_e4m3fn
SCALES = ((0.004, 0.003), (0.005, 0.0001))  # some values of the second layer are beyond the range
LAYERS = len(SCALES)
FP8 = LLMOptions(device="cpu", kv_cache_dtype="fp8")
BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass
class Rounding:
    """The keys and values of a layer as a cache in FP8 has them, in the type of the model: a `LayerState`."""

    scales: tuple[float, float] | None  # None rounds nothing
    largest: list[float] = field(default_factory=list)
    reported: int = 0

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        self.largest = [float(each.abs().max()) for each in (keys, values)]
        if self.scales is None:
            return keys, values
        for each, scale in zip((keys, values), self.scales, strict=True):
            found.append(((each.float() / scale).clamp(-448, 448).to(E4M3).double() * scale).to(each.dtype))
        return found[0], found[1]

    def length(self, tokens: Any) -> Any:
        return tokens


def logits_of(model: Any, ids: Tensor, scales: Any = SCALES) -> tuple[Tensor, list[Rounding]]:
    """Return what transformers computes over such a cache, and the cache."""
    states = [Rounding(each) for each in scales]
    with torch.no_grad():
        cache = cache_over(dict(enumerate(states)))
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits, states


def with_scales(folder: Path, scales: Any = SCALES) -> Path:
    file = folder / "model.safetensors"
    names = (("k", 0), ("v", 1))
    stored = {f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(each[which])
              for layer, each in enumerate(scales) for name, which in names}  # fmt: skip
    save_file(load_file(file) | stored, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("family", ["llama", "hunyuan"])
def test_logits(family: str, device: str, tmp_path: Path) -> None:
    """With the checkpoint's scales: as accurate as the model in bfloat16 whose keys and values are rounded likewise."""
    model = FAMILIES[family](max_position_embeddings=LENGTH)
    folder = with_scales(models.save(model, tmp_path / "model", torch.bfloat16))
    backend, cache, notes = load_directory(folder, LLMOptions(device=device, kv_cache_dtype="fp8"))
    assert "keys and values are kept in FP8, with the scales of the checkpoint" in notes
    assert cache.dtype == "fp8"
    ids = torch.randint(2, 96, (len(PROMPTS), LENGTH))
    plain, _ = logits_of(model, ids)
    truth, states = logits_of(model.double(), ids)
    assert states[1].largest[1] > 448 * SCALES[1][1]
    logits, rows, places = feed(backend, ids, PROMPTS)
    assert {memory.dtype for memory in backend._memory} == {E4M3}
    assert_as_accurate(logits, plain[rows, places], truth[rows, places].double())


def test_scales_of_a_text(tmp_path: Path) -> None:
    """The largest numbers of the text become half of 448."""
    model = models.llama(vocab_size=256, max_position_embeddings=LENGTH)
    folder = models.save(model, tmp_path / "model", torch.bfloat16)
    text = tmp_path / "text.txt"
    text.write_text("What is measured here is the largest key, and the largest value. " * 2)
    tokens = [model.config.bos_token_id, *text.read_bytes()]
    _, states = logits_of(model, torch.tensor([tokens]), [None] * LAYERS)
    loaded = load_with_cache(folder, CacheOptions(LENGTH), "last", None)
    scales, notes = choose_scales(loaded, text, torch.device("cpu"))
    assert notes == ["keys and values are kept in FP8, with scales of text.txt"]
    largest = [each for state in states for each in state.largest]
    assert list(scales.values()) == pytest.approx([2 * each / 448 for each in largest], rel=0.02)
    assert loaded.cache is not None
    assert list(scales) == [pair.input for pair in loaded.cache.pairs]


def test_arguments(tmp_path: Path) -> None:
    folder = models.save(models.llama(vocab_size=256), tmp_path / "model", torch.bfloat16)
    llm = LLM(folder, device="cpu", kv_cache_dtype="fp8_e4m3")
    assert llm.notes[0].startswith("keys and values are kept in FP8, with scales of 1")
    assert len(llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
    with pytest.raises(UserError, match="kv_cache_dtype: no such choice; got 'fp8_e5m2'; expected auto or fp8"):
        LLM(folder, device="cpu", kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize(
    ("family", "dtype", "reason"),
    [
        ("llama", torch.float32, "cuDNN's form takes bfloat16 and float16, not float32"),
        ("phi3-window", torch.bfloat16, "cuDNN's form takes no mask that the model computes"),
    ],
)
def test_other_attention_is_refused(family: str, dtype: torch.dtype, reason: str, tmp_path: Path) -> None:
    folder = models.save(FAMILIES[family](), tmp_path / "model", dtype)
    with pytest.raises(UserError, match=f"--kv-cache-dtype fp8: a cache in FP8 is read only by attention .*{reason}"):
        load_directory(folder, FP8)
