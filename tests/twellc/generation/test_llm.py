"""The class LLM, in the shape that vLLM's has."""

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM, OPTForCausalLM, PreTrainedConfig

import twellc
from tests import models
from tests.caches import mostly_slow
from tests.models import VOCABULARY
from tests.twellc.eager.test_optimize import Ops
from twellc import LLM, SamplingParams, UserError
from twellc.generation.vllm_names import ENGINE, SAMPLING
from twellc.loaders.cached import load_with_cache
from twellc.loaders.checkpoint import end_tokens
from twellc.options.source import CacheOptions

PROMPTS = ["the quick brown", "größer", "fox"]


@pytest.fixture(scope="module")
def llm(talker: Path) -> LLM:
    return LLM(talker, device="cpu")


@pytest.fixture(scope="module")
def of_bytes(bytelm: Path) -> LLM:
    return LLM(bytelm, device="cpu")


def test_greedy_answers_are_those_of_transformers(llm: LLM, talker: Path) -> None:
    model, tokenizer = LlamaForCausalLM.from_pretrained(talker), AutoTokenizer.from_pretrained(talker)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    assert [output.prompt for output in outputs] == PROMPTS
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        given = tokenizer(prompt, return_tensors="pt")
        expected = model.generate(**given, max_new_tokens=24, do_sample=False)[0].tolist()
        answer = output.outputs[0]
        assert output.prompt_token_ids + answer.token_ids == expected
        own = expected[len(output.prompt_token_ids) :]
        assert answer.text == tokenizer.decode(own, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert answer.finish_reason == ("stop" if own[-1] == 0 else "length")


@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=1.5, seed=1)]
)
def test_streamed_text_is_the_whole_text(llm: LLM, params: SamplingParams) -> None:
    whole = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    pieces: dict[str, list[Any]] = {}
    for output in llm.generate_stream(PROMPTS, params):
        pieces.setdefault(output.request_id, []).append(output)
    for number, answer in enumerate(whole):
        own = pieces[str(number)]
        assert "".join(output.outputs[0].text for output in own) == answer.text
        assert [token for output in own for token in output.outputs[0].token_ids] == answer.token_ids
        assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]
        assert (own[-1].outputs[0].finish_reason, own[0].outputs[0].finish_reason) == (answer.finish_reason, None)


def test_seeds(llm: LLM) -> None:
    def text(seed: int | None) -> str:
        return llm.generate("fox", SamplingParams(max_tokens=20, temperature=1, seed=seed))[0].outputs[0].text

    assert text(3) == text(3) != text(4)
    assert text(None) != text(None)


