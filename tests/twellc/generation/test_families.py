"""Greedy tokens, drawn tokens and logits are those of transformers' own `generate`, for rows of unequal lengths."""

import functools
import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig

from tests import models
from tests.caches import IN_TORCH, mostly_slow
from tests.twellc.generation.conftest import Family
from tests.twellc.generation.shared import CPU, LENGTHS, by_a_plan, generate_alone, made, prompts
from twellc.base.errors import UserError
from twellc.generation.directory import load_directory
from twellc.generation.model import CausalModel
from twellc.loaders.cached import load_with_cache
from twellc.options.source import CacheOptions

Pair = tuple[CausalModel, Any]


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        IN_TORCH,
        "llama",
        "opt",
        "smollm3",
        "qwen3-window",
        "phi3-window",
        "gemma2",
        "falcon-alibi",
        "deepseek-v2",
        "mixtral",
        "nemotron-h-experts",
    ),
)
def test_tokens_are_those_of_transformers(name: str, family: Family) -> None:
    """With prompts in chunks; of some families also at once."""
    folder, model = family(name)
    ours = made(folder, model, 4)
    compare(ours, model)
    if name in ("llama", "gemma2"):
        ours.decoder.backend.chunk = 1 << 20
        compare(ours, model)


def compare(ours: CausalModel, model: Any) -> None:
    input_ids, seen = prompts()
    given = {"attention_mask": seen, "max_new_tokens": 14}
    greedy = ours.generate(input_ids, **given)
    assert torch.equal(greedy, model.generate(input_ids, **given, do_sample=False))
    assert greedy[:, 12:].unique().numel() > 5, "a model that says one thing shows little"
    for drawn in (
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.3},
    ):
        expected = generate_alone(model, input_ids, seen, 5, max_new_tokens=14, do_sample=True, **drawn)
        assert torch.equal(ours.generate(input_ids, **given, do_sample=True, seed=5, **drawn), expected)


def test_a_cache_is_gone_when_there_is_a_larger_one(family: Family) -> None:
    """Its memory is free at once: what refers to itself waits for Python's garbage collector."""
    folder, _ = family("llama")
    gc.collect()
    gc.disable()
    try:
        backend, *_ = load_directory(folder, CPU)
        backend.begin(2, 10)
        keys = weakref.ref(backend._memory[0])
        assert keys() is not None
        backend.begin(3, 10)
        assert keys() is None
    finally:
        gc.enable()


