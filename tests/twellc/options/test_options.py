"""Options are said three times: to click, to editors, and to the program. They agree."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest

import twellc
from twellc.cli import main
from twellc.options import keywords
from twellc.options.commands import (
    BenchOptions,
    CheckOptions,
    CompileOptions,
    InspectOptions,
    ProfileOptions,
)
from twellc.options.samples import LARGEST_SEED

CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "compile": (CompileOptions, keywords.CompileKeywords),
    "inspect": (InspectOptions, keywords.InspectKeywords),
    "check": (CheckOptions, keywords.CheckKeywords),
    "profile": (ProfileOptions, keywords.ProfileKeywords),
    "bench": (BenchOptions, keywords.BenchKeywords),
}
# What functions take under its own name, or is no affair of the caller.
POSITIONAL = {"model", "output", "candidate"}
INTERNAL = {"in_memory", "attention_forms", "decided"}
# Parameters of commands that no options class has.
PRINTING = {"as_json", "merge", "paths", "data", "measure_gpu", "calibrate", "verbose", "quiet"}


@pytest.mark.parametrize("command", CLASSES)
def test_keywords_are_the_options(command: str) -> None:
    options, given = CLASSES[command]
    names = {field.name for field in fields(options)} - POSITIONAL - INTERNAL
    assert given.__annotations__.keys() <= names
    hints, wanted = get_type_hints(options), get_type_hints(given)
    assert wanted.keys() == names
    for name in names:
        assert _accepts(wanted[name], hints[name]), name


def _accepts(wanted: Any, held: Any) -> bool:
    """Whether keywords of one type stand for options of another: the same, or what is turned into it."""
    return wanted == held or str(held).replace("pathlib._local.", "pathlib.") in _TURNED.get(str(wanted), ())


_TURNED = {
    str(keywords.AnyPath | None): ("pathlib.Path | None",),
    "collections.abc.Sequence[str]": ("tuple[str, ...]",),
    "collections.abc.Sequence[str | os.PathLike[str]]": ("tuple[pathlib.Path, ...]",),
    "collections.abc.Sequence[str | twellc.options.declared_inputs.InputDeclaration]": (
        "tuple[twellc.options.declared_inputs.InputDeclaration, ...]",
    ),
    "collections.abc.Sequence[str | tuple[str, twellc.export.shapes.ShapeRange]]": (
        "tuple[tuple[str, twellc.export.shapes.ShapeRange], ...]",
    ),
    "collections.abc.Sequence[str | tuple[int, ...]]": ("tuple[tuple[int, ...], ...]",),
}


@pytest.mark.parametrize("command", CLASSES)
def test_the_command_line_has_every_option(command: str) -> None:
    options, _ = CLASSES[command]
    names = {field.name for field in fields(options)} - INTERNAL
    taken = {parameter.name for parameter in main.commands[command].params} - PRINTING
    taken -= {"output"} if command == "bench" else set()  # of --measure-gpu
    assert taken == names - ({"model"} if command == "profile" else set())


@pytest.mark.parametrize("command", CLASSES)
def test_defaults_are_the_same(command: str) -> None:
    """What click has as a default is what the class has: a function called without options does as the command."""
    options, _ = CLASSES[command]
    defaults = {field.name: field.default for field in fields(options)}
    given = main.commands[command].make_context(command, [], resilient_parsing=True).params
    own = {name: value for name, value in given.items() if name in defaults.keys() - POSITIONAL}
    assert own == {name: defaults[name] for name in own}


def test_a_seed_has_one_range() -> None:
    ranges = [
        (parameter.type.min, parameter.type.max)
        for command in main.commands.values()
        for parameter in command.params
        if parameter.name == "seed" and isinstance(parameter.type, click.IntRange)
    ]
    assert set(ranges) == {(0, LARGEST_SEED)}


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 1.5, True])
def test_a_seed_out_of_range_is_refused(seed: Any, archive: Path, tmp_path: Path) -> None:
    with pytest.raises(twellc.UserError, match=r"--seed: is not a seed; got .*; expected an integer from 0 to"):
        twellc.check(archive, tmp_path / "m.onnx", seed=seed)


@pytest.mark.parametrize("command", ["compile", "inspect", "profile", "bench"])
def test_whatever_traces_takes_padding_and_logits(command: str) -> None:
    assert {"padding", "logits", "dtype"} <= {parameter.name for parameter in main.commands[command].params}


@pytest.mark.parametrize(("batch", "sequences"), [(1, [1]), (3, [3, 1]), (8, [8, 1]), (32, [32, 8, 1])])
def test_profiles_of_a_cache(batch: int, sequences: list[int]) -> None:
    options = CompileOptions(Path("m"), kv_cache=64, batch=batch, prefill_chunk=16)
    (_, prompts), *steps = options.requested_profiles
    assert (prompts.min, prompts.opt, prompts.max) == ((1, 1), (1, 16), (batch, 16))
    assert [(each.min, each.opt, each.max) for _, each in steps] == [((1, 1), (n, 1), (n, 1)) for n in sequences]


def test_inspect_traces_with_a_mask(llama: Path) -> None:
    """The mask is an input of the attention: without one it is causal."""
    kinds = {
        padding: {block.mask for block in twellc.inspect(llama, padding=padding).description.attention or []}
        for padding in ("none", "mask")
    }
    assert kinds == {"none": {"causal"}, "mask": {"tensor"}}


def test_inspect_decides_as_compile(llama: Path) -> None:
    assert [layer.decision for layer in twellc.inspect(llama, layers=r"layers\.1").layers] == ["dense", "twell"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("layers", "none", "--layers what becomes of the blocks is decided already"),
        ("compression", 4, "--compression what becomes of the blocks is decided already"),
        ("padding", "mask", "--padding mask only a causal Hugging Face model leaves the choice"),
    ],
)
def test_of_what_is_compiled_nothing_is_decided(
    option: str, value: Any, message: str, archive: Path, tmp_path: Path
) -> None:
    graph = tmp_path / "m.onnx"
    twellc.compile(archive, backend="none", onnx=graph)
    inspect: Callable[..., Any] = twellc.inspect
    with pytest.raises(twellc.UserError) as caught:
        inspect(os.fspath(graph), **{option: value})
    assert message in str(caught.value).replace(":", "")