def test_padding_is_not_repeated(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter prompts of a batch are padded with the end token, here the likeliest one that they do not hold."""
    logits = torch.ones(len(PROMPTS), VOCABULARY).index_fill(-1, torch.tensor([0]), 1.5)
    monkeypatch.setattr(llm.model.decoder.backend, "decode", lambda tokens, places: logits)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=3, repetition_penalty=2.0))
    assert [output.outputs[0].token_ids for output in outputs] == [[0]] * 3


def test_stop_texts(llm: LLM) -> None:
    greedy = llm.generate("fox", SamplingParams(max_tokens=30))[0].outputs[0].text
    stop = greedy[9:12]
    params = SamplingParams(max_tokens=30, stop=["never said", stop])
    answer = llm.generate("fox", params)[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (greedy[: greedy.index(stop)], "stop", stop)
    assert "".join(output.outputs[0].text for output in llm.generate_stream("fox", params)) == answer.text
    # One of two answers goes on.
    both = llm.generate(["fox", "größer"], params)
    assert both[0].outputs[0].text == answer.text
    assert both[1].outputs[0].text == llm.generate("größer", params)[0].outputs[0].text


def with_generation(talker: Path, folder: Path, **settings: Any) -> Path:
    shutil.copytree(talker, folder)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_end_tokens(talker: Path, tmp_path: Path) -> None:
    """Those of generation_config.json, those asked for, and none."""
    tokens = LLM(talker, device="cpu").generate("fox", SamplingParams(max_tokens=8))[0].outputs[0].token_ids
    place = next(place for place in range(2, 8) if tokens[place] not in tokens[:place])
    third = tokens[place]
    llm = LLM(with_generation(talker, tmp_path / "m", eos_token_id=[0, third], do_sample=True), device="cpu")
    ended = llm.generate("fox", SamplingParams(max_tokens=8))[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (tokens[: place + 1], "stop", None)
    assert llm.generate("fox", SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids == tokens
    asked = SamplingParams(max_tokens=8, ignore_eos=True, stop_token_ids=[third])
    stopped = llm.generate("fox", asked)[0].outputs[0]
    assert (stopped.token_ids, stopped.stop_reason) == (tokens[: place + 1], third)


def test_damaged_end_tokens(talker: Path, tmp_path: Path) -> None:
    """Of either file, in a model and in a plan."""
    folder = Path(shutil.copytree(talker, tmp_path / "m"))
    config = PreTrainedConfig.from_dict(json.loads((talker / "config.json").read_text()))
    readers: list[Callable[[], Any]] = [lambda: end_tokens(folder, config)] * 4
    readers += [lambda: LLM(folder, device="cpu"), lambda: load_with_cache(folder, CacheOptions(32), "last", None)]
    for value, read in zip(("</s>", 1.0, [[1]], *[True] * 3), readers, strict=True):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id is not a token"):
            read()
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "eos_token_id": "</s>"}))
    with pytest.raises(UserError, match=r"config\.json"):
        LLM(folder, device="cpu")


def test_no_end_tokens(talker: Path, tmp_path: Path) -> None:
    """`null` in generation_config.json is not that of config.json."""
    with_generation(talker, tmp_path / "m", eos_token_id=None)
    assert LLM(tmp_path / "m", device="cpu").model.generation_config.eos_token_id is None
    config = PreTrainedConfig.from_dict(json.loads((talker / "config.json").read_text()))
    assert end_tokens(tmp_path / "m", config) == []


def test_padding_is_that_of_the_model(talker: Path, tmp_path: Path) -> None:
    """Prompts that are padded with it need no mask, as in transformers."""
    with_generation(talker, tmp_path / "m", eos_token_id=0, pad_token_id=2)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    ids = torch.tensor([[2, 2, 7, 8], [9, 10, 11, 12]])
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=6)
    assert torch.equal(LLM(tmp_path / "m", device="cpu").model.generate(ids, max_new_tokens=6), expected)


@pytest.mark.parametrize("dtype", mostly_slow(("bf16", "fp16", "fp32", None), "bf16", None))
def test_what_transformers_keeps_in_float32(dtype: str | None, talker: Path) -> None:
    """Such as frequencies of rotary positions: rounded, they are off the more the longer the text is."""
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype or "", torch.float32)
    program = load_with_cache(talker, CacheOptions(8), "asked", wanted if dtype else lambda own: own).program
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(talker, dtype=wanted)
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    ours = {**program.state_dict, **program.constants}
    assert {name: each.dtype for name, each in expected.items()}.items() <= {
        name: each.dtype for name, each in ours.items() if isinstance(each, torch.Tensor)
    }.items()


def test_a_folder_with_a_tokenizer_alone(of_bytes: LLM, bytelm: Path) -> None:
    llm, params = LLM(bytelm, tokenizer=bytelm / "tokenizer", device="cpu"), SamplingParams(max_tokens=4)
    answers = [each.generate("def ", params)[0].outputs[0].token_ids for each in (llm, of_bytes)]
    assert answers[0] == answers[1]
    with pytest.raises(UserError, match="/nope: there is no such folder"):
        LLM(bytelm, tokenizer="/nope", device="cpu")


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_tokens_that_the_vocabulary_lacks(token: int, llm: LLM) -> None:
    with pytest.raises(UserError, match=f"generate: a token is outside of the vocabulary; got {token}"):
        llm.model.generate(torch.tensor([[1, token]]), max_new_tokens=2)


def test_chat(llm: LLM, talker: Path) -> None:
    messages = [{"role": "user", "content": "the lazy dog"}]
    params = SamplingParams(max_tokens=12)
    answer = llm.chat(messages, params)[0]
    assert answer.prompt is None
    assert answer.outputs == llm.generate("<user>the lazy dog<assistant>", params)[0].outputs
    assert answer.prompt_token_ids == AutoTokenizer.from_pretrained(talker).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    several = llm.chat([messages, [*messages, {"role": "assistant", "content": "fox"}]], params)
    assert several[0].outputs == answer.outputs and len(several) == 2
    other = llm.chat(
        messages, params, chat_template="{{ messages[0].content }}{{ more }}", chat_template_kwargs={"more": "!"}
    )
    assert other[0].outputs == llm.generate("the lazy dog!", params)[0].outputs
    assert "".join(piece.outputs[0].text for piece in llm.chat_stream(messages, params)) == answer.outputs[0].text


def test_prompts_of_every_kind(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6)
    tokens = llm.generate("fox", params)[0].prompt_token_ids
    expected = llm.generate("fox", params)[0].outputs
    texts: list[Any] = [
        "fox",
        {"prompt": "fox"},
        {"prompt": "fox", "prompt_token_ids": None},
        ["fox"],
        [{"prompt": "fox"}],
    ]
    for given in (*texts, tokens, {"prompt_token_ids": tokens}, [tokens]):
        (output,) = llm.generate(given, params)
        assert output.outputs == expected and output.prompt_token_ids == tokens


def test_logits_processors_of_transformers(llm: LLM) -> None:
    from transformers import LogitsProcessor, LogitsProcessorList

    class OnlyTwo(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            allowed = torch.full_like(scores, -torch.inf)
            allowed[:, 7 + input_ids.shape[1] % 2] = 0
            return scores + allowed

    output = llm.generate("fox", SamplingParams(max_tokens=4), logits_processor=LogitsProcessorList([OnlyTwo()]))[0]
    first = len(output.prompt_token_ids) % 2
    assert output.outputs[0].token_ids == [7 + (first + step) % 2 for step in range(4)]


def test_stats(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=10, ignore_eos=True))
    stats = llm.stats
    assert stats.sequences == 3 and stats.new_tokens == 30 and stats.steps == 10 and not stats.graph
    assert stats.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert stats.first_token_seconds > 0 and stats.decode_seconds > 0
    assert stats.prefill_tokens_per_second == stats.prompt_tokens / stats.first_token_seconds
    assert stats.decode_tokens_per_second == 27 / stats.decode_seconds
    assert stats.gap_us is not None and stats.gap_share is not None and 0 < stats.gap_share < 1
    assert stats.to_json()["decode_tokens_per_second"] == stats.decode_tokens_per_second
    llm.generate("fox", SamplingParams(max_tokens=1))
    assert (llm.stats.new_tokens, llm.stats.gap_us, llm.stats.decode_seconds) == (1, None, 0)


def test_a_stream_that_was_given_up(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10)
    stream = llm.generate_stream("fox", params)
    next(stream)
    expected = llm.generate("größer", params)[0].outputs
    with pytest.raises(UserError, match="the stream: was given up by a later call"):
        next(stream)
    abandoned = llm.generate_stream("fox", params)
    next(abandoned)
    abandoned.close()
    assert llm.generate("größer", params)[0].outputs == expected


def test_threads_wait_for_one_another(llm: LLM) -> None:
    """Another call comes in the middle of a step; it gets the cache behind the end of the first."""
    from transformers import LogitsProcessor, LogitsProcessorList

    params, later = SamplingParams(max_tokens=12), list[Any]()
    expected = [llm.generate(prompt, params)[0].outputs for prompt in ("fox", "größer und")]
    thread = threading.Thread(target=lambda: later.extend(llm.generate("größer und", params)))

    class Meanwhile(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not thread.ident:
                thread.start()
                thread.join(1)
            return scores

    (first,) = llm.generate("fox", params, logits_processor=LogitsProcessorList([Meanwhile()]))
    thread.join()
    assert [first.outputs, later[0].outputs] == expected


def test_a_call_behind_one_that_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made for the first call is not taken for a cache."""
    backend: Any = llm.model.decoder.backend
    expected = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4))
    llm.generate("fox", SamplingParams(max_tokens=1))
    with monkeypatch.context() as patch:
        patch.setattr(backend._calls, "run", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS[:2])
    assert llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4)) == expected


