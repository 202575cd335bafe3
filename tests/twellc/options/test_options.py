"""Options are declared once, as fields; what Python's type checkers see of them, a TypedDict, agrees with that."""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import twellc
from twellc import SamplingParams
from twellc.cli import main
from twellc.options import keywords
from twellc.options.commands import (
    BenchOptions,
    CheckOptions,
    CompileOptions,
    GenerateOptions,
    InspectOptions,
    ProfileOptions,
)
from twellc.options.option import LARGEST_SEED, declared, descriptions

CLASSES: dict[str, tuple[type[Any], type[Any]]] = {
    "compile": (CompileOptions, keywords.CompileKeywords),
    "inspect": (InspectOptions, keywords.InspectKeywords),
    "check": (CheckOptions, keywords.CheckKeywords),
    "profile": (ProfileOptions, keywords.ProfileKeywords),
    "bench": (BenchOptions, keywords.BenchKeywords),
}
# Types that stand for others, which keywords are turned into.
TURNED = {
    str(keywords.AnyPath | None): "pathlib.Path | None",
    "collections.abc.Sequence[str]": "tuple[str, ...]",
    "collections.abc.Sequence[str | os.PathLike[str]]": "tuple[pathlib.Path, ...]",
    "collections.abc.Sequence[str | twellc.options.declared_inputs.InputDeclaration]": (
        "tuple[twellc.options.declared_inputs.InputDeclaration, ...]"
    ),
    "collections.abc.Sequence[str | tuple[str, twellc.export.shapes.ShapeRange]]": (
        "tuple[tuple[str, twellc.export.shapes.ShapeRange], ...]"
    ),
    "collections.abc.Sequence[str | tuple[int, ...]]": "tuple[tuple[int, ...], ...]",
}


@pytest.mark.parametrize("command", CLASSES)
def test_keywords_are_the_options(command: str) -> None:
    options, given = CLASSES[command]
    hints, wanted = get_type_hints(options), get_type_hints(given)
    names = {field.name for field in declared(options)} - {"output"}
    assert wanted.keys() - get_type_hints(keywords.RunKeywords).keys() == names
    for name in names:
        kind = wanted[name]
        held = str(hints[name]).replace("pathlib._local.", "pathlib.")
        assert kind == hints[name] or TURNED.get(str(kind)) == held, name


@pytest.mark.parametrize("command", CLASSES)
def test_a_command_gives_what_its_function_takes_by_default(command: str) -> None:
    """Called without options, a function does as the command."""
    options, _ = CLASSES[command]
    defaults = {field.name: field.default for field in declared(options)}
    given = main.commands[command].make_context(command, [], resilient_parsing=True).params
    assert {name: given[name] or value for name, value in defaults.items()} == defaults


def test_answers_are_chosen_by_the_same_defaults() -> None:
    given, params = GenerateOptions(), SamplingParams()
    shared = {field.name for field in fields(given)} & {field.name for field in fields(params)}
    assert len(shared) == 8
    assert all((getattr(given, name) or None) == (getattr(params, name) or None) for name in shared)


@pytest.mark.parametrize("command", CLASSES)
def test_every_field_is_described(command: str) -> None:
    options, _ = CLASSES[command]
    assert descriptions(options).keys() == {field.name for field in fields(options)}


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 1.5, True])
def test_a_seed_out_of_range_is_refused(seed: Any, archive: Path, tmp_path: Path) -> None:
    with pytest.raises(twellc.UserError, match=r"--seed: is not a seed; got .*; expected an integer from 0 to"):
        twellc.check(archive, tmp_path / "m.onnx", seed=seed)


@pytest.mark.parametrize(("batch", "sequences"), [(1, [1]), (3, [3, 1]), (8, [8, 1]), (32, [32, 8, 1])])
def test_profiles_of_a_cache(batch: int, sequences: list[int]) -> None:
    options = CompileOptions(Path("m"), kv_cache=64, batch=batch, prefill_chunk=16)
    (_, prompts), *steps = options.requested_profiles
    assert (prompts.min, prompts.opt, prompts.max) == ((1, 1), (1, 16), (batch, 16))
    assert [(each.min, each.opt, each.max) for _, each in steps] == [((1, 1), (n, 1), (n, 1)) for n in sequences]


@pytest.mark.usefixtures("remembered_models")
def test_inspect_traces_with_a_mask(llama: Path) -> None:
    """The mask is an input of the attention: without one it is causal."""
    kinds = {
        padding: {block.mask for block in twellc.inspect(llama, padding=padding).description.attention or []}
        for padding in ("none", "mask")
    }
    assert kinds == {"none": {"causal"}, "mask": {"tensor"}}


@pytest.mark.usefixtures("remembered_models")
def test_inspect_decides_as_compile(llama: Path) -> None:
    assert [layer.decision for layer in twellc.inspect(llama, layers=r"layers\.1").layers] == ["dense", "twell"]


@pytest.mark.usefixtures("cli", "remembered_models")
def test_of_what_is_compiled_nothing_is_decided(archive: Path, tmp_path: Path) -> None:
    graph = tmp_path / "m.onnx"
    twellc.compile(archive, backend="none", onnx=graph)
    inspect: Callable[..., Any] = twellc.inspect
    cases: tuple[tuple[str, Any, str], ...] = (
        ("layers", "none", "--layers what becomes of the blocks is decided already"),
        ("compression", 4, "--compression what becomes of the blocks is decided already"),
        ("padding", "mask", "--padding mask only a causal Hugging Face model leaves the choice"),
    )
    for option, value, message in cases:
        with pytest.raises(twellc.UserError) as caught:
            inspect(os.fspath(graph), **{option: value})
        assert message in str(caught.value).replace(":", "")
