"""Every value of every option with a list of values, in all that takes it: it has an effect, or is refused."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click.testing
import onnx
import pytest
import torch

import twellc
from tests import models
from twellc import LLM, SamplingParams
from twellc.base.errors import UserError
from twellc.cli import main
from twellc.eager.fp8_linear import Fp8Linear
from twellc.loaders.huggingface import open_directory
from twellc.options.commands import BenchOptions, CompileOptions, GenerateOptions, InspectOptions
from twellc.options.option import option_of

Given = dict[str, Any]
# What words in capitals stand for where an option also takes others than those that it lists.
_FOR = {"REGEX": r"layers\.1", "cuda[:N]": "cuda:7"}


def values_of(*kinds: type[Any]) -> dict[str, tuple[Any, ...]]:
    """Return the values of the options that list them, by name."""
    found: dict[str, tuple[Any, ...]] = {}
    for kind in kinds:
        for field in fields(kind):
            how = option_of(field)
            if how is None:
                continue
            listed = how.kind if isinstance(how.kind, tuple) else ()
            if not listed and how.metavar and "|" in how.metavar:
                listed = tuple(_FOR.get(each, each) for each in how.metavar.split("|") if each not in ("GPU", "FILE"))
            if listed:
                found[field.name] = listed
    return found


EVERY = values_of(CompileOptions, InspectOptions, BenchOptions, GenerateOptions)


# ---- what takes options, each returning what came of them ----


def compiled(folder: Path, work: Path, **given: Any) -> Any:
    plan = {"output": work / "m.plan"} if given.get("backend") != "none" else {}
    twellc.compile(folder, onnx=work / "m.onnx", overwrite=True, **plan, **given)
    graph = onnx.load(work / "m.onnx")
    del graph.metadata_props[:]
    return graph.SerializeToString(deterministic=True), *(each.exists() for each in plan.values())


def inspected(folder: Path, work: Path, **given: Any) -> Any:
    found = twellc.inspect(folder, **given)
    return repr((found.description, found.cost, found.kernels))


def benched(folder: Path, work: Path, **given: Any) -> Any:
    found = twellc.bench(folder, shapes=["1x1"], repeats=1, compiled=False, **given)
    return repr((found.layers, found.inputs, found.dtype))


def optimized(folder: Path, work: Path, **given: Any) -> Any:
    model, _, _ = open_directory(folder)
    twellc.optimize(model, **given)
    narrow = [path for path, each in model.named_modules() if isinstance(each, Fp8Linear)]
    blocks = [(each.module, each.weights) for each in twellc.optimized_blocks(model)]
    options = [vars(each)["_twellc"][0].options for each in model.modules() if "_twellc" in vars(each)]
    return repr((narrow, blocks, options))


def answered(folder: Path, work: Path, **given: Any) -> Any:
    llm = LLM(folder, **{"device": "cpu", **given})
    backend: Any = llm.model.decoder.backend
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, logprobs=1, detokenize=False))
    return repr((backend.name, backend.device, answer.outputs[0].logprobs))


def generated(folder: Path, work: Path, **given: Any) -> Any:
    options = [each for name, value in given.items() for each in (f"--{name.replace('_', '-')}", str(value))]
    shared = ["generate", str(folder), "--prompt", "a", "--max-tokens", "2", "--stats"]
    shared += [] if "device" in given else ["--device", "cpu"]
    done = click.testing.CliRunner().invoke(main, [*shared, *options])
    if done.exit_code == 2:
        raise UserError("", done.stderr)
    assert done.exit_code == 0, done.output
    return re.search(r"Note: (torch on .*?); prompts", done.stderr.replace("\n", " "))[1]  # type: ignore[index]


# Of each: its function, which of the values it takes, and what is given besides.
CONSUMERS: dict[str, tuple[Callable[..., Any], dict[str, tuple[Any, ...]], Given]] = {
    "compile": (compiled, values_of(CompileOptions), {"backend": "none"}),
    "inspect": (inspected, values_of(InspectOptions), {}),
    "bench": (benched, values_of(BenchOptions), {}),
    "optimize": (
        optimized,
        {name: EVERY[name] for name in inspect.signature(twellc.optimize).parameters if name in EVERY},
        {},
    ),
    "LLM": (answered, {name: EVERY[name] for name in inspect.signature(LLM).parameters if name in EVERY}, {}),
    "generate": (generated, values_of(GenerateOptions), {}),
}
# Values that come to what is there without them, by option: the model is bf16, without a cache or a profile.
SAME: dict[str, set[Any]] = {
    "weights": {"keep"},
    "linear": {"auto", "tensorrt"},  # without a profile `auto` leaves linear layers
    "layers": {"auto", "all"},
    "compression": {8},
    "dtype": {"bf16"},
    "padding": {"none"},
    "logits": {"all"},
    "backend": {"none"},
    "attention": {"auto", "tensorrt"},
    "kv_cache_dtype": {"auto"},
    "gpu": {"H100"},
    "device": {"cpu"} if torch.cuda.is_available() else {"cpu", "auto"},
}
# What these take for a plan, and what they return does not show: only that they run is looked at.
UNSEEN = {("inspect", "logits"), ("inspect", "compression")}
UNSEEN |= {("generate", "dtype")}
# Of plans, which are not built here, and of how a block packs: neither is in what `bench` returns.
UNSEEN |= {("bench", name) for name in ("logits", "padding", "linear", "compression")}


def cases() -> Iterator[Any]:
    for consumer, (_, options, _) in CONSUMERS.items():
        marks = [pytest.mark.gpu, pytest.mark.slow] if consumer == "bench" else []
        for name, values in options.items():
            for value in values:
                yield pytest.param(consumer, name, value, id=f"{consumer}-{name}-{value}", marks=marks)


@pytest.mark.sampled(12)
@pytest.mark.usefixtures("compiles_here")
@pytest.mark.parametrize(("consumer", "name", "value"), cases())
def test_it_has_an_effect_or_is_refused(
    consumer: str, name: str, value: Any, tiny: Path, tmp_path: Path, usual: Callable[..., Any]
) -> None:
    call, _, besides = CONSUMERS[consumer]
    before = usual(consumer)
    try:
        found = call(tiny, tmp_path, **besides | {name: value})
    except UserError as error:
        assert value not in SAME[name] or name in ("linear", "device", "backend"), error
        assert len(str(error)) > 20
        return
    if (consumer, name) in UNSEEN or value == "tensorrt":  # what `auto` comes to, for another reason
        return
    assert (found == before) == (value in SAME[name]), f"{consumer}: {name}={value}"


@pytest.mark.slow
@pytest.mark.parametrize("consumer", ["compile", "inspect", "LLM"])
def test_fp8_means_linear_layers_too(consumer: str, tiny: Path, tmp_path: Path) -> None:
    """Where twellc computes them each value of `weights` is another."""
    call, options, besides = CONSUMERS[consumer]
    given = besides | {"linear": "twell"}
    found = {each: call(tiny, tmp_path, **given, weights=each) for each in options["weights"]}
    assert len(set(found.values())) == len(found)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes."""
    return models.save(models.llama(vocab_size=256), tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def usual(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that gives what comes of a consumer without options."""
    folder = tmp_path_factory.mktemp("usual")

    @functools.cache
    def run(consumer: str) -> Any:
        call, _, besides = CONSUMERS[consumer]
        return call(tiny, folder, **besides)

    return run