def test_bytelm_answers(of_bytes: LLM, bytelm: Path) -> None:
    llm = of_bytes
    assert llm.notes == ["the model has 256 token ids and no tokenizer: text is bytes"]
    assert "4 feed-forward blocks by the twell ops" in llm.model.decoder.backend.name
    output = llm.generate("import os\n\n\ndef ", SamplingParams(max_tokens=48))[0]
    assert output.prompt_token_ids[:3] == [0, *b"im"]
    assert output.outputs[0].text == bytes(output.outputs[0].token_ids).decode()
    model = LlamaForCausalLM.from_pretrained(bytelm, dtype=torch.float64)
    # Text of the training data: the likeliest bytes are likely by far.
    tokens = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
    logits = model(tokens).logits[0, len(output.prompt_token_ids) - 1 : -1]
    chosen = logits.gather(1, tokens[0, len(output.prompt_token_ids) :, None])[:, 0]
    assert float((logits.max(-1).values - chosen).max()) < 0.15


@pytest.mark.parametrize("layers", ["auto", pytest.param("none", marks=pytest.mark.slow)])
def test_opt(tmp_path: Path, layers: str) -> None:
    """Its blocks are written out in its decoder layers."""
    folder = models.save(models.opt(vocab_size=VOCABULARY, pad_token_id=0, eos_token_id=2), tmp_path, torch.float32)
    models.make_tokenizer(folder)
    llm = LLM(folder, device="cpu", dtype="bf16", layers=layers)
    assert llm.notes == []
    with Ops() as ops:
        outputs = llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=12, ignore_eos=True))
    blocks = 2 if layers == "auto" else 0
    assert f"{blocks} feed-forward blocks by the twell ops" in llm.model.decoder.backend.name
    assert set(ops.counts) == {"append_caches_", *(["mlp"] if blocks else [])} and ops.counts["mlp"] >= 12 * blocks
    model = OPTForCausalLM.from_pretrained(folder)
    for output in outputs:
        tokens = output.prompt_token_ids + output.outputs[0].token_ids
        own = len(output.prompt_token_ids)
        expected = model(torch.tensor([tokens])).logits[0, own - 1 : -1].argmax(-1)
        assert tokens[own:] == expected.tolist() and len(tokens) == own + 12


