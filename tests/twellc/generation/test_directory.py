"""A directory as the program of its plan, run by torch."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import models
from tests.caches import FAMILIES, SQUARED
from tests.tolerance import assert_as_accurate
from tests.twellc.generation.conftest import Family
from twellc import LLM, SamplingParams, UserError
from twellc.generation.directory import load_directory
from twellc.generation.plan import PlanBackend
from twellc.generation.program import by_torch, in_place
from twellc.loaders.cached import load_with_cache
from twellc.options.commands import LLMOptions
from twellc.options.source import CacheOptions
from twellc.passes.fp8 import Wish
from twellc.passes.pipeline import PassOptions, run_passes
from twellc.plugins.block import call_of
from twellc.plugins.linear_op import LINEAR
from twellc.plugins.ops import VARIANT_OF

LENGTH = 144
PROMPTS = [13, 4, 1]
BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALL = FAMILIES | SQUARED


def feed(backend: PlanBackend, ids: Tensor, prompts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits behind tokens, and the rows and places of these: prompts in chunks, then a token of each row.

    A row stays at its last place until all are there.
    """
    backend.begin(len(ids), ids.shape[1])
    for start in range(0, max(prompts), 8):
        backend.fill(ids[:, start : min(start + 8, max(prompts))].to(backend.device), start)
    rows, found = torch.arange(len(ids)), []
    steps = [(torch.tensor(prompts) + step).clamp(max=ids.shape[1] - 1) for step in range(ids.shape[1] - min(prompts))]
    for places in steps:
        found.append(backend.decode(*(each.to(backend.device) for each in (ids[rows, places], places))).cpu())
    return torch.cat(found), rows.repeat(len(steps)), torch.cat(steps)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("family", ALL)
@pytest.mark.sampled(1)
def test_families(family: str, device: str, tmp_path: Path) -> None:
    """Several rows and one, to the last of 144 places: as accurate as the model in bfloat16 without a cache."""
    model = ALL[family](**{"n_positions" if family == "gpt2" else "max_position_embeddings": LENGTH})
    folder = models.save(model, tmp_path / "model", torch.bfloat16)
    backend, _, notes = load_directory(folder, LLMOptions(device=device))
    ids = torch.randint(2, 96, (len(PROMPTS), LENGTH))
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        wide = model.double()(input_ids=ids, use_cache=False).logits.double()  # some norms end in float32
    assert "0 linear layers" not in backend.name and bool(notes) == ("0 feed-forward blocks" in backend.name), notes
    for prompts in (PROMPTS, PROMPTS[:1]):
        logits, rows, places = feed(backend, ids[: len(prompts)], prompts)
        assert_as_accurate(logits, plain[rows, places], wide[rows, places])


def test_answers(family: Family) -> None:
    """A cache grows; a window is shorter than some of its lengths. In float32 tokens are transformers' own."""
    sizes = {"max_position_embeddings": 600, "sliding_window": 270, "vocab_size": models.VOCABULARY}
    folder, model = family("phi3-window", **sizes)
    models.make_tokenizer(folder)
    llm = LLM(folder, device="cpu")
    why = "gate activation is silu; TwELL needs a ReLU family"
    assert llm.notes == [f"no feed-forward block is run by the twell ops: {why}"]
    model.generation_config.eos_token_id = None
    for length in (5, 290, 20):
        ids = torch.randint(3, 96, (2, length))
        answers = llm.generate(ids.tolist(), SamplingParams(max_tokens=9, ignore_eos=True))
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
        assert [answer.outputs[0].token_ids for answer in answers] == expected[:, length:].tolist()
    with pytest.raises(UserError, match="max_model_len: is out of range for this model's cache; got 601"):
        load_directory(folder, LLMOptions(device="cpu", max_model_len=601))


def test_experts_that_cannot_be_traced(family: Family) -> None:
    """Those of JetMoe ask how many tokens each of them gets."""
    folder, _ = family("JetMoe", num_local_experts=4, kv_channels=8)
    message = r"torch\.export cannot trace the model, where values decide .* Call twellc\.optimize\(model\)"
    with pytest.raises(UserError, match=message):
        load_directory(folder, LLMOptions(device="cpu"))


@pytest.mark.parametrize("weights", ["keep", "fp8"])
def test_the_ops_and_torch_compute_the_same(weights: str, tmp_path: Path) -> None:
    """Calls of few tokens on a GPU have linear layers and norms by the ops, all others by torch; here both."""
    folder = models.save(ALL["llama"](), tmp_path / "model", torch.bfloat16)
    loaded = load_with_cache(folder, CacheOptions(12), "asked", torch.bfloat16)
    wish = Wish(weights == "fp8", linear=True)
    few = in_place(run_passes(loaded.program, PassOptions(linear="twell", weights=wish)).program)
    many = by_torch(few, fp8=True)
    ids, zeros = torch.randint(3, 96, (2, 5)), torch.zeros(2, dtype=torch.int64)
    shapes = [(2, *pair.shape[1:]) for pair in loaded.cache.pairs]
    found, ops = [], []
    for form in (few, many):
        caches = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
        found.append(form(ids, zeros, zeros + 5, *caches, torch.tensor([[4, 1]] * 2)))
        blocks = [node for node in form.graph.nodes if node.target in VARIANT_OF]
        norms = [call_of(VARIANT_OF[node.target], node.args, node.kwargs)[1].norm for node in blocks]
        ops.append((sum(node.target is LINEAR for node in form.graph.nodes), norms))
    assert ops == [(5, ["rms"] * 2), (0, ["none"] * 2)]
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02 * float(found[0].abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("device", BOTH)
def test_compiled(device: str, bytelm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With FP8 weights: what torch.compile makes of the program writes caches in place, too."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    options = LLMOptions(device=device, dtype="bf16", max_model_len=40, weights="fp8")
    eager, compiled = (load_directory(bytelm, replace(options, compiled=each))[0] for each in (False, True))
    linear = " and 9 linear layers (8 in FP8)" if device == "cuda" else ""
    assert f"4 feed-forward blocks (4 in FP8){linear} by the twell ops" in compiled.name
    for rows in (1, 3):
        ids = torch.randint(3, 96, (rows, 40))
        (found, *_), (expected, *_) = (feed(each, ids, [20] * rows) for each in (compiled, eager))
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


@pytest.mark.gpu
def test_a_step_replayed_is_the_same(tmp_path: Path) -> None:
    """A thousand times, bit for bit."""
    folder = models.save(ALL["llama"](hidden_size=256, num_attention_heads=4), tmp_path / "model", torch.bfloat16)
    backend, *_ = load_directory(folder, LLMOptions(device="cuda"))
    ids = torch.randint(2, 96, (3, 16)).cuda()
    backend.begin(3, 16)
    backend.fill(ids[:, :15], 0)
    tokens, places = ids[:, 15].clone(), torch.full((3,), 15).cuda()
    expected = backend.decode(tokens, places).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = backend.decode(tokens, places)
    for _ in range(1000):
        logits.fill_(torch.nan)
        graph.replay()
        assert torch.equal(logits, expected)
