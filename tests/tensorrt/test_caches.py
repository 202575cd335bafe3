"""Plans with a key-value cache: prompts in chunks, then token by token to the last place, caches bound in place."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import models
from tests.caches import FAMILIES, feed, steps, transformers_own
from tests.tensorrt.plans import compiled, twellc
from tests.tolerance import assert_as_accurate
from tests.twellc.generation.test_fp8_cache import logits_of, with_scales
from twellc import LLM, SamplingParams
from twellc.base.caches import CACHE_TYPES, INPUT_IDS, TOKEN_COUNT, WRITE_INDEX, KeyValueCache
from twellc.base.dtypes import BY_NAME
from twellc.compiling.manifest import read_manifest
from twellc.export.runner import OpenPlan, open_plan
from twellc.export.tensorrt_host import Host

pytestmark = pytest.mark.tensorrt

LENGTH, CHUNK = 144, 8
PROMPTS = [13, 4, 1]
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 256}


class Session:
    """A plan with caches of its own, which are bound to one address each; prompts and single tokens have a context."""

    def __init__(self, plan: OpenPlan, cache: KeyValueCache, batch: int, in_place: bool = True) -> None:
        self.plan, self.cache = plan, cache
        dtype = BY_NAME[CACHE_TYPES[cache.dtype]].torch
        self.caches = [torch.zeros(batch, *pair.shape[1:], dtype=dtype, device="cuda") for pair in cache.pairs]
        self.after = self.caches if in_place else [torch.full_like(each, 7) for each in self.caches]
        self.contexts = [plan.engine.create_execution_context() for _ in range(2)]
        assert plan.engine.num_optimization_profiles == 3
        for profile, context in zip((0, 2 if batch == 1 else 1), self.contexts, strict=True):
            assert context.set_optimization_profile_async(profile, torch.cuda.current_stream().cuda_stream)
        self.logits = torch.empty(batch, cache.vocabulary, dtype=torch.bfloat16, device="cuda")

    def bind(self, ids: Tensor, starts: Tensor, counts: Tensor) -> Any:
        context = self.contexts[int(ids.shape[1] == 1)]
        self.inputs = {INPUT_IDS: ids.cuda(), WRITE_INDEX: starts.cuda(), TOKEN_COUNT: counts.cuda()}
        inputs = {**self.inputs, **{pair.input: each for pair, each in zip(self.cache.pairs, self.caches, strict=True)}}
        for name, tensor in inputs.items():
            assert context.set_input_shape(name, tuple(tensor.shape))
        outputs = {pair.output: each for pair, each in zip(self.cache.pairs, self.after, strict=True)}
        for name, tensor in {**inputs, **outputs, "logits": self.logits}.items():
            context.set_tensor_address(name, tensor.data_ptr())
        return context

    def __call__(self, ids: Tensor, starts: Tensor, counts: Tensor) -> Tensor:
        context = self.bind(ids, starts, counts)
        assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream), self.plan.messages
        torch.cuda.synchronize()
        self.caches, self.after = self.after, self.caches
        return self.logits.cpu()


def make(family: str, folder: Path) -> tuple[Any, Path]:
    model = FAMILIES[family](**(SIZES if family != "opt" else {**SIZES, "word_embed_proj_dim": 256}))
    return model, models.save(model, folder / "model", torch.bfloat16)


def compile_cached(folder: Path, plan: Path, *options: str) -> tuple[Path, KeyValueCache]:
    sizes = ["--kv-cache", str(LENGTH), "--max-batch-size", str(len(PROMPTS)), "--prefill-chunk", str(CHUNK)]
    compiled(folder, plan, *sizes, "--layers", "all", *options)
    manifest = read_manifest(plan)
    assert manifest.cache is not None
    return plan, manifest.cache


@pytest.mark.parametrize(
    ("family", "attention"),
    [("llama", "cudnn"), ("llama", "tensorrt"), *((family, "auto") for family in FAMILIES)],
)
def test_steps(tensorrt: Host, tmp_path: Path, family: str, attention: str) -> None:
    model, folder = make(family, tmp_path)
    plan, cache = compile_cached(folder, tmp_path / "m.plan", "--attention", attention)
    form = read_manifest(plan).attention[0].form
    if family in ("llama", "phi3-window", "opt"):  # of others it depends on transformers' version, or on head widths
        assert form == ("matmul" if family == "phi3-window" or attention == "tensorrt" else "cudnn")
    tokens, taken = torch.randint(2, 96, (len(PROMPTS), LENGTH)), steps(PROMPTS, LENGTH, CHUNK)
    opened = open_plan(tensorrt, plan, tensorrt.version)
    ours = feed(Session(opened, cache, len(PROMPTS)), tokens, taken)
    plain = transformers_own(model.cuda(), tokens.cuda(), taken).cpu()
    wide = transformers_own(model.double(), tokens.cuda(), taken).cpu()
    assert_as_accurate(ours, plain, wide)
    alone = feed(Session(opened, cache, 1), tokens[:1], steps(PROMPTS[:1], LENGTH, CHUNK))
    rows = [row for step in taken for row, count in enumerate(step.counts) if count]
    first = torch.tensor(rows) == 0
    assert_as_accurate(alone, plain[first], wide[first])
    # The likeliest token is that of float64, where it is ahead by more than bfloat16 blurs.
    likeliest = wide.topk(2).values
    clear = likeliest[:, 0] - likeliest[:, 1] > 6 * (plain.double() - wide).abs().max()
    assert clear.any() and torch.equal(ours[clear].argmax(-1), wide[clear].argmax(-1))
    # Bound to two addresses the caches are copied, which costs time, and they are the same.
    assert torch.equal(feed(Session(opened, cache, len(PROMPTS), in_place=False), tokens, taken), ours)


@pytest.mark.parametrize("family", ["llama", "hunyuan"])
def test_a_cache_in_fp8(tensorrt: Host, tmp_path: Path, family: str) -> None:
    """With scales of the checkpoint, beyond whose range some values are: as the model that rounds them likewise."""
    model, folder = make(family, tmp_path)
    plan, cache = compile_cached(with_scales(folder), tmp_path / "m.plan", "--kv-cache-dtype", "fp8")
    assert (cache.dtype, read_manifest(plan).attention[0].form) == ("fp8", "cudnn")
    tokens, taken = torch.randint(2, 96, (len(PROMPTS), LENGTH)), steps(PROMPTS, LENGTH, CHUNK)
    opened = open_plan(tensorrt, plan, tensorrt.version)
    session = Session(opened, cache, len(PROMPTS))
    ours = feed(session, tokens, taken)
    assert {each.dtype for each in session.caches} == {torch.float8_e4m3fn}
    ends = [(row, step.ends[row] - 1) for step in taken for row, count in enumerate(step.counts) if count]
    rows, places = torch.tensor(ends).T
    plain, wide = (logits_of(each.cuda(), tokens.cuda())[0].cpu() for each in (model, copy.deepcopy(model).double()))
    assert_as_accurate(ours, plain[rows, places], wide[rows, places])
    alone = feed(Session(opened, cache, 1), tokens[:1], steps(PROMPTS[:1], LENGTH, CHUNK))
    assert_as_accurate(alone, plain[rows, places][rows == 0], wide[rows, places][rows == 0])
    assert torch.equal(feed(Session(opened, cache, len(PROMPTS), in_place=False), tokens, taken), ours)
    # `LLM` of the plan answers as that of the directory with such a cache: tokens whose logit is nearly the largest.
    near = 2 * float((plain.double() - wide).abs().max())
    exact, params = model.double(), SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False)
    prompts = [row[:count].tolist() for row, count in zip(tokens, PROMPTS, strict=True)]
    for llm in (LLM(plan), LLM(folder, device="cuda", kv_cache_dtype="fp8")):
        for answer in llm.generate(prompts, params):
            prompt, chosen = answer.prompt_token_ids, torch.tensor(answer.outputs[0].token_ids)
            whole = torch.tensor([[*prompt, *chosen]]).cuda()
            logits = logits_of(exact, whole)[0][0, len(prompt) - 1 : -1].cpu()
            assert (logits.max(-1).values - logits.gather(1, chosen[:, None])[:, 0]).max() < near
    done = twellc("check", folder, plan)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_graph_replays_over_growing_lengths(tensorrt: Host, tmp_path: Path) -> None:
    _, folder = make("llama", tmp_path)
    plan, cache = compile_cached(folder, tmp_path / "m.plan")
    tokens = torch.randint(2, 96, (len(PROMPTS), LENGTH))
    opened = open_plan(tensorrt, plan, tensorrt.version)
    ones = torch.ones(len(PROMPTS), dtype=torch.int64)
    stepwise, replayed = Session(opened, cache, len(PROMPTS)), Session(opened, cache, len(PROMPTS))
    expected = [stepwise(tokens[:, i : i + 1], i * ones, ones) for i in range(LENGTH)]
    context = replayed.bind(tokens[:, :1], 0 * ones, ones)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert context.execute_async_v3(stream.cuda_stream)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            assert context.execute_async_v3(stream.cuda_stream)
    for i in range(LENGTH):
        replayed.inputs[INPUT_IDS].copy_(tokens[:, i : i + 1])
        replayed.inputs[WRITE_INDEX].fill_(i)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(replayed.logits.cpu(), expected[i])