def test_a_prompt_that_does_not_fit(llm: LLM, talker: Path) -> None:
    with pytest.raises(UserError, match="the prompt: is longer than the cache; got 257 tokens; expected 256 at most"):
        llm.generate([[1] * 257])
    small = LLM(talker, device="cpu", max_model_len=8)
    with pytest.raises(UserError, match="got 9 tokens; expected 8 at most"):
        small.generate([[1] * 9])
    answer = small.generate([[1] * 8], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0]
    assert (len(answer.token_ids), answer.finish_reason) == (1, "length")
    with pytest.raises(UserError, match="max_model_len: is out of range for this model's cache; got 257; "):
        LLM(talker, device="cpu", max_model_len=257)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "a prompt: is neither a text nor tokens; got NoneType"),
        ("a\ud800", r"a prompt: is not a text in UTF-8 \(surrogates not allowed at 1\)"),
        ([], "prompts: there is none"),
        ("", "a prompt: is empty"),
        ([[3, VOCABULARY]], f"a prompt: has a token that the model does not have; got {VOCABULARY}"),
        ([[-1]], "got -1; expected 0 to"),
        ([3.5], "a prompt: is neither a text nor tokens; got float"),
        ([{"text": "a"}], "a prompt: has no such argument; got 'text'"),
        ({"prompt": "a", "promt_token_ids": [1]}, "got 'promt_token_ids'; expected prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data: prompts are text or tokens alone"),
        ({"prompt": None, "prompt_token_ids": None}, "is neither a text nor tokens; got NoneType"),
        (b"fox", "a prompt: is neither a text nor tokens; got b'fox'"),
        ([b"fox", "a"], r"prompts\[0\]: is neither a text nor tokens"),
        (bytearray(b"fox"), "is neither a text nor tokens; got bytearray"),
        (np.array([1.0, 2.0]), r"a prompt: is an array, but not one of token ids; got float64 \[2\]"),
        (torch.tensor(3), r"is an array, but not one of token ids; got int64 \[\]"),
        ([[5], torch.tensor([True])], r"prompts\[1\]: is an array, but not one of token ids; got bool \[1\]"),
        ([True, False], "is neither a text nor tokens"),
        (["a", "a\ud800"], r"prompts\[1\]: is not a text in UTF-8"),
        ([[5], [5] * 9, []], r"prompts\[2\]: is empty"),
        ([[5], [5] * 257, [5]], r"prompts\[1\]: is longer than the cache; got 257 tokens"),
    ],
)
def test_bad_prompts(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(prompts)


@pytest.mark.parametrize(
    "given",
    [
        np.array([5, 6, 7]), torch.tensor([5, 6, 7], dtype=torch.int32), [np.int64(5), 6, np.uint8(7)], (5, 6, 7),
        np.array([[5, 6, 7]], np.uint16), [torch.tensor([5, 6, 7])], [np.array([5, 6, 7])], range(5, 8),
        {"prompt": None, "prompt_token_ids": np.array([5, 6, 7])},
        {"prompt": "said", "prompt_token_ids": [5, 6, 7], "multi_modal_data": None, "cache_salt": "x"},
    ],
)  # fmt: skip
def test_prompts_as_arrays(llm: LLM, given: Any) -> None:
    params = SamplingParams(max_tokens=3)
    (expected,) = llm.generate([[5, 6, 7]], params)
    (found,) = llm.generate(given, params)
    assert found == expected and all(type(token) is int for token in found.prompt_token_ids)
    several = llm.generate(np.array([[5, 6, 7], [8, 9, 10]]), params)
    assert several[0].outputs == expected.outputs and several[1].prompt_token_ids == [8, 9, 10]


def test_what_users_of_vllm_type(llm: LLM) -> None:
    """Values that ask for nothing change nothing; others are answered with a sentence."""
    neutral: dict[str, Any] = {name: values[0] for name, (values, _) in SAMPLING.items() if values is not None}
    idle: dict[str, Any] = {"skip_clone": True}
    plain = llm.generate("fox", SamplingParams(max_tokens=6))
    assert llm.generate("fox", SamplingParams(max_tokens=6, **neutral, **idle, seed=-1)) == plain
    called: dict[str, Any] = {"use_tqdm": False, "lora_request": None, "priority": [0]}
    assert llm.generate("fox", [SamplingParams(max_tokens=6)], **called) == plain
    for name, value, message in (
        ("best_of", 2, "best_of: all answers are returned: use n; got 2; expected None or 1"),
        ("structured_outputs", {"json": {}}, "structured_outputs: answers of a given form are not there"),
        ("max_token", 3, "SamplingParams: has no such argument; got 'max_token'; expected max_tokens or min_tokens"),
    ):
        with pytest.raises(UserError, match=message):
            SamplingParams(**{name: value})
    assert SamplingParams(1, 0.0, 0.0, 1.5, 0.7, 0.9, 5) == SamplingParams(
        repetition_penalty=1.5, temperature=0.7, top_p=0.9, top_k=5
    )
    with pytest.raises(UserError, match="lora_request: there are no adapters"):
        llm.generate("fox", lora_request=1)
    with pytest.raises(UserError, match=r"LLM\.generate: has no such argument; got 'use_tdqm'; expected use_tqdm"):
        llm.generate("fox", use_tdqm=True)
    with pytest.raises(UserError, match="sampling_params: prompts of one call have the same SamplingParams; got 2"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(seed=1)])