def test_every_size_is_compiled(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch stops after eight sizes of one function, here after two; prompts and steps go on."""
    folder, model = family("llama")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    backend, *_ = load_directory(folder, replace(CPU, compiled=True))
    ours = CausalModel(backend, model.config, GenerationConfig(pad_token_id=0, eos_token_id=2))
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for batch, width in ((1, 3), (2, 5), (3, 9)):
            input_ids = torch.randint(3, 96, (batch, width))
            expected = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=3)
            assert torch.equal(ours.generate(input_ids, max_new_tokens=3), expected[:, : width + 3])


class OutOfMemory(TorchDispatchMode):  # type: ignore[misc]
    """Lets one operation fail."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.count, self._last = 0, last

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        self.count += 1
        if self.count == self._last:
            raise torch.OutOfMemoryError("no memory is left")
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_memory_that_ends(family: Family, step: int) -> None:
    """Wherever a call fails, the next one is right, with as many rows as the failed one or as one before."""
    folder, model = family("llama")
    fails_anywhere(made(folder, model, 4), step)


def fails_anywhere(ours: CausalModel, step: int) -> None:
    """Check that it answers as before after calls that end at one operation or another."""
    batches = [torch.randint(3, 96, (batch, 6)) for batch in (2, 3)]
    two, three = ({"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3} for ids in batches)
    expected = [ours.generate(**given) for given in (two, three)]
    ours.generate(**two)
    with OutOfMemory(0) as counted:
        ours.generate(**three)
    assert counted.count > 200
    for last in [*range(1, 60, step), *range(60, counted.count, counted.count // 10)]:
        ours.generate(**two)
        with OutOfMemory(last), pytest.raises(torch.OutOfMemoryError):
            ours.generate(**three)
        found = [ours.generate(**given) for given in ((two, three), (three, two))[last % 2]]
        assert all(map(torch.equal, found, expected[:: (1, -1)[last % 2]]))


def test_logits(pair: Pair) -> None:
    ours, model = pair
    input_ids, seen = prompts()
    logits = ours(input_ids, seen).logits
    assert logits.shape == (3, 1, 96)
    for row, length in enumerate(LENGTHS):
        expected = model(input_ids[row : row + 1, -length:]).logits[:, -1:]
        torch.testing.assert_close(logits[row : row + 1], expected, rtol=1e-4, atol=1e-5)


def test_cache_filled_to_its_last_place(pair: Pair) -> None:
    """64 positions: a row of n tokens gets 65 - n more, the last of which the cache need not hold."""
    ours, model = pair
    input_ids, seen = prompts()
    steps = list(ours.steps(input_ids, attention_mask=seen, max_new_tokens=500, ignore_eos=True))
    assert len(steps) == 65 - min(LENGTHS)
    for row, length in enumerate(LENGTHS):
        own = [step.tokens[row] for step in steps[: 65 - length]]
        assert [step.ended[row] for step in steps].index(True) == 64 - length
        alone = input_ids[row : row + 1, -length:]
        for token in own:  # without any cache
            assert token == int(model(alone).logits[0, -1].argmax())
            alone = torch.cat([alone, torch.tensor([[token]])], dim=1)
    with pytest.raises(UserError, match="the prompt: is longer than the cache; got 65 tokens; expected 64 at most"):
        ours.generate(torch.ones(1, 65, dtype=torch.int64), max_new_tokens=1)


@pytest.mark.parametrize(("name", "kind", "room"), [("Phi3", "longrope", 15), ("llama", "dynamic", 55)])
def test_rotary_frequencies_that_change(name: str, kind: str, room: int, family: Family) -> None:
    """Up to the length where they do tokens are those of transformers; there a text ends."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 24}
    folder, model = family(name, rope_parameters=rope, original_max_position_embeddings=24)
    ours, input_ids = made(folder, model), torch.randint(3, 96, (1, 10))
    tokens = ours.generate(input_ids, max_new_tokens=99, ignore_eos=True)
    assert tokens.shape[1] == 10 + room
    model.generation_config.eos_token_id = None
    expected = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=room)
    # The last token stands behind the last place; transformers has all anew for it.
    assert torch.equal(tokens[:, :-1], expected[:, :-1])


@pytest.mark.parametrize("name", ["GPTNeo", pytest.param("Roberta", marks=pytest.mark.slow)])
def test_other_logits_over_a_cache(name: str, family: Family) -> None:
    """GPT-Neo has windows by its own masks; RoBERTa's positions begin behind that of padding."""
    windows = {"attention_types": [[["global", "local"], 1]], "window_size": 6, "num_layers": 2, "num_heads": 4}
    folder, _ = family(name, **(windows if name == "GPTNeo" else {"is_decoder": True}))
    message = r"computes other logits over a cache than without one; got \w+, off by"
    with pytest.raises(UserError, match=f"the model {message}"):
        load_directory(folder, CPU)
    with pytest.raises(UserError, match=f"--kv-cache: .* {message}"):
        load_with_cache(folder, CacheOptions(32), "last", torch.float32)


def test_positions_that_do_not_begin_at_0(family: Family) -> None:
    """XLM-RoBERTa's begin behind that of padding; in bfloat16 rounding could explain by how much it is off."""
    folder, _ = family("XLMRoberta", is_decoder=True)
    with pytest.raises(UserError, match=r"got XLMRobertaForCausalLM, off by \d+\.\d% at positions from 0 on"):
        load_directory(folder, replace(CPU, dtype="bf16"))


def llama4(**changes: Any) -> Any:
    """Its last layer has no rotary positions; there queries are scaled by position, which it asks the cache for."""
    options = {"intermediate_size": 64, "intermediate_size_mlp": 64, "num_hidden_layers": 4, "head_dim": 8}
    options |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "attention_chunk_size": 6, "pad_token_id": 0}
    config = transformers.Llama4TextConfig(
        **{**models.SMALL, **options, **changes}, moe_layers=[], no_rope_layers=[1, 1, 1, 0], attn_scale=0.5
    )
    return models._seeded(transformers.Llama4ForCausalLM, config)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_one_number_for_the_length_of_all_rows(dtype: torch.dtype, tmp_path: Path) -> None:
    """It is right for none of several rows: refused, also where its effect is smaller than rounding."""
    folder = models.save(llama4(floor_scale=16), tmp_path / "model", dtype)
    message = (
        r"computes other logits over a cache than without one; got Llama4ForCausalLM, (off by|which asks how long)"
    )
    with pytest.raises(UserError, match=message):
        load_directory(folder, CPU)
    with pytest.raises(UserError, match=message):
        load_with_cache(folder, CacheOptions(32), "last", dtype)


@pytest.mark.parametrize("changes", [{"floor_scale": 65}, {"attn_temperature_tuning": False}])
def test_scales_by_position_behind_the_last_place(changes: dict[str, Any], tmp_path: Path) -> None:
    model = llama4(**changes)
    ours = made(models.save(model, tmp_path / "model", torch.float32), model, 5)
    input_ids = torch.randint(3, 96, (1, 20))
    logits = ours(input_ids).logits
    torch.testing.assert_close(logits, model(input_ids, use_cache=False).logits[:, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [pytest.param(1100, marks=pytest.mark.slow), 3000])
def test_a_window_of_its_own_behind_thousands_of_places(window: int, family: Family) -> None:
    options = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4}
    folder, _ = family("GPTNeo", **options, window_size=window, max_position_embeddings=4096)
    with pytest.raises(UserError, match=r"computes other logits over a cache than without one; got \w+, off by .* of "):
        load_directory(folder, CPU)


def test_models_that_compute_nothing(family: Family, tmp_path: Path) -> None:
    folder, model = family("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] = torch.nan
    models.save(model, tmp_path, torch.float32)
    with pytest.raises(UserError, match=r"the model computes logits that are NaN; got LlamaForCausalLM in float32"):
        load_directory(tmp_path, CPU)
    with pytest.raises(UserError, match=f"--kv-cache: {tmp_path}: the model computes logits that are NaN; .* bfloat16"):
        load_with_cache(tmp_path, CacheOptions(32), "last", torch.bfloat16)
    folder, _ = family("llama", num_key_value_heads=3)  # of 4 heads
    with pytest.raises(UserError, match=r"the model cannot be run \(.*\); got LlamaForCausalLM\. Check that"):
        load_directory(folder, CPU)


def test_tokens_that_the_model_cannot_compute(family: Family) -> None:
    """What they leave in the cache reaches no later call, and none stands behind the end of a row."""
    folder, model = family("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[[0, 90]] = torch.nan
    models.save(model, folder, torch.float32)
    ours, prompt = made(folder, model), torch.tensor([5, 6])
    for each in (ours, by_a_plan(folder, 2, ours.generation_config, 96)):
        expected = each.generate(prompt[None], max_new_tokens=5)
        each.generate(torch.full((1, 9), 90), max_new_tokens=5)
        assert torch.equal(each.generate(prompt[None], max_new_tokens=5), expected)
        longer = torch.tensor([[0, 0, 0, 5, 6], [7, 8, 9, 10, 11]])
        found = each.generate(longer, attention_mask=longer.clamp(max=1), max_new_tokens=5)
        assert torch.equal(found[:1, 3:], expected)


def test_criteria_and_streamers_of_transformers(pair: Pair) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    class Eleventh(StoppingCriteria):  # type: ignore[misc]
        """Ends a text of seven tokens at its eleventh; sees each without padding."""

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] == 11 and bool((input_ids > 2).all()))

    class Kept(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.clone())

        def end(self) -> None:
            self.seen.append("end")

    (ours, model), (input_ids, seen) = pair, prompts()
    given: dict[str, Any] = {"max_new_tokens": 9, "stopping_criteria": StoppingCriteriaList([Eleventh()])}
    kept = Kept()
    tokens = ours.generate(input_ids, attention_mask=seen, streamer=kept, **given)
    assert torch.equal(tokens, generate_alone(model, input_ids, seen, **given))
    assert (tokens[0, 16:] == 0).all() and (tokens[1, 16:] != 0).any()
    assert kept.seen[-1] == "end" and torch.equal(kept.seen[0], input_ids)
    assert torch.equal(torch.stack(kept.seen[1:-1], dim=1), tokens[:, 12:])


def test_arguments_of_transformers(pair: Pair) -> None:
    """As people write them: a tokenizer's result, a configuration, and several answers of a prompt."""
    (ours, model), (input_ids, seen) = pair, prompts()
    given = {"input_ids": input_ids, "attention_mask": seen}
    expected = model.generate(**given, max_new_tokens=7)
    assert torch.equal(ours.generate(**given, max_new_tokens=7, use_cache=True), expected)
    config = GenerationConfig(max_new_tokens=7, do_sample=True, num_return_sequences=2)
    expected = generate_alone(model, input_ids, seen, 5, generation_config=config)
    assert expected.shape == (6, 19)
    assert torch.equal(ours.generate(input_ids, config, attention_mask=seen, seed=5), expected)
    for arguments in ((), (input_ids,)):
        with pytest.raises(UserError, match="generate: takes either inputs or input_ids"):
            ours.generate(*arguments, **({"input_ids": input_ids} if arguments else {}))
    for nothing in (input_ids[:, :0], input_ids[:0], input_ids[0]):
        with pytest.raises(UserError, match="generate: has nothing to go on from"):
            ours.generate(nothing)


def test_stop_strings(talker: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    model, tokenizer = LlamaForCausalLM.from_pretrained(talker), AutoTokenizer.from_pretrained(talker)
    ours, given = made(talker, model, 1 << 20), tokenizer("fox", return_tensors="pt")
    whole = model.generate(**given, max_new_tokens=20)
    stop = tokenizer.decode(whole[0, given["input_ids"].shape[1] :][:2])
    expected = model.generate(**given, max_new_tokens=20, stop_strings=[stop], tokenizer=tokenizer)
    assert expected.shape[1] < whole.shape[1]
    assert torch.equal(ours.generate(**given, max_new_tokens=20, stop_strings=[stop], tokenizer=tokenizer), expected)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"inputs_embeds": torch.zeros(3, 12, 32)}, "inputs_embeds"),
        ({"position_ids": torch.arange(12)[None]}, "position_ids"),
        ({"past_key_values": DynamicCache()}, "past_key_values"),
    ],
)
def test_what_is_not_there(asked: dict[str, Any], named: str, pair: Pair) -> None:
    (ours, _), (input_ids, _) = pair, prompts()
    with pytest.raises(UserError, match=f"neither searches over beams, nor .*; got {named};"):
        ours.generate(input_ids, max_new_tokens=2, **asked)


def test_padding_on_the_right(pair: Pair) -> None:
    (ours, _), (input_ids, _) = pair, prompts()
    with pytest.raises(UserError, match="attention_mask: does not say that prompts are padded on the left"):
        ours.generate(input_ids, attention_mask=torch.tensor([[1] * 11 + [0]] * 3), max_new_tokens=2)