def test_engine_arguments_of_vllm(talker: Path) -> None:
    neutral: dict[str, Any] = {name: values[0] for name, (values, _) in ENGINE.items() if values is not None}
    found = LLM(talker, device="cpu", dtype="auto", gpu_memory_utilization=0.8, enforce_eager=True, **neutral)
    assert found.notes[-1] == "these arguments have no effect here: gpu_memory_utilization, enforce_eager"
    for name, value, message in (
        ("tensor_parallel_size", 2, "tensor_parallel_size: a model runs on one GPU; got 2; expected 1"),
        (
            "quantization",
            "awq",
            "quantization: the files say how a model is quantised, and E4M3 is read; weights='fp8:blocks' quantises",
        ),
        ("max_model_length", 5, "twellc.LLM: has no such argument; got 'max_model_length'; expected max_model_len"),
        ("dtype", "int8", "dtype: no such choice; got 'int8'"),
    ):
        with pytest.raises(UserError, match=message):
            LLM(talker, device="cpu", **{name: value})
    backend: Any = LLM(talker, device="cpu", dtype=torch.bfloat16, linear="twell").model.decoder.backend
    assert backend._cache.dtype == "bf16"


def test_what_changes_the_scores_or_ends_an_answer(llm: LLM) -> None:
    """Each as transformers has it; rows of a batch are those that each is alone."""

    def answer(prompt: Any = "fox", **options: Any) -> Any:
        return llm.generate(prompt, SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **options}))[0].outputs[0]

    greedy = answer()
    assert len(set(greedy.token_ids)) > 1
    first = greedy.token_ids[0]
    assert answer(logit_bias={first: -100}).token_ids[0] != first
    assert answer(logit_bias={7: 100}).token_ids == [7] * 12
    assert set(answer(allowed_token_ids=[5, 6]).token_ids) <= {5, 6}
    assert answer(allowed_token_ids=range(VOCABULARY)) == greedy
    word = greedy.text[0]
    assert word not in answer(bad_words=[word]).text
    ended = answer(stop_token_ids=[first], min_tokens=4)
    assert len(ended.token_ids) >= 4 and first not in ended.token_ids[:4]
    stop = greedy.text[:2]
    assert answer(stop=stop, include_stop_str_in_output=True).text == stop and answer(stop=stop).text == ""
    assert answer(stop=stop, min_tokens=11).text == greedy.text
    assert answer(detokenize=False).text == "" and answer(detokenize=False).token_ids == greedy.token_ids
    prompt = [9, 8, 7, 6, 5]
    params = SamplingParams(max_tokens=4)
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=4, truncate_prompt_tokens=2))
    assert output.prompt_token_ids == [6, 5] and output.outputs == llm.generate([6, 5], params)[0].outputs
    longest, params = llm.model.decoder.backend.longest, SamplingParams(max_tokens=None, ignore_eos=True)
    whole = llm.generate(prompt, params)[0].outputs[0]
    assert len(whole.token_ids) == longest - len(prompt) + 1 and whole.finish_reason == "length"
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=-1)
    assert len(llm.generate([5] * (longest + 9), params)[0].prompt_token_ids) == longest
    for options, message in (
        ({"logit_bias": {VOCABULARY: 1}}, f"logit_bias: has a token that the model does not have; got {VOCABULARY}"),
        ({"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids: has a token"),
    ):
        with pytest.raises(UserError, match=message):
            answer(**options)


def test_bad_conversations(llm: LLM) -> None:
    user = {"role": "user", "content": "a"}
    several: list[Any] = [
        "a", user, None, [[]], [[user], []], [{"role": "user"}], [{"content": "a"}], [{**user, "role": 1}],
    ]  # fmt: skip
    for given in several:
        with pytest.raises(UserError, match=r"^(a conversation|messages\[1\]): is not a list of messages; got "):
            llm.chat(given)
    with pytest.raises(UserError, match="a prompt: is not a text in UTF-8"):
        llm.chat([{"role": "user", "content": "a\udcff"}])
    with pytest.raises(UserError, match="prompts: there is none"):
        llm.chat([])


@pytest.mark.parametrize(
    "values",
    [
        {"stop": 5}, {"stop": ["a", ""]}, {"stop": b"a"}, {"stop_token_ids": 5}, {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]}, {"ignore_eos": "no"}, {"skip_special_tokens": 1}, {"max_tokens": 0},
        {"top_k": 2.0}, {"stop": iter("ab")}, {"stop_token_ids": iter([3])}, {"seed": 1 << 63}, {"seed": "1"},
        {"seed": True}, {"temperature": 10**400}, {"repetition_penalty": 10**400}, {"min_tokens": 200}, {"seed": -2},
        {"logit_bias": {"a": 1}}, {"logit_bias": {1: math.nan}}, {"allowed_token_ids": []}, {"bad_words": "a"},
        {"bad_words": [""]}, {"truncate_prompt_tokens": 0}, {"detokenize": 0}, {"include_stop_str_in_output": None},
        {"max_tokens": True}, {"temperature": -1}, {"temperature": math.nan}, {"top_k": -2}, {"top_p": 0},
        {"top_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0}, {"stop": ""}, {"stop": [3]},
        {"n": 0}, {"n": 1.5}, {"logprobs": True}, {"logprobs": -2},
        {"prompt_logprobs": "1"}, {"presence_penalty": math.inf}, {"frequency_penalty": "0"}, {"max_tokens": 10**5000},
    ],
)  # fmt: skip
def test_bad_parameters(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(values))}: (is out of its range|does not take this value); got "):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values", [{"ignore_eos": "yes"}, {"max_tokens": "5"}, {"stop": 5}, {"seed": "1"}, {"n": None}]
)
def test_a_wrong_type_is_no_range(values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(values))}: does not take this value; got "):
        SamplingParams(**values)


@pytest.mark.parametrize("seed", [1 << 70, -1, "a", 1.5])
def test_seeds_that_torch_does_not_take(llm: LLM, seed: Any) -> None:
    with pytest.raises(UserError, match=r"seed: is out of its range; got .*; expected an integer from 0 to 2\^63 - 1"):
        llm.model.generate(torch.tensor([[5]]), do_sample=True, seed=seed, max_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_model_len", "8", "got '8'; expected an integer"),
        ("max_model_len", 8.0, "got 8.0; expected an integer"),
        ("max_model_len", True, "got True; expected an integer"),
        ("dtype", ["fp32"], r"got \['fp32'\]; expected bf16 or fp16 or fp32"),
        ("compiled", "yes", "got 'yes'; expected True or False"),
        ("tokenizer", 5, "got 5; expected a path"),
        ("model", None, "got None; expected a path"),
    ],
)
def test_arguments_of_other_kinds(talker: Path, name: str, value: Any, message: str) -> None:
    given: dict[str, Any] = {"model": talker, "device": "cpu", name: value}
    with pytest.raises(UserError, match=f"^{name}: .*; {message}"):
        LLM(**given)


def test_no_device_is_auto(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert LLM(talker, device=None).model.device == torch.device("cpu")


def test_other_parameters(llm: LLM) -> None:
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    with pytest.raises(UserError, match=r"sampling_params: is not a SamplingParams; got \{"):
        llm.generate("fox", {"max_tokens": 3})  # type: ignore[arg-type]
    # So little that logits divided by it are infinite.
    cold = SamplingParams(max_tokens=9, temperature=1e-40)
    assert llm.generate("fox", cold) == llm.generate("fox", SamplingParams(max_tokens=9))


def test_no_such_model() -> None:
    with pytest.raises(
        UserError, match=r"some/model: there is no such file or folder; expected a Hugging Face directory, "
    ):
        LLM("some/model", device="cpu")


def test_not_a_causal_language_model(t5: Path, archive: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="t5, a T5ForConditionalGeneration: is not a causal language model"):
        LLM(t5, device="cpu")
    rwkv = models.save(models.rwkv(), tmp_path / "rwkv", torch.float32)
    with pytest.raises(UserError, match=r"not one of keys and values alone.* Call twellc\.optimize\(model\)"):
        LLM(rwkv, device="cpu")
    with pytest.raises(UserError, match=r"gated\.pt2"):
        LLM(archive, device="cpu")


def test_the_tokenizer_of_another_folder(llama: Path, talker: Path) -> None:
    assert LLM(llama, tokenizer=talker, device="cpu").get_tokenizer() is not None


def test_no_chat_template(of_bytes: LLM, llm: LLM) -> None:
    with pytest.raises(UserError, match="has no tokenizer, and so no chat template"):
        of_bytes.chat([{"role": "user", "content": "a"}])
    with pytest.raises(UserError, match="a conversation: the chat template cannot write it"):
        llm.chat([{"role": "user", "content": "a"}], chat_template="{{ raise_exception('no') }}")


@pytest.mark.parametrize("device", ["tpu:9", "mps", "cuda:99", "?"])
def test_no_such_device(talker: Path, device: str) -> None:
    with pytest.raises(UserError, match=f"--device {device.replace('?', '.')}: "):
        LLM(talker, device=device)


def test_names_are_in_the_package() -> None:
    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "GenerationStats"} <= set(twellc.__all__)
